"""The differences of two configurations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from petps.config.schema import Config
from petps.config.section import Section
from petps.config.variable import KeyPath

__all__ = ["Change", "changes", "replaced"]

Place = TypeVar("Place")


@dataclass(frozen=True)
class Change:
    """A key, or a whole table, whose value differs. None: it is missing."""

    path: KeyPath
    old: Any
    new: Any

    @property
    def key(self) -> str:
        """Return the key's full name."""
        return ".".join(self.path)


def changes(old: Config, new: Config) -> Iterator[Change]:
    """Yield each difference."""
    return _changes_of(dict(old), dict(new), ())


def _changes_of(old: dict[str, Any], new: dict[str, Any], path: KeyPath) -> Iterator[Change]:
    for name in dict.fromkeys((*old, *new)):
        before, after = old.get(name), new.get(name)
        if before == after:
            continue
        if isinstance(before, Section | dict) and isinstance(after, Section | dict):
            yield from _changes_of(dict(before), dict(after), (*path, name))
        else:
            yield Change((*path, name), before, after)


def replaced(place: Place, path: KeyPath, value: Any) -> Place:
    """Return a section, or a dict of them, with another value of a key that it has."""
    name, rest = path[0], path[1:]
    items = dict(place)  # type: ignore[call-overload]
    update = {name: replaced(items[name], rest, value) if rest else value}
    if isinstance(place, Section):
        return place.model_copy(update=update)
    result: Any = items | update
    return result  # type: ignore[no-any-return]
