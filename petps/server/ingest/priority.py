"""The priority of threads that work in the background of a server."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

__all__ = ["lower_priority"]


def lower_priority(niceness: int) -> None:
    """Give this thread at least this niceness (of 19), in favour of pulls.

    The kernel derives the priority of the thread's disk reads from it. Without the permission, the
    thread keeps its priority.
    """
    own = threading.get_native_id()
    with suppress(OSError):
        niceness = max(niceness, os.getpriority(os.PRIO_PROCESS, own))
        os.setpriority(os.PRIO_PROCESS, own, niceness)
