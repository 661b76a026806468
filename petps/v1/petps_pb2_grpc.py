"""The service of petps.proto: its stub for clients, and its registration for servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import grpc
from google.protobuf import message_factory

from petps.v1.petps_pb2 import DESCRIPTOR

__all__ = ["PetpsServicer", "PetpsStub", "add_PetpsServicer_to_server"]

_SERVICE: Final = DESCRIPTOR.services_by_name["Petps"]


def _classes_of(method: Any) -> tuple[Any, Any]:
    """Return the message classes of a method's request and reply."""
    messages = (method.input_type, method.output_type)
    request, reply = (message_factory.GetMessageClass(message) for message in messages)
    return request, reply


class PetpsStub:
    """The calls of a client: one callable for each method, such as ``Pull(request)``."""

    def __init__(self, channel: Any) -> None:
        for method in _SERVICE.methods:
            request, reply = _classes_of(method)
            kind = channel.unary_stream if method.server_streaming else channel.unary_unary
            call = kind(
                f"/{_SERVICE.full_name}/{method.name}",
                request_serializer=request.SerializeToString,
                response_deserializer=reply.FromString,
            )
            setattr(self, method.name, call)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class PetpsServicer:
    """The base of a server's implementation, with a method for each call."""


def add_PetpsServicer_to_server(servicer: Any, server: Any) -> None:  # noqa: N802
    """Register the methods of ``servicer`` with a gRPC server."""
    handlers = {}
    for method in _SERVICE.methods:
        request, reply = _classes_of(method)
        make_handler = (
            grpc.unary_stream_rpc_method_handler
            if method.server_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        handlers[method.name] = make_handler(
            getattr(servicer, method.name),
            request_deserializer=request.FromString,
            response_serializer=reply.SerializeToString,
        )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(_SERVICE.full_name, handlers),)
    )
