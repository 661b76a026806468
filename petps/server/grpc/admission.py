"""What a call passes before its request is read: a place, its caller, a time limit, memory.

gRPC itself would read the request first, of everybody: peers without a credential could fill the
memory with requests, hold every call with requests that never end, and fill the log with requests
that are no messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from inspect import isasyncgenfunction
from typing import Any, NoReturn, TypeAlias
from weakref import WeakValueDictionary

import grpc
from google.protobuf.message import DecodeError

from petps.errors import DeadlineExceeded, InvalidArgument, PetpsError, ResourceExhausted
from petps.log import log_event
from petps.server.access import host_of, peer_of
from petps.server.grpc.codes import refuse
from petps.server.grpc.limits import (
    MAX_CALLS,
    MAX_HEALTH_CALLS,
    MAX_REFLECTION_CALLS,
    MAX_WATCHERS,
    OPEN_REQUEST_BYTES,
    OPEN_REQUESTS_RECEIVED,
    REFLECTION_SECONDS,
    REQUEST_SECONDS,
    REQUESTS_RECEIVED,
)

__all__ = ["Admission"]

_log = logging.getLogger("petps.server.grpc")

Context: TypeAlias = "grpc.aio.ServicerContext"


class Admission(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Admits the calls of one port. Runs in the loop's thread."""

    def __init__(
        self,
        service: str,
        *,
        admit: Callable[[Context], Awaitable[str]],
        charge: Callable[[int], None],
        hold: Callable[[int], None],
        release: Callable[[int], None],
    ) -> None:
        """Take the functions that decide. Calls of other services than ``service`` need no caller.

        ``admit`` finds the caller and returns its name ("": it has none, because nobody is asked
        for a credential), or raises a PetpsError. ``charge`` takes the bytes of the request, once
        it is here, and looks at the caller again. ``hold`` counts bytes of a request or a reply
        until ``release``; it raises ResourceExhausted if there is no memory.
        """
        self._prefix = f"/{service}/"
        self._admit, self._charge, self._hold, self._release = admit, charge, hold, release
        self._calls, self._watches, self._health, self._reflections = map(
            _Places, (MAX_CALLS, MAX_WATCHERS, MAX_HEALTH_CALLS, MAX_REFLECTION_CALLS)
        )
        self._receiving: WeakValueDictionary[tuple[str, str | None], asyncio.Semaphore] = (
            WeakValueDictionary()
        )

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
                return await self._answer(handler, needs_caller, context)
            except BaseException as error:
                await _end(context, error)

        async def stream(requests: Any, context: Context) -> None:
            try:
                await self._stream(handler, needs_caller, context)
            except BaseException as error:
                await _end(context, error)

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(answer, None, handler.response_serializer)

    # ---- steps

    async def _answer(self, handler: Any, needs_caller: bool, context: Context) -> Any:
        places = self._calls if needs_caller else self._health
        request = await self._admitted(handler, needs_caller, places, context)
        reply = await handler.unary_unary(request, context)
        self._hold_until_end(reply.ByteSize())  # its peer may never read it
        return reply

    async def _stream(self, handler: Any, needs_caller: bool, context: Context) -> None:
        if handler.request_streaming:
            host = self._take_place(self._reflections, context)
            replies = handler.stream_stream(self._requests(handler, host, context), context)
        else:
            places = self._watches if needs_caller else self._health
            request = await self._admitted(handler, needs_caller, places, context)
            if not isasyncgenfunction(handler.unary_stream):  # it writes itself
                await handler.unary_stream(request, context)
                return
            replies = handler.unary_stream(request, context)
        async with contextlib.aclosing(replies):
            async for reply in replies:
                await context.write(reply)

    def _take_place(self, places: _Places, context: Context) -> str:
        """Give the call a place until it has ended. Return the peer's address."""
        host = host_of(peer_of(context))
        places.take(host)
        _task().add_done_callback(lambda _: places.give_back(host))
        return host

    async def _find_caller(self, places: _Places, context: Context) -> str:
        """Return the caller's name. The call counts in the caller's share until it has ended."""
        name = await self._admit(context)
        if name:
            owner = f"caller {name}"  # no address has a space
            places.take_share(owner, "this caller, from all its addresses,", places.of_caller)
            _task().add_done_callback(lambda _: places.give_share_back(owner))
        return name

    async def _admitted(
        self, handler: Any, needs_caller: bool, places: _Places, context: Context
    ) -> Any:
        """Return the request of a call that is admitted. Raises PetpsError."""
        host = self._take_place(places, context)
        name = await self._find_caller(places, context) if needs_caller else None
        content = await self._received(host, name, REQUEST_SECONDS, context)
        if content is grpc.aio.EOF:
            raise InvalidArgument("the call has no request")
        if needs_caller:
            self._charge(len(content))
        self._hold_until_end(len(content))
        return _decode(handler, content)

    async def _received(self, host: str, name: str | None, seconds: float, context: Context) -> Any:
        """Return the next request of a caller; ``name`` is None if the service needs no caller.

        Raises DeadlineExceeded, InvalidArgument. Who needs no credential never keeps others from
        being received, and has its own place only as long as its request takes.
        """
        key = (host, name)
        receiving = self._receiving.get(key)
        if receiving is None:
            most = OPEN_REQUESTS_RECEIVED if name is None else REQUESTS_RECEIVED
            receiving = self._receiving[key] = asyncio.Semaphore(most)

        async def receive() -> Any:
            async with receiving:
                return await context.read()

        try:
            content = await asyncio.wait_for(receive(), seconds)
        except asyncio.TimeoutError:  # before Python 3.11 another class than TimeoutError
            raise DeadlineExceeded(f"the request was not complete after {seconds:g} s") from None
        if name is None and content is not grpc.aio.EOF and len(content) > OPEN_REQUEST_BYTES:
            raise InvalidArgument(
                f"the request has {len(content)} bytes; without a credential, it has at most "
                f"{OPEN_REQUEST_BYTES}"
            )
        return content

    async def _requests(self, handler: Any, host: str, context: Context) -> AsyncIterator[Any]:
        """Yield the requests of a stream that needs no credential."""
        end = time.monotonic() + REFLECTION_SECONDS
        try:
            while (seconds := end - time.monotonic()) > 0:
                content = await self._received(host, None, seconds, context)
                if content is grpc.aio.EOF:
                    return
                yield _decode(handler, content)
        except PetpsError as error:
            await refuse(context, error)

    def _hold_until_end(self, count: int) -> None:
        """Count bytes of a request or a reply until the call has ended."""
        self._hold(count)
        _task().add_done_callback(lambda _: self._release(count))


class _Places:
    """The calls that there may be at once.

    One peer has at most half of them. A fleet may share a token, so one caller has more at all its
    addresses, but leaves an eighth to others.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.of_caller = limit - limit // 8
        self._taken = 0
        self._shares: Counter[str] = Counter()

    def take(self, host: str) -> None:
        """Count a call. Raises ResourceExhausted."""
        if self._taken >= self._limit:
            raise ResourceExhausted(
                f"there are {self._limit} calls of this kind already: try again, or ask a replica"
            )
        self.take_share(host, host, self._limit // 2)
        self._taken += 1

    def give_back(self, host: str) -> None:
        """Count the call no more."""
        self._taken -= 1
        self.give_share_back(host)

    def take_share(self, owner: str, shown: str, most: int) -> None:
        """Count a call of an owner, which an error shows as ``shown``. Raises ResourceExhausted."""
        if self._shares[owner] >= most:
            raise ResourceExhausted(
                f"{shown} has its {most} calls of this kind already: end one first"
            )
        self._shares[owner] += 1

    def give_share_back(self, owner: str) -> None:
        """Count the call of an owner no more."""
        self._shares[owner] -= 1
        if self._shares[owner] == 0:
            del self._shares[owner]


async def _end(context: Context, error: BaseException) -> NoReturn:
    """End the call with its error.

    The frames that the error has passed hold the request, in a cycle with the error, until the
    collector comes: clear them.
    """
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__context__
    if isinstance(error, PetpsError):
        await refuse(context, error)
    if not isinstance(error, grpc.aio.AbortError | asyncio.CancelledError):
        _log.error("[grpc] a call failed", exc_info=error, extra=log_event("grpc_failed"))
    raise error


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
