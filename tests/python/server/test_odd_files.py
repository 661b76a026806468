"""Files that a server reads again while it serves: pipes in their place, and no answer at all."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from petps import config
from petps.delta.kafka import options
from petps.errors import InvalidArgument, NotFound, Unavailable
from petps.regular_file import NOT_REGULAR, read_regular_file
from petps.server import Serving, access, credentials, process, tls
from petps.server.access_file import AccessFile, Entry, hash_of, read_access_file
from petps.server.shard_map import MapFile
from tests.python.server.conftest import settings
from tests.python.waiting import wait_until


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


@pytest.fixture
def file(tmp_path: Path) -> AccessFile:
    opened = AccessFile(tmp_path / "access.json")
    for name in ("inference", "other"):
        opened.add(Entry(name=name, token_sha256=hash_of(name), roles=["read"], models="*"))
    return opened


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def serving(pool: Path, file: AccessFile, tmp_path: Path, lines: list[str]) -> Iterator[Serving]:
    configured = settings(pool, access={"file": tmp_path / "access.json"})
    with Serving(configured, log=lines.append) as started:
        yield started


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(read_access_file, id="access file"),
        pytest.param(tls._bytes_of, id="key"),
        pytest.param(lambda path: MapFile(path).read(), id="shard map"),
        pytest.param(config.load, id="configuration"),
        pytest.param(lambda path: options._read_password(str(path)), id="password"),
    ],
)
def test_a_pipe_is_refused_and_not_waited_for(pipe: Path, read: Callable[[Path], object]) -> None:
    with pytest.raises((InvalidArgument, NotFound)) as caught:
        read(pipe)
    assert NOT_REGULAR in str(caught.value)
    assert str(pipe) in str(caught.value)


def test_folders_devices_and_links(tmp_path: Path) -> None:
    for path in (tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match="put a regular file in its place"):
            read_regular_file(path, 10)
    (tmp_path / "file").write_bytes(b"0123456789")
    (tmp_path / "link").symlink_to("file")  # as Kubernetes makes them
    assert read_regular_file(tmp_path / "link", 10) == b"0123456789"
    assert read_regular_file(tmp_path / "link", 4) == b"01234"


def test_a_pipe_in_the_place_of_the_access_file_keeps_no_revocation_from_counting(
    serving: Serving, file: AccessFile, tmp_path: Path
) -> None:
    path = tmp_path / "access.json"
    content = path.read_bytes()
    path.unlink()
    os.mkfifo(path)
    wait_until(lambda: NOT_REGULAR in serving.status()["access"]["error"])
    path.unlink()
    path.write_bytes(content)
    file.remove("inference")
    wait_until(lambda: serving.status()["access"]["grants"] == 1)
    assert serving.status()["access"]["error"] == ""


def test_files_that_do_not_answer_are_reported_and_do_not_keep_the_server(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    """Show what a file system does whose server is gone (NFS, mounted hard)."""
    answers, asked = threading.Event(), threading.Event()

    def check(self: access.Access) -> None:
        asked.set()
        answers.wait()

    monkeypatch.setattr(credentials, "LATE_SECONDS", 0.5)
    monkeypatch.setattr(credentials, "WAIT_SECONDS", 0.1)
    monkeypatch.setattr(access.Access, "check", check)
    assert asked.wait(60)
    problem = wait_until(
        lambda: next(
            (entry for entry in serving.status()["problems"] if entry["key"] == "access-file"), None
        )
    )
    assert "have not been read for" in problem["text"]
    assert any("a revoked grant stays valid" in line for line in lines)
    with pytest.raises(Unavailable, match="one of them does not answer"):
        serving.follow_credentials()
    serving._credentials.close()
    assert serving._credentials._thread.is_alive(), "close() has not waited for it"
    answers.set()
    serving._credentials._thread.join()


def test_files_that_answer_again_are_read(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    monkeypatch.setattr(credentials, "LATE_SECONDS", -1.0)
    assert serving.status()["access"]["error"]
    monkeypatch.setattr(credentials, "LATE_SECONDS", 3600.0)
    assert serving.status()["access"]["error"] == ""
    assert any("the files can be read again" in line for line in lines)


def test_a_link_beside_the_ready_file_is_not_in_the_way(serving: Serving, tmp_path: Path) -> None:
    ready_file, link = tmp_path / "ready", tmp_path / f".ready.{os.getpid()}"
    link.symlink_to(tmp_path / "victim")
    process._write_facts(serving, config=serving._config, ready_file=ready_file)
    assert json.loads(ready_file.read_text())["port"] == serving.port
    assert link.is_symlink()
    assert not (tmp_path / "victim").exists()


def test_a_link_at_the_name_of_the_new_ready_file_is_not_followed(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "urandom", bytes)  # somebody has guessed it
    link = tmp_path / f".ready.{bytes(8).hex()}"
    link.symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        process._write_facts(serving, config=serving._config, ready_file=tmp_path / "ready")
    assert link.is_symlink()
    assert not (tmp_path / "victim").exists()


def test_a_pipe_in_the_place_of_the_ready_file_does_not_keep_the_server(pipe: Path) -> None:
    process.remove_ready_file(pipe)
    assert pipe.exists(), "it is not the server's"
