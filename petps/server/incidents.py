"""The times of problems and incidents: since when each lasts, and what has ended."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

from petps.server.problems import INCIDENT_KEY, Problem

__all__ = ["EVENTS_MAX", "Timeline"]

# Events that are kept: the native server keeps 32 incidents, and as many problems are plenty. The
# oldest that has ended goes first.
EVENTS_MAX: Final = 100
TEXT_CHARACTERS_MAX: Final = 500  # of an event; the status has the whole text

_DIGITS: Final = re.compile(r"\d+")


@dataclass(slots=True)
class _Event:
    """A problem that began, or an incident that the native server reported.

    Times are Unix times. ``until`` is None while a problem lasts, and for incidents. ``times``
    counts how often an incident was reported with other numbers, such as the peer's port.
    """

    key: str
    severity: str
    text: str
    at: float
    last_at: float
    until: float | None = None
    times: int = 1


class Timeline:
    """Notes problems and incidents when they are first seen. Threads: any."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # guards the next ones
        self._events: list[_Event] = []  # the oldest first
        self._open: dict[str, _Event] = {}  # problems that last, by key
        self._lines: set[str] = set()  # the incidents of the last look
        self._well_since: float | None = clock()

    def note_incidents(self, lines: Iterable[str]) -> None:
        """Note the native server's incidents, of which a later look has most again."""
        now = self._clock()
        with self._lock:
            current = set(lines)
            incidents = {event.key: event for event in self._events if event.until is None}
            for line in lines:
                if line in self._lines:
                    continue
                key = INCIDENT_KEY + _DIGITS.sub("#", line)[:TEXT_CHARACTERS_MAX]
                event = incidents.get(key)
                if event is None:
                    event = _Event(key, "notice", line[:TEXT_CHARACTERS_MAX], now, now)
                    incidents[key] = event
                    self._events.append(event)
                else:
                    event.text, event.last_at = line[:TEXT_CHARACTERS_MAX], now
                    event.times += 1
            self._lines = current
            self._forget()

    def note_problems(self, problems: Iterable[Problem]) -> dict[str, Any]:
        """Note what is wrong now.

        Returns the members of the status ``problems``, with the time since when each lasts, and
        ``well_since``, the time since when there is none; None if there is one.
        """
        now = self._clock()
        with self._lock:
            report = []
            seen = set()
            for problem in problems:
                seen.add(problem.key)
                report.append(asdict(problem) | {"since": self._since(problem, now)})
            for key in set(self._open) - seen:
                event = self._open.pop(key)
                event.until = event.last_at = now
            if report:
                self._well_since = None
            elif self._well_since is None:
                self._well_since = now
            self._forget()
            return {"problems": report, "well_since": self._well_since}

    def events(self) -> list[dict[str, Any]]:
        """Return all events as plain values, the newest first."""
        with self._lock:
            return [asdict(event) for event in reversed(self._events)]

    def _since(self, problem: Problem, now: float) -> float:
        if problem.key.startswith(INCIDENT_KEY):  # note_incidents() has it
            return next((e.at for e in self._events if e.key == problem.key), now)
        event = self._open.get(problem.key)
        if event is None:
            event = _Event(problem.key, problem.severity, "", now, now)
            self._open[problem.key] = event
            self._events.append(event)
        event.text, event.severity = problem.text[:TEXT_CHARACTERS_MAX], problem.severity
        event.last_at = now
        return event.at

    def _forget(self) -> None:
        """Keep EVENTS_MAX events: first drop those that have ended and incidents, then any."""
        while len(self._events) > EVENTS_MAX:
            ended = (event for event in self._events if event.key not in self._open)
            event = next(ended, self._events[0])
            self._events.remove(event)
