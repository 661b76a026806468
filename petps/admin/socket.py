"""Where a pool's server is administered: the socket beside the pool, or its admin port."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

__all__ = [
    "ADMIN_SCHEME",
    "ADMIN_TLS_SCHEME",
    "MAX_SOCKET_BYTES",
    "USER_KEY",
    "is_admin_port",
    "socket_of",
]

ADMIN_SCHEME: Final = "petps+admin://"  # HOST:PORT of a server's admin port
ADMIN_TLS_SCHEME: Final = "petps+admin+tls://"  # of an admin port with TLS
USER_KEY: Final = "petps-user"  # in the metadata of a call: who makes it
MAX_SOCKET_BYTES: Final = 107  # of the path of a socket: sun_path of unix(7), less its final zero


def is_admin_port(target: str | os.PathLike[str]) -> bool:
    """Return whether this names a server's admin port, and no path of a pool."""
    return str(target).startswith((ADMIN_SCHEME, ADMIN_TLS_SCHEME))


def socket_of(pool: str | os.PathLike[str]) -> Path:
    """Return the socket of the server that serves this pool. No socket may be there."""
    path = Path(os.path.realpath(pool))
    return path.with_name(f"{path.name}.admin")
