"""What the demo with --train draws. Needs matplotlib, which `make test-train` has."""

from __future__ import annotations

import json
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from examples.demo.training import measures, plots
from examples.demo.training.task import WORLD, timeline_of
from examples.demo.training.upkeep import OUTPUT, read_tended
from petps.train.timeline import Span, Timeline
from tests.python.demo.test_training import make_history, make_reports, report


def test_plots_are_drawn(tmp_path: Path) -> None:
    work, folder = tmp_path / "work", tmp_path / "plots"
    work.mkdir()
    for rank in range(WORLD):
        make_timeline().write(work / timeline_of(rank), rank)
    spans = {"spans": {"arrange": {"begin": 1.0, "seconds": 0.5}}}
    (work / OUTPUT).write_text(f"a note\n{json.dumps(spans)}\n")
    plots.make_folder(folder)
    reports = make_reports()
    served = [measures.Served(version, 100.0, False) for version in reports.versions]
    outages = [measures.Outage("trainer killed", 10, 1.0, 2.0)]
    facts = plots.Facts(report(), reports, served, outages, make_history())
    plots.write_plots(folder, work, facts)
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *(f"{name}.svg" for name in ("loss", "auc", "freshness", "stages", "versions", "timeline")),
        *("timeline.json", "report.json", "index.html"),
    }
    for path in folder.glob("*.svg"):
        ElementTree.parse(path)
    loss = (folder / "loss.svg").read_text()
    assert "trainer killed" in loss
    assert "held out, served rows" in loss
    pids = {
        load["pid"] for load in json.loads((folder / "timeline.json").read_text())["traceEvents"]
    }
    assert pids == {*range(WORLD), WORLD}
    assert json.loads((folder / "report.json").read_text())["passed"] is True
    versions = (folder / "versions.svg").read_text()
    assert "until it is purged" in versions
    assert "are merged" in versions
    page = (folder / "index.html").read_text()
    assert all(f'src="{name}.svg"' in page for name in ("loss", "auc", "versions", "stages"))


def make_timeline() -> Timeline:
    """Return 8 steps of a second each, and the versions of steps 2 and 6, written in 0.5 s."""
    timeline = Timeline(keep=True)
    for step in range(1, 9):
        timeline.add(Span("compute", "dense", step, step, step + 1.0, micro=0))
        if step in {2, 6}:
            timeline.add(Span("compute", "copy", step, step, step + 0.1))
            timeline.add(Span("quantise", "quantise", step, step + 0.1, step + 0.2))
            timeline.add(Span("store", "store", step, step, step + 0.5))
    return timeline


def test_the_time_line_shows_a_version_that_is_merged_and_purged(tmp_path: Path) -> None:
    tended = [
        Span("tend", stage, 0, begin, begin + 0.1)
        for stage, begin in (("merge", 3.5), ("verify", 6.7), ("merge", 6.6), ("purge", 7.5))
    ]
    plots.draw_timeline(tmp_path, [make_timeline()] * WORLD, tended)
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    shown = {(event["pid"], event["name"], event["args"].get("batch"))
             for event in events if event["ph"] == "X"}  # fmt: skip
    of_rank = {("dense", 5), ("dense", 6), ("dense", 7), ("copy", 6), ("quantise", 6), ("store", 6)}
    assert shown == {(rank, *span) for rank in range(WORLD) for span in of_rank} | {
        (WORLD, "merge", 6), (WORLD, "verify", 6), (WORLD, "purge", 7)
    }  # fmt: skip
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0", "rank 1", "tend"}
    drawn = (tmp_path / "timeline.svg").read_text()
    assert all(f"<!-- {stage} -->" in drawn or f">{stage}<" in drawn
               for stage in ("copy", "quantise", "store", "merge", "purge"))  # fmt: skip


def test_what_a_process_that_tends_reports_is_read(tmp_path: Path) -> None:
    now, monotonic = time.time(), time.monotonic()
    rounds = [{"arrange": 3.0, "purge": 2.0}, {}, {"base": 1.0, "verify": 0.5}]
    lines = [
        json.dumps({"spans": {
            work: {"begin": now - ago, "seconds": 0.25} for work, ago in spans.items()
        }})
        for spans in rounds
    ]  # fmt: skip
    half = lines[0][:20]  # it is read while the process writes it
    (tmp_path / OUTPUT).write_text("\n".join(["a note: trying again", *lines, half]))
    spans = read_tended(tmp_path)
    assert [span.stage for span in spans] == ["merge", "purge", "base", "verify"]
    assert spans[0].begin == pytest.approx(monotonic - 3.0, abs=0.1)
    assert spans[0].end - spans[0].begin == pytest.approx(0.25)


@pytest.mark.parametrize("points", [[], [(1.0, 0.5)], [(1.0, 0.5), (2.0, 0.5)], [(0.0, 0.0)]])
@pytest.mark.parametrize("logarithmic", [False, True])
def test_plots_of_few_points_are_drawn(
    tmp_path: Path, points: list[tuple[float, float]], logarithmic: bool
) -> None:
    path = tmp_path / "plot.svg"
    plots.draw_curves(path, "t < u", "y", {"one": [points]}, [], logarithmic=logarithmic)
    ElementTree.parse(path)
    plots.draw_bars(path, "t", "ms", {"a & b": 0.0} if points else {})
    ElementTree.parse(path)
