"""petps: huge embedding tables in a persistent pool.

``petps.open(path)`` and ``petps.create(path)`` return a ``Pool`` in this process, with the same
pull and push as the client (package ``petps_client``). The command line is ``petps --help``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from petps.pool import LivePool as LivePool
    from petps.pool import Pool as Pool
    from petps.pool import TableInfo as TableInfo

__version__ = "0.1.0"
__all__ = ["LivePool", "Pool", "TableInfo", "__version__", "create", "open", "open_live"]


def create(
    path: str | Path | None = None, *, durability: str = "power", replace: bool = False
) -> Pool:
    """Create an empty pool at ``path``, or in the memory of this process if ``path`` is None.

    Args:
        path: The file or device.
        durability: What an acknowledged write survives. With 'process', a kill of the process; with
            'power', a power loss too.
        replace: Overwrite the content of a device-DAX device (/dev/dax0.0). A file is never
            replaced.

    Raises:
        AlreadyExists, ResourceExhausted (disk or device full), InvalidArgument.
    """
    from petps.pool import Pool

    return Pool.create(path, durability=durability, replace=replace)


def open(path: str | Path, *, read_only: bool = False) -> Pool:
    """Open the pool at ``path`` in this process, without delay whatever its size.

    Raises NotFound, InUse (another process has it open), FailedPrecondition (it lost power),
    InvalidArgument (not a pool, or another format), DataLoss (an incomplete copy).
    """
    from petps.pool import Pool

    return Pool.open(path, read_only=read_only)


def open_live(path: str | Path) -> LivePool:
    """Open the pool at ``path`` for reading, beside the server that writes it.

    The reader sees every row as soon as the server's own pulls do, and continues when the server is
    killed. Raises NotFound, FailedPrecondition (no server has the pool open, or it refuses
    readers), PermissionDenied (``path``.readers must be writable), Unimplemented, DataLoss.
    """
    from petps.pool import LivePool

    return LivePool(path)


def __getattr__(name: str) -> object:
    # Imported at first use: `petps --help` need not load numpy.
    if name in ("LivePool", "Pool", "TableInfo"):
        from petps import pool

        return getattr(pool, name)
    raise AttributeError(f"module 'petps' has no attribute {name!r}")
