"""A client of the native protocol, written from its document (native/wire/FORMAT.md) alone.

It shares no code with the server or the client library, so it checks both against the document.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

HEADER = struct.Struct("<4sHHQIIIHH")
HELLO, TABLES, PULL, PUSH, STATUS = 1, 2, 3, 4, 5
REPLY = 0x8000


class Refused(Exception):
    """An error reply: code and message."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class Connection:
    """One connection with one request at a time. Supports only tables of dtype f32."""

    def __init__(self, port: int, timeout: float = 30.0) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=timeout)
        self._request = 0

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close()

    def ask(self, opcode: int, body: bytes, sections: int = 0) -> bytes:
        """Send a request and return the reply's body. Raises Refused, ConnectionError."""
        self._request += 1
        body += bytes(-len(body) % 8)
        header = HEADER.pack(b"PTPS", 1, opcode, self._request, 0, sections, len(body), 0, 0)
        self._socket.sendall(header + body)
        reply = HEADER.unpack(self._read(HEADER.size))
        assert reply[:3] == (b"PTPS", 1, opcode | REPLY)
        assert reply[3] == self._request
        content = self._read(reply[6])
        if reply[7] != 0:
            raise Refused(reply[7], content.decode())
        return content

    def pull(
        self, table: int, dim: int, keys: npt.NDArray[np.uint64]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        """Return rows float32[n, dim] (zeros for missing keys) and found bool[n]."""
        request = (
            struct.pack("<QII", 0, 0, 0) + struct.pack("<II", table, len(keys)) + keys.tobytes()
        )
        body = self.ask(PULL, request, sections=1)
        _, rows_offset = struct.unpack_from("<QQ", body)
        code, _, _, row_bytes, count, found_count, _ = struct.unpack_from("<HHIIIII", body, 16)
        assert (code, count) == (0, len(keys))
        words = np.frombuffer(body, np.uint8, (len(keys) + 63) // 64 * 8, 40)
        found = np.unpackbits(words, bitorder="little")[: len(keys)].astype(bool)
        assert found.sum() == found_count
        rows = np.zeros((len(keys), dim), np.float32)
        packed = np.frombuffer(body, np.uint8, -1, rows_offset)
        assert packed.size == found_count * row_bytes
        rows[found] = packed.view(np.float32).reshape(found_count, dim)
        return rows, found

    def push(
        self, table: int, keys: npt.NDArray[np.uint64], rows: npt.NDArray[np.float32]
    ) -> tuple[int, ...]:
        """Write rows. Return (inserted, updated, deleted, absent, refused)."""
        dim = rows.shape[1]
        head = struct.pack("<IIIIIIII", table, 0, len(keys), 0, dim, 0, 4 * dim, 0)
        return struct.unpack("<5Q", self.ask(PUSH, head + keys.tobytes() + rows.tobytes())[:40])

    def status(self) -> Any:
        """Return the status object."""
        return json.loads(self.ask(STATUS, b""))

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
