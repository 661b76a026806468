"""Every method of a class that uses a pool or a server raises an error after the close or stop.

The same methods are called while another thread closes the pool and stops the server.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petps import _native
from petps.errors import FailedPrecondition, PetpsError

KEYS = np.arange(64, dtype=np.uint64)
ROWS = np.zeros((64, 16), np.uint8)
MAP = _native.ShardMap(model="m", version=9, partitions=1, servers=[("here:1", [0])])
PROGRESS = _native.Progress(instance=1, partition=0, run=1, seq=1, offset=1, version=1)

Method = Callable[[Any], object]

# Methods that also work after the end, because the object itself holds the result.
KEPT = {
    "Server": {"port", "address", "calls", "stop", "spans"},
    "Calls": {"ready_descriptor", "hold", "release", "drop", "take"},
    "Tables": {"close", "closed"},
    "Table": {"record", "id", "name", "dim", "dtype", "row_bytes", "default_row"},
    "Scan": {"close", "buckets", "buckets_done"},
    "LiveReader": {"close", "closed", "path"},
}
# Calls of the methods that need arguments. All other methods are called without arguments, so a new
# method is tested too.
CALLS: dict[str, dict[str, Method]] = {
    "Server": {
        "set_shard_map": lambda s: s.set_shard_map(MAP),
        "set_status_member": lambda s: s.set_status_member("x", "1"),
        "incidents_after": lambda s: s.incidents_after(0),
        "set_pauses": lambda s: s.set_pauses([0], []),
        "keep_pulls": lambda s: s.keep_pulls(1),
        "track_pushes": lambda s: s.track_pushes(0, True),
        "take_pushed": lambda s: s.take_pushed(0),
        "spans": lambda s: s.spans(10),
    },
    "Calls": {
        "pull": lambda c: c.pull(0, [(1, KEYS.tobytes())]),
        "push": lambda c: c.push(_record(), KEYS.tobytes(), ROWS.tobytes()),
        "set_hot_keys": lambda c: c.set_hot_keys(1, KEYS.tobytes()),
        "hold": lambda c: c.hold(8),
        "release": lambda c: c.release(8),
        "drop": lambda c: c.drop(1),
    },
    "Tables": {
        "set_durability": lambda t: t.set_durability("power"),
        "create_instance": lambda t: t.create_instance("m", f"m@{threading.get_ident()}", 1),
        "set_alias": lambda t: t.set_alias("a", 1),
        "drop_instance": lambda t: t.drop_instance(77),
        "set_unread": lambda t: t.set_unread(1, [0]),
        "resolve": lambda t: t.resolve("m"),
        "set_feed": lambda t: t.set_feed(1, "push"),
        "create_table": lambda t: t.create_table("u", instance=1, dim=4, dtype="f32", capacity=64),
        "grow": lambda t: t.grow(1, 1 << 20),
        "shrink": lambda t: t.shrink(),
        "set_expiry": lambda t: t.set_expiry(1, 60),
        "tick": lambda t: t.tick(1, 1),
        "expire": lambda t: t.expire(1),
        "set_when_full": lambda t: t.set_when_full(1, "refuse"),
        "clocks": lambda t: t.clocks(1),
        "adopt_clock": lambda t: t.adopt_clock(1, 0, (1, 1, 1, [0] * 50, 1, 0)),
        "drop_table": lambda t: t.drop_table(1),
        "find": lambda t: t.find("m@1", "t"),
        "find_id": lambda t: t.find_id(1),
        "record_progress": lambda t: t.record_progress(PROGRESS),
        "record_all_progress": lambda t: t.record_all_progress([PROGRESS]),
        "progress": lambda t: t.progress(1, 0),
        "applied_version": lambda t: t.applied_version(1),
    },
    "Table": {
        "apply": lambda t: t.apply(KEYS, ROWS),
        "pull": lambda t: t.pull(KEYS, np.empty((64, 4), np.float32)),
        "scan": lambda t: list(t.scan(1)),
        "set_hot_keys": lambda t: t.set_hot_keys(KEYS),
        "migrate": lambda t: t.migrate(KEYS),
        "bucket_reads": lambda t: t.bucket_reads(KEYS),
        "scrub": lambda t: t.scrub(_native.ScrubCursor(), 1 << 20),
        "remove_damaged": lambda t: t.remove_damaged([]),
        "note_missing": lambda t: t.note_missing(KEYS[:1]),
        "restore": lambda t: t.restore(KEYS, ROWS, np.zeros(64, np.uint32)),
        "find_damaged": lambda t: t.find_damaged(KEYS),
    },
    "Scan": {},
    "LiveReader": {
        "resolve": lambda r: r.resolve("m"),
        "find": lambda r: r.find("m", ["t"]),
        "pull": lambda r: r.pull(_record(), KEYS, np.empty((64, 4), np.float32)),
    },
}


def calls_of(name: str) -> dict[str, Method]:
    """Return a call of every public method and property of the class."""

    def call_without_arguments(member: str) -> Method:
        def call(target: Any) -> object:
            value = getattr(target, member)
            return value() if callable(value) else value

        return call

    members = {member for member in dir(getattr(_native, name)) if not member.startswith("_")}
    members -= {"start", "open", "create", "discard"}
    assert set(CALLS[name]) | KEPT[name] <= members
    return {
        member: CALLS[name].get(member, call_without_arguments(member))
        for member in sorted(members)
    }


def _record() -> _native.TableRecord:
    opened = _native.Tables.create("", background=False)
    opened.create_instance("m", "m@1", 1)
    return opened.create_table("t", instance=1, dim=4, dtype="f32", capacity=1000).record


class World:
    """A pool with a table, its server, and a reader beside them."""

    def __init__(self, folder: Path) -> None:
        path = str(folder / "a.pool")
        self.tables = _native.Tables.create(path, durability="process")
        self.tables.create_instance("m", "m@1", 1)
        self.table = self.tables.create_table("t", instance=1, dim=4, dtype="f32", capacity=1000)
        self.table.apply(KEYS, ROWS)
        self.server = _native.Server.start(
            self.tables, port=0, call_workers=1, address="here:1", gather="copy"
        )
        self.live = _native.LiveReader.open(path)
        self.scan = self.table.scan(1)
        self.objects = {
            "Server": self.server,
            "Calls": self.server.calls,
            "Tables": self.tables,
            "Table": self.table,
            "Scan": self.scan,
            "LiveReader": self.live,
        }

    def end(self) -> None:
        self.scan.close()
        self.live.close()
        self.server.stop()
        self.tables.close()


@pytest.mark.parametrize("name", CALLS)
def test_every_method_raises_an_error_after_the_end(name: str, tmp_path: Path) -> None:
    world = World(tmp_path)
    world.end()
    for method, call in calls_of(name).items():
        if method in KEPT[name]:
            call(world.objects[name])
            continue
        with pytest.raises(PetpsError, match=r"closed|stopped|stopping|dropped"):
            call(world.objects[name])
    assert list(world.scan) == []


def test_a_stopped_server_raises_an_error(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.server.stop()
    with pytest.raises(FailedPrecondition, match="has been stopped: start another one"):
        world.server.status_json()
    world.end()


@pytest.mark.parametrize("name", CALLS)
def test_every_method_may_be_called_during_the_end(name: str, tmp_path: Path) -> None:
    """Call each method in a thread of its own while other threads stop and close everything."""
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        world = World(folder)
        ended = threading.Event()
        called = threading.Semaphore(0)
        unexpected: list[BaseException] = []

        def hammer(
            call: Method,
            target: object,
            ended: threading.Event = ended,
            called: threading.Semaphore = called,
            unexpected: list[BaseException] = unexpected,
        ) -> None:
            while not ended.is_set():
                try:
                    call(target)
                except PetpsError:
                    pass
                except BaseException as error:  # any other error fails the test
                    unexpected.append(error)
                called.release()

        calls = {
            method: call
            for method, call in calls_of(name).items()
            if method not in ("close", "stop", "hold_pin_for_test")
        }
        if name == "Scan":
            calls["next"] = lambda scan: next(scan, None)
        threads = [
            threading.Thread(target=hammer, args=(call, world.objects[name]))
            for call in calls.values()
        ]
        for thread in threads:
            thread.start()
        for _ in range(2 * len(threads)):
            called.acquire()
        stops = [threading.Thread(target=world.server.stop) for _ in range(2)]
        for thread in stops:
            thread.start()
        for thread in stops:
            thread.join()
        world.scan.close()
        world.live.close()
        while not world.tables.closed:  # a scan that a thread has just begun may hold it open
            try:
                world.tables.close()
            except FailedPrecondition:
                continue
        ended.set()
        for thread in threads:
            thread.join()
        assert not unexpected
