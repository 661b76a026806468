"""The summary of `make test`: it counts what the suites did, and never loses a failure."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.run import (
    PYTEST_CLOSING,
    Finished,
    Outcome,
    close,
    in_parallel,
    read_junit,
    run,
    summarise,
)

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


def test_a_test_process_that_dies_ends_the_run_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_dies.py").write_text(
        "import os, pytest\n"
        "@pytest.mark.parametrize('number', range(8))\n"
        "def test_number(number): pass\n"
        "def test_dies(): os._exit(1)\n"
    )
    command = [sys.executable, "-m", "pytest", *in_parallel(2), str(tmp_path / "test_dies.py")]
    finished = run([*command, "-c", str(tmp_path / "pytest.ini")], seconds_max=100)
    assert (finished.status, finished.is_late) == (1, False)
    assert any("crashed while running" in line and "test_dies" in line for line in finished.lines)


def test_the_closing_line_is_no_line_of_a_stack() -> None:
    outcome = Outcome("pytest")
    lines = [
        "=== 7 passed, 1 skipped in 12.30s (0:00:12) ===",
        '  File "<string>", line 1 in <module>',
    ]
    close(outcome, Finished(0, lines), PYTEST_CLOSING)
    assert outcome.closing == "7 passed, 1 skipped in 12.30s (0:00:12)"
    close(outcome, Finished(-9, lines[1:], is_late=True), PYTEST_CLOSING)
    assert outcome.closing == "killed: it ran too long"
    assert outcome.failures == ["pytest: killed: it ran too long"]


def test_a_suite_that_died_without_reporting_is_a_failure() -> None:
    outcome = Outcome("suite", passed=3)
    close(outcome, Finished(137, ["killed"]), "tests passed")
    assert outcome.failed == 1
    assert outcome.closing == "exit status 137"


def test_a_grandchild_that_keeps_the_output_open_is_killed_at_the_limit() -> None:
    began = time.monotonic()
    finished = run(["sh", "-c", "echo begun; sleep 60; true"], seconds_max=5)
    assert time.monotonic() - began < 50
    assert finished == Finished(-9, ["begun"], is_late=True)
