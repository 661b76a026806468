"""Tests of the pure-Python RDMA client against the native server, over a device of this machine.

They are skipped, visibly, without pyverbs or an RDMA device. The lab's guest has soft-RoCE. The C++
client is tested there by test_client --gtest_filter='*rdma_device'.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import petps
from petps import _native
from tests.lab import pyverbs_client
from tests.system.frames import Refused
from tests.system.servers import Server

DIM = 128
ROWS = 4000
SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module")
def device() -> str:
    try:
        return pyverbs_client.first_device(pyverbs_client.load())
    except pyverbs_client.Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def served(device: str) -> Iterator[tuple[_native.Server, _native.Table]]:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        tables = _native.Tables.create(str(Path(folder) / "pool"), durability="process")
        instance = tables.create_instance("m", "m@0", 2)
        table = tables.create_table(
            "t", instance=instance.id, dim=DIM, dtype="f32", capacity=2 * ROWS
        )
        keys = np.arange(ROWS, dtype=np.uint64)
        table.apply(keys, _native.encode_rows("f32", rows_of(keys, 1)))
        server = _native.Server.start(tables, port=0, rdma=device)
        yield server, table
        server.stop()
        tables.close()


def rows_of(keys: np.ndarray, version: int) -> np.ndarray:
    rows = np.empty((len(keys), DIM), np.float32)
    rows[:] = keys[:, None] * 1000 + version
    rows += np.arange(DIM, dtype=np.float32)
    return rows


def test_rows_are_those_of_the_pool(served: tuple[_native.Server, _native.Table]) -> None:
    server, table = served
    random = np.random.default_rng(4711)
    client = pyverbs_client.RdmaClient(server.port)
    for round_ in range(60):  # 15 MB: several times around the ring of 1 MiB
        n = [1, 10, 500, 2000][round_ % 4]
        keys = random.integers(0, ROWS + 200, n, dtype=np.uint64)
        found, rows = client.pull(table.id, keys)
        assert (found == (keys < ROWS)).all()
        expected = _native.encode_rows("f32", rows_of(keys[found], 1))
        np.testing.assert_array_equal(rows, np.asarray(expected).reshape(rows.shape))
    assert json.loads(server.status_json())["gather"]["lists_zerocopy"] > 0
    client.close()


def test_an_error_reply_comes_over_rdma(served: tuple[_native.Server, _native.Table]) -> None:
    client = pyverbs_client.RdmaClient(served[0].port)
    with pytest.raises(Refused, match="table 999 is unknown"):
        client.pull(999, np.arange(3, dtype=np.uint64))
    found, _ = client.pull(served[1].id, np.arange(3, dtype=np.uint64))
    assert found.all()
    client.close()


@pytest.fixture
def pool() -> Iterator[Path]:
    """Yield the path PETPS_TEST_POOL (in the lab a device-DAX device), or a file in memory."""
    if "PETPS_TEST_POOL" in os.environ:
        yield Path(os.environ["PETPS_TEST_POOL"])
        return
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        yield Path(folder) / "pool"


@pytest.mark.timeout(300)
def test_pulls_from_a_server_in_another_process(device: str, pool: Path, tmp_path: Path) -> None:
    keys = np.arange(ROWS, dtype=np.uint64)
    random = np.random.default_rng(815)
    content = random.integers(0, 1 << 32, (ROWS, DIM), dtype=np.uint32).view(np.float32)
    content[~np.isfinite(content)] = 0.25
    with petps.create(pool) as new_pool:
        new_pool.create_model()
        new_pool.create_table("t", dim=DIM, dtype="f32", capacity=2 * ROWS)
        new_pool.push("t", keys, content)
        table = new_pool.tables()[0].id
    config = tmp_path / "petps.toml"
    config.write_text(f'[pool]\npath = "unused"\n[server]\nrdma = "{device}"\n')
    server = Server(pool, "--config", config, "--no-http", "--no-grpc", folder=tmp_path)
    try:
        client = pyverbs_client.RdmaClient(server.wait_ready()["port"])
        for _ in range(10):
            requested_keys = random.integers(0, ROWS, 500, dtype=np.uint64)
            found, rows = client.pull(table, requested_keys)
            assert found.all()
            np.testing.assert_array_equal(
                rows.view(np.uint32), content[requested_keys.astype(np.int64)].view(np.uint32)
            )
        client.close()
    finally:
        server.kill()
