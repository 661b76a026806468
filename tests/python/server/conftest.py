"""Fixtures: a pool with rows, served in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import petps
import petps.v1.petps_pb2_grpc as stubs
from petps import config
from petps.server import Serving
from tests.disk import roomy_disk

Start = Callable[..., Serving]
Stub = Any


@pytest.fixture(scope="session", autouse=True)
def roomy() -> Iterator[None]:
    """Let no test depend on how full the disk of this machine is."""
    with roomy_disk():
        yield


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    path = tmp_path / "pool"
    with petps.create(path, durability="process") as opened:
        opened.create_table("items", dim=4, capacity=1000)
        opened.create_table("fed", dim=4, capacity=1000, feed="delta")
        keys = np.arange(100, dtype=np.uint64)
        opened.push("items", keys, np.ones((100, 4), np.float32))
    return path


def settings(pool: Path, **sections: dict[str, Any]) -> config.Config:
    """Return a configuration with free ports."""
    server = {"port": 0, "http_port": 0, "grpc_port": 0, **sections.pop("server", {})}
    return config.merge(None, {"pool": {"path": pool}, "server": server, **sections}, "test")


@pytest.fixture
def start(pool: Path) -> Iterator[Start]:
    with contextlib.ExitStack() as stack:
        yield lambda **sections: stack.enter_context(Serving(settings(pool, **sections)))


@pytest.fixture
def channels() -> Iterator[Callable[[Serving], grpc.Channel]]:
    with contextlib.ExitStack() as stack:
        yield lambda serving: stack.enter_context(
            grpc.insecure_channel(f"127.0.0.1:{serving.grpc_port}")
        )


@pytest.fixture
def connect(channels: Callable[[Serving], grpc.Channel]) -> Callable[[Serving], Stub]:
    return lambda serving: stubs.PetpsStub(channels(serving))


@pytest.fixture
def serving(start: Start) -> Serving:
    """Return a server with the default settings."""
    return start()


@pytest.fixture
def stub(connect: Callable[[Serving], Stub], serving: Serving) -> Stub:
    """Return a client of ``serving``."""
    return connect(serving)
