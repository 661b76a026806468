"""The process of a router: its doors, its signals, its ready file."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from petps import _native
from petps.config import RouterConfig, TlsConfig
from petps.config.doors import is_loopback
from petps.config.router import accepted_risks, check_router_doors
from petps.errors import InvalidArgument, NotFound, PetpsError
from petps.log import WARNING, Line
from petps.server.members import Members
from petps.server.native_server import (
    MAX_AUTOMATIC_WORKERS,
    native_limits,
    native_tls_files,
)
from petps.server.notify import Notifier
from petps.server.process import (
    Signals,
    forbid_core_dumps,
    raise_file_limit,
    remove_ready_file,
    write_ready_file,
)
from petps.server.progress import Progress

if TYPE_CHECKING:
    from petps.router.grpc import RouterGrpcServer
    from petps.server.http import HttpServer
    from petps.server.tls import TlsFiles

__all__ = ["Routing", "serve"]

TEND_SECONDS: Final = 0.25  # as often as a server looks at its files
ANSWER_SECONDS: Final = 2.0  # in which a server must accept a connection
DEFAULT_PORT: Final = 7070  # client/cpp/petps_client/client.h kDefaultPort

Log = Callable[[str], None]


class Routing:
    """A running router. Use it as a context manager, or call close()."""

    def __init__(self, config: RouterConfig, tls: TlsConfig, log: Log = print) -> None:
        """Open the doors. Raises InvalidArgument, and the errors of the ports."""
        check_router_doors(config, tls)
        if config.servers is None:
            raise InvalidArgument(
                "name the servers: `petps router --servers petps://h1:7070,h2:7070`, servers in "
                "[router], or PETPS_ROUTER_SERVERS"
            )
        self._config, self._log = config, log
        self._draining = False
        self._is_insecure = bool(accepted_risks(config, tls))
        self._native_tls: _native.ServerTls | None = None
        self._tls: TlsFiles | None = None
        if tls.certificate is not None:
            from petps.server.tls import TlsFiles, use_safe_grpc_ciphers

            use_safe_grpc_ciphers()
            self._native_tls = _native.ServerTls(*native_tls_files(tls))
            self._tls = TlsFiles(tls, reload_native=self._native_tls.reload, log=log)
        self._router = _start(config, self._native_tls)
        self._progress = Progress(self._counts)
        self._http: HttpServer | None = None
        self._grpc: RouterGrpcServer | None = None
        self._members: Members | None = None
        try:
            addresses = [(address, "") for address in _addresses(config.servers)]
            find = partial(_find_fault, has_tls=config.servers.startswith("petps+tls:"))
            self._members = Members(lambda: addresses, find, log)
            if config.http:
                self._http = self._open_http()
            if config.grpc:
                self._grpc = self._open_grpc()
        except BaseException:
            self.close()
            raise

    @property
    def port(self) -> int:
        """Return the native port."""
        return self._router.port

    @property
    def http_port(self) -> int | None:
        """Return the HTTP port, or None without HTTP."""
        return None if self._http is None else self._http.port

    @property
    def grpc_port(self) -> int | None:
        """Return the gRPC port, or None without gRPC."""
        return None if self._grpc is None else self._grpc.port

    def unready(self) -> str | None:
        """Return why the router is not ready, or None: one of its servers must answer."""
        if self._draining:
            return "draining"
        faults = [] if self._members is None else self._members.status()
        live = self._router.stats()["servers"]  # as the callers of now have seen them
        if any(member["answers"] for member in faults):
            if not live or any(live.values()):
                return None
            return f"no server answers its callers ({', '.join(sorted(live))})"
        asked = [f"{member['address']}: {member['fault']}" for member in faults if member["fault"]]
        return f"no server answers ({'; '.join(asked)})" if asked else "no server was asked yet"

    def fault(self) -> str | None:
        """Return what is wrong with the process, so that it must be started again; or None."""
        if self._grpc is not None and self._grpc.is_over:
            return "the thread of gRPC has ended: restart the router"
        stuck = self._progress.stuck()
        return f"{stuck}: restart the router" if stuck else None

    def _counts(self) -> dict[str, int | None]:
        return {f"worker {n}": count for n, count in enumerate(self._router.progress())}

    def tend(self) -> None:
        """Forget idle tokens, and use changed files of [tls]. Call it every TEND_SECONDS."""
        self._router.tend()
        if self._tls is not None:
            self._tls.check()
        self._progress.look()

    def status(self) -> dict[str, Any]:
        """Return what `petps status` shows."""
        status: dict[str, Any] = json.loads(self._router.status_json())
        more = {"unready": self.unready(), "insecure": self._is_insecure}
        return status | more | {"tls": self._tls_status(), "grpc": self._grpc_status()}

    def _grpc_status(self) -> dict[str, Any] | None:
        return None if self._grpc is None else self._grpc.status()

    def _tls_status(self) -> dict[str, Any] | None:
        return None if self._tls is None else self._tls.status()

    def close(self) -> None:
        """Drain and close."""
        self._draining = True
        if self._members is not None:
            self._members.close()
        if self._grpc is not None:
            self._grpc.drain()
            self._grpc.close(self._config.drain_seconds)
        try:
            self._router.stop()
        except PetpsError as error:
            self._log(Line(f"router: {error}", "stop_incomplete", WARNING, code=error.code))
        if self._http is not None:
            self._http.close()

    def __enter__(self) -> Routing:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open_http(self) -> HttpServer:
        from petps.router.gate import RouterGate
        from petps.router.metrics import RouterMetrics
        from petps.server.http import HttpServer

        metrics = RouterMetrics(
            self._router.stats,
            is_ready=lambda: self.unready() is None,
            is_insecure=lambda: self._is_insecure,
            tls=self._tls_status,
            grpc=self._grpc_status,
        )
        return HttpServer(
            self._config.host,
            self._config.http_port,
            status=self.status,
            metrics=metrics.text,
            fault=self.fault,
            ready=self.unready,
            stuck=self.fault,
            shard_map=_refuse_shard_map,
            tls=self._tls,
            gate=cast(Any, RouterGate(self._router)),
            has_page=False,
        )

    def _open_grpc(self) -> RouterGrpcServer:
        from petps.router.grpc import RouterGrpcServer

        return RouterGrpcServer(
            self._config.host,
            self._config.grpc_port,
            self._router,
            threads=self._config.calls,
            body_bytes=self._config.limits.body_bytes,
            in_flight=self._config.limits.in_flight,
            status=self.status,
            is_ready=lambda: self.unready() is None,
            tls=self._tls,
        )


def serve(
    config: RouterConfig, tls: TlsConfig, *, ready_file: Path | None = None, log: Log = print
) -> None:
    """Route until SIGTERM or SIGINT, then drain and close. Call it from the main thread.

    ready_file: file to write atomically once every door is open, and to remove before they close:
    JSON with pid, host, port, http_port and grpc_port.
    """
    if ready_file is not None and not ready_file.parent.is_dir():
        raise InvalidArgument(f"--ready-file: there is no folder {ready_file.parent}")
    raise_file_limit(log)
    forbid_core_dumps()  # the memory has the callers' tokens
    notifier = Notifier(os.environ)
    try:
        with Signals() as signals, Routing(config, tls, log) as routing:
            if ready_file is not None:
                write_ready_file(ready_file, _facts(config, routing))
            _announce(config, tls, routing, log)
            notifier.ready("routing")
            while signals.wait(TEND_SECONDS):
                routing.tend()
                if routing.fault() is None:
                    notifier.alive()
            assert signals.stopped_by is not None
            log(Line(f"{signal.Signals(signals.stopped_by).name}: draining", "draining"))
            notifier.stopping()
            remove_ready_file(ready_file)
        log(Line("closed cleanly", "closed"))
    finally:
        remove_ready_file(ready_file)


def _start(config: RouterConfig, tls: _native.ServerTls | None) -> _native.Router:
    assert config.servers is not None
    return _native.Router.start(
        servers=config.servers.rstrip("/"),
        host=config.host,
        port=config.port,
        workers=config.workers or min(os.cpu_count() or 1, MAX_AUTOMATIC_WORKERS),
        calls=config.calls,
        callers=config.callers,
        caller_idle_ms=round(1e3 * config.caller_idle_seconds),
        deadline_ms=round(1e3 * config.deadline_seconds),
        drain_ms=round(1e3 * config.drain_seconds),
        limits=native_limits(config.limits),
        tls=tls,
        ca="" if config.ca is None else str(config.ca),
        server_name=config.server_name or "",
        zone=config.zone,
        needs_token=not (is_loopback(config.host) or config.insecure),
    )


def _facts(config: RouterConfig, routing: Routing) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": config.host,
        "port": routing.port,
        "http_port": routing.http_port,
        "grpc_port": routing.grpc_port,
    }


def _announce(config: RouterConfig, tls: TlsConfig, routing: Routing, log: Log) -> None:
    host = f"[{config.host}]" if ":" in config.host else config.host
    is_encrypted = tls.certificate is not None
    doors = [f"petps{'+tls' if is_encrypted else ''}://{host}:{routing.port}"]
    if routing.http_port is not None:
        doors.append(f"http{'s' if is_encrypted else ''}://{host}:{routing.http_port}/")
    if routing.grpc_port is not None:
        doors.append(f"gRPC on {host}:{routing.grpc_port}")
    if risks := accepted_risks(config, tls):
        log(Line(f"INSECURE: {'; '.join(risks)}", "insecure", WARNING, risks=risks))
    text = f"routing {', '.join(doors)} to {config.servers}"
    log(Line(text, "serving", software=_native.software, doors=doors, servers=config.servers))


def _addresses(url: str) -> list[str]:
    """Return the addresses of a URL of servers as "host:port"."""
    places = url.partition("://")[2].rstrip("/").split(",")
    return [
        place if place.rpartition(":")[2].isdecimal() else f"{place}:{DEFAULT_PORT}"
        for place in places
    ]


def _find_fault(address: str, *, has_tls: bool) -> str | None:
    """Return why the server at ``address`` does not answer; None if it does.

    It must accept a connection, and with TLS complete a handshake. A hello would count as a caller
    without a token.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS) as connection:
            if has_tls:
                # Whether it is the right server is checked for each request.
                context = ssl.create_default_context()
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                with context.wrap_socket(connection) as secured, contextlib.suppress(OSError):
                    secured.unwrap()
        return None
    except TimeoutError:
        return f"no answer within {ANSWER_SECONDS:g} s"
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)


def _refuse_shard_map() -> dict[str, Any]:
    raise NotFound("a router answers for every partition; ask a server for the shard map")
