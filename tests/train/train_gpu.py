"""The training loop on a GPU: every mode ends where the synchronous one does. Also times steps.

Run by `make test-train`; skipped visibly without a GPU. train_streams.py needs none.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from petps.train.batch import Batch, Ragged
from petps.train.optimizer import RowwiseAdagrad
from petps.train.options import MODES, Mode, PipelineOptions
from petps.train.pipeline import Pipeline
from petps.train.sharded import ShardedTables, TableSpec
from tests.train import train_processes
from tests.train.rank_threads import OnHost, same, specs_with, train

GPUS = torch.cuda.device_count()
SEED = 11
OVERLAPPING: tuple[Mode, ...] = ("dual", "frozen", "nested")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # matrix products in a fixed order


def _need(gpus: int) -> None:
    if gpus > GPUS:
        pytest.skip(f"{GPUS} GPUs, needs {gpus}: streams were checked on the CPU only")


class OnGpu(OnHost):
    device = "cuda:0"

    def model(self, model: Any) -> Any:
        return model.to(self.device)

    def host(self, tensor: Any) -> Any:
        return tensor.detach().cpu()


@pytest.mark.parametrize("threshold", [1, 2])
def test_two_hundred_steps_end_bit_identical(threshold: int) -> None:
    _need(1)
    specs = specs_with(threshold)
    run: dict[str, Any] = {"steps": 200, "micro_batches": 3, "seed": SEED, "specs": specs}
    reference = train("synchronous", 1, on=OnGpu(), **run)
    for mode in OVERLAPPING:
        assert same(reference, train(mode, 1, on=OnGpu(), **run), specs), mode
    assert not same(reference, train("stale", 1, on=OnGpu(), **run), specs)


def test_two_processes_over_nccl_end_bit_identical(tmp_path: Path) -> None:
    _need(train_processes.WORLD)
    reference = train_processes.train(tmp_path / "synchronous", DEVICE="cuda", MODE="synchronous")
    for mode in OVERLAPPING:
        result = train_processes.train(tmp_path / mode, DEVICE="cuda", MODE=mode)
        train_processes.check_same(reference, result)


class Dense(torch.nn.Module):  # type: ignore[misc]
    """A model with enough work for a GPU to hide the other stages behind it."""

    def __init__(self, features: int, dim: int) -> None:
        super().__init__()
        sizes = [features * dim, 4096, 4096, 1]
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)
        )

    def forward(self, lookups: Any, batch: Batch) -> Any:
        result = torch.cat([lookups[name].pooled() for name in sorted(lookups)], dim=1)
        for layer in self.layers:
            result = torch.relu(layer(result))
        return (result.squeeze(1) - batch.dense["label"]).square().mean()


def _batches(steps: int, samples: int, features: int) -> Iterator[Batch]:
    for step in range(steps):
        random = np.random.default_rng((SEED, step))
        keys = {
            f"f{feature}": Ragged.single(random.zipf(1.2, samples).astype(np.uint64) % 1_000_000)
            for feature in range(features)
        }
        yield Batch(keys, {"label": torch.from_numpy(random.random(samples).astype(np.float32))})


def test_timing() -> None:
    """Print the time of a step in each mode, and the exposed parts of lookup and transfers."""
    _need(1)
    steps, features, dim = 30, 16, 64
    for mode in MODES:
        torch.manual_seed(SEED)
        model = Dense(features, dim).to("cuda:0")
        with (
            ShardedTables(None, [TableSpec("t", dim, 2_000_000)], RowwiseAdagrad(0.1)) as tables,
            Pipeline(
                model, tables, _batches(steps, 16_384, features),
                options=PipelineOptions(4, mode, device="cuda:0"),
                features={f"f{feature}": "t" for feature in range(features)},
                optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
            ) as pipeline,
        ):  # fmt: skip
            done = pipeline.run()[10:]
        mean = {
            name: 1e3 * sum(getattr(step, name) for step in done) / len(done)
            for name in ("seconds", "lookup_stall", "exposed", "crossing")
        }
        print(mode, ", ".join(f"{name} {value:.2f} ms" for name, value in mean.items()))
