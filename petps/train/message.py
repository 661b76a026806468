"""Small structured messages between ranks: JSON objects with known fields.

Owns:        encode(), decode(), and the readers of a field's value.
Never does:  send anything; build an object of a class that the message names.
Called by:   agree.py, plan.py, runs.py, routing.py (refuse).
Invariants:  a message with an unknown field, or with a value that its reader refuses, is never
             used. The error names the rank that sent the message, and the field.
Threads:     any.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from petps.checkpoint import Table
from petps.checkpoint.state_files import read_tables
from petps.errors import FailedPrecondition, PetpsError

__all__ = [
    "Fields",
    "decode",
    "dict_of",
    "encode",
    "list_of",
    "object_of",
    "or_none",
    "read_bool",
    "read_int",
    "read_table_map",
    "read_text",
    "refuse",
]

Reader = Callable[[Any], Any]
"""Returns the value of a field. Raises ValueError, which says what the value must be."""
Fields = Mapping[str, Reader]

# A version of the log is a uint64.
INT_MAX: Final = (1 << 64) - 1
SHOWN_CHARS: Final = 60  # of a refused value


def encode(values: Mapping[str, Any]) -> bytes:
    """Return a message with these fields."""
    return json.dumps(values, separators=(",", ":")).encode()


def decode(
    body: bytes, rank: int, fields: Fields, *, optional: Fields | None = None
) -> dict[str, Any]:
    """Return the fields of a message of ``rank`` as a dict.

    Args:
        body: What encode() returned on that rank.
        rank: For errors.
        fields: The reader of each field.
        optional: Further fields, which the message may lack.

    Raises:
        FailedPrecondition: The message cannot be read. All ranks that read it raise the same.
    """
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise refuse(rank, f"it is no JSON ({_shorten(error)})") from error
    if not isinstance(values, dict):
        raise refuse(rank, f"it must be an object, got {_shorten(repr(values))}")
    readers = {**fields, **(optional or {})}
    if unknown := sorted(values.keys() - readers.keys()):
        raise refuse(rank, f"field {_shorten(repr(unknown[0]))} is unknown")
    if missing := sorted(fields.keys() - values.keys()):
        raise refuse(rank, f"field {missing[0]!r} is missing")
    result = {}
    for name, value in values.items():
        try:
            result[name] = readers[name](value)
        except (ValueError, TypeError, KeyError, AttributeError, PetpsError) as error:
            text = f"field {name!r}: {_shorten(error)}, got {_shorten(repr(value))}"
            raise refuse(rank, text) from error
    return result


def refuse(rank: int, reason: str) -> FailedPrecondition:
    """Return the error for a message that cannot be read."""
    return FailedPrecondition(
        f"rank {rank} sent a message that cannot be read: {reason}; all ranks need the same "
        "release of petps and the same tables"
    )


def _shorten(value: object) -> str:
    text = str(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def read_bool(value: Any) -> bool:
    """Return a value that is true or false."""
    if not isinstance(value, bool):
        raise ValueError("it must be true or false")
    return value


def read_int(value: Any) -> int:
    """Return an integer from 0 to INT_MAX."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= INT_MAX:
        raise ValueError(f"it must be an integer from 0 to {INT_MAX}")
    return value


def read_text(value: Any) -> str:
    """Return a text."""
    if not isinstance(value, str):
        raise ValueError("it must be a text")
    return value


def read_table_map(value: Any) -> dict[str, Table]:
    """Return the tables that describe_tables() described."""
    if not isinstance(value, dict):
        raise ValueError("it must be an object with a list of columns for each table")
    return read_tables(value)


def or_none(read: Reader) -> Reader:
    """Return a reader that also accepts null."""
    return lambda value: None if value is None else read(value)


def list_of(read: Reader) -> Reader:
    """Return a reader of a list."""

    def read_list(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise ValueError("it must be a list")
        return [read(item) for item in value]

    return read_list


def dict_of(read: Reader) -> Reader:
    """Return a reader of an object with any names."""

    def read_dict(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError("it must be an object")
        return {name: read(item) for name, item in value.items()}

    return read_dict


def object_of(fields: Fields) -> Reader:
    """Return a reader of an object with exactly these fields."""

    def read_object(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or value.keys() != fields.keys():
            raise ValueError(f"it must be an object with the fields {', '.join(fields)}")
        return {name: read(value[name]) for name, read in fields.items()}

    return read_object
