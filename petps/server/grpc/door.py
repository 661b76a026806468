"""The life of the gRPC server: its thread, its port, its health, its drain."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

import petps.v1.petps_pb2 as messages
import petps.v1.petps_pb2_grpc as stubs
from petps import _native
from petps.errors import Unavailable
from petps.server.grpc.admission import Admission
from petps.server.grpc.calls import AwaitableCalls
from petps.server.grpc.limits import CONNECTION_LIMITS, MAX_CALLS
from petps.server.grpc.service import Service

if TYPE_CHECKING:
    from petps.server.tls import TlsFiles

__all__ = ["GrpcServer"]

# Bytes of a message for names, lengths and versions, in addition to keys and rows.
MESSAGE_MARGIN_BYTES: Final = 64 << 10
HEALTH_SECONDS: Final = 0.2  # between two health checks
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
        map_version: Callable[[], int],
        is_ready: Callable[[], bool],
        tls: TlsFiles | None,
        gate: _native.Gate,
    ) -> None:
        """``body_bytes`` and ``in_flight`` are the limits of the native port.

        ``is_ready`` returns whether health reports SERVING.
        """
        self.port = 0
        self._host, self._requested_port = host, port
        self._tables, self._calls = tables, calls
        self._body_bytes, self._in_flight = body_bytes, in_flight
        self._status, self._map_version, self._is_ready = status, map_version, is_ready
        self._tls = tls
        self._gate = gate
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
        calls = AwaitableCalls(self._calls)
        self._service = Service(
            self._tables,
            calls,
            body_bytes=self._body_bytes,
            status=self._status,
            map_version=self._map_version,
            gate=self._gate,
        )
        server = self._make_server()
        try:
            self._health = health.aio.HealthServicer()
            stubs.add_PetpsServicer_to_server(self._service, server)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
            names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
            self.port = self._listen(server)
            await self._update_health()
            await server.start()
            started.set_result(None)
            while not self._closing.is_set():
                await self._update_health()
                self._service.end_revoked()
                try:
                    await asyncio.wait_for(self._closing.wait(), HEALTH_SECONDS)
                except TimeoutError:
                    continue
            await self._begin_drain()
            await self._service.wait_for_calls(self._drain_seconds)
        finally:
            await server.stop(None)
            calls.close()

    def _make_server(self) -> grpc.aio.Server:
        message_bytes = self._body_bytes + MESSAGE_MARGIN_BYTES
        admission = Admission(
            SERVICE,
            admit=self._service.admit,
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

    async def _update_health(self) -> None:
        is_serving = not self._draining and self._is_ready()
        states = health_pb2.HealthCheckResponse
        for name in ("", SERVICE):
            await self._health.set(name, states.SERVING if is_serving else states.NOT_SERVING)
