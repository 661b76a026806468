"""Fixtures: a served pool, and a client that is connected to it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import petps_client
import pytest

from petps import _native
from tests.python.petps_client.served import DEFAULT, DIM, DTYPES, ROWS, Served, rows_of


@pytest.fixture
def served() -> Iterator[Served]:
    tables = _native.Tables.create("")
    instance = tables.create_instance("ranking", "ranking@1", 2).id
    keys = np.arange(ROWS, dtype=np.uint64)
    for dtype in DTYPES:
        default = np.full((1, DIM), DEFAULT, np.float32)
        table = tables.create_table(
            dtype,
            instance=instance,
            dim=DIM,
            dtype=dtype,
            capacity=5000,
            feed="push",
            default_row=None if dtype == "f16" else _native.encode_rows(dtype, default)[0],
        )
        table.apply(keys, _native.encode_rows(dtype, rows_of(keys)))
    tables.create_table("clicks", instance=instance, dim=4, dtype="f32", capacity=64, feed="delta")
    tables.create_table("small", instance=instance, dim=2, dtype="f32", capacity=64, feed="push")
    running = Served(tables, None, 0)
    running.start()
    yield running
    running.stop()
    tables.close()


@pytest.fixture
def client(served: Served) -> Iterator[petps_client.Client]:
    with petps_client.connect(served.url) as connected:
        yield connected
