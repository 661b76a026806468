"""A runner of the real command in this process, and files of rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from typer.testing import CliRunner

from petps.cli import app

DIM = 4
COUNT = 1000


class Command:
    """Runner of `petps ...`. Its text has no line breaks where a terminal would wrap."""

    def __call__(self, *arguments: object) -> str:
        """Return standard output and error of a command that must succeed."""
        result = CliRunner().invoke(app, [str(each) for each in arguments])
        assert result.exit_code == 0, result.output
        return result.output

    def json(self, *arguments: object) -> Any:
        """Return the report of a command that must succeed."""
        result = CliRunner().invoke(app, [*(str(each) for each in arguments), "--json"])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    def fails(self, code: int, *arguments: object) -> str:
        """Return standard error of a command that must fail with ``code``."""
        result = CliRunner().invoke(app, [str(each) for each in arguments])
        assert result.exit_code == code, (result.exit_code, result.output, result.exception)
        assert "Traceback" not in result.output
        return result.stderr


@pytest.fixture
def petps_command() -> Command:
    return Command()


@pytest.fixture
def pool(tmp_path: Path, petps_command: Command) -> Path:
    path = tmp_path / "my.pool"
    petps_command("create", path, "--table", f"items:{DIM}:f32:10k", "--durability", "process")
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


WriteFile = Callable[[Path], list[Path]]
