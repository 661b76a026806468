"""The socket beside a pool, by which the pool's server is administered."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

__all__ = ["MAX_SOCKET_BYTES", "USER_KEY", "socket_of"]

USER_KEY: Final = "petps-user"  # in the metadata of a call: who makes it
MAX_SOCKET_BYTES: Final = 107  # of the path of a socket: sun_path of unix(7), less its final zero


def socket_of(pool: str | os.PathLike[str]) -> Path:
    """Return the socket of the server that serves this pool. No socket may be there."""
    path = Path(os.path.realpath(pool))
    return path.with_name(f"{path.name}.admin")
