"""The errors of a petps client: one class for each code of the wire, under :class:`PetpsError`.

Names and codes are those of ``petps.errors``, but the package does not depend on ``petps``. The
text of an error names the server and the thing that is wrong.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
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
]


class PetpsError(Exception):
    """Base class of every error of a client. ``code`` is its name on the wire."""

    code: ClassVar[str] = "INTERNAL"
    number: ClassVar[int] = 13


class InvalidArgument(PetpsError, ValueError):
    """Wrong input. A retry fails in the same way."""

    code = "INVALID_ARGUMENT"
    number = 1


class NotFound(PetpsError, LookupError):
    """An unknown table, instance or model. The text lists the known ones."""

    code = "NOT_FOUND"
    number = 2


class AlreadyExists(PetpsError):
    """The name exists already."""

    code = "ALREADY_EXISTS"
    number = 3


class ResourceExhausted(PetpsError):
    """A full table, a limit of the server, or all of the client's connections in use."""

    code = "RESOURCE_EXHAUSTED"
    number = 4
    report: object = None
    """The PushReport of a push to a full table, else None."""


class FailedPrecondition(PetpsError):
    """A wrong state, such as a closed client, or a push to a table that is fed by deltas."""

    code = "FAILED_PRECONDITION"
    number = 5


class Unavailable(PetpsError, ConnectionError):
    """No reachable server, or a broken connection. A retry may succeed."""

    code = "UNAVAILABLE"
    number = 6


class DeadlineExceeded(PetpsError, TimeoutError):
    """The deadline passed before a complete reply arrived."""

    code = "DEADLINE_EXCEEDED"
    number = 7


class DataLoss(PetpsError):
    """Damaged data on the server."""

    code = "DATA_LOSS"
    number = 8


class PermissionDenied(PetpsError):
    """A request that the server does not allow."""

    code = "PERMISSION_DENIED"
    number = 9


class Stale(PetpsError):
    """No live server is as new as ``min_version``, or as what this client has returned already."""

    code = "STALE"
    number = 10


class WrongShard(PetpsError):
    """The server does not own a key of the request."""

    code = "WRONG_SHARD"
    number = 11


class Unimplemented(PetpsError):
    """A request, dtype or version of the protocol that one side does not know."""

    code = "UNIMPLEMENTED"
    number = 12


class InternalError(PetpsError):
    """A bug in petps."""

    code = "INTERNAL"
    number = 13


class IoError(PetpsError, OSError):
    """An error of the server's operating system."""

    code = "IO_ERROR"
    number = 14


_BY_NUMBER: dict[int, type[PetpsError]] = {
    each.number: each
    for each in (
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
}


def class_of(number: int) -> type[PetpsError]:
    """Return the class for a code's number on the wire; InternalError for an unknown number."""
    return _BY_NUMBER.get(number, InternalError)
