"""The list of missing rows: what it keeps over opens, torn and foreign files, and its limits."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import petps
from petps import _native
from petps.errors import IoError, ResourceExhausted
from petps.pool import damage as damage_module
from petps.pool.damage import DamageLog
from petps.pool.scrub import TablePass
from tests.python.server.damaged import damage_row, row_of

KEYS = np.arange(200, dtype=np.uint64)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[petps.Pool]:
    with petps.create(tmp_path / "my.pool", durability="process") as opened:
        opened.create_table("t", dim=4, capacity=1000)
        opened.push("t", KEYS, np.stack([row_of(key, 1) for key in range(200)]))
        yield opened


def find_damaged(pool: petps.Pool, keys: list[int]) -> list[_native.DamagedRow]:
    for key in keys:
        damage_row(Path(pool.native.info().path), row_of(key, 1))
    step = pool.table("t").scrub(_native.ScrubCursor(), 1 << 30)
    assert sorted(row.key for row in step.damaged) == sorted(keys)
    return step.damaged


def remove(pool: petps.Pool, damage: DamageLog, keys: list[int]) -> None:
    assert len(damage.remove(pool.table("t"), find_damaged(pool, keys))) == len(keys)


def listed(damage: DamageLog, pool: petps.Pool) -> list[int]:
    return sorted(damage.of_table(pool.table("t").id))


def lines_of(damage: DamageLog) -> list[dict[str, object]]:
    assert damage.path is not None
    return [json.loads(line) for line in damage.path.read_text().splitlines()]


def test_the_list_has_what_is_missing_and_when_each_table_was_read(pool: petps.Pool) -> None:
    damage = DamageLog(pool.native)
    assert damage.path is not None
    assert not damage.path.exists(), "nothing is missing"
    remove(pool, damage, [3, 4])
    remove(pool, damage, [5])
    damage.note_pass(pool.table("t").id, 1234.5)
    pool.push("t", [4], row_of(4, 2)[None])
    assert damage.strike_out(pool.table("t"), "written again") == [4]
    assert stat.S_IMODE(damage.path.stat().st_mode) == 0o600
    again = DamageLog(pool.native)
    assert listed(again, pool) == [3, 5]
    assert again.last_pass(pool.table("t").id) == 1234.5
    row = again.of_table(pool.table("t").id)[3]
    assert (row.fault, row.is_exact, row.since) == ("checksum", False, None)
    first, *_, last = lines_of(again)
    assert first == {"pool": pool.native.info().uuid}
    line = lines_of(again)[1]
    assert list(line) == ["table", "key", "slot", "stamp", "crc", "fault", "time"]
    assert line["fault"] == "checksum"
    assert last == {"table": pool.table("t").id, "key": 4, "ended": "written again"}


def test_a_key_is_listed_before_its_row_is_removed(
    pool: petps.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage, table = DamageLog(pool.native), pool.table("t")
    rows = find_damaged(pool, [3])

    class Watched:
        """The table, whose removal looks at the file first."""

        listed_first: list[int] = []  # noqa: RUF012

        def __getattr__(self, name: str) -> object:
            return getattr(table, name)

        def remove_damaged(self, rows: list[_native.DamagedRow]) -> int:
            self.listed_first += listed(DamageLog(pool.native), pool)
            return table.remove_damaged(rows)

    watched = Watched()
    damage.remove(watched, rows)  # type: ignore[arg-type]
    assert watched.listed_first == [3]
    # A process that dies between the two leaves a listed key that exists: the open strikes it out.
    pool.push("t", [3], row_of(3, 1)[None])
    again = DamageLog(pool.native)
    assert listed(again, pool) == [3]
    again.adopt(pool.native)
    assert listed(again, pool) == []


def test_a_torn_or_unreadable_line_is_left_out(pool: petps.Pool) -> None:
    damage = DamageLog(pool.native)
    remove(pool, damage, [3, 4])
    assert damage.path is not None
    whole = damage.path.read_bytes()
    damage.path.write_bytes(whole + b'{"table": 1, "ke')
    again = DamageLog(pool.native)
    assert listed(again, pool) == [3, 4]
    assert again.unreadable_lines == 0, "a crash may tear the last line"
    again.note_pass(pool.table("t").id, 1.0)
    assert listed(DamageLog(pool.native), pool) == [3, 4]
    assert b'"ke\n' not in damage.path.read_bytes()
    damage.path.write_bytes(whole + b"what?\n" + b'{"table": 1, "key": "x"}\n')
    again = DamageLog(pool.native)
    assert (listed(again, pool), again.unreadable_lines) == ([3, 4], 2)
    assert b"what?" in damage.path.read_bytes(), "a reader changes nothing"
    again.note_pass(pool.table("t").id, 1.0)
    assert b"what?" not in damage.path.read_bytes()
    assert listed(DamageLog(pool.native), pool) == [3, 4]


def test_the_list_of_another_pool_does_not_count(pool: petps.Pool) -> None:
    damage = DamageLog(pool.native)
    remove(pool, damage, [3])
    assert damage.path is not None
    text = damage.path.read_text().replace(pool.native.info().uuid, "0" * 32)
    damage.path.write_text(text)
    assert listed(DamageLog(pool.native), pool) == []


def test_a_dropped_table_misses_nothing(pool: petps.Pool) -> None:
    damage = DamageLog(pool.native)
    remove(pool, damage, [3])
    number = pool.table("t").id
    pool.drop_table("t")
    again = DamageLog(pool.native)
    again.adopt(pool.native)
    assert again.of_table(number) == {}


def test_the_file_is_written_anew_once_most_of_it_no_longer_counts(
    pool: petps.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(damage_module, "LINES_BEFORE_REWRITE", 20)
    damage = DamageLog(pool.native)
    remove(pool, damage, [3])
    for second in range(100):
        damage.note_pass(pool.table("t").id, second)
        assert len(lines_of(damage)) <= 20 + 2 * 2 + 2
    again = DamageLog(pool.native)
    assert (listed(again, pool), again.last_pass(pool.table("t").id)) == ([3], 99)
    assert stat.S_IMODE(os.stat(damage.path or "").st_mode) == 0o600


def test_a_pool_that_misses_too_much_is_to_be_rebuilt(
    pool: petps.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(damage_module, "MISSING_MAX", 2)
    damage = DamageLog(pool.native)
    remove(pool, damage, [3, 4])
    rows = find_damaged(pool, [5])
    with pytest.raises(ResourceExhausted, match="rebuild it from a base"):
        damage.remove(pool.table("t"), rows)
    assert pool.table("t").find_damaged(KEYS).nonzero()[0].tolist() == [5]


def test_rows_stay_while_they_cannot_be_listed(pool: petps.Pool) -> None:
    damage, lines = DamageLog(pool.native), list[str]()
    for key in (3, 4):
        damage_row(Path(pool.native.info().path), row_of(key, 1))
    work = TablePass(pool.table("t"), "default@0", damage, lines.append)
    assert damage.path is not None
    damage.path.mkdir()
    for _ in range(2):
        with pytest.raises(IoError, match=r"my\.pool\.damage, cannot be written"):
            work.step()
    assert pool.table("t").status().missing_rows == 0
    damage.path.rmdir()
    while work.step() is not None:
        pass
    assert listed(damage, pool) == [3, 4]
    assert (work.report.rows, work.report.damaged, work.report.removed) == (200, 2, 2)
    assert len(lines) == 2


def test_a_directory_in_its_place_is_an_error(pool: petps.Pool) -> None:
    Path(f"{pool.native.info().path}.damage").mkdir()
    with pytest.raises(IoError, match=r"my\.pool\.damage cannot be read"):
        DamageLog(pool.native)


def test_a_pool_in_memory_lists_in_memory() -> None:
    with petps.create() as pool:
        pool.create_table("t", dim=4, capacity=10)
        damage = DamageLog(pool.native)
        damage.note_pass(pool.table("t").id, 7.0)
        assert damage.path is None
        assert damage.last_pass(pool.table("t").id) == 7.0
