"""petps load --on ray, with its tasks in this process: the rows and errors are those of petps load.

Tasks end in an order drawn from the seed. tests/train/train_load_on_ray.py has a real cluster.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import petps
from petps.checkpoint import Store, Table
from petps.checkpoint.bulk import NewBase
from petps.cli.bulk import Input, Report, load_base, open_parquet
from petps.cli.bulk import pieces as pieces_module
from petps.cli.sources import Columns
from petps.errors import FailedPrecondition, InvalidArgument, IoError, PetpsError, Unavailable
from petps.log import printable
from tests.python.cli.conftest import DIM, Command, expected
from tests.seed import SEED

GROUP_ROWS = 100
PIECE_ROWS = 250  # two row groups


class Shuffled:
    """Runs tasks in this process, a few at a time, in an order drawn from the seed."""

    def __init__(self) -> None:
        self._random = random.Random(SEED)
        self.count = 0

    def run_all(
        self,
        function: Callable[[Any], Any],
        arguments: Iterable[Any],
        *,
        in_flight_max: int = 10,
    ) -> Generator[tuple[Any, Any]]:
        left = list(arguments)
        while left:
            chosen = left.pop(self._random.randrange(min(in_flight_max, len(left))))
            self.count += 1
            yield chosen, function(chosen)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "SPILL_BYTES", PIECE_ROWS * (8 + 4 * DIM))


def write(path: Path, keys: Any, rows: Any, *, group_rows: int = GROUP_ROWS) -> Path:
    kind = pa.list_(pa.float32(), DIM)
    values = rows if isinstance(rows, pa.Array) else pa.array(list(rows), kind)
    pq.write_table(pa.table({"key": keys, "row": values}), path, row_group_size=group_rows)
    return path


def load(store: Path, *files: Path, dtype: str = "f32", **options: Any) -> Report:
    sources = open_parquet([str(file) for file in files], Columns(**options), "items")
    table = Table.of("items", DIM, dtype)
    tasks = Shuffled()
    base = NewBase(store, "default", [table], 8)
    return load_base(tasks, base, [Input(table, sources)], workers=7)


def test_the_rows_are_those_of_petps_load(run: Command, pool: Path, tmp_path: Path) -> None:
    """In both, the last row wins of keys that repeat in a file and across files."""
    generator = np.random.default_rng(SEED)
    files = []
    for number in range(5):
        keys = generator.integers(0, 700, 450).astype(np.uint64)
        rows = expected(keys) + np.float32(number) + np.arange(450, dtype=np.float32)[:, None]
        files.append(write(tmp_path / f"part-{number}.parquet", keys, rows))
    report = load(tmp_path / "base", *files)
    run("load", pool, "items", *files)
    restored = Store.open(tmp_path / "base").restore()["items"]
    with petps.open(pool) as opened:
        assert opened.status()["tables"][0]["rows"] == len(restored)
        rows, found = opened.pull("items", restored.keys, return_mask=True)
    assert found.all()
    assert (restored.columns["row"].view(np.float32) == rows).all()
    (table,) = report.tables
    assert (table.files, table.rows, table.keys) == (5, 5 * 450, len(restored))
    again = tmp_path / "again.pool"
    run("create", again, "--table", f"items:{DIM}:f32:10k", "--durability", "process")
    assert run.json("load", again, "items", tmp_path / "base")["inserted"] == len(restored)


def test_pieces_are_row_groups(tmp_path: Path) -> None:
    keys = np.arange(1000, dtype=np.uint64)
    path = write(tmp_path / "a.parquet", keys, expected(keys))
    (source,) = open_parquet([str(path)], Columns(), "items")
    table, options = Table.of("items", DIM), {"allow_not_finite": False}
    files = NewBase(tmp_path / "base", "default", [table], 8).files
    pieces = list(pieces_module.plan_pieces(3, table, source, files, "x-", 8, **options))
    assert [piece.number for piece in pieces] == [3, 4, 5, 6, 7]
    assert [piece.rows for piece in pieces] == [200] * 5
    assert [piece.first_row for piece in pieces] == [0, 200, 400, 600, 800]
    assert str(pieces[1]) == f"row 200 and the next 200 of {path}"
    read = np.concatenate([keys for piece in pieces for keys, _ in piece.source.chunks()])
    assert (read == keys).all()
    # A piece of one large row group is several spills.
    path = write(tmp_path / "b.parquet", keys, expected(keys), group_rows=1000)
    (source,) = open_parquet([str(path)], Columns(), "items")
    (piece,) = pieces_module.plan_pieces(0, table, source, files, "x-", 8, **options)
    result = pieces_module.read_piece(piece)
    assert [int(spill.bounds[-1]) for spill in result.spills] == [250] * 4


def printed(error: PetpsError) -> str:
    """Return what the command prints for an error."""
    return f"error: {printable(f'{error} [{error.code}]')}\n"


def bad_rows(change: Callable[[np.ndarray[Any, Any]], object]) -> np.ndarray[Any, Any]:
    rows = expected(np.arange(1000, dtype=np.uint64))
    change(rows)
    return rows


def with_null(values: list[Any], *places: int) -> list[Any]:
    for place in places:
        values[place] = None
    return values


KEYS = np.arange(1000, dtype=np.int64)
ROWS = expected(KEYS.astype(np.uint64))
ODD_ROWS = [[1.0] * (DIM if number != 777 else 2) for number in range(1000)]
BAD: dict[str, Callable[[Path], Path]] = {
    "null key": lambda f: write(f, with_null(KEYS.tolist(), 910, 720), ROWS),
    "null row": lambda f: write(f, KEYS, with_null(list(ROWS), 641)),
    "negative": lambda f: write(f, np.where(KEYS == 512, -3, KEYS), ROWS),
    "not finite": lambda f: write(
        f, KEYS, bad_rows(lambda rows: rows.__setitem__(([950, 530], 2), np.inf))
    ),
    "several": lambda f: write(
        f, with_null(KEYS.tolist(), 901),
        bad_rows(lambda rows: rows.__setitem__((330, 0), np.nan)),
    ),
    "ragged": lambda f: write(f, KEYS, pa.array(ODD_ROWS, pa.list_(pa.float32()))),
    "another dim": lambda f: write(f, KEYS, pa.array([[1.0] * 3] * 1000, pa.list_(pa.float32()))),
    "text keys": lambda f: write(f, [str(key) for key in KEYS], ROWS),
    "float keys": lambda f: write(f, KEYS.astype(float), ROWS),
    "whole rows": lambda f: write(f, KEYS, pa.array([[1] * DIM] * 1000, pa.list_(pa.int32(), DIM))),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_an_error_is_that_of_petps_load(
    run: Command, pool: Path, tmp_path: Path, kind: str
) -> None:
    """Whichever piece ends first, the error is that of the first wrong row, in the same words."""
    files = [
        write(tmp_path / "good.parquet", KEYS, ROWS),
        BAD[kind](tmp_path / "bad.parquet"),
        write(tmp_path / "worse.parquet", KEYS.astype(str), ROWS),
    ]
    with pytest.raises(InvalidArgument) as failure:
        load(tmp_path / "base", *files)
    message = run.fails(2, "load", pool, "items", *files)
    assert message == printed(failure.value)
    assert "bad.parquet" in message
    assert list((tmp_path / "base").rglob("*.*")) == []


def test_a_row_too_large_for_f16_is_refused_as_by_a_pool(run: Command, tmp_path: Path) -> None:
    pool = tmp_path / "half.pool"
    run("create", pool, "--table", f"items:{DIM}:f16:10k", "--durability", "process")
    file = write(tmp_path / "a.parquet", KEYS, bad_rows(lambda rows: rows.__setitem__(700, 1e30)))
    with pytest.raises(InvalidArgument) as failure:
        load(tmp_path / "base", file, dtype="f16")
    assert run.fails(2, "load", pool, "items", file) == printed(failure.value)


def test_signed_keys(tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", np.array([-1, 3]), ROWS[:2])
    load(tmp_path / "base", file, has_signed_keys=True)
    restored = Store.open(tmp_path / "base").restore()["items"]
    assert restored.keys.tolist() == [3, 2**64 - 1]


def test_a_file_that_is_damaged_inside(run: Command, pool: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "a.parquet", KEYS, ROWS)
    group = pq.ParquetFile(file).metadata.row_group(6).column(1)
    content = bytearray(file.read_bytes())
    start = group.dictionary_page_offset or group.data_page_offset
    content[start : start + 30] = b"\xff" * 30
    file.write_bytes(content)
    with pytest.raises(PetpsError, match=r"a\.parquet is damaged: ") as failure:
        load(tmp_path / "base", file)
    assert run.fails(9, "load", pool, "items", file) == printed(failure.value)


class Dying(Shuffled):
    """Tasks of which those of one function fail, as if their workers died."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def run_all(
        self, function: Callable[[Any], Any], arguments: Iterable[Any], *, in_flight_max: int = 10
    ) -> Generator[tuple[Any, Any]]:
        for argument, result in super().run_all(function, arguments, in_flight_max=in_flight_max):
            is_dead = function.__name__ == self._name and self.count % 3 == 0
            yield argument, Unavailable(f"{argument} is given up") if is_dead else result


@pytest.mark.parametrize("function", ["read_piece", "write_part"])
def test_a_load_that_is_given_up_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    monkeypatch.setattr("petps.checkpoint.bulk.PART_BYTES", 1)
    sources = open_parquet([str(write(tmp_path / "a.parquet", KEYS, ROWS))], Columns(), "items")
    table = Table.of("items", DIM)
    base = NewBase(tmp_path / "base", "default", [table], 8)
    with pytest.raises(Unavailable, match="is given up"):
        load_base(Dying(function), base, [Input(table, sources)])
    assert list((tmp_path / "base").rglob("*.*")) == []
    load(tmp_path / "base", tmp_path / "a.parquet")  # the folder can be used again


class Changing(Shuffled):
    """Calls a function after the first task."""

    def __init__(self, change: Callable[[], object]) -> None:
        super().__init__()
        self._change = change

    def run_all(
        self, function: Callable[[Any], Any], arguments: Iterable[Any], *, in_flight_max: int = 10
    ) -> Generator[tuple[Any, Any]]:
        for pair in super().run_all(function, arguments, in_flight_max=in_flight_max):
            yield pair
            if self.count == 1:
                self._change()


@pytest.mark.parametrize("change", ["longer", "other", "gone"])
def test_a_file_that_changes_during_the_load_is_named(tmp_path: Path, change: str) -> None:
    """Also if it has as many rows, and no row group moves."""
    files = [tmp_path / name for name in ("a.parquet", "b.parquet")]
    for file in files:
        write(file, KEYS, ROWS)

    def act() -> None:
        for file in files:
            if change == "gone":
                file.unlink()
            elif change == "other":
                write(file, KEYS + 1, ROWS)
            else:
                write(file, np.concatenate([KEYS, KEYS]), np.concatenate([ROWS, ROWS]))

    sources = open_parquet([str(file) for file in files], Columns(), "items")
    table = Table.of("items", DIM)
    base = NewBase(tmp_path / "base", "default", [table], 8)
    error, text = (IoError, "is gone") if change == "gone" else (FailedPrecondition, "has changed")
    with pytest.raises(error, match=text):
        load_base(Changing(act), base, [Input(table, sources)], workers=1)
    assert list((tmp_path / "base").rglob("*.*")) == []


def test_a_table_without_rows_is_refused(tmp_path: Path) -> None:
    empty = write(tmp_path / "empty.parquet", KEYS[:0], ROWS[:0])
    with pytest.raises(InvalidArgument, match="table items has no row in its 2 files"):
        load(tmp_path / "base", empty, empty)
    load(tmp_path / "base", empty, write(tmp_path / "a.parquet", KEYS, ROWS))


def test_several_tables_are_one_base(run: Command, tmp_path: Path) -> None:
    inputs = []
    for number, (name, dim) in enumerate((("items", DIM), ("users", DIM))):
        file = write(tmp_path / f"{name}.parquet", KEYS + number, ROWS)
        inputs.append(Input(Table.of(name, dim), open_parquet([str(file)], Columns(), name)))
    base = NewBase(tmp_path / "base", "default", [given.table for given in inputs], 8)
    report = load_base(Shuffled(), base, inputs)
    assert [table.table for table in report.tables] == ["items", "users"]
    restored = Store.open(tmp_path / "base").restore()
    assert restored["items"].keys.tolist() == KEYS.tolist()
    assert restored["users"].keys.tolist() == (KEYS + 1).tolist()


def test_the_command_without_ray_or_with_wrong_options(
    run: Command, pool: Path, tmp_path: Path
) -> None:
    file = write(tmp_path / "a.parquet", KEYS, ROWS)
    np.savez(tmp_path / "a.npz", keys=KEYS, rows=ROWS)
    store = tmp_path / "base"
    on_ray = ("--on", "ray")
    for arguments, code, message in (
        ((store, "items", file, "--on", "moon"), 2, "--on must be here, ray or ray://HOST:PORT"),
        ((store, "items", file, "--partitions", 4), 2, "--partitions is of a base that Ray writes"),
        ((store, "items", file, "--workers", 4), 2, "--workers is of a base that Ray writes"),
        ((pool, "items", file, *on_ray), 2, "with --on ray TARGET is a new store"),
        (("petps://127.0.0.1:1", "items", file, *on_ray), 2, "TARGET is a new store"),
        ((store, "items", tmp_path / "a.npz", *on_ray), 2, "a.npz: --on ray reads Parquet files"),
        ((store, "items", file, *on_ray, "--partitions", 0), 2, "from 1 to 1024, got 0"),
        ((store, "items", file, *on_ray, "--workers", 0), 2, "--workers must be at least 1, got 0"),
        (
            (store, "items", file, *on_ray, "--also", "users"),
            2,
            "must be TABLE=SOURCE, got 'users'",
        ),
        ((store, "items", file, *on_ray, "--dim", 3), 2, "has rows of dim 4, expected 3"),
        ((store, "items", file, *on_ray, "--dtype", "f8"), 2, "f8"),
        ((store, "items", tmp_path / "b*.parquet", *on_ray), 3, "b*.parquet: no file has such a"),
        ((store, "items", file, *on_ray, "--key-column", "x"), 2, "has no key column 'x'"),
    ):
        assert message in run.fails(code, *(("load", *arguments)))
    load(store, file)
    message = run.fails(4, "load", store, "items", file, *on_ray)
    assert "holds a checkpoint store already" in message
    if not _has_ray():
        other = tmp_path / "other"
        message = run.fails(1, "load", other, "items", file, *on_ray)
        assert "loading with --on ray needs Ray: pip install petps[ray]" in message
        assert not other.exists()


def test_standard_output_has_the_report_only(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray prints that a worker died, from a thread of its own."""

    class Talking(Shuffled):
        def __init__(self, address: str | None, **_: object) -> None:
            super().__init__()

        def __enter__(self) -> Talking:
            return self

        def __exit__(self, *_: object) -> None:
            print("(raylet) closed")

        def run_all(self, *arguments: Any, **options: Any) -> Generator[tuple[Any, Any]]:
            print("(raylet) a worker died")
            yield from super().run_all(*arguments, **options)

    monkeypatch.setattr("petps.checkpoint.ray_tasks.RayTasks", Talking)
    file = write(tmp_path / "a.parquet", KEYS, ROWS)
    report = run.json("load", tmp_path / "base", "items", file, "--on", "ray", "--workers", 2)
    assert report["rows"] == 1000
    assert report["tables"] == [
        {
            "table": "items",
            "files": 1,
            "rows": 1000,
            "keys": 1000,
            "bytes": report["tables"][0]["bytes"],
        }
    ]
    shown = run("load", tmp_path / "other", "items", file, "--on", "ray")
    assert "(raylet) a worker died" in shown
    assert f"{tmp_path / 'other'} is a base of model default in 8 partitions" in shown


def _has_ray() -> bool:
    import importlib.util

    return importlib.util.find_spec("ray") is not None


def test_wildcards(run: Command, pool: Path, tmp_path: Path) -> None:
    import fsspec

    for number in (2, 10, 1):
        keys = np.array([0, number])
        write(tmp_path / f"part-{number}.parquet", keys, ROWS[:2] + number)
    report = run.json("load", pool, "items", tmp_path / "part-*.parquet")
    names = [Path(source).name for source in report["sources"]]
    assert names == ["part-1.parquet", "part-10.parquet", "part-2.parquet"]
    memory = fsspec.filesystem("memory")
    for path in tmp_path.glob("part-*"):
        memory.pipe_file(f"/petps-wild/{path.name}", path.read_bytes())
    report = run.json("load", pool, "items", "memory://petps-wild/*.parquet")
    assert [Path(source).name for source in report["sources"]] == names
    with petps.open(pool) as opened:
        assert (opened.pull("items", [0]) == ROWS[0] + 2).all()
    write(tmp_path / "odd[1].parquet", KEYS, ROWS)
    assert run.json("load", pool, "items", tmp_path / "odd[1].parquet")["rows"] == 1000
