"""One scorer of held-out samples, in float32, for served rows and for the trainer's."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import petps_client
import torch
from petps_client.torch import EmbeddingBagCollection

from examples.demo.dlrm import Logits, compute_logits
from examples.demo.ratings import Keys
from examples.demo.training.model import dense_part
from examples.demo.training.snapshots import Trained
from examples.demo.training.task import DIM, WORLD, Task
from petps.checkpoint import Store
from petps.train.restored import DENSE
from petps.train.table import ROW

__all__ = [
    "Bags",
    "Rows",
    "Scorer",
    "rows_of_pools",
    "rows_of_snapshot",
    "rows_of_version",
    "served_bags",
    "served_weights",
    "trained_bags",
    "weights_of_version",
]

Floats = npt.NDArray[np.float32]
# {field: uint64[n, 1]} -> {field: float32[n, DIM]}: EmbeddingBagCollection's contract.
Bags = Callable[[dict[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a table: keys uint64[n], ascending, and rows float32[n, DIM]."""

    keys: Keys
    rows: Floats

    def of(self, keys: Keys) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Return float32[m, DIM], the rows of ``keys``, zeros if missing; bool[m], which exist."""
        is_present = np.isin(keys, self.keys)
        rows = np.zeros((len(keys), DIM), np.float32)
        rows[is_present] = self.rows[np.searchsorted(self.keys, keys[is_present])]
        return rows, is_present


class Scorer:
    """A scorer of the held-out samples by any rows and weights."""

    def __init__(self, task: Task) -> None:
        torch.set_num_threads(1)
        self._fields = task.fields
        self._dense = dense_part(task)
        self._ids = torch.from_numpy(np.ascontiguousarray(task.held_out.keys))
        self._numbers = torch.from_numpy(task.held_out.numbers)
        self.labels = task.held_out.labels

    def score(self, weights: Mapping[str, Any], bags: Bags) -> Logits:
        """Return float64[n]: logits by dense ``weights`` (a state_dict) and pooled rows."""
        self._dense.load_state_dict(weights)

        def model(ids: Any, numbers: Any) -> Any:
            batch = {name: ids[:, field : field + 1] for field, name in enumerate(self._fields)}
            pooled = bags(batch)
            return self._dense([pooled[name] for name in self._fields], numbers)

        return compute_logits(model, self._ids, self._numbers)


def served_bags(client: petps_client.Client, task: Task, min_version: int) -> Bags:
    """Return bags of a server's rows, of version ``min_version`` or newer."""
    return EmbeddingBagCollection(client, list(task.fields), mode="sum", min_version=min_version)


def trained_bags(tables: Mapping[str, Rows]) -> Bags:
    """Return bags of rows in memory. A key that was never trained has the default row, zeros."""

    def bags(batch: dict[str, Any]) -> dict[str, Any]:
        pooled = {}
        for name, ids in batch.items():
            distinct, places = np.unique(ids.numpy(), return_inverse=True)
            rows, _ = tables[name].of(distinct)
            pooled[name] = torch.nn.functional.embedding_bag(
                torch.from_numpy(places.reshape(-1, 1)), torch.from_numpy(rows), mode="sum"
            )
        return pooled

    return bags


def rows_of_version(store: Store, version: int, task: Task) -> dict[str, Rows]:
    """Read the rows of a version of the store, by field, as the store has rounded them."""
    rows_by_field = {}
    for name in task.fields:
        columns = store.tables_of(version)[name].columns
        row_column = next(column for column in columns if column.name == ROW)
        keys, rows = [np.empty(0, np.uint64)], [np.empty((0, DIM), np.float32)]
        for piece in store.pieces(name, version):
            keys.append(piece.keys)
            rows.append(row_column.values(piece.columns[ROW]))
        rows_by_field[name] = Rows(np.concatenate(keys), np.concatenate(rows))
    return rows_by_field


def rows_of_snapshot(trained: Mapping[str, Trained]) -> dict[str, Rows]:
    """Return the rows of a snapshot, by field."""
    return {name: Rows(table.keys, table.columns[ROW]) for name, table in trained.items()}


def rows_of_pools(task: Task) -> dict[str, Rows]:
    """Read the trainer's rows from the ranks' pools, after the ranks have finished."""
    parts: dict[str, list[Rows]] = {name: [] for name in task.fields}
    for rank in range(WORLD):
        with task.tables(rank) as tables:
            for table in tables:
                keys = table.keys()
                parts[table.name].append(Rows(keys, table.gather(keys).columns[ROW].copy()))
    rows_by_field = {}
    for name, shards in parts.items():
        keys = np.concatenate([shard.keys for shard in shards])
        rows = np.concatenate([shard.rows for shard in shards])
        order = np.argsort(keys)
        rows_by_field[name] = Rows(keys[order], rows[order])
    return rows_by_field


def weights_of_version(store: Store, version: int) -> dict[str, Any]:
    """Read the trainer's dense weights of a version of the store."""
    body = io.BytesIO(store.part(version, DENSE))
    model = torch.load(body, weights_only=True)["model"]
    return {name.removeprefix("dense."): value for name, value in model.items()}


def served_weights(location: str | None, store: Store, version: int) -> dict[str, Any]:
    """Load dense weights from the location in a server's status, which a commit message gave.

    None: the server has caught up to a version of the store, which has the weights.
    """
    if location is None:
        return weights_of_version(store, version)
    weights: dict[str, Any] = torch.load(location, weights_only=True)
    return weights
