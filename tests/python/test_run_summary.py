"""The summary of `make test`: it counts what the suites did, and never loses a failure."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.run import Finished, Outcome, close, read_junit, run, summarise

JUNIT = """<?xml version="1.0"?>
<testsuite>
  <testcase name="a" classname="x" status="run"/>
  <testcase name="b  # GetParam() = 3" classname="b  # GetParam() = 3" status="fail">
    <failure message=""/>
    <system-out>[ RUN      ] b
b_test.cc:7: Failure
1 is not 2
</system-out>
  </testcase>
  <testcase name="c" classname="x" status="notrun">
    <skipped message="SKIP_REGULAR_EXPRESSION_MATCHED"/>
    <system-out>[ RUN      ] c
c_test.cc:3: Skipped
this processor has no vpclmulqdq
</system-out>
  </testcase>
  <testcase name="d" classname="x"><skipped message="no such device"/></testcase>
</testsuite>
"""


def outcome_of(tmp_path: Path) -> Outcome:
    (tmp_path / "junit.xml").write_text(JUNIT)
    outcome = Outcome("suite")
    read_junit(outcome, tmp_path / "junit.xml")
    return outcome


def test_counts_and_reasons(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path)
    assert (outcome.passed, outcome.failed) == (1, 1)
    assert outcome.failures == ["b: \n    b_test.cc:7: Failure\n    1 is not 2"]
    assert outcome.skips == [
        ("this processor has no vpclmulqdq", "x::c"),
        ("no such device", "x::d"),
    ]


def test_last_line_is_the_sum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = Outcome("good", passed=4, closing="4 passed")
    assert summarise([good, outcome_of(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "5 passed, 1 failed, 2 skipped"
    assert summarise([good]) == 0


def test_a_suite_that_died_without_reporting_is_a_failure() -> None:
    outcome = Outcome("suite", passed=3)
    close(outcome, Finished(137, ["killed"]), "tests passed")
    assert outcome.failed == 1
    assert outcome.closing == "exit status 137"


def test_a_grandchild_that_keeps_the_output_open_is_killed_at_the_limit() -> None:
    began = time.monotonic()
    finished = run(["sh", "-c", "echo begun; sleep 20; true"], seconds_max=0.5)
    assert time.monotonic() - began < 10
    assert finished == Finished(-9, ["begun"])
