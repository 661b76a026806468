"""How the admin door reads requests: only once it knows the caller, and for a limited time.

gRPC itself would read them first, so that peers without a credential could hold all of its threads.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

import petps.admin.admin_pb2 as messages
from petps.errors import DeadlineExceeded, InvalidArgument
from petps.server.grpc.limits import REQUEST_SECONDS

__all__ = ["handlers_of", "read_request"]

SERVICE: Final[Any] = messages.DESCRIPTOR.services_by_name["Admin"]


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
