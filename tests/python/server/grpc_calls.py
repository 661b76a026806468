"""Common parts of the gRPC tests: requests, keys, refusals, streams."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest

from petps import _native
from petps.server import Serving

TIMEOUT = 30.0  # only against hangs


def values(keys: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return float32[n, 4] rows that identify their keys."""
    rows: np.ndarray[Any, np.dtype[np.float32]] = np.add.outer(
        np.asarray(keys, np.float32), np.arange(4, dtype=np.float32), dtype=np.float32
    )
    return rows


def packed(*keys: int) -> bytes:
    return np.array(keys, "<u8").tobytes()


def present(rows: Any, n: int) -> list[bool]:
    bits = np.unpackbits(np.frombuffer(rows.present, np.uint8), bitorder="little")
    assert not bits[n:].any()
    return [bool(bit) for bit in bits[:n]]


def commit(serving: Serving, version: int, instance: int = 1, partitions: int = 8) -> None:
    for partition in range(partitions):
        serving._tables.record_progress(
            _native.Progress(
                instance=instance,
                partition=partition,
                run=1,
                seq=version,
                offset=version,
                version=version,
            )
        )


def refused(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str, dict[str, Any]]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    return error.code(), error.details(), dict(error.trailing_metadata())


def await_parked(serving: Serving, count: int = 1) -> None:
    tick = threading.Event()
    while serving._server.stats()["waits_for_version"] < count:
        tick.wait(0.005)


def until(stream: Any, instance: str, wanted: Callable[[Any], bool]) -> list[Any]:
    """Return a stream's changes up to the first wanted change of the instance."""
    seen = []
    for change in stream:
        seen.append(change)
        if change.instance.name == instance and wanted(change):
            return seen
    raise AssertionError(f"the stream ended after {seen}")
