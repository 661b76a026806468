"""petps checkpoint: showing, restoring, merging, purging and rolling back a store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import petps
from petps.checkpoint import POLICIES, Base, Rows, Store, Table
from petps.checkpoint.policy import Merged
from petps.checkpoint.shares import write_share
from tests.python.checkpoint.replay import Replay
from tests.python.checkpoint.test_store import TABLES, VERSIONS, steps, written
from tests.python.cli.conftest import Command


@pytest.fixture
def replay() -> Replay:
    return Replay(TABLES, steps(9), deletes=0.1)


@pytest.fixture
def store(tmp_path: Path, replay: Replay) -> Path:
    written(tmp_path / "store", POLICIES["consecutive"](), replay)
    return tmp_path / "store"


def test_list_show_verify_and_diff_describe_a_store(run: Command, store: Path) -> None:
    report = run.json("checkpoint", "list", store)
    assert [entry["version"] for entry in report["versions"]] == list(range(1, VERSIONS + 1))
    assert report["versions"][0]["kind"] == "base"
    assert report["versions"][1]["parts"] == ["dense"]
    assert "written as" in run("checkpoint", "list", store)
    graph = run("checkpoint", "show", store, "--graph")
    assert f"lineage of base 1, versions 1 to {VERSIONS}" in graph
    assert "." * 9 + "#" * (VERSIONS - 9) + "  items layer 1, written at 10" in graph
    report = run.json("checkpoint", "show", store, 3)
    assert (report["version"], report["base"]) == (3, 1)
    assert run.json("checkpoint", "verify", store)["clean"]
    report = run.json("checkpoint", "diff", store, 3, 4)
    assert sum(table["added"] + table["changed"] for table in report["tables"]) > 0
    message = run.fails(3, "checkpoint", "show", store, 99)
    assert f"no version 99 in the store; it has {VERSIONS} versions from 1 to {VERSIONS}" in message
    message = run.fails(3, "checkpoint", "list", store / "none")
    assert "holds no checkpoint store" in message


def test_list_reports_an_unfinished_version(run: Command, tmp_path: Path) -> None:
    table = Table.of("items", 2)
    store = Store.create(tmp_path / "s", "m", [table])
    rows = Rows.of(table, [1], {"row": np.ones((1, 2), np.float32)})
    write_share(store, 5, {"items": rows}, rank=1, ranks=4, kind="base")
    report = run.json("checkpoint", "list", tmp_path / "s")
    assert report["versions"] == []
    assert report["unfinished"] == [{"version": 5, "written": [1], "ranks": 4}]


def test_a_restored_base_loads_into_a_pool(
    run: Command, store: Path, replay: Replay, tmp_path: Path
) -> None:
    report = run.json(
        "checkpoint", "restore", store, tmp_path / "base", "--version", 7, "--partitions", 4
    )
    expected = replay.at("items", 7)
    assert report["rows"]["items"] == len(expected)
    pool = tmp_path / "pool"
    run(
        "create", pool, "--table", "items:4:f32:10k", "--table", "users:2:f32:1k",
        "--model", "m", "--partitions", 4,
    )  # fmt: skip
    run("load", pool, "items", tmp_path / "base")
    assert_holds(pool, expected)


def assert_holds(pool: Path, expected: Rows) -> None:
    """Check that table items holds the stored rows of a store."""
    with petps.open(pool) as opened:
        rows = opened.pull("items", expected.keys)
    np.testing.assert_array_equal(
        rows.view(np.uint8).reshape(len(expected), -1), expected.columns["row"]
    )


@pytest.mark.parametrize("version", [None, 7])
def test_a_store_loads_into_a_pool(
    run: Command, store: Path, replay: Replay, tmp_path: Path, version: int | None
) -> None:
    expected = replay.at("items", version or VERSIONS)
    pool = tmp_path / "pool"
    run("create", pool, "--table", "items:4:f32:10k", "--table", "users:2:f32:1k")
    options = [] if version is None else ["--version", version]
    report = run.json("load", pool, "items", store, *options)
    assert (report["rows"], report["inserted"]) == (len(expected), len(expected))
    assert_holds(pool, expected)
    message = run.fails(3, "load", pool, "items", store, "--version", 99)
    assert "there is no version 99" in message
    message = run.fails(3, "load", pool, "others", store)
    assert "others" in message
    message = run.fails(2, "load", pool, "items", tmp_path, "--version", 1)
    assert "is no checkpoint store" in message


def test_quantised_rows_are_restored_as_floats(run: Command, tmp_path: Path) -> None:
    table = Table.of("items", 16, "adaptive4")
    store = Store.create(tmp_path / "s", "m", [table])
    floats = np.random.default_rng(1).random((50, 16), np.float32)
    rows = Rows.of(table, np.arange(50), {"row": floats})
    store.write(3, {"items": rows}, kind="base")
    run("checkpoint", "restore", tmp_path / "s", tmp_path / "base", "--partitions", 2)
    found = dict.fromkeys(range(50), np.empty(0, np.float32))
    for keys, stored in Base.open(tmp_path / "base").chunks("items"):
        found.update(zip(keys.tolist(), stored.view(np.float32), strict=True))
    read = np.stack([found[key] for key in range(50)])
    np.testing.assert_array_equal(read, table.columns[0].values(rows.columns["row"]))
    assert 0 < np.abs(read - floats).max() < 0.1
    run("create", tmp_path / "pool", "--table", "items:16:f32:100")
    run("load", tmp_path / "pool", "items", tmp_path / "s")
    with petps.open(tmp_path / "pool") as opened:
        np.testing.assert_array_equal(opened.pull("items", np.arange(50)), read)


def test_write_begins_a_store_with_an_exported_base(run: Command, tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    run("create", pool, "--table", "t:1:f32:10", "--model", "m")
    run("push", pool, "t", "1=1", "2=2")
    run("export", pool, tmp_path / "base")
    report = run.json("checkpoint", "write", tmp_path / "s", tmp_path / "base", "--version", 5)
    assert (report["version"], report["rows"]) == (5, 2)
    rows = Store.open(tmp_path / "s").restore(5)["t"]
    assert rows.keys.tolist() == [1, 2]
    message = run.fails(2, "checkpoint", "write", tmp_path / "s", tmp_path / "base", "--version", 5)
    assert "version 5 is not above 5" in message
    # The pool followed no log, so its base has no version: the store's next one is taken.
    assert run.json("checkpoint", "write", tmp_path / "s", tmp_path / "base")["version"] == 6
    assert run.json("checkpoint", "write", tmp_path / "new", tmp_path / "base")["version"] == 1


def test_rows_are_quantised_for_the_expected_restores(run: Command, tmp_path: Path) -> None:
    """Write with --expected-restores 1 and resume twice: later versions have 8 bits."""
    pool, store, base = tmp_path / "pool", tmp_path / "s", tmp_path / "base"
    run("create", pool, "--table", "t:16:f16:10k", "--model", "m", "--partitions", 2)
    keys = np.arange(1200, dtype=np.uint64)
    floats = np.random.default_rng(3).random((1200, 16), np.float32)
    with petps.open(pool) as opened:
        opened.push("t", keys, floats)
    run("export", pool, base)
    write = ("checkpoint", "write", store, base, "--version")
    report = run.json(*write, 1, "--expected-restores", 1, "--seed", 4)
    assert report["quantised"][0].startswith("t.row: adaptive2, bins ")
    shown = run.json("checkpoint", "show", store)
    assert shown["expected restores"] == "1, seed 4"
    assert shown["quantised"] == report["quantised"][0]
    assert "seed 4" in shown["quantised"]
    run("checkpoint", "restore", store, tmp_path / "looked", "--partitions", 2)
    assert run.json("checkpoint", "show", store)["restores"] == 0
    for number in (1, 2):
        folder = tmp_path / f"resumed{number}"
        run("checkpoint", "restore", store, folder, "--partitions", 2, "--resume")
        assert run.json("checkpoint", "show", store)["restores"] == number
        assert Base.open(folder).schemas()["t"].dtype == "f16"
    report = run.json(*write, 2)
    assert report["quantised"] == ["t.row: asymmetric8, seed 4"]
    assert "adaptive2" in run.json("checkpoint", "show", store, 1)["quantised"]
    report = run.json("checkpoint", "diff", store, 1, 2)
    assert report["tables"][0]["same"] < 1200
    run("load", pool, "t", tmp_path / "resumed2")
    with petps.open(pool) as opened:
        read = opened.pull("t", keys)
    assert 0 < np.abs(np.asarray(read, np.float32) - floats).max() < 0.4
    message = run.fails(2, *write, 3, "--expected-restores", "nan")
    assert "expected restores must be a number from 0 on, got nan" in message


def test_merge_purge_and_rollback_keep_the_remaining_versions(
    run: Command, store: Path, replay: Replay
) -> None:
    report = run.json("checkpoint", "merge", store, "--stride", 2)
    assert report["deltas_after"] < report["deltas_before"]
    run("checkpoint", "keep", store, 4)
    report = run.json("checkpoint", "purge", store, "--newest", 6)
    assert report["dropped"] == [1, 2, 3, *range(5, VERSIONS - 5)]
    message = run.fails(6, "checkpoint", "rollback", store, VERSIONS - 2)
    assert f"2 versions, {VERSIONS - 1} to {VERSIONS}, would be lost: confirm with --yes" in message
    report = run.json("checkpoint", "rollback", store, VERSIONS - 2, "--yes")
    assert report["dropped"] == [VERSIONS - 1, VERSIONS]
    opened = Store.open(store)
    for version in (4, VERSIONS - 2):
        rows = opened.restore(version)["items"]
        np.testing.assert_array_equal(rows.keys, replay.at("items", version).keys)


def test_a_store_is_tended_in_one_round(run: Command, store: Path, replay: Replay) -> None:
    report = run.json(
        "checkpoint", "tend", store, "--once", "--policy", "merged", "--keep", "hourly=1d"
    )
    newest = VERSIONS  # all were written within two hours
    assert VERSIONS - 2 <= len(report["dropped"]) <= VERSIONS - 1
    assert report["damaged"] == {}
    assert report["whole"] == newest
    assert run.json("checkpoint", "tend", store, "--once")["checked"] > 0
    rows = Store.open(store).restore(newest)["items"]
    np.testing.assert_array_equal(rows.keys, replay.at("items", newest).keys)


def test_damage_is_reported_and_rolled_back(run: Command, store: Path, replay: Replay) -> None:
    lineage = Store.open(store).state.lineage
    chunk = next(chunk for chunk in lineage.chunks if chunk.first == VERSIONS)
    path = store / chunk.file
    body = bytearray(path.read_bytes())
    body[chunk.offset + chunk.length // 2] ^= 1
    path.write_bytes(body)
    message = run.fails(9, "checkpoint", "tend", store, "--once")
    assert f"version {VERSIONS} is damaged: " in message
    assert f"version {VERSIONS - 1} is whole" in message
    message = run.fails(6, "checkpoint", "rollback", store, "--whole")
    assert "would be lost: confirm with --yes" in message
    report = run.json("checkpoint", "rollback", store, "--whole", "--yes")
    assert report == {"dropped": [VERSIONS], "newest": VERSIONS - 1}
    rows = Store.open(store).restore()["items"]
    np.testing.assert_array_equal(rows.keys, replay.at("items", VERSIONS - 1).keys)


def test_versions_are_purged_by_age(run: Command, store: Path) -> None:
    assert run.json("checkpoint", "purge", store, "--keep", "all=1d")["dropped"] == []
    report = run.json("checkpoint", "purge", store, "--keep", "all=0s")
    assert report["dropped"] == list(range(1, VERSIONS))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("purge",), "give either --newest or --keep"),
        (("purge", "--newest", 1, "--keep", "all=1h"), "give either --newest or --keep"),
        (("purge", "--keep", "yearly=1h"), "no rule 'yearly' in a retention"),
        (("rollback",), "give either a VERSION or --whole"),
        (("rollback", 1, "--whole"), "give either a VERSION or --whole"),
        (("tend", "--once", "--policy", "3d"), "--policy must be one of "),
        (("tend", "--once", "--every", 0), "--every must be above 0"),
        (
            ("tend", "--once", "--deltas-per-base", 3),
            "--deltas-per-base must be at least 0, and needs --policy merged, got 3 with ",
        ),
        (
            ("tend", "--once", "--policy", "merged", "--deltas-per-base", -1),
            "--deltas-per-base must be at least 0",
        ),
        (("tend", "--once", "--on", "there"), "--on must be here, ray"),
    ],
)
def test_bad_options_are_named(
    run: Command, store: Path, arguments: tuple[object, ...], message: str
) -> None:
    command, *options = arguments
    assert message in run.fails(2, "checkpoint", command, store, *options)


def test_verify_names_the_damaged_chunk(run: Command, store: Path) -> None:
    chunk = max((store / "data").iterdir(), key=lambda path: path.stat().st_size)
    body = bytearray(chunk.read_bytes())
    body[len(body) // 2] ^= 1
    chunk.write_bytes(body)
    message = run.fails(9, "checkpoint", "verify", store)
    assert f"data/{chunk.name} at" in message
    assert "does not fit its checksum" in message


def test_a_missing_file_is_reported_with_the_lost_versions(
    run: Command, store: Path, tmp_path: Path
) -> None:
    """Remove a delta: the errors name the lost versions and one that can be restored."""
    tenth = next(chunk for chunk in Store.open(store).state.lineage.chunks if chunk.first == 10)
    (store / tenth.file).unlink()
    lost = f"lost: versions 10 to {VERSIONS}, {VERSIONS - 9} of {VERSIONS}; version 9 is the newest"
    message = run.fails(9, "checkpoint", "verify", store)
    assert lost in message
    for command in (
        ("checkpoint", "restore", store, tmp_path / "base", "--version", 12),
        ("checkpoint", "diff", store, 9, 12),
    ):
        message = run.fails(9, *command)
        assert "version 12: " in message
        assert "version 9 does not need it" in message
    run("checkpoint", "rollback", store, 9, "--yes")
    assert run.json("checkpoint", "verify", store)["clean"]


def test_the_graph_marks_the_active_lineage_and_kept_versions(run: Command, tmp_path: Path) -> None:
    replay = Replay(TABLES, steps(9), deletes=0.1)
    store = tmp_path / "store"
    written(store, Merged(stride=2, every=9), replay)
    for version in (2, 11):
        run("checkpoint", "keep", store, version)
    lines = run("checkpoint", "show", store, "--graph").splitlines()
    headings = [text for text in lines if text.startswith("lineage of base")]
    assert headings == [
        "lineage of base 1, versions 1 to 10",
        "lineage of base 11, versions 11 to 20",
        "lineage of base 21, versions 21 to 30: active, the next version continues it",
    ]
    kept = [text for text in lines if text.endswith("kept: purge does not delete them")]
    assert [text.index("k") for text in kept] == [1, 0]
