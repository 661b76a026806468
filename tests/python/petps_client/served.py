"""A real server on a free port of this machine, over a pool in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from petps import _native
from tests.ports import stable_port

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
    """Return the result of a pull: rows in the table's precision, default rows for missing keys."""
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

    def stats(self) -> dict[str, Any]:
        assert self.server is not None
        return self.server.stats()


@contextmanager
def serve(tables: _native.Tables) -> Iterator[Served]:
    """Serve the tables during the block, then close them."""
    served = Served(tables, None, stable_port())
    served.start()
    yield served
    served.stop()
    tables.close()


def add_table(
    tables: _native.Tables,
    instance: int,
    name: str,
    dtype: str,
    rows: npt.NDArray[np.float32],
    default: float | None,
) -> None:
    """Create a table with rows of the keys 0 to n - 1.

    Args:
        tables: The pool.
        instance: The id of the instance.
        name: The table's name.
        dtype: The dtype of the stored rows.
        rows: float32[n, dim].
        default: Every value of the default row; None: there is no default row.
    """
    dim = rows.shape[1]
    default_row = None
    if default is not None:
        default_row = _native.encode_rows(dtype, np.full((1, dim), default, np.float32))[0]
    table = tables.create_table(
        name,
        instance=instance,
        dim=dim,
        dtype=dtype,
        capacity=1000 + 2 * len(rows),
        feed="push",
        default_row=default_row,
    )
    table.apply(np.arange(len(rows), dtype=np.uint64), _native.encode_rows(dtype, rows))
