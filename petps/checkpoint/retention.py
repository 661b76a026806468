"""Which versions of a store are kept for how long. STORE.md, "Retention".

Owns:        Retention.
Never does:  delete; read a store.
Called by:   store.py, tend.py, the CLI.
Invariants:  the newest version is kept; a version that is kept now and is the newest of its hour
             (or day, ...) stays kept until that rule's time is over.
Threads:     any.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

from petps.checkpoint.state import Version
from petps.errors import InvalidArgument

__all__ = ["Retention", "parse_seconds"]

HOUR: Final = 3600
DAY: Final = 24 * HOUR
WEEK: Final = 7 * DAY
_UNITS: Final = {"s": 1, "m": 60, "h": HOUR, "d": DAY, "w": WEEK}
_PERIODS: Final = {"hourly": HOUR, "daily": DAY, "weekly": WEEK}


def parse_seconds(text: str) -> float:
    """Return the seconds of a duration such as "90s", "15m", "1h", "30d", "2w"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if match is None:
        raise InvalidArgument(
            f"{text!r} is not a duration: give a number and one of s, m, h, d, w, such as 1h or 30d"
        )
    return float(match[1]) * _UNITS[match[2]]


@dataclass(frozen=True, slots=True)
class Retention:
    """Seconds for which versions are kept: all, and the newest of each hour, day and week (UTC)."""

    all: float = 0.0
    hourly: float = 0.0
    daily: float = 0.0
    weekly: float = 0.0

    @classmethod
    def parse(cls, rules: str | Mapping[str, str]) -> Retention:
        """Return the retention of "all=1h,hourly=1d,daily=30d", or of the same as a mapping."""
        names = [field.name for field in fields(cls)]
        if isinstance(rules, str):
            pairs = [rule.partition("=") for rule in rules.split(",") if rule.strip()]
            given = {name.strip(): value for name, _, value in pairs}
            if len(given) != len(pairs):
                raise InvalidArgument(f"{rules!r} has a rule twice")
        else:
            given = dict(rules)
        unknown = set(given) - set(names)
        if unknown or not given:
            what = f"no rule {min(unknown)!r}" if unknown else "no rule"
            raise InvalidArgument(
                f"{what} in a retention: give some of {', '.join(names)}, such as "
                "all=1h,hourly=1d,daily=30d"
            )
        return cls(**{name: parse_seconds(value) for name, value in given.items()})

    def choose(self, versions: Sequence[Version], now_ns: int) -> set[int]:
        """Return the versions to keep, of those given (oldest first)."""
        versions = [entry for entry in versions if not entry.is_partial]
        kept = {entry.version for entry in versions[-1:]}
        ages = {entry.version: (now_ns - entry.created_ns) / 1e9 for entry in versions}
        kept |= {version for version, age in ages.items() if age < self.all}
        for rule, period in _PERIODS.items():
            newest = {entry.created_ns // (period * 10**9): entry.version for entry in versions}
            kept |= {version for version in newest.values() if ages[version] < getattr(self, rule)}
        return kept
