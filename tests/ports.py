"""Ports of 127.0.0.1 for servers that tests restart on the same port."""

from __future__ import annotations

import contextlib
import random
import socket

# Below the range from which kernels choose ports for clients and for binds to port 0. So no other
# process gets the port by chance between a kill and a restart.
_FIRST, _LAST = 15_000, 31_999


def stable_port() -> int:
    """Return a port that is free now and that the kernel never chooses for another process."""
    chance = random.SystemRandom()
    while True:
        port = chance.randint(_FIRST, _LAST)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
