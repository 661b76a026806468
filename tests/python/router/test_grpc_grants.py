"""What a router's gRPC port answers without keys counts in a grant's limits, and ends with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

import petps
import petps.v1.petps_pb2 as messages
import petps.v1.petps_pb2_grpc as stubs
from petps import config
from petps.config import RouterConfig, TlsConfig
from petps.router.process import Routing
from petps.server import Serving
from petps.server.access_file import AccessFile, Entry, hash_of

TIMEOUT: Final = 60.0  # seconds, against hangs only
TOKEN: Final = "petps_the-token-of-the-reader"
CREDENTIAL: Final = (("authorization", f"Bearer {TOKEN}"),)
PER_SECOND: Final = 20
CALLS: Final = {
    "ListTables": messages.ListTablesRequest(model="default"),
    "ReadShardMap": messages.ReadShardMapRequest(model="default"),
}
Ask = Callable[[], Any]


@pytest.fixture
def access(tmp_path: Path) -> AccessFile:
    return AccessFile(tmp_path / "access.json")


@pytest.fixture
def serving(tmp_path: Path, access: AccessFile) -> Iterator[Serving]:
    """Yield a server of a grant without limits."""
    with petps.create(tmp_path / "pool", durability="process") as pool:
        pool.create_table("items", dim=4, capacity=1000)
    add_grant(access, 0)
    sections: dict[str, dict[str, Any]] = {
        "pool": {"path": tmp_path / "pool"},
        "server": {"port": 0, "http": False, "grpc": False},
        "access": {"file": tmp_path / "access.json"},
    }
    with Serving(config.merge(None, sections, "test"), log=lambda line: None) as serving:
        yield serving


def add_grant(access: AccessFile, requests_per_second: int) -> None:
    access.add(
        Entry(
            name="writer",
            token_sha256=hash_of(TOKEN),
            roles=["write"],
            models=["default"],
            requests_per_second=requests_per_second,
        )
    )


@pytest.fixture(params=CALLS)
def ask(request: pytest.FixtureRequest, serving: Serving) -> Iterator[Ask]:
    """Yield a function that makes a call at a router, which knows the token already."""
    router = RouterConfig.model_validate(
        {
            "servers": f"petps://127.0.0.1:{serving.port}",
            "deadline_seconds": TIMEOUT,
            "port": 0,
            "http": False,
            "grpc_port": 0,
        }
    )
    with (
        Routing(router, TlsConfig(), log=lambda line: None) as routing,
        grpc.insecure_channel(f"127.0.0.1:{routing.grpc_port}") as channel,
    ):
        call = getattr(stubs.PetpsStub(channel), request.param)

        def ask() -> Any:
            return call(CALLS[request.param], timeout=TIMEOUT, metadata=CREDENTIAL)

        ask()
        yield ask


def refusal_of(ask: Ask, calls: int) -> tuple[grpc.StatusCode, str]:
    """Return code and text of the first call that is refused."""
    for _ in range(calls):
        try:
            ask()
        except grpc.RpcError as error:
            return error.code(), error.details()
    raise AssertionError(f"{calls} calls were answered")


def test_calls_count_in_the_limits_of_the_grant(
    serving: Serving, access: AccessFile, ask: Ask
) -> None:
    access.remove("writer")
    add_grant(access, PER_SECOND)
    serving.follow_credentials()
    code, text = refusal_of(ask, 50 * PER_SECOND)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "'writer' has used up its" in text


def test_a_revoked_token_is_refused_at_once(serving: Serving, access: AccessFile, ask: Ask) -> None:
    ask()  # the router's names are new now
    access.remove("writer")
    serving.follow_credentials()
    code, _ = refusal_of(ask, 1)
    assert code is grpc.StatusCode.UNAUTHENTICATED
