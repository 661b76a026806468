"""The check of a commit's subject: what it accepts, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "check_subject.py"


def check(text: str, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "subject",
    [
        "index: accept a miss only if no probed bucket changed",
        "bench, tests: name locals by what they hold",
        "petps/cli: process a file in chunks",
        "codec: compress rows",
        "tests: seed each run",
        'Revert "index: count each change"',
        "fixup! index: count each change",
    ],
)
def test_accepts(subject: str) -> None:
    assert check(subject) == (0, "")


@pytest.mark.parametrize(
    ("subject", "fault"),
    [
        ("Fixed a bug", "expected 'room: imperative'"),
        ("index:no space", "expected 'room: imperative'"),
        ("index: counts each change", "'counts' is no imperative"),
        ("index: added a count", "'added' is no imperative"),
        ("index: counting each change", "'counting' is no imperative"),
        ("index: count each change.", "full stop"),
        ("index: count " + "x" * 60, "at most 72"),
    ],
)
def test_refuses(subject: str, fault: str) -> None:
    status, errors = check(f"tests: add one\n{subject}")
    assert status == 1
    assert fault in errors
    assert "tests: add one" not in errors


def test_a_message_needs_a_body(tmp_path: Path) -> None:
    message = tmp_path / "message"
    message.write_text("index: count each change\n\n# a comment of git\n")
    status, errors = check("", "--file", str(message))
    assert status == 1
    assert "the body is missing" in errors
    message.write_text("index: count each change\n\n# ------------------------ >8 ---\ndiff\n")
    assert check("", "--file", str(message))[0] == 1
    message.write_text("index: count each change\n\nA reader missed a moving key.\n")
    assert check("", "--file", str(message)) == (0, "")
