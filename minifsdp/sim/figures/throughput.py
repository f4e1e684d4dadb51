"""What a step achieves: tokens, flops, and dollars.

*Model flops* are three times the forward's, however they were computed: a backward has two products
for each of the forward. Attention counts in full, though a causal one does half of it. MFU is their
share of what the data sheet says; HFU that of all flops, with those of activations that were
computed again. Source: PaLM, arXiv:2204.02311, appendix B; Korthikanti et al., arXiv:2205.05198.
"""

from typing import Any

from minifsdp.sim.figures.report import last_step
from minifsdp.sim.tape import Entry, Op, Phase


def model_flops(tape: list[Entry]) -> float:
    """Of the last step, if its phases are on the tape; else 0."""
    entries, *_ = last_step(tape)
    phase, flops = "", 0.0
    for entry in entries:
        if isinstance(entry, Phase):
            phase = entry.name
        elif isinstance(entry, Op) and phase == "forward":
            flops += entry.flops
    return 3 * flops


def throughput(
    figures: dict[str, Any],
    model: float,
    peak: float,
    samples: int,
    length: int | None,
    price: float | None = None,
) -> dict[str, Any]:
    """Figures of one GPU.

    Args:
        figures: of report.py.
        model: the model flops of the step.
        peak: flops per second of the data sheet, in the precision of the run.
        samples: of the step, on this GPU, of ``length`` tokens (of a picture: patches) each; None:
            they have none.
        price: dollars per GPU and hour.
    """
    step = figures["step"]
    found: dict[str, Any] = {"samples/s per GPU": samples / step}
    if length is not None:
        found["tokens/s per GPU"] = samples * length / step
    found |= {
        "TFLOPS per GPU": model / step / 1e12,
        "MFU": model / step / peak,
        "HFU": figures["flops"] / step / peak,
    }
    if price is not None:
        what, many = ("million samples", 1e6) if length is None else ("billion tokens", 1e9)
        found[f"dollars per {what}"] = price / 3600 * step / (samples * (length or 1)) * many
    return found
