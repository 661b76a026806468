"""The run of checks: bounded, and no check hides another. The documents of their names."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from petps.doctor import Finding, Level, Subject, all_checks, diagnose, findings_markdown, registry
from petps.doctor.finding import ok
from petps.doctor.mounts import FILE_SYSTEMS
from petps.doctor.registry import Check
from petps.doctor.work import in_time
from petps.errors import DeadlineExceeded, IoError
from tests.python.doctor.fake import FakeFacts

ROOT = Path(__file__).resolve().parents[3]


def _check(name: str, run: object) -> Check:
    return Check(name, "topic", "things", "a reason", run)  # type: ignore[arg-type]


def test_a_check_without_an_answer_is_a_fault_and_the_others_report() -> None:
    release = threading.Event()

    def hangs(subject: Subject) -> Iterator[Finding]:
        yield ok("begins")
        release.wait()

    def answers(subject: Subject) -> Iterator[Finding]:
        yield ok("fine")

    checks = [_check("stuck", hangs), _check("fine", answers)]
    try:
        findings = diagnose(Subject(FakeFacts()), checks, seconds=20.0)
    finally:
        release.set()
    assert [(finding.name, finding.level) for finding in findings] == [
        ("stuck", Level.OK), ("stuck", Level.FAULT), ("fine", Level.OK),
    ]  # fmt: skip
    assert "no answer within 20 s" in findings[1].seen


def test_what_hangs_before_the_checks_is_named() -> None:
    release = threading.Event()
    with pytest.raises(DeadlineExceeded, match=r"my.pool did not answer within 0.1 s"):
        in_time(release.wait, 0.1, "my.pool")
    release.set()
    assert in_time(lambda: 7, 100.0, "seven") == 7
    with pytest.raises(IoError):
        in_time(_fail, 100.0, "an error")


def _fail() -> None:
    raise IoError("gone")


def test_an_error_is_a_fault_and_a_mistake_a_warning() -> None:
    def fails(subject: Subject) -> Iterator[Finding]:
        yield ok("before")
        raise IoError("the disk is gone")

    def breaks(subject: Subject) -> Iterator[Finding]:
        raise KeyError("odd")

    findings = diagnose(Subject(FakeFacts()), [_check("a", fails), _check("b", breaks)])
    assert [(finding.name, finding.level) for finding in findings] == [
        ("a", Level.OK), ("a", Level.FAULT), ("b", Level.WARNING),
    ]  # fmt: skip
    assert findings[1].seen == "the disk is gone"
    assert "IO_ERROR" in findings[1].remedy


def test_names_are_unique_and_fit_an_anchor() -> None:
    names = [known.name for known in all_checks()]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) for name in names)


def test_the_document_has_every_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "CHECK_SECONDS", 20.0)
    document = ROOT / "docs" / "reference" / "findings.md"
    assert document.read_text() == findings_markdown(), "run petps doctor --markdown"


def test_the_file_systems_are_those_of_the_support_table() -> None:
    text = (ROOT / "native" / "media" / "DURABILITY.md").read_text()
    table = text.split("| file system | holes are found by")[1].split("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert [row[0].strip() for row in rows] == [system.name for system in FILE_SYSTEMS]
    # "yes" without a condition, and nothing else, is no finding.
    safe = {row[0].strip() for row in rows if row[-1].strip().split(",")[0] == "yes"}
    assert safe == {system.name for system in FILE_SYSTEMS if system.level is Level.OK}
