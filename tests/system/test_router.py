"""`petps router` in front of real servers: kills, tokens, and a client that knows one address."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import petps_client
import pytest

import petps
import petps.v1.petps_pb2 as messages
import petps.v1.petps_pb2_grpc as stubs
from tests.system import frames, servers
from tests.system.routers import Router
from tests.system.servers import Fleet, Puller, Server, wait_until

pytestmark = pytest.mark.system

DIM = 8
KEYS = 3000
ALL = np.arange(KEYS, dtype=np.uint64)


@pytest.fixture
def route(tmp_path: Path) -> Iterator[Callable[..., Router]]:
    """Yield a function that starts a Router."""
    routers: list[Router] = []

    def start(url: str, *arguments: object) -> Router:
        routers.append(Router(url, tmp_path, *arguments))
        return routers[-1]

    yield start
    for router in routers:
        router.kill()


def rows_of(keys: npt.NDArray[np.uint64], version: int) -> npt.NDArray[np.float32]:
    columns = np.arange(DIM, dtype=np.float32)
    return (keys.astype(np.float32)[:, None] + columns * np.float32(version)).astype(np.float32)


@pytest.fixture
def fleet(serve: Callable[..., Server], tmp_path: Path) -> Fleet:
    """Return two servers, each with half of the partitions and the rows of version 1."""
    pools = [tmp_path / f"server{number}" / "pool" for number in range(2)]
    for path in pools:
        path.parent.mkdir()
        with petps.create(path, durability="process") as opened:
            opened.create_table("items", dim=DIM, capacity=4 * KEYS)
    started = Fleet(serve, tmp_path, pools, "")
    started.own(["0-3"], ["4-7"])
    with servers.connect(started.url(0)) as client:
        client.push("items", ALL, rows_of(ALL, 1), deadline_ms=servers.WAIT_MS)
    return started


def address_of(fleet: Fleet) -> str:
    return fleet.url(0, 1).removesuffix("/default")


def check(client: petps_client.Client, version: int = 1) -> None:
    rows, found = client.pull("items", ALL, return_mask=True)
    assert found.all()
    np.testing.assert_array_equal(rows, rows_of(ALL, version))


def test_a_client_that_knows_one_address_reaches_every_partition(
    fleet: Fleet, route: Callable[..., Router]
) -> None:
    router = route(address_of(fleet))
    with servers.connect(router.url) as client:
        check(client)
        client.push("items", ALL, rows_of(ALL, 2))
        check(client, 2)
    with servers.connect(fleet.url(1)) as client:
        check(client, 2)
    # A client of the protocol's document alone, which has no shard maps.
    with frames.Connection(router.port) as connection:
        hello = connection.ask(frames.HELLO, b"\x01\x00\x01\x00" + bytes(8))
        assert len(hello) >= 200
        tables = connection.ask(frames.TABLES, b"")
        assert b"items" in tables
        rows, found = connection.pull(1, DIM, ALL[:500])
        assert found.all()
        np.testing.assert_array_equal(rows, rows_of(ALL[:500], 2))
    wait_until("it is ready", lambda: router.is_well("readyz"))
    assert router.is_well("healthz")
    assert "petps_router_pulls_total" in router.read("metrics")
    status = json.loads(servers.petps("status", router.url, "--json"))
    assert status["kind"] == "router"
    assert json.loads(router.read("status.json"))["grpc"]["error"] == ""
    assert "petps_grpc_failed 0.0" in router.read("metrics")
    assert "closed cleanly" in router.stop()


def test_grpc_reaches_every_partition(fleet: Fleet, route: Callable[..., Router]) -> None:
    router = route(address_of(fleet))
    target = f"127.0.0.1:{router.wait_ready()['grpc_port']}"
    with grpc.insecure_channel(target) as channel:
        stub: Any = stubs.PetpsStub(channel)
        tables = stub.ListTables(messages.ListTablesRequest(model="default"), timeout=30)
        assert [(table.name, table.dim, table.rows) for table in tables.tables] == [
            ("items", DIM, KEYS)
        ]
        keys = np.concatenate([ALL, ALL[:10] + np.uint64(10 * KEYS)])
        request = messages.PullRequest(
            model="default", table="items", keys=keys.tobytes(), form=messages.FORM_F32
        )
        reply = stub.Pull(request, timeout=30)
        found = np.unpackbits(np.frombuffer(reply.rows.present, np.uint8), bitorder="little")
        np.testing.assert_array_equal(found[: len(keys)], keys < KEYS)
        rows = np.frombuffer(reply.rows.rows, np.float32).reshape(-1, DIM)
        np.testing.assert_array_equal(rows, rows_of(ALL, 1))
        pushed = messages.PushRequest(
            model="default", table="items", keys=ALL[:7].tobytes(),
            rows=rows_of(ALL[:7], 5).tobytes(), form=messages.FORM_F32,
        )  # fmt: skip
        assert stub.Push(pushed, timeout=30).updated == 7
        shard_map = stub.ReadShardMap(messages.ReadShardMapRequest(known_version=9), timeout=30)
        assert [len(group.servers) for group in shard_map.groups] == [1]
        assert list(shard_map.groups[0].partitions) == list(range(servers.PARTITIONS))
        for call, code in (
            (lambda: stub.Pull(messages.PullRequest(model="other", table="items")), "NOT_FOUND"),
            (lambda: stub.Pull(messages.PullRequest(table="other")), "NOT_FOUND"),
            (lambda: list(stub.WatchVersions(messages.WatchVersionsRequest())), "UNIMPLEMENTED"),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call()
            assert refused.value.code().name == code
    with servers.connect(fleet.url(0)) as client:
        np.testing.assert_array_equal(client.pull("items", ALL[:7]), rows_of(ALL[:7], 5))


def test_a_cancelled_grpc_call_waits_for_no_version(
    fleet: Fleet, route: Callable[..., Router]
) -> None:
    router = route(address_of(fleet), "--calls", 8)

    def calls_in_flight() -> int:
        count: int = json.loads(router.read("status.json"))["calls_in_flight"]
        return count

    with grpc.insecure_channel(f"127.0.0.1:{router.wait_ready()['grpc_port']}") as channel:
        stub: Any = stubs.PetpsStub(channel)
        request = messages.PullRequest(
            model="default", table="items", keys=ALL.tobytes(), min_version=99, wait_ms=3_600_000
        )
        for _ in range(3):
            waiting = stub.Pull.future(request, timeout=3600)
            wait_until("the call waits", lambda: calls_in_flight() == 1)
            waiting.cancel()
            wait_until("the call has ended", lambda: calls_in_flight() == 0)


def test_servers_and_router_are_killed_and_come_back(
    fleet: Fleet, route: Callable[..., Router]
) -> None:
    router = route(address_of(fleet), "--calls", 16)
    with Puller(router.url, check, deadline_ms=3_000) as puller:

        def go_on() -> None:
            before = puller.pulls
            wait_until("pulls go on", lambda: puller.pulls > before + 5)
            puller.check()

        go_on()
        for server in fleet.servers:
            server.restart()
            go_on()
        router.kill()
        router.launch()
        router.wait_ready()
        go_on()


def test_hostile_bytes_end_their_connection_only(
    fleet: Fleet, route: Callable[..., Router]
) -> None:
    router = route(address_of(fleet))
    url = router.url
    for content in (
        b"GET / HTTP/1.1\r\n\r\n" * 4,
        b"\x16\x03\x01" + bytes(200),
        b"PTPS" + b"\xff" * 60,
    ):
        with socket.create_connection(("127.0.0.1", router.port), timeout=30) as stranger:
            stranger.sendall(content)
            answer = b""
            while part := stranger.recv(65536):
                answer += part
            assert answer.startswith(b"PTPS")
    with servers.connect(url) as client:
        check(client)


def test_callers_with_tokens_have_their_own_rights(
    serve: Callable[..., Server], route: Callable[..., Router], tmp_path: Path
) -> None:
    pool = tmp_path / "pool"
    with petps.create(pool, durability="process") as opened:
        opened.create_table("items", dim=DIM, capacity=4 * KEYS)
        opened.push("items", ALL, rows_of(ALL, 1))
    access = tmp_path / "access.json"
    tokens: dict[str, str] = {}
    for name, role in [("writer", "write"), *((f"reader{n}", "read") for n in range(12))]:
        file = tmp_path / name
        servers.petps("token", "new", name, "--role", role, "--out", file, "--file", access)
        tokens[name] = file.read_text().strip()
    config = tmp_path / "petps.toml"
    config.write_text(f'[pool]\npath = "unused"\n[access]\nfile = "{access}"\n')
    server = serve(pool, "--config", config)
    router = route(f"petps://127.0.0.1:{server.wait_ready()['port']}")
    url = router.url
    errors: list[BaseException] = []

    def read(name: str) -> None:
        try:
            with servers.connect(url, token=tokens[name]) as client:
                for _ in range(20):
                    check(client)
                    with pytest.raises(petps_client.PermissionDenied):
                        client.push("items", ALL[:3], rows_of(ALL[:3], 1))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(name,)) for name in tokens if name != "writer"]
    for thread in threads:
        thread.start()
    with servers.connect(url, token=tokens["writer"]) as writer:
        while any(thread.is_alive() for thread in threads):
            writer.push("items", ALL, rows_of(ALL, 1))
            with pytest.raises(petps_client.PermissionDenied):
                writer.pull("items", ALL[:3])
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    with pytest.raises(petps_client.Unauthenticated):
        servers.connect(url)
    with grpc.insecure_channel(f"127.0.0.1:{router.wait_ready()['grpc_port']}") as channel:
        stub: Any = stubs.PetpsStub(channel)
        request = messages.PullRequest(table="items", keys=ALL.tobytes())
        for token, code in (
            (tokens["reader0"], ""),
            (tokens["writer"], "PERMISSION_DENIED"),
            ("petps_wrong", "UNAUTHENTICATED"),
            ("", "UNAUTHENTICATED"),
        ):
            metadata = [("authorization", f"Bearer {token}")] if token else []
            if not code:
                assert stub.Pull(request, metadata=metadata, timeout=30).rows.rows_found == KEYS
                continue
            with pytest.raises(grpc.RpcError) as refused:
                stub.Pull(request, metadata=metadata, timeout=30)
            assert refused.value.code().name == code
    with pytest.raises(urllib.error.HTTPError, match="401"):
        router.read("metrics")
    assert "petps_router_callers 13.0" in router.read("metrics", tokens["reader0"])
