"""A pool with a delta-fed and a push-fed table, its log, and a model that replays the log."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

import petps
from petps import config
from petps.checkpoint import BaseInfo, Store
from petps.delta import Delivery, RowsBody, TableSchema, decode_record, open_log
from petps.pool.backup_info import BACKUP_PART, BackupInfo
from petps.publish import Publisher
from tests.python.server.conftest import settings
from tests.seed import SEED

__all__ = ["SCHEMA", "SPACE", "Model", "P", "World", "ignore", "positions_of", "stored_rows"]

P = 4
SPACE = 3000
SCHEMA = TableSchema("fed", "f32", 8)
Model = dict[int, bytes]


def ignore(line: str) -> None:
    """Log nothing."""


class World:
    """A pool with a delta-fed and a push-fed table, its log and a publisher."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pool = folder / "pool"
        self.store = folder / "store"
        with petps.create(self.pool, durability="process") as opened:
            opened.create_model("default", P)
            opened.create_table("fed", dim=8, capacity=2 * SPACE, feed="delta")
            opened.create_table("pushed", dim=4, capacity=SPACE)
        self.log = open_log(folder / "log", partitions=P)
        self.rng = np.random.default_rng(SEED)
        self.publisher = Publisher(self.log, "default", tables=[SCHEMA])
        self.publisher.begin_continue(None)
        self.version = 0

    def settings(self, pool: Path | None = None, **sections: Any) -> config.Config:
        ingest = {"log": str(self.folder / "log")}
        return settings(pool or self.pool, ingest=ingest, **sections)

    def publish(self, rows: int) -> int:
        """Publish a version, in several messages of each partition."""
        for _ in range(3):
            keys = self.rng.integers(0, SPACE, rows, dtype=np.uint64)
            deleted = self.rng.random(rows) < 0.1
            values = self.rng.standard_normal((rows, 8), dtype=np.float32)
            self.publisher.publish("fed", keys, values, deleted)
        self.version = self.publisher.commit()
        return self.version

    def rows_at(self, positions: dict[int, tuple[int, int]]) -> Model:
        """Replay the log up to the positions (run, seq) of the partitions."""
        rows: Model = {}
        with closing(self.log.subscribe(dict.fromkeys(range(P), 0))) as reader:
            while events := reader.poll(max_bytes=1 << 20, timeout=0.2):
                for event in events:
                    assert isinstance(event, Delivery)
                    record = decode_record(
                        event.message, model="default", partition=event.partition, partitions=P,
                        schema_of=lambda name: SCHEMA,
                    )  # fmt: skip
                    at = (record.header.run, record.header.seq)
                    if at <= positions[event.partition] and isinstance(record.body, RowsBody):
                        apply(rows, record.body)
        return rows

    def close(self) -> None:
        self.log.close()


def apply(rows: Model, body: RowsBody) -> None:
    deleted = np.zeros(len(body.keys), np.bool_) if body.deleted is None else body.deleted
    for key, row, is_deleted in zip(body.keys.tolist(), body.rows, deleted, strict=True):
        if is_deleted:
            rows.pop(key, None)
        else:
            rows[key] = row.tobytes()


def stored_rows(pool: Path, table: str = "fed") -> Model:
    with petps.open(pool, read_only=True) as opened:
        assert opened.verify().clean
        native = opened.table(table)
        with native.scan() as pages:
            return {
                key: row.tobytes()
                for keys, rows in pages
                for key, row in zip(keys.tolist(), rows, strict=True)
            }


def positions_of(store: Path, version: int) -> dict[int, tuple[int, int]]:
    opened = Store.open(store)
    info = BackupInfo.parse(opened.part(version, BACKUP_PART), "part")
    base = BaseInfo.of(opened, version)
    assert base is not None
    positions = {entry.partition: (entry.run, entry.seq) for entry in info.progress}
    assert positions == {entry.partition: (entry.run, entry.seq) for entry in base.positions}
    return positions
