"""The classes of all errors that petps and its client raise.

Every class carries the code that native code and the wire use (native/base/status.h). So an error
has the same name in C++, on the wire, in a log line and in an ``except``. The text of an error
names the thing that is wrong and the remedy. ``petps.errors`` has the same classes: this package
works on machines that have nothing else of petps.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "BY_CODE",
    "AlreadyExists",
    "DataLoss",
    "DeadlineExceeded",
    "FailedPrecondition",
    "InUse",
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
    """Base class of every error of petps. ``code`` is its name in native/base/status.h."""

    code: ClassVar[str] = "INTERNAL"
    number: ClassVar[int] = 13


class InvalidArgument(PetpsError, ValueError):
    """Wrong input. A retry fails in the same way."""

    code = "INVALID_ARGUMENT"
    number = 1


class NotFound(PetpsError, LookupError):
    """An unknown table, file, model or instance."""

    code = "NOT_FOUND"
    number = 2


class AlreadyExists(PetpsError):
    """The name of a pool, table or instance exists already."""

    code = "ALREADY_EXISTS"
    number = 3


class ResourceExhausted(PetpsError):
    """A full table, a full disk, or a limit that is reached: of a server, of connections."""

    code = "RESOURCE_EXHAUSTED"
    number = 4
    report: object = None
    """What was applied before the limit was reached. After a push to a full table: a PushReport."""


class FailedPrecondition(PetpsError):
    """A wrong state, such as a closed client, a read-only pool, a table that deltas feed."""

    code = "FAILED_PRECONDITION"
    number = 5


class Unavailable(PetpsError, ConnectionError):
    """No reachable server, or a broken connection. A retry may succeed."""

    code = "UNAVAILABLE"
    number = 6


class DeadlineExceeded(PetpsError, TimeoutError):
    """The caller's deadline passed before the call was complete."""

    code = "DEADLINE_EXCEEDED"
    number = 7


class DataLoss(PetpsError):
    """Damaged data: a wrong checksum, a torn file, a corrupt chunk."""

    code = "DATA_LOSS"
    number = 8


class PermissionDenied(PetpsError):
    """A request that the caller is not allowed to make."""

    code = "PERMISSION_DENIED"
    number = 9


class Stale(PetpsError):
    """No live server is as new as ``min_version``, or as what this client has returned already."""

    code = "STALE"
    number = 10
    applied_version: int = 0
    """The applied version of the requested instance, if the server sends it."""


class WrongShard(PetpsError):
    """The server does not own a key of the request."""

    code = "WRONG_SHARD"
    number = 11


class Unimplemented(PetpsError):
    """An unknown operation, or a format newer than this program."""

    code = "UNIMPLEMENTED"
    number = 12


class InternalError(PetpsError):
    """A bug in petps. Please report it."""

    code = "INTERNAL"
    number = 13


class IoError(PetpsError, OSError):
    """An error of the operating system. The message has its reason."""

    code = "IO_ERROR"
    number = 14


class InUse(FailedPrecondition):
    """A pool that another process has open."""

    code = "IN_USE"
    number = 15


_CLASSES: tuple[type[PetpsError], ...] = (
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
    InUse,
)

BY_CODE: dict[str, type[PetpsError]] = {kind.code: kind for kind in _CLASSES}
_BY_NUMBER: dict[int, type[PetpsError]] = {kind.number: kind for kind in _CLASSES}


def class_of(number: int) -> type[PetpsError]:
    """Return the class for a code's number; PetpsError for one that only a newer server knows."""
    return _BY_NUMBER.get(number, PetpsError)
