"""Ports of 127.0.0.1 for servers that tests restart where they were."""

from __future__ import annotations

import contextlib
import random
import socket

# Below the range from which kernels give ports to clients and to who asks for any: between
# a kill and a restart nobody else gets one of these by chance.
_FIRST, _LAST = 15_000, 31_999


def stable_port() -> int:
    """One that is free now, and that only who asks for it by number takes."""
    chance = random.SystemRandom()
    while True:
        port = chance.randint(_FIRST, _LAST)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port
