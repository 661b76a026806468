"""What the demo with --train draws. Needs matplotlib, which `make test-train` has."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from examples.demo.training import measures, plots
from examples.demo.training.task import WORLD
from tests.python.demo.test_training import make_history, make_reports, report


def test_plots_are_drawn(tmp_path: Path) -> None:
    work, folder = tmp_path / "work", tmp_path / "plots"
    work.mkdir()
    for rank in range(WORLD):
        events = {"traceEvents": [{"name": "dense", "pid": rank}]}
        (work / f"timeline-{rank}.json").write_text(json.dumps(events))
        (work / f"timeline-{rank}.svg").write_text("<svg/>")
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
    assert pids == {0, 1}
    assert json.loads((folder / "report.json").read_text())["passed"] is True
    versions = (folder / "versions.svg").read_text()
    assert "until it is purged" in versions
    assert "are merged" in versions
    page = (folder / "index.html").read_text()
    assert all(f'src="{name}.svg"' in page for name in ("loss", "auc", "versions", "stages"))


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
