"""The store that open_store() makes: one for all ranks, quantised, with more bits when needed.

Does not cover: what the bits cost a model (bench/checkpoint/loss.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from petps.checkpoint import POLICIES, Quantising, Store
from petps.errors import PetpsError
from petps.train import (
    Adam,
    Batch,
    Every,
    Links,
    Pipeline,
    PipelineOptions,
    Ragged,
    RankedOutput,
    ShardedTables,
    TableSpec,
    open_store,
)
from tests.train.rank_threads import in_threads

WORLD = 2
STEPS = 3
STATE = {"mean": "asymmetric8", "variance": "f32", "steps": "f32"}  # "steps": one value a row


class Model(torch.nn.Module):  # type: ignore[misc]
    """A model that reads one table."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(16))

    def forward(self, lookups: Any, batch: Any) -> Any:
        del batch
        return (lookups["item"].pooled() * self.scale).mean()


def open_tables(rank: int) -> ShardedTables:
    specs = [TableSpec("item", 16, 10_000)]
    return ShardedTables(None, specs, Adam(0.1), rank=rank, world=WORLD)


def train(folder: Path, rank: int, links: Links, **options: Any) -> None:
    """Restore the newest version, train STEPS steps, and write a version."""
    model = Model()
    with open_tables(rank) as tables:
        store = open_store(folder / "store", "m", tables, links, **options)
        with RankedOutput(
            tables, links, store=store, policy=POLICIES["full"](), checkpoint=Every(steps=STEPS),
            model=model, staging=folder / "staging",
        ) as output:  # fmt: skip
            first = output.restore().step + 1
            keys = [np.arange(50, dtype=np.uint64) * 7 + step for step in range(STEPS)]
            loader = (Batch({"item": Ragged.single(part)}, {}, b"") for part in keys)
            with Pipeline(
                model, tables, loader, links=links, hooks=[output],
                options=PipelineOptions(first_step=first),
            ) as pipeline:  # fmt: skip
                pipeline.run()


def train_once(folder: Path, **options: Any) -> Store:
    in_threads(WORLD, lambda rank, links: train(folder, rank, links, **options))
    return Store.open(folder / "store")


def dtypes_of(store: Store) -> dict[str, str]:
    return {column.name: column.dtype for column in store.tables_of()["item"].columns}


def test_a_training_is_quantised_by_default(tmp_path: Path) -> None:
    assert dtypes_of(train_once(tmp_path)) == {"row": "adaptive4", **STATE}
    # The next run finds the store, and resumes from it.
    store = train_once(tmp_path)
    assert [entry.version for entry in store.state.versions()] == [STEPS, 2 * STEPS]
    assert store.state.restores == 1
    assert dtypes_of(store) == {"row": "adaptive4", **STATE}


def test_more_resumes_than_expected_give_eight_bits(tmp_path: Path) -> None:
    dtypes = [
        dtypes_of(train_once(tmp_path, quantising=Quantising.for_training(24, 24)))["row"]
        for _ in range(3)
    ]
    assert dtypes == ["adaptive2", "adaptive2", "asymmetric8"]


def test_rows_stay_as_they_are_on_request(tmp_path: Path) -> None:
    assert set(dtypes_of(train_once(tmp_path, quantising=None)).values()) == {"f32"}


def test_an_error_of_rank_0_reaches_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("no folder")

    def work(rank: int, links: Links) -> str:
        with open_tables(rank) as tables:
            try:
                open_store(tmp_path / "store", "m", tables, links)
            except PetpsError as error:
                return f"{type(error).__name__}: {error}"
        return ""

    first, second = in_threads(WORLD, work)
    assert first.startswith("IoError"), first
    assert str(tmp_path / "store") in first
    assert second.startswith("Unavailable: the store was not created: rank 0: IoError"), second
