"""Both sides of an upgrade, together: each reads, serves and calls what the other one wrote."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.ports import stable_port
from tests.system import servers
from tests.system.servers import WAIT_SECONDS, Server, wait_until
from tests.upgrade import old
from tests.upgrade.old import NEW, Side
from tests.upgrade.program import ALL, DIM, KEYS

PROGRAM = Path(__file__).with_name("program.py")
PARTITIONS = servers.PARTITIONS

pytestmark = pytest.mark.skipif(not old.is_built(), reason="run `make upgrade`")

OLD = old.old_side()
BOTH_WAYS = pytest.mark.parametrize(
    ("first", "second"), [(OLD, NEW), (NEW, OLD)], ids=["old-new", "new-old"]
)


def act(side: Side, *arguments: object) -> dict[str, Any]:
    """Return the result of an action of program.py."""
    result: dict[str, Any] = json.loads(side.run(PROGRAM, *arguments).splitlines()[-1])
    return result


def petps(side: Side, *arguments: object) -> str:
    """Return the output of a command of a side."""
    return side.run(*side.petps[len(side.python) :], *arguments)


def format_version(pool: Path) -> int:
    """Return the format version in the first superblock copy (native/pool/FORMAT.md)."""
    with pool.open("rb") as file:
        return int.from_bytes(file.read(12)[8:], "little")


def pull_json(side: Side, target: object, table: str, *keys: int) -> list[list[float] | None]:
    """Return the row of each key, or None for a missing one."""
    report = json.loads(petps(side, "pull", target, table, "--json", *keys))
    return [entry["row"] if entry["found"] else None for entry in report["rows"]]


def row(key: int, version: int) -> list[float]:
    return [float(key + column * version) for column in range(DIM)]


class SidedServers:
    """Servers whose side may change when they are started again."""

    def __init__(self) -> None:
        self.servers: list[Server] = []

    def start(self, side: Side, pool: Path, *arguments: object, port: int = 0) -> Server:
        server = Server(
            pool,
            *arguments,
            "--port",
            port or stable_port(),
            command=side.petps,
            environment=side.environment or {"PYTHONUNBUFFERED": "1"},
        )
        self.servers.append(server)
        server.wait_ready()
        return server

    def change(self, server: Server, side: Side) -> None:
        """Stop a server as an operator does, and start its pool with another side."""
        server.end()
        server.ready_file.unlink(missing_ok=True)
        server.command = side.petps
        server.environment = side.environment or {"PYTHONUNBUFFERED": "1"}
        server.launch()
        server.wait_ready()


@pytest.fixture
def sided() -> Iterator[SidedServers]:
    started = SidedServers()
    yield started
    for server in started.servers:
        server.kill()


def create(side: Side, folder: Path, *tables: str) -> Path:
    """Create a pool with tables, "NAME:DIM:DTYPE:CAPACITY" or further options."""
    folder.mkdir(parents=True, exist_ok=True)
    pool = folder / "pool"
    petps(side, "create", pool, *tables)
    return pool


# ---- wire


@BOTH_WAYS
def test_servers_and_clients_of_both_sides_speak_with_each_other(
    first: Side, second: Side, sided: SidedServers, tmp_path: Path
) -> None:
    """Every call of a client of `second` to a server of `first` has the usual result."""
    tables = ("--table", f"items:{DIM}:f32:{4 * KEYS}", "--table", "halves:4:f16:100")
    server = sided.start(first, create(first, tmp_path / "server", *tables))
    assert act(second, "call_all", server.url) == {
        "inserted_or_updated": KEYS,
        "found": KEYS,
        "versions": [1],
        "erased": [2, 1],
        "many": {"items": [False, True], "halves": [False]},
        "table": ["items", DIM, "f32", True],
        "tables": ["halves", "items"],
        "answer": [2, "default@0"],
        "error": "NotFound",
        "status": True,
    }
    # The commands of `second`, with the address for clients and with the socket beside the pool.
    petps(second, "push", server.url, "items", "7=1,2,3,4,5,6,7,8")
    assert pull_json(second, server.url, "items", 7) == [[1.0, 2, 3, 4, 5, 6, 7, 8]]
    for target in (server.url, server.pool):
        status = json.loads(petps(second, "status", target, "--json"))
        assert {table["name"] for table in status["tables"]} == {"halves", "items"}
    petps(second, "table", "grow", server.pool, "halves", "--capacity", 1000)
    server.end()


# ---- pools


@BOTH_WAYS
@pytest.mark.parametrize("expire", [(), ("--expire-after", "1d")], ids=["format3", "format4"])
def test_a_pool_goes_from_one_side_to_the_other_and_back(
    first: Side, second: Side, expire: Sequence[str], sided: SidedServers, tmp_path: Path
) -> None:
    pool = create(first, tmp_path / "server", "--table", f"items:{DIM}:f32:{4 * KEYS}", *expire)
    version = format_version(pool)
    assert version == (4 if expire else 3)
    rows: dict[int, int] = {}
    for number, side in enumerate((first, second, first), start=1):
        server = sided.start(side, pool)
        rows |= dict.fromkeys((1, 2, 10 + number), number)  # old keys and a new one
        petps(side, "push", server.url, "items", *(push_text(key, number) for key in rows))
        rows = dict.fromkeys(rows, number)
        server.kill()  # not a clean close
        assert format_version(pool) == version
        reader = second if side is first else first
        assert pull_json(reader, pool, "items", *rows) == [row(key, number) for key in rows]
    petps(second, "verify", pool)


def push_text(key: int, version: int) -> str:
    return f"{key}={','.join(str(value) for value in row(key, version))}"


# ---- log and store


@BOTH_WAYS
def test_each_side_follows_the_log_of_the_other(
    first: Side, second: Side, sided: SidedServers, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    version = act(first, "publish", log, 3)["version"]
    pool = create(second, tmp_path / "s", "--table", f"fed:{DIM}:f32:{4 * KEYS}", "--feed", "delta")
    server = sided.start(second, pool, "--log", log)
    wait_for_version(server, version)
    assert pull_json(second, server.url, "fed", 0, 5, KEYS - 1) == [
        row(0, version),
        row(5, version),
        row(KEYS - 1, version),
    ]
    # Its progress is in the pool, where the other side goes on.
    sided.change(server, first)
    wait_for_version(server, version)
    server.end()


def wait_for_version(server: Server, version: int) -> None:
    def has_version() -> bool:
        instances = server.status()["instances"]
        return bool(instances) and instances[0]["applied_version"] >= version

    wait_until(f"version {version}", has_version)


@BOTH_WAYS
def test_each_side_reads_backups_and_exports_of_the_other(
    first: Side, second: Side, sided: SidedServers, tmp_path: Path
) -> None:
    pool = create(first, tmp_path / "server", "--table", f"items:{DIM}:f32:{4 * KEYS}")
    server = sided.start(first, pool)
    keys = (1, 5, 9)
    petps(first, "push", server.url, "items", *(push_text(key, 3) for key in keys))
    server.end()
    store = tmp_path / "store"
    petps(first, "backup", pool, store)
    petps(second, "restore", store, tmp_path / "restored.pool")
    assert pull_json(second, tmp_path / "restored.pool", "items", *keys) == [
        row(key, 3) for key in keys
    ]
    # An increment of the second side, in the store of the first one.
    petps(second, "push", pool, "items", push_text(5, 4))
    petps(second, "backup", pool, store)
    petps(first, "restore", store, tmp_path / "again.pool")
    assert pull_json(first, tmp_path / "again.pool", "items", 1, 5) == [row(1, 3), row(5, 4)]


# ---- fleets


class Load:
    """A client of a side that pulls until the end of a block, in a process of its own."""

    def __init__(self, side: Side, url: str, table: str) -> None:
        import os

        self._side = side
        self._child = subprocess.Popen(
            [*side.python, str(PROGRAM), "load", url, table],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **side.environment},
            cwd=old.FOLDER.parent,
        )
        assert self._child.stdout is not None
        assert self._child.stdout.readline() == "ready\n"

    def end(self) -> dict[str, Any]:
        """Stop the client; return its result."""
        self._child.send_signal(signal.SIGTERM)
        output, _ = self._child.communicate(timeout=WAIT_SECONDS)
        assert self._child.returncode == 0, output
        result: dict[str, Any] = json.loads(output)
        return result

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()


class PublishingThread(threading.Thread):
    """Publishes a version every few milliseconds."""

    def __init__(self, log: Path) -> None:
        super().__init__(daemon=True)
        from petps.delta import TableSchema
        from petps.delta.directory import DirectoryLog
        from petps.publish import Publisher

        tables = [TableSchema("fed", "f32", DIM)]
        log_ = DirectoryLog(log, partitions=PARTITIONS)
        self.publisher = Publisher(log_, "default", tables=tables)
        self.publisher.begin_continue(None)
        self.publish()
        self.is_done = threading.Event()

    def publish(self) -> None:
        from tests.upgrade.program import rows_of

        version = self.publisher.version + 1
        self.publisher.publish("fed", ALL, rows_of(ALL, version))
        self.publisher.commit()

    def run(self) -> None:
        while not self.is_done.wait(0.2):
            self.publish()


def write_map(path: Path, addresses: Sequence[str], version: int) -> None:
    """Write a shard map in which two servers each own the same half of the partitions."""
    halves = (["0-3"], ["0-3"], ["4-7"], ["4-7"])
    owners = [
        {"address": address, "partitions": partitions}
        for address, partitions in zip(addresses, halves, strict=True)
    ]
    shards = {"model": "default", "version": version, "partitions": PARTITIONS, "servers": owners}
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(shards))
    temporary.replace(path)


def test_a_rolling_upgrade_and_its_rollback_fail_no_pull(
    sided: SidedServers, tmp_path: Path
) -> None:
    """Two shards of two replicas follow a log, while clients of both sides pull.

    Each server is stopped, and started with the other side, when the one before it is ready.
    """
    ports = [stable_port() for _ in range(4)]
    addresses = [f"127.0.0.1:{port}" for port in ports]
    shard_map = tmp_path / "shards.json"
    write_map(shard_map, addresses, 1)
    publisher = PublishingThread(tmp_path / "log")
    fleet = []
    for number, port in enumerate(ports):
        table = ("--table", f"fed:{DIM}:f32:{4 * KEYS}", "--feed", "delta")
        pool = create(OLD, tmp_path / f"server{number}", *table)
        arguments = ("--log", tmp_path / "log", "--shard-map", shard_map)
        fleet.append(sided.start(OLD, pool, *arguments, port=port))
    for server in fleet:
        wait_for_version(server, publisher.publisher.version)
    url = f"petps://{','.join(addresses)}/default"
    with contextlib.ExitStack() as stack:
        loads: list[Load] = []
        for side in (OLD, NEW):
            loads.append(Load(side, url, "fed"))
            stack.callback(loads[-1].kill)
        publisher.start()
        stack.callback(publisher.is_done.set)
        for number, side in enumerate((NEW, OLD), start=2):
            for server in fleet:
                sided.change(server, side)
                # The next one may follow when this one has what the replica had.
                wait_for_version(server, publisher.publisher.version)
            write_map(shard_map, addresses, number)  # the servers read it automatically
            for server in fleet:
                wait_for_map(server, number)
        publisher.is_done.set()
        publisher.join()
        for server in fleet:
            wait_for_version(server, publisher.publisher.version)
        for load in loads:
            result = load.end()
            assert result["wrong"] == []
            assert result["pulls"] > 50
            assert result["newest"] > 5
    for server in fleet:
        assert format_version(server.pool) == 3
        server.end()


def wait_for_map(server: Server, version: int) -> None:
    wait_until(f"shard map {version}", lambda: server.status()["shard"]["map_version"] >= version)


@BOTH_WAYS
def test_a_fleet_of_both_sides_serves_clients_of_both(
    first: Side, second: Side, sided: SidedServers, tmp_path: Path
) -> None:
    """One shard of each side: pushes and pulls of each side cross both."""
    ports = [stable_port(), stable_port()]
    shard_map = tmp_path / "shards.json"
    owners = [
        {"address": f"127.0.0.1:{port}", "partitions": [half]}
        for port, half in zip(ports, ("0-3", "4-7"), strict=True)
    ]
    shards = {"model": "default", "version": 1, "partitions": PARTITIONS, "servers": owners}
    shard_map.write_text(json.dumps(shards))
    tables = ("--table", f"items:{DIM}:f32:{4 * KEYS}", "--table", "halves:4:f16:100")
    for side, port in zip((first, second), ports, strict=True):
        pool = create(side, tmp_path / side.name, *tables)
        sided.start(side, pool, "--shard-map", shard_map, port=port)
    for client in (first, second):
        result = act(client, "call_all", f"petps://127.0.0.1:{ports[0]}/default")
        assert result["found"] == KEYS
        assert result["versions"] == [1]


def test_the_release_before_keeps_its_map_where_it_knows_no_newer_one(
    sided: SidedServers, tmp_path: Path
) -> None:
    """A zone, and a partition of two servers that share nothing else, need an upgraded fleet."""
    ports = [stable_port(), stable_port()]
    shard_map = tmp_path / "shards.json"

    def write(version: int, *owned: dict[str, Any]) -> None:
        servers = [
            {"address": f"127.0.0.1:{port}", **owner}
            for port, owner in zip(ports, owned, strict=True)
        ]
        shards = {"model": "default", "version": version, "partitions": 8, "servers": servers}
        temporary = shard_map.with_suffix(".new")
        temporary.write_text(json.dumps(shards))
        temporary.replace(shard_map)

    write(1, {"partitions": ["0-3"]}, {"partitions": ["4-7"]})
    old, new = (
        sided.start(
            side, create(side, tmp_path / side.name, "--table", f"items:{DIM}:f32:{4 * KEYS}"),
            "--shard-map", shard_map, port=port,
        )
        for side, port in zip((OLD, NEW), ports, strict=True)
    )  # fmt: skip
    write(2, {"partitions": ["0-3"], "zone": "east"}, {"partitions": ["4-7"], "zone": "west"})
    wait_for_map(new, 2)
    wait_until("the reason for zones", lambda: "zone" in old.status()["shard_map_error"])
    write(3, {"partitions": ["0-4"]}, {"partitions": ["4-7"]})
    wait_for_map(new, 3)
    wait_until("the reason for sharing", lambda: "shar" in old.status()["shard_map_error"])
    assert old.status()["shard"]["map_version"] == 1
    for server in (old, new):
        server.end()
