"""A client of the server that has a pool open, found by the pool's path."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

import petps.admin.admin_pb2 as messages
from petps.admin.admin_pb2_grpc import AdminStub
from petps.admin.socket import socket_of
from petps.errors import BY_CODE, FailedPrecondition, InUse, PetpsError, Unavailable
from petps.v1.service import CODE_KEY

__all__ = ["AdminClient"]


def _owner(pool: str | Path) -> int:
    return os.stat(pool).st_uid


class AdminClient:
    """A connection to the server of ``pool``. Use it as a context manager.

    Raises InUse if another process has the pool open that is no such server, and the errors of the
    server.
    """

    def __init__(self, pool: str | Path) -> None:
        self._pool, path = pool, socket_of(pool)
        is_ours = path.is_socket() and path.stat().st_uid in (os.geteuid(), _owner(pool), 0)
        if not is_ours:  # in a folder that all may write, somebody else's socket may be there
            raise InUse(
                f"{pool} is in use by another process, and there is no socket {path} of its "
                "user: a server of the pool has one. Stop the process, or run the command where "
                "it runs"
            )
        self._channel = grpc.insecure_channel(f"unix:{path}")
        self._stub = AdminStub(self._channel)

    def grow(
        self,
        table: str,
        capacity: int,
        *,
        model: str | None = None,
        paced: bool = True,
        progress: Callable[[int, int], bool] | None = None,
    ) -> None:
        """See Pool.grow."""
        request = messages.GrowRequest(
            model=model or "", table=table, capacity=capacity, unpaced=not paced
        )
        with self._errors():
            call = self._stub.Grow(request, wait_for_ready=False)
            try:
                for reply in call:
                    if progress is None or reply.done:
                        continue
                    if progress(reply.buckets_copied, reply.buckets) is False:
                        raise FailedPrecondition(f"table '{table}': growing was cancelled")
            finally:
                call.cancel()  # after Ctrl-C the table stays as it was

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise self._error_of(error) from None

    def _error_of(self, error: Any) -> PetpsError:
        code = dict(error.trailing_metadata() or ()).get(CODE_KEY)
        if code in BY_CODE:
            return BY_CODE[code](error.details())
        return Unavailable(
            f"{self._pool} is in use by another process, and its server does not answer on "
            f"{socket_of(self._pool)}: {error.details()}"
        )
