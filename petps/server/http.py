"""The HTTP door: health, readiness, metrics, status as JSON and as a live page. Read-only."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any, Final

from petps.errors import NotFound, PetpsError, Unavailable

__all__ = ["HttpServer"]

MAX_CONNECTIONS: Final = 32  # a scraper, a probe and a few browsers; each connection has a thread
REQUEST_SECONDS: Final = 10.0  # the server disconnects a client that is silent for longer
JSON: Final = "application/json; charset=utf-8"
TEXT: Final = "text/plain; charset=utf-8"

# (body, content type, status code)
Answer = tuple[bytes, str, HTTPStatus]


class HttpServer:
    """The HTTP server, running until close(). Raises Unavailable if it cannot listen."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        status: Callable[[], dict[str, Any]],
        metrics: Callable[[], bytes],
        fault: Callable[[], str | None],
        ready: Callable[[], str | None],
        shard_map: Callable[[], dict[str, Any]],
    ) -> None:
        """``fault`` and ``ready`` return why the server is not healthy or not ready, or None."""
        self._routes: dict[str, Callable[[], Answer]] = {
            "/": lambda: (_page(), "text/html; charset=utf-8", HTTPStatus.OK),
            "/healthz": lambda: _verdict(fault()),
            "/readyz": lambda: _verdict(fault() or ready()),
            "/metrics": lambda: (metrics(), "text/plain; version=0.0.4", HTTPStatus.OK),
            "/status.json": lambda: (json.dumps(status()).encode(), JSON, HTTPStatus.OK),
            "/shard-map": lambda: (json.dumps(shard_map()).encode(), JSON, HTTPStatus.OK),
        }
        try:
            self._server = _BoundedServer((host, port), _handler(self._routes))
        except OSError as error:
            raise Unavailable(
                f"HTTP address {host}:{port} is not available ({error.strerror or error}); choose "
                "another with --http-port or [server] http_port (0: any free one)"
            ) from None
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="petps-http", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """Return the port that the server listens on."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Accept no more connections, and stop."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _BoundedServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    # A restarted server must have its port back at once.
    allow_reuse_address = True
    # Connections that wait to be accepted or refused. With a short queue, connecting takes seconds.
    request_queue_size = 2 * MAX_CONNECTIONS

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: a client that disconnects during a request is normal."""


def _handler(routes: dict[str, Callable[[], Answer]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_SECONDS
        server_version = "petps"
        sys_version = ""

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, *, with_body: bool) -> None:
            route = routes.get(self.path.partition("?")[0])
            if route is None:
                paths = ", ".join(sorted(routes)).encode()
                body, kind, code = b"known paths are " + paths, TEXT, HTTPStatus.NOT_FOUND
            else:
                try:
                    body, kind, code = route()
                except NotFound as error:
                    body, kind, code = str(error).encode(), TEXT, HTTPStatus.NOT_FOUND
                except PetpsError as error:  # the server is closing, and the pool is closed
                    body, kind, code = str(error).encode(), TEXT, HTTPStatus.SERVICE_UNAVAILABLE
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing: scrapes and probes are frequent."""

    return Handler


def _verdict(reason: str | None) -> Answer:
    if reason is None:
        return b"ok\n", TEXT, HTTPStatus.OK
    return reason.encode() + b"\n", TEXT, HTTPStatus.SERVICE_UNAVAILABLE


def _page() -> bytes:
    return files("petps.server").joinpath("page.html").read_bytes()
