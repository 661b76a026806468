"""Scrubbing while the list of missing rows is older than the table, or cannot be written."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import petps
from petps.config.schema import ScrubConfig
from petps.errors import FailedPrecondition, IoError
from petps.pool import damage
from petps.pool.damage import DamageLog
from petps.pool.scrub import TablePass
from petps.server import repair, scrubber
from petps.server.repair import _is_same
from petps.server.scrubber import Scrubber
from tests.python.server.damaged import damage_row, row_of
from tests.python.server.test_scrub import COUNT, Served
from tests.python.waiting import wait_until

KEYS = np.arange(COUNT, dtype=np.uint64)


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[petps.Pool]:
    with petps.create(tmp_path / "my.pool", durability="process") as pool:
        pool.create_model("m", 2)
        pool.create_table("t", dim=4, capacity=1000, model="m")
        pool.create_table("fed", dim=4, capacity=1000, feed="delta", model="m")
        for name, value in (("t", 1), ("fed", 5)):
            rows = np.stack([row_of(key, value) for key in range(COUNT)])
            pool.load(name, KEYS, rows, model="m")
        yield pool


def scrub(table: Any, listed: DamageLog) -> TablePass:
    work = TablePass(table, "m@0", listed, lambda line: None)
    while work.step() is not None:
        pass
    return work


def test_a_repair_does_not_delete_what_was_written_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list is old, because nothing strikes out while the test runs."""
    monkeypatch.setattr(scrubber, "LOOK_SECONDS", 1000.0)
    monkeypatch.setattr(repair, "LOOK_SECONDS", 1000.0)
    with contextlib.ExitStack() as stack:
        served = Served(tmp_path, stack)
        served.publish(list(range(COUNT)), 1)
        served.damage([3], 1)
        served.scrub()
        served.look()
        served.publish([3], 1, deleted=True)
        served.export()  # of a server that lacks the key
        served.publish([3], 9)
        assert served.listed() == {3}
        served.look()
        assert served.pull()[3] == 9
        assert served.listed() == set()


def test_a_base_that_is_still_being_copied_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair, "LOOK_SECONDS", 1000.0)
    with contextlib.ExitStack() as stack:
        served = Served(tmp_path, stack)
        served.publish(list(range(COUNT)), 1)
        served.export()
        base = next((tmp_path / "bases").iterdir())
        file = max(
            (path for path in base.rglob("*") if path.is_file()),
            key=lambda path: path.stat().st_size,
        )
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        served.damage([3], 1)
        served.scrub()

        def faults() -> list[str]:
            return [line for line in served.lines if line.startswith("missing rows of table 'fed'")]

        served.look()
        assert len(faults()) == 1, served.lines
        file.write_bytes(whole)
        served.look()
        assert served.listed() == {3}, "the base was to be left alone for a minute"
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + repair.UNREADABLE_SECONDS)
        monkeypatch.setattr(repair, "time", later)
        served.look()
        assert served.pull()[3] == 1
        assert (served.listed(), len(faults())) == (set(), 1)


def test_a_row_that_could_not_be_listed_is_not_listed_for_a_newer_one(
    filled: petps.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, table, listed = (
        Path(filled.native.info().path),
        filled.table("t"),
        DamageLog(filled.native),
    )
    damage_row(path, row_of(3, 1))
    first = TablePass(table, "m@0", listed, lambda line: None)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        for name in ("append", "publish_file"):
            patch.setattr(damage, name, fail)
        with pytest.raises(IoError, match="No space left"):
            first.step()
    filled.push("t", [3], row_of(3, 2)[None], model="m")
    damage_row(path, row_of(3, 2))
    scrub(table, listed)
    while first.step() is not None:
        pass
    (row,) = listed.of_table(table.id).values()
    assert _is_same(row, row_of(3, 2).tobytes())
    assert not _is_same(row, row_of(3, 1).tobytes())
    assert first.report.removed == 0


def test_a_list_that_was_moved_away_is_written_anew(filled: petps.Pool) -> None:
    path, table, listed = (
        Path(filled.native.info().path),
        filled.table("t"),
        DamageLog(filled.native),
    )
    for key in (3, 50):
        damage_row(path, row_of(key, 1))
        scrub(table, listed)
        assert listed.path is not None
        assert set(DamageLog(filled.native).of_table(table.id)) == set(listed.of_table(table.id))
        listed.path.rename(listed.path.with_name("moved"))
    damage_row(path, row_of(51, 1))
    scrub(table, listed)
    assert set(DamageLog(filled.native).of_table(table.id)) == {3, 50, 51}


def test_a_list_without_its_first_line_is_refused(filled: petps.Pool) -> None:
    path, listed = Path(filled.native.info().path), DamageLog(filled.native)
    damage_row(path, row_of(3, 1))
    scrub(filled.table("t"), listed)
    assert listed.path is not None
    listed.path.write_bytes(b"{" + listed.path.read_bytes())
    with pytest.raises(IoError, match="does not begin with the uuid"):
        DamageLog(filled.native)


def test_an_export_notices_rows_that_were_missing_for_a_moment(
    filled: petps.Pool, tmp_path: Path
) -> None:
    table, listed = filled.table("fed"), DamageLog(filled.native)
    rows = np.stack([row_of(key, 5) for key in range(COUNT)]).view(np.uint8)

    @contextlib.contextmanager
    def bar(name: str, count: int) -> Iterator[Any]:
        calls = 0

        def advance(done: int) -> None:
            nonlocal calls
            calls += 1
            if name != "fed" or calls > 1:
                return
            for key in range(COUNT):
                damage_row(Path(filled.native.info().path), row_of(key, 5))
            scrub(table, listed)
            table.restore(KEYS, rows, np.zeros(COUNT, np.uint32))
            listed.strike_out(table, "restored")

        yield advance

    filled.drop_table("t")
    with pytest.raises(FailedPrecondition, match="were removed during the export: export again"):
        filled.export(tmp_path / "base", bar=bar)
    assert not (tmp_path / "base").exists()
    report = filled.export(tmp_path / "base")
    assert report["tables"] == [{"name": "fed", "rows": COUNT}]


def test_an_entry_that_leads_elsewhere_is_a_fault(filled: petps.Pool) -> None:
    """Its key has changed: nobody can find it, and no pass can remove it."""
    path, table = Path(filled.native.info().path), filled.table("t")
    content = path.read_bytes()
    key = 37
    slot = content.index(row_of(key, 1).tobytes())
    entry = content.index(key.to_bytes(8, "little") + slot.to_bytes(8, "little"))
    with path.open("r+b") as file:
        file.seek(entry)
        file.write((key ^ (1 << 40)).to_bytes(8, "little"))
    listed = DamageLog(filled.native)
    assert scrub(table, listed).report.unremoved == 1
    lines: list[str] = []
    config = ScrubConfig(every="never", bytes_per_second=0)
    running = Scrubber(filled.native, config, listed, lines.append)
    try:
        running.scrub(table, lambda *_: True)
        (fault,) = running.faults.values()
        assert "1 index entries of table 't' are damaged" in fault
    finally:
        running.close()


def test_a_new_limit_counts_at_once(filled: petps.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("petps.pool.scrub.STEP_BYTES", 512)
    config = ScrubConfig(every="1s", bytes_per_second=1)
    running = Scrubber(filled.native, config, DamageLog(filled.native), lambda line: None)
    try:
        wait_until(lambda: running.status(None)["tables"][str(filled.table("t").id)]["rows"] > 0)
        running.configure(ScrubConfig(every="1s", bytes_per_second=0))
        begun = time.time()
        number = filled.table("fed").id
        wait_until(lambda: running.status(None)["tables"][str(number)]["last_pass"] is not None)
        assert time.time() - begun < 60
    finally:
        running.close()
