"""Fixtures: a pool with rows, served in this process."""

from __future__ import annotations

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

Start = Callable[..., Serving]
Stub = Any


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
    return config.merged(None, {"pool": {"path": pool}, "server": server, **sections}, "test")


@pytest.fixture
def start(pool: Path) -> Iterator[Start]:
    started: list[Serving] = []

    def begin(**sections: dict[str, Any]) -> Serving:
        started.append(Serving(settings(pool, **sections)))
        return started[-1]

    yield begin
    for serving in started:
        serving.close()


@pytest.fixture
def channels() -> Iterator[Callable[[Serving], grpc.Channel]]:
    opened: list[grpc.Channel] = []

    def channel(serving: Serving) -> grpc.Channel:
        opened.append(grpc.insecure_channel(f"127.0.0.1:{serving.grpc_port}"))
        return opened[-1]

    yield channel
    for each in opened:
        each.close()


@pytest.fixture
def connect(channels: Callable[[Serving], grpc.Channel]) -> Callable[[Serving], Stub]:
    return lambda serving: stubs.PetpsStub(channels(serving))
