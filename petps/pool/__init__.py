"""Room pool: a pool opened in this process, with the client's pull and push.

Owns:        Pool (float32 in and out), LivePool (pulls beside a server), the checks of callers'
             arrays (arrays.py), export, the audit log of changes (audited.py), passes that remove
             damaged rows (scrub.py) and the list of what is missing (damage.py).
Never does:  networking; deltas; files of rows.
Called by:   petps.open and petps.create, cli, server, demo.
Invariants:  Keys are never rounded or wrapped silently. A push is durable, at the pool's level, on
             return. A pool that is left open is closed at the exit of the process.
"""

from petps.pool.live import LivePool
from petps.pool.pool import MAX_ROWS_PER_APPLY, Pool, PushReport
from petps.pool.reader import TableInfo

__all__ = ["MAX_ROWS_PER_APPLY", "LivePool", "Pool", "PushReport", "TableInfo"]
