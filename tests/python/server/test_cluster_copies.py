"""A server whose push-fed partitions move: as source and as target, with an etcd in memory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest

import petps
import petps.v1.petps_pb2 as messages
from petps import _native
from petps.admin.client import AdminClient
from petps.checkpoint.files import LocalFiles
from petps.cluster.etcd import Etcd
from petps.cluster.records import Move, Received, Sent, dump
from petps.errors import DataLoss, FailedPrecondition, InvalidArgument, IoError, Unavailable
from petps.server import Serving
from petps.server.cluster import receiver
from petps.server.cluster.handover import Handovers
from petps.server.cluster.parts import Changes, path_of, read_part, write_part
from petps.server.cluster.pauses import Pauses
from petps.v1.service import CODE_KEY
from tests.python.server.conftest import Start, Stub
from tests.python.server.test_cluster import (
    HERE,
    KEYS,
    PARTITIONS,
    THERE,
    MemoryEtcd,
    etcd,
    follow,
    map_text,
    owned,
    put_map,
    state_of,
)
from tests.python.waiting import wait_until

__all__ = ["etcd"]  # a fixture

Connect = Callable[[Serving], Stub]
ALL = np.arange(400, dtype=np.uint64)
MINE = ALL[_native.partition_of(ALL, PARTITIONS) == 3]
OTHERS = ALL[_native.partition_of(ALL, PARTITIONS) != 3]


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """Return a pool that only pushes feed, with all rows."""
    path = tmp_path / "pool"
    with petps.create(path, durability="process") as opened:
        opened.create_table("items", dim=4, capacity=1000)
        opened.push("items", ALL, np.ones((len(ALL), 4), np.float32))
    return path


@pytest.fixture
def serve(start: Start, tmp_path: Path, etcd: MemoryEtcd) -> Callable[[], Serving]:
    return lambda: start(
        server={"address": HERE},
        cluster={"endpoints": ["http://127.0.0.1:1"], "store": str(tmp_path / "store")},
    )


class Client:
    """A client of one server, whatever the map says. A method returns the code of its error."""

    def __init__(self, stub: Stub) -> None:
        self._stub = stub

    def push(self, keys: np.ndarray, value: float) -> str:
        rows = np.full((len(keys), 4), value, np.float32)
        return self._call(
            self._stub.Push,
            messages.PushRequest(table="items", keys=keys.tobytes(), rows=rows.tobytes()),
        )

    def pull(self, keys: np.ndarray) -> str:
        return self._call(self._stub.Pull, messages.PullRequest(table="items", keys=keys.tobytes()))

    def _call(self, call: Callable[..., Any], request: Any) -> str:
        try:
            call(request, timeout=30)
        except grpc.RpcError as error:
            return str(dict(error.trailing_metadata())[CODE_KEY])
        return ""


def rows_of(serving: Serving) -> dict[int, float]:
    """Return the first value of each row of partition 3."""
    table = serving._tables.find("default@0", "items")
    keys = table.keys()
    keys = keys[_native.partition_of(keys, PARTITIONS) == 3]
    out = np.empty((len(keys), 4), np.float32)
    table.pull(keys, out)
    return dict(zip(keys.tolist(), out[:, 0].tolist(), strict=True))


def put_move(etcd: MemoryEtcd, move: Move) -> None:
    etcd.commit((), {KEYS.move(3): dump(move)})


def sent_of(etcd: MemoryEtcd) -> Sent | None:
    return state_of(etcd).sent.get(3)


OUT = Move(3, HERE, THERE, "follow", "wish", 2, is_copied=True, pause_ms=60_000)
IN = Move(3, THERE, HERE, "follow", "wish", 2, is_copied=True, pause_ms=60_000)


def start_sending(serving: Serving, etcd: MemoryEtcd) -> None:
    put_map(etcd, 2, list(range(PARTITIONS)))
    follow(serving, lambda: owned(serving) == "0-7")
    put_move(etcd, OUT)
    wait_until(lambda: (sent := sent_of(etcd)) is not None and sent.is_close)


def content_of(tmp_path: Path, sent: Sent) -> dict[int, float]:
    """Return what a target would have of a copy."""
    rows: dict[int, float] = {}
    files = LocalFiles(tmp_path / "store")
    for number in range(1, sent.parts + 1):
        for changes in read_part(files, path_of("default", 3, sent.copy, number)):
            values = changes.rows.view(np.float32)[:, 0]
            rows |= dict(zip(changes.keys.tolist(), values.tolist(), strict=True))
            for key in changes.deleted.tolist():
                rows.pop(key, None)
    return rows


def test_a_source_sends_every_push_and_then_takes_no_more(
    serve: Callable[[], Serving], etcd: MemoryEtcd, tmp_path: Path, connect: Connect
) -> None:
    serving = serve()
    client = Client(connect(serving))
    start_sending(serving, etcd)
    assert client.push(MINE[:5], 2.0) == ""
    with (
        pytest.raises(Unavailable, match="moves from or to this server"),
        AdminClient(serving._config.pool.path) as admin,
    ):
        admin.load("items", MINE[:1], np.ones((1, 4), np.float32))
    put_move(etcd, replace(OUT, phase="handover"))
    wait_until(lambda: (sent := sent_of(etcd)) is not None and sent.is_released)
    sent = sent_of(etcd)
    assert sent is not None
    assert content_of(tmp_path, sent) == rows_of(serving)
    assert client.push(MINE[:1], 3.0) == "WRONG_SHARD"
    assert client.push(OTHERS[:1], 3.0) == ""
    assert client.pull(MINE) == ""
    put_map(etcd, 3, [0, 1, 2, 4, 5, 6, 7])
    put_move(etcd, replace(OUT, phase="switch", map_version=3))
    follow(serving, lambda: owned(serving) == "0-2, 4-7")
    assert client.push(MINE[:1], 3.0) == "WRONG_SHARD"
    assert client.pull(MINE) == "WRONG_SHARD"
    etcd.commit((), {}, (KEYS.move(3), KEYS.sent(3)))
    wait_until(lambda: not serving._cluster.status()["paused"])  # type: ignore[union-attr]
    wait_until(lambda: not any((tmp_path / "store").rglob("*.npz")))
    assert client.push(MINE[:1], 3.0) == "WRONG_SHARD"


def test_a_handover_that_is_taken_back_goes_on_with_the_same_copy(
    serve: Callable[[], Serving], etcd: MemoryEtcd, tmp_path: Path, connect: Connect
) -> None:
    serving = serve()
    client = Client(connect(serving))
    start_sending(serving, etcd)
    put_move(etcd, replace(OUT, phase="handover"))
    wait_until(lambda: (sent := sent_of(etcd)) is not None and sent.is_released)
    first = sent_of(etcd)
    assert first is not None
    put_move(etcd, replace(OUT, attempt=2))
    wait_until(lambda: client.push(MINE[:3], 5.0) == "")
    put_move(etcd, replace(OUT, attempt=2, phase="handover"))
    wait_until(
        lambda: (sent := sent_of(etcd)) is not None and sent.is_released and sent.attempt == 2
    )
    second = sent_of(etcd)
    assert second is not None
    assert second.copy == first.copy
    assert second.parts > first.parts
    assert content_of(tmp_path, second) == rows_of(serving)


def test_a_promise_holds_after_a_restart_until_etcd_ends_it(
    serve: Callable[[], Serving], etcd: MemoryEtcd, connect: Connect
) -> None:
    serving = serve()
    start_sending(serving, etcd)
    put_move(etcd, replace(OUT, phase="handover"))
    wait_until(lambda: (sent := sent_of(etcd)) is not None and sent.is_released)
    serving.close()
    etcd.error = Unavailable("etcd does not answer")
    serving = serve()
    assert owned(serving) == "0-7"
    client = Client(connect(serving))
    assert client.push(MINE[:1], 3.0) == "WRONG_SHARD"
    assert client.pull(MINE[:1]) == "WRONG_SHARD"
    assert client.push(OTHERS[:1], 3.0) == ""
    etcd.error = None
    wait_until(lambda: client.pull(MINE[:1]) == "")  # it is not switched yet
    assert client.push(MINE[:1], 3.0) == "WRONG_SHARD"
    etcd.commit((), {}, (KEYS.move(3), KEYS.sent(3)))
    wait_until(lambda: client.push(MINE[:1], 3.0) == "")


def test_pulls_end_if_etcd_is_silent_after_the_promise(
    serve: Callable[[], Serving], etcd: MemoryEtcd, connect: Connect
) -> None:
    serving = serve()
    client = Client(connect(serving))
    start_sending(serving, etcd)
    put_move(etcd, replace(OUT, phase="handover", pause_ms=400))
    wait_until(lambda: (sent := sent_of(etcd)) is not None and sent.is_released)
    wait_until(lambda: client.pull(MINE) == "")  # on a busy machine it may be late once
    etcd.error = Unavailable("etcd does not answer")
    wait_until(lambda: client.pull(MINE) == "WRONG_SHARD")
    assert client.pull(OTHERS) == ""
    etcd.error = None
    wait_until(lambda: client.pull(MINE) == "")


def test_a_target_receives_and_takes_pushes_when_it_may(
    serve: Callable[[], Serving], etcd: MemoryEtcd, tmp_path: Path, connect: Connect
) -> None:
    put_map(etcd, 2, [])
    serving = serve()
    client = Client(connect(serving))
    files = LocalFiles(tmp_path / "store")
    send(files, 1, MINE[:4], 7.0)
    send(files, 2, MINE[2:6], 8.0, deleted=MINE[:1])
    put_move(etcd, IN)
    sent = Sent(3, THERE, "copy", 1, 2, 8, is_close=True)
    etcd.commit((), {KEYS.sent(3): dump(sent)})
    received = Received(3, HERE, "copy", 2)
    wait_until(lambda: state_of(etcd).received.get(3) == received)
    expected = {int(MINE[1]): 7.0, **{int(key): 8.0 for key in MINE[2:6]}}
    assert rows_of(serving) == expected  # nothing of its earlier life
    switched = replace(IN, phase="switch", map_version=3)
    etcd.commit((), {KEYS.map: map_text(3, [3]), KEYS.move(3): dump(switched)})
    follow(serving, lambda: owned(serving) == "3")
    assert client.pull(MINE) == ""
    assert client.push(MINE[:1], 9.0) == "WRONG_SHARD"
    serving.close()
    etcd.error = Unavailable("etcd does not answer")
    serving = serve()
    client = Client(connect(serving))
    assert client.push(MINE[:1], 9.0) == "WRONG_SHARD"  # it may not be open
    etcd.error = None
    put_move(etcd, replace(IN, phase="open", map_version=3))
    wait_until(lambda: client.push(MINE[:1], 9.0) == "")
    assert rows_of(serving) == {int(MINE[0]): 9.0, **expected}


def send(
    files: LocalFiles, number: int, keys: np.ndarray, value: float, deleted: np.ndarray = MINE[:0]
) -> None:
    rows = np.full((len(keys), 4), value, np.float32).view(np.uint8)
    stamps = np.zeros(len(keys), np.uint32)
    changes = Changes("default@0", "items", "f32", keys, rows, stamps, deleted)
    write_part(files, path_of("default", 3, "copy", number), [changes])


def test_a_copy_that_begins_again_replaces_the_one_before(
    serve: Callable[[], Serving], etcd: MemoryEtcd, tmp_path: Path, connect: Connect
) -> None:
    put_map(etcd, 2, [])
    serving = serve()
    files = LocalFiles(tmp_path / "store")
    send(files, 1, MINE[:4], 7.0)
    put_move(etcd, IN)
    etcd.commit((), {KEYS.sent(3): dump(Sent(3, THERE, "copy", 1, 1))})
    wait_until(lambda: state_of(etcd).received.get(3) == Received(3, HERE, "copy", 1))
    rows = np.full((1, 4), 2.0, np.float32).view(np.uint8)
    changes = Changes(
        "default@0", "items", "f32", MINE[5:6], rows, np.zeros(1, np.uint32), MINE[:0]
    )  # fmt: skip
    write_part(files, path_of("default", 3, "other", 1), [changes])
    etcd.commit((), {KEYS.sent(3): dump(Sent(3, THERE, "other", 1, 1))})
    wait_until(lambda: state_of(etcd).received.get(3) == Received(3, HERE, "other", 1))
    assert rows_of(serving) == {int(MINE[5]): 2.0}


@pytest.mark.parametrize(("table", "dtype", "reason"), [
    ("gone", "f32", "has no table 'gone' of instance 'default@0' that pushes feed"),
    ("items", "f16", "has 16 bytes a row (f32) here, and 16 (f16) at the owner"),
])  # fmt: skip
def test_a_target_says_why_it_cannot_receive(
    serve: Callable[[], Serving], etcd: MemoryEtcd, tmp_path: Path, table: str, dtype: str,
    reason: str,
) -> None:  # fmt: skip
    put_map(etcd, 2, [])
    serve()
    rows = np.zeros((1, 16), np.uint8)
    changes = Changes("default@0", table, dtype, MINE[:1], rows, np.zeros(1, np.uint32), MINE[:0])
    write_part(LocalFiles(tmp_path / "store"), path_of("default", 3, "copy", 1), [changes])
    put_move(etcd, IN)
    etcd.commit((), {KEYS.sent(3): dump(Sent(3, THERE, "copy", 1, 1))})
    wait_until(lambda: reason in getattr(state_of(etcd).received.get(3), "error", ""))
    assert state_of(etcd).received[3].parts == 0


def test_a_damaged_part_is_no_part(tmp_path: Path) -> None:
    files = LocalFiles(tmp_path)
    send(files, 1, MINE[:4], 7.0)
    path = tmp_path / path_of("default", 3, "copy", 1)
    content = path.read_bytes()
    for at in (0, content.index(MINE[:4].tobytes()) + 3, len(content) - 3):
        damaged = bytearray(content)
        damaged[at] ^= 0xFF
        path.write_bytes(damaged)
        with pytest.raises(DataLoss, match="is damaged"):
            list(read_part(files, path_of("default", 3, "copy", 1)))


def test_a_part_of_another_shape_is_damaged(tmp_path: Path) -> None:
    files, path = LocalFiles(tmp_path), path_of("default", 3, "copy", 1)
    rows = np.zeros(16, np.uint8)
    changes = Changes("default@0", "items", "f32", MINE[:1], rows, np.zeros(1, np.uint32), MINE[:0])
    write_part(files, path, [changes])
    with pytest.raises(DataLoss, match="is damaged: ValueError: rows have 1 dimensions"):
        list(read_part(files, path))


def test_a_target_says_why_it_does_not_receive_a_copy_with_a_strange_name(
    serve: Callable[[], Serving], etcd: MemoryEtcd
) -> None:
    put_map(etcd, 2, [])
    serve()
    put_move(etcd, IN)
    etcd.commit((), {KEYS.sent(3): dump(Sent(3, THERE, "../../other", 1, 1))})
    reason = "'../../other' is no name of a copy"
    wait_until(lambda: reason in getattr(state_of(etcd).received.get(3), "error", ""))


def test_a_target_says_so_whatever_keeps_it_from_receiving(
    serve: Callable[[], Serving], etcd: MemoryEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Any:
        raise MemoryError("a part is too long")

    monkeypatch.setattr(receiver, "read_part", fail)
    put_map(etcd, 2, [])
    serve()
    put_move(etcd, IN)
    etcd.commit((), {KEYS.sent(3): dump(Sent(3, THERE, "copy", 1, 1))})
    reason = "MemoryError: a part is too long"
    wait_until(lambda: getattr(state_of(etcd).received.get(3), "error", "") == reason)


def test_the_file_of_pauses_is_durable_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "pool.pauses.json"
    pauses = Pauses(path)
    assert pauses.at_start() == ([], [])
    pauses.keep(3, pulls=True)
    pauses.keep(5, pulls=False)
    pauses.pause(6)
    assert Pauses(path).at_start() == ([3, 5], [3])
    pauses.resume(3)
    assert Pauses(path).at_start() == ([5], [])
    path.write_text(json.dumps({"format": 2, "pushes": [], "pulls": []}))
    with pytest.raises(InvalidArgument, match=r"pauses\.json is damaged .*format 2"):
        Pauses(path)


def test_a_folder_that_is_gone_keeps_no_promise(tmp_path: Path) -> None:
    pauses = Pauses(tmp_path / "gone" / "pool.pauses.json")
    with pytest.raises(IoError):
        pauses.keep(3, pulls=True)
    assert pauses.at_start() == ([], [])


def test_a_table_of_the_target_must_be_push_fed(tmp_path: Path) -> None:
    with petps.create(tmp_path / "pool", durability="process") as opened:
        opened.create_table("items", dim=4, capacity=1000, feed="delta")
    tables = _native.Tables.open(str(tmp_path / "pool"))
    changes = Changes(
        "default@0", "items", "f32", MINE[:1], np.zeros((1, 16), np.uint8), np.zeros(1, np.uint32),
        MINE[:0],
    )  # fmt: skip
    with pytest.raises(FailedPrecondition, match="that pushes feed"):
        changes.apply(tables)
    tables.close()


def test_orders_are_read_often_while_pushes_wait_or_soon_will(
    etcd: MemoryEtcd, tmp_path: Path
) -> None:
    handovers = Handovers(
        cast("Etcd", etcd), KEYS, HERE, Pauses(tmp_path / "pool.pauses.json"), None,
        used_version=lambda: 2, owns=lambda partition: True, log=lambda line: None,
    )  # fmt: skip

    def is_urgent() -> bool:
        handovers.look(state_of(etcd), time.monotonic())
        assert handovers.is_busy
        return handovers.is_urgent

    put_map(etcd, 2, [0, 1, 2, 3])
    put_move(etcd, OUT)
    assert not is_urgent()  # all rows are copied first
    sent = Sent(3, HERE, "copy", OUT.attempt)
    etcd.commit((), {KEYS.sent(3): dump(sent)})
    assert not is_urgent()
    etcd.commit((), {KEYS.sent(3): dump(replace(sent, is_close=True))})
    assert is_urgent()
    for phase in ("handover", "switch", "open"):
        put_move(etcd, replace(OUT, phase=phase))
        assert is_urgent()
    etcd.commit((), {}, (KEYS.move(3), KEYS.sent(3)))
    handovers.look(state_of(etcd), time.monotonic())
    assert not handovers.is_urgent
    assert not handovers.is_busy
