"""Figures in words, as they are printed."""

from typing import Any

BYTES = ("peak allocated", "peak active", "peak reserved", "bytes sent")


def in_words(figures: dict[str, Any]) -> dict[str, str]:
    """Each in its unit. What a figure is made of stands below it, indented."""
    words = {}
    for name, value in figures.items():
        if name in ("peak allocated is", "races", "against"):  # printed in another way
            continue
        if name in BYTES:
            words[name] = _size(value)
            if name == "peak allocated":
                its = figures.get("peak allocated is", {})
                words |= {f"  {kind}": _size(nbytes) for kind, nbytes in its.items()}
        elif name == "flops":
            words[name] = f"{value / 1e12:,.2f} T"
        elif name in ("tokens/s, range", "samples/s, range"):
            words[name.replace("range", "probably")] = " to ".join(map(_rounded, value))
        elif name in ("MFU", "HFU"):
            words[name] = f"{value:.1%}"
        elif "/s" in name or "TFLOPS" in name:
            words[name] = f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"
        elif "dollars" in name:
            words[name] = f"{value:,.2f} $"
        else:
            words[name] = f"{value * 1e3:,.1f} ms" if isinstance(value, float) else str(value)
    return words


def page(figures: dict[str, Any]) -> str:
    """A line for each figure; what is a sentence comes last, without its name."""
    words = in_words(figures)
    sentences = [words.pop(name) for name in ("why", "advice") if name in words]
    return "\n".join([*(f"{name:28} {words:>14}" for name, words in words.items()), *sentences])


def _rounded(number: float) -> str:
    """To two digits: more would promise too much."""
    return f"{float(f'{number:.2g}'):,.0f}"


def _size(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"
