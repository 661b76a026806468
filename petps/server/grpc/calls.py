"""The native server's workers as awaitable calls."""

from __future__ import annotations

import asyncio

from petps import _native

__all__ = ["AwaitableCalls"]


class AwaitableCalls:
    """Replies of ``_native.Calls`` brought to whoever waits for them. On the loop's thread."""

    def __init__(self, calls: _native.Calls) -> None:
        self.native = calls
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[_native.CallReply]] = {}
        self._loop.add_reader(calls.ready_descriptor, self._take)

    async def reply(self, ticket: int) -> _native.CallReply:
        """The reply of a submitted call. Cancelled, it is dropped when it comes."""
        future: asyncio.Future[_native.CallReply] = self._loop.create_future()
        self._waiting[ticket] = future
        try:
            return await future
        finally:
            del self._waiting[ticket]

    def close(self) -> None:
        """Takes no more replies."""
        self._loop.remove_reader(self.native.ready_descriptor)

    def _take(self) -> None:
        for reply in self.native.take():
            future = self._waiting.get(reply.ticket)
            if future is not None and not future.done():
                future.set_result(reply)
