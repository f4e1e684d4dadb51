"""Ranks in network namespaces with a slow link between them: `make bench ARGS="--net 1000"`.

Each machine is a namespace with one interface, on a bridge in another one; as a rule there is one
rank on each. What it sends passes a token bucket (`tbf`) of the rate that was asked for. In place
of the bridge there may be a cable with latency (delay.py). It takes Linux, root, `ip` and `tc`.

A sender keeps all bytes of a connection until they are acknowledged, so its buffer limits how many
are under way. Linux allows 4 MiB, of which half are bookkeeping. A link of 1 Gbit/s on which the
way there and back takes 40 ms then carries half of what it could.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from minifsdp.comm import neighbors
from minifsdp.comm.process_memory import Unreadable, read_memory
from tests.bench import delay

CLONE_NEWNET = 0x40000000
DEVICE = "eth0"  # the interface of each namespace
BURST = "256kb"  # of a bucket: a few messages, far less than a unit
BUFFERS = ("tcp_wmem", "tcp_rmem")  # of a connection: bytes at least, at first, at most


@dataclass(frozen=True)
class Link:
    """What is between machines.

    Attributes:
        mbit: Mbit/s from each machine, and as many to it.
        ms: until what was sent arrives.
        ranks: on each machine.
        buffers: MiB that a connection may have under way; 0: what the system allows.
    """

    mbit: float
    ms: float = 0
    ranks: int = 1
    buffers: int = 0


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
def links(machines: int, link: Link) -> Iterator[None]:
    """While the block runs, :func:`enter` works for so many machines."""
    bridge, ports = _name("bridge"), [f"port{machine}" for machine in range(machines)]
    with ExitStack() as made:
        for name in (bridge, *map(_name, range(machines))):
            _ip("netns", "add", name)
            made.callback(_ip, "netns", "del", name)
        for machine, port in enumerate(ports):
            name = _name(machine)
            peer = ("peer", "name", port, "netns", bridge)
            _ip("link", "add", DEVICE, "netns", name, "type", "veth", *peer)
            _ip("-n", bridge, "link", "set", port, "up")
            _ip("-n", name, "address", "add", f"10.77.0.{machine + 1}/24", "dev", DEVICE)
            _ip("-n", name, "link", "set", DEVICE, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            shaped = ("root", "tbf", "rate", f"{link.mbit}mbit", "burst", BURST, "latency", "100ms")
            subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", DEVICE, *shaped], check=True)
            for buffer in BUFFERS if link.buffers else ():
                _enlarge(machine, buffer, link.buffers << 20)
        if link.ms:
            made.enter_context(_late(bridge, link.ms, ports))
        else:
            _ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
            _ip("-n", bridge, "link", "set", "bridge", "up")
            for port in ports:
                _ip("-n", bridge, "link", "set", port, "master", "bridge")
        yield


def _enlarge(machine: int, buffer: str, nbytes: int) -> None:
    """Allow connections of a machine that are made from now on a buffer of ``nbytes``."""
    file = f"/proc/sys/net/ipv4/{buffer}"
    words = f"set -- $(cat {file}) && echo $1 $2 {nbytes} > {file}"
    subprocess.run([*command(machine), "sh", "-c", words], check=True)


@contextmanager
def _late(namespace: str, ms: float, ports: list[str]) -> Iterator[None]:
    words = [sys.executable, "-m", "tests.bench.delay", str(ms), *ports]
    command = ["ip", "netns", "exec", namespace, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline().strip() != delay.READY:
                raise RuntimeError("the cable with latency did not start")
            yield
        finally:
            process.kill()


def enter(machine: int, parent: int) -> None:
    """Move this process to the namespace of a machine. Call it before gloo makes its connections.

    Args:
        parent: the id of the process that called :func:`links`.
    """
    with open(f"/run/netns/{_name(machine, parent)}") as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    neighbors.read_memory = _read_on_this_machine


def _read_on_this_machine(process: int, address: int, into: Any) -> None:
    """The memory of a rank in another namespace cannot be read, as that on another machine."""
    with suppress(OSError):  # that process has ended
        if os.readlink(f"/proc/{process}/ns/net") == os.readlink("/proc/self/ns/net"):
            return read_memory(process, address, into)
    raise Unreadable(f"process {process} is on another machine")


def set_link(machine: int, there: bool) -> None:
    """Cut the cable of a machine, or mend it: neither end is told of what is lost."""
    state = "up" if there else "down"
    _ip("-n", _name("bridge"), "link", "set", f"port{machine}", state)


def command(machine: int) -> list[str]:
    """What begins a command that runs in the namespace of a machine."""
    return ["ip", "netns", "exec", _name(machine)]


def processes(machine: int) -> list[int]:
    """The processes that run in the namespace of a machine."""
    listed = subprocess.run(
        ["ip", "netns", "pids", _name(machine)], check=True, capture_output=True, text=True
    )
    return [int(pid) for pid in listed.stdout.split()]


def _name(what: int | str, process: int | None = None) -> str:
    return f"minifsdp-{process or os.getpid()}-{what}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
