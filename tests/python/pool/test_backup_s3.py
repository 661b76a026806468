"""Backups on a real S3 server, which is killed while they are written (tests/s3)."""

from __future__ import annotations

import uuid
from pathlib import Path

import numpy as np
import pytest

import petps
from petps.checkpoint.files import FsspecFiles
from petps.errors import IoError, PetpsError
from petps.pool.restore import list_backups, restore
from tests.python.pool.test_backup import rows_of
from tests.s3.server import BUCKET, Server


@pytest.fixture
def url(s3: Server) -> str:
    """Return a URL at which no other test writes."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.mark.parametrize("is_after", [False, True])
def test_a_server_killed_at_each_operation(
    s3: Server, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_after: bool
) -> None:
    """A backup then is written whole or not at all, and the next one is right."""
    rng = np.random.default_rng(3)
    with petps.create(tmp_path / "pool", durability="process") as pool:
        pool.create_table("items", dim=4, capacity=1000)
        pool.push("items", np.arange(500), rng.random((500, 4), np.float32))
        pool.back_up(url)
        kept = rows_of(pool)
        for kill_at in range(1, 20):
            killed = _kill_at(s3, monkeypatch, kill_at, is_after=is_after)
            pool.push("items", rng.integers(0, 600, 20), rng.random((20, 4), np.float32))
            pool.erase("items", [kill_at])
            before = [entry["version"] for entry in list_backups(url)]
            try:
                pool.back_up(url)
                failed = False
            except PetpsError:
                failed = True
            finally:
                monkeypatch.undo()
                if killed.done:
                    s3.start()
            versions = [entry["version"] for entry in list_backups(url)]
            assert versions[: len(before)] == before
            if len(versions) > len(before):  # also if its answer was lost
                kept = rows_of(pool)
            assert failed or len(versions) == len(before) + 1
            _check(url, tmp_path / "restored", kept)
            pool.back_up(url)
            kept = rows_of(pool)
            _check(url, tmp_path / "restored", kept)
            if not killed.done:
                return
    raise AssertionError("a backup has more operations than the test kills")


def _check(url: str, path: Path, rows: dict[str, dict[int, bytes]]) -> None:
    restore(url, path)
    with petps.open(path) as restored:
        assert rows_of(restored) == rows
    path.unlink()


class _Killed:
    done = False


def _kill_at(
    s3: Server, monkeypatch: pytest.MonkeyPatch, number: int, *, is_after: bool
) -> _Killed:
    """Kill the server at this operation that changes the store, before or after it is done."""
    killed = _Killed()
    count = 0

    def patched(name: str) -> None:
        original = getattr(FsspecFiles, name)

        def run(files: FsspecFiles, *arguments: object) -> None:
            nonlocal count
            count += 1
            if count == number and is_after:
                original(files, *arguments)
            if count == number:
                killed.done = True
                s3.kill()
                raise IoError("the server is gone")
            original(files, *arguments)

        monkeypatch.setattr(FsspecFiles, name, run)

    for name in ("write", "create", "remove"):
        patched(name)
    return killed
