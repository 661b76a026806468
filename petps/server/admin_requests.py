"""How the admin door reads requests: only once it knows the caller, and for a limited time.

gRPC itself would read them first, so that peers without a credential could hold all of its threads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

import petps.admin.admin_pb2 as messages
from petps.errors import DeadlineExceeded, InvalidArgument
from petps.log import printable
from petps.server.grpc.limits import CONNECTION_LIMITS, REQUEST_SECONDS

if TYPE_CHECKING:
    import numpy.typing as npt

    Keys = npt.NDArray[np.uint64]
    Rows = npt.NDArray[np.float32]

__all__ = [
    "PORT_LIMITS",
    "Call",
    "Ended",
    "as_loaded",
    "checked_place",
    "default_of",
    "handlers_of",
    "read_request",
]

SERVICE: Final[Any] = messages.DESCRIPTOR.services_by_name["Admin"]

PLACE_BYTES_MAX: Final = 4096  # PATH_MAX of Linux
# A connection of the port ends after this time without a call, because a peer without a credential
# may have all of them. An administrator's long call keeps its connection.
PORT_IDLE_MS: Final = 10_000
IDLE: Final = "grpc.max_connection_idle_ms"
PORT_LIMITS: Final = tuple((dict(CONNECTION_LIMITS) | {IDLE: PORT_IDLE_MS}).items())


class Ended(Exception):
    """The caller has gone, or the server stops."""

    def __init__(self) -> None:
        super().__init__("the caller has gone, or the server stops")


@dataclass(frozen=True)
class Call:
    """A call whose caller may make it."""

    context: Any
    name: str
    """As admin.proto has it."""
    user: str
    """Who makes it, for the log and the audit log."""
    is_granted: Callable[[], bool] = lambda: True
    """Returns whether its caller's grant is still in force."""
    failed: Callable[[Exception], None] = lambda error: None
    """Counts that it was tried and has failed."""

    @contextlib.contextmanager
    def counting_failure(self) -> Iterator[None]:
        """Count the call as failed if the block raises."""
        try:
            yield
        except Exception as error:
            self.failed(error)
            raise

    def is_active(self) -> bool:
        """Return whether somebody waits for it who may make it."""
        return bool(self.context.is_active()) and self.is_granted()


def handlers_of(service: Any) -> Any:
    """Return gRPC's handlers of the methods, which get their requests as bytes, unread."""
    handlers = {}
    for method in SERVICE.methods:
        kind: Any = grpc.stream_unary_rpc_method_handler
        if method.server_streaming:
            kind = grpc.stream_stream_rpc_method_handler
        handlers[method.name] = kind(
            getattr(service, method.name),
            response_serializer=lambda reply: reply.SerializeToString(),
        )
    return grpc.method_handlers_generic_handler(SERVICE.full_name, handlers)


def as_loaded(request: Any) -> tuple[Keys, Rows]:
    """Return keys uint64[n] and rows float32[n, dim] of a LoadRequest. Raises InvalidArgument."""
    if len(request.keys) % 8 or len(request.rows) % 4:
        raise InvalidArgument("keys have 8 bytes each, and values of rows 4 bytes")
    keys, rows = np.frombuffer(request.keys, "<u8"), np.frombuffer(request.rows, "<f4")
    if len(keys) == 0 or len(rows) % len(keys):
        raise InvalidArgument(f"{len(rows)} values are no rows of {len(keys)} keys")
    return keys, rows.reshape(len(keys), -1)


def default_of(request: Any) -> float | list[float]:
    """Return the default of a CreateTableRequest: a value, or a row. Raises InvalidArgument."""
    values = [float(value) for value in request.default_value]
    if request.default_is_row:
        return values
    if len(values) != 1:
        raise InvalidArgument(
            f"table '{request.name}': default_value has {len(values)} values; give one, or a row "
            "with default_is_row"
        )
    return values[0]


def checked_place(place: str, *, is_store: bool) -> str:
    """Return the folder of an export, or the store of a backup. Raises InvalidArgument.

    A relative path would be one of the server's working folder, which the caller does not know.
    """
    name = "store" if is_store else "folder"
    if not place:
        raise InvalidArgument(f"the {name} has no name: give an absolute path")
    if len(place.encode()) > PLACE_BYTES_MAX:
        raise InvalidArgument(f"the {name} has more than {PLACE_BYTES_MAX} bytes in its name")
    if printable(place) != place or set("\n\t") & set(place):
        raise InvalidArgument(f"the {name} has a control character in its name: choose another")
    if not place.startswith("/") and not (is_store and "://" in place):
        remedy = "an absolute path, or a URL such as s3://BUCKET/X" if is_store else "one"
        raise InvalidArgument(f"the {name} {place!r} is no absolute path: give {remedy}")
    return place


def read_request(method: str, requests: Iterator[bytes], context: Any) -> Any:
    """Return the request. Raises InvalidArgument, DeadlineExceeded."""
    timer = threading.Timer(REQUEST_SECONDS, context.cancel)
    timer.daemon = True
    timer.start()
    try:
        content = next(requests, None)
    except grpc.RpcError:  # cancelled
        raise DeadlineExceeded(
            f"the request was not complete after {REQUEST_SECONDS:g} s"
        ) from None
    finally:
        timer.cancel()
    if content is None:
        raise InvalidArgument("the call has no request")
    kind = GetMessageClass(SERVICE.methods_by_name[method].input_type)
    try:
        return kind.FromString(content)
    except DecodeError:
        raise InvalidArgument(
            f"the request's {len(content)} bytes are not the message that {method} takes"
        ) from None
