"""checkpoint.loss.<bits>.<restores>: what quantised checkpoints cost a model (Check-N-Run 6.2).

A small DLRM (examples/demo/dlrm.py) trains for one epoch on Book-Crossing's ratings, or on drawn
clicks. At ``restores`` evenly spaced steps a TrainerOutput writes a version, with the intermittent
policy, to a store that expects this number of restores and chooses the bits by it. Then a new
trainer continues from the version: rows and optimizer state by TrainerOutput.restore, dense weights
and the place in the data as parts. Each seed draws initial weights and order. All runs of a seed
share them, so each run's loss is compared with the loss of the same run without any resume.

It needs PyTorch; bench.lines runs it.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from examples.demo.dlrm import DENSE, READER, Encoded, Shape, Training, Vocabulary, log_loss
from examples.demo.ratings import Samples, draw_clicks, load_ratings
from petps.checkpoint import POLICIES, Quantising, Store
from petps.errors import Unavailable
from petps.train import TrainerOutput

HELD_OUT: Final = 0.1
# A control: rows with the fewest bits, resumed far more often than those bits allow. A measure that
# does not see this loss sees nothing.
CONTROL: Final = (2, 20)
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
    row: str = "f32",
    state: str = "f32",
) -> tuple[Training, Store]:
    """Return a finished training that resumed from ``restores`` versions of a store in ``folder``.

    row, state: dtypes of the store's own columns, before ``quantising`` (None: no quantising).
    """
    training = task.begin(seed)
    store = Store.create(folder, "dlrm", training.stored_as(row, state), quantising)
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
    """Yield a result for unquantised rows, and one for each [bits, restores] of work["resumed"]."""
    try:
        samples = load_ratings() if work["download"] else draw_clicks(int(work["clicks"]), 1)
    except Unavailable as error:
        print(f"skipped checkpoint.loss: {error}", file=sys.stderr, flush=True)
        return
    task = Task.of(samples, Shape(**work["shape"]))
    seeds = range(1, int(work["seeds"]) + 1)
    whole = []
    for seed in seeds:
        training = task.begin(seed)
        training.train(training.steps)
        whole.append(task.loss(training))
    noise = statistics.stdev(whole)
    yield {
        "name": "checkpoint.loss.whole",
        "value": statistics.fmean(whole),
        "unit": "nats",
        "ratio_to": None,
        "ratio": None,
        "losses": whole,
        "noise": noise,
        "steps": training.steps,
        "rows": sum(len(keys) for keys in task.vocabulary.keys),
    }
    for bits, restores in work["resumed"]:
        losses, seconds = [], []
        for seed in seeds:
            started = time.perf_counter()
            losses.append(_loss(task, seed, bits, restores))
            seconds.append(time.perf_counter() - started)
        differences = [loss - reference for loss, reference in zip(losses, whole, strict=True)]
        yield {
            "name": f"checkpoint.loss.{bits}.{restores}",
            "value": statistics.fmean(losses),
            "unit": "nats",
            "ratio_to": "deviation over seeds",
            "ratio": statistics.fmean(differences) / noise,
            "losses": losses,
            "differences_in_deviations": [difference / noise for difference in differences],
            "seconds_a_run": statistics.fmean(seconds),
        }


def _loss(task: Task, seed: int, bits: int, restores: int) -> float:
    """Return the loss of one run; exit if the store chose other bits than the name says."""
    with tempfile.TemporaryDirectory(prefix="petps-bench-") as folder:
        place = Path(folder) / "store"
        if (bits, restores) == CONTROL:  # no store would choose these bits
            columns = (f"adaptive{bits}", "asymmetric8")
            training, _ = resumed(task, seed, restores, place, None, *columns)
            return task.loss(training)
        training, store = resumed(task, seed, restores, place, Quantising(restores))
        row = next(iter(store.tables_of().values())).columns[0]
        if not row.dtype.endswith(str(bits)) or store.state.restores != restores:
            raise SystemExit(
                f"checkpoint.loss.{bits}.{restores}: rows are {row.dtype}, resumed "
                f"{store.state.restores} times"
            )
        return task.loss(training)
