"""Fixtures: the real command in this process, a pool, and rows that identify their key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from typer.testing import CliRunner, Result

from petps.cli import app

DIM = 4
COUNT = 1000


class Command:
    """Runner of `petps ...`. Its output is not wrapped at a terminal's width."""

    def __call__(self, *arguments: object) -> str:
        """Return standard output and error of a command that must succeed."""
        return self._succeed(*arguments).output

    def json(self, *arguments: object) -> Any:
        """Return the report of a command that must succeed."""
        return json.loads(self._succeed(*arguments, "--json").stdout)

    def fails(self, code: int, *arguments: object) -> str:
        """Return standard error of a command that must fail with ``code``."""
        result = self._run(*arguments)
        assert result.exit_code == code, (result.exit_code, result.output, result.exception)
        assert "Traceback" not in result.output
        return result.stderr

    def reports(self, code: int, *arguments: object) -> str:
        """Return standard output of a command that must exit with ``code`` after its report."""
        result = self._run(*arguments)
        assert result.exit_code == code, (result.exit_code, result.output, result.exception)
        assert isinstance(result.exception, SystemExit)
        return result.stdout

    def _succeed(self, *arguments: object) -> Result:
        result = self._run(*arguments)
        assert result.exit_code == 0, result.output
        return result

    def _run(self, *arguments: object) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def run() -> Command:
    return Command()


@pytest.fixture
def pool(tmp_path: Path, run: Command) -> Path:
    path = tmp_path / "my.pool"
    run("create", path, "--table", f"items:{DIM}:f32:10k", "--durability", "process")
    return path


def keys_and_rows(
    count: int = COUNT, dim: int = DIM
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return shuffled keys, and rows that identify their key."""
    keys = np.random.default_rng(5).permutation(count).astype(np.int64)
    return keys, expected(keys.astype(np.uint64), dim)


def expected(keys: npt.NDArray[np.uint64], dim: int = DIM) -> npt.NDArray[np.float32]:
    """Return the rows of ``keys``."""
    rows: npt.NDArray[np.float32] = np.empty((len(keys), dim), np.float32)
    rows[:] = np.add.outer(keys.astype(np.float32), np.arange(dim, dtype=np.float32) / 8)
    return rows


def save_rows(path: Path) -> Path:
    """Save COUNT keys and rows in a .npz file."""
    keys, rows = keys_and_rows()
    np.savez(path, keys=keys, rows=rows)
    return path


@pytest.fixture
def filled(run: Command, pool: Path, tmp_path: Path) -> Path:
    """Return the pool with COUNT rows."""
    run("load", pool, "items", save_rows(tmp_path / "rows.npz"))
    return pool
