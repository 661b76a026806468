"""checkpoint.loss.<bits>.<restores>: what quantised checkpoints cost a model (Check-N-Run 6.2).

A small DLRM (examples/demo/dlrm.py) trains for one epoch on Book-Crossing's ratings, or on drawn
clicks. At ``restores`` evenly spaced steps a TrainerOutput writes a version, with the intermittent
policy, to a store that expects this number of restores and chooses the bits by it. Then a new
trainer continues from the version: rows and optimizer state by TrainerOutput.restore, dense weights
and the place in the data as parts. Each seed draws initial weights and order. All runs of a seed
share them, so each run's loss is compared with the loss of the same run without any resume.

Rows are trained by Adagrad; by Adam in checkpoint.loss.adam.<bits>.<restores>. A further
.<column>.<dtype> marks a control: the store keeps this column in a dtype that it would not choose.

It needs PyTorch; bench.lines runs it.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from examples.demo.dlrm import DENSE, READER, Encoded, Shape, Training, Vocabulary, log_loss
from examples.demo.ratings import Samples, draw_clicks, load_ratings
from petps.checkpoint import POLICIES, Quantising, Store
from petps.errors import Unavailable
from petps.train import TrainerOutput
from petps.train.table import ROW

HELD_OUT: Final = 0.1
Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """The data and the model that all runs share."""

    trained: Encoded
    held_out: Encoded
    vocabulary: Vocabulary
    shape: Shape

    @classmethod
    def of(cls, samples: Samples, shape: Shape) -> Task:
        """Make a task of samples. A part of them is held out, which is the same for all seeds."""
        vocabulary = Vocabulary(samples)
        trained, held_out = map(vocabulary.encode, samples.split(HELD_OUT))
        return cls(trained, held_out, vocabulary, shape)

    def begin(self, seed: int) -> Training:
        """Return a training at its first step."""
        return Training(self.trained, self.vocabulary, seed, self.shape)

    def loss(self, training: Training) -> float:
        """Return the loss on the held-out samples, in nats."""
        return log_loss(training.score(self.held_out), self.held_out.labels.numpy())


def resumed(
    task: Task,
    seed: int,
    restores: int,
    folder: Path,
    quantising: Quantising | None,
    dtypes: Mapping[str, str] | None = None,
) -> tuple[Training, Store]:
    """Return a finished training that resumed from ``restores`` versions of a store in ``folder``.

    quantising: None: no quantising. dtypes: dtypes of the store's own columns; those not named are
    f32. A quantised one stays as it is, and so does that of Adam's second moment.
    """
    training = task.begin(seed)
    store = Store.create(folder, "dlrm", training.stored_as(dtypes or {}), quantising)
    output = _output(training, store)
    for version in range(1, restores + 1):
        training.train(version * training.steps // (restores + 1))
        output.checkpoint(version, training.parts())
        store = Store.open(folder)
        training = task.begin(seed)
        training.forget()
        output = _output(training, store)
        output.restore(version)
        training.load_parts({part: store.part(version, part) for part in (DENSE, READER)})
    training.train(training.steps)
    return training, store


def _output(training: Training, store: Store) -> TrainerOutput:
    policy = POLICIES["intermittent"]()
    return TrainerOutput(training.tracker, training.tables, store=store, policy=policy)


def figures(work: dict[str, Any]) -> Iterator[Result]:
    """Yield the figures of rows trained by Adagrad, then of rows trained by Adam."""
    try:
        samples = load_ratings() if work["download"] else draw_clicks(int(work["clicks"]), 1)
    except Unavailable as error:
        print(f"skipped checkpoint.loss: {error}", file=sys.stderr, flush=True)
        return
    seeds = range(1, int(work["seeds"]) + 1)
    for name, sizes in (("checkpoint.loss", work), ("checkpoint.loss.adam", work["adam"])):
        task = Task.of(samples, Shape(**sizes["shape"]))
        yield from _compare(name, task, seeds, sizes["resumed"])


def _compare(
    prefix: str, task: Task, seeds: Sequence[int], runs: Sequence[Sequence[Any]]
) -> Iterator[Result]:
    """Yield a result for unresumed runs, and one for each [bits, restores, forced dtypes].

    The forced dtypes, by column, may be left out.
    """
    whole = []
    for seed in seeds:
        training = task.begin(seed)
        training.train(training.steps)
        whole.append(task.loss(training))
    noise = statistics.stdev(whole)
    yield {
        "name": f"{prefix}.whole",
        "value": statistics.fmean(whole),
        "unit": "nats",
        "ratio_to": None,
        "ratio": None,
        "losses": whole,
        "noise": noise,
        "steps": training.steps,
        "rows": sum(len(keys) for keys in task.vocabulary.keys),
    }
    for bits, restores, *forced in runs:
        dtypes = forced[0] if forced else {}
        name = f"{prefix}.{bits}.{restores}" + "".join(
            f".{column}.{dtype}" for column, dtype in dtypes.items() if column != ROW
        )
        losses, seconds = [], []
        for seed in seeds:
            started = time.perf_counter()
            loss, stored = _loss(name, task, seed, bits, restores, dtypes)
            losses.append(loss)
            seconds.append(time.perf_counter() - started)
        differences = [
            (loss - reference) / noise for loss, reference in zip(losses, whole, strict=True)
        ]
        yield {
            "name": name,
            "value": statistics.fmean(losses),
            "unit": "nats",
            "ratio_to": "deviation over seeds",
            "ratio": statistics.fmean(differences),
            "ratio_half_interval_95": half_interval_95(differences),
            "losses": losses,
            "differences_in_deviations": differences,
            "stored": stored,
            "seconds_a_run": statistics.fmean(seconds),
        }


def half_interval_95(values: Sequence[float]) -> float:
    """Return half the width of the 95 % interval of the mean, by Student's t; for two or more."""
    freedom = len(values) - 1
    step = 1e-4
    middles = np.arange(step / 2, 20, step)
    scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
    shares = np.cumsum(scale * step * (1 + middles**2 / freedom) ** (-(freedom + 1) / 2))
    quantile = float(middles[np.searchsorted(shares, 0.475)])
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def _loss(
    name: str, task: Task, seed: int, bits: int, restores: int, dtypes: Mapping[str, str]
) -> tuple[float, dict[str, str]]:
    """Return the loss of one run, and the dtypes that the store kept, by column.

    Exit if the store's rows have other bits than the name says.
    """
    with tempfile.TemporaryDirectory(prefix="petps-bench-") as folder:
        training, store = resumed(
            task, seed, restores, Path(folder) / "store", Quantising(restores), dtypes
        )
        columns = next(iter(store.tables_of().values())).columns
        stored = {column.name: column.dtype for column in columns}
        if not stored[ROW].endswith(str(bits)) or store.state.restores != restores:
            raise SystemExit(
                f"{name}: rows are {stored[ROW]}, resumed {store.state.restores} times"
            )
        return task.loss(training), stored
