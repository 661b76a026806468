"""A client of the native protocol, written from its document (native/wire/FORMAT.md) alone.

It shares no code with the server or the client library, so it checks both against the document.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

HEADER = struct.Struct("<4sHHQIIIHH")
HELLO, TABLES, PULL, PUSH, STATUS, HOT_KEYS, SHARD_MAP, RDMA = 1, 2, 3, 4, 5, 6, 7, 9
REPLY = 0x8000

Keys = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


class Refused(Exception):
    """An error reply: code and message."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


def encode_frame(opcode: int, request: int, body: bytes, sections: int = 0) -> bytes:
    """Return the frame of a request with this number."""
    body += bytes(-len(body) % 8)
    return HEADER.pack(b"PTPS", 1, opcode, request, 0, sections, len(body), 0, 0) + body


def read_reply(opcode: int, request: int, read: Callable[[int], bytes]) -> bytes:
    """Return the body of a reply from `read(byte count)`. Raises Refused."""
    reply = HEADER.unpack(read(HEADER.size))
    assert reply[:3] == (b"PTPS", 1, opcode | REPLY)
    assert reply[3] == request
    body = read(reply[6])
    if reply[7] != 0:
        raise Refused(reply[7], body.decode())
    return body


def encode_pull(table: int, keys: Keys) -> bytes:
    """Return the body of a pull with one section."""
    return struct.pack("<QII", 0, 0, 0) + struct.pack("<II", table, len(keys)) + keys.tobytes()


def decode_pull(body: bytes, count: int) -> tuple[Mask, npt.NDArray[np.uint8]]:
    """Return found bool[count], and the stored rows of the keys found uint8[m, row_bytes]."""
    _, rows_offset = struct.unpack_from("<QQ", body)
    code, _, _, row_bytes, n, found_count, _ = struct.unpack_from("<HHIIIII", body, 16)
    assert (code, n) == (0, count)
    words = np.frombuffer(body, np.uint8, (count + 63) // 64 * 8, 40)
    found = np.unpackbits(words, bitorder="little")[:count].astype(bool)
    assert found.sum() == found_count
    rows = np.frombuffer(body, np.uint8, -1, rows_offset)
    return found, rows.reshape(found_count, row_bytes)


class Connection:
    """One connection with one request at a time. Supports only tables of dtype f32."""

    def __init__(self, port: int, timeout: float = 30.0) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=timeout)
        self._request = 0

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def ask(self, opcode: int, body: bytes, sections: int = 0) -> bytes:
        """Send a request and return the reply's body. Raises Refused, ConnectionError."""
        self._request += 1
        self._socket.sendall(encode_frame(opcode, self._request, body, sections))
        return read_reply(opcode, self._request, self._read)

    def pull(self, table: int, dim: int, keys: Keys) -> tuple[npt.NDArray[np.float32], Mask]:
        """Return rows float32[n, dim] (zeros for missing keys) and found bool[n]."""
        body = self.ask(PULL, encode_pull(table, keys), sections=1)
        found, stored_rows = decode_pull(body, len(keys))
        rows = np.zeros((len(keys), dim), np.float32)
        rows[found] = stored_rows.view(np.float32)
        return rows, found

    def push(self, table: int, keys: Keys, rows: npt.NDArray[np.float32]) -> tuple[int, ...]:
        """Write rows. Return (inserted, updated, deleted, absent, refused)."""
        dim = rows.shape[1]
        head = struct.pack("<IIIIIIII", table, 0, len(keys), 0, dim, 0, 4 * dim, 0)
        return struct.unpack("<5Q", self.ask(PUSH, head + keys.tobytes() + rows.tobytes())[:40])

    def hello(self, token: str = "") -> None:
        """Say who is there."""
        names = b"".join(struct.pack("<H", len(name)) + name for name in (b"raw", token.encode()))
        self.ask(HELLO, struct.pack("<HHI", 1, 1, 0) + names)

    def send_hot_keys(self, table: int, keys: Keys) -> None:
        """Say which keys of a table this client pulls most."""
        self.ask(HOT_KEYS, struct.pack("<II", table, len(keys)) + keys.tobytes())

    def status(self) -> Any:
        """Return the status object."""
        return json.loads(self.ask(STATUS, b""))

    def table_ids(self) -> dict[str, int]:
        """Return the ids of the tables by name."""
        return {table["name"]: table["id"] for table in self.status()["tables"]}

    def send(self, content: bytes) -> None:
        """Send bytes unchanged."""
        self._socket.sendall(content)

    def read_to_end(self) -> bytes:
        """Return everything until the server closes."""
        parts = []
        while part := self._socket.recv(65536):
            parts.append(part)
        return b"".join(parts)

    def _read(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._socket.recv(count - len(parts))
            if not part:
                raise ConnectionError("the server closed the connection")
            parts += part
        return bytes(parts)
