"""The admin door: ``petps.admin.v1`` on the socket beside the pool, in threads of its own.

If the configuration asks for it, also on a TCP port.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import json
import os
import queue
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import grpc

import petps.admin.admin_pb2 as messages
from petps import _native
from petps.admin import MAX_SOCKET_BYTES, USER_KEY, socket_of
from petps.config.duration import duration_text
from petps.config.place import check_store
from petps.errors import InvalidArgument, IoError, PetpsError, Unavailable
from petps.log import LEVELS, WARNING, Line, new_request_id, request_id, set_level
from petps.pool.audited import AuditedPool, audited
from petps.server.access import peer_of, token_of
from petps.server.admin_requests import (
    PORT_LIMITS,
    Call,
    Ended,
    as_loaded,
    checked_place,
    default_of,
    handlers_of,
    read_request,
)
from petps.server.changes import Changes
from petps.server.grpc.codes import GRPC_CODES
from petps.server.grpc.limits import CONNECTION_LIMITS
from petps.server.refusals import Refusals
from petps.server.served import Served
from petps.server.tls import peer_names
from petps.v1.service import CODE_KEY, REQUEST_ID_KEY

if TYPE_CHECKING:
    from petps.pool.export import Bar
    from petps.server.tls import TlsFiles

__all__ = ["AdminServer", "Served", "open_admin_door"]

MAX_CALLS: Final = 8
SOCKET_MODE: Final = 0o600
# Calls for which the role `admin` of the model that they name is enough. Others concern the whole
# server, write files, or change a name that another model may use.
OF_ONE_MODEL: Final = frozenset(
    {"CreateModel", "CreateTable", "Load", "SetExpiry", "DropTable", "Grow"}
)
# Calls that leave no line in the audit log.
UNAUDITED: Final = frozenset({"Status", "Load", "Verify"})
REQUEST_BYTES_MAX: Final = 5 << 20  # rows to load have 4 MiB (petps/admin/client.py)
# The socket is made in a folder of its own, so that nobody can connect before it has its mode.
FOLDER: Final = ".petps-"
NAME_CHARACTERS_MAX: Final = 200  # of a name in the log that nobody has checked yet
# Rows between two messages about a running export.
ROWS_REPORTED: Final = 100_000
# How long calls that are complete may take to send that, once the server stops.
GRACE_SECONDS: Final = 5.0

Report = Callable[[Any], bool]  # sends a reply; returns whether the work goes on


def open_admin_door(
    pool: Path,
    tables: _native.Tables,
    served: Served,
    log: Callable[[str], None],
    address: tuple[str, int] | None = None,
    tls: TlsFiles | None = None,
    *,
    gate: _native.Gate,
    has_admin: Callable[[_native.Caller], bool],
) -> list[AdminServer]:
    """Return the running doors: the socket, and the (host, port) if one is given, with ``tls``.

    Without a place for the socket, a line in the log says so. The doors share no limit, so that
    nobody at the port keeps the pool's owner out. Raises Unavailable if the port cannot be opened.
    """
    doors = (
        []
        if address is None
        else [AdminServer(address, tables, served, log, gate, tls, has_admin=has_admin)]
    )
    path, why = socket_of(pool), ""
    if not pool.is_file():  # a device: /dev is no place for sockets
        why = f"{pool} is not a file"
    elif "%" in str(path):  # gRPC decodes it
        why = f"the path {path} has a %"
    elif len(os.fsencode(path.parent / f"{FOLDER}12345678" / path.name)) > MAX_SOCKET_BYTES:
        why = f"the path {path} is too long for a socket"
    if not why:
        try:
            return [*doors, AdminServer(path, tables, served, log, gate)]
        except (OSError, RuntimeError) as error:
            why = f"{path}: {error}"
    log(Line(f"no admin socket: {why}", "no_admin_socket", WARNING))
    return doors


class AdminServer:
    """The server of a socket or a port, running until close().

    Raises OSError and RuntimeError if there can be no socket, Unavailable for the port.
    """

    def __init__(
        self,
        place: Path | tuple[str, int],
        tables: _native.Tables,
        served: Served,
        log: Callable[[str], None],
        gate: _native.Gate,
        tls: TlsFiles | None = None,
        *,
        has_admin: Callable[[_native.Caller], bool] = lambda caller: False,
    ) -> None:
        """``place`` is the path of the socket, or a host and a port, which may have TLS.

        ``has_admin`` returns whether a caller may administer anything.
        """
        self._path = place if isinstance(place, Path) else None
        self._stopping = threading.Event()
        self._threads = ThreadPoolExecutor(MAX_CALLS, "petps-admin")
        self._server = grpc.server(
            self._threads,
            maximum_concurrent_rpcs=MAX_CALLS,
            options=(
                ("grpc.so_reuseport", 0),  # a port in use must be an error
                ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
                *(CONNECTION_LIMITS if self._path is not None else PORT_LIMITS),
            ),
        )
        self._service = _Service(
            tables, served, log, self._stopping, gate, self._path is not None, has_admin
        )
        self._server.add_generic_rpc_handlers((handlers_of(self._service),))
        self.port: int | None = None
        if isinstance(place, Path):
            self._make_socket(place)
            self._inode = place.stat().st_ino
        else:
            self.port = self._listen(*place, tls)
        self._server.start()

    def _listen(self, host: str, port: int, tls: TlsFiles | None) -> int:
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if tls is None:
                opened = int(self._server.add_insecure_port(where))
            else:
                from petps.server.tls import grpc_credentials

                opened = int(self._server.add_secure_port(where, grpc_credentials(tls)))
        except RuntimeError:
            opened = 0
        if opened == 0:
            raise Unavailable(
                f"admin address {where} is not available (another process may use it); "
                "choose another with [server] admin_port (0: any free one), or leave it out"
            )
        return opened

    def _make_socket(self, path: Path) -> None:
        with tempfile.TemporaryDirectory(prefix=FOLDER, dir=path.parent) as folder:
            private = Path(folder, path.name)
            if self._server.add_insecure_port(f"unix:{private}") == 0:
                raise OSError("the socket cannot be made")
            private.chmod(SOCKET_MODE)
            _check_replaceable(path)
            private.rename(path)

    def close(self) -> None:
        """End all calls: what they had not completed is undone. Remove the socket.

        No call uses the pool any more on return.
        """
        self._stopping.set()
        with contextlib.suppress(FileNotFoundError):
            # Not the socket of a later server.
            if self._path is not None and self._path.stat().st_ino == self._inode:
                self._path.unlink()
        self._server.stop(GRACE_SECONDS).wait()
        self._threads.shutdown(wait=True)  # short calls complete, also if their caller has gone
        self._service.join()


def _check_replaceable(path: Path) -> None:
    """Raise OSError if something other than the socket of a killed server is there."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError("there is another file, which is no socket: move it away")


def _answering(work: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
    """Return a method that answers with the JSON that ``work`` returns, or refuses its error."""

    @functools.wraps(work)
    def answer(self: _Service, requests: Iterator[bytes], context: Any) -> Any:
        try:
            request, call = self.admit(work.__name__, requests, context)
            self.check_running()
            with call.counting_failure():
                return messages.Json(text=json.dumps(work(self, request, call)))
        except (PetpsError, OSError) as error:
            _refuse(context, error)

    return answer


def _streaming(work: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Return a method that sends what ``work`` yields, or refuses a call that is not admitted."""

    @functools.wraps(work)
    def stream(self: _Service, requests: Iterator[bytes], context: Any) -> Iterator[Any]:
        try:
            request, call = self.admit(work.__name__, requests, context)
        except PetpsError as error:
            _refuse(context, error)
        yield from work(self, request, call)

    return stream


class _Service:
    """The calls of admin.proto, which has their documentation."""

    def __init__(
        self,
        tables: _native.Tables,
        served: Served,
        log: Callable[[str], None],
        stopping: threading.Event,
        gate: _native.Gate,
        is_socket: bool,
        has_admin: Callable[[_native.Caller], bool],
    ) -> None:
        """``gate`` says who may do what, except for the socket, which its mode protects."""
        self._has_admin = has_admin
        self._refusals = Refusals(self._audit)
        self._changes, self._is_socket = Changes(tables, gate, log), is_socket
        self._tables, self._served, self._stopping = tables, served, stopping
        self._working: set[threading.Thread] = set()
        self._working_lock = threading.Lock()

    def check_running(self) -> None:
        """Raise Unavailable if the server stops."""
        if self._stopping.is_set():
            raise Unavailable("the server stops, so nothing was done")

    def admit(self, name: str, requests: Iterator[bytes], context: Any) -> tuple[Any, Call]:
        """Return the request and the call if its caller may make it.

        The caller is known before the request is read, so that peers without a credential, or
        without the role, hold no thread. Raises Unauthenticated, PermissionDenied,
        ResourceExhausted, InvalidArgument, DeadlineExceeded.
        """
        metadata = dict(context.invocation_metadata())
        request_id.set(new_request_id(metadata.get(REQUEST_ID_KEY)))
        context.set_trailing_metadata(((REQUEST_ID_KEY, request_id.get()),))
        user = str(metadata.get(USER_KEY, "unknown"))
        if self._is_socket:  # it admits only the server's user and root
            return read_request(name, requests, context), Call(context, name, user)
        peer, names = peer_of(context), list(peer_names(context.auth_context()))
        caller = self._changes.gate.authenticate(
            token_of(metadata.get("authorization", "")), names, peer
        )
        if name not in OF_ONE_MODEL or not self._has_admin(caller):
            self._changes.gate.require(caller, "admin", "")
        request = read_request(name, requests, context)
        caller = self._changes.renewed(caller)  # the grant may have changed while it arrived
        model = request.model if name in OF_ONE_MODEL else ""
        self._changes.require_admin(caller, request.ByteSize(), model)
        grant = "" if caller.is_anyone else f"'{caller.name}' at "
        user = f"{grant}{context.peer()}, who says {user}"
        failed = Call.failed
        if not caller.is_anyone and name not in UNAUDITED:
            self._refusals.check(caller.name, user)
            failed = functools.partial(self._refusals.note, caller.name)
        is_granted = functools.partial(self._changes.is_admin, caller, model)
        return request, Call(context, name, user, is_granted, failed)

    def _audit(self, user: str, text: str) -> None:
        with audited(self._tables.info().path, user, text):
            pass

    def join(self) -> None:
        """Wait for the threads of long work, which look at ``stopping``."""
        with self._working_lock:
            working = list(self._working)
        for thread in working:
            thread.join()

    # ---- calls that take no time

    @_answering
    def Status(self, request: Any, call: Call) -> dict[str, Any]:  # noqa: N802
        """See admin.proto."""
        return self._served.status()

    @_answering
    def CreateModel(self, request: Any, call: Call) -> dict[str, Any]:  # noqa: N802
        """See admin.proto."""
        name = self._pool(call).create_model(request.model, request.partitions)
        self._note(call, f"model '{request.model}' is created")
        return {"instance": name}

    @_answering
    def CreateTable(self, request: Any, call: Call) -> dict[str, Any]:  # noqa: N802
        """See admin.proto."""
        info = self._pool(call).create_table(
            request.name, dim=request.dim, capacity=request.capacity, dtype=request.dtype,
            feed=request.feed, default=default_of(request),
            model=request.model or None, expire_after=request.expire_after,
        )  # fmt: skip
        self._note(call, f"table '{info.name}' of {info.instance} is created")
        return asdict(info)

    @_answering
    def Load(self, request: Any, call: Call) -> dict[str, Any]:  # noqa: N802
        """See admin.proto."""
        keys, rows = as_loaded(request)
        pool, model = self._pool(call), request.model or None
        with self._served.loading(request.table, pool.table(request.table, model).record.feed):
            return pool.load(
                request.table, keys, rows,
                model=model, allow_not_finite=request.allow_not_finite,
            ).as_dict()  # fmt: skip

    @_answering
    def SetExpiry(self, request: Any, call: Call) -> dict[str, Any]:  # noqa: N802
        """See admin.proto."""
        self._pool(call).set_expiry(request.table, request.seconds, model=request.model or None)
        model = f" of {request.model}" if request.model else ""
        age = duration_text(request.seconds)
        self._note(call, f"rows of table '{request.table}'{model} expire after: {age}")
        return {}

    @_answering
    def DropTable(self, request: Any, call: Call) -> dict[str, Any]:  # noqa: N802
        """See admin.proto."""
        self._pool(call).drop_table(request.table, model=request.model or None)
        self._note(call, f"table '{request.table}' is dropped")
        return {}

    @_answering
    def CreateInstance(self, request: Any, call: Call) -> dict[str, Any]:  # noqa: N802
        """See admin.proto."""
        name = self._pool(call).create_instance(request.name)
        self._note(call, f"instance '{name}' is created")
        return {"instance": name}

    @_answering
    def DropInstance(self, request: Any, call: Call) -> dict[str, Any]:  # noqa: N802
        """See admin.proto."""
        self._pool(call).drop_instance(request.name)
        self._note(call, f"instance '{request.name}' is dropped")
        return {}

    @_answering
    def SwitchAlias(self, request: Any, call: Call) -> dict[str, Any]:  # noqa: N802
        """See admin.proto."""
        self._changes.switch_alias(call.user, request.alias, request.instance)
        return {}

    @_answering
    def SetIngest(self, request: Any, call: Call) -> dict[str, Any]:  # noqa: N802
        """See admin.proto."""
        paused = request.paused if request.HasField("paused") else None
        rate = request.rows_per_second if request.HasField("rows_per_second") else None
        changes = [] if paused is None else ["pause" if paused else "continue"]
        changes += [] if rate is None else [f"limit to {rate} rows/s" if rate else "do not limit"]
        text = f"ingest: {' and '.join(changes)}"
        with audited(self._tables.info().path, call.user, text):
            self._served.set_ingest(paused=paused, rows_per_second=rate)
        self._note(call, text)
        return {}

    @_answering
    def SetLogLevel(self, request: Any, call: Call) -> dict[str, Any]:  # noqa: N802
        """See admin.proto."""
        text = f"the log has lines from level {request.level} on"
        with audited(self._tables.info().path, call.user, f"log level {request.level}"):
            if request.level not in LEVELS:
                raise InvalidArgument(
                    f"log level '{request.level}' is unknown; write {', '.join(LEVELS)}"
                )
            set_level(request.level)
        self._note(call, text)
        return {}

    # ---- calls that take long

    @_streaming
    def Grow(self, request: Any, call: Call) -> Iterator[Any]:  # noqa: N802
        """See admin.proto."""

        def grow(report: Report) -> Any:
            pool = self._pool(call)
            table = pool.table(request.table, request.model or None)
            before = table.record.capacity
            pool.grow(
                request.table, request.capacity, model=request.model or None,
                paced=not request.unpaced,
                progress=lambda copied, buckets: report(
                    messages.GrowReply(buckets_copied=copied, buckets=buckets)
                ),
            )  # fmt: skip
            self._note(
                call, f"table '{table.name}' has capacity {request.capacity}, before {before}"
            )
            return messages.GrowReply(done=True)

        return self._work(call, "petps-grow", grow)

    @_streaming
    def Shrink(self, request: Any, call: Call) -> Iterator[Any]:  # noqa: N802
        """See admin.proto."""

        def shrink(report: Report) -> Any:
            done = self._pool(call).shrink(
                lambda done, free: report(messages.ShrinkReply(bytes_done=done, bytes=free))
            )
            if not self._is_wanted(call):
                raise Ended
            self._note(call, f"the pool has shrunk: {done} bytes of free space have no blocks")
            return messages.ShrinkReply(bytes_done=done, done=True)

        return self._work(call, "petps-shrink", shrink)

    @_streaming
    def Export(self, request: Any, call: Call) -> Iterator[Any]:  # noqa: N802
        """See admin.proto."""

        def export(report: Report) -> Any:
            folder = checked_place(request.folder, is_store=False)
            with self._copying(call, f"export {_rows_of(request.model)} to {folder}"):
                facts = self._pool(call).export(
                    folder, model=request.model or None, bar=self._bar(call, report)
                )
            self._note(call, f"{facts['instance']} is exported to {folder}")
            return messages.WorkReply(done=True, report=json.dumps(facts))

        return self._work(call, "petps-export", export)

    @_streaming
    def Backup(self, request: Any, call: Call) -> Iterator[Any]:  # noqa: N802
        """See admin.proto."""

        def back_up(report: Report) -> Any:
            store = checked_place(request.store, is_store=True)
            check_store(store)  # else a password would be in the log
            with self._copying(call, f"back up {_rows_of(request.model)} to {store}"):
                facts = self._served.back_up(
                    store, request.model or None, full=request.full,
                    bar=self._bar(call, report), goes_on=lambda: self._is_wanted(call),
                )  # fmt: skip
            self._note(call, f"backup {facts['version']} of {facts['instance']} is written")
            return messages.WorkReply(done=True, report=json.dumps(facts))

        return self._work(call, "petps-backup", back_up)

    @_streaming
    def Verify(self, request: Any, call: Call) -> Iterator[Any]:  # noqa: N802
        """See admin.proto."""

        def verify(report: Report) -> Any:
            found = self._pool(call).verify(lambda: report(messages.WorkReply()))
            if not found.complete and not self._is_wanted(call):
                raise Ended
            return messages.WorkReply(done=True, report=json.dumps(found.as_dict()))

        return self._work(call, "petps-verify", verify)

    @contextlib.contextmanager
    def _copying(self, call: Call, what: str) -> Iterator[None]:
        """Audit and log that rows leave the server, before the first one does."""
        with audited(self._tables.info().path, call.user, what):
            self._note(call, f"begin: {what}")
            yield

    def _is_wanted(self, call: Call) -> bool:
        return call.is_active() and not self._stopping.is_set()

    def _bar(self, call: Call, report: Report) -> Bar:
        """Return what reports the progress table by table, and ends work that nobody waits for."""

        @contextlib.contextmanager
        def bar(table: str, rows: int) -> Iterator[Callable[[int], None]]:
            done = reported = 0

            def advance(count: int) -> None:
                nonlocal done, reported
                done += count
                if not self._is_wanted(call):
                    raise Ended
                if done - reported >= ROWS_REPORTED or done == rows:
                    reported = done
                    report(messages.WorkReply(table=table, rows=rows, rows_done=done))

            if not self._is_wanted(call):  # the keys were listed since
                raise Ended
            yield advance

        return bar

    @_streaming
    def Scrub(self, request: Any, call: Call) -> Iterator[Any]:  # noqa: N802
        """See admin.proto."""

        def scrub(report: Report) -> Any:
            def reported(table: str, done: int, buckets: int) -> bool:
                return report(messages.WorkReply(table=table, rows=buckets, rows_done=done))

            what = f"table {request.table}" if request.table else "all tables"
            of_model = f" of model {request.model}" if request.model else ""
            with audited(self._tables.info().path, call.user, f"scrub {what}{of_model}"):
                reports = self._served.scrub(
                    request.table, request.model or None, reported, not request.unpaced
                )
            return messages.WorkReply(done=True, report=json.dumps(reports))

        return self._work(call, "petps-scrub-request", scrub)

    def _work(self, call: Call, name: str, work: Callable[[Report], Any]) -> Iterator[Any]:
        """Run work(report) in a thread; yield what it reports, then what it returns."""
        replies: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def report(reply: Any) -> bool:
            replies.put(reply)
            return self._is_wanted(call)

        def run() -> None:
            try:
                self.check_running()
                with call.counting_failure():
                    replies.put(work(report))
            except Exception as error:
                replies.put(error)

        present = contextvars.copy_context()  # for the request's id
        thread = threading.Thread(target=present.run, args=(run,), name=name, daemon=True)
        with self._working_lock:
            self._working = {*filter(threading.Thread.is_alive, self._working), thread}
            thread.start()
        while True:
            reply = replies.get()
            if isinstance(reply, Ended):
                _refuse(
                    call.context,
                    Unavailable("the server stops, or the grant was revoked: this was not done"),
                )
            if isinstance(reply, (PetpsError, OSError)):
                _refuse(call.context, reply)
            if isinstance(reply, Exception):
                raise reply
            yield reply
            if reply.done:
                return

    def _note(self, call: Call, text: str) -> None:
        peer = "socket" if self._is_socket else call.context.peer()
        self._changes.note(call.user, text, call=call.name, peer=peer)

    def _pool(self, call: Call) -> AuditedPool:
        return AuditedPool(self._tables, call.user, is_borrowed=True)


def _rows_of(model: str) -> str:
    return f"all rows of model {model[:NAME_CHARACTERS_MAX]!r}" if model else "all rows"


def _refuse(context: Any, error: PetpsError | OSError) -> NoReturn:
    if not isinstance(error, PetpsError):  # of PetpsErrors, some are OSErrors too
        error = IoError(f"{error.filename or 'the server'}: {error.strerror or error}")
    context.set_trailing_metadata(((CODE_KEY, error.code), (REQUEST_ID_KEY, request_id.get())))
    context.abort(GRPC_CODES[error.code], str(error))
    raise AssertionError("abort returned")  # it raises
