"""The classes of all errors that petps and its client raise.

Every class has a code of native/base/status.h. So an error has the same name in C++, on the wire,
in a log line and in an ``except``. The text of an error names the thing that is wrong and the
remedy. The classes are here, and not in ``petps.errors``, because the client is installed without
the rest of petps; ``petps.errors`` re-exports them.
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
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "WrongShard",
    "class_of",
]


BY_CODE: dict[str, type[PetpsError]] = {}
_BY_NUMBER: dict[int, type[PetpsError]] = {}


class PetpsError(Exception):
    """Base class of every error of petps.

    ``code`` and ``number`` are those of native/base/status.h. A subclass without a code of its own
    has that of its base class.
    """

    code: ClassVar[str] = "INTERNAL"
    number: ClassVar[int] = 13

    def __init_subclass__(cls, code: str | None = None, number: int | None = None) -> None:
        if code is not None and number is not None:
            cls.code, cls.number = code, number
            BY_CODE[code] = _BY_NUMBER[number] = cls


class InvalidArgument(PetpsError, ValueError, code="INVALID_ARGUMENT", number=1):
    """Wrong input. A retry fails in the same way."""


class NotFound(PetpsError, LookupError, code="NOT_FOUND", number=2):
    """An unknown table, file, model or instance."""


class AlreadyExists(PetpsError, code="ALREADY_EXISTS", number=3):
    """The name of a pool, table or instance exists already."""


class ResourceExhausted(PetpsError, code="RESOURCE_EXHAUSTED", number=4):
    """A full table, a full disk, or a limit that is reached: of a server, of connections."""

    report: object = None
    """What was applied before the limit was reached. After a push to a full table: a PushReport."""


class FailedPrecondition(PetpsError, code="FAILED_PRECONDITION", number=5):
    """A wrong state, such as a closed client, a read-only pool, a table that deltas feed."""


class Unavailable(PetpsError, ConnectionError, code="UNAVAILABLE", number=6):
    """No reachable server, or a broken connection. A retry may succeed."""


class DeadlineExceeded(PetpsError, TimeoutError, code="DEADLINE_EXCEEDED", number=7):
    """The caller's deadline passed before the call was complete."""


class DataLoss(PetpsError, code="DATA_LOSS", number=8):
    """Damaged data: a wrong checksum, a torn file, a corrupt chunk."""


class PermissionDenied(PetpsError, code="PERMISSION_DENIED", number=9):
    """A request that the caller is not allowed to make."""


class Stale(PetpsError, code="STALE", number=10):
    """No live server is as new as ``min_version``, or as what this client has returned already."""

    applied_version: int = 0
    """The applied version of the requested instance, if the server sends it."""


class WrongShard(PetpsError, code="WRONG_SHARD", number=11):
    """The server does not own a key of the request."""


class Unimplemented(PetpsError, code="UNIMPLEMENTED", number=12):
    """An unknown operation, or a format newer than this program."""


class InternalError(PetpsError, code="INTERNAL", number=13):
    """A bug in petps. Please report it."""


class IoError(PetpsError, OSError, code="IO_ERROR", number=14):
    """An error of the operating system. The message has its reason."""


class InUse(FailedPrecondition, code="IN_USE", number=15):
    """A pool that another process has open."""


class Unauthenticated(PetpsError, code="UNAUTHENTICATED", number=16):
    """A request without a credential, or with one that is unknown, expired or revoked."""


def class_of(number: int) -> type[PetpsError]:
    """Return the class for a code's number; PetpsError for one that only a newer server knows."""
    return _BY_NUMBER.get(number, PetpsError)
