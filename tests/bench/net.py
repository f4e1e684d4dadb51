"""Ranks in network namespaces with a slow link between them: `make bench ARGS="--net 1000"`.

Each rank has a namespace of its own, with one interface, on a bridge in another one. What it sends
passes a token bucket (`tbf`) of the rate that was asked for. It takes Linux, root, `ip` and `tc`.
tests/test_two_nodes.py has all the ranks of a node in one namespace.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

CLONE_NEWNET = 0x40000000
DEVICE = "eth0"  # the interface of each namespace
BURST = "256kb"  # of a bucket: a few messages, far less than a unit


def missing() -> str:
    """Why there can be no such link on this machine; "" if there can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "it takes root on Linux"
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if tools:
        return f"there is no {' and no '.join(tools)} (Debian's package iproute2)"
    tried = subprocess.run(["ip", "netns", "add", _name("try")], capture_output=True, text=True)
    if tried.returncode:
        return tried.stderr.strip()
    _ip("netns", "del", _name("try"))
    return ""


@contextmanager
def links(ranks: int, mbit: float) -> Iterator[None]:
    """While the block runs, :func:`enter` works, with ``mbit`` Mbit/s from and to each rank."""
    bridge = _name("bridge")
    made = []
    try:
        for name in (bridge, *map(_name, range(ranks))):
            _ip("netns", "add", name)
            made.append(name)
        _ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", bridge, "link", "set", "bridge", "up")
        for rank in range(ranks):
            name, port = _name(rank), f"port{rank}"
            peer = ("peer", "name", port, "netns", bridge)
            _ip("link", "add", DEVICE, "netns", name, "type", "veth", *peer)
            _ip("-n", bridge, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "address", "add", f"10.77.0.{rank + 1}/24", "dev", DEVICE)
            _ip("-n", name, "link", "set", DEVICE, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            shaped = ("root", "tbf", "rate", f"{mbit}mbit", "burst", BURST, "latency", "100ms")
            subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", DEVICE, *shaped], check=True)
        yield
    finally:
        for name in made:
            _ip("netns", "del", name)


def enter(rank: int, parent: int) -> None:
    """Move this process to the namespace of a rank. Call it before gloo makes its connections.

    Args:
        parent: the id of the process that called :func:`links`.
    """
    with open(f"/run/netns/{_name(rank, parent)}") as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE


def set_link(rank: int, there: bool) -> None:
    """Cut the cable of a rank, or mend it: neither end is told of what is lost."""
    state = "up" if there else "down"
    _ip("-n", _name("bridge"), "link", "set", f"port{rank}", state)


def command(rank: int) -> list[str]:
    """What begins a command that runs in the namespace of a rank."""
    return ["ip", "netns", "exec", _name(rank)]


def processes(rank: int) -> list[int]:
    """The processes that run in the namespace of a rank."""
    listed = subprocess.run(
        ["ip", "netns", "pids", _name(rank)], check=True, capture_output=True, text=True
    )
    return [int(pid) for pid in listed.stdout.split()]


def _name(what: int | str, process: int | None = None) -> str:
    return f"minifsdp-{process or os.getpid()}-{what}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
