"""the demo with --train without PyTorch: its options, what passes, what is drawn."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from examples.demo import command
from examples.demo.ratings import Samples
from examples.demo.report import Comparison
from examples.demo.traffic import Latency, Sample
from examples.demo.training import measures, plots
from examples.demo.training.report import (
    FinalScores,
    Fresh,
    Scored,
    ServerBack,
    TrainerBack,
    TrainingReport,
)
from examples.demo.training.screen import TrainingLines, TrainingScreen
from examples.demo.training.task import HELD_OUT, WORLD, Settings, Task
from examples.demo.training.workers import WorkerProcess, WorkerReport, Workers
from petps.errors import IoError, Unavailable


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the demo with PyTorch hidden, whether it is installed or not."""
    program = (
        "import sys; sys.modules['torch'] = None; from examples.demo.command import main; "
        "sys.exit(main())"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_without_pytorch_it_says_what_to_install(tmp_path: Path) -> None:
    done = demo("--train", "--plots", str(tmp_path / "plots"), "--folder", str(tmp_path))
    assert done.returncode == 6
    assert done.stderr.startswith("error: PyTorch is not installed")
    assert "pip install petps[torch]" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ratings", "20000"], "--ratings needs --train"),
        (["--plots", "x"], "--plots needs --train"),
        (["--train", "--accesses", "50000"], "--accesses is not of the demo with --train"),
        (["--train", "--ratings", "5"], "greater than or equal to"),
        (["--train", "--data", "x"], "is not one of 'ratings',"),
    ],
)
def test_what_is_asked_for_wrongly(arguments: list[str], said: str) -> None:
    done = demo(*arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_the_help_teaches() -> None:
    done = demo("--help")
    assert done.returncode == 0
    for word in ("--train", "Exit status 0 only if", "pip install", "index.html"):
        assert word in done.stdout


def marks(samples: Samples) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return two drawn float32 of each sample, which no other sample has."""
    return np.ascontiguousarray(samples.numbers[:, :2]).view(np.uint64)[:, 0]


@pytest.mark.parametrize("count", [10_000, 40_000, 400_000])
def test_no_held_out_sample_is_trained_on(tmp_path: Path, count: int) -> None:
    """Each sample is trained once, by one worker. Two kills fit between the versions."""
    task = Task(Settings(str(tmp_path), "log", "clicks", count, seed=3))
    assert len(task.held_out) == round(HELD_OUT * count)
    assert len(np.unique(marks(task.samples))) == count
    trained = np.concatenate(
        [marks(part) for rank in range(WORLD) for _, part in task.batches(rank, 1)]
    )
    assert len(trained) == task.steps * WORLD * task.batch <= count * (1 - HELD_OUT)
    assert len(np.unique(trained)) == len(trained)
    assert not np.isin(trained, marks(task.held_out)).any()
    assert task.steps % task.store_every == 0
    assert task.steps / task.store_every >= 6
    first = next(iter(task.batches(1, task.steps)))
    assert first[0] == task.steps


def make_event(
    what: str, life: int = 0, rank: int = 0, at: float = 0.0, **more: Any
) -> WorkerReport:
    return WorkerReport(rank, life, what, at, more)


def step(number: int, loss: float, life: int = 0) -> WorkerReport:
    times = {"seconds": 0.05, "exposed": 0.01, "crossing": 0.04, "lookup_stall": 0.002}
    return WorkerReport(0, life, "step", 0.0, {"number": number, "loss": loss, **times})


def make_reports() -> measures.Reports:
    """Return reports of twelve steps with a kill after the tenth; steps 8 to 10 are repeated."""
    reports = measures.Reports()
    for number in range(1, 11):
        reports.take(step(number, 1 - number / 20))
    reports.take(make_event("version", version=1, step=10, stored=False, begin=1.0))
    reports.take(make_event("stages", seconds={"dense": 0.1, "route": 0.2}, steps=10))
    reports.take(make_event("ready", 1, restored=7))
    assert reports.step == 7
    for number in range(8, 13):
        reports.take(step(number, 0.25, life=1))
    reports.take(make_event("version", 1, version=2, step=12, stored=True, begin=3.0))
    reports.take(make_event("stages", 1, seconds={"dense": 0.2}, steps=5))
    reports.take(make_event("stages", 1, rank=1, seconds={"dense": 0.3}, steps=5))
    reports.take(make_event("ended", 1))
    return reports


def test_what_the_workers_say_is_added_up() -> None:
    reports = make_reports()
    assert (reports.step, reports.ended) == (12, 1)
    assert reports.versions[0].training_loss == pytest.approx(1 - 5.5 / 20)
    assert reports.versions[1].training_loss == pytest.approx(0.25)
    stages = measures.stages_of(reports, 100)
    assert stages.steps == 15
    assert stages.stages_ms == {"dense": pytest.approx(30.0), "route": pytest.approx(10.0)}
    assert stages.exposed_share == pytest.approx(0.25)
    assert stages.samples_per_second == pytest.approx(2000)


def test_freshness_is_until_a_pull_is_served_it() -> None:
    versions = make_reports().versions
    samples = [Sample(begin, begin + 0.1, version, 5) for begin, version in
               [(0.5, 0), (1.2, 1), (1.4, 1), (3.6, 2), (3.8, 2)]]  # fmt: skip
    outages = [measures.Outage("trainer killed", 10, 2.0, 3.1)]
    served = measures.served_of(versions, samples, outages)
    assert [each.fresh_ms for each in served] == [pytest.approx(300), pytest.approx(700)]
    assert [each.down for each in served] == [False, True]
    fresh = measures.fresh_of(served, {"p50_ms": 7.0, "p99_ms": None})
    assert (fresh.versions, fresh.p50_ms, fresh.worst_ms) == (1, 300.0, 700.0)
    assert measures.served_of(versions, samples[:2], outages) == served[:1]


def report() -> TrainingReport:
    """Return a finished report."""
    return TrainingReport(
        data="clicks",
        ratings=100,
        trained=90,
        held_out=10,
        fields=["a", "b"],
        keys=30,
        dim=16,
        workers=2,
        batch=4,
        steps=12,
        log="log",
        processors=2,
        plots="plots",
        scored=[Scored(10, 1, 0, 0.7, 0.69, 0.6, True), Scored(12, 2, 1, 0.6, 0.65, 0.7, None)],
        trainer_back=TrainerBack(10, 7, 1, 4.5, 0.1, 0.2, 6.5, 8),
        server_back=ServerBack(11, 1, 480.0, 6.5, 3.0, 600.0, 0, 900.0),
        freshness=Fresh(2, 120.0, 150.0, 180.0, 2000.0, 40.0, 90.0),
        pull=Latency(100, 0.2, 3.0),
        stages=measures.stages_of(make_reports(), 100),
        final=FinalScores(2, 10, 0.65, 0.71234567, 0.71234567, True),
        comparison=Comparison(30, 28, 2),
        seconds=50.0,
    )


def test_passed_is_everything_equal_and_both_killed() -> None:
    assert report().passed
    good = report()
    assert good.final is not None
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("the trainer was not killed", {"trainer_back": None}),
        ("the server was not killed", {"server_back": None}),
        ("nothing was compared", {"final": None}),
        ("no version was compared while training went on", {"scored": []}),
        ("no row was compared", {"comparison": Comparison(2, 0, 2)}),
        ("1 rows differ", {"comparison": Comparison(30, 27, 2, rows_different=1)}),
        ("1 are lost", {"comparison": Comparison(30, 27, 2, rows_lost=1)}),
        ("scores differ", {"final": replace(good.final, logits_equal=False)}),
        ("scores differ", {"final": replace(good.final, auc_served=0.71234568)}),
        (
            "version 1: served rows score otherwise",
            {"scored": [replace(good.scored[0], equal=False)]},
        ),
    ]
    for complaint, change in wrong:
        wrong_report = replace(report(), **change)
        assert not wrong_report.passed
        assert any(complaint in each for each in wrong_report.complaints), wrong_report.complaints
        assert json.loads(json.dumps(wrong_report.as_json()))["passed"] is False


def shown(found: TrainingReport) -> str:
    text = io.StringIO()
    screen = TrainingScreen(quiet=False, console=Console(file=text, width=140))
    lines = TrainingLines(found.steps)
    with screen.growing(lines):
        for each in found.scored:
            lines.line(each)
    screen.result(found)
    return text.getvalue()


def test_all_numbers_are_there() -> None:
    text = shown(report())
    for part in ("0.712346", "0.6900", "✓ bit by bit", "newer rows too", "p99 180 ms", "25 %",
                 "4.5 s", "6.5 ms", "28 rows equal", "all 10 scores are equal", "so they were of 1",
                 "plots: plots"):  # fmt: skip
        assert part in text, part
    assert "✗" not in text


def test_what_is_wrong_is_the_verdict() -> None:
    text = shown(replace(report(), comparison=Comparison(30, 27, 2, rows_different=1)))
    assert "✗ 1 keys are wrong" in text
    assert "✓ every row" not in text


def test_a_folder_for_plots_that_cannot_be_written_to() -> None:
    with pytest.raises(IoError, match=r"^/proc: .*: give another folder by --plots"):
        plots.make_folder(Path("/proc"))  # not writable even for root


def test_the_work_folder_is_known_wherever_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with command._work_folder(Path(), keep=False) as work:
        assert work.parent == tmp_path


SAYS = """
import pathlib, sys, time
rank = int(sys.argv[1])
spoken = pathlib.Path(sys.argv[2])
print("a library's own words", flush=True)
print('{"is": "step", "at": 1.5, "number": 7}', flush=True)
if rank == 0:
    while not spoken.exists():
        time.sleep(0.01)
    sys.exit("Unavailable: worker 0 of 2: a peer is gone (closed)")
spoken.touch()
time.sleep(0.3)  # it is still there when its peer's end is seen
sys.exit("ResourceExhausted: table t is full")
"""


def test_the_worker_that_failed_first_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spawn(self: WorkerProcess, arguments: list[str], pipes: bool) -> None:
        spawned(self, ["-c", SAYS, arguments[2], str(tmp_path / "spoken")], pipes)

    spawned = WorkerProcess.spawn
    monkeypatch.setattr(WorkerProcess, "spawn", spawn)
    with Workers(Settings(folder=str(tmp_path), log="")) as workers:
        workers.start()
        assert [workers.next().more for _ in range(WORLD)] == [{"number": 7}] * WORLD
        with pytest.raises(Unavailable, match="table t is full"):
            workers.next()
    assert "a library's own words" in (tmp_path / "worker-0.txt").read_text()


def test_a_folder_for_plots_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(Exception, match="File exists: give another folder by --plots"):
        plots.make_folder(path)
