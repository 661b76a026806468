"""Tries every cell of the table in docs/reference/access.md: who gets in, and which error others.

The server is one process, and each door is used as a client would use it.
"""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import petps
import petps.admin.admin_pb2 as admin
import petps.v1.petps_pb2 as messages
import petps.v1.petps_pb2_grpc as stubs
from petps import config
from petps.admin.admin_pb2_grpc import AdminStub
from petps.admin.client import AdminClient
from petps.config import RouterConfig, TlsConfig
from petps.errors import PetpsError, class_of
from petps.router.process import Routing
from petps.server import Serving
from petps.server.access_file import AccessFile, Entry, hash_of
from petps.v1.service import CODE_KEY
from tests.system import frames, servers
from tests.system.access_document import table_of

SECONDS: Final = 60.0
FIRST_TABLE: Final = 1  # the id of a pool's first table, and at a router of a caller's
Door = Serving | Routing
GRANTS: Final = {
    "read": (["read"], "*"),
    "write": (["write"], "*"),
    "admin": (["admin"], "*"),
    "other model": (["read", "write", "admin"], ["other"]),
    "revoked": (["read", "write", "admin"], "*"),
    "expired": (["read", "write", "admin"], "*"),
}
HTTP_CODES: Final = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
}


@dataclass(frozen=True)
class Cell:
    door: str
    operation: str
    credential: str
    outcome: str

    def __str__(self) -> str:
        return f"{self.door}-{self.operation}-{self.credential}"


def read_table() -> list[Cell]:
    header, *rows = table_of("Credentials and operations")
    assert header[:2] == ["door", "operation"]
    return [
        Cell(row[0], row[1], credential, outcome)
        for row in rows
        for credential, outcome in zip(header[2:], row[2:], strict=True)
    ]


CELLS: Final = read_table()


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("access")
    path = folder / "pool"
    with petps.create(path, durability="process") as pool:
        pool.create_model("ranking", partitions=2)
        pool.create_table("items", dim=4, capacity=1000)
        pool.push("items", np.arange(100, dtype=np.uint64), np.ones((100, 4), np.float32))
    file = AccessFile(folder / "access.json")
    for name, (roles, models) in GRANTS.items():
        file.add(
            Entry(
                name=name.replace(" ", "-"),
                token_sha256=hash_of(token_of(name) or ""),
                roles=roles,  # type: ignore[arg-type]
                models=models,  # type: ignore[arg-type]
                expires="1999-01-01T00:00:00Z" if name == "expired" else None,
            )
        )
    sections: dict[str, Any] = {
        "pool": {"path": path},
        "server": {"port": 0, "http_port": 0, "grpc_port": 0, "admin_port": 0},
        "access": {"file": folder / "access.json"},
    }
    with Serving(config.merge(None, sections, "test"), log=lambda line: None) as serving:
        file.remove("revoked")
        serving.follow_credentials()
        yield serving


@pytest.fixture(scope="module")
def routing(serving: Serving) -> Iterator[Routing]:
    router = RouterConfig.model_validate(
        {
            "servers": f"petps://127.0.0.1:{serving.port}",
            "deadline_seconds": SECONDS,
            "port": 0,
            "http_port": 0,
            "grpc_port": 0,
        }
    )
    with Routing(router, TlsConfig(), log=lambda line: None) as routing:
        yield routing


def token_of(credential: str) -> str | None:
    return None if credential == "no token" else f"token of {credential}".replace(" ", "_")


def outcome_of(code: str, text: str) -> str:
    """Return the code; after ten failed logins of this address, further ones have another."""
    is_login = code == "RESOURCE_EXHAUSTED" and "failed logins from 127.0.0.1 within" in text
    return "UNAUTHENTICATED" if is_login else code


def by_frame(port: int, operation: str, token: str | None) -> str:
    """Send a request that a client sends on its own."""
    try:
        with frames.Connection(port, SECONDS) as connection:
            if token is not None:
                connection.hello(token)
            if operation == "hot keys":
                connection.send_hot_keys(FIRST_TABLE, np.array([1], np.uint64))
            else:
                connection.ask(frames.SHARD_MAP, b"")
    except frames.Refused as error:
        return outcome_of(class_of(error.code).code, str(error))
    return "yes"


def native(door: Door, operation: str, token: str | None) -> str:
    if operation in ("hot keys", "shard map"):
        return by_frame(door.port, operation, token)
    try:
        url = f"petps://127.0.0.1:{door.port}/ranking"
        with servers.connect(url, token=token, hot_sample_every=0) as client:
            calls: dict[str, Callable[[], Any]] = {
                "pull": lambda: client.pull("items", [1]),
                "push": lambda: client.push("items", [1], np.ones((1, 4), np.float32)),
                "tables": client.tables,
                "status": client.status,
            }
            calls[operation]()
    except PetpsError as error:
        return outcome_of(error.code, str(error))
    return "yes"


def by_grpc(door: Door, operation: str, token: str | None) -> str:
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    keys = np.array([1], "<u8").tobytes()
    rows = np.ones((1, 4), "<f4").tobytes()
    named = {"model": "ranking", "table": "items"}
    with grpc.insecure_channel(f"127.0.0.1:{door.grpc_port}") as channel:
        stub = stubs.PetpsStub(channel)
        requests: dict[str, Any] = {
            "Pull": messages.PullRequest(**named, keys=keys),
            "PullMany": messages.PullManyRequest(
                model="ranking",
                sections=[messages.PullManyRequest.Section(table="items", keys=keys)],
            ),
            "Push": messages.PushRequest(**named, keys=keys, rows=rows),
            "ListTables": messages.ListTablesRequest(model="ranking"),
            "SetHotKeys": messages.SetHotKeysRequest(**named, keys=keys),
            "WatchVersions": messages.WatchVersionsRequest(model="ranking"),
            "ReadShardMap": messages.ReadShardMapRequest(model="ranking"),
            "Status": messages.StatusRequest(),
            "health": health_pb2.HealthCheckRequest(),
        }
        call = (
            health_pb2_grpc.HealthStub(channel).Check
            if operation == "health"
            else getattr(stub, operation)
        )
        try:
            answer = call(requests[operation], metadata=metadata, timeout=SECONDS)
            if operation == "WatchVersions":
                next(iter(answer))
                answer.cancel()
        except grpc.RpcError as error:
            trailing = dict(error.trailing_metadata() or ())
            return outcome_of(str(trailing[CODE_KEY]), str(error))
    return "yes"


def by_http(door: Door, operation: str, token: str | None) -> str:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    site = f"http://127.0.0.1:{door.http_port}"
    body = None
    if operation.startswith("POST "):
        instance = door.status()["instances"][0]["name"]
        body = json.dumps({"alias": "ranking", "instance": instance, "expected": instance}).encode()
        headers |= {"Origin": site, "Content-Type": "application/json"}
    request = urllib.request.Request(site + operation.removeprefix("POST "), body, headers)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS):
            return "yes"
    except urllib.error.HTTPError as error:
        with error:
            return outcome_of(HTTP_CODES[error.code], error.read().decode())


def administer(target: str, operation: str, serving: Serving) -> str:
    try:
        with contextlib.closing(AdminClient(target)) as client:
            if operation == "CreateTable":
                name = f"new{len(serving.status()['tables'])}"
                client.create_table(name, dim=4, capacity=10, model="ranking")
            elif operation == "Verify":
                client.verify()
            else:
                client.status()
    except PetpsError as error:
        return outcome_of(error.code, str(error))
    return "yes"


def administer_by_call(serving: Serving, operation: str, token: str | None) -> str:
    """Make a call of the admin port with an empty request: an admin hears what it lacks."""
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    call = admin.DESCRIPTOR.services_by_name["Admin"].methods_by_name[operation]
    request = getattr(admin, call.input_type.name)()
    with grpc.insecure_channel(f"127.0.0.1:{serving.admin_port}") as channel:
        try:
            answer = getattr(AdminStub(channel), operation)(
                request, metadata=metadata, timeout=SECONDS
            )
            if call.server_streaming:
                for _ in answer:
                    pass
        except grpc.RpcError as error:
            trailing = dict(error.trailing_metadata() or ())
            return outcome_of(str(trailing[CODE_KEY]), str(error))
    return "yes"


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_cell(
    cell: Cell,
    serving: Serving,
    routing: Routing,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    token = token_of(cell.credential)
    if token is not None:
        (tmp_path / "token").write_text(f"{token}\n")
        monkeypatch.setenv("PETPS_TOKEN_FILE", str(tmp_path / "token"))
    kind = cell.door.removeprefix("router's ")
    door: Any = serving if kind == cell.door else routing
    if kind == "native":
        outcome = native(door, cell.operation, token)
    elif kind == "gRPC":
        outcome = by_grpc(door, cell.operation, token)
    elif kind == "HTTP":
        outcome = by_http(door, cell.operation, token)
    elif cell.door == "admin port" and cell.operation not in ("CreateTable", "Status", "Verify"):
        outcome = administer_by_call(serving, cell.operation, token)
    elif cell.door == "admin port":
        target = f"petps+admin://127.0.0.1:{serving.admin_port}"
        outcome = administer(target, cell.operation, serving)
    else:
        assert cell.door == "socket"
        outcome = administer(serving.status()["pool"]["path"], cell.operation, serving)
    assert outcome == cell.outcome


def test_the_table_has_every_door_and_call() -> None:
    """A call that is added to a service needs a row."""
    by_door: dict[str, set[str]] = {}
    for cell in CELLS:
        by_door.setdefault(cell.door, set()).add(cell.operation)
    service = messages.DESCRIPTOR.services_by_name["Petps"]
    calls = {method.name for method in service.methods} | {"health"}
    assert by_door["gRPC"] == by_door["router's gRPC"] == calls
    of_admin = admin.DESCRIPTOR.services_by_name["Admin"]
    assert by_door["admin port"] == {method.name for method in of_admin.methods}
    opcodes = {"pull", "push", "tables", "status", "hot keys", "shard map"}
    assert by_door["native"] == by_door["router's native"] == opcodes
    assert by_door["router's HTTP"] < by_door["HTTP"]
