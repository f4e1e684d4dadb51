"""A cable with latency, between network interfaces: ``python -m tests.bench.delay MS PORT PORT``.

What comes in at one of them goes out at the others, so many milliseconds later. net.py starts it in
the namespace where its bridge would be. Linux can do that itself (`tc ... netem`) where its kernel
was built with it; many are not.
"""

import select
import socket
import sys
import time
from collections import deque

ALL, SOL_PACKET, SO_RCVBUFFORCE = 3, 263, 33  # of every protocol; Python has no names for these
VNET_HDR, IGNORE_OUTGOING = 15, 23
LONGEST = 10 + 14 + (1 << 16)  # bytes: how to cut a frame; Ethernet's header; IP's longest packet
READY = "ready"


def port(name: str) -> socket.socket:
    """All that arrives at an interface."""
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL))
    # TCP leaves it to the interface to cut packets of up to 64 KiB. With this option they come, and
    # go on, in one piece: a fortieth of the calls.
    made.setsockopt(SOL_PACKET, VNET_HDR, 1)
    made.setsockopt(SOL_PACKET, IGNORE_OUTGOING, 1)
    made.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 26)
    made.bind((name, ALL))
    return made


def main(ms: float, names: list[str]) -> None:
    ports = [port(name) for name in names]
    print(READY, flush=True)
    on_the_way: deque[tuple[float, socket.socket, bytes]] = deque()  # when it arrives, where from
    while True:
        left = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else None
        for source in select.select(ports, [], [], left)[0]:
            frame = source.recv(LONGEST)
            on_the_way.append((time.monotonic() + ms / 1e3, source, frame))
        while on_the_way and on_the_way[0][0] <= time.monotonic():
            _, source, frame = on_the_way.popleft()
            for other in ports:
                if other is not source:
                    other.send(frame)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
