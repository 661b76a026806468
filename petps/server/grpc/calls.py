"""The native server's calls as awaitables."""

from __future__ import annotations

import asyncio

from petps import _native

__all__ = ["AwaitableCalls"]


class AwaitableCalls:
    """Delivery of the replies of ``_native.Calls`` to coroutines, in the loop's thread."""

    def __init__(self, calls: _native.Calls) -> None:
        self.native = calls
        self._loop = asyncio.get_running_loop()
        self._futures: dict[int, asyncio.Future[_native.CallReply]] = {}
        self._loop.add_reader(calls.ready_descriptor, self._deliver_replies)

    async def reply(self, ticket: int) -> _native.CallReply:
        """Return the reply of a submitted call. If this is cancelled, drop the reply."""
        future: asyncio.Future[_native.CallReply] = self._loop.create_future()
        self._futures[ticket] = future
        try:
            return await future
        except asyncio.CancelledError:
            self.native.drop(ticket)
            raise
        finally:
            del self._futures[ticket]

    def close(self) -> None:
        """Accept no more replies."""
        self._loop.remove_reader(self.native.ready_descriptor)

    def _deliver_replies(self) -> None:
        for reply in self.native.take():
            future = self._futures.get(reply.ticket)
            if future is not None and not future.done():
                future.set_result(reply)
