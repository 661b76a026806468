"""A model that trains on a trace, and the contents of each of its versions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from petps.checkpoint import Checkpointer, Store
from petps.checkpoint.chunk import Bytes, Keys, Mask, Rows, Table


class Replay:
    """A Source. ``steps[v-1]``: the keys that version v changes; some of them are deletions.

    A row is computed from its key and the version that wrote it last, so the contents of any
    version are known without a copy of it.
    """

    def __init__(
        self, tables: Mapping[str, Table], steps: list[dict[str, Keys]], *, deletes: float = 0.0
    ) -> None:
        self.tables = dict(tables)
        self.steps = steps
        self.deletes = deletes
        self.now = 0

    def written(self, table: str, version: int) -> dict[str, npt.NDArray[np.int64]]:
        """Return the version that wrote each key last, negative if that version deleted it."""
        size = 1 + max((int(step[table].max(initial=0)) for step in self.steps), default=0)
        last = np.zeros(size, np.int64)
        for number, step in enumerate(self.steps[:version], 1):
            keys = step[table].astype(np.int64)
            gone = (keys * 2654435761 + number * 40503) % 1000 < 1000 * self.deletes
            last[keys] = np.where(gone, -number, number)
        return {"last": last}

    def _last(self, table: str) -> npt.NDArray[np.int64]:
        return self.written(table, self.now)["last"]

    def keys(self, table: str, since: int | None) -> Keys:
        """See Source."""
        last = self._last(table)
        chosen = last > 0 if since is None else np.abs(last) > since
        return np.flatnonzero(chosen).astype(np.uint64)

    def rows(self, table: str, keys: Keys) -> tuple[Mapping[str, Bytes], Mask | None]:
        """See Source."""
        last = self._last(table)[keys.astype(np.int64)]
        return self.values(table, keys, np.abs(last)), last < 0

    def values(self, table: str, keys: Keys, versions: npt.NDArray[np.int64]) -> dict[str, Bytes]:
        """Return the columns that those versions wrote."""
        out: dict[str, Bytes] = {}
        for number, column in enumerate(self.tables[table].columns):
            places = np.arange(column.dim)
            mixed = keys.astype(np.int64)[:, None] * 7919 + versions[:, None] * 104_729
            mixed = (mixed + places * 31 + number) % 1_000_003
            out[column.name] = column.stored(mixed.astype(np.float32))
        return out

    def at(self, table: str, version: int) -> Rows:
        """Return the rows of a version, replayed."""
        last = self.written(table, version)["last"]
        keys = np.flatnonzero(last > 0).astype(np.uint64)
        return Rows(keys, self.values(table, keys, last[last > 0]))


def assert_same(found: Rows, expected: Rows) -> None:
    """Assert that keys and rows are equal bit by bit, with nothing deleted."""
    np.testing.assert_array_equal(found.keys, expected.keys)
    assert found.deleted is None
    for name, values in expected.columns.items():
        np.testing.assert_array_equal(found.columns[name], values)


def write_versions(writer: Checkpointer, replay: Replay, versions: Iterable[int]) -> None:
    """Write versions of the replay, and arrange after each."""
    for version in versions:
        replay.now = version
        writer.write(version, {"dense": b"%d" % version})
        writer.arrange()


def check_versions(store: Store, replay: Replay, versions: Sequence[int]) -> None:
    """Assert that the store has these versions, and restores each as the replay has it."""
    assert [entry.version for entry in store.state.versions()] == list(versions)
    for version in versions:
        for name, rows in store.restore(version).items():
            assert_same(rows, replay.at(name, version))
        assert store.part(version, "dense") == b"%d" % version
