"""What a petps client raises: one class for each code of the wire, under :class:`PetpsError`.

The package needs nothing of ``petps`` itself; the names and codes are the same. The text of an
error names the server and the thing that is wrong.
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
    """Base of every error of a client. ``code`` is its name on the wire."""

    code: ClassVar[str] = "INTERNAL"
    number: ClassVar[int] = 13


class InvalidArgument(PetpsError, ValueError):
    """The input is wrong; asking again changes nothing."""

    code = "INVALID_ARGUMENT"
    number = 1


class NotFound(PetpsError, LookupError):
    """No such table or model; the text lists the known ones."""

    code = "NOT_FOUND"
    number = 2


class AlreadyExists(PetpsError):
    """A thing of that name is there already."""

    code = "ALREADY_EXISTS"
    number = 3


class ResourceExhausted(PetpsError):
    """Table full, or a limit of the server reached."""

    code = "RESOURCE_EXHAUSTED"
    number = 4
    report: object = None
    """Of a push to a full table: its PushReport."""


class FailedPrecondition(PetpsError):
    """The thing is in the wrong state: a closed client, a table fed by deltas."""

    code = "FAILED_PRECONDITION"
    number = 5


class Unavailable(PetpsError, ConnectionError):
    """No server could be reached, or it closed the connection; asking again may help."""

    code = "UNAVAILABLE"
    number = 6


class DeadlineExceeded(PetpsError, TimeoutError):
    """The deadline passed before a complete answer came."""

    code = "DEADLINE_EXCEEDED"
    number = 7


class DataLoss(PetpsError):
    """The server found damaged data."""

    code = "DATA_LOSS"
    number = 8


class PermissionDenied(PetpsError):
    """The server does not allow it."""

    code = "PERMISSION_DENIED"
    number = 9


class Stale(PetpsError):
    """No server is as new as ``min_version``."""

    code = "STALE"
    number = 10


class WrongShard(PetpsError):
    """A key is not owned by the server that was asked."""

    code = "WRONG_SHARD"
    number = 11


class Unimplemented(PetpsError):
    """The server speaks another version of the protocol, or does not know the request."""

    code = "UNIMPLEMENTED"
    number = 12


class InternalError(PetpsError):
    """A mistake of petps itself."""

    code = "INTERNAL"
    number = 13


class IoError(PetpsError, OSError):
    """The server's operating system refused."""

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
    """The class of a code's number on the wire; InternalError for an unknown one."""
    return _BY_NUMBER.get(number, InternalError)
