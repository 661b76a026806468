"""staging.process_peak_chunks and staging.pause: what a staged version costs in memory and time.

Peak: the growth of the process's peak memory, in chunks, at two sizes of the same table. Rows are
generated during the copy and discarded by the store, so that memory holds nothing else.
Pause: the time of write(), staged and not, to a store with a limited number of bytes a second.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.checkpoint.policies import Trainer
from petps.checkpoint import POLICIES, Checkpointer, SourceDevice, StagedCheckpointer, Store, Table
from petps.checkpoint.chunk import Keys, Mask
from petps.checkpoint.files import LocalFiles

FOUR: Final = 4


class _Discarding(LocalFiles):
    """A store that discards bundles; it keeps states and lines."""

    def write(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        """See Files."""
        if not path.startswith("data/"):
            super().write(path, pieces)
            return
        for _ in pieces:
            pass


class _Throttled(LocalFiles):
    """A store that accepts a limited number of bundle bytes a second."""

    def __init__(self, root: Path, bytes_per_second: float) -> None:
        super().__init__(root)
        self._rate = bytes_per_second

    def write(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        """See Files."""

        def throttle() -> Iterator[bytes | memoryview]:
            began, written_bytes = time.monotonic(), 0
            for piece in pieces:
                written_bytes += len(piece)
                time.sleep(max(0.0, began + written_bytes / self._rate - time.monotonic()))
                yield piece

        super().write(path, throttle() if path.startswith("data/") else pieces)


class _GeneratedRows:
    """A device that generates rows during the copy."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def keys(self, table: str, since: int | None, at_most: int) -> Iterator[Keys]:
        """See Device."""
        del table, since
        for start in range(0, self._rows, at_most):
            yield np.arange(start, min(start + at_most, self._rows), dtype=np.uint64)

    def copy(self, table: str, keys: Keys, out: Mapping[str, np.ndarray[Any, Any]]) -> Mask | None:
        """See Device."""
        del table
        out["row"][:] = (keys % np.uint64(1000)).astype(np.float32)[:, None]
        return None


def figures(work: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield both results, each measured in a folder of its own."""
    for megabytes in work["peak_mb"]:
        yield from _in_folder(_peak, work, megabytes)
    yield from _in_folder(_pause, work, work["pause_mb"])


def _in_folder(measure: Any, work: dict[str, Any], megabytes: int) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="petps-bench-") as folder:
        yield measure(Path(folder), work, megabytes)


def _peak(folder: Path, work: dict[str, Any], megabytes: int) -> dict[str, Any]:
    dim, chunk = int(work["dim"]), int(work["chunk_mb"]) << 20
    table = Table.of("items", dim)
    rows = (megabytes << 20) // (4 * dim)
    store = Store.create(_Discarding(folder / "store"), "bench", [table])
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the present value
    before = _memory("VmRSS")
    began = time.perf_counter()
    with StagedCheckpointer(
        store, POLICIES["full"](), _GeneratedRows(rows), folder / "ssd", chunk_bytes=chunk,
        folder_bytes=int(work["folder_mb"]) << 20,
    ) as writer:  # fmt: skip
        writer.write(1)
        pause = time.perf_counter() - began
        info = writer.wait()
    peak = (_memory("VmHWM") - before) / chunk
    if info is None or info.rows != rows:
        raise SystemExit("staging: the version is not what the device had")
    return {
        "name": "staging.process_peak_chunks",
        "value": peak,
        "unit": "chunks",
        "ratio_to": "four chunks",
        "ratio": peak / FOUR,
        "rows_mb": megabytes,
        "chunks": len(store.state.lineage.chunks),
        "pause_s": pause,
        "seconds": time.perf_counter() - began,
    }


def _memory(name: str) -> int:
    """Return a size from /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise SystemExit(f"/proc/self/status has no {name}")


def _pause(folder: Path, work: dict[str, Any], megabytes: int) -> dict[str, Any]:
    dim, rate = int(work["dim"]), float(work["store_mb_per_second"]) * 1e6
    trainer = Trainer((megabytes << 20) // (4 * dim), dim)
    table = Table.of("items", dim)
    synchronous_seconds, staged_seconds, commit_seconds = [], [], []
    plain_store = Store.create(_Throttled(folder / "plain", rate), "bench", [table])
    staged_store = Store.create(_Throttled(folder / "behind", rate), "bench", [table])
    policy = POLICIES["full"]()
    writer = Checkpointer(plain_store, policy, trainer)
    device = SourceDevice(trainer, staged_store.state.tables)
    with StagedCheckpointer(staged_store, policy, device, folder / "ssd") as stager:
        for version in range(1, int(work["rounds"]) + 1):
            began = time.perf_counter()
            writer.write(version)
            synchronous_seconds.append(time.perf_counter() - began)
            began = time.perf_counter()
            stager.write(version)
            staged_seconds.append(time.perf_counter() - began)
            stager.wait()
            commit_seconds.append(time.perf_counter() - began)
            for store in (plain_store, staged_store):
                store.purge(1)
    rows = staged_store.restore()["items"].columns["row"].view(np.float32)
    if not np.array_equal(rows, trainer.values):
        raise SystemExit("staging: the version is not what the trainer had")
    value, reference = statistics.median(staged_seconds), statistics.median(synchronous_seconds)
    return {
        "name": "staging.pause",
        "value": value,
        "unit": "s",
        "ratio_to": "synchronous",
        "ratio": value / reference,
        "rows_mb": megabytes,
        "store_mb_per_second": rate / 1e6,
        "until_committed_s": statistics.median(commit_seconds),
    }
