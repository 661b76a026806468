"""A publisher, a directory log and ingest: the rows equal those of a simple model."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from petps.delta import TableSchema
from petps.delta.directory import DirectoryLog
from petps.publish import Publisher
from petps.server.ingest import Ingest
from tests.python.ingest.model import Letters, MemoryTables

SCHEMAS = [TableSchema("user", "f32", 8), TableSchema("item", "f32", 4)]
P = 4


def pause(ingest: Ingest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pause a running ingest, and wait until its thread pauses.

    A poll that has begun before still handles the messages that it reads.
    """
    is_waiting = threading.Event()
    may_read = ingest._may_read
    original_wait = may_read.wait

    def wait(seconds: float) -> bool:
        if not may_read.is_set():
            is_waiting.set()
        return original_wait(seconds)

    monkeypatch.setattr(may_read, "wait", wait)
    ingest.pause()
    assert is_waiting.wait(60)


def test_ingest_applies_every_version(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    log = DirectoryLog(tmp_path / "log", partitions=P)
    instance = MemoryTables(SCHEMAS, P)
    ingest = Ingest(log, instance, dead_letters=Letters())
    publisher = Publisher(log, "m", P, tables=SCHEMAS)
    publisher.begin_continue(None)
    model: dict[str, dict[int, bytes]] = {"user": {}, "item": {}}
    ingest.start()
    try:
        for version in range(1, 21):
            for schema in SCHEMAS:
                n = int(rng.integers(1, 400))
                keys = rng.integers(0, 1000, n, dtype=np.uint64)
                rows = rng.standard_normal((n, schema.dim), dtype=np.float32)
                deleted = rng.random(n) < 0.1
                publisher.publish(schema.name, keys, rows, deleted)
                for key, row, is_deleted in zip(keys.tolist(), rows, deleted, strict=True):
                    if is_deleted:
                        model[schema.name].pop(key, None)
                    else:
                        model[schema.name][key] = row.tobytes()
            assert publisher.commit(step=version, dense=f"dense/{version}") == version
        assert ingest.wait_for(20, 60)
        assert instance.rows() == model
        status = ingest.status()
        assert status.version == 20
        assert status.dense == "dense/20"
        assert status.error == ""
        assert all(p.lag_records == 0 and p.state == "following" for p in status.partitions)
        assert status.freshness.p99_ms is not None
    finally:
        assert ingest.stop(60)
        log.close()
    assert status.rows == sum(p.rows for p in status.partitions) > 0


@pytest.mark.parametrize("rows_max", [1, 100, 1 << 20])
def test_merged_records_are_applied_in_order(tmp_path: Path, rows_max: int) -> None:
    log = DirectoryLog(tmp_path / "log", partitions=1)
    publisher = Publisher(log, "m", tables=SCHEMAS)
    publisher.begin_continue(None)
    for value in range(50):
        rows = np.full((20, 4), value, dtype=np.float32)
        publisher.publish("item", np.arange(value, value + 20), rows)
    publisher.commit()
    instance = MemoryTables(SCHEMAS, 1)
    ingest = Ingest(log, instance, dead_letters=Letters(), rows_max=rows_max)
    ingest.start()
    assert ingest.wait_for(1, 60)
    assert ingest.stop(60)
    expected = {key: np.full(4, min(key, 49), dtype=np.float32).tobytes() for key in range(50 + 19)}
    assert instance.by_name["item"].rows == expected
