"""The admin door: ``petps.admin.v1`` on the socket beside the pool, in threads of its own."""

from __future__ import annotations

import contextlib
import os
import queue
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NoReturn

import grpc

import petps.admin.admin_pb2 as messages
from petps import _native
from petps.admin import MAX_SOCKET_BYTES, socket_of
from petps.admin.admin_pb2_grpc import add_AdminServicer_to_server
from petps.errors import PetpsError
from petps.pool.reader import DEFAULT_MODEL
from petps.server.grpc.codes import GRPC_CODES
from petps.v1.service import CODE_KEY

__all__ = ["AdminServer", "open_admin_door"]

MAX_CALLS: Final = 8
SOCKET_MODE: Final = 0o600
# The socket is made in a folder of its own, so that nobody can connect before it has its mode.
FOLDER: Final = ".petps-"


def open_admin_door(
    pool: Path, tables: _native.Tables, log: Callable[[str], None]
) -> list[AdminServer]:
    """Return the running door; none, with a line in the log, if the pool has no place for one."""
    path = socket_of(pool)
    if not pool.is_file():  # a device: /dev is no place for sockets
        log(f"no admin door: {pool} is not a file")
        return []
    if "%" in str(path):  # gRPC decodes it
        log(f"no admin door: the path {path} has a %")
        return []
    if len(os.fsencode(path.parent / f"{FOLDER}12345678" / path.name)) > MAX_SOCKET_BYTES:
        log(f"no admin door: the path {path} is too long for a socket")
        return []
    try:
        return [AdminServer(path, tables, log)]
    except (OSError, RuntimeError) as error:
        log(f"no admin door: {path}: {error}")
        return []


class AdminServer:
    """The server of ``path``, running until close(). Raises OSError and RuntimeError."""

    def __init__(self, path: Path, tables: _native.Tables, log: Callable[[str], None]) -> None:
        self._path = path
        self._stopping = threading.Event()
        self._server = grpc.server(
            ThreadPoolExecutor(MAX_CALLS, "petps-admin"), maximum_concurrent_rpcs=MAX_CALLS
        )
        self._service = _Service(tables, log, self._stopping)
        add_AdminServicer_to_server(self._service, self._server)
        with tempfile.TemporaryDirectory(prefix=FOLDER, dir=path.parent) as folder:
            private = Path(folder, path.name)
            if self._server.add_insecure_port(f"unix:{private}") == 0:
                raise OSError("the socket cannot be made")
            private.chmod(SOCKET_MODE)
            _check_replaceable(path)
            private.rename(path)
        self._inode = path.stat().st_ino
        self._server.start()

    def close(self) -> None:
        """End all calls: what they had not completed is undone. Remove the socket."""
        self._stopping.set()
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:  # not that of a later server
                self._path.unlink()
        for thread in self._service.working:  # they look at `stopping`
            thread.join()
        self._server.stop(None).wait()


def _check_replaceable(path: Path) -> None:
    """Raise OSError if something other than the socket of a killed server is there."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise OSError("there is another file, which is no socket: move it away")


class _Service:
    def __init__(
        self, tables: _native.Tables, log: Callable[[str], None], stopping: threading.Event
    ) -> None:
        self._tables, self._log, self._stopping = tables, log, stopping
        self.working: list[threading.Thread] = []

    def Grow(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        """See admin.proto."""
        replies: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def report(copied: int, buckets: int) -> bool:
            replies.put(messages.GrowReply(buckets_copied=copied, buckets=buckets))
            return context.is_active() and not self._stopping.is_set()

        def grow() -> None:
            try:
                table = self._find(request.model, request.table)
                before = table.record.capacity
                self._tables.grow(
                    table.record.id, request.capacity, paced=not request.unpaced, progress=report
                )
                self._log(f"table '{table.name}' has capacity {request.capacity}, before {before}")
                replies.put(messages.GrowReply(done=True))
            except Exception as error:
                replies.put(error)

        thread = threading.Thread(target=grow, name="petps-grow", daemon=True)
        thread.start()
        self.working = [*filter(threading.Thread.is_alive, self.working), thread]
        while True:
            reply = replies.get()
            if isinstance(reply, PetpsError):
                _refuse(context, reply)
            if isinstance(reply, Exception):
                raise reply
            yield reply
            if reply.done:
                return

    def _find(self, model: str, table: str) -> _native.Table:
        models = {instance.model for instance in self._tables.instances()}
        only_model = models.pop() if len(models) == 1 else DEFAULT_MODEL
        instance = self._tables.resolve(model or only_model)
        return self._tables.find(instance.name, table)


def _refuse(context: Any, error: PetpsError) -> NoReturn:
    context.set_trailing_metadata(((CODE_KEY, error.code),))
    context.abort(GRPC_CODES[error.code], str(error))
    raise AssertionError("abort returned")  # it raises
