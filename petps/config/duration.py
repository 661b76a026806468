"""Durations as people write them: 90s, 15m, 6h, 30d."""

from __future__ import annotations

import re
from typing import Final

from petps.errors import InvalidArgument

__all__ = ["NEVER", "duration_text", "parse_duration"]

NEVER: Final = "never"
MAX_SECONDS: Final = 36_600 * 86_400  # native/pool/clock.h kMaxExpireAfter
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_duration(text: str, what: str) -> int:
    """Return the seconds that ``text`` names; 'never' is 0.

    Raises InvalidArgument that names ``what``.
    """
    if text == NEVER:
        return 0
    parts = re.fullmatch(r"([0-9]{1,10})([smhd])", text)
    seconds = 0 if parts is None else int(parts[1]) * _UNITS[parts[2]]
    if not 0 < seconds <= MAX_SECONDS:
        raise InvalidArgument(
            f"{what} must be a whole number with its unit, such as 90s, 15m, 6h or 30d, at most "
            f"36600d, or '{NEVER}'; got '{text}'"
        )
    return seconds


def duration_text(seconds: int) -> str:
    """Return the shortest text that parse_duration() reads as ``seconds``."""
    if seconds == 0:
        return NEVER
    unit = next(unit for unit in reversed(_UNITS) if seconds % _UNITS[unit] == 0)
    return f"{seconds // _UNITS[unit]}{unit}"
