"""The HTTP door: health, readiness, metrics, status as JSON and as a live page.

It changes nothing but an alias, for a caller with the role admin (changes.py).
"""

from __future__ import annotations

import contextlib
import gzip
import ipaddress
import json
import logging
import socket
import socketserver
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from petps import _native
from petps.config.doors import is_loopback
from petps.errors import NotFound, PermissionDenied, PetpsError, Unavailable, Unimplemented
from petps.log import log_event, new_request_id, request_id
from petps.server.access import host_of, token_of
from petps.server.changes import SWITCH_BYTES_MAX
from petps.server.docs_folder import read_page

if TYPE_CHECKING:
    from email.message import Message

    from petps.server.tls import TlsFiles

__all__ = ["HttpServer"]

_log = logging.getLogger("petps.server.http")

MAX_CONNECTIONS: Final = 32  # a scraper, a probe and a few browsers; each connection has a thread
# Of one address, so that no peer takes the places of all others and of the probe.
MAX_CONNECTIONS_PER_PEER: Final = 16
# The server disconnects a client that is silent for longer.
REQUEST_SECONDS: Final = 10.0
# The same for a whole connection, which has one request: a client may send a byte each second.
CONNECTION_SECONDS: Final = 20.0
ACCEPT_PAUSE_SECONDS: Final = 0.05  # after a failure to accept
TLS_HANDSHAKE: Final = b"\x16"  # the first byte of a TLS connection
REQUEST_BYTES: Final = 64 << 10  # to read of a request before it is refused
JSON: Final = "application/json; charset=utf-8"
TEXT: Final = "text/plain; charset=utf-8"
DOCS: Final = "/docs/"  # begins the paths of the pages with remedies
SWITCH: Final = "/switch"
PAGE_FILES: Final = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/dom.js": ("dom.js", "text/javascript; charset=utf-8"),
    "/switch.js": ("switch.js", "text/javascript; charset=utf-8"),
    "/favicon.ico": ("icon.svg", "image/svg+xml"),
}
# Of every answer. The page loads its own files and nothing else; no other site may frame it, so
# that nobody can make a person press its buttons unseen.
SECURITY_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}

# The answer to a request without TLS. Without a length, the body ends with the connection.
NO_TLS: Final = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\n"
    b"Connection: close\r\n\r\nthis port speaks HTTPS: use https://\n"
)

METRICS: Final = "/metrics"
COMPRESSED_BYTES: Final = 1024  # shorter answers fit into one packet
COMPRESSION_LEVEL: Final = 1  # a third of the time of the highest level, for 15 % more bytes

# Answered for everybody; the text only for those who may see the status.
PROBES: Final = frozenset({"/livez", "/healthz", "/readyz"})
FOR_ANY_CALLER: Final = frozenset({"/shard-map"})  # of its model
HTTP_CODES: Final = {
    "INVALID_ARGUMENT": HTTPStatus.BAD_REQUEST,
    "NOT_FOUND": HTTPStatus.NOT_FOUND,
    "UNAUTHENTICATED": HTTPStatus.UNAUTHORIZED,
    "PERMISSION_DENIED": HTTPStatus.FORBIDDEN,
    "RESOURCE_EXHAUSTED": HTTPStatus.TOO_MANY_REQUESTS,
}

# Modes of a gate that asks every caller for a credential, which no web page has.
ASKING_MODES: Final = ("certificates", "grants")

# Of a switch, whose errors do not mean that the server is closing.
SWITCH_CODES: Final = {
    **HTTP_CODES,
    "FAILED_PRECONDITION": HTTPStatus.CONFLICT,
    "UNIMPLEMENTED": HTTPStatus.METHOD_NOT_ALLOWED,
}

# (body, content type, status code)
Answer = tuple[bytes, str, HTTPStatus]
# (headers of the request, its body, its peer) -> what was switched
Switch = Callable[["Message[str, str]", bytes, str], dict[str, Any]]


class HttpServer:
    """The HTTP server, running until close(). Raises Unavailable if it cannot listen."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        status: Callable[[], dict[str, Any]],
        metrics: Callable[[str], tuple[bytes, str]],
        fault: Callable[[], str | None],
        ready: Callable[[], str | None],
        shard_map: Callable[[], dict[str, Any]],
        stuck: Callable[[], str | None] = lambda: None,
        history: Callable[[], dict[str, Any]] = dict,
        switch: Switch | None = None,
        tls: TlsFiles | None = None,
        gate: _native.Gate,
        has_page: bool = True,
    ) -> None:
        """``fault`` and ``ready`` return why the server is not healthy or not ready, or None.

        ``stuck`` returns why it must be started again, or None. ``gate`` says who may see what.
        ``switch`` checks its caller itself. ``metrics`` returns the metrics and their content type,
        for the value of an Accept header. ``has_page``: serve the page of a server's status.
        """
        routes: dict[str, Callable[[], Answer]] = {
            **{path: partial(_page_file, path) for path in PAGE_FILES if has_page},
            "/livez": lambda: _verdict(stuck()),
            "/healthz": lambda: _verdict(fault()),
            "/readyz": lambda: _verdict(fault() or ready()),
            METRICS: lambda: (*metrics(""), HTTPStatus.OK),
            "/status.json": lambda: (json.dumps(status()).encode(), JSON, HTTPStatus.OK),
            "/history.json": lambda: (json.dumps(history()).encode(), JSON, HTTPStatus.OK),
            "/shard-map": lambda: (json.dumps(shard_map()).encode(), JSON, HTTPStatus.OK),
        }
        handler = _handler(routes, metrics, gate, switch)
        try:
            self._server = _BoundedServer((host, port), handler, tls)
        except OSError as error:
            raise Unavailable(
                f"HTTP address {host}:{port} is not available ({error.strerror or error}); choose "
                "another with --http-port or http_port (0: any free one)"
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

    def get_request(self) -> Any:
        """Accept a peer. Without descriptors it stays in the queue, so wait instead of spinning."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(ACCEPT_PAUSE_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        peer = host_of(_text_of(client_address))
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
            self._free_place(host_of(_text_of(client_address)))

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


class _Bounded:
    """The input of a connection with one request, whose headers have at most REQUEST_BYTES.

    Python bounds each header, and their number, but not their sum.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self._is_first, self._left = stream, True, REQUEST_BYTES

    def readline(self, limit: int) -> bytes:
        line: bytes = self._stream.readline(limit)
        if not self._is_first:
            self._left -= len(line)
        self._is_first = False
        if self._left < 0:
            raise LineTooLong("header")  # which is answered with 431
        return line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _handler(
    routes: dict[str, Callable[[], Answer]],
    metrics: Callable[[str], tuple[bytes, str]],
    gate: _native.Gate,
    switch: Switch | None = None,
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_SECONDS
        server_version = "petps"
        sys_version = ""
        certificate_names: tuple[str, ...] = ()
        """Names of the client's certificate, if it has shown one."""

        def setup(self) -> None:
            super().setup()
            self.rfile = _Bounded(self.rfile)  # type: ignore[assignment]
            if isinstance(self.connection, ssl.SSLSocket):
                from petps.server.tls import certificate_names

                self.certificate_names = certificate_names(self.connection.getpeercert() or {})

        def end_headers(self) -> None:
            for name, value in SECURITY_HEADERS.items():  # also of an answer of Python's own
                self.send_header(name, value)
            super().end_headers()

        def do_GET(self) -> None:
            self._answer(self._content)

        def do_HEAD(self) -> None:
            self._answer(self._content, with_body=False)

        def do_POST(self) -> None:
            # No realm: the page asks for the token, and the browser must not.
            self._answer(self._switch, asks=False)

        def _answer(
            self, content: Callable[[], Answer], *, with_body: bool = True, asks: bool = True
        ) -> None:
            request_id.set(new_request_id(self.headers.get("X-Request-Id")))
            began = time.monotonic()
            try:
                body, kind, code = content()
            except Exception:  # a mistake of ours; the request must not end without a word
                _log.exception("[http] %s failed", self.path, extra=log_event("http_failed"))
                code, kind = HTTPStatus.INTERNAL_SERVER_ERROR, TEXT
                body = f"the server's log has the error of request {request_id.get()}\n".encode()
            path, ms = self.path.partition("?")[0], 1e3 * (time.monotonic() - began)
            _log.debug(
                "[http] %s %s: %d in %.1f ms", self.command, path, code, ms,
                extra=log_event(
                    "http_request", method=self.command, path=path, status=int(code), ms=ms,
                    peer=_text_of(self.client_address),
                ),
            )  # fmt: skip
            is_compressed = len(body) >= COMPRESSED_BYTES and self._accepts_gzip()
            if is_compressed:
                body = gzip.compress(body, COMPRESSION_LEVEL)
            self.send_response(code)
            self.send_header("X-Request-Id", request_id.get())
            self.send_header("Content-Type", kind)
            self.send_header("Vary", "Accept, Accept-Encoding")
            if is_compressed:
                self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            if asks and code is HTTPStatus.UNAUTHORIZED:  # the token is the password
                self.send_header("WWW-Authenticate", 'Basic realm="petps", charset="UTF-8"')
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def _switch(self) -> Answer:
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal() or len(length) > 9 or int(length) > SWITCH_BYTES_MAX:
                text = f"a request needs a Content-Length of at most {SWITCH_BYTES_MAX} bytes\n"
                return text.encode(), TEXT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE
            body = self.rfile.read(int(length))
            try:
                if switch is None or self.path != SWITCH:
                    raise Unimplemented(f"only {SWITCH} takes a POST")
                report = switch(self.headers, body, _text_of(self.client_address))
                return json.dumps(report).encode(), JSON, HTTPStatus.OK
            except PetpsError as error:
                code = SWITCH_CODES.get(error.code, HTTPStatus.SERVICE_UNAVAILABLE)
                return f"{error}\n".encode(), TEXT, code

        def _content(self) -> Answer:
            path = self.path.partition("?")[0]
            try:
                self._check_host()
                if path in PROBES:
                    body, kind, code = routes[path]()
                    return (body if self._may_see_all() else b""), kind, code
                caller = self._caller()
                is_page = path.startswith(DOCS)
                if is_page or (path in routes and path not in FOR_ANY_CALLER):
                    gate.require_sight(caller)
                gate.charge(caller, len(self.requestline))
                if is_page:
                    return read_page(path.removeprefix(DOCS)), TEXT, HTTPStatus.OK
                if path not in routes:
                    raise NotFound(f"known paths are {', '.join(sorted(routes))}")
                if path == METRICS:
                    body, kind = metrics(self.headers.get("Accept", ""))
                    code = HTTPStatus.OK
                else:
                    body, kind, code = routes[path]()
                if path in FOR_ANY_CALLER and not caller.knows(json.loads(body)["model"]):
                    raise PermissionDenied(f"'{caller.name}' has no role for the map's model")
                caller.spend_bytes(len(body))
                return body, kind, code
            except PetpsError as error:
                # Of the errors without a code of their own: the server is closing, and the pool is
                # closed.
                code = HTTP_CODES.get(error.code, HTTPStatus.SERVICE_UNAVAILABLE)
                return f"{error}\n".encode(), TEXT, code

        def _accepts_gzip(self) -> bool:
            codings = self.headers.get("Accept-Encoding", "").split(",")
            return any(coding.split(";")[0].strip() == "gzip" for coding in codings)

        def _check_host(self) -> None:
            """Refuse what a web page of another site makes a browser of this machine ask.

            Such a page cannot read answers of 127.0.0.1, but of a name of its own that it lets
            resolve to 127.0.0.1 (DNS rebinding). Only an open door on loopback needs this: others
            ask for a credential, which a browser keeps for each name apart.
            """
            assert isinstance(self.server, _BoundedServer)
            if gate.mode in ASKING_MODES or not is_loopback(self.server.server_name):
                return
            host = self.headers.get("Host", "localhost")
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if name.lower() != "localhost" and not _is_address(name.strip("[]")):
                raise PermissionDenied(
                    "this server is open to its own machine only, and answers no browser that was "
                    "sent here by a name: use http://127.0.0.1 or http://localhost, or a proxy "
                    "that sets the header Host so"
                )

        def _caller(self) -> _native.Caller:
            if gate.mode == "open":
                return gate.authenticate("", [], "")
            token = token_of(self.headers.get("Authorization", ""))
            peer = _text_of(self.client_address)
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


def _is_address(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def _text_of(address: Any) -> str:
    """Return "127.0.0.1:52133" or "[::1]:52133" of a socket's address."""
    host, port = address[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _verdict(reason: str | None) -> Answer:
    if reason is None:
        return b"ok\n", TEXT, HTTPStatus.OK
    return reason.encode() + b"\n", TEXT, HTTPStatus.SERVICE_UNAVAILABLE


def _page_file(path: str) -> Answer:
    name, kind = PAGE_FILES[path]
    return files("petps.server").joinpath("page", name).read_bytes(), kind, HTTPStatus.OK
