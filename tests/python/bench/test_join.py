"""Runs of the benchmarks that are put together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.join import join


def run(folder: Path, revision: str, values: dict[str, float], **config: Any) -> Path:
    folder.mkdir()
    results = [
        {"part": part, "name": part, "value": value, "unit": "s", "ratio": None}
        for part, value in values.items()
    ]
    (folder / "all.json").write_text(json.dumps(results))
    facts = {
        "revision": revision,
        "workload": "full",
        "processors": 2,
        "part_seconds": dict.fromkeys(values, 1.0),
        "measured_again": {},
    }
    (folder / "config.json").write_text(json.dumps(facts | config))
    return folder


def test_the_last_run_of_a_part_counts(tmp_path: Path) -> None:
    first = run(tmp_path / "1", "aaa", {"pull": 1, "train": 2}, measured_again={"train": 1})
    second = run(tmp_path / "2", "bbb", {"train": 3, "grow": 4})
    third = run(tmp_path / "3", "aaa", {"grow": 5})
    results, config = join([first, second])
    assert [(r["part"], r["value"]) for r in results] == [("pull", 1), ("train", 3), ("grow", 4)]
    assert config["joined"] == {"train": "bbb", "grow": "bbb"}
    assert config["measured_again"] == {}
    results, config = join([first, second, third])
    assert [r["value"] for r in results] == [1, 3, 5]
    assert config["joined"] == {"train": "bbb"}


def test_an_unfinished_part_is_left_out(tmp_path: Path) -> None:
    first = run(tmp_path / "1", "aaa", {"pull": 1})
    second = run(tmp_path / "2", "bbb", {"pull": 2}, part_seconds={})
    results, config = join([first, second])
    assert [r["value"] for r in results] == [1]
    assert config["joined"] == {}


def test_runs_of_other_sizes_are_refused(tmp_path: Path) -> None:
    first = run(tmp_path / "1", "aaa", {"pull": 1})
    second = run(tmp_path / "2", "bbb", {"pull": 2}, workload="smoke")
    with pytest.raises(SystemExit, match="workload smoke, not full"):
        join([first, second])


def test_a_run_that_was_joined_keeps_the_revisions_of_its_parts(tmp_path: Path) -> None:
    first = run(
        tmp_path / "1", "aaa", {"pull": 1, "grow": 2},
        joined={"grow": "old"}, measured_again={"pull": 1},
    )  # fmt: skip
    second = run(tmp_path / "2", "bbb", {"move": 3})
    _, config = join([first, second])
    assert config["joined"] == {"grow": "old", "move": "bbb"}
    assert config["measured_again"] == {"pull": 1}
