"""A client of the server that has a pool open, found by the pool's path or the admin port."""

from __future__ import annotations

import ipaddress
import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
import numpy.typing as npt

import petps.admin.admin_pb2 as messages
from petps.admin.admin_pb2_grpc import AdminStub
from petps.admin.socket import (
    ADMIN_SCHEME,
    ADMIN_TLS_SCHEME,
    USER_KEY,
    is_admin_port,
    socket_of,
)
from petps.errors import (
    BY_CODE,
    FailedPrecondition,
    InUse,
    InvalidArgument,
    PetpsError,
    Unavailable,
    Unimplemented,
)
from petps.v1.service import CODE_KEY

__all__ = ["AdminClient"]

MAX_DIM: Final = 4096  # native/pool/pool.h kMaxDim
LOAD_BYTES: Final = 4 << 20  # of rows and keys in one message; each waits for ingest's poll

# (table, rows) -> a context; its value is a function to call with n after each n written rows.
Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]

TOKEN_FILE_VARIABLE: Final = "PETPS_TOKEN_FILE"
TOKEN_BYTES_MAX: Final = 255  # native/wire/wire.h kMaxNameBytes
STATUS_SECONDS: Final = 10.0  # a status waits for no disk and no broker


def _parse_address(target: str) -> str:
    address = target.partition("://")[2].rstrip("/")
    host, _, port = address.rpartition(":")
    if not host or "/" in address or not port.isdecimal():
        raise InvalidArgument(f"{target}: write {ADMIN_SCHEME}HOST:PORT, such as 127.0.0.1:7073")
    return address


def _tls_credentials() -> tuple[Any, list[tuple[str, str]]]:
    """Return TLS of the environment: credentials and options of a channel."""
    ca, certificate, key = map(_file_of, ("PETPS_TLS_CA", "PETPS_TLS_CERTIFICATE", "PETPS_TLS_KEY"))
    if (certificate is None) != (key is None):
        raise InvalidArgument(
            "PETPS_TLS_CERTIFICATE and PETPS_TLS_KEY belong together: set both, or none"
        )
    name = os.environ.get("PETPS_TLS_SERVER_NAME")
    options = [("grpc.ssl_target_name_override", name)] if name else []
    return grpc.ssl_channel_credentials(ca, key, certificate), options


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def read_token(path: str) -> str:
    """Return the token in a file. Raises InvalidArgument, which quotes nothing of it."""
    try:
        token = Path(path).read_text("ascii").strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text in ASCII"
        raise InvalidArgument(f"{TOKEN_FILE_VARIABLE}: {path} cannot be read: {reason}") from None
    if not token or len(token) > TOKEN_BYTES_MAX or not token.isprintable():
        raise InvalidArgument(
            f"{TOKEN_FILE_VARIABLE}: {path} must have one token of at most {TOKEN_BYTES_MAX} bytes"
        )
    return token


def _file_of(variable: str) -> bytes | None:
    path = os.environ.get(variable)
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{variable}: {path} cannot be read: {error.strerror}") from None


def _find_socket(pool: str | Path) -> Path:
    path = socket_of(pool)
    try:
        found = path.lstat()
    except FileNotFoundError:
        found = None
    is_ours = (
        found is not None
        and stat.S_ISSOCK(found.st_mode)
        and found.st_uid in (os.geteuid(), os.stat(pool).st_uid, 0)
    )
    if not is_ours:  # in a folder that all may write, somebody else's socket may be there
        raise InUse(
            f"{pool} is in use by another process, and there is no socket {path} of its user: a "
            "server of the pool has one. Stop the process, or run the command where it runs"
        )
    return path


class AdminClient:
    """A connection to a server, by its pool's path or its admin port (petps+admin://HOST:PORT).

    With petps+admin+tls://HOST:PORT the variables PETPS_TLS_CA (by default the public CAs),
    PETPS_TLS_CERTIFICATE, PETPS_TLS_KEY and PETPS_TLS_SERVER_NAME apply. PETPS_TOKEN_FILE names the
    file of the token that a port may ask for.

    Use it as a context manager. Its methods are those of Pool, with the same arguments and errors.
    Folders are those of the server's machine. Raises InUse if another process has the pool open
    that is no such server.
    """

    def __init__(self, target: str | Path) -> None:
        self._target = str(target)
        self._is_tls = self._target.startswith(ADMIN_TLS_SCHEME)
        self.is_port = is_admin_port(target)
        self._address = (
            _parse_address(self._target) if self.is_port else f"unix:{_find_socket(target)}"
        )
        options: list[tuple[str, Any]] = [("grpc.enable_http_proxy", 0)]
        if self._is_tls:
            credentials, names = _tls_credentials()
            self._channel = grpc.secure_channel(self._address, credentials, options + names)
        else:
            self._channel = grpc.insecure_channel(self._address, options)
        self._stub = AdminStub(self._channel)
        self._metadata: tuple[tuple[str, str], ...] = ((USER_KEY, f"uid {os.getuid()}"),)
        token_file = os.environ.get(TOKEN_FILE_VARIABLE)
        if self.is_port and token_file:
            if not self._is_tls and not _is_loopback(self._address):
                raise FailedPrecondition(
                    f"{self._target}: a token is not sent over an unencrypted connection to "
                    f"another machine: use {ADMIN_TLS_SCHEME}"
                )
            token = read_token(token_file)
            self._metadata += (("authorization", f"Bearer {token}"),)

    def status(self) -> dict[str, Any]:
        """Return what `petps status` shows. Raises Unavailable after STATUS_SECONDS."""
        return self._ask("Status", messages.StatusRequest(), STATUS_SECONDS)

    def models(self) -> list[str]:
        """See Pool."""
        return sorted({instance["model"] for instance in self.status()["instances"]})

    def create_model(self, name: str, partitions: int) -> str:
        """See Pool."""
        request = messages.CreateModelRequest(model=name, partitions=partitions)
        return str(self._ask("CreateModel", request)["instance"])

    def create_instance(self, name: str) -> str:
        """See Pool."""
        return str(self._ask("CreateInstance", messages.InstanceRequest(name=name))["instance"])

    def create_table(
        self,
        name: str,
        *,
        dim: int,
        capacity: int,
        dtype: str = "f32",
        default: float | npt.ArrayLike = 0.0,
        feed: str = "push",
        model: str | None = None,
        expire_after: int = 0,
    ) -> dict[str, Any]:
        """See Pool. Returns the fields of its TableInfo."""
        if not 1 <= dim <= MAX_DIM:  # else the message could not hold it
            raise InvalidArgument(f"table '{name}': dim {dim} is outside 1..{MAX_DIM}")
        row = np.asarray(default, np.float32)
        request = messages.CreateTableRequest(
            model=model or "", name=name, dim=dim, dtype=dtype, capacity=capacity, feed=feed,
            default_value=row.ravel().tolist(), default_is_row=row.ndim > 0,
            expire_after=expire_after,
        )  # fmt: skip
        return self._ask("CreateTable", request)

    def load(
        self,
        table: str,
        keys: npt.NDArray[np.uint64],
        rows: npt.ArrayLike,
        *,
        model: str | None = None,
        allow_not_finite: bool = False,
    ) -> dict[str, int]:
        """See Pool. Returns the counts of its report. Rows before an error are loaded."""
        counts = Counter[str]()
        row_array = np.asarray(rows, "<f4")
        if row_array.ndim != 2 or len(row_array) != len(keys):
            raise InvalidArgument(
                f"table '{table}': rows have shape {row_array.shape}, and there are "
                f"{len(keys)} keys: one row for each key"
            )
        step = max(1, LOAD_BYTES // (8 + row_array[:1].nbytes))
        for at in range(0, len(keys), step):
            request = messages.LoadRequest(
                model=model or "", table=table, allow_not_finite=allow_not_finite,
                keys=keys[at : at + step].astype("<u8").tobytes(),
                rows=row_array[at : at + step].tobytes(),
            )  # fmt: skip
            counts.update(self._ask("Load", request))
        return dict(counts)

    def set_expiry(self, table: str, seconds: int, *, model: str | None = None) -> None:
        """See Pool."""
        self._ask(
            "SetExpiry",
            messages.SetExpiryRequest(model=model or "", table=table, seconds=seconds),
        )

    def drop_table(self, table: str, *, model: str | None = None) -> None:
        """See Pool."""
        self._ask("DropTable", messages.DropTableRequest(model=model or "", table=table))

    def switch_alias(self, alias: str, instance: str) -> None:
        """See Pool."""
        self._ask("SwitchAlias", messages.SwitchAliasRequest(alias=alias, instance=instance))

    def drop_instance(self, instance: str) -> None:
        """See Pool."""
        self._ask("DropInstance", messages.InstanceRequest(name=instance))

    def set_ingest(self, *, paused: bool | None = None, rows_per_second: int | None = None) -> None:
        """Pause, continue or limit (0: do not limit) the server's ingest; None: as it is.

        Raises FailedPrecondition if the server follows no log.
        """
        self._ask(
            "SetIngest", messages.SetIngestRequest(paused=paused, rows_per_second=rows_per_second)
        )

    def set_log_level(self, level: str) -> None:
        """Set which lines the server's log has: from debug, info, warning or error on.

        Raises InvalidArgument for another level.
        """
        self._ask("SetLogLevel", messages.SetLogLevelRequest(level=level))

    def grow(
        self,
        table: str,
        capacity: int,
        *,
        model: str | None = None,
        paced: bool = True,
        progress: Callable[[int, int], bool] | None = None,
    ) -> None:
        """See Pool."""
        request = messages.GrowRequest(
            model=model or "", table=table, capacity=capacity, unpaced=not paced
        )
        for reply in self._replies("Grow", request):
            if progress is None or reply.done:
                continue
            if progress(reply.buckets_copied, reply.buckets) is False:
                raise FailedPrecondition(f"table '{table}': growing was cancelled")

    def shrink(self, progress: Callable[[int, int], bool] = lambda done, free: True) -> int:
        """See Pool."""
        for reply in self._replies("Shrink", messages.ShrinkRequest()):
            if not reply.done and progress(reply.bytes_done, reply.bytes) is False:
                break
        return int(reply.bytes_done)

    def export(
        self, folder: str | Path, *, model: str | None = None, bar: Bar | None = None
    ) -> dict[str, Any]:
        """See Pool."""
        request = messages.ExportRequest(
            model=model or "",
            folder=str(Path(folder).absolute()),
        )
        return self._report("Export", request, bar) | {"folder": str(folder)}

    def back_up(
        self,
        store: str,
        *,
        model: str | None = None,
        full: bool = False,
        bar: Bar | None = None,
    ) -> dict[str, Any]:
        """See Pool."""
        url = store if "://" in store else str(Path(store).absolute())
        request = messages.BackupRequest(model=model or "", store=url, full=full)
        return self._report("Backup", request, bar)

    def verify(self) -> dict[str, Any]:
        """Return the fields of the report of Pool.verify()."""
        for reply in self._replies("Verify", messages.VerifyRequest()):
            if reply.done:
                report: dict[str, Any] = json.loads(reply.report)
        return report

    def scrub(
        self,
        table: str = "",
        *,
        model: str | None = None,
        paced: bool = True,
        progress: Callable[[str, int, int], bool] = lambda table, done, buckets: True,
        log: Callable[[str], None] = lambda line: None,
    ) -> list[dict[str, Any]]:
        """See Pool. The server's log has the damaged rows."""
        request = messages.ScrubRequest(model=model or "", table=table, unpaced=not paced)
        reports: list[dict[str, Any]] = []
        for reply in self._replies("Scrub", request):
            if reply.done:
                reports = json.loads(reply.report)
            elif progress(reply.table, reply.rows_done, reply.rows) is False:
                raise FailedPrecondition("scrubbing was cancelled")
        return reports

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _ask(self, method: str, request: Any, seconds_max: float | None = None) -> dict[str, Any]:
        with self._errors():
            call = getattr(self._stub, method)
            answer = call(request, metadata=self._metadata, timeout=seconds_max)
        values: dict[str, Any] = json.loads(answer.text)
        return values

    def _report(self, method: str, request: Any, bar: Bar | None) -> dict[str, Any]:
        """Return the report of work that goes table by table, and show its progress."""
        report: dict[str, Any] = {}
        with ExitStack() as bars:
            table, rows, done = "", 0, 0
            for reply in self._replies(method, request):
                if reply.done:
                    report = json.loads(reply.report)
                elif bar is not None:
                    # The same table again: a backup passes over it several times.
                    if (reply.table, reply.rows) != (table, rows) or reply.rows_done < done:
                        bars.close()
                        table, rows, done = reply.table, reply.rows, 0
                        advance = bars.enter_context(bar(table, rows))
                    advance(reply.rows_done - done)
                    done = reply.rows_done
        return report

    def _replies(self, method: str, request: Any) -> Iterator[Any]:
        """Yield the replies; the last one is ``done``."""
        with self._errors():
            call = getattr(self._stub, method)(
                request, metadata=self._metadata, wait_for_ready=False
            )
            try:
                yield from call
            finally:
                call.cancel()  # after Ctrl-C everything stays as it was

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
        if error.code() == grpc.StatusCode.UNAVAILABLE:
            is_path = self._address.startswith("unix:")
            in_use = "is in use by another process, and its server " if is_path else ""
            hint = ""
            if self.is_port and not self._is_tls:
                hint = f"; if the port speaks TLS, write {ADMIN_TLS_SCHEME}"
            return Unavailable(
                f"{self._target} {in_use}does not answer on {self._address}: {error.details()}"
                f"{hint}"
            )
        if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            return Unavailable(
                f"the server of {self._target} runs, but has not answered for "
                f"{STATUS_SECONDS:g} s: it is stopped (SIGSTOP), hangs, or the machine is "
                "overloaded. Look at the process; if it does not recover, restart it"
            )
        if error.code() == grpc.StatusCode.UNIMPLEMENTED:
            return Unimplemented(
                f"{self._address} does not know this request: it is no admin port "
                "(server.admin_port), or the server is older than this command"
            )
        return Unavailable(
            f"the server of {self._target} did not complete this: {error.details()}; see what it "
            "did with `petps status` and in its log"
        )
