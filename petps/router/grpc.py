"""The gRPC port of a router: the service of a server, whose calls the native router answers.

A call finds its caller by a login at the servers, before its request is read. The native router's
calls wait, so each has a thread of a pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast
from weakref import WeakValueDictionary

import petps.v1.petps_pb2 as messages
from petps import _native
from petps.errors import FailedPrecondition, Unimplemented
from petps.router.gate import RouterCaller, RouterGate
from petps.server.access import host_of, peer_of, token_of
from petps.server.grpc.codes import refuse
from petps.server.grpc.door import GrpcServer
from petps.server.grpc.service import Service, caller_of_task, set_caller
from petps.server.grpc.shards import undivided

if TYPE_CHECKING:
    from petps.server.tls import TlsFiles

__all__ = ["RouterGrpcServer"]

LOGINS_AT_ONCE: Final = 16  # further ones wait for a thread
NAMES_AT_ONCE: Final = 16  # likewise, of tokens that the router knows
NAME_BYTES: Final = 8  # of a token's hash, by which its calls are counted

Answer = TypeVar("Answer")

# What the caller of the call that the task answers sees.
_NAMES: Final[ContextVar[_native.RouterNames]] = ContextVar("names")


@dataclass(frozen=True, slots=True)
class _Table:
    """A table as the service uses it."""

    record: _native.RouterTable
    id: int
    name: str
    dtype: str
    dim: int
    row_bytes: int


class _Calls:
    """The native router's calls, as the service uses those of a native server."""

    def __init__(self, router: _native.Router, threads: ThreadPoolExecutor, limit: int) -> None:
        """limit: of the threads, that one caller may have."""
        self.native = self
        self._router, self._threads, self._limit = router, threads, limit
        self._places: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def pull(self, instance: int, sections: list[tuple[int, bytes]], **options: Any) -> Any:
        """Return the call, for reply()."""
        caller = _caller_of_task()
        seen = _NAMES.get()
        return partial(
            self._router.pull, seen, caller.token, caller.host, instance, sections, **options
        )

    def push(self, table: _native.RouterTable, keys: bytes, rows: bytes, **options: Any) -> Any:
        """Return the call, for reply()."""
        caller = _caller_of_task()
        seen = _NAMES.get()
        return partial(
            self._router.push, seen, caller.token, caller.host, table, keys, rows, **options
        )

    def set_hot_keys(self, table: int, keys: bytes) -> Any:
        """Return the call, for reply()."""
        caller = _caller_of_task()
        seen = _NAMES.get()
        return partial(self._router.set_hot_keys, seen, caller.token, caller.host, table, keys)

    async def reply(self, call: Callable[[], Answer]) -> Answer:
        """Return the reply of a call. If this is cancelled, the call waits for no version any more.

        It waits for a place here and not in a thread, so that a caller leaves threads to others.
        It keeps the place until its thread is free, also if nobody waits for the reply.
        """
        caller = _caller_of_task()
        places = self._places.setdefault(
            caller.token or caller.host, asyncio.Semaphore(self._limit)
        )
        await places.acquire()
        try:
            work = self._threads.submit(call)
        except BaseException:
            places.release()
            raise
        work.add_done_callback(partial(_release, asyncio.get_running_loop(), places))
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError:
            _NAMES.get().leave()
            raise

    def hold(self, count: int) -> None:
        """Count the bytes of a request or a reply."""
        self._router.hold(count)

    def release(self, count: int) -> None:
        """Count them no more."""
        self._router.release(count)


class _Tables:
    """Stand-in for the tables of a pool."""

    def applied_version(self, instance: int) -> int:
        """Return the version of an instance, as of the names of the call."""
        versions = {known.id: known.applied_version for known in _NAMES.get().instances}
        return versions.get(instance, 0)


class _Shards:
    """A map in which this router is the only server."""

    version = 0

    def reply(self, instance: _native.RouterInstance, known_version: int) -> Any:
        """Return the ReadShardMapReply."""
        return undivided(instance.model, instance.partitions)


class _RouterService(Service):
    """The service petps.v1.Petps of a router. Runs in the loop's thread."""

    def __init__(
        self,
        router: _native.Router,
        calls: _Calls,
        logins: ThreadPoolExecutor,
        names: ThreadPoolExecutor,
        *,
        body_bytes: int,
        status: Callable[[], dict[str, Any]],
    ) -> None:
        super().__init__(
            cast(Any, _Tables()),
            cast(Any, calls),
            body_bytes=body_bytes,
            status=status,
            shards=cast(Any, _Shards()),
            gate=cast(Any, RouterGate(router)),
            has_traces=True,
        )
        self._router, self._logins, self._names = router, logins, names

    async def admit(self, context: Any) -> str:
        """Log the caller in at the servers, and return a name for it; "" without a token.

        Raises PetpsError.
        """
        self.check_open()
        header = dict(context.invocation_metadata() or ()).get("authorization", "")
        caller = RouterCaller(self._router, token_of(header), host_of(peer_of(context)), {})
        threads = self._names if self._router.knows(caller.token, caller.host) else self._logins
        names = partial(self._router.names, caller.token, caller.host)
        _NAMES.set(await asyncio.get_running_loop().run_in_executor(threads, names))
        set_caller(cast(Any, caller))
        if not caller.token:
            return ""
        return hashlib.sha256(caller.token.encode()).hexdigest()[: 2 * NAME_BYTES]

    def _instance(self, caller: Any, model: str, *roles: str) -> Any:
        return _NAMES.get().resolve(model)

    def _table(self, instance: Any, name: str) -> Any:
        record = _NAMES.get().table(instance, name)
        return _Table(record, record.id, record.name, record.dtype, record.dim, record.row_bytes)

    async def _push(self, request: Any, context: Any, caller: Any) -> Any:
        table = _NAMES.get().table(self._instance(caller, request.model), request.table)
        if table.feed != "push":
            raise FailedPrecondition(
                f"table '{table.name}' is fed by deltas: a push to it is refused; publish a delta"
            )
        return await super()._push(request, context, caller)

    async def _require_sight(self, caller: Any) -> None:
        await self._in_place(caller.check)

    async def _list_tables(self, request: Any, context: Any, caller: Any) -> Any:
        await self._ask_names(caller)
        return await super()._list_tables(request, context, caller)

    async def _read_shard_map(self, request: Any, context: Any, caller: Any) -> Any:
        await self._ask_names(caller)
        return await super()._read_shard_map(request, context, caller)

    async def _ask_names(self, caller: RouterCaller) -> None:
        """Ask a server for the names: it knows whether the token is good, and counts the request.

        Raises PetpsError.
        """
        seen = _NAMES.get()

        def ask() -> _native.RouterNames:
            self._router.tables(seen, caller.token, caller.host).check()
            return self._router.names(caller.token, caller.host)

        _NAMES.set(await self._in_place(ask))

    async def _in_place(self, work: Callable[[], Answer]) -> Answer:
        """Return the result of work that waits for a server, in one of the caller's places."""
        return await cast(_Calls, cast(Any, self._calls)).reply(work)

    def _tables_reply(self, model: str, caller: Any) -> Any:
        names = _NAMES.get()
        only = None if not model else names.resolve(model).id
        instances = {known.id: known for known in names.instances if only in (None, known.id)}
        reply = messages.ListTablesReply(
            instances=[
                messages.Instance(
                    name=instance.name,
                    model=instance.model,
                    partitions=instance.partitions,
                    applied_version=instance.applied_version,
                    aliases=names.aliases(instance.id),
                )
                for instance in instances.values()
            ]
        )
        for table in names.tables:
            if table.instance in instances:
                facts = {field: getattr(table, field) for field in _TABLE_FIELDS}
                default_row = table.default_row or bytes(table.row_bytes)
                name = instances[table.instance].name
                reply.tables.add(instance=name, default_row=default_row, **facts)
        return reply

    async def WatchVersions(  # type: ignore[override]  # noqa: N802
        self, request: Any, context: Any
    ) -> None:
        """Refuse: the servers know when something changes."""
        await refuse(context, Unimplemented("a router watches no versions: watch them at a server"))


_TABLE_FIELDS: Final = (
    "id", "name", "dtype", "feed", "dim", "row_bytes", "capacity", "rows",
)  # fmt: skip


def _release(loop: asyncio.AbstractEventLoop, places: asyncio.Semaphore, _: object) -> None:
    """Give a place back. Called by a thread of a call."""
    with contextlib.suppress(RuntimeError):  # the loop has ended, and with it the places
        loop.call_soon_threadsafe(places.release)


def _caller_of_task() -> RouterCaller:
    return cast(RouterCaller, cast(Any, caller_of_task()))


class RouterGrpcServer(GrpcServer):
    """The gRPC server of a router, running until close(). Raises Unavailable."""

    def __init__(
        self,
        host: str,
        port: int,
        router: _native.Router,
        *,
        threads: int,
        body_bytes: int,
        in_flight: int,
        status: Callable[[], dict[str, Any]],
        is_ready: Callable[[], bool],
        tls: TlsFiles | None,
    ) -> None:
        """``threads``: calls at the native router at a time. The others are as for a server."""
        self._router = router
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="petps-grpc-call")
        self._logins = ThreadPoolExecutor(LOGINS_AT_ONCE, thread_name_prefix="petps-grpc-login")
        self._names = ThreadPoolExecutor(NAMES_AT_ONCE, thread_name_prefix="petps-grpc-names")
        super().__init__(
            host,
            port,
            cast(Any, None),
            cast(Any, _Calls(router, self._threads, max(1, threads // 2))),
            body_bytes=body_bytes,
            in_flight=in_flight,
            status=status,
            shard_map=lambda: None,
            address="",
            is_ready=is_ready,
            tls=tls,
            gate=cast(Any, None),
        )

    def _make_service(self) -> tuple[Service, Callable[[], None]]:
        service = _RouterService(
            self._router,
            cast(Any, self._calls),
            self._logins,
            self._names,
            body_bytes=self._body_bytes,
            status=self._status,
        )
        return service, self._end_threads

    def _end_threads(self) -> None:
        for threads in (self._threads, self._logins, self._names):
            threads.shutdown(wait=False, cancel_futures=True)
