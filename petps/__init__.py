"""petps: huge embedding tables in a persistent pool.

``petps.open(path)`` and ``petps.create(path)`` give a ``Pool`` in this process, with the same pull
and push as the client (package ``petps_client``). The command line is ``petps --help``.
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
    """A new, empty pool at ``path``; without one, in memory (gone with the process).

    durability: what an acknowledged write survives, 'power' loss or only the end of the 'process'.
    replace: give up what a device-DAX device (/dev/dax0.0) holds; a file is never replaced.
    Errors: AlreadyExists, ResourceExhausted (disk or device full), InvalidArgument.
    """
    from petps.pool import Pool

    return Pool.create(path, durability=durability, replace=replace)


def open(path: str | Path, *, read_only: bool = False) -> Pool:
    """The pool at ``path``, in this process. It serves at once, whatever its size.

    Errors: NotFound, FailedPrecondition (another process has it, or it lost power), InvalidArgument
    (no pool, or of another format), DataLoss (copied half).
    """
    from petps.pool import Pool

    return Pool.open(path, read_only=read_only)


def open_live(path: str | Path) -> LivePool:
    """The pool at ``path``, read in this process beside the server that writes it.

    It sees every row as soon as the server's own pulls do, and goes on when the server is killed.
    Errors: NotFound, FailedPrecondition (no server has it open, or it keeps readers out),
    PermissionDenied (``path``.readers must be writable), Unimplemented, DataLoss.
    """
    from petps.pool import LivePool

    return LivePool(path)


def __getattr__(name: str) -> object:
    # Imported when asked for: `petps --help` need not load numpy.
    if name in ("LivePool", "Pool", "TableInfo"):
        from petps import pool

        return getattr(pool, name)
    raise AttributeError(f"module 'petps' has no attribute {name!r}")
