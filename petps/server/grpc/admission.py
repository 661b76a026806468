"""What a call passes before its request is read: a place, its caller, a time limit, memory.

gRPC itself would read the request first, of everybody: peers without a credential could fill the
memory with requests, hold every call with requests that never end, and fill the log with requests
that are no messages.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from inspect import isasyncgenfunction
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import grpc
from google.protobuf.message import DecodeError

from petps.errors import DeadlineExceeded, InvalidArgument, PetpsError, ResourceExhausted
from petps.server.access import host_of, peer_of
from petps.server.grpc.codes import refuse
from petps.server.grpc.limits import (
    MAX_CALLS,
    MAX_OPEN_CALLS,
    MAX_WATCHERS,
    REQUEST_SECONDS,
    REQUESTS_RECEIVED_PER_PEER,
)

__all__ = ["Admission"]

Context: TypeAlias = "grpc.aio.ServicerContext"


class Admission(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Admits the calls of one port. Runs in the loop's thread."""

    def __init__(
        self,
        service: str,
        *,
        admit: Callable[[Context], None],
        hold: Callable[[int], None],
        release: Callable[[int], None],
    ) -> None:
        """Take the functions that decide. Calls of other services than ``service`` need no caller.

        ``admit`` finds the caller, or raises a PetpsError. ``hold`` counts bytes of a request or a
        reply until ``release``; it raises ResourceExhausted if there is no memory.
        """
        self._prefix = f"/{service}/"
        self._admit, self._hold, self._release = admit, hold, release
        self._calls, self._watches, self._open = map(
            _Places, (MAX_CALLS, MAX_WATCHERS, MAX_OPEN_CALLS)
        )
        self._receiving: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        """Return a handler that admits the call before it reads the request."""
        handler = await continuation(details)
        if handler is None:
            return None
        needs_caller = details.method.startswith(self._prefix)

        async def answer(requests: Any, context: Context) -> Any:
            try:
                request = await self._admitted(handler, needs_caller, context)
                reply = await handler.unary_unary(request, context)
                self._hold_until_end(reply.ByteSize())  # its peer may never read it
                return reply
            except PetpsError as error:
                await refuse(context, error)

        async def stream(requests: Any, context: Context) -> None:
            try:
                if handler.request_streaming:  # reflection
                    self._take_place(needs_caller, True, context)
                    replies = handler.stream_stream(self._requests(handler, context), context)
                else:
                    request = await self._admitted(handler, needs_caller, context)
                    if not isasyncgenfunction(handler.unary_stream):  # it writes itself
                        await handler.unary_stream(request, context)
                        return
                    replies = handler.unary_stream(request, context)
                async with contextlib.aclosing(replies):
                    async for reply in replies:
                        await context.write(reply)
            except PetpsError as error:
                await refuse(context, error)

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(answer, None, handler.response_serializer)

    # ---- steps

    def _take_place(self, needs_caller: bool, is_stream: bool, context: Context) -> str:
        """Give the call a place until it has ended. Return the peer's address."""
        places = (self._watches if is_stream else self._calls) if needs_caller else self._open
        host = host_of(peer_of(context))
        places.take(host)
        _task().add_done_callback(lambda _: places.give_back(host))
        return host

    async def _admitted(self, handler: Any, needs_caller: bool, context: Context) -> Any:
        """Return the request of a call that is admitted. Raises PetpsError."""
        host = self._take_place(needs_caller, handler.response_streaming, context)
        if needs_caller:
            self._admit(context)
        receiving = self._receiving.get(host)
        if receiving is None:
            receiving = asyncio.Semaphore(REQUESTS_RECEIVED_PER_PEER)
            self._receiving[host] = receiving
        async with receiving:
            try:
                async with asyncio.timeout(REQUEST_SECONDS):
                    content = await context.read()
            except TimeoutError:
                raise DeadlineExceeded(
                    f"the request was not complete after {REQUEST_SECONDS:g} s"
                ) from None
            if content is grpc.aio.EOF:
                raise InvalidArgument("the call has no request")
            self._hold_until_end(len(content))
        return _decode(handler, content)

    async def _requests(self, handler: Any, context: Context) -> AsyncIterator[Any]:
        while (content := await context.read()) is not grpc.aio.EOF:
            try:
                yield _decode(handler, content)
            except InvalidArgument as error:
                await refuse(context, error)

    def _hold_until_end(self, count: int) -> None:
        """Count bytes of a request or a reply until the call has ended."""
        self._hold(count)
        _task().add_done_callback(lambda _: self._release(count))


class _Places:
    """The calls that there may be at once; one peer has at most half of them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._of_peer: Counter[str] = Counter()
        self._taken = 0

    def take(self, host: str) -> None:
        """Count a call. Raises ResourceExhausted."""
        if self._taken >= self._limit:
            raise ResourceExhausted(
                f"there are {self._limit} calls of this kind already: try again, or ask a replica"
            )
        if self._of_peer[host] >= self._limit // 2:
            raise ResourceExhausted(
                f"{host} has its {self._limit // 2} calls of this kind already: end one first"
            )
        self._taken += 1
        self._of_peer[host] += 1

    def give_back(self, host: str) -> None:
        """Count the call no more."""
        self._taken -= 1
        self._of_peer[host] -= 1
        if self._of_peer[host] == 0:
            del self._of_peer[host]


def _task() -> asyncio.Task[Any]:
    """Return the task of the call, which ends when the reply is sent."""
    task = asyncio.current_task()
    assert task is not None
    return task


def _decode(handler: Any, content: bytes) -> Any:
    try:
        return handler.request_deserializer(content)
    except DecodeError:
        raise InvalidArgument(
            f"the request's {len(content)} bytes are not the message that this method takes"
        ) from None
