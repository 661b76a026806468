"""What the page shows beyond the counters: the last hour, what is wrong and since when."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from petps.errors import PetpsError
from petps.server.history import SAMPLE_SECONDS, History, Snapshot
from petps.server.incidents import Timeline
from petps.server.problems import find_problems, headline

__all__ = ["MEMBERS", "Watch"]

LOOK_SECONDS: Final = 1.0  # between two looks at the readiness
# Members of the status that a watch adds; `petps status` reads them too.
MEMBERS: Final = ("recent", "members", "events", "problems", "well_since", "headline", "can_switch")


class Watch:
    """A thread that takes a sample every ten seconds, until close(). Threads: any.

    It also looks when the server becomes ready or unready, so that the times of problems are right
    while nobody looks at the page.
    """

    def __init__(
        self,
        *,
        stats: Callable[[], dict[str, Any]],
        status: Callable[[], dict[str, Any]],
        unready: Callable[[], str | None],
        members: Callable[[], list[dict[str, Any]]],
        set_member: Callable[[str, str], None],
        log: Callable[[str], None],
        can_switch: bool,
    ) -> None:
        """``status`` returns a normalised status without the members that this adds to it.

        ``members`` returns the other servers of the shard map. ``can_switch``: whether the page may
        switch aliases.
        """
        self._stats, self._status, self._unready = stats, status, unready
        self._members, self._set_member, self._log = members, set_member, log
        self._can_switch = can_switch
        self._history, self._timeline = History(), Timeline()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="petps-page", daemon=True)
        self._history.begin(Snapshot.of(time.monotonic(), stats(), status()))
        self._thread.start()

    def history(self) -> dict[str, Any]:
        """Return what /history.json shows."""
        return self._history.as_json() | {"now": time.time()}

    def complete(self, status: dict[str, Any]) -> dict[str, Any]:
        """Add MEMBERS to the status, and return it. `petps status` then finds them too."""
        now = Snapshot.of(time.monotonic(), self._stats(), status)
        status["recent"] = self._history.recent(now)
        status["members"] = self._members()
        status["can_switch"] = self._can_switch
        status["now"] = time.time()  # the page's clock may differ
        self._timeline.note_incidents(status["incidents"])
        status["events"] = self._timeline.events()
        problems = find_problems(status)
        status |= self._timeline.note_problems(problems)
        status["events"] = self._timeline.events()
        status["headline"] = headline(problems, status["well_since"])
        for name in MEMBERS:
            self._set_member(name, json.dumps(status[name]))
        return status

    def close(self) -> None:
        """Stop."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        begin, number, was_ready, logged = time.monotonic(), 1, True, ""
        while not self._stopping.wait(LOOK_SECONDS):
            is_due = time.monotonic() - begin >= number * SAMPLE_SECONDS
            try:
                is_ready = self._unready() is None
                if is_due:
                    number = 1 + int((time.monotonic() - begin) / SAMPLE_SECONDS)
                    status = self._status()
                    now = Snapshot.of(time.monotonic(), self._stats(), status)
                    self._history.add(now, status, time.time())
                    self.complete(status)
                elif is_ready != was_ready:
                    self.complete(self._status())
                was_ready, logged = is_ready, ""
            except PetpsError as error:  # the server stops, or the pool is closed
                if not self._stopping.is_set() and str(error) != logged:
                    logged = str(error)
                    self._log(f"the page has a gap: {error}")
