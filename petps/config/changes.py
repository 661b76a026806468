"""The differences of two configurations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from petps.config.schema import Config

__all__ = ["changes"]


def changes(old: Config, new: Config) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield (section, key, old value, new value) of each difference."""
    for section in type(old).model_fields:
        old_section, new_section = getattr(old, section), getattr(new, section)
        if old_section == new_section:
            continue
        if isinstance(old_section, dict):
            yield section, "*", old_section, new_section
            continue
        for key in type(old_section).model_fields:
            if getattr(old_section, key) != getattr(new_section, key):
                yield section, key, getattr(old_section, key), getattr(new_section, key)
