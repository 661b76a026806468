"""A gRPC service from its descriptor: callables for a client, handlers for a server."""

from __future__ import annotations

from typing import Any, Final

import grpc
from google.protobuf import message_factory

__all__ = ["CODE_KEY", "REQUEST_ID_KEY", "add_calls", "register"]

CODE_KEY: Final = "petps-code"  # of an error, in the trailing metadata
# Of a request, in its metadata, and of its reply, in the trailing metadata.
REQUEST_ID_KEY: Final = "x-request-id"


def _classes_of(method: Any) -> tuple[Any, Any]:
    """Return the message classes of a method's request and reply."""
    messages = (method.input_type, method.output_type)
    request, reply = (message_factory.GetMessageClass(message) for message in messages)
    return request, reply


def add_calls(stub: Any, channel: Any, service: Any) -> None:
    """Give ``stub`` a callable for each method of the service."""
    for method in service.methods:
        request, reply = _classes_of(method)
        kind = channel.unary_stream if method.server_streaming else channel.unary_unary
        call = kind(
            f"/{service.full_name}/{method.name}",
            request_serializer=request.SerializeToString,
            response_deserializer=reply.FromString,
        )
        setattr(stub, method.name, call)


def register(servicer: Any, server: Any, service: Any) -> None:
    """Register the methods of ``servicer`` with a gRPC server."""
    handlers = {}
    for method in service.methods:
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
        (grpc.method_handlers_generic_handler(service.full_name, handlers),)
    )
