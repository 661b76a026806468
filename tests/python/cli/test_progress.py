"""Progress bars: shown on a terminal, absent from a pipe."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

from tests.python.cli.conftest import Command, save_rows


def run_on_a_terminal(*arguments: str) -> str:
    """Return what a command writes to standard error when that is a terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "petps.cli", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs) as process:
        os.close(theirs)
        parts = []
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux reports the closed other side this way
                break
            parts.append(part)
        os.close(ours)
        assert process.wait(60) == 0
    return b"".join(parts).decode()


def test_bars_show_only_on_a_terminal(run: Command, pool: Path, tmp_path: Path) -> None:
    save_rows(tmp_path / "rows.npz")
    shown = run_on_a_terminal("load", str(pool), "items", str(tmp_path / "rows.npz"))
    assert "loading items" in shown
    assert "1000/1000" in shown
    assert "verifying" in run_on_a_terminal("verify", str(pool))
    assert "exporting items" in run_on_a_terminal("export", str(pool), str(tmp_path / "base"))
    quiet = run_on_a_terminal("load", str(pool), "items", str(tmp_path / "rows.npz"), "--json")
    assert quiet == ""
    assert "loading" not in run("load", pool, "items", tmp_path / "rows.npz")
