"""Short runs of the demo: from an empty folder to the last compared row, and interrupted runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.kafka.broker import Broker
from tests.system.servers import wait_until

pytestmark = pytest.mark.system

WAIT_SECONDS = 450.0


def command(tmp_path: Path, *arguments: str) -> list[str]:
    """Return the command line of the demo in a folder of the test."""
    short = ["--accesses", "40000", "--idle-seconds", "0.2", "--folder", str(tmp_path)]
    return [sys.executable, "-m", "examples.demo", *short, *arguments]


def run_demo(*arguments: str) -> dict[str, Any]:
    """Return the report of a demo that passes."""
    process = subprocess.run(
        arguments, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
    )
    assert process.returncode == 0, process.stderr
    report: dict[str, Any] = json.loads(process.stdout)
    assert report["passed"]
    assert 0 < report["restart"]["share_visible"] < 1
    assert report["comparison"]["rows_equal"] == report["rows"] > 10_000
    return report


@pytest.mark.parametrize("durability", ["power", "process"])
def test_every_row_is_compared(tmp_path: Path, durability: str) -> None:
    report = run_demo(*command(tmp_path, "--json", "--durability", durability))
    assert report["durability"] == durability
    comparison = report["comparison"]
    assert comparison["keys"] == 143_542
    assert comparison["rows_equal"] + comparison["missing_as_they_should"] == comparison["keys"]
    assert report["pull_during_apply"]["pulls"] > 0
    assert report["freshness"]["versions"] == report["deltas"] == 6
    assert report["asked"] > 1000
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_the_demo_runs_over_kafka(kafka: Broker, topic: Callable[[], str], tmp_path: Path) -> None:
    log = f"kafka://{kafka.address}/{topic()}"
    options = ("--json", "--log", log, "--kafka-option", "compression.type=zstd")
    assert run_demo(*command(tmp_path, *options))["log"] == log


def restore_interrupts() -> None:
    """Restore SIGINT: a background job ignores it, and its children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("signals", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGINT] * 3])
def test_an_interrupt_cleans_up(tmp_path: Path, signals: list[signal.Signals]) -> None:
    process = subprocess.Popen(
        command(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=restore_interrupts,
    )
    children = wait_for_children(process.pid)
    for number in signals:
        process.send_signal(number)
        time.sleep(0.05)
    _, errors = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert len(gone) == 2


def wait_for_children(pid: int) -> list[psutil.Process]:
    """Return the server and the trainer, once both exist."""

    def both_exist() -> list[psutil.Process]:
        children: list[psutil.Process] = psutil.Process(pid).children()
        has_server = any("serve" in child.cmdline() for child in children)
        return children if len(children) == 2 and has_server else []

    return wait_until("the demo starts its server", both_exist)


def test_the_demo_fails_if_its_server_dies(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    server = next(
        child for child in wait_for_children(process.pid) if "serve" in " ".join(child.cmdline())
    )
    os.kill(server.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode not in (0, 130)
    assert errors.startswith("error: ")
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []
