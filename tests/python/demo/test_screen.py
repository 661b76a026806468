"""The output of the demo: the verdict, the figures, and no output in quiet mode."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from examples.demo.report import Comparison, Freshness, Group, Report, Restart
from examples.demo.screen import Screen
from examples.demo.traffic import Latency, Sample, latency_of


def report(wrong: int = 0, hits: int = 37) -> Report:
    """Return a finished report."""
    return Report(
        trace="some accesses",
        accesses=1000,
        base_accesses=400,
        dim=64,
        k=50,
        processors=2,
        rows=1234,
        pulls_per_second=4321.0,
        pull_idle=Latency(100, 0.12, 1.5),
        pull_during_apply=Latency(50, 0.2, 2.5),
        freshness=Freshness(15, 70.0, 115.0),
        restart=Restart(900, 0.4, 7, 480.0, 21.5, 3.0, 600.0, 0, 900.0),
        groups=[Group(500, 3, 40, 2, 71.0, 100, hits, 35)],
        comparison=Comparison(10, 8 - wrong, 2, rows_different=wrong),
        seconds=50.0,
    )


def render(finished: Report, *, quiet: bool = False) -> str:
    text = io.StringIO()
    screen = Screen(quiet=quiet, console=Console(file=text, width=100, quiet=quiet))
    with screen.show_deltas(finished, 1) as lines:
        lines.advance()
        lines.add_line(finished.groups[0])
    assert finished.restart is not None
    screen.print_restart(finished.restart)
    screen.print_result(finished)
    return text.getvalue()


def test_the_output_has_all_figures() -> None:
    text = render(report())
    for part in ("1,234", "4,321", "0.12", "2.50", "70.0", "21.5 ms", "480 ms", "37.0 %", "35.0 %"):
        assert part in text
    assert "40 % of them were visible" in text
    assert "every row is the trainer's, bit by bit: 8 rows equal, 2 keys missing" in text
    assert "did not beat" not in text


def test_the_verdict_counts_wrong_rows() -> None:
    text = render(report(wrong=3))
    assert "3 keys are wrong: 3 rows differ, 0 are lost" in text
    assert "bit by bit" not in text


def test_the_output_says_when_rows_do_not_beat_popularity() -> None:
    assert "the served rows did not beat popularity" in render(report(hits=35))


def test_quiet_mode_prints_nothing() -> None:
    assert render(report(), quiet=True) == ""


def test_the_report_is_json() -> None:
    values = json.loads(json.dumps(report(wrong=1).as_json()))
    assert values["passed"] is False
    assert values["hit_rate"] == pytest.approx(0.37)
    assert values["restart"]["share_visible"] == 0.4


def test_a_report_without_a_comparison_does_not_pass() -> None:
    unfinished = report()
    unfinished.comparison = None
    assert not unfinished.passed


def test_latencies_are_percentiles_of_all_pulls() -> None:
    assert latency_of([]) is None
    samples = [Sample(i, i + 0.001 * (1 + i), 1, 500) for i in range(101)]
    latency = latency_of(samples)
    assert latency is not None
    assert latency.pulls == 101
    assert latency.p50_ms == pytest.approx(51.0)
    assert latency.p99_ms == pytest.approx(100.0)
