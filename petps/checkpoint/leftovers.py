"""Files that no state names: of versions that failed or were never committed. STORE.md.

Owns:        remove_leftovers().
Called by:   store.py.
Invariants:  a file that a state names, or a commit may still name, stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from petps.checkpoint.files import Files
from petps.checkpoint.state import State

__all__ = ["LEFTOVER_SECONDS", "remove_leftovers"]

# A file that no state names is removed only above this age. A younger one may belong to a version
# that is not committed yet: ranks wait up to a day for the slowest share (link.py).
LEFTOVER_SECONDS: Final = 48 * 3600.0


def remove_leftovers(files: Files, refresh: Callable[[], State]) -> None:
    """Remove old files that no state names; refresh: returns the newest state."""
    # Remove shares first: without its share file no commit can name the other files of a share.
    # List the files before reading the state. Then no newer state can name an old file that this
    # state does not name.
    folders = {name: files.list(name) for name in ("shares", "lines", "parts", "data")}
    state = refresh()
    named_paths = state.files() | set(state.trash)
    for folder, ages in folders.items():
        for name, age in ages.items():
            if age > LEFTOVER_SECONDS and f"{folder}/{name}" not in named_paths:
                files.remove(f"{folder}/{name}")
