"""Checks of the values that a store's JSON files hold. STORE.md.

Owns:        check_records(), check_values(), check_paths().
Never does:  read files.
Called by:   state_files.py, shares.py.
Invariants:  a value that passes has the type of its field, and no path leaves the store's folder.
Threads:     any.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from itertools import chain
from typing import Any, Final

__all__ = ["check_paths", "check_records", "check_values"]

INT_MAX: Final = (1 << 64) - 1  # a key; other numbers are smaller
# A folder of the store, and a name in it: "data/0123.chunks".
_PATH: Final = re.compile(r"[a-z]+/[0-9A-Za-z_-][0-9A-Za-z._-]*", re.ASCII)


def check_values(kind: str, name: str, values: Sequence[Any]) -> None:
    """Raise ValueError unless all values have this type, written as in the source."""
    expected = _TYPES[kind]
    if set(map(type, values)) <= expected and _RANGES[kind](values):
        return
    bad = next(
        value for value in values if type(value) not in expected or not _RANGES[kind]([value])
    )
    text = repr(bad)
    raise ValueError(f"{name} must be {_NAMES[kind]}, got {text[:60]}")


_TYPES: Final[dict[str, set[type]]] = {
    "int": {int},
    "float": {int, float},
    "bool": {bool},
    "str": {str},
    "tuple[int, ...]": {tuple},
}


_NAMES: Final = {
    "int": f"an integer from 0 to {INT_MAX}",
    "float": "a finite number",
    "bool": "true or false",
    "str": "a text",
    "tuple[int, ...]": "a list of integers from -1 on",
}


def _are_in_range(values: Sequence[int]) -> bool:
    return not values or (min(values) >= 0 and max(values) <= INT_MAX)


def _are_offsets(values: Sequence[tuple[Any, ...]]) -> bool:
    """Return whether all are tuples of integers from -1 on."""
    offsets = list(chain.from_iterable(values))
    return not offsets or (
        set(map(type, offsets)) == {int} and min(offsets) >= -1 and max(offsets) <= INT_MAX
    )


_RANGES: Final[dict[str, Callable[[Sequence[Any]], bool]]] = {
    "int": _are_in_range,
    "float": lambda values: all(map(math.isfinite, values)),
    "bool": lambda values: True,
    "str": lambda values: True,
    "tuple[int, ...]": _are_offsets,
}


def check_records(records: Sequence[Any]) -> None:
    """Raise ValueError unless each field of these dataclass objects has its declared type.

    A field ``file`` is a path. Fields of other types are not checked. Checks by columns, because a
    store may have many chunks.
    """
    if not records:
        return
    for field in fields(records[0]):
        if field.type in _TYPES:
            values = [getattr(record, field.name) for record in records]
            check_values(str(field.type), field.name, values)
            if field.name == "file":
                check_paths(values)


def check_paths(values: Iterable[object]) -> None:
    """Raise ValueError unless all are paths of files of the store, which lie in its folder."""
    for value in set(values):
        if not isinstance(value, str) or not _PATH.fullmatch(value):
            raise ValueError(f"{value!r} is no file of a store")
