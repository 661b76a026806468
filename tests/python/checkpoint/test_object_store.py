"""A store on a real S3 server, which is killed with -9 at every operation of a writer.

The server is Versity's gateway on 127.0.0.1 (tests/s3). Does not cover: GCS and Azure; a server
that loses what it acknowledged; a bucket with versions or a life cycle.
"""

from __future__ import annotations

import gc
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import PurePosixPath

import numpy as np
import pytest

from petps.checkpoint import POLICIES, Checkpointer, Rows, Store, Table
from petps.checkpoint.files import FsspecFiles
from petps.errors import AlreadyExists, DataLoss, FailedPrecondition, IoError, NotFound
from tests.python.checkpoint.replay import Replay, check_versions, write_versions
from tests.python.checkpoint.test_store_crash import TABLES, policies, steps
from tests.s3.server import BUCKET, Server

VERSIONS = 6
PART_BYTES = 5 << 20  # the least that S3 accepts as a part of an upload


@pytest.fixture
def url(s3: Server) -> str:
    """Return a URL at which no other test writes."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture
def replay() -> Replay:
    return Replay(TABLES, steps(3, VERSIONS), deletes=0.1)


def of_another_process(url: str) -> FsspecFiles:
    """Return files that share no cache with those of Store.open(), which fsspec would let them."""
    return FsspecFiles(url, skip_instance_cache=True)


def objects_at(s3: Server, url: str) -> set[str]:
    """Return the objects below a URL, as the server holds them."""
    root = s3.path(url)
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_a_store_lives_on_s3(s3: Server, url: str, replay: Replay) -> None:
    store = Store.create(url, "m", list(TABLES.values()))
    writer = Checkpointer(store, policies()["2d"], replay)
    write_versions(writer, replay, range(1, VERSIONS + 1))
    check_versions(Store.open(of_another_process(url)), replay, range(1, VERSIONS + 1))
    store.purge(2)
    store.expect(None)  # a further state, so that no file waits for its removal
    store.tidy()
    assert store.verify() == []
    check_versions(Store.open(of_another_process(url)), replay, [VERSIONS - 1, VERSIONS])
    found = {path for path in objects_at(s3, url) if not path.startswith("states/")}
    assert found == store.state.files() | set(store.state.trash)


def test_the_slower_of_two_writers_is_refused(url: str, replay: Replay) -> None:
    store = Store.create(url, "m", list(TABLES.values()))
    write_versions(Checkpointer(store, POLICIES["full"](), replay), replay, [1])
    other = Store.open(of_another_process(url))
    rows = Rows.of(Table.of("items", 2), [1], {"row": np.ones((1, 2), np.float32)})
    store.write(2, {"items": rows}, kind="delta")
    with pytest.raises(FailedPrecondition, match="another writer made state"):
        other.write(2, {"items": rows}, kind="delta")
    assert Store.open(url).verify() == []


@pytest.mark.parametrize("names_condition", [True, False])
def test_one_of_many_creators_wins(
    url: str, names_condition: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the server does not say which condition failed."""
    from s3fs import core

    translate = core.translate_boto_error

    def translate_without_condition(error: Exception) -> Exception:
        getattr(error, "response", {}).get("Error", {}).pop("Condition", None)
        translated: Exception = translate(error)
        return translated

    if not names_condition:
        monkeypatch.setattr(core, "translate_boto_error", translate_without_condition)
    refused: list[int] = []

    def create(number: int) -> None:
        try:
            of_another_process(url).create("states/1", b"%d" % number)
        except AlreadyExists:
            refused.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 5
    assert int(FsspecFiles(url).read("states/1")) not in refused


def test_a_listing_hides_no_file_of_another_process(url: str) -> None:
    files, other = FsspecFiles(url), of_another_process(url)
    other.write("lines/a", [b"first"])
    assert list(files.list("lines")) == ["a"]
    other.write("lines/b", [b"second"])
    assert files.read("lines/b") == b"second"
    assert files.size("lines/b") == 6
    other.remove("lines/a")
    with pytest.raises(NotFound):
        files.size("lines/a")


def test_a_file_that_ends_too_early_is_data_loss(url: str) -> None:
    files = FsspecFiles(url)
    files.write("data/a", [b"0123456789"])
    for offset in (8, 10, 1000):
        with pytest.raises(DataLoss, match=r"data/a ends too early, at 10 bytes"):
            files.read_into("data/a", [(offset, memoryview(bytearray(4)))])


def write_in_parts(count: int, at_end: Callable[[], None]) -> Iterator[bytes]:
    """Yield ``count`` parts of an upload and a small piece, then call ``at_end``."""
    for _ in range(count):
        yield bytes(PART_BYTES)
    yield b"in the buffer"
    at_end()


@pytest.mark.parametrize("parts", [0, 2])
def test_a_half_uploaded_file_never_exists(s3: Server, url: str, parts: int) -> None:
    """The writer fails: what it has written is not even visible for a moment."""
    files = FsspecFiles(url, default_block_size=PART_BYTES)

    def fail() -> None:
        raise IoError("the disk is full")

    removed: list[str] = []
    files._fs.rm_file, rm_file = removed.append, files._fs.rm_file
    try:
        with pytest.raises(IoError, match=r"^the disk is full$"):
            files.write("data/a", write_in_parts(parts, fail))
        gc.collect()
    finally:
        files._fs.rm_file = rm_file
    assert removed == []
    assert objects_at(s3, url) == set()
    assert files.list("data") == {}
    uploads = files._fs.call_s3("list_multipart_uploads", Bucket=BUCKET)
    assert [u for u in uploads.get("Uploads", []) if u["Key"].startswith(url[len("s3://") :])] == []


@pytest.mark.parametrize("parts", [0, 2])
def test_a_server_killed_during_an_upload(s3: Server, url: str, parts: int) -> None:
    files = FsspecFiles(url, default_block_size=PART_BYTES)
    files.write("data/a", [b"whole"])
    try:
        with pytest.raises(IoError, match=rf"^{url}/data/b: .*check that the store's server"):
            files.write("data/b", write_in_parts(parts, s3.kill))
    finally:
        s3.kill()
        s3.start()
    gc.collect()
    assert list(files.list("data")) == ["a"]
    assert files.read("data/a") == b"whole"
    files.write("data/b", write_in_parts(parts, lambda: None))
    assert files.size("data/b") == parts * PART_BYTES + len(b"in the buffer")


class KilledServer:
    """Files whose server is killed at one operation that changes them, before or after it.

    After: the server has done what was asked, but its answer is lost.
    """

    def __init__(self, files: FsspecFiles, server: Server, *, is_after: bool) -> None:
        self._files, self._server, self._is_after = files, server, is_after
        self.name = files.name
        self.kill_at = 0  # which operation; 0: none
        self.operations: list[str] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._files, name)

    def _run(self, path: str, operation: Callable[[], None]) -> None:
        self.operations.append(path)
        is_due = len(self.operations) == self.kill_at
        if is_due and self._is_after:
            operation()
            self._server.kill()
            self._files.size(path)  # raises what the client raises
        elif is_due:
            self._server.kill()
        operation()

    def write(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        """See Files."""
        self._run(path, lambda: self._files.write(path, pieces))

    def create(self, path: str, content: bytes) -> None:
        """See Files."""
        self._run(path, lambda: self._files.create(path, content))

    def read(self, path: str) -> bytes:
        """See Files."""
        return self._files.read(path)

    def read_into(self, path: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """See Files."""
        self._files.read_into(path, pieces)

    def list(self, folder: str) -> dict[str, float]:
        """See Files."""
        return self._files.list(folder)

    def size(self, path: str) -> int:
        """See Files."""
        return self._files.size(path)

    def remove(self, path: str) -> None:
        """See Files."""
        self._run(path, lambda: self._files.remove(path))


@pytest.mark.parametrize("is_after", [False, True])
def test_the_server_is_killed_at_every_operation(
    s3: Server, url: str, replay: Replay, is_after: bool
) -> None:
    """The version fails, with an error that names the URL, or it exists. The writer continues."""
    files = KilledServer(FsspecFiles(url), s3, is_after=is_after)
    store = Store.create(files, "m", list(TABLES.values()))
    writer = Checkpointer(store, POLICIES["consecutive"](), replay)
    write_versions(writer, replay, [1, 2])
    operation, version, failed = 1, 3, set()
    while True:
        replay.now = version
        files.operations.clear()
        files.kill_at = operation
        error: IoError | None = None
        try:
            writer.write(version, {"dense": b"%d" % version})
        except IoError as raised:
            error = raised
        if len(files.operations) < operation:
            break  # a whole version needs fewer operations
        s3.kill()
        s3.start()
        files.kill_at = 0
        if error is not None:
            assert f"{url}/" in str(error)
            assert "check that the store's server answers" in str(error)
            failed.add(PurePosixPath(files.operations[operation - 1]).parent.name)
            writer.write(version, {"dense": b"%d" % version})  # the same writer continues
        check_versions(Store.open(of_another_process(url)), replay, range(1, version + 1))
        store.rollback(version - 1)
        operation += 1
    assert failed == {"data", "parts", "lines", "states"}
    check_versions(Store.open(of_another_process(url)), replay, range(1, version + 1))
    assert store.verify() == []


def test_a_failed_commit_leaves_the_state_of_another_writer(
    s3: Server, url: str, replay: Replay
) -> None:
    """Another writer commits first; then the slower one's request fails."""
    store = Store.create(url, "m", list(TABLES.values()))
    write_versions(Checkpointer(store, POLICIES["full"](), replay), replay, [1])
    files = of_another_process(url)
    other = Store.open(files)
    replay.now = 2
    Checkpointer(store, POLICIES["consecutive"](), replay).write(2, {"dense": b"2"})

    def fail(*_: object, **__: object) -> None:
        raise OSError("the connection was reset")

    pipe_file, files._fs.pipe_file = files._fs.pipe_file, fail
    with pytest.raises(IoError, match="the connection was reset"):
        other.keep(1)
    files._fs.pipe_file = pipe_file
    check_versions(Store.open(url), replay, [1, 2])
    other.keep(1)
    check_versions(Store.open(url), replay, [1, 2])
    assert Store.open(url).state.version(1).kept
