"""A server of a cluster whose etcd is in memory: the maps that it follows, and what it reports."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import petps
import petps.v1.petps_pb2 as messages
import petps.v1.petps_pb2_grpc as stubs
from petps import _native
from petps.admin.client import AdminClient
from petps.cluster.etcd import Access, Read
from petps.cluster.maps import ClusterMap
from petps.cluster.records import (
    Choice,
    Drop,
    Keys,
    Member,
    PartitionReport,
    State,
    dump,
    read_state,
)
from petps.delta import TableSchema
from petps.delta.directory import DirectoryLog
from petps.errors import FailedPrecondition, InvalidArgument, Unavailable
from petps.publish import Publisher
from petps.server import Serving
from petps.server.cluster.newest import find_newer
from petps.server.cluster.start import may_remove
from petps.server.ingest import Ingest, Progress
from petps.server.ingest.partition import PartitionState
from petps.server.ingest.status import PartitionHealth
from petps.server.metrics import Metrics
from petps.server.readiness import partition_reason
from petps.server.shard_map import parse
from tests.python.cluster.simulated import FakeEtcd
from tests.python.server.conftest import Start
from tests.python.waiting import wait_until

HERE, THERE = "here:7070", "there:7070"
KEYS = Keys("/petps", "default")
PARTITIONS = 8
ALL = np.arange(400, dtype=np.uint64)


class MemoryEtcd(FakeEtcd):
    """An etcd in memory that a test can take away. error: what each call raises."""

    def __init__(self) -> None:
        super().__init__()
        self.answered_at: float | None = None
        self.error: Exception | None = None
        self.calls = 0
        self.lock = threading.RLock()  # the server's thread and the test's use it

    def __getattribute__(self, name: str) -> Any:
        if name in ("read", "commit", "grant", "keep_alive"):
            self.calls += 1
            if self.error is not None:
                raise self.error
        return super().__getattribute__(name)

    def read(self, prefix: str, *, since: int = 0) -> Read:
        """See Etcd."""
        with self.lock:
            return super().read(prefix, since=since)

    def commit(self, *arguments: Any, **options: Any) -> int | None:
        """See Etcd."""
        with self.lock:
            return super().commit(*arguments, **options)

    def grant(self, seconds: int) -> int:
        """See Etcd."""
        with self.lock:
            return super().grant(seconds)

    def keep_alive(self, lease: int) -> bool:
        """See Etcd."""
        with self.lock:
            return super().keep_alive(lease)

    def revoke(self, lease: int) -> None:
        """See Etcd."""
        with self.lock:
            super().revoke(lease)

    def close(self) -> None:
        """See Etcd."""


@pytest.fixture
def etcd(monkeypatch: pytest.MonkeyPatch) -> MemoryEtcd:
    memory = MemoryEtcd()

    def open_memory(access: Access) -> MemoryEtcd:
        return memory

    monkeypatch.setattr("petps.server.cluster.start.Etcd", open_memory)
    return memory


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """Return a pool that only deltas feed."""
    path = tmp_path / "pool"
    with petps.create(path, durability="process") as opened:
        opened.create_table("fed", dim=4, capacity=1000, feed="delta")
    return path


@pytest.fixture
def serve(start: Start, tmp_path: Path, etcd: MemoryEtcd) -> Callable[[], Serving]:
    """Return a function that starts a server of the cluster, which follows a log."""
    log = tmp_path / "log"
    publisher = Publisher(
        DirectoryLog(log, partitions=PARTITIONS), "default", tables=[TableSchema("fed", "f32", 4)]
    )
    publisher.begin_continue(None)
    publisher.publish("fed", ALL, np.ones((len(ALL), 4), np.float32))
    publisher.commit()
    return lambda: start(
        server={"address": HERE},
        cluster={"endpoints": ["http://127.0.0.1:1"], "zone": "a", "weight": 2.0},
        ingest={"log": str(log)},
    )


def map_text(version: int, owned: list[int], follows: Sequence[int] = ()) -> str:
    owners = tuple((HERE,) if number in owned else (THERE,) for number in range(PARTITIONS))
    followed = {HERE: frozenset(follows)} if follows else {}
    return ClusterMap("default", version, owners, followed).dump()


def report_of_there(etcd: MemoryEtcd, version: int, *, run: int = 0) -> None:
    """Let the other server report its partitions as caught up."""
    reports = {number: PartitionReport(version, True, run) for number in range(PARTITIONS)}
    member = Member(THERE, "its pool", 9, "default@0", reports)
    etcd.commit((), {KEYS.member(THERE): dump(member)})


def put_map(etcd: MemoryEtcd, version: int, owned: list[int], follows: Sequence[int] = ()) -> None:
    etcd.commit((), {KEYS.map: map_text(version, owned, follows)})


def state_of(etcd: MemoryEtcd) -> State:
    values = MemoryEtcd.read(etcd, KEYS.root).values  # also while it answers nobody
    texts = {key: value.text for key, value in values.items() if key != KEYS.map}
    return read_state(KEYS, texts, {})


def member_of(etcd: MemoryEtcd) -> Member | None:
    return state_of(etcd).members.get(HERE)


def owned(serving: Serving) -> str:
    return str(serving.status()["shard"]["owned"])


def follow(serving: Serving, condition: Callable[[], Any]) -> None:
    """Do what the main thread does, until the condition holds."""

    def is_true() -> bool:
        serving.follow_shard_map()
        serving.report()
        return bool(condition())

    wait_until(is_true)


def test_a_server_registers_and_follows_the_map(
    serve: Callable[[], Serving], etcd: MemoryEtcd
) -> None:
    serving = serve()
    assert owned(serving) == "none"
    assert serving.status()["members"] == []  # nobody asks the server that stands for none
    follow(serving, lambda: member_of(etcd) is not None)
    registration = state_of(etcd).registrations[HERE]
    assert (registration.zone, registration.weight, registration.is_pushed) == ("a", 2.0, False)
    assert registration.partitions == PARTITIONS
    assert registration.grpc_address == f"here:{serving.grpc_port}"
    put_map(etcd, 2, [0, 1], [7])
    follow(serving, lambda: owned(serving) == "0-1")

    def is_whole() -> bool:
        member = member_of(etcd)
        return (
            member is not None
            and member.map_version == 2
            and sorted(member.partitions) == [0, 1, 7]
            and all(r.is_caught_up and r.version == 1 for r in member.partitions.values())
        )

    follow(serving, is_whole)
    assert serving.unready() is None
    key = KEYS.member(HERE)
    assert etcd.values[key].lease in etcd.leases
    serving.close()
    wait_until(lambda: key not in etcd.values)  # it left, long before its lease ends
    assert KEYS.registration(HERE) in etcd.values


@pytest.mark.parametrize(("text", "reason"), [
    ("{", "not valid JSON"),
    (ClusterMap("default", 1, ((HERE,),) * 8).dump(), "needs a higher version"),
    (ClusterMap("default", 3, ((HERE,),) * 8).dump(), "needs a higher version"),
    (ClusterMap("default", 9, ((HERE,),) * 4).dump(), "the number of partitions never changes"),
    (ClusterMap("other", 9, ((HERE,),) * 8).dump(), "a server with a map serves one model"),
])  # fmt: skip
def test_a_wrong_map_changes_nothing(
    serve: Callable[[], Serving], etcd: MemoryEtcd, text: str, reason: str
) -> None:
    put_map(etcd, 3, [2])
    serving = serve()
    follow(serving, lambda: owned(serving) == "2")
    etcd.commit((), {KEYS.map: text})
    follow(serving, lambda: reason in serving.status().get("shard_map_error", ""))
    assert owned(serving) == "2"
    assert (serving.status()["shard"]["map_version"]) == 3
    follow(serving, lambda: reason in getattr(member_of(etcd), "error", ""))
    put_map(etcd, 10, [3])
    follow(
        serving, lambda: owned(serving) == "3" and not serving.status().get("shard_map_error", "")
    )


def test_a_server_starts_from_its_copy(
    serve: Callable[[], Serving], etcd: MemoryEtcd, pool: Path
) -> None:
    put_map(etcd, 5, [1, 2])
    serving = serve()
    follow(serving, lambda: owned(serving) == "1-2")
    serving.close()
    etcd.error = Unavailable("etcd does not answer: nobody")
    again = serve()
    assert owned(again) == "1-2"
    follow(again, lambda: again.status()["cluster"]["error"])
    assert "nobody" in again.status()["cluster"]["error"]
    assert again.status().get("shard_map_error", "") == ""
    again.close()
    copy = pool.with_name("pool.map.json")
    assert json.loads(copy.read_text())["version"] == 5
    copy.write_text("{")
    with pytest.raises(InvalidArgument, match=r"pool\.map\.json: not valid JSON"):
        serve()


def test_an_etcd_that_is_away_shows_in_status_metric_and_problem(
    serve: Callable[[], Serving], etcd: MemoryEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_map(etcd, 5, [1, 2])
    serving = serve()
    follow(serving, lambda: owned(serving) == "1-2" and serving.unready() is None)
    etcd.error = Unavailable("etcd does not answer: nobody")
    monkeypatch.setattr("petps.server.problems.ETCD_SILENT_SECONDS", 0.01)
    follow(serving, lambda: serving.status()["cluster"]["silent_seconds"] > 0.5)
    text = Metrics(serving.status, serving._server.stats, serving.unready).text("")[0].decode()
    line = next(
        line for line in text.splitlines() if line.startswith("petps_cluster_etcd_silent_seconds ")
    )
    assert float(line.split()[1]) > 0.5
    assert "etcd" in [problem["key"] for problem in serving.status()["problems"]]
    assert serving.unready() is None
    etcd.error = None
    follow(serving, lambda: not serving.status()["cluster"]["error"])


def test_the_lease_is_renewed_after_it_ended(
    serve: Callable[[], Serving], etcd: MemoryEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("petps.server.cluster.lease.LEASE_SHARE", 1000)
    serving = serve()
    follow(serving, lambda: member_of(etcd) is not None)
    etcd.revoke(etcd.values[KEYS.member(HERE)].lease)
    follow(serving, lambda: member_of(etcd) is not None)


def test_rows_that_a_move_would_leave_behind_are_not_loaded(serve: Callable[[], Serving]) -> None:
    serving = serve()
    with (
        pytest.raises(FailedPrecondition, match="missing after a move: publish them"),
        AdminClient(serving._config.pool.path) as admin,
    ):
        admin.load("fed", ALL[:1], np.ones((1, 4), np.float32))
    assert len(serving._tables.find("default@0", "fed").keys()) == 0


def test_two_servers_cannot_have_one_address(
    serve: Callable[[], Serving], etcd: MemoryEtcd
) -> None:
    other = Member(HERE, "another pool", 2, "default", {})
    lease = etcd.grant(60)
    etcd.commit((), {KEYS.member(HERE): dump(other)}, lease=lease)
    serving = serve()
    follow(serving, lambda: "another server is registered" in serving.status()["cluster"]["error"])
    assert not serving.status()["cluster"]["is_registered"]
    assert member_of(etcd) == other
    etcd.revoke(lease)
    follow(serving, lambda: getattr(member_of(etcd), "pool", "") not in ("", "another pool"))


def rows(serving: Serving) -> int:
    return int(serving.status()["tables"][0]["rows"])


def test_rows_are_removed_by_order_and_come_back_from_the_log(
    serve: Callable[[], Serving], etcd: MemoryEtcd
) -> None:
    put_map(etcd, 2, [0, 1])
    serving = serve()
    follow(serving, lambda: owned(serving) == "0-1")
    both = rows_in(0) + rows_in(1)
    follow(serving, lambda: rows(serving) == both)
    report_of_there(etcd, 1)
    # The order is older than the map that names the server no more, so it waits for that map.
    etcd.commit((), {KEYS.drop(HERE, 1): dump(Drop(HERE, 1, 3))})
    follow(serving, lambda: serving.status()["cluster"]["removing"] == [1])
    assert rows(serving) == both
    put_map(etcd, 3, [0])
    follow(serving, lambda: KEYS.drop(HERE, 1) not in etcd.values)
    assert rows(serving) == rows_in(0)
    progress = serving._tables.progress(serving._tables.resolve("default").id, 1)
    assert progress is not None
    assert (progress.run, progress.seq, progress.offset, progress.version) == (0, 0, 0, 0)
    put_map(etcd, 4, [0], [1])
    follow(serving, lambda: rows(serving) == both)
    follow(serving, lambda: getattr(member_of(etcd), "map_version", 0) == 4)

    def is_whole() -> bool:
        member = member_of(etcd)
        return member is not None and 1 in member.partitions and member.partitions[1].is_caught_up

    follow(serving, is_whole)


def test_rows_that_no_owner_has_in_this_state_are_not_removed(
    serve: Callable[[], Serving], etcd: MemoryEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("petps.server.cluster.membership.KEPT_SECONDS", 0.0)
    put_map(etcd, 2, [0, 1])
    serving = serve()
    both = rows_in(0) + rows_in(1)
    follow(serving, lambda: rows(serving) == both)
    etcd.commit((), {KEYS.drop(HERE, 1): dump(Drop(HERE, 1, 3))})
    put_map(etcd, 3, [0])

    def say_kept() -> str:
        return "".join(serving.status()["cluster"]["kept"])

    follow(
        serving, lambda: "of version 1, and its owners (there:7070) have no version" in say_kept()
    )
    report_of_there(etcd, 0)
    follow(serving, lambda: "(there:7070) have version 0" in say_kept())
    serving.follow_shard_map()
    assert owned(serving) == "0"
    assert serving.status()["cluster"]["removing"] == [1]
    assert rows(serving) == both
    report_of_there(etcd, 1)
    follow(serving, lambda: KEYS.drop(HERE, 1) not in etcd.values)
    assert (rows(serving), say_kept()) == (rows_in(0), "")


@pytest.mark.parametrize(("own", "its", "stays"), [
    ((0, 0), None, False), ((9, 1), None, True), ((9, 1), (9, 1), False), ((9, 1), (8, 1), True),
    ((9, 1), (3, 2), False), ((9, 2), (12, 1), True), ((9, 2), (9, 0), False),
    ((9, 0), (9, 4), False), ((0, 5), (9, 4), True), ((0, 5), (9, 5), False),
])  # fmt: skip
def test_newer_rows_are_those_of_a_later_run_or_version(
    own: tuple[int, int], its: tuple[int, int] | None, stays: bool
) -> None:
    """Each is (version, run). The owner serves another instance in the end."""
    mine = {"m@1": PartitionReport(own[0], False, own[1])}

    def applied(instance: str) -> PartitionReport:
        return mine.get(instance, PartitionReport(0, False))

    for is_caught_up, instance in ((True, "m@1"), (False, "m@1"), (True, "m@2")):
        reports = {} if its is None else {3: PartitionReport(its[0], is_caught_up, its[1])}
        state = State("m", members={THERE: Member(THERE, "its pool", 9, instance, reports)})
        is_in_doubt = its is not None and (own[0] == 0 or 0 != its[1] != own[1] != 0)
        cannot = own != (0, 0) and (its is None or (is_in_doubt and not is_caught_up))
        expected = cannot if instance == "m@2" else stays or cannot
        assert bool(find_newer(applied, "m@1", 3, (THERE,), state)) is expected
        mine["m@2"] = mine["m@1"]
        assert bool(find_newer(applied, "m@1", 3, (THERE,), state)) is (stays or cannot)
        del mine["m@2"]


def test_a_pool_without_rows_answers_no_misses_before_the_log_is_read(
    start: Start, tmp_path: Path, etcd: MemoryEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_map(etcd, 2, list(range(PARTITIONS)))
    start_ingest = Ingest.start
    waiting: list[Ingest] = []
    monkeypatch.setattr(Ingest, "start", lambda ingest: waiting.append(ingest))
    (tmp_path / "empty").mkdir()
    serving = start(
        server={"address": HERE},
        cluster={"endpoints": ["http://127.0.0.1:1"]},
        ingest={"log": str(tmp_path / "empty")},
    )
    follow(serving, lambda: owned(serving) == "0-7" and waiting)
    request = messages.PullRequest(table="fed", keys=ALL[:1].tobytes())
    with grpc.insecure_channel(f"127.0.0.1:{serving.grpc_port}") as channel:
        stub = stubs.PetpsStub(channel)
        with pytest.raises(grpc.RpcError) as error:
            stub.Pull(request, timeout=10)
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
        assert "is not yet at here:7070: the log has not been read" in error.value.details()
        start_ingest(waiting[-1])

        def has_read_all() -> bool:
            member = member_of(etcd)
            return (
                member is not None
                and len(member.partitions) == PARTITIONS
                and all(report.is_caught_up for report in member.partitions.values())
            )

        follow(serving, has_read_all)
        assert stub.Pull(request, timeout=10).rows.rows_found == 0


def test_a_server_that_cannot_say_how_it_is_loses_its_report(
    serve: Callable[[], Serving], etcd: MemoryEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_map(etcd, 2, [0, 1])
    serving = serve()
    follow(serving, lambda: member_of(etcd) is not None)

    def fail(error: Exception) -> Callable[..., Any]:
        def raise_it(*_: Any) -> Any:
            raise error

        return raise_it

    monkeypatch.setattr("petps.server.cluster.membership.STUCK_SECONDS", 0.5)
    monkeypatch.setattr("petps.server.cluster.membership.LOOK_SECONDS", 0.05)
    assert serving._cluster is not None
    look = serving._cluster._look
    monkeypatch.setattr(serving._cluster, "_look", fail(InvalidArgument("all read this record")))
    follow(serving, lambda: "all read" in serving.status()["cluster"]["error"])
    with monkeypatch.context() as patch:
        patch.setattr(serving._cluster._lease_keeper, "replace", fail(AssertionError()))
        follow(serving, lambda: serving.status()["cluster"]["silent_seconds"] > 1.0)
        assert serving._cluster._thread is not None
        assert serving._cluster._thread.is_alive()
    monkeypatch.setattr(serving._cluster, "_look", fail(OSError("the disk is gone")))
    follow(serving, lambda: member_of(etcd) is None)
    monkeypatch.setattr(serving._cluster, "_look", look)
    follow(serving, lambda: member_of(etcd) is not None)


def test_rows_are_not_removed_while_ingest_still_applies_them(
    serve: Callable[[], Serving], etcd: MemoryEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would write rows, and progress that claims the removed ones, afterwards."""
    put_map(etcd, 2, [0, 1])
    serving = serve()
    both = rows_in(0) + rows_in(1)
    follow(serving, lambda: rows(serving) == both)
    report_of_there(etcd, 1)
    asked: list[int] = []

    def count(*arguments: Any) -> bool:
        asked.append(arguments[2])
        return may_remove(*arguments)

    monkeypatch.setattr("petps.server.cluster.start.may_remove", count)
    with monkeypatch.context() as patch:
        patch.setattr(serving, "_follow_log", lambda: None)  # as while the old ingest stops
        put_map(etcd, 3, [0])
        etcd.commit((), {KEYS.drop(HERE, 1): dump(Drop(HERE, 1, 3))})
        follow(serving, lambda: owned(serving) == "0")
        before = len(asked)
        wait_until(lambda: len(asked) > before + 1)
        assert rows(serving) == both
        progress = serving._tables.progress(serving._tables.resolve("default").id, 1)
        assert progress is not None
        assert progress.version == 1
    stop = serving._ingest.stop
    applied: list[list[int] | None] = []

    def note_and_stop() -> None:
        applied.append(serving._ingested_partitions)
        stop()

    monkeypatch.setattr(serving._ingest, "stop", note_and_stop)
    follow(serving, lambda: KEYS.drop(HERE, 1) not in etcd.values)
    assert rows(serving) == rows_in(0)
    assert applied == [[0, 1]]


def rows_in(partition: int) -> int:
    return int((_native.partition_of(ALL, PARTITIONS) == partition).sum())


@pytest.mark.parametrize(("version", "partition", "may"), [
    (2, 1, True), (3, 1, False), (2, 0, False), (2, 7, False),
])  # fmt: skip
def test_only_what_the_map_in_use_does_not_name_is_removed(
    version: int, partition: int, may: bool
) -> None:
    owners = tuple((HERE,) if number == 0 else (THERE,) for number in range(PARTITIONS))
    text = ClusterMap("default", 2, owners, {HERE: frozenset([7])}).dump()
    shard_map = parse(text.encode(), "test")
    assert may_remove(shard_map, HERE, partition, version, [0, 7]) is may
    assert not may_remove(shard_map, HERE, partition, version, [partition])
    assert not may_remove(shard_map, HERE, partition, version, None)
    assert not may_remove(None, HERE, partition, version, [])


def test_nothing_is_whole_while_ingest_is_replaced(
    start: Start, tmp_path: Path, etcd: MemoryEtcd
) -> None:
    (tmp_path / "log").mkdir()
    serving = start(
        server={"address": HERE},
        cluster={"endpoints": ["http://127.0.0.1:1"]},
        ingest={"log": str(tmp_path / "log"), "switch": "manual"},
    )
    put_map(etcd, 2, list(range(PARTITIONS)))
    follow(
        serving,
        lambda: (
            (m := member_of(etcd)) is not None
            and len(m.partitions) == PARTITIONS
            and m.whole == ("default@0",)
        ),
    )
    serving._tables.create_instance("default", "default@1", PARTITIONS)  # nothing has loaded it
    etcd.commit((), {KEYS.choice: dump(Choice("default@1", 2, "default@0"))})
    ingest = serving._ingest
    assert ingest is not None
    stop, seen = ingest.stop, []

    def stop_slowly() -> None:
        wait_until(lambda: (m := member_of(etcd)) is not None and m.partitions == {})
        seen.append(member_of(etcd))
        stop()

    ingest.stop = stop_slowly
    put_map(etcd, 3, [0, 1, 2, 4, 5, 6, 7])  # an unrelated move ends
    follow(serving, lambda: owned(serving) == "0-2, 4-7")
    assert [member.whole for member in seen if member is not None] == [()]
    assert serving._tables.resolve("default").name == "default@0"


def test_a_partition_that_others_serve_does_not_make_a_server_unready() -> None:
    owners = tuple((HERE,) if number == 0 else (THERE,) for number in range(PARTITIONS))
    text = ClusterMap("default", 2, owners, {HERE: frozenset([7])}).dump()
    shard_map = parse(text.encode(), "test")
    behind = PartitionHealth(7, "default@0", "catching_up", "reading a base", None)
    stopped = PartitionHealth(0, "default@0", "stale", "a gap", None)

    def reason(
        *health: PartitionHealth, known: bool = True, served: str = "following"
    ) -> str | None:
        return partition_reason(
            health,
            "default@0",
            60.0,
            served_progress=lambda partition: _native.Progress(
                instance=1, partition=partition, run=1, seq=1, offset=1, version=1, state=served
            ),
            shard_map=shard_map if known else None,
            address=HERE,
        )

    assert reason(behind) is None
    assert reason(behind, known=False) == "partition 7 is catching_up: reading a base"
    assert reason(behind, stopped) == "partition 0 is stale: a gap"
    newer = PartitionHealth(0, "default@1", "following", "", 0.1)
    assert reason(newer) is None
    assert reason(newer, served="lost_power") == "partition 0 of default@0 is lost_power"
    assert reason(replace(newer, partition=7), served="lost_power") is None


def test_a_partition_that_was_removed_begins_at_the_start_of_the_log() -> None:
    assert PartitionState.of(3, Progress(3), start=41).offset == 41
    assert PartitionState.of(3, Progress(3, target=7), start=41).offset == 41
    assert PartitionState.of(3, Progress(3, run=1, offset=5), start=41).offset == 5
