"""The trainer process: its base and deltas together make its state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from examples.demo.processes import TrainerProcess
from examples.demo.trace import load_trace
from examples.demo.trainer import MODEL, TABLE, TrainerSettings
from petps.checkpoint import Base
from petps.delta import DeltaLog, Kind, RowsBody, TableSchema, decode_record, read_header
from petps.delta.directory import DirectoryLog
from petps.delta.log import Delivery
from petps.errors import InternalError, Unavailable

PARTITIONS = 2
SCHEMA = TableSchema(TABLE, "f32", 64)


@pytest.fixture
def settings(tmp_path: Path) -> TrainerSettings:
    return TrainerSettings(str(tmp_path / "log"), PARTITIONS, seed=3)


def replay(log: DeltaLog, rows: dict[int, bytes]) -> list[int]:
    """Apply a log's rows and deletions; return the committed versions."""
    subscription = log.subscribe(log.start_offsets(range(PARTITIONS)))
    versions = []
    while events := subscription.poll(max_bytes=1 << 20, timeout=0):
        for event in events:
            assert isinstance(event, Delivery)
            header = read_header(event.message)
            if header.kind is Kind.COMMIT:
                versions.append(header.version)
            if header.kind is not Kind.ROWS:
                continue
            body = decode_record(
                event.message,
                model=MODEL,
                partition=event.partition,
                partitions=PARTITIONS,
                schema_of=lambda name: SCHEMA if name == TABLE else None,
            ).body
            assert isinstance(body, RowsBody)
            for number, key in enumerate(body.keys.tolist()):
                if body.deleted is not None and body.deleted[number]:
                    rows.pop(key, None)
                else:
                    rows[key] = body.rows[number].tobytes()
    subscription.close()
    return versions


def test_base_and_deltas_make_the_trainers_state(tmp_path: Path, settings: TrainerSettings) -> None:
    trace = load_trace()
    folder = tmp_path / "bases" / "first"
    with TrainerProcess(tmp_path, settings) as trainer:
        trainer.start()
        trainer.call("learn", begin=0, end=60_000, expire=False)
        base = trainer.call("base", folder=str(folder))
        trainer.call("learn", begin=60_000, end=64_000, expire=True)
        first = trainer.call("publish")
        trainer.call("sweep")
        second = trainer.call("publish")
        state = trainer.state(tmp_path / "state.npz")
    rows = {
        key: row.tobytes()
        for keys, stored in Base.open(folder).chunks(TABLE)
        for key, row in zip(keys.tolist(), stored, strict=True)
    }
    assert len(rows) == base["rows"]
    log = DirectoryLog(Path(settings.log), partitions=PARTITIONS)
    versions = replay(log, rows)
    log.close()
    assert sorted(set(versions)) == [first["version"], second["version"]]
    assert first["deleted"] > 0
    assert second["rows"] == np.count_nonzero(state.present)
    expected = {
        int(key): row.tobytes()
        for key, row in zip(trace.keys[state.present], state.rows[state.present], strict=True)
    }
    assert rows == expected


def test_the_trainer_continues_after_a_failed_command(
    tmp_path: Path, settings: TrainerSettings
) -> None:
    with TrainerProcess(tmp_path, settings) as trainer:
        trainer.start()
        with pytest.raises(InternalError, match="command 'dance' is unknown to the trainer"):
            trainer.call("dance")
        with pytest.raises(InternalError, match="begin the run first"):
            trainer.call("publish")
        assert trainer.call("sweep") == {"rows": 0}


def test_the_error_of_a_dead_trainer_has_its_last_output(tmp_path: Path) -> None:
    bad = TrainerSettings(str(tmp_path / "log"), PARTITIONS, seed=-1)
    with TrainerProcess(tmp_path, bad) as trainer:
        trainer.start()
        with pytest.raises(Unavailable, match="the trainer"):
            trainer.call("sweep")
        assert "ValueError" in trainer.last_output()


def test_the_trainer_exits_with_the_demo(tmp_path: Path, settings: TrainerSettings) -> None:
    with TrainerProcess(tmp_path, settings) as trainer:
        trainer.start()
        trainer.call("sweep")
        process = trainer.check_running()
    assert process.returncode == 0
