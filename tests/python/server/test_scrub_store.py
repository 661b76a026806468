"""Missing rows come back from the versions of a checkpoint store, while deltas go on.

The trainer itself is the model of the server's rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import petps
from petps.server import Serving, repair, scrubber
from tests.python.ingest.driver import SCHEMAS, P
from tests.python.ingest.test_catch_up_store import Trainer
from tests.python.server.conftest import settings
from tests.python.server.damaged import damage_row
from tests.python.waiting import wait_until

ROUNDS = 4


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrubber, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(repair, "LOOK_SECONDS", 0.02)


def stored_rows(serving: Serving) -> dict[str, dict[int, bytes]]:
    pool = petps.Pool(serving._tables, is_borrowed=True)
    found: dict[str, dict[int, bytes]] = {}
    for schema in SCHEMAS:
        keys = np.sort(pool.table(schema.name).keys())
        rows: Any = pool.pull(schema.name, keys, dtype="stored")
        found[schema.name] = {int(key): row.tobytes() for key, row in zip(keys, rows, strict=True)}
    return found


def test_rows_come_back_from_versions_of_a_store(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.publish()
    trainer.checkpoint()
    trainer.publish()
    path, lines = tmp_path / "pool", list[str]()
    with petps.create(path, durability="process") as pool:
        pool.create_model("m", P)
        for schema in SCHEMAS:
            pool.create_table(schema.name, dim=schema.dim, capacity=1000, feed="delta")
    ingest = {"log": tmp_path / "log", "store": str(tmp_path / "store")}
    config = settings(path, model={"name": "m"}, ingest=ingest, scrub={"every": "never"})
    with Serving(config, log=lines.append) as serving:
        instance = serving._tables.resolve("m").id
        table = serving._tables.find("m@0", "user")

        def wait_for_the_log() -> None:
            wait_until(lambda: serving._tables.applied_version(instance) == trainer.newest)

        for _ in range(ROUNDS):
            wait_for_the_log()
            rows = trainer.rows()
            assert stored_rows(serving) == rows
            keys = sorted(rows["user"])[:5]
            for key in keys:
                damage_row(path, np.frombuffer(rows["user"][key], np.float32))
            (report,) = serving.scrub("user", None, lambda *_: True, False)
            assert report["removed"] == len(keys)
            trainer.publish()  # writes some of them, and deletes others
            trainer.checkpoint()
            trainer.publish()
            wait_until(lambda: serving._scrub.damage.count_of(table.id) == 0)
            wait_for_the_log()
            assert stored_rows(serving) == trainer.rows()
    assert any("restored from version" in line for line in lines)
    trainer.log.close()
