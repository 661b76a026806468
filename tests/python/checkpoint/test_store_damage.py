"""Files of a store that are missing, cut, swapped, altered or of a newer format; fsspec."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from petps.checkpoint import POLICIES, Checkpointer, Policy, Rows, Store, Table
from petps.checkpoint.files import FsspecFiles, LocalFiles
from petps.checkpoint.policy import TwoD
from petps.errors import DataLoss, IoError, PetpsError, Unimplemented
from tests.python.checkpoint.memory import MemoryFiles
from tests.python.checkpoint.replay import Replay, assert_same, check_versions, write_versions
from tests.python.checkpoint.test_store_crash import TABLES, steps

VERSIONS = 6


@pytest.fixture
def replay() -> Replay:
    return Replay(TABLES, steps(3, VERSIONS), deletes=0.1)


def filled(files: MemoryFiles | str, replay: Replay, policy: Policy | None = None) -> Store:
    store = Store.create(files, "m", list(TABLES.values()))
    writer = Checkpointer(store, policy or POLICIES["consecutive"](), replay)
    write_versions(writer, replay, range(1, VERSIONS + 1))
    return store


@pytest.mark.parametrize("policy", [POLICIES["consecutive"](), TwoD(ratio=0.0, resets=False)])
def test_damaged_rows_are_never_returned(replay: Replay, policy: Policy) -> None:
    """Damage every file: remove it, cut it, or flip a bit. Expect an error, or the right rows."""
    files = MemoryFiles()
    lineage = filled(files, replay, policy).state.lineage
    assert bool(lineage.sealed) == isinstance(policy, TwoD)
    whole = dict(files.held)
    errors = set()
    for path, body in whole.items():
        for damaged in (None, body[: len(body) // 2], b"", _turned(body)):
            held = dict(whole)
            if damaged is None:
                del held[path]
            else:
                held[path] = damaged
            try:
                store = Store.open(MemoryFiles(held))
                versions = [entry.version for entry in store.state.versions()]
                check_versions(store, replay, versions)
            except PetpsError as error:
                names_it = path.rpartition("/")[2].split(".")[0].lstrip("0") in str(error)
                errors.add((type(error), names_it))
    assert errors == {(DataLoss, True)}


def _turned(body: bytes) -> bytes:
    changed = bytearray(body)
    changed[2 * len(body) // 3] ^= 0x10
    return bytes(changed)


def test_an_error_names_the_newest_whole_version(replay: Replay) -> None:
    files = MemoryFiles()
    store = filled(files, replay)
    fourth = next(c for c in store.state.lineage.chunks if c.first == 4)
    del files.held[fourth.file]
    with pytest.raises(DataLoss, match=r"version 6: .*does not exist.*version 3 does not need it"):
        store.restore()
    assert_same(store.restore(3)["items"], replay.at("items", 3))
    *problems, lost = store.verify()
    assert any(fourth.file in problem for problem in problems)
    assert lost == "lost: versions 4 to 6, 3 of 6; version 3 is the newest that is whole"
    with pytest.raises(DataLoss, match=r"version 6: .*does not exist.*version 3 does not need it"):
        list(store.pieces("items"))
    second = next(c for c in store.state.lineage.chunks if c.first == 2)
    part = store.state.version(1).parts["dense"]
    for file in (second.file, part.file):
        del files.held[file]
    summary = "lost: versions 2 to 6, 5 of 6; only parts lost: version 1; no version is whole"
    assert store.verify()[-1] == summary
    base = next(c for c in store.state.lineage.chunks if c.first == 1)
    del files.held[base.file]
    with pytest.raises(DataLoss, match="every version needs it"):
        store.restore(1)


def test_swapped_files_are_detected(replay: Replay) -> None:
    files = MemoryFiles()
    store = filled(files, replay)
    first, second = (c.file for c in store.state.lineage.open_delta_chunks()[:2])
    files.held[first], files.held[second] = files.held[second], files.held[first]
    with pytest.raises(DataLoss, match="does not fit its checksum"):
        store.restore()


def test_a_newer_format_is_refused(replay: Replay) -> None:
    files = MemoryFiles()
    filled(files, replay)
    path = max(path for path in files.held if path.startswith("states/"))
    values = json.loads(files.held[path])
    values["format"] = "petps-store-3"
    files.held[path] = json.dumps(values).encode()
    with pytest.raises(Unimplemented, match="has format 3, this release reads 2: upgrade"):
        Store.open(files)


def test_any_filesystem_of_fsspec(replay: Replay, tmp_path: Path) -> None:
    store = filled("memory://petps-test-store", replay)
    assert isinstance(store._files, FsspecFiles)
    assert_same(Store.open("memory://petps-test-store").restore(4)["items"], replay.at("items", 4))
    other = Store.open("memory://petps-test-store")
    rows = Rows.of(Table.of("items", 2), [1], {"row": np.ones((1, 2), np.float32)})
    store.write(7, {"items": rows}, kind="delta")
    with pytest.raises(PetpsError, match="another writer made state"):
        other.write(7, {"items": rows}, kind="delta")
    store.purge(1)
    assert store.verify() == []


def test_a_file_removed_during_a_listing_hides_no_other(tmp_path: Path) -> None:
    """A writer removes states while a reader looks for the newest one."""
    files = LocalFiles(tmp_path)
    for number in range(64):
        files.write(f"states/{number}", [b"x"])
    stop = threading.Event()

    def churn() -> None:
        number = 0
        while not stop.is_set():
            files.write(f"states/new{number}", [b"x"])
            files.remove(f"states/new{number}")
            number += 1

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(300):
            assert {str(number) for number in range(64)} <= files.list("states").keys()
    finally:
        stop.set()
        thread.join()


def test_a_failed_write_removes_only_a_file_that_it_created(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    files.write("data/a", [b"first"])
    with pytest.raises(IoError, match="File exists"):
        files.write("data/a", [b"second"])

    def half() -> Iterator[bytes]:
        yield b"half"
        raise OSError(28, "No space left on device")

    with pytest.raises(IoError, match="No space left"):
        files.write("data/b", half())
    assert list(files.list("data")) == ["a"]
    assert files.read("data/a") == b"first"


@pytest.mark.parametrize("kind", [LocalFiles, FsspecFiles])
def test_a_size_that_cannot_be_read_is_an_io_error(
    tmp_path: Path, kind: type[LocalFiles] | type[FsspecFiles]
) -> None:
    (tmp_path / "data").write_bytes(b"a file where a folder should be")
    files = kind(str(tmp_path))
    with pytest.raises(IoError, match="Not a directory"):
        files.size("data/a")
