"""A real server on a free port of this machine, over a pool in memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from petps import _native

ROWS = 2000
DIM = 12
DTYPES = ("f32", "f16", "bf16", "int8")
DEFAULT = 0.25
"""Every value of the default row. Table f16 has no default row."""


def rows_of(keys: npt.NDArray[np.uint64], version: int = 0) -> npt.NDArray[np.float32]:
    """Return rows derived from their keys: small multiples of 1/4, exact in all dtypes but int8."""
    columns = np.arange(DIM, dtype=np.uint64)
    values = (keys[:, None] * np.uint64(31) + columns * np.uint64(7) + np.uint64(version * 13)) % 97
    return (values.astype(np.float32) * np.float32(0.25)) - np.float32(3)


def shown_rows(
    dtype: str, keys: npt.NDArray[np.uint64], version: int = 0
) -> npt.NDArray[np.float32]:
    """Return what a pull shows: rows in the table's precision, default rows for missing keys."""
    stored = _native.encode_rows(dtype, rows_of(keys, version))
    shown = _native.decode_rows(dtype, DIM, stored)
    default = np.full((1, DIM), 0.0 if dtype == "f16" else DEFAULT, np.float32)
    default = _native.decode_rows(dtype, DIM, _native.encode_rows(dtype, default))
    return np.where((keys < ROWS)[:, None], shown, default)


@dataclass
class Served:
    """A pool and its server, which can be stopped and started on the same port."""

    tables: _native.Tables
    server: _native.Server | None
    port: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"petps://{self.address}/ranking"

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()
        self.server = None

    def start(self) -> None:
        self.server = _native.Server.start(self.tables, port=self.port)
        self.port = self.server.port
