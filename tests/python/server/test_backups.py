"""Backups of a serving pool under pulls, pushes and deltas, and servers of restored pools.

The model replays the messages of the log up to the positions of the backup.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import petps_client
import pytest

import petps
from petps.admin.client import AdminClient
from petps.checkpoint import Base, Store
from petps.errors import FailedPrecondition, InvalidArgument, IoError, Unavailable
from petps.pool import backup
from petps.pool.backup_info import NEEDS_BASE
from petps.pool.restore import LogCheck, list_backups, progress_of, restore
from petps.publish import Publisher
from petps.server import Serving
from petps.server.ingest.hold import Hold
from petps.server.ingest.protocols import Standing
from tests.python.server.backed_up import (
    SCHEMA,
    SPACE,
    Model,
    P,
    World,
    ignore,
    positions_of,
    stored_rows,
)
from tests.python.waiting import wait_until
from tests.seed import SEED


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


class Churn:
    """Publishes, pushes and pulls in threads until it is closed."""

    def __init__(self, world: World, serving: Serving) -> None:
        self._world, self._serving = world, serving
        self._stop = threading.Event()
        self.errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(work,))
            for work in (self._deltas, self._pushes)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, work: Any) -> None:
        try:
            work()
        except BaseException as error:
            self.errors.append(error)

    def _deltas(self) -> None:
        while not self._stop.is_set():
            self._world.publish(150)

    def _pushes(self) -> None:
        rng = np.random.default_rng(SEED + 1)
        with petps_client.connect(f"petps://127.0.0.1:{self._serving.port}") as client:
            while not self._stop.is_set():
                keys = rng.integers(0, SPACE // 2, 100, dtype=np.uint64)
                client.push("pushed", keys, np.tile(keys[:, None].astype(np.float32), (1, 4)))
                client.pull("fed", keys)

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert self.errors == []


@pytest.mark.parametrize("settled", [backup.SETTLED_BYTES, 0])
@pytest.mark.parametrize("in_memory", [True, False])
def test_a_backup_under_deltas_equals_the_log_at_its_positions(
    world: World, monkeypatch: pytest.MonkeyPatch, settled: int, in_memory: bool
) -> None:
    """settled 0: as many passes as there can be. Not in memory: the last pass writes while held."""
    monkeypatch.setattr(backup, "SETTLED_BYTES", settled)
    if not in_memory:
        monkeypatch.setattr(backup, "HELD_BYTES", 0)
    world.publish(2000)
    with Serving(world.settings(), log=ignore) as serving:
        client = AdminClient(world.pool)
        churn = Churn(world, serving)
        wait_until(lambda: serving.status()["ingest"]["version"] > 3)
        versions = []
        for _ in range(4):
            report = client.back_up(str(world.store))
            versions.append(report["version"])
            assert report["held_seconds"] < report["seconds"]
        churn.close()
        client.close()
    assert [entry["version"] for entry in list_backups(str(world.store))] == versions
    assert versions[0] > 1  # its first pass, which went on beside the deltas, had a number
    seen = []
    for version in versions:
        restored = world.folder / f"restored-{version}"
        restore(str(world.store), restored, version=version)
        positions = positions_of(world.store, version)
        seen.append(positions)
        assert stored_rows(restored) == world.rows_at(positions)
        pushed = stored_rows(restored, "pushed")
        assert len(pushed) > 0
        for key, row in pushed.items():
            assert np.frombuffer(row, np.float32).tolist() == [key] * 4
    assert all(a != b for a, b in pairwise(seen))  # deltas did go on
    assert Store.open(world.store).verify() == []


def stamps_of(pool: Path) -> dict[int, int]:
    with petps.open(pool, read_only=True) as opened:
        keys, stamps = opened.table("fed").keys_and_stamps()
        return dict(zip(keys.tolist(), stamps.tolist(), strict=True))


def clocks_of(pool: Path) -> Any:
    with petps.open(pool, read_only=True) as opened:
        return opened.native.clocks(opened.table("fed").id)


def test_a_restored_pool_follows_the_log(world: World) -> None:
    """With the versions of its rows and the event times of the partitions."""
    with petps.open(world.pool) as opened:
        opened.set_expiry("fed", 86_400)
    world.publish(1000)
    world.publish(200)
    with Serving(world.settings(), log=ignore) as serving:
        wait_until(lambda: serving.status()["ingest"]["version"] == world.version)
        with closing(AdminClient(world.pool)) as client:
            client.back_up(str(world.store))
    for _ in range(5):
        world.publish(200)
    restored = world.folder / "restored"
    restore(str(world.store), restored)
    assert stamps_of(restored) == stamps_of(world.pool)
    assert clocks_of(restored) == clocks_of(world.pool)
    assert LogCheck.of(world.log, progress_of(str(world.store))).warning is None
    with Serving(world.settings(restored), log=ignore) as serving:
        wait_until(lambda: serving.status()["ingest"]["version"] == world.version)
        assert serving.status()["ingest"]["partitions"][0]["gaps"] == 0
    everything = dict.fromkeys(range(P), (1 << 63, 1 << 63))
    assert stored_rows(restored) == world.rows_at(everything)


def test_a_new_run_and_great_versions_are_compared_by_hash(world: World) -> None:
    """The base of a new run may have older versions, and the low 32 bits of great ones wrap."""
    world.publish(1500)
    with (
        Serving(world.settings(), log=ignore) as serving,
        closing(AdminClient(world.pool)) as client,
    ):
        wait_until(lambda: serving.status()["ingest"]["version"] == world.version)
        client.back_up(str(world.store))
        position = world.publisher.position()
        world.publisher = Publisher(world.log, "default", tables=[SCHEMA])
        world.publisher.begin_continue(position)
        world.publisher.publish("fed", np.arange(20, dtype=np.uint64), np.ones((20, 8), np.float32))
        version = world.publisher.commit(version=(1 << 41) + 5)
        wait_until(lambda: serving.status()["ingest"]["version"] == version)
        report = client.back_up(str(world.store))
        assert report["kind"] == "increment"
        assert report["rows_written"] == 20
        world.publisher.publish("fed", np.arange(9, dtype=np.uint64), np.zeros((9, 8), np.float32))
        version = world.publisher.commit(version=version + (1 << 33) - 5)
        wait_until(lambda: serving.status()["ingest"]["version"] == version)
        report = client.back_up(str(world.store))
        assert report["rows_written"] == 9
    restored = world.folder / "restored"
    restore(str(world.store), restored)
    assert stored_rows(restored) == world.rows_at(positions_of(world.store, report["version"]))


def test_the_base_of_a_new_run_takes_rows_back(world: World) -> None:
    """Its rows have older versions than those that it replaces."""
    world.publish(1500)
    bases = world.folder / "bases"
    with (
        Serving(world.settings(), log=ignore) as serving,
        closing(AdminClient(world.pool)) as client,
    ):
        wait_until(lambda: serving.status()["ingest"]["version"] == world.version)
        client.export(bases / "old")
        old = world.version
        version = world.publish(300)
        wait_until(lambda: serving.status()["ingest"]["version"] == version)
        client.back_up(str(world.store))
        world.publisher = Publisher(world.log, "default", tables=[SCHEMA])
        world.publisher.begin_base(str(bases / "old"), version=version + 1)
        keys = np.arange(64, dtype=np.uint64)
        for _ in range(20):  # so that the seqs of the new run are above those of the old one
            world.publisher.publish("fed", keys, np.ones((64, 8), np.float32))
        version = world.publisher.commit(version=version + 2)
        wait_until(lambda: serving.status()["ingest"]["version"] == version)
        report = client.back_up(str(world.store))
        assert report["kind"] == "increment"
        assert report["rows_written"] > 64
    live = stored_rows(world.pool)
    ones = np.ones(8, np.float32).tobytes()
    assert live == stored_rows_of_base(bases / "old") | dict.fromkeys(range(64), ones)
    assert version > old
    restored = world.folder / "restored"
    restore(str(world.store), restored)
    assert stored_rows(restored) == live


def stored_rows_of_base(folder: Path) -> Model:
    return {
        key: row.tobytes()
        for keys, rows in Base.open(folder).chunks("fed")
        for key, row in zip(keys.tolist(), rows, strict=True)
    }


def test_a_partition_without_its_base_is_not_backed_up(world: World) -> None:
    with petps.open(world.pool) as opened:
        instance = opened.native.resolve("default").id
        for state in ("catching_up", "incomplete", "conflict", "lost_power"):
            record = petps._native.Progress(
                instance=instance, partition=2, run=1, seq=4, offset=0, version=3, state=state,
                target=5,
            )  # fmt: skip
            opened.native.record_all_progress([record])
            with pytest.raises(FailedPrecondition, match=f"partition 2 of default@0 is {state}"):
                opened.back_up(world.store)
    assert not world.store.exists()


def test_a_log_that_has_lost_messages_is_reported(world: World) -> None:
    class Log:
        name = "the log"
        partitions = P

        def __init__(self, start: int, end: int) -> None:
            self.start, self.end = start, end

        def start_offsets(self, partitions: list[int]) -> dict[int, int]:
            return dict.fromkeys(partitions, self.start)

        def end_offsets(self, partitions: list[int]) -> dict[int, int]:
            return dict.fromkeys(partitions, self.end)

    world.publish(100)
    with Serving(world.settings(), log=ignore) as serving:
        wait_until(lambda: serving.status()["ingest"]["version"] == world.version)
        with closing(AdminClient(world.pool)) as client:
            client.back_up(str(world.store))
    progress = progress_of(str(world.store))
    offsets = [entry.offset for entry in progress]
    logs: list[Any] = [Log(0, 1 << 60), Log(max(offsets) + 1, 1 << 60), Log(0, min(offsets) - 1)]
    checks = [LogCheck.of(log, progress) for log in logs]
    assert checks[0].warning is None
    assert "no longer has the messages after the backup in 4 partitions" in str(checks[1].warning)
    assert "ends before the backup in 4 partitions" in str(checks[2].warning)
    listed = [list_backups(str(world.store), log)[0]["follows_log"] for log in logs]
    assert listed == [True, False, False]


def test_one_backup_at_a_time(world: World) -> None:
    with (
        Serving(world.settings(), log=ignore) as serving,
        closing(AdminClient(world.pool)) as client,
    ):
        serving._backups._one.acquire()
        with pytest.raises(FailedPrecondition, match="another backup is being written"):
            client.back_up(str(world.store))
        serving._backups._one.release()
        client.back_up(str(world.store))


def test_a_store_that_cannot_be_written(world: World) -> None:
    """The caller gets the error. It is no failure of the schedule, of which there is none."""
    (world.folder / "file").write_text("")
    with (
        Serving(world.settings(), log=ignore) as serving,
        closing(AdminClient(world.pool)) as client,
    ):
        with pytest.raises(IoError, match="Not a directory"):
            client.back_up(str(world.folder / "file" / "store"))
        assert serving.status()["backup"]["failures"] == 0
        client.back_up(str(world.store))
        state = serving.status()["backup"]
        assert state["last"]["log_version"] == 0


def test_versions_that_wrap_are_compared_by_hash(world: World) -> None:
    """The log's versions count examples, and a stamp has their low 32 bits."""
    world.publish(500)
    with (
        Serving(world.settings(), log=ignore) as serving,
        closing(AdminClient(world.pool)) as client,
    ):
        for step in range(2):
            version = (1 << 32) - 1 + step  # the rows have the stamps 2 and 0
            rows = np.full((100, 8), step, np.float32)
            world.publisher.publish("fed", np.arange(100, dtype=np.uint64), rows)
            world.publisher.commit(version=version)
            assert serving._ingest.ingest.wait_for(version, 60)
            report = client.back_up(str(world.store))
            assert report["log_version"] == version
    restored = world.folder / "restored"
    restore(str(world.store), restored)
    assert stored_rows(restored) == stored_rows(world.pool)


def test_a_failing_first_backup_leaves_one_try(world: World) -> None:
    world.publish(500)
    with Serving(world.settings(), log=ignore) as serving:
        wait_until(lambda: serving.status()["ingest"]["version"] == world.version)

    @contextlib.contextmanager
    def fails(goes_on: Callable[[], bool]) -> Iterator[Callable[[], None]]:
        if goes_on():
            raise Unavailable("ingest does not rest")
        yield lambda: None

    with petps.open(world.pool) as opened:
        instance = opened.backed_up(None)
        for _ in range(4):
            with pytest.raises(Unavailable, match="does not rest"):
                backup.back_up(opened.native, instance, str(world.store), hold=fails)
            assert len(Store.open(world.store).state.versions()) <= 2
        opened.back_up(world.store)
        assert len(Store.open(world.store).state.versions()) == 1
    assert len(list_backups(str(world.store))) == 1


def test_a_hold_that_fails_commits_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the last pass is written while ingest is held."""
    monkeypatch.setattr(backup, "HELD_BYTES", 0)
    world.publish(500)
    with Serving(world.settings(), log=ignore) as serving:
        wait_until(lambda: serving.status()["ingest"]["version"] == world.version)

    def check() -> None:
        raise Unavailable("the shard map changed")

    with petps.open(world.pool) as opened:
        table = opened.table("fed")

        @contextlib.contextmanager
        def hold(goes_on: Callable[[], bool]) -> Iterator[Callable[[], None]]:
            row = np.ones((1, table.row_bytes), np.uint8)
            table.apply(np.array([1], np.uint64), row, None, world.version + 1)
            yield check

        with pytest.raises(Unavailable, match="shard map changed"):
            backup.back_up(opened.native, opened.backed_up(None), str(world.store), hold=hold)
        assert list_backups(str(world.store)) == []


def test_states_without_a_base_are_those_of_ingest() -> None:
    assert set(NEEDS_BASE) == {standing.value for standing in Standing if standing.needs_base}


def test_a_full_partition_is_not_backed_up(world: World) -> None:
    small = world.folder / "small"
    with petps.create(small, durability="process") as opened:
        opened.create_model("default", P)
        opened.create_table("fed", dim=8, capacity=20, feed="delta")
    world.publish(200)
    with (
        Serving(world.settings(small), log=ignore) as serving,
        closing(AdminClient(small)) as client,
    ):
        wait_until(lambda: any(p.state == "full" for p in serving._ingest.ingest.health()))
        with pytest.raises(FailedPrecondition, match="is full"):
            client.back_up(str(world.store))
        assert not world.store.exists() or list_backups(str(world.store)) == []


def test_other_partitions_need_another_store(world: World) -> None:
    world.publish(100)
    with Serving(world.settings(), log=ignore) as serving:
        wait_until(lambda: serving.status()["ingest"]["version"] == world.version)
    with petps.open(world.pool) as opened:
        opened.back_up(world.store)
    other = world.folder / "other"
    with petps.create(other, durability="process") as opened:
        opened.create_model("default", P)
        opened.create_table("fed", dim=8, capacity=2 * SPACE, feed="delta")
        opened.create_table("pushed", dim=4, capacity=SPACE)
        for full in (False, True):
            with pytest.raises(FailedPrecondition, match="a store of its own"):
                opened.back_up(world.store, full=full)
    with pytest.raises(InvalidArgument, match="each server needs a store of its own"):
        world.settings(server={"shard_map": "m.json", "address": "a:1"}, backup={"store": "s"})
    shard = {"shard_map": "m.json", "address": "a:1"}
    chosen = world.settings(server=shard, backup={"store": "s3://b/{address}"})
    assert chosen.backup_store() == "s3://b/a-1"


def test_ingest_that_does_not_rest_fails_the_backup(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.publish(100)
    with (
        Serving(world.settings(), log=ignore) as serving,
        closing(AdminClient(world.pool)) as client,
    ):
        wait_until(lambda: serving.status()["ingest"]["version"] == world.version)
        client.back_up(str(world.store))
        with monkeypatch.context() as patch, serving._ingest.ingest.held(30):
            patch.setattr("petps.server.backups.HOLD_SECONDS", 0.2)
            with pytest.raises(Unavailable, match="held for something else"):
                client.back_up(str(world.store))
        world.publish(100)
        wait_until(lambda: serving.status()["ingest"]["version"] == world.version)
        client.back_up(str(world.store))
    assert len(list_backups(str(world.store))) == 2


def test_a_limit_of_ingest_does_not_delay_a_backup(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ingest applies what it has read without the limit, which would take hours."""
    monkeypatch.setattr("petps.server.backups.HOLD_SECONDS", 30.0)
    world.publish(20_000)
    slow = world.settings()
    slow = slow.model_copy(
        update={"ingest": slow.ingest.model_copy(update={"rows_per_second": 10})}
    )
    with (
        Serving(slow, log=ignore) as serving,
        closing(AdminClient(world.pool)) as client,
    ):
        wait_until(lambda: serving.status()["ingest"]["rows"] > 0)
        report = client.back_up(str(world.store))
    restored = world.folder / "restored"
    restore(str(world.store), restored)
    positions = positions_of(world.store, report["version"])
    assert stored_rows(restored) == world.rows_at(positions)


def test_a_hold_of_a_thread() -> None:
    stop, rounds, settled = threading.Event(), 0, 0
    hold = Hold()

    def settle() -> None:
        nonlocal settled
        settled += 1

    def work() -> None:
        nonlocal rounds
        hold.begin()
        while not stop.is_set():
            hold.give_way(settle)
            rounds += 1
            time.sleep(0.001)
        hold.end()

    with hold.taken(0.1):  # nothing runs
        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.05)
        assert rounds == 0
    wait_until(lambda: rounds > 2)
    with hold.taken(10):
        seen = rounds
        assert settled == 1
        time.sleep(0.05)
        assert rounds == seen
    wait_until(lambda: rounds > seen + 2)
    with hold.taken(10):
        stop.set()
        thread.join(0.05)
        assert thread.is_alive()  # so that no successor of it begins
    thread.join()
    with hold.taken(0.1):
        pass
    with pytest.raises(Unavailable, match=r"within 0\.1 s"), hold.taken(0.1, only_working=True):
        raise AssertionError("nothing works")
    hold.begin()  # the one before has given up
    hold.give_way(settle)
