"""Common parts of the gRPC tests: requests, keys, refusals, streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest

from petps import _native
from petps.server import Serving
from tests.python.waiting import wait_until

TIMEOUT = 30.0  # seconds, against hangs only


def values(keys: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return float32[n, 4] rows that identify their keys."""
    rows: np.ndarray[Any, np.dtype[np.float32]] = np.add.outer(
        np.asarray(keys, np.float32), np.arange(4, dtype=np.float32), dtype=np.float32
    )
    return rows


def pack_keys(*keys: int) -> bytes:
    return np.array(keys, "<u8").tobytes()


def unpack_present(rows: Any, n: int) -> list[bool]:
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


def refusal_of(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str, dict[str, Any]]:
    """Return code, text and trailing metadata of a call that must fail."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    return error.code(), error.details(), dict(error.trailing_metadata())


def wait_for_waiting_pulls(serving: Serving, count: int = 1) -> None:
    """Wait until ``count`` pulls have had to wait for a version."""
    wait_until(lambda: serving._server.stats()["waits_for_version"] >= count)


def read_until(stream: Any, instance: str, condition: Callable[[Any], bool]) -> list[Any]:
    """Return a stream's changes up to the first of the instance that meets the condition."""
    seen = []
    for change in stream:
        seen.append(change)
        if change.instance.name == instance and condition(change):
            return seen
    raise AssertionError(f"the stream ended after {seen}")
