"""Peers that try to hurt a server: each attack runs in a process of its own, from its own address.

An attack repeats until it is told to stop. It counts what it tried and how often the server ended a
connection or refused something, and it survives every answer.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import random
import resource
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from tests.system.frames import HEADER, HELLO, PULL, encode_frame, encode_pull

__all__ = ["ATTACKS", "HARMLESS", "Result", "Target", "run_attack"]

SECONDS = 5.0  # for each step of an attacker
BAD_TOKEN = "petps_" + "x" * 43
CONNECTS = 10_000
HANDSHAKES = 1000
ADDRESSES = 16  # of the attacks that one address could not make
STREAMS = 1000  # of a burst of HTTP/2
# Frames of HTTP/2 (RFC 9113, section 6).
H2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
H2_HEADERS, H2_RESET, H2_SETTINGS, H2_PING = 1, 3, 4, 6


@dataclass(frozen=True)
class Target:
    """The doors of a server. Of a listener without TLS, all ports may be the same."""

    native: int
    http: int
    grpc: int
    admin: int
    ca: str
    """The file of the server's CA."""
    token: str
    """Has the role read, for the attackers that are customers too."""
    table: int
    keys: int
    idle: int
    """Connections that one attack opens and holds."""


@dataclass
class Result:
    """Counts what one attack has done."""

    name: str
    tried: int = 0
    refused: int = 0
    """Connections that the server closed, and requests that it refused."""
    errors: list[str] = field(default_factory=list)


class Attacker:
    """The connections of one attack, from one address."""

    def __init__(self, name: str, target: Target, number: int, done: Event) -> None:
        self.result = Result(name)
        self.target = target
        self.number = number
        self.done = done
        self.context = ssl.create_default_context(cafile=target.ca)
        self.http2 = ssl.create_default_context(cafile=target.ca)
        self.http2.set_alpn_protocols(["h2"])

    def connect(self, port: int, address: int = 0) -> socket.socket | None:
        """Return a connection, or None if the server refused it or the attack is over.

        A listener that never shakes hands costs SECONDS each time, so the end is looked for here.
        """
        if self.done.is_set():
            return None
        self.result.tried += 1
        with contextlib.suppress(OSError):
            source = (f"127.0.{1 + address}.{10 + self.number}", 0)
            return socket.create_connection(("127.0.0.1", port), SECONDS, source)
        self.result.refused += 1
        return None

    def connect_tls(
        self, port: int, address: int = 0, context: ssl.SSLContext | None = None
    ) -> ssl.SSLSocket | None:
        """Return a connection after its handshake, or None if the server refused it."""
        raw = self.connect(port, address)
        if raw is None:
            return None
        try:
            return (context or self.context).wrap_socket(raw, server_hostname="127.0.0.1")
        except (OSError, ValueError):
            raw.close()
            self.result.refused += 1
            return None

    def has_ended(self, peer: socket.socket) -> bool:
        """Return whether the server has closed the connection. What it sent is discarded."""
        try:
            peer.settimeout(0)
            while peer.recv(1 << 16):
                pass
            return True
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except OSError:
            return True

    def hold(self, peers: list[socket.socket], act: Callable[[socket.socket], object]) -> None:
        """Act on each connection once a second until the server has closed all of them."""
        while peers and not self.done.wait(1.0):
            for peer in list(peers):
                ended = self.has_ended(peer)
                if not ended:
                    try:
                        peer.settimeout(SECONDS)
                        act(peer)
                    except OSError:
                        ended = True
                if ended:
                    self.result.refused += 1
                    peer.close()
                    peers.remove(peer)
        for peer in peers:
            peer.close()

    def until_closed(self, peer: socket.socket, *, is_refusal: bool = True) -> bytes:
        """Return what the server sends until it closes, or for SECONDS.

        is_refusal: count the end of the connection as refused.
        """
        parts = []
        with contextlib.suppress(OSError):
            peer.settimeout(SECONDS)
            while part := peer.recv(1 << 16):
                parts.append(part)
            self.result.refused += is_refusal
        return b"".join(parts)


def hello(token: str) -> bytes:
    """Return the frame of a hello with this token."""
    names = b"".join(struct.pack("<H", len(name)) + name for name in (b"hostile", token.encode()))
    return encode_frame(HELLO, 1, struct.pack("<HHI", 1, 1, 0) + names)


def client_hello() -> bytes:
    """Return the first message of a TLS handshake."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    tls = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def drip(content: bytes) -> Callable[[socket.socket], object]:
    """Return a function that sends a connection's next byte."""
    sent: dict[int, Iterator[int]] = {}

    def send(peer: socket.socket) -> None:
        part = next(sent.setdefault(id(peer), itertools.cycle(content)))
        peer.send(bytes([part]))

    return send


def slow_native(attacker: Attacker) -> None:
    """Send a frame, a byte a second."""
    peers = [attacker.connect_tls(attacker.target.native) for _ in range(20)]
    attacker.hold([peer for peer in peers if peer], drip(hello(BAD_TOKEN)[:31]))


def slow_handshakes(attacker: Attacker) -> None:
    """Shake hands, a byte a second."""
    ports = (attacker.target.native, attacker.target.http, attacker.target.grpc)
    peers = [attacker.connect(port) for port in ports for _ in range(20)]
    attacker.hold([peer for peer in peers if peer], drip(client_hello()))


def slow_http(attacker: Attacker) -> None:
    """Send a request, a byte a second."""
    peers = [attacker.connect_tls(attacker.target.http) for _ in range(20)]
    attacker.hold(
        [peer for peer in peers if peer], drip(b"GET /readyz HTTP/1.1\r\nX: " + b"x" * 99)
    )


def half_open(attacker: Attacker) -> None:
    """Connect and send nothing."""
    target = attacker.target
    ports = (target.native, target.http, target.grpc, target.admin)
    peers = [attacker.connect(port) for port in ports for _ in range(40)]
    attacker.hold([peer for peer in peers if peer], lambda peer: None)


def never_reading(attacker: Attacker) -> None:
    """Pull much and read nothing."""
    target = attacker.target
    generator = random.Random(attacker.number)
    keys = generator.choices(range(target.keys), k=4096)
    pull = encode_pull(target.table, np_keys(keys))
    peers = [attacker.connect_tls(target.native) for _ in range(8)]
    deaf = [peer for peer in peers if peer]
    for peer in deaf:
        with contextlib.suppress(OSError):
            peer.sendall(hello(target.token))
            for number in range(2, 50):
                peer.sendall(encode_frame(PULL, number, pull, sections=1))
    # Only the kernel knows whether the server has closed: reading would be reading.
    deadline = time.monotonic() + 2 * SECONDS
    while deaf and time.monotonic() < deadline and not attacker.done.wait(0.5):
        for peer in list(deaf):
            state = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
            if state != 1:  # TCP_ESTABLISHED
                attacker.result.refused += 1
                deaf.remove(peer)
    for peer in filter(None, peers):
        peer.close()


def garbage(attacker: Attacker) -> None:
    """Send random bytes to every door, with TLS and without."""
    target = attacker.target
    for port in (target.native, target.http, target.grpc, target.admin):
        for peer in (attacker.connect_tls(port), attacker.connect(port)):
            if peer is None:
                continue
            with contextlib.suppress(OSError):
                peer.sendall(os.urandom(4000))
                peer.shutdown(socket.SHUT_WR)
            attacker.until_closed(peer)
            peer.close()


def oversized(attacker: Attacker) -> None:
    """Announce a body of 4 GiB, with a right token."""
    peer = attacker.connect_tls(attacker.target.native)
    if peer is None:
        return
    with contextlib.suppress(OSError):
        peer.sendall(hello(attacker.target.token))
        peer.sendall(HEADER.pack(b"PTPS", 1, PULL, 2, 0, 1, 0xFFFFFFF8, 0, 0) + bytes(1000))
    attacker.until_closed(peer)
    peer.close()


def idle(attacker: Attacker) -> None:
    """Take all places of sixteen addresses after whole handshakes, ask for more, and hold them."""
    peers = []
    for number in range(attacker.target.idle + ADDRESSES):
        if attacker.done.is_set():
            break
        peer = attacker.connect_tls(attacker.target.native, address=number % ADDRESSES)
        if peer is not None:
            peers.append(peer)
    attacker.hold(list[socket.socket](peers), lambda peer: None)


def connects(attacker: Attacker) -> None:
    """Connect 10,000 times and leave at once."""
    target = attacker.target
    ports = itertools.cycle((target.native, target.http, target.grpc, target.admin))
    for _ in range(CONNECTS):
        if attacker.done.is_set():
            return
        peer = attacker.connect(next(ports))
        if peer is not None:
            peer.close()


def handshakes(attacker: Attacker) -> None:
    """Begin 1,000 handshakes at once, from sixteen addresses, and finish none."""
    message = client_hello()
    peers = []
    for number in range(HANDSHAKES):
        peer = attacker.connect(attacker.target.native, address=number % ADDRESSES)
        if peer is not None:
            with contextlib.suppress(OSError):
                peer.sendall(message)
            peers.append(peer)
    attacker.hold(peers, lambda peer: None)


def bad_tokens(attacker: Attacker) -> None:
    """Show a wrong token at every door."""
    target = attacker.target
    peer = attacker.connect_tls(target.native)
    if peer is not None:
        with contextlib.suppress(OSError):
            peer.sendall(hello(BAD_TOKEN))
            peer.settimeout(SECONDS)
            head = peer.recv(HEADER.size)
            if len(head) == HEADER.size and HEADER.unpack(head)[7] != 0:
                attacker.result.refused += 1
        peer.close()
    secured = attacker.connect_tls(target.http)
    if secured is not None:
        request = http.client.HTTPConnection("127.0.0.1", target.http)
        request.sock = secured
        with contextlib.suppress(OSError, http.client.HTTPException):
            request.request("GET", "/metrics", headers={"Authorization": f"Bearer {BAD_TOKEN}"})
            if request.getresponse().status in (401, 429):
                attacker.result.refused += 1
        secured.close()
    for port, method in (
        (target.grpc, "/petps.v1.Petps/Status"),
        (target.admin, "/petps.admin.v1.Admin/Status"),
    ):
        if not attacker.done.is_set() and is_refused_by_grpc(attacker, port, method):
            attacker.result.refused += 1


def is_refused_by_grpc(attacker: Attacker, port: int, method: str) -> bool:
    """Return whether a gRPC door refuses a call with the wrong token."""
    import grpc

    credentials = grpc.ssl_channel_credentials(Path(attacker.target.ca).read_bytes())
    attacker.result.tried += 1
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
        call = channel.unary_unary(method)
        try:
            call(b"", metadata=(("authorization", f"Bearer {BAD_TOKEN}"),), timeout=SECONDS)
        except grpc.RpcError as error:
            refusals = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED)
            return error.code() in refusals
    return False


def http_flood(attacker: Attacker) -> None:
    """Ask for the metrics without a token, on as many connections as there are places."""
    peers = [attacker.connect_tls(attacker.target.http) for _ in range(16)]
    for peer in filter(None, peers):
        with contextlib.suppress(OSError):
            peer.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    for peer in filter(None, peers):
        answer = attacker.until_closed(peer, is_refusal=False)
        attacker.result.refused += b" 401 " in answer[:20]
        peer.close()


def frame(kind: int, stream: int, content: bytes = b"", flags: int = 0) -> bytes:
    """Return a frame of HTTP/2."""
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream) + content


def call_headers(path: bytes) -> bytes:
    """Return the headers of a gRPC call, without compression (RFC 7541, appendix A)."""
    text = b"\x83\x87"  # :method POST, :scheme https
    for name, value in (
        (b"\x04", path),
        (b"\x01", b"localhost"),
        (b"\x0f\x10", b"application/grpc"),
    ):
        text += name + bytes([len(value)]) + value
    return text + b"\x00\x02te\x08trailers"


def http2_flood(attacker: Attacker, burst: Callable[[int], bytes]) -> None:
    """Send bursts of frames and read nothing but the end, until the server closes or for a while.

    burst: takes the first free number of a stream.
    """
    peer = attacker.connect_tls(attacker.target.grpc, context=attacker.http2)
    if peer is None:
        return
    try:
        peer.settimeout(SECONDS)
        peer.sendall(H2_PREFACE + frame(H2_SETTINGS, 0))
        for round_ in range(20):
            peer.sendall(burst(1 + 2 * STREAMS * round_))
            attacker.result.tried += STREAMS
            if attacker.has_ended(peer) or attacker.done.is_set():
                break
            peer.settimeout(SECONDS)
    except OSError:  # closed, or it takes nothing any more
        attacker.result.refused += 1
    peer.close()


def http2_resets(attacker: Attacker) -> None:
    """Begin calls and reset each at once (CVE-2023-44487)."""
    headers = call_headers(b"/petps.v1.Petps/Status")

    def burst(first: int) -> bytes:
        streams = range(first, first + 2 * STREAMS, 2)
        return b"".join(
            frame(H2_HEADERS, stream, headers, flags=4) + frame(H2_RESET, stream, bytes(4))
            for stream in streams
        )

    http2_flood(attacker, burst)


def http2_settings(attacker: Attacker) -> None:
    """Send settings and pings, of which each wants an answer."""
    part = frame(H2_SETTINGS, 0) + frame(H2_PING, 0, bytes(8))
    http2_flood(attacker, lambda _: part * STREAMS)


def np_keys(keys: list[int]) -> Any:
    """Return keys as an array; numpy is imported only by attackers that need it."""
    import numpy as np

    return np.array(keys, np.uint64)


ATTACKS: dict[str, Callable[[Attacker], None]] = {
    "slow native": slow_native,
    "slow handshakes": slow_handshakes,
    "slow HTTP": slow_http,
    "half-open": half_open,
    "never reading": never_reading,
    "garbage": garbage,
    "oversized": oversized,
    "idle": idle,
    "10,000 connects": connects,
    "1,000 handshakes": handshakes,
    "bad tokens": bad_tokens,
    "HTTP flood": http_flood,
    "HTTP/2 resets": http2_resets,
    "HTTP/2 settings": http2_settings,
}
# What the server need not refuse, because it costs little or only what each peer may cost.
HARMLESS = frozenset({"10,000 connects", "HTTP/2 resets", "HTTP/2 settings"})


def run_attack(name: str, target: Target, done: Event, results: Any, refused: Any) -> None:
    """Repeat an attack until `done`, and put its Result into the queue `results`.

    `refused` is a shared array with what each attack has counted so far.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    number = list(ATTACKS).index(name)
    attacker = Attacker(name, target, number, done)

    def publish() -> None:
        while not done.wait(0.2):
            refused[number] = attacker.result.refused

    publisher = threading.Thread(target=publish, daemon=True)
    publisher.start()
    while not done.is_set():
        try:
            ATTACKS[name](attacker)
        except Exception as error:  # a fault of the attack; the run shows it
            attacker.result.errors.append(repr(error))
            break
        done.wait(0.02)
    results.put(attacker.result)
    publisher.join()  # a process that ends inside done.wait() leaves its lock taken for all others
