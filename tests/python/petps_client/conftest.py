"""Fixtures: a server with a pool in memory, and a client that is connected to it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import petps_client
import pytest

from petps import _native
from tests.python.petps_client.served import (
    DEFAULT,
    DTYPES,
    ROWS,
    Served,
    add_table,
    rows_of,
    serve,
)


@pytest.fixture
def served() -> Iterator[Served]:
    tables = _native.Tables.create("")
    instance = tables.create_instance("ranking", "ranking@1", 2).id
    rows = rows_of(np.arange(ROWS, dtype=np.uint64))
    for dtype in DTYPES:
        add_table(tables, instance, dtype, dtype, rows, None if dtype == "f16" else DEFAULT)
    tables.create_table("clicks", instance=instance, dim=4, dtype="f32", capacity=64, feed="delta")
    tables.create_table("small", instance=instance, dim=2, dtype="f32", capacity=64, feed="push")
    with serve(tables) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[petps_client.Client]:
    with petps_client.connect(served.url) as connected:
        yield connected
