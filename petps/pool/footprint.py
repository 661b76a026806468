"""What a server takes beside its pool."""

from __future__ import annotations

from typing import Final

__all__ = ["SERVER_BYTES"]

# Of a process that serves, beside its tables: interpreter, libraries, connections.
SERVER_BYTES: Final = 300 << 20
