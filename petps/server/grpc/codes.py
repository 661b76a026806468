"""Mapping of petps errors to gRPC status codes."""

from __future__ import annotations

from typing import Final, NoReturn

import grpc

from petps.errors import PetpsError
from petps.log import request_id
from petps.v1.service import CODE_KEY, REQUEST_ID_KEY

__all__ = ["GRPC_CODES", "refuse"]

# STALE becomes UNAVAILABLE, because the same call may succeed on another replica, or here later.
# WRONG_SHARD becomes ABORTED, because the client must start over with the newer shard map. So a
# client that retries by gRPC's rules does the right thing.
GRPC_CODES: Final = {
    "INVALID_ARGUMENT": grpc.StatusCode.INVALID_ARGUMENT,
    "NOT_FOUND": grpc.StatusCode.NOT_FOUND,
    "ALREADY_EXISTS": grpc.StatusCode.ALREADY_EXISTS,
    "RESOURCE_EXHAUSTED": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "FAILED_PRECONDITION": grpc.StatusCode.FAILED_PRECONDITION,
    "UNAVAILABLE": grpc.StatusCode.UNAVAILABLE,
    "DEADLINE_EXCEEDED": grpc.StatusCode.DEADLINE_EXCEEDED,
    "DATA_LOSS": grpc.StatusCode.DATA_LOSS,
    "PERMISSION_DENIED": grpc.StatusCode.PERMISSION_DENIED,
    "STALE": grpc.StatusCode.UNAVAILABLE,
    "WRONG_SHARD": grpc.StatusCode.ABORTED,
    "UNIMPLEMENTED": grpc.StatusCode.UNIMPLEMENTED,
    "INTERNAL": grpc.StatusCode.INTERNAL,
    "IO_ERROR": grpc.StatusCode.INTERNAL,
    "IN_USE": grpc.StatusCode.FAILED_PRECONDITION,
    "UNAUTHENTICATED": grpc.StatusCode.UNAUTHENTICATED,
}


async def refuse(
    context: grpc.aio.ServicerContext,
    error: PetpsError,
    metadata: tuple[tuple[str, str | bytes], ...] = (),
) -> NoReturn:
    """End the call with this error.

    Its code, the request's id and ``metadata`` are the trailing metadata.
    """
    facts = ((CODE_KEY, error.code), (REQUEST_ID_KEY, request_id.get()))
    await context.abort(GRPC_CODES[error.code], str(error), (*facts, *metadata))
    raise AssertionError("abort returned")  # it raises
