"""The demo with --train, as far as it works without PyTorch: options, measures, report, output."""

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
from examples.demo.training.ranks import RankProcess, RankReport, Ranks
from examples.demo.training.report import (
    Checkpoints,
    FinalScores,
    Fresh,
    Scored,
    ServerBack,
    TrainerBack,
    TrainingReport,
)
from examples.demo.training.screen import TrainingLines, TrainingScreen
from examples.demo.training.task import HELD_OUT, WORLD, Settings, Task
from examples.demo.training.upkeep import History, Kept, Merge, StoredVersion
from petps.errors import IoError, Unavailable


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the demo in a process that cannot import PyTorch."""
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


def test_without_pytorch_the_error_says_how_to_install_it(tmp_path: Path) -> None:
    process = run_demo("--train", "--plots", str(tmp_path / "plots"), "--folder", str(tmp_path))
    assert process.returncode == 6
    assert process.stderr.startswith("error: PyTorch is not installed")
    assert "pip install petps[torch]" in process.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ratings", "20000"], "--ratings needs --train"),
        (["--plots", "x"], "--plots needs --train"),
        (["--train", "--accesses", "50000"], "--accesses cannot be used with --train"),
        (["--train", "--ratings", "5"], "greater than or equal to"),
        (["--train", "--data", "x"], "is not one of 'ratings',"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], message: str) -> None:
    process = run_demo(*arguments)
    assert process.returncode == 2
    assert message in process.stderr


def test_the_help_explains_both_demos() -> None:
    process = run_demo("--help")
    assert process.returncode == 0
    for word in ("--train", "Exit status 0 only if", "pip install", "index.html"):
        assert word in process.stdout


def ids_of(samples: Samples) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return two random float32 of each sample as one number, which no other sample has."""
    return np.ascontiguousarray(samples.numbers[:, :2]).view(np.uint64)[:, 0]


@pytest.mark.parametrize("count", [10_000, 40_000, 400_000])
def test_no_held_out_sample_is_trained_on(tmp_path: Path, count: int) -> None:
    """One rank trains each sample, once. There are enough versions for two kills."""
    task = Task(Settings(str(tmp_path), "log", "clicks", count, seed=3))
    assert len(task.held_out) == round(HELD_OUT * count)
    assert len(np.unique(ids_of(task.samples))) == count
    trained = np.concatenate(
        [ids_of(part) for rank in range(WORLD) for _, part in task.batches(rank, 1)]
    )
    assert len(trained) == task.steps * WORLD * task.batch <= count * (1 - HELD_OUT)
    assert len(np.unique(trained)) == len(trained)
    assert not np.isin(trained, ids_of(task.held_out)).any()
    assert task.steps % task.store_every == 0
    assert task.steps / task.store_every >= 6
    first = next(iter(task.batches(1, task.steps)))
    assert first[0] == task.steps


def make_event(kind: str, life: int = 0, rank: int = 0, **fields: Any) -> RankReport:
    return RankReport(rank, life, kind, 0.0, fields)


def make_step(number: int, loss: float, life: int = 0) -> RankReport:
    times = {"seconds": 0.05, "exposed": 0.01, "crossing": 0.04, "lookup_stall": 0.002}
    return make_event("step", life, 0, number=number, loss=loss, **times)


def make_reports() -> measures.Reports:
    """Return reports of twelve steps with a kill after the tenth; steps 8 to 10 are repeated."""
    reports = measures.Reports()
    for number in range(1, 11):
        reports.add(make_step(number, 1 - number / 20))
    reports.add(make_event("version", version=1, step=10, begin=1.0))
    work: dict[str, Any] = {"compacted": 3, "dedup": [2.0, 1.5]}
    seconds = {"dense": 0.1, "route": 0.2, "copy": 0.05}
    reports.add(make_event("stages", seconds=seconds, steps=10, **work))
    reports.add(make_event("stored", step=7, begin=-1.0))
    reports.add(make_event("ready", 1, restored=7))
    assert reports.step == 7
    for number in range(8, 13):
        reports.add(make_step(number, 0.25, life=1))
    reports.add(make_event("version", 1, version=2, step=12, begin=3.0))
    reports.add(make_event("stages", 1, seconds={"dense": 0.2}, steps=5, **work))
    reports.add(make_event("stages", 1, rank=1, seconds={"dense": 0.3}, steps=5, **work))
    reports.add(make_event("ended", 1))
    return reports


def test_losses_and_stages_are_means_of_the_ranks_reports() -> None:
    reports = make_reports()
    assert (reports.step, reports.ended) == (12, 1)
    assert reports.versions[0].training_loss == pytest.approx(1 - 5.5 / 20)
    assert reports.versions[1].training_loss == pytest.approx(0.25)
    stages = measures.stages_of(reports, 100)
    assert stages.steps == 15
    assert stages.stages_ms == pytest.approx({"dense": 30.0, "route": 10.0, "copy": 2.5})
    assert stages.exposed_share == pytest.approx(0.25)
    assert stages.samples_per_second == pytest.approx(2000)


def test_freshness_ends_with_the_first_pull_that_shows_the_version() -> None:
    versions = make_reports().versions
    samples = [Sample(begin, begin + 0.1, version, 5) for begin, version in
               [(0.5, 0), (1.2, 1), (1.4, 1), (3.6, 2), (3.8, 2)]]  # fmt: skip
    outages = [measures.Outage("trainer killed", 10, 2.0, 3.1)]
    served = measures.served_of(versions, samples, outages)
    assert [version.fresh_ms for version in served] == [pytest.approx(300), pytest.approx(700)]
    assert [version.down for version in served] == [False, True]
    fresh = measures.fresh_of(served, {"p50_ms": 7.0, "p99_ms": None})
    assert (fresh.versions, fresh.p50_ms, fresh.worst_ms) == (1, 300.0, 700.0)
    assert measures.served_of(versions, samples[:2], outages) == served[:1]


def test_no_freshness_is_claimed_if_every_version_came_while_something_was_down() -> None:
    version = make_reports().versions[0]
    fresh = measures.fresh_of([measures.Served(version, 700.0, True)], {"p50_ms": 1, "p99_ms": 1})
    assert (fresh.versions, fresh.p50_ms, fresh.p99_ms, fresh.worst_ms) == (0, None, None, 700.0)
    text = render(replace(report(), freshness=fresh))
    assert "not measured" in text
    assert "worst of all 0.7 s" in text


def make_history() -> History:
    """Return a base and a delta, of which the base was purged, and a merge of two deltas."""
    history = History(Path("store"))
    history.versions[7, 1] = StoredVersion(7, "base", 10, 500, "adaptive4", 1.0, end=3.0)
    history.versions[12, 2] = StoredVersion(12, "delta", 5, 200, "adaptive4", 2.0)
    history.merges[12, 2] = Merge(12, 2, 2.5)
    history.bases.add(7)
    return history


def test_the_checkpoints_are_counted_from_reports_and_history() -> None:
    reports = make_reports()
    reports.add(replace(make_event("stored", 1, step=10, begin=-0.5), at=1.0))
    found = measures.checkpoints_of(reports, make_history(), Kept(2, 1, 9))
    assert (found.versions, found.steps_behind) == (2, 2)  # steps 11 and 12 of the second life
    assert found.copy_share == pytest.approx(0.05 / 2 / (15 * 0.05), abs=1e-4)
    assert found.behind_s == pytest.approx((1.0 + 1.5) / 2)
    assert (found.row_dtype, found.stored_bytes) == ("adaptive4", 700)
    assert found.exact_bytes == 15 * (8 + 4 * 17)
    assert (found.dedup_given, found.dedup_clustered, found.ids_dropped) == (2.0, 1.5, 9)
    assert (found.merges, found.resets, found.purged) == (1, 0, 1)
    assert found.complaints == []
    history = make_history()
    history.versions[13, 3] = StoredVersion(13, "base", 10, 500, "f32", 3.0)
    exact = measures.checkpoints_of(reports, history, Kept(2, 1, 9))
    assert any("not quantised" in complaint for complaint in exact.complaints)


CHECKPOINTS = Checkpoints(
    3, 20, 0.01, 0.3, "adaptive4", 400, 1000, 1.5, 1.2, 77, 2, 0, 4, 3, 2, 50, []
)


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
        checkpoints=CHECKPOINTS,
        final=FinalScores(2, 10, 0.65, 0.71234567, 0.71234567, True),
        comparison=Comparison(30, 28, 2),
        seconds=50.0,
    )


FINAL = report().final
SCORED = report().scored[0]
assert FINAL is not None


@pytest.mark.parametrize(
    ("complaint", "change"),
    [
        ("the trainer was not killed", {"trainer_back": None}),
        ("the server was not killed", {"server_back": None}),
        ("the last version was not compared", {"final": None}),
        ("no version was compared during training", {"scored": []}),
        ("no row was compared", {"comparison": Comparison(2, 0, 2)}),
        ("1 rows differ", {"comparison": Comparison(30, 27, 2, rows_different=1)}),
        ("1 are lost", {"comparison": Comparison(30, 27, 2, rows_lost=1)}),
        ("scores differ", {"final": replace(FINAL, logits_equal=False)}),
        ("scores differ", {"final": replace(FINAL, auc_served=0.71234568)}),
        ("version 1: served rows score otherwise", {"scored": [replace(SCORED, equal=False)]}),
        ("the store was not checked", {"checkpoints": None}),
        ("not staged", {"checkpoints": replace(CHECKPOINTS, steps_behind=0)}),
        ("not quantised", {"checkpoints": replace(CHECKPOINTS, row_dtype="f32")}),
        ("not quantised", {"checkpoints": replace(CHECKPOINTS, stored_bytes=1000)}),
        ("not clustered", {"checkpoints": replace(CHECKPOINTS, dedup_clustered=1.5)}),
        ("not compacted", {"checkpoints": replace(CHECKPOINTS, ids_dropped=0)}),
        ("not merged", {"checkpoints": replace(CHECKPOINTS, merges=0)}),
        ("not purged", {"checkpoints": replace(CHECKPOINTS, purged=0)}),
        ("kept was compared", {"checkpoints": replace(CHECKPOINTS, rows_compared=0)}),
        ("a lost file", {"checkpoints": replace(CHECKPOINTS, problems=["a lost file"])}),
    ],
)
def test_a_report_with_a_complaint_does_not_pass(complaint: str, change: dict[str, Any]) -> None:
    assert report().passed
    failed = replace(report(), **change)
    assert not failed.passed
    assert any(complaint in text for text in failed.complaints), failed.complaints
    assert json.loads(json.dumps(failed.as_json()))["passed"] is False


def render(finished: TrainingReport) -> str:
    text = io.StringIO()
    screen = TrainingScreen(quiet=False, console=Console(file=text, width=140))
    lines = TrainingLines(finished.steps)
    with screen.show_table(lines):
        for scored in finished.scored:
            lines.add_line(scored)
    screen.print_result(finished)
    return text.getvalue()


def test_the_output_has_all_figures() -> None:
    text = render(report())
    for part in ("0.712346", "0.6900", "✓ bit by bit", "newer rows served", "p99 180 ms", "25 %",
                 "4.5 s", "6.5 ms", "28 rows equal", "all 10 scores are equal",
                 "as were those of 1", "plots: plots", "1.50 → 1.20", "77 ids",
                 "rows as adaptive4", "merges by a process", "50 rows of 2"):  # fmt: skip
        assert part in text, part
    assert "✗" not in text


def test_the_verdict_counts_wrong_rows() -> None:
    text = render(replace(report(), comparison=Comparison(30, 27, 2, rows_different=1)))
    assert "✗ 1 keys are wrong" in text
    assert "✓ every row" not in text


def test_a_folder_for_plots_must_be_writable() -> None:
    with pytest.raises(IoError, match=r"^/proc: .*: give another folder by --plots"):
        plots.make_folder(Path("/proc"))  # not writable even for root


def test_the_path_of_the_work_folder_is_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with command._work_folder(Path(), keep=False) as work:
        assert work.parent == tmp_path


FAKE_RANK = """
import pathlib, sys, time
rank = int(sys.argv[1])
has_reported = pathlib.Path(sys.argv[2])
print("the output of a library", flush=True)
print('{"event": "step", "at": 1.5, "number": 7}', flush=True)
if rank == 0:
    while not has_reported.exists():
        time.sleep(0.01)
    sys.exit("Unavailable: worker 0 of 2: a peer is gone (closed)")
has_reported.touch()
time.sleep(0.3)  # still running when the demo notices that its peer has failed
sys.exit("ResourceExhausted: table t is full")
"""


def test_the_error_names_the_rank_that_failed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn = RankProcess.spawn

    def spawn_fake(self: RankProcess, arguments: list[str], pipes: bool) -> None:
        spawn(self, ["-c", FAKE_RANK, arguments[2], str(tmp_path / "has_reported")], pipes)

    monkeypatch.setattr(RankProcess, "spawn", spawn_fake)
    with Ranks(Settings(folder=str(tmp_path), log="")) as ranks:
        ranks.start()
        assert [ranks.next().fields for _ in range(WORLD)] == [{"number": 7}] * WORLD
        with pytest.raises(Unavailable, match="table t is full"):
            ranks.next()
    assert "the output of a library" in (tmp_path / "rank-0.txt").read_text()


def test_a_folder_for_plots_must_be_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(Exception, match="File exists: give another folder by --plots"):
        plots.make_folder(path)
