"""One tree of errors for everything petps says no to.

Every class carries the code that native code and the wire use (native/base/status.h), so that one
name means one thing in C++, on the wire, in a log line and in an ``except``. The text of an error
names the thing that is wrong and the remedy. Native code raises exactly these classes.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "BY_CODE",
    "AlreadyExists",
    "DataLoss",
    "DeadlineExceeded",
    "FailedPrecondition",
    "InternalError",
    "InvalidArgument",
    "IoError",
    "NotFound",
    "PermissionDenied",
    "PetpsError",
    "ResourceExhausted",
    "Stale",
    "Unavailable",
    "Unimplemented",
    "WrongShard",
    "class_of",
]


class PetpsError(Exception):
    """Base of every error of petps. ``code`` is the name of native/base/status.h."""

    code: ClassVar[str] = "INTERNAL"
    number: ClassVar[int] = 13


class InvalidArgument(PetpsError, ValueError):
    """The input is wrong; asking again changes nothing."""

    code = "INVALID_ARGUMENT"
    number = 1


class NotFound(PetpsError, LookupError):
    """No such table, file, model or instance."""

    code = "NOT_FOUND"
    number = 2


class AlreadyExists(PetpsError):
    """A pool, table or instance of that name is there already."""

    code = "ALREADY_EXISTS"
    number = 3


class ResourceExhausted(PetpsError):
    """Table full, disk full, or a limit reached."""

    code = "RESOURCE_EXHAUSTED"
    number = 4
    report: object = None
    """What was done before the limit was reached (a push to a full table: its PushReport)."""


class FailedPrecondition(PetpsError):
    """The thing is in the wrong state: closed, read-only, locked, fed by deltas."""

    code = "FAILED_PRECONDITION"
    number = 5


class Unavailable(PetpsError, ConnectionError):
    """The peer is away; asking again may help."""

    code = "UNAVAILABLE"
    number = 6


class DeadlineExceeded(PetpsError, TimeoutError):
    """The caller's deadline passed."""

    code = "DEADLINE_EXCEEDED"
    number = 7


class DataLoss(PetpsError):
    """A checksum does not fit, a file is torn, a chunk is corrupt."""

    code = "DATA_LOSS"
    number = 8


class PermissionDenied(PetpsError):
    """The caller may not do this."""

    code = "PERMISSION_DENIED"
    number = 9


class Stale(PetpsError):
    """The server is older than the ``min_version`` asked for."""

    code = "STALE"
    number = 10
    applied_version: int = 0
    """Of the instance that was asked for, where the server adds it."""


class WrongShard(PetpsError):
    """A key of the request is not owned by the server asked."""

    code = "WRONG_SHARD"
    number = 11


class Unimplemented(PetpsError):
    """Unknown operation, or a format newer than this program."""

    code = "UNIMPLEMENTED"
    number = 12


class InternalError(PetpsError):
    """A mistake of petps itself: please report it."""

    code = "INTERNAL"
    number = 13


class IoError(PetpsError, OSError):
    """The operating system refused; its reason is in the message."""

    code = "IO_ERROR"
    number = 14


_LEAVES: tuple[type[PetpsError], ...] = (
    InvalidArgument,
    NotFound,
    AlreadyExists,
    ResourceExhausted,
    FailedPrecondition,
    Unavailable,
    DeadlineExceeded,
    DataLoss,
    PermissionDenied,
    Stale,
    WrongShard,
    Unimplemented,
    InternalError,
    IoError,
)

BY_CODE: dict[str, type[PetpsError]] = {leaf.code: leaf for leaf in _LEAVES}
_BY_NUMBER: dict[int, type[PetpsError]] = {leaf.number: leaf for leaf in _LEAVES}


def class_of(number: int) -> type[PetpsError]:
    """The class of a native code's number; ``PetpsError`` for an unknown one."""
    return _BY_NUMBER.get(number, PetpsError)
