"""Every method of every class that uses a pool or a server: after its end, and during it.

A bound method that is not listed here fails the test.
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
    "Server": {"port", "address", "calls", "stop"},
    "Calls": {"ready_descriptor", "take"},
    "Tables": {"close", "closed"},
    "Table": {"record", "id", "name", "dim", "dtype", "row_bytes", "default_row"},
    "Scan": {"close", "buckets", "buckets_done"},
    "LiveReader": {"close", "closed", "path"},
}
METHODS: dict[str, dict[str, Method]] = {
    "Server": {
        "port": lambda s: s.port,
        "address": lambda s: s.address,
        "calls": lambda s: s.calls,
        "set_shard_map": lambda s: s.set_shard_map(MAP),
        "stop": lambda s: s.stop(),
        "stats": lambda s: s.stats(),
        "status_json": lambda s: s.status_json(),
        "set_status_member": lambda s: s.set_status_member("x", "1"),
    },
    "Calls": {
        "ready_descriptor": lambda c: c.ready_descriptor,
        "pull": lambda c: c.pull(0, [(1, KEYS.tobytes())]),
        "push": lambda c: c.push(_record(), KEYS.tobytes(), ROWS.tobytes()),
        "set_hot_keys": lambda c: c.set_hot_keys(1, KEYS.tobytes()),
        "take": lambda c: c.take(),
    },
    "Tables": {
        "close": lambda t: t.close(),
        "closed": lambda t: t.closed,
        "info": lambda t: t.info(),
        "set_durability": lambda t: t.set_durability("power"),
        "create_instance": lambda t: t.create_instance("m", f"m@{threading.get_ident()}", 1),
        "instances": lambda t: t.instances(),
        "set_alias": lambda t: t.set_alias("a", 1),
        "aliases": lambda t: t.aliases(),
        "previous_of_aliases": lambda t: t.previous_of_aliases(),
        "drop_instance": lambda t: t.drop_instance(77),
        "resolve": lambda t: t.resolve("m"),
        "set_feed": lambda t: t.set_feed(1, "push"),
        "create_table": lambda t: t.create_table("u", instance=1, dim=4, dtype="f32", capacity=64),
        "find": lambda t: t.find("m@1", "t"),
        "find_id": lambda t: t.find_id(1),
        "tables": lambda t: t.tables(),
        "record_progress": lambda t: t.record_progress(PROGRESS),
        "record_all_progress": lambda t: t.record_all_progress([PROGRESS]),
        "progress": lambda t: t.progress(1, 0),
        "all_progress": lambda t: t.all_progress(),
        "applied_version": lambda t: t.applied_version(1),
        "walk": lambda t: t.walk(),
        "walked": lambda t: t.walked(),
        "reclaim": lambda t: t.reclaim(),
        "verify": lambda t: t.verify(),
    },
    "Table": {
        "record": lambda t: t.record,
        "id": lambda t: t.id,
        "name": lambda t: t.name,
        "dim": lambda t: t.dim,
        "dtype": lambda t: t.dtype,
        "row_bytes": lambda t: t.row_bytes,
        "default_row": lambda t: t.default_row(),
        "apply": lambda t: t.apply(KEYS, ROWS),
        "pull": lambda t: t.pull(KEYS, np.empty((64, 4), np.float32)),
        "keys": lambda t: t.keys(),
        "scan": lambda t: list(t.scan(1)),
        "status": lambda t: t.status(),
        "set_hot_keys": lambda t: t.set_hot_keys(KEYS),
        "migrate": lambda t: t.migrate(KEYS),
        "rehome": lambda t: t.rehome(),
        "bucket_reads": lambda t: t.bucket_reads(KEYS),
    },
    "Scan": {
        "close": lambda s: s.close(),
        "buckets": lambda s: s.buckets,
        "buckets_done": lambda s: s.buckets_done,
    },
    "LiveReader": {
        "close": lambda r: r.close(),
        "closed": lambda r: r.closed,
        "path": lambda r: r.path,
        "tables": lambda r: r.tables(),
        "instances": lambda r: r.instances(),
        "resolve": lambda r: r.resolve("m"),
        "find": lambda r: r.find("m", ["t"]),
        "pull": lambda r: r.pull(_record(), KEYS, np.empty((64, 4), np.float32)),
        "hold_pin_for_test": lambda r: r.hold_pin_for_test(),
        "disable_pins_for_test": lambda r: r.disable_pins_for_test(),
    },
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


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_listed(name: str) -> None:
    bound = {each for each in dir(getattr(_native, name)) if not each.startswith("_")}
    assert bound - {"start", "open", "create", "discard"} == set(METHODS[name])


@pytest.mark.parametrize("name", METHODS)
def test_an_error_after_the_end(name: str, tmp_path: Path) -> None:
    world = World(tmp_path)
    world.end()
    for method, call in METHODS[name].items():
        if method in KEPT[name]:
            call(world.objects[name])
            continue
        with pytest.raises(PetpsError, match=r"closed|stopped|stopping|dropped"):
            call(world.objects[name])
    assert list(world.scan) == []


def test_a_stopped_server_says_so(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.server.stop()
    with pytest.raises(FailedPrecondition, match="has been stopped: start another one"):
        world.server.status_json()
    world.end()


@pytest.mark.parametrize("name", METHODS)
def test_beside_the_end(name: str, tmp_path: Path) -> None:
    """Call each method in threads until it is refused, while another thread ends everything."""
    for turn in range(3):
        folder = tmp_path / str(turn)
        folder.mkdir()
        world = World(folder)
        ended = threading.Event()
        called = threading.Semaphore(0)
        strange: list[BaseException] = []

        def hammer(
            call: Method,
            of: object,
            ended: threading.Event = ended,
            called: threading.Semaphore = called,
            strange: list[BaseException] = strange,
        ) -> None:
            while not ended.is_set():
                try:
                    call(of)
                except PetpsError:
                    pass
                except BaseException as error:  # any other error fails the test
                    strange.append(error)
                called.release()

        calls = {
            method: call
            for method, call in METHODS[name].items()
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
        assert not strange
