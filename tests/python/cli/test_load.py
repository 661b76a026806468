"""petps load: every kind of file loads the same rows, and every damaged file is a clear error."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import petps
from petps.checkpoint import Rows, Store, Table
from petps.checkpoint.chunk import ROW
from petps.checkpoint.store import BASE
from petps.errors import IoError
from tests.python.cli.conftest import COUNT, DIM, Command, expected, keys_and_rows, save_rows
from tests.s3.server import BUCKET, Server

Files = list[Path]


def npz(folder: Path) -> Files:
    return [save_rows(folder / "a.npz")]


def npz_compressed(folder: Path) -> Files:
    keys, rows = keys_and_rows()
    np.savez_compressed(
        folder / "b.npz", ids=keys.astype(np.int32), vectors=rows.astype(np.float64)
    )
    return [folder / "b.npz"]


def npy_pair(folder: Path) -> Files:
    keys, rows = keys_and_rows()
    np.save(folder / "k.npy", keys.astype(np.uint64))
    np.save(folder / "r.npy", rows)
    return [folder / "r.npy", folder / "k.npy"]


def npy_columns(folder: Path) -> Files:
    keys, rows = keys_and_rows()
    np.save(folder / "k.npy", keys)
    np.save(folder / "r.npy", np.asfortranarray(rows))
    return [folder / "k.npy", folder / "r.npy"]


def _list_table() -> pa.Table:
    keys, rows = keys_and_rows()
    return pa.table({"id": keys, "embedding": pa.array(rows.tolist(), pa.list_(pa.float32()))})


def _fixed_table() -> pa.Table:
    keys, rows = keys_and_rows()
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), DIM)
    return pa.table({"key": pa.array(keys.astype(np.uint64)), "row": fixed})


def parquet_lists(folder: Path) -> Files:
    pq.write_table(_list_table(), folder / "l.parquet", row_group_size=300)
    return [folder / "l.parquet"]


def parquet_fixed(folder: Path) -> Files:
    pq.write_table(_fixed_table(), folder / "f.parquet")
    return [folder / "f.parquet"]


def parquet_parts(folder: Path) -> Files:
    table = _fixed_table()
    for number, start in enumerate(range(0, COUNT, 400)):
        pq.write_table(table.slice(start, 400), folder / f"part-{number}.parquet")
    return sorted(folder.glob("part-*"))


def arrow_file(folder: Path) -> Files:
    table = _fixed_table()
    with pa.ipc.new_file(folder / "f.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=130)
    return [folder / "f.arrow"]


def arrow_stream(folder: Path) -> Files:
    table = _list_table()
    with pa.ipc.new_stream(folder / "s.arrows", table.schema) as writer:
        writer.write_table(table, max_chunksize=130)
    return [folder / "s.arrows"]


def hps(folder: Path) -> Files:
    keys, rows = keys_and_rows()
    (folder / "sparse.model").mkdir()
    keys.tofile(folder / "sparse.model/key")
    rows.tofile(folder / "sparse.model/emb_vector")
    return [folder / "sparse.model"]


KINDS = (
    npz, npz_compressed, npy_pair, npy_columns, parquet_lists, parquet_fixed, parquet_parts,
    arrow_file, arrow_stream, hps,
)  # fmt: skip


@pytest.mark.parametrize("write", KINDS, ids=lambda write: write.__name__)
def test_every_kind_of_file_loads_the_same_rows(
    run: Command, pool: Path, tmp_path: Path, write: Callable[[Path], Files]
) -> None:
    files = write(tmp_path)
    report = run.json("load", pool, "items", *files)
    assert (report["rows"], report["inserted"], report["updated"]) == (COUNT, COUNT, 0)
    again = run.json("load", pool, "items", *files)
    assert (again["inserted"], again["updated"]) == (0, COUNT)
    with petps.open(pool) as opened:
        keys = np.arange(COUNT, dtype=np.uint64)
        assert (opened.pull("items", keys) == expected(keys)).all()
        assert opened.status()["tables"][0]["rows"] == COUNT


@pytest.mark.parametrize("kind", ["path", "file", "memory"])
def test_a_store_may_be_a_path_or_a_url(
    run: Command, pool: Path, tmp_path: Path, kind: str
) -> None:
    store = {
        "path": str(tmp_path / "store"),
        "file": f"file://{tmp_path}/store",
        "memory": "memory://petps-test-load",
    }[kind]
    table = Table.of("items", DIM)
    created = Store.create(store, "default", [table])
    for version in (1, 2):
        rows = Rows.of(table, [5, 6], {ROW: np.full((2, DIM), version, np.float32)})
        created.write(version, {"items": rows}, kind=BASE)
    assert run.json("load", pool, "items", store, "--version", 1)["rows"] == 2
    with petps.open(pool) as opened:
        assert (opened.pull("items", [5, 6]) == 1).all()
    assert run.json("load", pool, "items", store)["sources"] == [store]
    with petps.open(pool) as opened:
        assert (opened.pull("items", [5, 6]) == 2).all()
    message = run.fails(3, "load", pool, "items", store, "--version", 9)
    assert "there is no version 9 in the store" in message


def test_the_last_row_of_a_repeated_key_wins(run: Command, pool: Path, tmp_path: Path) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, DIM)
    np.savez(tmp_path / "a.npz", keys=np.array([5, 6, 5]), rows=rows)
    run("load", pool, "items", tmp_path / "a.npz")
    with petps.open(pool) as opened:
        assert (opened.pull("items", [5, 6]) == rows[[2, 1]]).all()


def test_columns_can_be_named(run: Command, pool: Path, tmp_path: Path) -> None:
    keys, rows = keys_and_rows()
    np.savez(tmp_path / "a.npz", sku=keys, weights=rows)
    message = run.fails(2, "load", pool, "items", tmp_path / "a.npz")
    assert "'sku', 'weights'; none is named like a key column" in message
    assert "--key-column" in message
    message = run.fails(2, "load", pool, "items", tmp_path / "a.npz", "--key-column", "x")
    assert "has no key column 'x'; it has 'sku', 'weights'" in message
    named = ("--key-column", "sku", "--row-column", "weights")
    assert run.json("load", pool, "items", tmp_path / "a.npz", *named)["rows"] == COUNT


def test_a_negative_hps_key_keeps_its_bits(run: Command, pool: Path, tmp_path: Path) -> None:
    folder = tmp_path / "h"
    folder.mkdir()
    np.array([-1, 3], np.int64).tofile(folder / "key")
    np.ones((2, DIM), np.float32).tofile(folder / "emb_vector")
    run("load", pool, "items", folder)
    with petps.open(pool) as opened:
        assert (opened.pull("items", [2**64 - 1, 3]) == 1).all()


def save(path: Path, **arrays: object) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def cut(path: Path) -> Path:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return path


def flip_byte(path: Path) -> Path:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    return path


def write_hps(folder: Path, key_bytes: int, row_bytes: int) -> Path:
    folder.mkdir()
    (folder / "key").write_bytes(bytes(key_bytes))
    (folder / "emb_vector").write_bytes(bytes(row_bytes))
    return folder


def write_parquet(path: Path, **columns: object) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def write_text(path: Path) -> Path:
    path.write_text("no such format\n" * 50)
    return path


ONE = np.ones((2, DIM), np.float32)
BAD: list[tuple[str, Callable[[Path], Path], int, str]] = [
    ("missing", lambda f: f / "none.npz", 3, "none.npz: no such file or folder"),
    ("kind", lambda f: write_text(f / "a.csv"), 2, "unknown kind of file; known are .npz"),
    ("dim", lambda f: save(f / "a.npz", keys=[1, 2], rows=ONE[:, :3]), 2,
     "table 'items' has dim 4, but"),
    ("lengths", lambda f: save(f / "a.npz", keys=[1, 2, 3], rows=ONE), 2, "3 keys but 2 rows"),
    ("flat", lambda f: save(f / "a.npz", keys=[1, 2], rows=ONE[0]), 2, "expected (n,) and"),
    ("integers", lambda f: save(f / "a.npz", keys=[1, 2], rows=np.ones((2, 4), int)), 2,
     "rows are int64, expected floats"),
    ("float keys", lambda f: save(f / "a.npz", keys=[1.0, 2.0], rows=ONE), 2, "keys are float64"),
    ("negative", lambda f: save(f / "a.npz", keys=[1, -2], rows=ONE), 2, "keys[1] is -2"),
    ("nan", lambda f: save(f / "a.npz", keys=[1, 2], rows=ONE * np.nan), 2,
     "row 0 (key 1) has a NaN or infinity"),
    ("objects", lambda f: save(f / "a.npz", keys=np.array([1, 2], object), rows=ONE), 2,
     "Python objects, which are never loaded"),
    ("columns", lambda f: save(f / "a.npz", keys=[1, 2], rows=np.asfortranarray(ONE)), 2,
     "column by column"),
    ("cut npz", lambda f: cut(npz(f)[0]), 9, "is no whole .npz file"),
    ("flipped npz", lambda f: flip_byte(npz(f)[0]), 9, "is damaged"),
    ("text npz", lambda f: write_text(f / "a.npz"), 9, "is no whole .npz file"),
    ("cut parquet", lambda f: cut(parquet_fixed(f)[0]), 9, "is no whole Parquet file"),
    ("text parquet", lambda f: write_text(f / "a.parquet"), 9, "is no whole Parquet file"),
    ("null key", lambda f: write_parquet(f / "a.parquet", key=[1, None], row=ONE.tolist()), 2,
     "column 'key' has a null"),
    ("null row", lambda f: write_parquet(f / "a.parquet", key=[1, 2], row=[[1.0] * 4, None]), 2,
     "column 'row' has a null"),
    ("ragged", lambda f: write_parquet(f / "a.parquet", key=[1, 2], row=[[1.0] * 4, [1.0]]), 2,
     "row 1 has 1 numbers, expected 4"),
    ("scalars", lambda f: write_parquet(f / "a.parquet", key=[1, 2], row=[1.0, 2.0]), 2,
     "column 'row' is double, expected a list of floats"),
    ("text keys", lambda f: write_parquet(f / "a.parquet", key=["a", "b"], row=ONE.tolist()), 2,
     "column 'key' is string, expected integers"),
    ("cut arrow", lambda f: cut(arrow_file(f)[0]), 9, "is no whole Arrow file or stream"),
    ("cut stream", lambda f: cut(arrow_stream(f)[0]), 9, "is damaged"),
    ("one npy", lambda f: npy_pair(f)[0], 2, "1 .npy given; give two"),
    ("empty folder", lambda f: f, 2, "holds neither key and emb_vector (HPS) nor"),
    ("hps keys", lambda f: write_hps(f / "h", 12, 32), 9, "12 bytes, which is no whole number"),
    ("hps rows", lambda f: write_hps(f / "h", 16, 36), 9, "emb_vector has 36 bytes"),
    ("hps nothing", lambda f: write_hps(f / "h", 0, 0), 2, "holds no rows"),
    ("hps dim", lambda f: write_hps(f / "h", 16, 24), 2, "has rows of dim 3"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("write", "code", "message"), [case[1:] for case in BAD], ids=[case[0] for case in BAD]
)
def test_bad_files_are_refused_with_the_reason(
    run: Command,
    pool: Path,
    tmp_path: Path,
    write: Callable[[Path], Path],
    code: int,
    message: str,
) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    assert message in run.fails(code, "load", pool, "items", write(folder))
    with petps.open(pool) as opened:
        assert opened.verify().clean


@pytest.mark.parametrize(
    "write", [npz, npy_pair, parquet_lists, parquet_fixed, arrow_file, arrow_stream]
)
def test_files_load_by_url(
    run: Command, pool: Path, tmp_path: Path, write: Callable[[Path], Files]
) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    urls = []
    for path in write(tmp_path):
        memory.pipe_file(f"/petps-load/{path.name}", path.read_bytes())
        urls.append(f"memory://petps-load/{path.name}")
    assert run.json("load", pool, "items", *urls)["rows"] == COUNT
    with petps.open(pool) as opened:
        keys = np.arange(COUNT, dtype=np.uint64)
        assert (opened.pull("items", keys) == expected(keys)).all()
    (path,) = write(tmp_path)[:1]
    cut_urls = [f"memory://petps-load/cut-{path.name}", *urls[1:]]
    memory.pipe_file(f"/petps-load/cut-{path.name}", path.read_bytes()[:-100])
    run.fails(9, "load", pool, "items", *cut_urls)


def test_a_store_that_stops_answering_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    from petps.cli.sources import Columns, open_sources
    from petps.cli.sources.place import Place

    (path,) = parquet_fixed(tmp_path)
    fsspec.filesystem("memory").pipe_file("/petps-load/away.parquet", path.read_bytes())
    (source,) = open_sources(["memory://petps-load/away.parquet"], Columns(), "items")

    def fail(self: Place) -> None:
        raise IoError("no answer")

    monkeypatch.setattr(Place, "open", fail)
    with pytest.raises(IoError, match="no answer"):
        list(source.chunks())


def test_a_file_on_s3_loads(run: Command, pool: Path, tmp_path: Path, s3: Server) -> None:
    import fsspec

    (path,) = parquet_fixed(tmp_path)
    url = f"s3://{BUCKET}/load/{path.name}"
    with fsspec.open(url, "wb") as file:
        file.write(path.read_bytes())
    assert run.json("load", pool, "items", url)["rows"] == COUNT
    assert "no such file" in run.fails(3, "load", pool, "items", f"s3://{BUCKET}/load/no.npz")


def test_unknown_tables_and_targets_are_refused(run: Command, pool: Path, tmp_path: Path) -> None:
    file = npz(tmp_path)[0]
    message = run.fails(3, "load", pool, "itms", file)
    assert "has no table 'itms'; it has items [NOT_FOUND]" in message
    for url, code in (("memory://petps-no-store", 3), ("unknown://store", 2)):
        assert url in run.fails(code, "load", pool, "items", url)
    message = run.fails(3, "load", tmp_path / "none", "items", file)
    assert "there is no pool at" in message
    assert "petps create" in message
    message = run.fails(3, "load", pool, "items", file, "--model", "m")
    assert "no model, instance or alias 'm'; this pool has: default@0" in message
    message = run.fails(2, "load", "http://127.0.0.1:1", "items", file)
    assert "'http://' is unknown; write petps://HOST:PORT" in message
    with petps.open(pool):
        message = run.fails(6, "load", pool, "items", file)
    assert "in use by another process" in message
    assert "a server of the pool has one. Stop the process" in message


def test_a_full_table_refuses_new_keys(run: Command, tmp_path: Path) -> None:
    run("create", tmp_path / "p", "--table", f"items:{DIM}:f32:100")
    message = run.fails(5, "load", tmp_path / "p", "items", npz(tmp_path)[0])
    assert (
        "after 0 rows: table 'items' is full (capacity 100): 900 new keys were refused" in message
    )


def test_allow_not_finite_accepts_infinity(run: Command, pool: Path, tmp_path: Path) -> None:
    file = save(tmp_path / "a.npz", keys=[1], rows=np.full((1, DIM), np.inf, np.float32))
    run("load", pool, "items", file, "--allow-not-finite")
    with petps.open(pool) as opened:
        assert np.isinf(opened.pull("items", [1])).all()


@pytest.mark.parametrize("kind", ["npz", "parquet"])
def test_loading_needs_bounded_memory(run: Command, tmp_path: Path, kind: str) -> None:
    """Load a file of 400 MB of rows in a process that may not have that much memory."""
    count, dim = 100_000, 1024
    path = tmp_path / f"big.{kind}"
    keys = np.arange(count, dtype=np.int64)
    if kind == "npz":
        rows = np.zeros((count, dim), np.float32)
        rows[:, 0] = keys
        np.savez_compressed(path, keys=keys, rows=rows)
        del rows
    else:
        fixed = pa.list_(pa.float32(), dim)
        schema = pa.schema([("key", pa.int64()), ("row", fixed)])
        with pq.ParquetWriter(path, schema) as writer:
            for start in range(0, count, 10_000):
                rows = np.zeros((10_000, dim), np.float32)
                rows[:, 0] = keys[start : start + 10_000]
                column = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), dim)
                writer.write_table(
                    pa.table({"key": keys[start : start + 10_000], "row": column}, schema=schema)
                )
    pool = tmp_path / "p"
    run("create", pool, "--table", f"t:{dim}:int8:200k", "--durability", "process")
    done = subprocess.run(
        [sys.executable, "-m", "petps.cli", "load", str(pool), "t", str(path), "--json"],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        # Other allocators' arenas count as data before they hold anything.
        env={**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "OPENBLAS_NUM_THREADS": "1"},
        preexec_fn=_limit_data,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == count
    with petps.open(pool) as opened:
        assert np.allclose(opened.pull("t", [0, 77_777])[:, 0], [0, 77_777], rtol=0.01)


def _limit_data() -> None:
    # Limits private memory: everything that is read counts, the pool's shared mapping does not.
    resource.setrlimit(resource.RLIMIT_DATA, (350 << 20, 350 << 20))
