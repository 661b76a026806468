"""The service petps.v1.Petps: one method for each call."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final, TypeAlias, TypeVar

import grpc
import numpy as np

import petps.v1.petps_pb2 as messages
import petps.v1.petps_pb2_grpc as stubs
from petps import _native
from petps.errors import (
    InvalidArgument,
    NotFound,
    PetpsError,
    ResourceExhausted,
    Stale,
    Unauthenticated,
    Unavailable,
    WrongShard,
)
from petps.log import log_event, new_request_id, request_id
from petps.pool.arrays import check_finite, check_refused
from petps.server.access import peer_of, token_of
from petps.server.grpc.calls import AwaitableCalls
from petps.server.grpc.codes import refuse
from petps.server.grpc.shards import OlderMap, Shards
from petps.server.grpc.watch import InstanceState, Versions, instances_of
from petps.server.tls import peer_names
from petps.traceparent import HEADER, parse_traceparent
from petps.v1.service import REQUEST_ID_KEY

__all__ = ["Service", "caller_of_task", "set_caller"]

_log = logging.getLogger("petps.server.grpc")

MAX_CACHED_TABLES: Final = 4096  # a fuller cache of tables by name is cleared
MAX_SECTIONS: Final = 4096  # native/wire/wire.h kMaxSectionsPerPull
# Of the call that the task answers.
_CALLER: Final[ContextVar[_native.Caller]] = ContextVar("caller")

Context: TypeAlias = "grpc.aio.ServicerContext"
Metadata = tuple[tuple[str, str | bytes], ...]
Answer = TypeVar("Answer")


def set_caller(caller: _native.Caller) -> None:
    """Set whose rights the call of this task has."""
    _CALLER.set(caller)


def caller_of_task() -> _native.Caller:
    """Return whose rights the call of this task has."""
    return _CALLER.get()


class Service(stubs.PetpsServicer):
    """Implementation of the service. Runs in the loop's thread."""

    def __init__(
        self,
        tables: _native.Tables,
        calls: AwaitableCalls,
        *,
        body_bytes: int,
        status: Callable[[], dict[str, Any]],
        shards: Shards,
        gate: _native.Gate,
        has_traces: bool,
    ) -> None:
        """``body_bytes`` limits the bytes of a reply's rows. ``gate`` says who may do what.

        ``has_traces``: whether the native server records the spans of sampled pulls.
        """
        self._tables = tables
        self._calls = calls
        self._body_bytes = body_bytes
        self._status = status
        self._shards = shards
        self._gate = gate
        self._has_traces = has_traces
        self._anyone = gate.authenticate("", [], "") if gate.mode == "open" else None
        self._versions = Versions(tables)
        self._tables_by_name: dict[tuple[int, str], _native.Table] = {}
        self._in_flight: set[asyncio.Task[Any]] = set()
        self._watching: dict[asyncio.Task[Any], _native.Caller] = {}
        self._waiting: dict[asyncio.Task[Any], _native.Caller] = {}  # pulls, for a version
        self._draining = False

    # ---- the life of calls

    def drain(self) -> None:
        """Refuse new calls, and end the calls that watch."""
        self._draining = True
        for task in self._watching:
            task.cancel()

    def end_revoked(self) -> None:
        """End the calls that watch or wait, if their grant is revoked or has expired."""
        for calls in (self._watching, self._waiting):
            for task, caller in [*calls.items()]:
                now = self._gate.renew(caller)
                if now is None:
                    task.cancel()
                else:
                    calls[task] = now

    async def admit(self, context: Context) -> str:
        """Find whose rights the call has, and return its name. Its request is not read yet.

        Return "" if nobody is asked for a credential.
        Raises Unauthenticated, InvalidArgument, ResourceExhausted, Unavailable.
        """
        self.check_open()
        caller = self._caller(context)
        set_caller(caller)
        return "" if caller.is_anyone else caller.name

    def check_open(self) -> None:
        """Raise Unavailable if no new calls are taken."""
        if self._draining:
            raise _stopping_error()

    def charge(self, size: int) -> None:
        """Count the request of the call, which has arrived: its grant may have changed since.

        Raises Unauthenticated, ResourceExhausted.
        """
        _CALLER.set(caller := self._renewed(_CALLER.get()))
        self._gate.charge(caller, size)

    def _renewed(self, caller: _native.Caller) -> _native.Caller:
        """Return the caller with the rights that it has now. Raises Unauthenticated."""
        now = self._gate.renew(caller)
        if now is None:
            raise _revoked_error(caller)
        return now

    async def wait_for_calls(self, seconds: float) -> None:
        """Wait until no call is in flight, at most ``seconds``."""
        if self._in_flight:
            await asyncio.wait(self._in_flight, timeout=seconds)

    async def _answer(
        self,
        context: Context,
        request: Any,
        work: Callable[[Any, Context, _native.Caller], Awaitable[Answer]],
    ) -> Answer:
        """Return the result of ``work``; refuse the call if it raises an error of petps.

        The call counts as in flight until this returns.
        """
        task = asyncio.current_task()
        assert task is not None
        self._in_flight.add(task)
        self._begin(context)
        began = time.monotonic()
        code = "OK"
        try:
            if self._draining:
                raise _stopping_error()
            caller = _CALLER.get()
            answer = await work(request, context, caller)
            if caller is not self._anyone:
                caller.spend_bytes(answer.ByteSize())  # type: ignore[attr-defined]
            return answer
        except PetpsError as error:
            code = error.code
            await refuse(context, error, self._details(error, request))
        except asyncio.CancelledError:
            if self._gate.renew(caller) is None:
                await refuse(context, _revoked_error(caller))
            raise  # the client cancelled
        finally:
            self._in_flight.discard(task)
            if _log.isEnabledFor(logging.DEBUG):
                name, ms = work.__name__.removeprefix("_"), 1e3 * (time.monotonic() - began)
                facts = {"call": name, "code": code, "ms": ms, "peer": peer_of(context)}
                text = f"[grpc] {name}: {code} in {ms:.1f} ms"
                _log.debug("%s", text, extra=log_event("grpc_call", **facts))

    def _begin(self, context: Context) -> None:
        """Give the call the id that its caller chose, or a new one."""
        given = dict(context.invocation_metadata() or ()).get(REQUEST_ID_KEY)
        request_id.set(new_request_id(given))
        context.set_trailing_metadata(((REQUEST_ID_KEY, request_id.get()),))

    def _details(self, error: PetpsError, request: Any) -> Metadata:
        if isinstance(error, Stale):
            return (("petps-applied-version", str(error.applied_version)),)
        if isinstance(error, WrongShard | OlderMap):
            return (("petps-map-version", str(self._shards.version)),)
        if isinstance(error, ResourceExhausted) and isinstance(error.report, messages.PushReply):
            return (("petps-push-reply-bin", error.report.SerializeToString()),)
        return ()

    # ---- callers and names

    @staticmethod
    def _trace(context: Context) -> bytes:
        """Return the ids of the caller's span, if it is sampled."""
        caller = parse_traceparent(dict(context.invocation_metadata() or ()).get(HEADER))
        return b"" if caller is None else caller.trace_id + caller.span_id

    def _caller(self, context: Context) -> _native.Caller:
        """Return whose rights the call has. Raises Unauthenticated, InvalidArgument."""
        if self._anyone is not None:
            return self._anyone
        header = dict(context.invocation_metadata() or ()).get("authorization", "")
        names = list(peer_names(context.auth_context()))
        return self._gate.authenticate(token_of(header), names, peer_of(context))

    def _instance(self, caller: _native.Caller, model: str, *roles: str) -> _native.InstanceRecord:
        """Return the instance that a model, instance or alias names, for a caller with a role.

        Raises PermissionDenied, which does not tell whether there is such a model.
        """
        try:
            record = self._find_instance(caller, model)
            if any(caller.may(role, record.model) for role in roles):
                return record
        except NotFound:
            if any(caller.may_everywhere(role) for role in roles):
                raise
        self._gate.refuse(caller, roles[0], f"model '{model}'")
        raise AssertionError("refuse returned")  # it raises

    def _find_instance(self, caller: _native.Caller, model: str) -> _native.InstanceRecord:
        if model:
            return self._tables.resolve(model)
        models = {record.model for record in self._tables.instances() if caller.knows(record.model)}
        if len(models) != 1:
            raise InvalidArgument(f"name the model: this pool has {len(models)} models")
        return self._tables.resolve(models.pop())

    def _table(self, instance: _native.InstanceRecord, name: str) -> _native.Table:
        table = self._tables_by_name.get((instance.id, name))
        if table is None:  # ids are never reused, so a cached entry stays correct
            table = self._tables.find(instance.name, name)
            if len(self._tables_by_name) >= MAX_CACHED_TABLES:
                self._tables_by_name.clear()
            self._tables_by_name[instance.id, name] = table
        return table

    # ---- methods

    async def Pull(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Pull rows of one table."""
        return await self._answer(context, request, self._pull)

    async def PullMany(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Pull rows of several tables of one instance."""
        return await self._answer(context, request, self._pull_many)

    async def Push(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Write rows or deletions."""
        return await self._answer(context, request, self._push)

    async def Status(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Return what `petps status` shows."""
        return await self._answer(context, request, self._show_status)

    async def ListTables(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Return instances and tables."""
        return await self._answer(context, request, self._list_tables)

    async def SetHotKeys(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Set the hot set of a table."""
        return await self._answer(context, request, self._set_hot_keys)

    async def ReadShardMap(self, request: Any, context: Context) -> Any:  # noqa: N802
        """Return which servers own which partitions."""
        return await self._answer(context, request, self._read_shard_map)

    async def WatchVersions(  # noqa: N802
        self, request: Any, context: Context
    ) -> AsyncIterator[Any]:
        """Send the state of each instance, then its changes."""
        task = asyncio.current_task()
        assert task is not None
        caller = self._watching[task] = _CALLER.get()
        self._begin(context)
        try:
            if self._draining:
                raise _stopping_error()
            if request.model:
                self._instance(caller, request.model, "read")
            async for state, dropped in self._versions.watch(request.model):
                if not self._watching[task].may("read", state.model):  # it may have changed
                    continue
                yield messages.VersionChange(instance=_message_of(state), dropped=dropped)
        except PetpsError as error:
            await refuse(context, error)
        except asyncio.CancelledError:
            if self._draining:
                await refuse(context, _stopping_error())
            if self._gate.renew(caller) is not None:
                raise  # the client cancelled
            await refuse(context, _revoked_error(caller))
        finally:
            self._watching.pop(task, None)

    async def _pull(self, request: Any, context: Context, caller: _native.Caller) -> Any:
        instance = self._instance(caller, request.model, "read")
        version, rows = await self._rows(
            instance, [(request.table, request.keys)], request, context
        )
        return messages.PullReply(instance=instance.name, applied_version=version, rows=rows[0])

    async def _pull_many(self, request: Any, context: Context, caller: _native.Caller) -> Any:
        instance = self._instance(caller, request.model, "read")
        if len(request.sections) > MAX_SECTIONS:
            raise InvalidArgument(
                f"the request has {len(request.sections):,} sections; at most {MAX_SECTIONS:,}"
            )
        sections = [(section.table, section.keys) for section in request.sections]
        version, rows = await self._rows(instance, sections, request, context)
        return messages.PullManyReply(
            instance=instance.name, applied_version=version, sections=rows
        )

    async def _rows(
        self,
        instance: _native.InstanceRecord,
        sections: Sequence[tuple[str, bytes]],
        request: Any,
        context: Context,
    ) -> tuple[int, list[Any]]:
        named = {name: self._table(instance, name) for name in dict(sections)}
        tables = [named[name] for name, _ in sections]
        remaining_seconds = context.time_remaining()
        wait_ms = (
            request.wait_ms
            if remaining_seconds is None
            else min(request.wait_ms, int(1e3 * remaining_seconds))
        )
        ticket = self._calls.native.pull(
            instance.id,
            [(table.id, keys) for table, (_, keys) in zip(tables, sections, strict=True)],
            min_version=request.min_version,
            wait_ms=wait_ms,
            trace=self._trace(context) if self._has_traces else b"",
        )
        task, caller = asyncio.current_task(), _CALLER.get()
        assert task is not None
        if wait_ms > 0:
            self._waiting[task] = caller
        try:
            version, results = (await self._calls.reply(ticket)).pulled()
        except Stale as stale:
            stale.applied_version = self._tables.applied_version(instance.id)
            raise
        finally:
            self._waiting.pop(task, None)
        if wait_ms > 0 and not self._renewed(caller).may("read", instance.model):
            self._gate.refuse(caller, "read", f"model '{instance.model}'")
        rows = []
        total = 0
        for table, (code, row_bytes, rows_found, present, stored) in zip(
            tables, results, strict=True
        ):
            if code != 0:  # the table was dropped after the lookup of its name
                raise NotFound(f"table '{table.name}' of '{instance.name}' has been dropped")
            values = stored if request.form == messages.FORM_STORED else _decode_rows(table, stored)
            total += len(values)
            if total > self._body_bytes:
                raise ResourceExhausted(
                    f"the rows found are more than {self._body_bytes:,} bytes as float32: split "
                    "the request, or request FORM_STORED"
                )
            rows.append(
                messages.Rows(
                    rows=values,
                    row_bytes=row_bytes if values is stored else 4 * table.dim,
                    rows_found=rows_found,
                    present=present,
                )
            )
        return version, rows

    async def _push(self, request: Any, context: Context, caller: _native.Caller) -> Any:
        table = self._table(self._instance(caller, request.model, "write"), request.table)
        rows = request.rows
        if rows and request.form == messages.FORM_F32:
            rows = _encode_rows(table, request)
        ticket = self._calls.native.push(
            table.record, request.keys, rows, deleted=request.deleted, stamp=request.stamp
        )
        counts = (await self._calls.reply(ticket)).pushed()
        names = ("inserted", "updated", "deleted", "absent", "refused")
        reply = messages.PushReply(**dict(zip(names, counts, strict=True)))
        check_refused(table, reply)
        return reply

    async def _show_status(self, request: Any, context: Context, caller: _native.Caller) -> Any:
        await self._require_sight(caller)
        return messages.StatusReply(json=json.dumps(await asyncio.to_thread(self._status)))

    async def _require_sight(self, caller: _native.Caller) -> None:
        """Raise PermissionDenied unless the caller may see the status."""
        self._gate.require_sight(caller)

    async def _list_tables(self, request: Any, context: Context, caller: _native.Caller) -> Any:
        return await asyncio.to_thread(self._tables_reply, request.model, caller)

    def _tables_reply(self, model: str, caller: _native.Caller) -> Any:
        roles = ("read", "write", "admin")
        instance_id = None if not model else self._instance(caller, model, *roles).id
        states = {
            id: state
            for id, state in instances_of(self._tables).items()
            if caller.knows(state.model)
        }
        reply = messages.ListTablesReply(
            instances=[
                _message_of(state) for state in states.values() if instance_id in (None, state.id)
            ]
        )
        for table in self._tables.tables():
            record = table.record
            if record.instance not in states or instance_id not in (None, record.instance):
                continue
            reply.tables.add(
                id=record.id,
                instance=states[record.instance].name,
                name=record.name,
                dtype=record.dtype,
                feed=record.feed,
                dim=record.dim,
                row_bytes=record.row_bytes,
                capacity=record.capacity,
                rows=table.status().rows,
                default_row=table.default_row().tobytes(),
            )
        return reply

    async def _read_shard_map(self, request: Any, context: Context, caller: _native.Caller) -> Any:
        # As for the list of tables, any role: who pushes must split keys too.
        instance = self._instance(caller, request.model, "read", "write", "admin")
        return self._shards.reply(instance, request.known_version)

    async def _set_hot_keys(self, request: Any, context: Context, caller: _native.Caller) -> Any:
        table = self._table(self._instance(caller, request.model, "read"), request.table)
        reply = await self._calls.reply(self._calls.native.set_hot_keys(table.id, request.keys))
        reply.check()
        return messages.SetHotKeysReply()


def _stopping_error() -> Unavailable:
    return Unavailable("the server is stopping: call another replica, or retry later")


def _revoked_error(caller: _native.Caller) -> Unauthenticated:
    return Unauthenticated(f"the grant of '{caller.name}' was revoked")


def _message_of(state: InstanceState) -> Any:
    return messages.Instance(
        name=state.name,
        model=state.model,
        partitions=state.partitions,
        applied_version=state.applied_version,
        aliases=state.aliases,
        frozen=state.frozen,
    )


def _decode_rows(table: _native.Table, stored_rows: bytes) -> bytes:
    if table.dtype == "f32":
        return stored_rows
    rows = np.frombuffer(stored_rows, np.uint8).reshape(-1, table.row_bytes)
    return _native.decode_rows(table.dtype, table.dim, rows).tobytes()


def _encode_rows(table: _native.Table, request: Any) -> bytes:
    """Encode the float32 rows of a push as the table stores them."""
    n, remainder = divmod(len(request.keys), 8)
    if remainder or len(request.rows) != n * table.dim * 4:
        raise InvalidArgument(
            f"table '{table.name}': {n} rows of dim {table.dim} as float32 are "
            f"{n * table.dim * 4} bytes, got {len(request.rows)}"
        )
    values = np.frombuffer(request.rows, "<f4").reshape(n, table.dim)
    encoded = _native.encode_rows(table.dtype, values)
    if not request.allow_not_finite:
        keys = np.frombuffer(request.keys, "<u8")
        check_finite(keys, values, table.name)
        if table.dtype != "f32":  # a number too large for f16 becomes infinity when encoded
            decoded = _native.decode_rows(table.dtype, table.dim, encoded)
            check_finite(keys, decoded, table.name)
    return encoded.tobytes()
