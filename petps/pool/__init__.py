"""Room pool: a pool in this process, with the client's pull and push.

Owns:        Pool (float32 in and out), LivePool (pulls beside a server), the check of what callers
             hand in (arrays.py), export.
Never does:  network; deltas; know files of rows.
Called by:   petps.open and petps.create, cli, server, demo.
Invariants:  keys are never rounded or wrapped silently; a push returned is durable at the pool's
             level; a pool left open is closed at the end of the process.
"""

from petps.pool.live import LivePool
from petps.pool.pool import MAX_ROWS_PER_APPLY, Pool, PushReport, TableInfo

__all__ = ["MAX_ROWS_PER_APPLY", "LivePool", "Pool", "PushReport", "TableInfo"]
