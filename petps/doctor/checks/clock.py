"""Checks of the clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from petps.doctor.finding import Finding, note, ok, warning
from petps.doctor.registry import check
from petps.doctor.subject import Subject

TOPIC: Final = "The clock"
ERROR_SECONDS_MAX: Final = 1.0
# A file's time may be ahead of the clock by the kernel's granularity, and on a file server by more.
AHEAD_SECONDS_MAX: Final = 2.0


@check(
    "clock-synchronised",
    TOPIC,
    looks_at="what the kernel knows of its clock (adjtimex)",
    why="Certificates, grants, lag, freshness and the expiry of rows that pushes feed compare "
    "times of several machines.",
)
def clock_synchronised(subject: Subject) -> Iterator[Finding]:
    """Report whether a time service keeps the clock right."""
    clock = subject.facts.clock()
    if clock is None:
        yield note("the kernel does not say whether its clock is synchronised")
    elif not clock.is_synchronised:
        yield warning(
            "no time service synchronises the clock",
            "run chrony or systemd-timesyncd, in a container on its host",
        )
    elif clock.error_seconds > ERROR_SECONDS_MAX:
        yield warning(
            f"the clock may be wrong by {clock.error_seconds:.1f} s",
            "look at the sources of the time service (`chronyc sources`)",
        )
    else:
        yield ok(f"the clock is synchronised, within {1e3 * clock.error_seconds:.0f} ms")


@check(
    "clock-steps",
    TOPIC,
    looks_at="the times of the pool's files and of the last backup, against the clock",
    why="A time in the future says that the clock was ahead, or went back. Rows that were pushed "
    "during that time expire late, and lag and freshness are wrong.",
)
def clock_steps(subject: Subject) -> Iterator[Finding]:
    """Look for times that lie in the future."""
    if subject.pool_path is None:
        return
    now = subject.facts.now()
    times: list[tuple[str, float]] = []
    for ending in ("", ".audit", ".damage"):
        found = subject.facts.file(subject.pool_path + ending)
        if found is not None and found.kind == "file":
            times.append((f"{subject.pool_path}{ending} was written", found.modified))
    last_backup = ((subject.status or {}).get("backup") or {}).get("last")
    if last_backup:
        times.append(("the last backup was complete", float(last_backup["finished_at"])))
    ahead = [(what, moment) for what, moment in times if moment > now + AHEAD_SECONDS_MAX]
    for what, moment in ahead:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(moment))
        yield warning(
            f"{what} at {at} UTC, {moment - now:,.0f} s in the future",
            "find out which machine's clock was wrong; let the time service slew and not step "
            "(chrony: makestep only at the start)",
        )
    if times and not ahead:
        yield ok("no file of the pool has a time in the future")
