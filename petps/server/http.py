"""The HTTP door: health, readiness, metrics, status as JSON and as a live page. Read-only."""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from petps import _native
from petps.errors import NotFound, PetpsError, Unavailable
from petps.server.access import token_of

if TYPE_CHECKING:
    from petps.server.tls import TlsFiles

__all__ = ["HttpServer"]

MAX_CONNECTIONS: Final = 32  # a scraper, a probe and a few browsers; each connection has a thread
# Of one address, so that no peer takes the places of all others and of the probe.
MAX_CONNECTIONS_PER_PEER: Final = 16
# The server disconnects a client that is silent for longer.
REQUEST_SECONDS: Final = 10.0
# The same for a whole connection, which has one request: a client may send a byte each second.
CONNECTION_SECONDS: Final = 20.0
TLS_HANDSHAKE: Final = b"\x16"  # the first byte of a TLS connection
REQUEST_BYTES: Final = 64 << 10  # to read of a request before it is refused
JSON: Final = "application/json; charset=utf-8"
TEXT: Final = "text/plain; charset=utf-8"

# The answer to a request without TLS. Without a length, the body ends with the connection.
NO_TLS: Final = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\n"
    b"Connection: close\r\n\r\nthis port speaks HTTPS: use https://\n"
)

# Answered for everybody; the text only for those who may see the status.
PROBES: Final = frozenset({"/livez", "/healthz", "/readyz"})
FOR_ANY_CALLER: Final = frozenset({"/shard-map"})
HTTP_CODES: Final = {
    "INVALID_ARGUMENT": HTTPStatus.BAD_REQUEST,
    "NOT_FOUND": HTTPStatus.NOT_FOUND,
    "UNAUTHENTICATED": HTTPStatus.UNAUTHORIZED,
    "PERMISSION_DENIED": HTTPStatus.FORBIDDEN,
    "RESOURCE_EXHAUSTED": HTTPStatus.TOO_MANY_REQUESTS,
}

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
        stuck: Callable[[], str | None] = lambda: None,
        tls: TlsFiles | None = None,
        gate: _native.Gate,
    ) -> None:
        """``fault`` and ``ready`` return why the server is not healthy or not ready, or None.

        ``stuck`` returns why it must be started again, or None.

        ``gate`` says who may see what.
        """
        routes: dict[str, Callable[[], Answer]] = {
            "/": lambda: (_page(), "text/html; charset=utf-8", HTTPStatus.OK),
            "/livez": lambda: _verdict(stuck()),
            "/healthz": lambda: _verdict(fault()),
            "/readyz": lambda: _verdict(fault() or ready()),
            "/metrics": lambda: (metrics(), "text/plain; version=0.0.4", HTTPStatus.OK),
            "/status.json": lambda: (json.dumps(status()).encode(), JSON, HTTPStatus.OK),
            "/shard-map": lambda: (json.dumps(shard_map()).encode(), JSON, HTTPStatus.OK),
        }
        handler = _handler(routes, gate)
        try:
            self._server = _BoundedServer((host, port), handler, tls)
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

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[BaseHTTPRequestHandler],
        tls: TlsFiles | None,
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._tls = tls
        self._lock = threading.Lock()  # guards the next two
        self._peers: Counter[str] = Counter()  # connections by address
        # The address and the last moment of each connection that may go on, the oldest first.
        self._open: dict[socket.socket, tuple[str, float]] = {}
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind without the base class's search for a name, which may wait for a name server."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        peer = client_address[0]
        with self._lock:
            has_place = (
                self._peers.total() < 2 * MAX_CONNECTIONS  # some are about to end
                and self._peers[peer] < MAX_CONNECTIONS_PER_PEER
            )
            if has_place:
                if len(self._open) >= MAX_CONNECTIONS:
                    self._make_room()
                self._peers[peer] += 1
                self._open[request] = (peer, time.monotonic() + CONNECTION_SECONDS)
        if not has_place:
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # there can be no thread now
            self._free_place(peer)
            raise

    def service_actions(self) -> None:
        """End the connections whose time is over. Called twice a second, and for each client."""
        now = time.monotonic()
        with self._lock:
            for connection in [key for key, (_, until) in self._open.items() if now > until]:
                self._end(connection)

    def _make_room(self) -> None:
        """End the oldest connection of the address with the most, so that no one is kept out."""
        of_peer = Counter(peer for peer, _ in self._open.values())
        self._end(max(self._open, key=lambda connection: of_peer[self._open[connection][0]]))

    def _end(self, connection: socket.socket) -> None:
        """Let the connection's thread find that its client is gone. The lock must be held."""
        del self._open[connection]
        with contextlib.suppress(OSError):  # the client was faster
            # Not the method of an SSL socket, which lets a thread in a write continue unencrypted.
            socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def close_request(self, request: Any) -> None:
        """Close the connection, which _end() must then not touch any more."""
        with self._lock:
            self._open.pop(request, None)
        super().close_request(request)

    def _free_place(self, peer: str) -> None:
        with self._lock:
            self._peers[peer] -= 1
            self._peers += Counter()  # forget addresses without connections

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            request.settimeout(REQUEST_SECONDS)
            secured = self._secured(request)
        except (OSError, ValueError):  # ValueError: the client disconnected before the handshake
            secured = None
        try:
            if secured is None:
                self.shutdown_request(request)
            else:
                super().process_request_thread(secured, client_address)
        finally:
            self._free_place(client_address[0])

    def _secured(self, request: socket.socket) -> socket.socket | None:
        """Return the connection after its handshake, in this thread; None: it is refused."""
        speaks_tls = request.recv(1, socket.MSG_PEEK) == TLS_HANDSHAKE
        if self._tls is None:
            return None if speaks_tls else request
        if not speaks_tls:
            request.recv(REQUEST_BYTES)  # closing with unread bytes would reset the connection
            request.sendall(NO_TLS)
            return None
        secured = self._tls.current.context.wrap_socket(
            request, server_side=True, do_handshake_on_connect=False
        )
        try:
            with self._lock:  # `request` has given its descriptor to `secured`
                self._open[secured] = self._open.pop(request)
            secured.do_handshake()
        except (OSError, ValueError, KeyError):  # KeyError: it had to make room
            self.close_request(secured)
            return None
        return secured

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error: a client that disconnects during a request is normal."""


def _handler(
    routes: dict[str, Callable[[], Answer]], gate: _native.Gate
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_SECONDS
        server_version = "petps"
        sys_version = ""
        certificate_names: tuple[str, ...] = ()
        """Names of the client's certificate, if it has shown one."""

        def setup(self) -> None:
            super().setup()
            if isinstance(self.connection, ssl.SSLSocket):
                from petps.server.tls import certificate_names

                self.certificate_names = certificate_names(self.connection.getpeercert() or {})

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def _answer(self, *, with_body: bool) -> None:
            body, kind, code = self._content()
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            if code is HTTPStatus.UNAUTHORIZED:  # a browser asks for it, with the token as password
                self.send_header("WWW-Authenticate", 'Basic realm="petps", charset="UTF-8"')
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def _content(self) -> Answer:
            path = self.path.partition("?")[0]
            try:
                if path in PROBES:
                    body, kind, code = routes[path]()
                    return (body if self._may_see_all() else b""), kind, code
                caller = self._caller()
                if path in routes and path not in FOR_ANY_CALLER:
                    gate.require_sight(caller)
                gate.charge(caller, len(self.requestline))
                if path not in routes:
                    raise NotFound(f"known paths are {', '.join(sorted(routes))}")
                body, kind, code = routes[path]()
                caller.spend_bytes(len(body))
                return body, kind, code
            except PetpsError as error:
                # Of the errors without a code of their own: the server is closing, and the pool is
                # closed.
                code = HTTP_CODES.get(error.code, HTTPStatus.SERVICE_UNAVAILABLE)
                return f"{error}\n".encode(), TEXT, code

        def _caller(self) -> _native.Caller:
            if gate.mode == "open":
                return gate.authenticate("", [], "")
            token = token_of(self.headers.get("Authorization", ""))
            host, port = self.client_address[:2]
            peer = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            return gate.authenticate(token, list(self.certificate_names), peer)

        def _may_see_all(self) -> bool:
            """Return whether the caller may see why the server is not ready."""
            has_credential = "Authorization" in self.headers or self.certificate_names
            if gate.mode != "open" and not has_credential:  # no failed login
                return False
            try:
                return self._caller().may_see_all
            except PetpsError:
                return False

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing: scrapes and probes are frequent."""

    return Handler


def _verdict(reason: str | None) -> Answer:
    if reason is None:
        return b"ok\n", TEXT, HTTPStatus.OK
    return reason.encode() + b"\n", TEXT, HTTPStatus.SERVICE_UNAVAILABLE


def _page() -> bytes:
    return files("petps.server").joinpath("page.html").read_bytes()
