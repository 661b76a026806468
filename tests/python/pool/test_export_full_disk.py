"""An export to a full disk leaves nothing behind, and its error gives the reason."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import petps
from petps.delta import DeltaError, Fault
from petps.errors import IoError, PetpsError, ResourceExhausted
from tests.python.small_disk import mount_small_disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mount_small_disk(tmp_path / "small", "256k") as folder:
        yield folder


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[petps.Pool]:
    with petps.create(tmp_path / "pool", durability="process") as opened:
        opened.create_table("items", dim=16, capacity=20_000)
        keys = np.arange(10_000, dtype=np.uint64)
        opened.push("items", keys, np.ones((10_000, 16), np.float32))
        yield opened


def test_an_export_to_a_full_disk_leaves_nothing(pool: petps.Pool, small_disk: Path) -> None:
    free = os.statvfs(small_disk).f_bavail
    with pytest.raises(ResourceExhausted, match=r"No space left on device; nothing is left of it"):
        pool.export(small_disk / "deep")
    assert list(small_disk.iterdir()) == []
    assert os.statvfs(small_disk).f_bavail == free
    # An existing folder stays, with its content.
    kept = small_disk / "kept"
    kept.mkdir()
    (kept / "mine").write_text("mine")
    with pytest.raises(ResourceExhausted):
        pool.export(kept)
    assert [file.name for file in kept.iterdir()] == ["mine"]


def test_the_error_names_files_that_could_not_be_removed(
    pool: petps.Pool, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed = Path.unlink

    def fails(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".chunks":
            raise OSError(5, "Input/output error")
        removed(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", fails)
    with pytest.raises(ResourceExhausted, match=r"remove what is left of it: .*/data/.*\.chunks"):
        pool.export(small_disk / "base")


def test_an_io_error_leaves_nothing(
    pool: petps.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: object, content: object, **_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("petps.checkpoint.files.publish_file", fails)
    with pytest.raises(IoError, match=r"Input/output error; nothing is left of it"):
        pool.export(tmp_path / "base")
    assert not (tmp_path / "base").exists()


@pytest.mark.parametrize("kind", [DeltaError, ResourceExhausted])
def test_an_error_of_petps_keeps_its_class_and_attributes(
    pool: petps.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[PetpsError]
) -> None:
    def fails(*_: object, stamped: bool) -> Iterator[None]:
        yield from ()
        if kind is DeltaError:
            raise DeltaError(Fault.CHECKSUM, "altered")
        error = ResourceExhausted("full")
        error.report = "3 rows"
        raise error

    monkeypatch.setattr("petps.pool.export._read", fails)
    with pytest.raises(kind, match=r"^(checksum: altered|full); nothing is left of it$") as caught:
        pool.export(tmp_path / "base")
    assert vars(caught.value) in ({"fault": Fault.CHECKSUM}, {"report": "3 rows"})
