"""Room doctor: findings about a machine and a deployment, and the report for support.

Owns:        the checks and the names of their findings (docs/reference/findings.md), the facts
             that they may ask for, and what a report contains.
Never does:  change a file, lock a pool, or wait for anything without a limit.
Called by:   cli.
Invariants:  a check asks only through Facts, so that tests need no special machine. No finding and
             no report has a secret, a key or a row.
Threads:     each check runs in a thread of its own.
"""

from petps.doctor.facts import Facts
from petps.doctor.finding import Finding, Level
from petps.doctor.machine import Machine
from petps.doctor.registry import all_checks, diagnose, findings_markdown, worst
from petps.doctor.subject import Subject
from petps.doctor.target import subject_of
from petps.doctor.work import in_time

__all__ = [
    "Facts",
    "Finding",
    "Level",
    "Machine",
    "Subject",
    "all_checks",
    "diagnose",
    "findings_markdown",
    "in_time",
    "subject_of",
    "worst",
]
