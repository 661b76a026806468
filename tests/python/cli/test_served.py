"""Commands that name a pool by its path while a server has it open, and the audit log."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import petps_client
import pytest

import petps
from petps import _native, config
from petps.admin import socket_of
from petps.admin.client import AdminClient
from petps.checkpoint import split_by_partition
from petps.cli.commands import status as status_command
from petps.delta import TableSchema, open_log
from petps.errors import IoError, ResourceExhausted, Unavailable
from petps.pool import export
from petps.pool.audited import AuditedPool, audit_log_of
from petps.publish import Publisher
from petps.server import Serving
from tests.python.cli.conftest import COUNT, DIM, Command, expected
from tests.python.cli.test_server_target import settings
from tests.python.waiting import wait_until


def ignore(line: str) -> None:
    """Let the server log nothing, because it shares its output with the commands."""


@pytest.fixture
def served(filled: Path) -> Iterator[Serving]:
    # A pass of the scrubber would remove the row that a test damages.
    never: dict[str, dict[str, Any]] = {"pool": {"path": filled}, "scrub": {"every": "never"}}
    with Serving(config.merge(settings(filled), never, "test"), log=ignore) as serving:
        yield serving


def lines_of(pool: Path) -> list[dict[str, str]]:
    path = audit_log_of(pool)
    assert path is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        assert line.pop("time").endswith("+00:00")
        assert line.pop("who").startswith("uid ")
    return lines


@pytest.mark.usefixtures("served")
def test_rows_and_status_by_the_path(run: Command, filled: Path, tmp_path: Path) -> None:
    row = run.json("pull", filled, "items", 7)["rows"][0]["row"]
    assert row == expected(np.array([7], np.uint64))[0].tolist()
    run("push", filled, "items", "7=1,2,3,4")
    assert run.json("pull", filled, "items", 7)["rows"][0]["row"] == [1, 2, 3, 4]
    assert run.json("load", filled, "items", tmp_path / "rows.npz")["updated"] == COUNT
    status = run.json("status", filled)
    assert status["tables"][0]["rows"] == COUNT
    assert status["uptime_s"] >= 0  # it is the server's
    assert "petps://" not in run("instances", filled)


def test_waiting_needs_a_server(run: Command, filled: Path) -> None:
    message = run.fails(8, "status", filled, "--wait", "0.01")
    assert "is not ready after 0.01 s: no server has it open" in message


def test_waiting_does_not_take_silence_for_ready(
    run: Command, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server answers on its native port before it has said whether it is ready."""
    report = run.json("status", filled)
    serving = {**report, "uptime_s": 0.0}
    monkeypatch.setattr(status_command, "_read", lambda target: serving)
    message = run.fails(8, "status", filled, "--wait", "0.01")
    assert "is not ready after 0.01 s: starting: it has not said yet" in message
    monkeypatch.setattr(status_command, "_read", lambda target: {**serving, "unready": None})
    assert run.json("status", filled, "--wait", "0.01")["uptime_s"] == 0.0


@pytest.mark.parametrize("is_served", [False, True])
def test_tables_and_instances_are_created_alike(
    run: Command, filled: Path, is_served: bool
) -> None:
    with Serving(settings(filled), log=ignore) if is_served else nullcontext():
        report = run.json("create", filled, "--add", "--table", "ads:8:f16:2k")
        (table,) = report["tables"]
        assert (table["name"], table["dtype"], table["capacity"]) == ("ads", "f16", 2000)
        assert (table["instance"], table["added"]) == ("default@0", True)
        again = run.json("create", filled, "--add", "--table", "ads:8:f16:2k")
        assert again["tables"] == [table | {"added": False}]
        message = run.fails(4, "create", filled, "--add", "--table", "ads:9:f16:2k")
        assert "exists already, with dim 8 f16 and capacity 2,000" in message
        message = run.fails(2, "create", filled, "--add", "--table", "x:5000:f32:1k")
        assert "dim 5000 is outside 1..4096" in message
        message = run.fails(5, "create", filled, "--add", "--table", "x:4:f32:900000m")
        assert "table 'x'" in message
        report = run.json("create", filled, "--add", "--instance", "default@1")
        assert sorted(report["tables"]) == ["ads", "items"]
        again = run.json("create", filled, "--add", "--table", "ads:8:f16:2k")
        assert again["tables"] == [table | {"added": False}]  # of the instance that is served
        message = run.fails(2, "create", filled, "--add", "--table", "y:5000000000:f32:1k")
        assert "dim 5000000000 is outside 1..4096" in message
        assert "exists already" in run.fails(
            4, "create", filled, "--add", "--instance", "default@1"
        )
        run("push", filled, "ads", f"1={','.join('1' * 8)}", "--model", "default@1")
        report = run.json(
            "create", filled, "--add", "--model", "other", "--table", "items:2:f32:1k"
        )
        assert report["tables"][0]["instance"] == "other@0"
    with petps.open(filled) as pool:
        assert {(info.instance, info.name) for info in pool.tables()} == {
            ("default@0", "items"), ("default@0", "ads"), ("default@1", "items"),
            ("default@1", "ads"), ("other@0", "items"),
        }  # fmt: skip
        assert pool.verify().clean
    assert {"what": "create instance default@1"} in lines_of(filled)
    failed = [line["failed"].split(":")[0] for line in lines_of(filled) if "failed" in line]
    # The client of a server refuses a dim itself.
    assert [name for name in failed if name != "InvalidArgument"] == [
        "ResourceExhausted", "AlreadyExists",
    ]  # fmt: skip


def test_an_instance_that_fails_leaves_nothing(run: Command, filled: Path) -> None:
    run("create", filled, "--add", "--table", "ads:8:f16:2k")

    class Full:
        def __init__(self, native: _native.Tables) -> None:
            self._native, self.count = native, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._native, name)

        def create_table(self, *arguments: Any, **options: Any) -> Any:
            self.count += 1
            if self.count == 2:
                raise ResourceExhausted("no space left")
            return self._native.create_table(*arguments, **options)

    native = _native.Tables.open(str(filled))
    full: Any = Full(native)
    with pytest.raises(ResourceExhausted):
        AuditedPool(full, "test", is_borrowed=True).create_instance("default@1")
    assert [instance.name for instance in native.instances()] == ["default@0"]
    assert len(native.tables()) == 2
    native.close()


def test_an_export_beside_pushes_is_a_base(
    run: Command, served: Serving, filled: Path, tmp_path: Path
) -> None:
    stop = threading.Event()

    def push() -> None:
        pushes = 0
        with petps_client.connect(f"petps://127.0.0.1:{served.port}") as client:
            while not stop.is_set():
                keys = np.arange(0, COUNT, 2, dtype=np.uint64)
                factor = 1 + pushes % 3
                client.push("items", keys, factor * expected(keys))
                pushes += 1

    thread = threading.Thread(target=push)
    thread.start()
    try:
        report = run.json("export", filled, tmp_path / "base")
    finally:
        stop.set()
        thread.join()
    assert report["folder"] == str(tmp_path / "base")
    assert report["tables"] == [{"name": "items", "rows": COUNT}]
    run("create", tmp_path / "other", "--table", f"items:{DIM}:f32:10k")
    run("load", tmp_path / "other", "items", tmp_path / "base")
    with petps.open(tmp_path / "other") as pool:
        keys = np.arange(COUNT, dtype=np.uint64)
        rows = pool.pull("items", keys)
    factors = rows[1:, -1:] / expected(keys)[1:, -1:]
    assert (factors[::2] == 1).all()  # odd keys
    assert np.isin(factors, (1, 2, 3)).all()
    np.testing.assert_array_equal(rows[1:], factors * expected(keys)[1:])
    message = run.fails(4, "export", filled, tmp_path / "base")
    assert str(tmp_path / "base") in message


@pytest.mark.usefixtures("served")
def test_an_export_whose_caller_goes_away_leaves_no_base(
    filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("petps.server.admin.ROWS_REPORTED", 1)
    left = threading.Event()

    class Gone(Exception):
        pass

    def leave(table: str, rows: int) -> Any:
        left.set()
        raise Gone

    split: Any = split_by_partition

    def slow(*arguments: Any, progress: Callable[[int], None], **options: Any) -> Any:
        def advance(count: int) -> None:
            progress(count)
            assert left.wait(30)
            wait_until(lambda: is_gone(progress))

        return split(*arguments, progress=advance, **options)

    def is_gone(progress: Callable[[int], None]) -> bool:
        progress(0)  # raises once the server knows that the caller has gone
        return False

    monkeypatch.setattr(export, "split_by_partition", slow)
    with AdminClient(filled) as client, pytest.raises(Gone):
        client.export(tmp_path / "base", bar=leave)
    wait_until(lambda: all(thread.name != "petps-export" for thread in threading.enumerate()))
    assert not (tmp_path / "base").exists() or not list((tmp_path / "base").rglob("*.json"))
    monkeypatch.setattr(export, "split_by_partition", split)
    shutil.rmtree(tmp_path / "base", ignore_errors=True)
    with AdminClient(filled) as client:
        assert client.export(tmp_path / "base")["tables"] == [{"name": "items", "rows": COUNT}]


def test_a_served_pool_is_checked(run: Command, served: Serving, filled: Path) -> None:
    report = run.json("verify", filled)
    assert (report["rows"], report["clean"], report["complete"]) == (COUNT, True, True)
    assert "clean" in run("verify", filled)
    assert "--accept" in run.fails(6, "verify", filled, "--accept")
    row = expected(np.array([7], np.uint64)).tobytes()
    with filled.open("r+b") as file:  # damage a row
        at = file.read().index(row)
        file.seek(at)
        file.write(b"\xff")
    assert "1 faults" in run.fails(9, "verify", filled)
    with filled.open("r+b") as file:
        file.seek(at)
        file.write(row[:1])
    assert served.status()["pool"]["failed"] is False


def test_a_stop_ends_long_work(
    served: Serving, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server closes although the pool is never checked to its end."""
    began = threading.Event()

    def verify(pool: petps.Pool, goes_on: Callable[[], bool]) -> _native.VerifyReport:
        began.set()
        while True:
            report = pool.native.verify(goes_on)
            if not report.complete:
                return report

    monkeypatch.setattr("petps.pool.audited.AuditedPool.verify", verify)
    results: list[BaseException] = []

    def ask() -> None:
        with AdminClient(filled) as client:
            try:
                client.verify()
            except Unavailable as error:
                results.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert began.wait(30)
    closing = threading.Thread(target=served.close)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    thread.join(30)
    (error,) = results
    assert "the server stops" in str(error)


def test_a_stop_waits_for_a_change_that_is_being_made(
    served: Serving, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instance is whole, although the server was told to stop while it was made."""
    began, go = threading.Event(), threading.Event()
    create = AuditedPool._copy_tables

    def slow(*arguments: Any) -> None:
        began.set()
        assert go.wait(30)
        create(*arguments)

    monkeypatch.setattr(AuditedPool, "_copy_tables", slow)
    results: list[str] = []

    def ask() -> None:
        with AdminClient(filled) as client:
            results.append(client.create_instance("default@1"))

    asking = threading.Thread(target=ask)
    asking.start()
    assert began.wait(30)
    closing = threading.Thread(target=served.close)
    closing.start()
    wait_until(lambda: not socket_of(filled).exists())
    go.set()
    closing.join(30)
    asking.join(30)
    assert results == ["default@1"]
    with petps.open(filled) as pool:
        assert [info.name for info in pool.tables("default@1")] == ["items"]


def test_verify_asks_whether_to_go_on(filled: Path) -> None:
    class Enough(Exception):
        pass

    def enough() -> bool:
        raise Enough

    with petps.open(filled) as pool:
        assert not pool.verify(lambda: False).complete
        assert pool.verify(lambda: True).complete
        with pytest.raises(Enough):
            pool.verify(enough)


def test_changes_leave_lines_in_the_audit_log(run: Command, filled: Path) -> None:
    for is_served in (False, True):
        new = f"default@{int(is_served) + 1}"
        with Serving(settings(filled), log=ignore) if is_served else nullcontext():
            run("create", filled, "--add", "--instance", new)
            run("alias", filled, new, "--yes")
            run("table", "grow", filled, "items", "--capacity", f"{30 + 10 * is_served}k")
            run.fails(6, "drop", filled, new, "--yes")
    path = audit_log_of(filled)
    assert path is not None
    lines = lines_of(filled)
    assert [line["what"] for line in lines if "failed" not in line] == [
        text
        for new, capacity in (("default@1", 30_000), ("default@2", 40_000))
        for text in (
            f"create instance {new}", f"switch alias default to {new}",
            f"grow table items to capacity {capacity}", f"drop instance {new}",
        )
    ]  # fmt: skip
    failures = [line for line in lines if "failed" in line]
    assert [line["what"] for line in failures] == [f"drop instance default@{n}" for n in (1, 2)]
    path.unlink()
    path.mkdir()
    for is_served in (False, True):
        with Serving(settings(filled), log=ignore) if is_served else nullcontext():
            message = run.fails(1, "alias", filled, "default@0", "--yes")
            assert f"the audit log {path} cannot be written, so nothing was changed" in message
            status = run.json("instances", filled)["instances"]
            assert [entry["state"] for entry in status] == ["frozen", "frozen", "serving"]


def test_nobody_is_asked_without_a_terminal(
    run: Command, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("create", filled, "--add", "--instance", "default@1")
    assert "confirm it with --yes" in run.fails(6, "alias", filled, "default@1")
    assert "confirm it with --yes" in run.fails(6, "drop", filled, "default@1")
    monkeypatch.setattr("petps.cli.options._is_anybody_there", lambda: True)
    message = run.fails(1, "alias", filled, "default@1")  # the answer is the end of the input
    assert "Let default name default@1 instead of default@0?" in message
    entries = run.json("instances", filled)["instances"]
    assert [entry["state"] for entry in entries] == ["serving", "following"]


def test_an_audit_log_that_is_a_link_is_refused(filled: Path, tmp_path: Path) -> None:
    path = audit_log_of(filled)
    assert path is not None
    path.unlink(missing_ok=True)
    path.symlink_to(tmp_path / "elsewhere")
    with AuditedPool.open(filled) as pool, pytest.raises(IoError, match="audit log"):
        pool.create_instance("default@1")
    assert not (tmp_path / "elsewhere").exists()


def test_the_log_level(run: Command, filled: Path) -> None:
    logger = logging.getLogger("petps.server.ingest")
    before = logging.getLogger("petps").level
    try:
        with Serving(settings(filled), log=ignore):
            assert not logger.isEnabledFor(logging.INFO)
            run("log-level", filled, "info")
            assert logger.isEnabledFor(logging.INFO)
            run("log-level", filled, "error")
            assert not logger.isEnabledFor(logging.WARNING)
            message = run.fails(2, "log-level", filled, "loud")
            assert "log level 'loud' is unknown; write debug, info, warning, error" in message
    finally:
        logging.getLogger("petps").setLevel(before)
    whats = [line["what"] for line in lines_of(filled)]
    assert whats[:2] == ["log level info", "log level error"]
    assert "so there is no log" in run.fails(6, "log-level", filled, "info")


def test_ingest_is_paused_limited_and_continued(run: Command, tmp_path: Path) -> None:
    path, schema = tmp_path / "p", TableSchema("items", "f32", DIM)
    run("create", path, "--table", f"items:{DIM}:f32:10k", "--feed", "delta")
    given: dict[str, dict[str, Any]] = {
        "pool": {"path": path},
        "server": {"port": 0, "http": False, "grpc": False},
        "ingest": {"log": tmp_path / "log"},
    }
    with closing(open_log(str(tmp_path / "log"), partitions=8)) as log:
        publisher = Publisher(log, "default", tables=[schema])
        publisher.begin_continue(None)

        def publish(step: int) -> int:
            keys = np.arange(50, dtype=np.uint64)
            publisher.publish("items", keys, np.full((50, DIM), step, np.float32))
            return publisher.commit(publisher.version + 1, step)

        with Serving(config.merge(None, given, "test"), log=ignore) as serving:

            def version() -> int:
                return int(serving.status()["ingest"]["version"])

            publish(1)
            first = publisher.version
            wait_until(lambda: version() == first)
            assert f"petps ingest resume {path}" in run("ingest", "pause", path)
            # It is true once the ingest reads no more.
            wait_until(lambda: bool(serving.status()["ingest"]["paused"]))
            assert "paused" in run("status", path)
            publish(2)
            run("ingest", "limit", path, "50k")
            assert serving._config.ingest.rows_per_second == 50_000
            assert version() == first
            run("ingest", "resume", path)
            wait_until(lambda: version() == publisher.version)
            assert run.json("pull", path, "items", 3)["rows"][0]["row"] == [2.0] * DIM
            run("ingest", "limit", path, "none")
            assert serving._config.ingest.rows_per_second == 0
            assert "must be a number of rows" in run.fails(2, "ingest", "limit", path, "x")
    assert [line["what"] for line in lines_of(path)] == [
        "ingest: pause", "ingest: limit to 50000 rows/s", "ingest: continue",
        "ingest: do not limit",
    ]  # fmt: skip


def test_ingest_without_a_log_or_a_server(run: Command, filled: Path) -> None:
    message = run.fails(6, "ingest", "pause", filled)
    assert f"no server has {filled} open, so there is no ingest" in message
    with Serving(settings(filled), log=ignore):
        assert "follows no log" in run.fails(6, "ingest", "pause", filled)
    assert "name the pool by its path" in run.fails(2, "ingest", "pause", "petps://127.0.0.1:1")


@pytest.mark.parametrize("is_served", [False, True])
def test_a_table_is_dropped_alike(run: Command, filled: Path, is_served: bool) -> None:
    with Serving(settings(filled), log=ignore) if is_served else nullcontext():
        run("create", filled, "--add", "--table", "ads:8:f16:2k")
        run("create", filled, "--add", "--model", "fed", "--table", "t:4:f32:1k", "--feed", "delta")
        assert "fed by deltas" in run.fails(
            6, "table", "drop", filled, "t", "--model", "fed", "--yes"
        )
        assert run.json("table", "drop", filled, "ads", "--model", "default", "--yes") == {
            "dropped": "ads"
        }
        run.fails(3, "table", "drop", filled, "ads", "--model", "default", "--yes")
        run.fails(3, "pull", filled, "ads", 1, "--model", "default")
        row = run.json("pull", filled, "items", 7, "--model", "default")["rows"][0]["row"]
        assert row == expected(np.array([7], np.uint64))[0].tolist()
    with petps.open(filled) as pool:
        assert {info.name for info in pool.tables("default")} == {"items"}
        assert pool.verify().clean
    assert {"what": "drop table ads of default@0"} in lines_of(filled)


def test_a_server_that_hangs_is_reported(
    run: Command, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("petps.admin.client.STATUS_SECONDS", 0.5)
    with petps.open(filled), socket.socket(socket.AF_UNIX) as hung:
        hung.bind(str(socket_of(filled)))
        hung.listen()  # the kernel accepts, as for a process that is stopped
        message = run.fails(7, "status", filled)
        assert "runs, but has not answered for 0.5 s" in message
