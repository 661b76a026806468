"""What bounds the lines that refused changes leave in the audit log: each change has one before it.

Owns:        how many changes of each grant were refused within the last minute.
Never does:  leave out the line of a change that is made.
Called by:   the admin door.
Invariants:  a change beyond the bound is refused before it is tried, so it needs no line.
Threads:     any.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from petps.errors import ResourceExhausted

__all__ = ["Refusals"]

REFUSED_MAX: Final = 60  # of one grant, within REFUSED_SECONDS
REFUSED_SECONDS: Final = 60.0
REASON_CHARACTERS_MAX: Final = 200


@dataclass(slots=True)
class _Refused:
    since: float
    count: int = 0
    untried: int = 0  # refused because there were too many before
    last: str = ""


class Refusals:
    """Counts the refused changes of grants, and refuses further ones of a grant with too many."""

    def __init__(
        self, audit: Callable[[str, str], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``audit`` writes a line of the audit log: who, and what."""
        self._audit, self._clock = audit, clock
        self._lock = threading.Lock()
        self._grants: dict[str, _Refused] = {}  # those of the last minute: of at most 10,000 grants

    def check(self, grant: str, user: str) -> None:
        """Raise ResourceExhausted if too many changes of the grant were refused within a minute.

        The first such change leaves a line, and the first one after that minute has their number.
        """
        line = ""
        with self._lock:
            refused = self._grants.get(grant)
            if refused is None:
                return
            is_over = self._clock() - refused.since >= REFUSED_SECONDS
            if is_over:
                del self._grants[grant]
                if refused.untried:
                    line = f"{refused.untried} changes of '{grant}' were refused and not tried"
            elif refused.count >= REFUSED_MAX:
                refused.untried += 1
                if refused.untried == 1:
                    line = f"further changes of '{grant}' are refused and not tried"
            is_refused = not is_over and refused.count >= REFUSED_MAX
        if line:
            self._audit(user, f"{line}; the last error: {refused.last}")
        if is_refused:
            raise ResourceExhausted(
                f"{REFUSED_MAX} changes of '{grant}' were refused within a minute, so "
                f"this one was not tried: correct them, and wait; the last: {refused.last}"
            )

    def note(self, grant: str, error: Exception) -> None:
        """Count a change that was tried after check(), and has failed."""
        with self._lock:
            refused = self._grants.setdefault(grant, _Refused(self._clock()))
            refused.count += 1
            refused.last = str(error)[:REASON_CHARACTERS_MAX]
