"""petps pull, push, export, publish: rows on the command line and in files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import petps
from petps.checkpoint import Base, BaseFolder
from petps.checkpoint.served import ServedVersions
from petps.delta.directory import DirectoryLog
from petps.delta.kafka import KafkaLog
from petps.errors import FailedPrecondition
from tests.kafka.broker import Broker
from tests.python.cli.conftest import COUNT, DIM, Command, expected, save_rows


@pytest.fixture
def filled(run: Command, pool: Path, tmp_path: Path) -> Path:
    run("load", pool, "items", save_rows(tmp_path / "rows.npz"))
    return pool


# ---- pull


def test_pull_shows_found_and_missing_keys(run: Command, filled: Path) -> None:
    output = run("pull", filled, "items", 3, 999_999)
    lines = [line for line in output.splitlines() if "│" in line]
    assert lines[0].split("│")[1:4] == [" 3      ", "   yes ", " 3 3.125 3.25 3.375 "]
    assert "no" in lines[1]
    assert "0 0 0 0" in lines[1]
    report = run.json("pull", filled, "items", 3, 999_999)
    assert report == {
        "table": "items",
        "keys": 2,
        "found": 1,
        "unavailable": 0,
        "rows": [
            {"key": 3, "found": True, "unavailable": False, "row": [3.0, 3.125, 3.25, 3.375]},
            {"key": 999_999, "found": False, "unavailable": False, "row": [0.0] * DIM},
        ],
    }


def test_pull_writes_npy_and_npz_files(run: Command, filled: Path, tmp_path: Path) -> None:
    pulled = np.array([5, 10**12, 7], np.uint64)
    np.save(tmp_path / "k.npy", pulled)
    keys = ("--keys", tmp_path / "k.npy")
    report = run.json("pull", filled, "items", *keys, "--out", tmp_path / "o.npz")
    assert (report["found"], report["out"]) == (2, str(tmp_path / "o.npz"))
    with np.load(tmp_path / "o.npz") as arrays:
        assert (arrays["keys"] == pulled).all()
        assert arrays["found"].tolist() == [True, False, True]
        assert (arrays["rows"][[0, 2]] == expected(pulled[[0, 2]])).all()
    run("pull", filled, "items", *keys, "--out", tmp_path / "o.npy")
    assert np.load(tmp_path / "o.npy").shape == (3, DIM)


def test_pull_refuses_bad_arguments(run: Command, filled: Path, tmp_path: Path) -> None:
    assert "name the keys" in run.fails(2, "pull", filled, "items")
    both = run.fails(2, "pull", filled, "items", 1, "--keys", tmp_path / "k.npy")
    assert "name the keys, either as arguments or with --keys" in both
    for key in ("x", "-1", "1.5", str(2**64)):
        message = run.fails(2, "pull", filled, "items", "--", key)
        assert f"a key must be a number from 0 to 2^64-1, got '{key}'" in message
    assert "no such file" in run.fails(3, "pull", filled, "items", "--keys", tmp_path / "no.npy")
    (tmp_path / "text.npy").write_text("hello")
    message = run.fails(2, "pull", filled, "items", "--keys", tmp_path / "text.npy")
    assert "is no .npy file of keys" in message
    message = run.fails(2, "pull", filled, "items", 1, "--out", tmp_path / "o.csv")
    assert "write .npy (rows alone) or .npz" in message
    message = run.fails(3, "pull", filled, "users", 1)
    assert "has no table 'users'; it has items" in message


# ---- push


def test_push_writes_and_deletes(run: Command, filled: Path) -> None:
    changes = ("5=1,2,3,4", "1000000=-1e-3,0,.5,7", "--delete", 6, "--delete", 10**9)
    report = run.json("push", filled, "items", *changes)
    assert report == {"table": "items", "inserted": 1, "updated": 1, "deleted": 1, "absent": 1}
    with petps.open(filled) as pool:
        rows, mask = pool.pull("items", [5, 1_000_000, 6], return_mask=True)
        assert rows.tolist() == [[1, 2, 3, 4], [np.float32(-1e-3), 0, 0.5, 7], [0] * 4]
        assert mask.tolist() == [True, True, False]
    output = run("push", filled, "items", "8=1,2,3,4")
    assert "items: 0 new, 1 replaced, 0 deleted, 0 missing" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to push: write KEY=NUMBER"),
        (["5"], "'5': write KEY=NUMBER,NUMBER"),
        (["5=a,b,c,d"], "'a,b,c,d' is not a list of numbers"),
        (["x=1,2,3,4"], "got 'x'"),
        (["5=1,2,3"], "table 'items' has dim 4, but key 5 has 3 numbers"),
        (["5=1,2,3,nan"], "row 0 (key 5) has a NaN or infinity"),
        (["5=1,2,3,4", "--delete", "5"], "key 5 is both written and deleted"),
        (["--delete", "-1"], "a key must be a number from 0 to 2^64-1, got '-1'"),
    ],
)
def test_push_refuses_bad_arguments_and_changes_nothing(
    run: Command, filled: Path, arguments: list[str], message: str
) -> None:
    assert message in run.fails(2, "push", filled, "items", *arguments)
    with petps.open(filled) as pool:
        keys = np.arange(COUNT, dtype=np.uint64)
        assert (pool.pull("items", keys) == expected(keys)).all()


def test_push_to_a_delta_fed_table_is_refused(run: Command, tmp_path: Path) -> None:
    run("create", tmp_path / "p", "--table", "d:1:f32:10", "--feed", "delta")
    message = run.fails(6, "push", tmp_path / "p", "d", "1=1")
    assert "only deltas write table 'd': publish to its log (petps publish)" in message


# ---- export


def test_an_exported_base_loads_again(run: Command, filled: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bases/one"
    report = run.json("export", filled, folder)
    assert report["tables"] == [{"name": "items", "rows": COUNT}]
    assert (report["model"], report["instance"], report["version"]) == ("default", "default@0", 0)
    base = Base.open(folder)
    assert base.partitions == 8
    assert base.rows("items") == COUNT
    other = tmp_path / "other"
    run("create", other, "--table", f"items:{DIM}:f16:10k")
    run("load", other, "items", folder)
    with petps.open(other) as pool:
        keys = np.arange(COUNT, dtype=np.uint64)
        assert (pool.pull("items", keys) == expected(keys).astype(np.float16)).all()
    message = run.fails(4, "export", filled, folder)
    assert f"{folder} holds a base already" in message
    message = run.fails(3, "load", other, "users", folder)
    assert "users" in message
    damaged = next(folder.glob("data/*"))
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])
    message = run.fails(9, "load", other, "items", folder)
    assert f"{damaged} at 0 does not fit its checksum" in message


def test_export_of_one_of_two_models(run: Command, tmp_path: Path) -> None:
    path = tmp_path / "p"
    run("create", path, "--table", "t:1:f32:10", "--model", "a", "--partitions", 2)
    run("create", path, "--add", "--table", "t:2:f32:10", "--model", "b")
    run("push", path, "t", "1=1,2", "--model", "b")
    report = run.json("export", path, tmp_path / "base", "--model", "b")
    assert report["tables"] == [{"name": "t", "rows": 1}]
    message = run.fails(3, "export", path, tmp_path / "base2")
    assert "this pool has: a@0, b@0" in message
    assert not (tmp_path / "base2").exists()


# ---- publish


def test_publish_continues_the_log(run: Command, tmp_path: Path) -> None:
    save_rows(tmp_path / "rows.npz")
    log = tmp_path / "log"
    first = run.json(
        "publish", log, "items", tmp_path / "rows.npz", "--partitions", 3, "--model", "m"
    )
    assert (first["rows"], first["version"]) == (COUNT, 1)
    second = run.json(
        "publish", log, "items", "--dim", DIM, "--delete", 5, "--delete", 6, "--model", "m"
    )
    assert (second["rows"], second["deletions"], second["version"]) == (0, 2, 2)
    assert second["run"] > first["run"]
    with DirectoryLog(log) as opened:
        assert opened.partitions == 3
    message = run.fails(2, "publish", log, "items", "--dim", DIM, "--delete", 5)
    assert "belongs to model 'm', not 'default'; use --model" in message
    message = run.fails(
        2, "publish", log, "items", "--dim", DIM, "--delete", 5, "--model", "m", "--partitions", 8
    )
    assert "has 3 partitions, not 8" in message


def test_publish_to_kafka(
    run: Command, kafka: Broker, topic: Callable[[], str], tmp_path: Path
) -> None:
    save_rows(tmp_path / "rows.npz")
    log = f"kafka://{kafka.address}/{topic()}"
    option = ("--kafka-option", "compression.type=zstd")
    first = run.json("publish", log, "items", tmp_path / "rows.npz", "--partitions", 3, *option)
    assert (first["rows"], first["version"], first["log"]) == (COUNT, 1, log)
    second = run.json("publish", log, "items", "--dim", DIM, "--delete", 5)
    assert (second["deletions"], second["version"]) == (1, 2)
    assert second["run"] > first["run"]
    opened = KafkaLog(log)
    assert opened.partitions == 3
    opened.close()
    for bad, reason in (
        (("--kafka-option", "acks"), "write NAME=VALUE"),
        (("--kafka-option", "acks=0"), "acks cannot be set"),
        (("--kafka-option", "no.such=0"), "no.such"),
    ):
        message = run.fails(2, "publish", log, "items", "--dim", DIM, "--delete", 5, *bad)
        assert reason in message


def test_publish_begins_with_a_base(run: Command, filled: Path, tmp_path: Path) -> None:
    run("export", filled, tmp_path / "base")
    report = run.json(
        "publish", tmp_path / "log", "items", "--dim", DIM, "--base", tmp_path / "base"
    )
    assert (report["rows"], report["deletions"]) == (0, 0)
    message = run.fails(
        2, "publish", tmp_path / "log", "items", "--dim", DIM, "--base", tmp_path / "base",
        "--model", "m",
    )  # fmt: skip
    assert "belongs to model 'default', not 'm'" in message
    message = run.fails(
        3, "publish", tmp_path / "log", "items", "--dim", DIM, "--base", tmp_path / "nothing"
    )
    assert "holds no base" in message


def test_publish_begins_with_a_base_at_a_url(run: Command, filled: Path, tmp_path: Path) -> None:
    """The log names the URL, and a server reads it only if it is the store of its configuration."""
    import fsspec

    run("export", filled, tmp_path / "base")
    url = f"memory://petps-test-{tmp_path.name}/base"
    fsspec.filesystem("memory").put(str(tmp_path / "base"), url, recursive=True)
    run("publish", tmp_path / "log", "items", "--dim", DIM, "--base", url)
    segments = [path for path in (tmp_path / "log").rglob("*") if path.is_file()]
    assert any(url.encode() in path.read_bytes() for path in segments)

    def served(place: str) -> ServedVersions:
        return ServedVersions(place, BaseFolder(tmp_path), dict)

    assert served(url).open(url).rows("items") == COUNT
    assert served(f"{url}/").open(f"{url}#1").rows("items") == COUNT
    refusal = rf"a URL is read only if it is that of \[ingest\] store: write store = \"{url}\""
    for place in (str(tmp_path / "base"), f"{url}2", "memory://petps-test"):
        with pytest.raises(FailedPrecondition, match=refusal):
            served(place).open(url)
    message = run.fails(3, "publish", tmp_path / "log", "items", "--dim", DIM, "--base", f"{url}3")
    assert "base3" in message


def test_publish_refuses_bad_input(run: Command, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert "nothing to publish" in run.fails(2, "publish", log, "items")
    assert "name it with --dim" in run.fails(2, "publish", log, "items", "--delete", 1)
    np.savez(tmp_path / "a.npz", keys=[1], rows=np.full((1, DIM), np.nan, np.float32))
    message = run.fails(2, "publish", log, "items", tmp_path / "a.npz", "--dim", 3)
    assert f"has rows of dim {DIM}, expected 3" in message
    message = run.fails(2, "publish", log, "items", tmp_path / "a.npz", "--dtype", "f64")
    assert "unknown dtype 'f64'" in message
    assert not log.exists()
    message = run.fails(2, "publish", log, "items", tmp_path / "a.npz")
    assert "NaN" in message or "finite" in message
    (tmp_path / "log.txt").write_text("hello")
    message = run.fails(1, "publish", tmp_path / "log.txt", "items", tmp_path / "a.npz")
    assert "log.txt" in message


def test_a_pipe_that_closes_early_shows_no_traceback(filled: Path) -> None:
    keys = [str(key) for key in range(1000)]
    command = [sys.executable, "-m", "petps.cli", "pull", str(filled), "items", *keys, "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
        assert process.wait(60) in (0, 1)


def test_a_json_report_has_no_other_text(run: Command, filled: Path) -> None:
    report = run.json("status", filled)
    assert json.loads(json.dumps(report)) == report
