"""The settings as `petps config check` shows them, without secrets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from petps.config.load import Settings
from petps.config.secret import HIDDEN, hide_password, is_secret

__all__ = ["ShownSetting", "shown_settings"]


@dataclass(frozen=True)
class ShownSetting:
    """A setting that has not its default."""

    key: str
    """Its full name: 'server.limits.pin_ms'."""
    value: Any
    """A plain value; HIDDEN for a secret."""
    source: str
    """The file, the variable, or 'command line'."""


def shown_settings(settings: Settings) -> Iterator[ShownSetting]:
    """Yield each setting that has not its default, in the order of their names."""
    for path, source in sorted(settings.sources.items()):
        place: Any = settings.config
        default: Any = None
        for part in path:
            if isinstance(place, BaseModel):
                default = type(place).model_fields[part].default
                place = getattr(place, part)
            else:
                default, place = None, place[part]
        if place != default:
            yield ShownSetting(".".join(path), _shown(path, place), source)


def _shown(path: tuple[str, ...], value: Any) -> Any:
    if path[0] in ("kafka", "cluster") and is_secret(path[-1]):
        return HIDDEN
    return hide_password(str(value)) if isinstance(value, str | Path) else value
