"""The servers of the shard map, and whether each answers."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from petps.config import TlsConfig
from petps.log import INFO, WARNING, Line

if TYPE_CHECKING:
    from petps.server.shard_map import ShardMap

__all__ = ["UNASSIGNED", "Members", "find_fault", "others_of"]

# The only server of the map that a server of a cluster uses before it has one: so it owns nothing.
# The name leads nowhere (RFC 2606).
UNASSIGNED: Final = "unassigned.invalid:1"

LOOK_SECONDS: Final = 10.0  # between two rounds
ANSWER_SECONDS: Final = 2.0  # in which a server must answer
REPLY_BYTES_MAX: Final = 4096  # to read of an answer before the connection is closed

# A hello of a client without a token (native/wire/FORMAT.md): the header, versions 1 to 1, the name
# "page", no token, padding.
_NAME: Final = b"page"
_BODY: Final = struct.pack("<HHIH", 1, 1, 0, len(_NAME)) + _NAME + bytes(2)
_HELLO: Final = (
    b"PTPS" + struct.pack("<HHQIIIHH", 1, 1, 1, 0, 0, len(_BODY), 0, 0) + _BODY
)  # fmt: skip


def find_fault(address: str, tls: TlsConfig, *, says_hello: bool) -> str | None:
    """Return why the server at ``address`` does not answer; None if it does.

    With [tls] it must complete a handshake, else reply to a hello. ``says_hello``: without it,
    because the server would count a caller without a token, it must only accept a connection.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS) as connection:
            if tls.certificate is not None:
                # Whether it is the right server is the clients' question. It may ask for our
                # certificate, or would count a handshake that failed.
                context = ssl.create_default_context()
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                assert tls.key is not None
                context.load_cert_chain(tls.certificate, tls.key)
                with context.wrap_socket(connection) as secured, contextlib.suppress(OSError):
                    secured.unwrap()
            elif says_hello:
                connection.sendall(_HELLO)
                connection.shutdown(socket.SHUT_WR)
                if not _read_all(connection):
                    return "it closed the connection"
        return None
    except TimeoutError:
        return f"no answer within {ANSWER_SECONDS:g} s"
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)


def _read_all(connection: socket.socket) -> int:
    """Return how many bytes came until the server closed: unread ones would reset its side."""
    size = 0
    while size < REPLY_BYTES_MAX and (part := connection.recv(REPLY_BYTES_MAX)):
        size += len(part)
    return size


def others_of(shard_map: ShardMap | None, address: str) -> list[tuple[str, str]]:
    """Return (address, partitions as text) of the servers of the map but the one at ``address``."""
    if shard_map is None:
        return []
    return [pair for pair in shard_map.others(address) if pair[0] != UNASSIGNED]


class Members:
    """A thread that asks the servers of the current shard map in turn, until close().

    addresses: returns (address, partitions as text) of each server but this one; find: see
    find_fault(), with the address alone; log: gets a line for each change.
    """

    def __init__(
        self,
        addresses: Callable[[], Sequence[tuple[str, str]]],
        find: Callable[[str], str | None],
        log: Callable[[str], None],
    ) -> None:
        self._addresses, self._find, self._log = addresses, find, log
        self._stopping = threading.Event()
        self._found: dict[str, tuple[str | None, float]] = {}  # (fault, Unix time), by address
        self._thread = threading.Thread(target=self._run, name="petps-members", daemon=True)
        self._thread.start()

    def status(self) -> list[dict[str, Any]]:
        """Return plain values of each server; ``answers`` is None until it was asked."""
        found = dict(self._found)
        report = []
        for address, partitions in self._addresses():
            fault, at = found.get(address, (None, None))
            report.append(
                {
                    "address": address,
                    "partitions": partitions,
                    "answers": None if at is None else fault is None,
                    "fault": fault or "",
                    "asked_at": at,
                }
            )
        return report

    def close(self) -> None:
        """Stop."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        pause = 0.0
        while not self._stopping.wait(pause):
            pause = LOOK_SECONDS
            addresses = [address for address, _ in self._addresses()]
            for address in addresses:
                if self._stopping.is_set():
                    return
                self._note(address, self._find(address))
            self._found = {key: self._found[key] for key in addresses}  # forget others

    def _note(self, address: str, fault: str | None) -> None:
        before = self._found.get(address, (None, 0.0))[0]
        if (fault is None) != (before is None):
            state = "answers again" if fault is None else f"does not answer: {fault}"
            level = INFO if fault is None else WARNING
            text = f"the server {address} of the shard map {state}"
            self._log(Line(text, "member", level, member=address))
        self._found[address] = fault, time.time()
