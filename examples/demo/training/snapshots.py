"""The trainer's exact rows of some versions, in files, because the store rounds rows.

Owns:        Snapshots (the hook of a rank's Pipeline), Trained, has_snapshot(), read_snapshot(),
             remove_snapshots().
Never does:  decide which versions are compared (task.py does).
Called by:   rank.py writes; course.py, live.py and upkeep.py read and remove.
Invariants:  a version of the store whose step is_scored() has the files of all ranks once it
             exists, because the hook runs before the one that begins the version.
Threads:     the trainer's; any for reading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from examples.demo.ratings import Keys
from examples.demo.training.task import WORLD, Settings, Task
from petps.train import ShardedTables, Timeline
from petps.train.pipeline import Boundary

__all__ = ["Snapshots", "Trained", "has_snapshot", "read_snapshot", "remove_snapshots"]

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Trained:
    """The trainer's rows of a table: uint64[n], ascending, and float32[n, width] by column."""

    keys: Keys
    columns: Mapping[str, Floats]


class Snapshots:
    """A hook that writes this rank's rows to a file after each step that is scored."""

    def __init__(
        self, settings: Settings, task: Task, tables: ShardedTables, life: int, timeline: Timeline
    ) -> None:
        self._settings, self._task, self._tables = settings, task, tables
        self._life, self._timeline = life, timeline

    def wants(self, step: int) -> bool:
        """See Hook."""
        return self._task.is_scored(step)

    def act(self, boundary: Boundary) -> None:
        """See Hook. Called on all ranks for a step that one of them wants."""
        with self._timeline.span("compute", "snapshot", boundary.step):
            self._write(boundary.step)

    def end(self, boundary: Boundary) -> None:
        """See Hook. The last step is scored, so its file exists already."""

    def _write(self, step: int) -> None:
        arrays: dict[str, npt.NDArray[np.generic]] = {}
        for table in self._tables:
            keys = table.keys()
            arrays[f"{table.name}/keys"] = keys
            for name, values in table.gather(keys).columns.items():
                arrays[f"{table.name}/{name}"] = values
        path = _path_of(self._settings, self._life, step, self._tables.rank)
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        part.replace(path)


def has_snapshot(settings: Settings, life: int, step: int) -> bool:
    """Return whether all ranks have written their rows of the step."""
    return all(_path_of(settings, life, step, rank).exists() for rank in range(WORLD))


def read_snapshot(settings: Settings, life: int, step: int) -> dict[str, Trained]:
    """Return the rows of all ranks by table. Raise FileNotFoundError if they were removed."""
    parts: dict[str, list[dict[str, npt.NDArray[np.generic]]]] = {}
    for rank in range(WORLD):
        with np.load(_path_of(settings, life, step, rank), allow_pickle=False) as arrays:
            by_table: dict[str, dict[str, npt.NDArray[np.generic]]] = {}
            for name in arrays.files:
                table, _, column = name.rpartition("/")
                by_table.setdefault(table, {})[column] = arrays[name]
        for table, columns in by_table.items():
            parts.setdefault(table, []).append(columns)
    return {table: _join(shards) for table, shards in parts.items()}


def _join(shards: list[dict[str, npt.NDArray[np.generic]]]) -> Trained:
    joined = {name: np.concatenate([shard[name] for shard in shards]) for name in shards[0]}
    keys = joined.pop("keys").astype(np.uint64)
    order = np.argsort(keys)
    return Trained(keys[order], {name: values[order] for name, values in joined.items()})


def remove_snapshots(settings: Settings, is_needed: Callable[[int, int], bool]) -> None:
    """Remove the files of each life and step for which ``is_needed`` returns False."""
    for path in settings.path(".").glob("snapshot-*.npz"):
        _, life, step, _ = path.stem.split("-")
        if not is_needed(int(life), int(step)):
            path.unlink(missing_ok=True)


def _path_of(settings: Settings, life: int, step: int, rank: int) -> Path:
    return settings.path(f"snapshot-{life}-{step}-{rank}.npz")
