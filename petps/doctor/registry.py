"""The registry of checks, and their run within a bounded time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module

from petps.doctor.checks import MODULES
from petps.doctor.finding import Finding, Level, fault, warning
from petps.doctor.subject import Subject
from petps.doctor.work import Work
from petps.errors import PetpsError

__all__ = [
    "CHECK_SECONDS",
    "Check",
    "all_checks",
    "check",
    "diagnose",
    "findings_markdown",
    "worst",
]

# A request to brokers takes up to 5 s, and a check makes three of them.
CHECK_SECONDS = 20.0

Run = Callable[[Subject], Iterable[Finding]]


@dataclass(frozen=True)
class Check:
    """A check. ``name``: of its findings, in the documents and in runbooks; it never changes."""

    name: str
    topic: str
    """The heading in the documents."""
    looks_at: str
    why: str
    run: Run


_CHECKS: list[Check] = []


def check(name: str, topic: str, *, looks_at: str, why: str) -> Callable[[Run], Run]:
    """Register a function as a check.

    The function yields what it finds, and nothing if the subject has nothing for it. A PetpsError
    that it raises is a fault.
    """

    def register(run: Run) -> Run:
        _CHECKS.append(Check(name, topic, looks_at, why, run))
        return run

    return register


def all_checks() -> list[Check]:
    """Return every check, in the order of the documents."""
    for module in MODULES:
        import_module(f"petps.doctor.checks.{module}")  # registers its checks
    return sorted(_CHECKS, key=lambda known: MODULES.index(known.run.__module__.split(".")[-1]))


def diagnose(
    subject: Subject, checks: Iterable[Check] | None = None, seconds: float | None = None
) -> list[Finding]:
    """Return the findings of all checks, which run at the same time and are waited for so long.

    seconds: by default CHECK_SECONDS.

    """
    running: list[tuple[Check, Work[None], list[Finding]]] = []
    for one_check in all_checks() if checks is None else checks:
        findings: list[Finding] = []
        work = Work(partial(_run, one_check, subject, findings), one_check.name)
        running.append((one_check, work, findings))
    seconds = CHECK_SECONDS if seconds is None else seconds
    deadline = time.monotonic() + seconds
    results: list[Finding] = []
    for one_check, work, findings in running:
        if not work.ends_before(deadline):
            late = fault(
                f"no answer within {seconds:g} s",
                "look for a file system or a server that does not answer, then run this again",
            )
            findings = [*findings, late]
        results += [
            replace(finding, name=one_check.name, why=one_check.why) for finding in findings
        ]
    return results


def _run(one_check: Check, subject: Subject, findings: list[Finding]) -> None:
    try:
        for finding in _found_by(one_check, subject):
            findings.append(finding)  # what it has found counts, also if it then hangs
    except Exception as error:  # a check that fails must not hide the others
        findings.append(
            warning(
                f"the check failed: {type(error).__name__}: {error}",
                "report this with `petps report`",
            )
        )


def _found_by(one_check: Check, subject: Subject) -> Iterator[Finding]:
    try:
        yield from one_check.run(subject)
    except PetpsError as error:
        yield fault(str(error), f"the reference of errors explains [{error.code}]")


def findings_markdown() -> str:
    """Return docs/reference/findings.md."""
    lines = [
        "# Findings of `petps doctor`",
        "",
        "`petps doctor --markdown` writes this page. Each finding has a name, which never changes,",
        "so that a runbook can link to it, and a level:",
        "",
        "| level | meaning |",
        "|---|---|",
        "| ok | nothing is wrong |",
        "| note | good to know; nothing needs to be done |",
        "| warning | it works now, and will be slow, or will fail one day |",
        "| fault | something does not work, or acknowledged rows are at risk; exit code 10 |",
        "",
        "A finding also has what was seen, why it matters, and the remedy. A check that has no",
        f"answer within {CHECK_SECONDS:g} s is a fault.",
    ]
    topic = ""
    for one_check in all_checks():
        if one_check.topic != topic:
            topic = one_check.topic
            lines += ["", f"## {topic}"]
        lines += ["", f"### {one_check.name}", ""]
        lines += [*_wrapped(f"Looks at {one_check.looks_at}."), "", *_wrapped(one_check.why)]
    return "\n".join(lines) + "\n"


def _wrapped(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)


def worst(findings: Iterable[Finding]) -> Level:
    """Return the worst level of the findings; OK if there are none."""
    order = list(Level)
    return max((finding.level for finding in findings), key=order.index, default=Level.OK)
