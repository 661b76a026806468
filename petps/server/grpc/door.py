"""The life of the gRPC server: its thread, its port, its health, its drain."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

import petps.v1.petps_pb2 as messages
import petps.v1.petps_pb2_grpc as stubs
from petps import _native
from petps.errors import Unavailable
from petps.log import log_event
from petps.server.grpc.admission import Admission
from petps.server.grpc.calls import AwaitableCalls
from petps.server.grpc.limits import CONNECTION_LIMITS, MAX_CALLS
from petps.server.grpc.service import Service
from petps.server.grpc.shards import Shards

if TYPE_CHECKING:
    from petps.server.shard_map import ShardMap
    from petps.server.tls import TlsFiles

__all__ = ["GrpcServer"]

_log = logging.getLogger("petps.server.grpc")

# Bytes of a message for names, lengths and versions, in addition to keys and rows.
MESSAGE_MARGIN_BYTES: Final = 64 << 10
HEALTH_SECONDS: Final = 0.2  # between two health checks
STOP_SECONDS: Final = 2.0
LOG_SECONDS: Final = 60.0  # between two equal lines about a server that has ended
SERVICE: Final[str] = messages.DESCRIPTOR.services_by_name["Petps"].full_name


class GrpcServer:
    """The gRPC server, running until close(). Raises Unavailable if it cannot listen."""

    def __init__(
        self,
        host: str,
        port: int,
        tables: _native.Tables,
        calls: _native.Calls,
        *,
        body_bytes: int,
        in_flight: int,
        status: Callable[[], dict[str, Any]],
        shard_map: Callable[[], ShardMap | None],
        address: str,
        is_ready: Callable[[], bool],
        tls: TlsFiles | None,
        gate: _native.Gate,
        has_traces: bool = False,
    ) -> None:
        """``body_bytes`` and ``in_flight`` are the limits of the native port.

        ``shard_map`` returns the map in use, in which the server has this ``address``; without a
        map, None. ``is_ready`` returns whether health reports SERVING. ``has_traces``: whether the
        native server records spans.
        """
        self.port = 0
        self.restarts = 0  # how often grpcio's server had ended and was started again
        self._restarted_at: float | None = None
        self._error = ""  # why the port is closed now
        self._logged: tuple[str, float] = ("", 0.0)  # of _note_end(): text and time
        self._ended: asyncio.Future[Any]
        self._host, self._requested_port = host, port
        self._tables, self._calls = tables, calls
        self._body_bytes, self._in_flight = body_bytes, in_flight
        self._status, self._is_ready = status, is_ready
        self._shards = Shards(shard_map, address)
        self._tls = tls
        self._gate = gate
        self._has_traces = has_traces
        self._loop: asyncio.AbstractEventLoop
        self._service: Service
        self._health: health.aio.HealthServicer
        self._draining = False
        self._closing: asyncio.Event
        self._drain_seconds = 0.0
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="petps-grpc", daemon=True
        )
        self._thread.start()
        started.result()

    def status(self) -> dict[str, Any]:
        """Return the member ``grpc`` of the status."""
        return {
            "port": self.port,
            "error": "its thread has ended; restart the server" if self.is_over else self._error,
            "restarts": self.restarts,
            "last_restart_at": self._restarted_at,
        }

    @property
    def is_over(self) -> bool:
        """Return whether the thread has ended although nobody closed the port."""
        return not self._thread.is_alive() and not self._draining

    def drain(self) -> None:
        """Report NOT_SERVING, refuse new calls, and end watchers. Calls in flight continue."""
        asyncio.run_coroutine_threadsafe(self._begin_drain(), self._loop).result()

    def update_health(self) -> None:
        """Update the reported health now, instead of at the next check."""
        asyncio.run_coroutine_threadsafe(self._update_health(), self._loop).result()

    def close(self, seconds: float) -> None:
        """Wait up to ``seconds`` for the calls in flight, cancel the rest, and stop serving."""
        if not self._thread.is_alive():
            return
        self._drain_seconds = seconds
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    # ---- in the loop's thread

    def _run(self, started: concurrent.futures.Future[None]) -> None:
        try:
            asyncio.run(self._serve(started))
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    async def _serve(self, started: concurrent.futures.Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        self._service, close_service = self._make_service()
        self._health = health.aio.HealthServicer()
        server: grpc.aio.Server | None = None
        try:
            server = await self._start_server()
            started.set_result(None)
            while not self._closing.is_set():
                if self._ended.done():
                    server = await self._start_again(server)
                await self._update_health()
                self._service.end_revoked()
                try:
                    await asyncio.wait_for(self._closing.wait(), HEALTH_SECONDS)
                except TimeoutError:
                    continue
            await self._begin_drain()
            await self._service.wait_for_calls(self._drain_seconds)
        finally:
            if server is not None:
                # A connection that reads nothing would hold it up.
                await asyncio.wait({asyncio.ensure_future(server.stop(None))}, timeout=STOP_SECONDS)
            close_service()

    def _make_service(self) -> tuple[Service, Callable[[], None]]:
        """Return the service, and the function that closes it."""
        calls = AwaitableCalls(self._calls)
        service = Service(
            self._tables,
            calls,
            body_bytes=self._body_bytes,
            status=self._status,
            shards=self._shards,
            gate=self._gate,
            has_traces=self._has_traces,
        )
        return service, calls.close

    async def _start_server(self) -> grpc.aio.Server:
        server = self._make_server()
        stubs.add_PetpsServicer_to_server(self._service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        self.port = self._requested_port = self._listen(server)
        await self._update_health()
        await server.start()
        self._ended = asyncio.ensure_future(server.wait_for_termination())
        return server

    async def _start_again(self, server: grpc.aio.Server) -> grpc.aio.Server:
        """Return another server for the port of one that has ended although nobody stopped it.

        grpcio ends its server if it cannot read the path of a request, which anybody may send. If
        the port cannot be opened, return ``server``, so that the next round tries again.
        """
        if not self._ended.cancelled():
            self._ended.exception()  # or asyncio logs it each time
        try:
            again = await self._start_server()
        except Unavailable as error:
            self._error = str(error)
            self._note_end(f"grpcio's server has ended, and cannot be started again: {error}")
            return server
        self.restarts += 1
        self._restarted_at, self._error = time.time(), ""
        self._note_end("grpcio's server had ended, and is started again")
        return again

    def _note_end(self, text: str) -> None:
        """Log it, but the same at most once a minute: a stranger may cause it without an end."""
        now = time.monotonic()
        before, at = self._logged
        if text == before and now - at < LOG_SECONDS:
            return
        self._logged = (text, now)
        line = f"[grpc] {text} (restarts: {self.restarts})"
        _log.warning("%s", line, extra=log_event("grpc_restarted", restarts=self.restarts))

    def _make_server(self) -> grpc.aio.Server:
        message_bytes = self._body_bytes + MESSAGE_MARGIN_BYTES
        admission = Admission(
            SERVICE,
            admit=self._service.admit,
            charge=self._service.charge,
            hold=self._calls.hold,
            release=self._calls.release,
        )
        return grpc.aio.server(
            interceptors=[admission],
            options=(
                ("grpc.max_receive_message_length", message_bytes),
                ("grpc.max_send_message_length", message_bytes),
                ("grpc.max_concurrent_streams", self._in_flight),
                *CONNECTION_LIMITS,
                ("grpc.so_reuseport", 0),  # an address in use must be an error
                ("grpc.keepalive_time_ms", 60_000),  # ends the calls of a dead client
                ("grpc.keepalive_timeout_ms", 20_000),
            ),
            maximum_concurrent_rpcs=MAX_CALLS,
        )

    def _listen(self, server: grpc.aio.Server) -> int:
        is_ipv6 = ":" in self._host
        address = f"[{self._host}]" if is_ipv6 else self._host
        try:
            where = f"{address}:{self._requested_port}"
            if self._tls is None:
                port = server.add_insecure_port(where)
            else:
                from petps.server.tls import grpc_credentials

                port = server.add_secure_port(where, grpc_credentials(self._tls))
        except RuntimeError:
            port = 0
        if port == 0:
            raise Unavailable(
                f"gRPC address {address}:{self._requested_port} is not available (another "
                "process may use it); choose another with --grpc-port or [server] grpc_port (0: "
                "any free one), or --no-grpc"
            )
        return int(port)

    async def _begin_drain(self) -> None:
        self._draining = True
        await self._update_health()
        self._service.drain()

    def _looks_ready(self) -> bool:
        """Return whether the process is ready. An error in finding out must not end this thread."""
        try:
            return self._is_ready()
        except Exception as error:
            self._note_end(f"cannot find out whether the process is ready: {error!r}")
            return False

    async def _update_health(self) -> None:
        is_serving = not self._draining and self._looks_ready()
        states = health_pb2.HealthCheckResponse
        for name in ("", SERVICE):
            await self._health.set(name, states.SERVING if is_serving else states.NOT_SERVING)
