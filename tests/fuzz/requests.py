"""Requests of any bytes to the HTTP door, over a socket in memory."""

from __future__ import annotations

import io
from http import HTTPStatus
from typing import Any, Final

from petps import _native
from petps.errors import NotFound, Unavailable
from petps.server import http
from petps.server.changes import Changes, PageSwitch

LIMIT_BYTES: Final = 1 << 20  # no answer of these routes is longer


class MemorySocket:
    """A connection whose peer has sent ``request`` and closed its side."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.reply = bytearray()

    def makefile(self, mode: str, *_: object) -> io.BytesIO:
        """Return the peer's bytes."""
        assert mode.startswith("r")
        return io.BytesIO(self._request)

    def sendall(self, body: Any) -> None:
        """Take bytes of the reply."""
        self.reply += body
        assert len(self.reply) <= LIMIT_BYTES

    def settimeout(self, _: float) -> None:
        """Ignore the limit: nothing waits."""


def fail(error: Exception) -> Any:
    """Raise the error, as a route does."""
    raise error


ROUTES: Final[dict[str, Any]] = {
    "/healthz": lambda: (b"ok\n", http.TEXT, HTTPStatus.OK),
    "/status.json": lambda: (b"{}", http.JSON, HTTPStatus.OK),
    "/shard-map": lambda: fail(NotFound("no map")),
    "/metrics": lambda: fail(Unavailable("closing")),
}
SWITCH_REQUEST: Final = (
    b"POST /switch HTTP/1.1\r\nHost: a\r\nOrigin: http://a\r\nAuthorization: Bearer x\r\n"
    b'Content-Type: application/json\r\nContent-Length: 13\r\n\r\n{"alias":"a"}'
)
# Nobody has a grant, so nothing is switched: the request is read and checked until then.
GRANTS: Final = _native.Gate("grants")
NO_TABLES: Final[Any] = None
SWITCH: Final = PageSwitch(Changes(NO_TABLES, GRANTS, print), GRANTS)
METRICS: Final = (b"# petps\n" * 200, "text/plain; version=0.0.4")  # enough to be compressed
HANDLER: Final[Any] = http._handler(ROUTES, lambda accepted: METRICS, _native.Gate("open"), SWITCH)


def seeds() -> list[bytes]:
    """Return valid inputs."""
    return [
        b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /status.json?x=1 HTTP/1.0\r\nConnection: keep-alive\r\n\r\nGET /x HTTP/1.1\r\n\r\n",
        b"HEAD /shard-map HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nAuthorization: Bearer petps_x\r\nContent-Length: 5\r\n\r\nabcde",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /healthz\r\n",
        b"GET /docs/how-to/operate.md HTTP/1.1\r\n\r\n",
        SWITCH_REQUEST,
    ]


def run(data: bytes) -> None:
    """Handle the requests of one connection. Any exception is a finding."""
    connection = MemorySocket(data)
    HANDLER(connection, ("192.0.2.1", 1), None)
    reply = bytes(connection.reply)
    head = reply.partition(b"\r\n\r\n")[0]
    if reply.startswith(b"HTTP/"):
        # Nothing of the request may add a line to the head of the reply.
        for line in head.split(b"\r\n")[1:]:
            name = line.partition(b":")[0]
            assert name in KNOWN, line


KNOWN: Final = (
    b"Server", b"Date", b"Content-Type", b"Content-Length", b"Cache-Control", b"Connection",
    *(name.encode() for name in http.SECURITY_HEADERS),
)  # fmt: skip
