"""Ports of 127.0.0.1 for servers that tests restart on the same port."""

from __future__ import annotations

import contextlib
import os
import random
import socket

# Below the range from which kernels choose ports for clients and for binds to port 0. So no other
# process gets the port by chance between a kill and a restart.
_FIRST, _LAST = 15_000, 31_999
_WORKERS = 5  # of pytest at most, each with a part of the range
_given: set[int] = set()  # some of them are bound later


def stable_port() -> int:
    """Return a port that is free now and that the kernel never chooses for another process."""
    chance = random.SystemRandom()
    part = (_LAST + 1 - _FIRST) // _WORKERS
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
    while True:
        port = chance.randrange(_FIRST + worker * part, _FIRST + (worker + 1) * part)
        if port in _given:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _given.add(port)
            return port
