"""What a review of the moves of rows found: each of these lost rows, or would have."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from petps import _native
from petps.admin.client import AdminClient
from petps.checkpoint.files import LocalFiles
from petps.cluster.records import Choice, Drop, Member, Sent, dump
from petps.errors import ResourceExhausted, Unavailable
from petps.server import Serving
from petps.server.cluster.parts import write_part
from petps.server.cluster.pauses import Pauses
from petps.server.cluster.start import _instances, _reports
from petps.server.ingest.status import PartitionHealth
from tests.python.server.test_cluster import (
    HERE,
    KEYS,
    PARTITIONS,
    THERE,
    MemoryEtcd,
    etcd,
    follow,
    member_of,
    owned,
    put_map,
    state_of,
)
from tests.python.server.test_cluster_copies import (
    MINE,
    OUT,
    Client,
    Connect,
    content_of,
    pool,
    put_move,
    rows_of,
    send,
    sent_of,
    serve,
    start_sending,
)
from tests.python.waiting import wait_until

__all__ = ["etcd", "pool", "serve"]  # fixtures


def test_a_table_that_is_created_later_counts_as_pushed(
    serve: Callable[[], Serving], etcd: MemoryEtcd
) -> None:
    serving = serve()
    follow(serving, lambda: member_of(etcd) is not None)
    with AdminClient(serving._config.pool.path) as admin:
        admin.drop_table("items")
        follow(serving, lambda: not state_of(etcd).registrations[HERE].is_pushed)
        admin.create_table("later", dim=4, capacity=1000, feed="push")
        follow(serving, lambda: state_of(etcd).registrations[HERE].is_pushed)


def test_a_second_server_of_an_address_obeys_no_order(
    serve: Callable[[], Serving], etcd: MemoryEtcd
) -> None:
    put_map(etcd, 2, [0, 1, 2, 3, 5, 6, 7])
    lease = etcd.grant(60)
    there = Member(HERE, "the pool of the first server", 2, "default@0", {})
    etcd.commit((), {KEYS.member(HERE): dump(there)}, lease=lease)
    etcd.commit((), {KEYS.drop(HERE, 4): dump(Drop(HERE, 4, 2)), KEYS.move(3): dump(OUT)})
    serving = serve()
    follow(serving, lambda: "another server is registered" in serving.status()["cluster"]["error"])
    assert owned(serving) == "none"
    assert (HERE, 4) in state_of(etcd).drops
    assert sent_of(etcd) is None


def test_another_pool_does_not_stand_in_for_one_that_was_pushed_to(
    serve: Callable[[], Serving], etcd: MemoryEtcd
) -> None:
    serving = serve()
    follow(serving, lambda: member_of(etcd) is not None)
    registration = state_of(etcd).registrations[HERE]
    serving.close()
    etcd.commit((), {KEYS.registration(HERE): dump(replace(registration, pool="before"))})
    put_map(etcd, 2, [0])
    serving = serve()
    follow(serving, lambda: "had pool before" in serving.status()["cluster"]["error"])
    assert owned(serving) == "none"
    assert member_of(etcd) is None
    etcd.commit((), {}, (KEYS.registration(HERE),))  # as the error says
    follow(serving, lambda: member_of(etcd) is not None and owned(serving) == "0")


def test_a_registration_that_is_gone_is_written_again(
    serve: Callable[[], Serving], etcd: MemoryEtcd
) -> None:
    serving = serve()
    follow(serving, lambda: member_of(etcd) is not None)
    etcd.revoke(etcd.values[KEYS.member(HERE)].lease)
    etcd.commit((), {}, (KEYS.registration(HERE),))  # it was away, and forgotten
    wait_until(lambda: member_of(etcd) is not None and HERE in state_of(etcd).registrations)


def test_an_etcd_that_was_away_is_told_everything_again(
    serve: Callable[[], Serving], etcd: MemoryEtcd
) -> None:
    """It may have been restored from a backup, with the lease and without what is newer."""
    serving = serve()
    follow(serving, lambda: member_of(etcd) is not None)
    etcd.error = Unavailable("away")
    follow(serving, lambda: serving.status()["cluster"]["error"] == "away")
    before = state_of(etcd).registrations[HERE]
    older = {KEYS.registration(HERE): dump(replace(before, is_pushed=False))}
    MemoryEtcd.commit(etcd, (), older)
    etcd.error = None
    wait_until(lambda: state_of(etcd).registrations[HERE].is_pushed)


def test_no_promise_lets_pulls_go_on_by_an_older_map(
    serve: Callable[[], Serving], etcd: MemoryEtcd, connect: Connect
) -> None:
    """Partition 5 is still handed over, and 3 is open elsewhere, when this server starts again."""
    serving = serve()
    put_map(etcd, 2, list(range(PARTITIONS)))
    follow(serving, lambda: owned(serving) == "0-7")
    moves = {number: replace(OUT, partition=number) for number in (3, 5)}
    etcd.commit((), {KEYS.move(number): dump(move) for number, move in moves.items()})

    def all_are(flag: str) -> bool:
        sent = state_of(etcd).sent
        return all(number in sent and getattr(sent[number], flag) for number in moves)

    wait_until(lambda: all_are("is_close"))
    handed = {n: dump(replace(move, phase="handover")) for n, move in moves.items()}
    etcd.commit((), {KEYS.move(number): text for number, text in handed.items()})
    wait_until(lambda: all_are("is_released"))
    serving.close()
    put_map(etcd, 3, [0, 1, 2, 4, 5, 6, 7])
    etcd.commit((), {}, (KEYS.move(3), KEYS.sent(3)))
    serving = serve()  # nobody calls follow_shard_map(): it uses map 2
    client = Client(connect(serving))
    looks = etcd.calls
    wait_until(lambda: etcd.calls > looks + 20)
    assert client.pull(MINE[:1]) == "WRONG_SHARD"
    follow(serving, lambda: owned(serving) == "0-2, 4-7")


def test_a_server_that_stops_promises_nothing_without_the_last_rows(
    serve: Callable[[], Serving],
    etcd: MemoryEtcd,
    connect: Connect,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serving = serve()
    client = Client(connect(serving))
    start_sending(serving, etcd)
    assert serving._cluster is not None
    sender = serving._cluster._handovers._senders[3]
    inside, go = threading.Event(), threading.Event()
    pause = Pauses.pause

    def pause_and_wait(pauses: Pauses, partition: int) -> None:
        pause(pauses, partition)
        inside.set()
        go.wait(60)

    monkeypatch.setattr(Pauses, "pause", pause_and_wait)
    assert client.push(MINE[:5], 2.0) == ""  # in no part yet
    etcd.error = Unavailable("stopped")  # so that no new copy begins
    sender.finish(1, 60.0)
    assert inside.wait(60)
    sender.close(is_removed=False)  # SIGTERM
    go.set()
    sender.join()
    assert sender.progress().released == 0
    assert client.push(MINE[:1], 3.0) == ""  # nobody relies on a pause
    sent = sent_of(etcd)
    assert sent is not None
    assert content_of(tmp_path, sent) != rows_of(serving)


def test_the_end_of_an_old_copy_leaves_the_files_of_a_new_one(
    serve: Callable[[], Serving], etcd: MemoryEtcd, tmp_path: Path
) -> None:
    serving = serve()
    start_sending(serving, etcd)
    etcd.error = Unavailable("stopped")  # the move ends then, and the next owner moves it on
    send(LocalFiles(tmp_path / "store"), 1, MINE[:4], 7.0)
    etcd.error = None
    put_map(etcd, 5, [0, 1, 2, 4, 5, 6, 7])
    new = replace(OUT, source=THERE, target="third:7070", map_version=5)
    sent = Sent(3, THERE, "copy", 1, 1, 4, True)
    etcd.commit((), {KEYS.move(3): dump(new), KEYS.sent(3): dump(sent)})
    assert serving._cluster is not None
    wait_until(lambda: not serving._cluster.status()["sending"])  # type: ignore[union-attr]
    assert [path.name for path in (tmp_path / "store").rglob("*.npz")] == ["copy-000001.npz"]


def test_a_store_that_hangs_pauses_pushes_for_the_time_of_a_handover_only(
    serve: Callable[[], Serving],
    etcd: MemoryEtcd,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serving = serve()
    client = Client(connect(serving))
    start_sending(serving, etcd)
    go = threading.Event()

    def write_late(*arguments: Any) -> None:
        go.wait()
        write_part(*arguments)

    monkeypatch.setattr("petps.server.cluster.sender.write_part", write_late)
    try:
        assert client.push(MINE[:1], 2.0) == ""
        put_move(etcd, replace(OUT, phase="handover", pause_ms=15_000))
        wait_until(lambda: client.push(MINE[:1], 2.0) == "WRONG_SHARD")
        assert serving.status()["cluster"]["paused"] == [3]
        wait_until(lambda: client.push(MINE[:1], 3.0) == "")
        assert serving.status()["cluster"]["paused"] == []
        sent = sent_of(etcd)
        assert sent is not None
        assert not sent.is_released
    finally:
        go.set()


def switch_to_new(serving: Serving, etcd: MemoryEtcd) -> None:
    """Let the cluster switch from default@0 to default@1, by version 2 of the map."""
    serving._tables.create_instance("default", "default@1", PARTITIONS)
    put_map(etcd, 2, list(range(PARTITIONS)))
    etcd.commit((), {KEYS.choice: dump(Choice("default@1", 2, "default@0"))})
    follow(serving, lambda: serving._tables.resolve("default").name == "default@1")


def test_a_restored_etcd_switches_no_model_back(
    serve: Callable[[], Serving], etcd: MemoryEtcd
) -> None:
    serving = serve()
    switch_to_new(serving, etcd)
    put_map(etcd, 1, list(range(PARTITIONS)))
    etcd.commit((), {KEYS.choice: dump(Choice("default@0", 1, "default@1"))})
    calls = etcd.calls
    follow(serving, lambda: etcd.calls > calls + 20)
    assert serving._tables.resolve("default").name == "default@1"
    # What `petps cluster init --restored` does: the newest map, and no order.
    put_map(etcd, 3, list(range(PARTITIONS)))
    etcd.commit((), {}, (KEYS.choice,))
    membership = serving._cluster
    assert membership is not None
    membership._switch_at = 0.0  # it would try again now
    follow(serving, lambda: (m := member_of(etcd)) is not None and m.map_version == 3)
    calls = etcd.calls
    follow(serving, lambda: etcd.calls > calls + 20)
    assert serving._tables.resolve("default").name == "default@1"


def test_a_switch_that_fails_stops_no_reports(
    serve: Callable[[], Serving], etcd: MemoryEtcd
) -> None:
    serving = serve()
    follow(serving, lambda: member_of(etcd) is not None)

    def refuse(instance: str) -> None:
        raise ResourceExhausted("the disk of the audit log is full")

    membership = serving._cluster
    assert membership is not None
    membership._facts = replace(membership._facts, switch=refuse)
    serving._tables.create_instance("default", "default@1", PARTITIONS)
    put_map(etcd, 2, list(range(PARTITIONS)))
    etcd.commit((), {KEYS.choice: dump(Choice("default@1", 2, "default@0"))})
    follow(serving, lambda: (m := member_of(etcd)) is not None and "audit log" in m.error)
    assert serving.status()["cluster"]["error"] == ""
    put_map(etcd, 3, list(range(PARTITIONS)))
    follow(serving, lambda: (m := member_of(etcd)) is not None and m.map_version == 3)


def progress_of(
    partition: int, run: int = 0, version: int = 0, state: str = "following"
) -> _native.Progress:
    return _native.Progress(
        instance=1, partition=partition, run=run, seq=0, offset=0, version=version, state=state
    )


def test_a_partition_whose_log_feeds_a_newer_instance_may_still_move() -> None:
    """With ingest.switch = "manual" the served instance stays as it is while that one loads."""
    progress = {0: progress_of(0, run=3, version=7), 1: progress_of(1)}  # 1: only of the newer one

    class Tables:
        def resolve(self, model: str) -> Any:
            return SimpleNamespace(id=1, name="default@0")

        def progress(self, instance: int, partition: int) -> _native.Progress | None:
            return progress.get(partition)

    class Ingest:
        def health(self) -> list[PartitionHealth]:
            return [PartitionHealth(n, "default@1", "following", "", 0.1) for n in (0, 1, 2)]

    reports = _reports(cast(Any, Tables()), "default", Ingest())
    assert {number: report.is_caught_up for number, report in reports.items()} == {
        0: True, 1: False, 2: False,
    }  # fmt: skip
    assert reports[0].version == 7


@pytest.mark.parametrize(
    ("run", "version", "state", "is_served", "expected"),
    [
        (3, 7, "following", False, True),
        (0, 7, "following", False, True),  # a base without a position
        (3, 7, "passing", False, True),
        (3, 7, "catching_up", False, False),  # rows of two versions
        (3, 7, "incomplete", False, False),
        (3, 7, "lost_power", False, False),
        (0, 0, "following", True, True),  # the log has never held anything
        (0, 0, "passing", True, False),  # a dropped instance's messages
    ],
)
def test_a_partition_without_sound_rows_is_not_caught_up(
    run: int, version: int, state: str, is_served: bool, expected: bool
) -> None:
    class Tables:
        def resolve(self, model: str) -> Any:
            return SimpleNamespace(id=1, name="default@0")

        def progress(self, instance: int, partition: int) -> _native.Progress | None:
            return progress_of(0, run, version, state)

        def instances(self) -> list[Any]:
            return [SimpleNamespace(id=1, name="default@0", model="default", frozen=False)]

    class Ingest:
        def health(self) -> list[PartitionHealth]:
            instance = "default@0" if is_served else "default@1"
            follows = state if is_served else "following"
            return [PartitionHealth(0, instance, follows, "", 0.1)]

    tables = cast(Any, Tables())
    assert _reports(tables, "default", Ingest())[0].is_caught_up is expected
    if is_served:
        whole = ("default@0",) if expected else ()
        assert _instances(tables, "default", Ingest(), is_fed=True)[1] == whole
