"""The training task: samples, batches, tables, steps, and the paths of its files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from examples.demo.ratings import Keys, Samples, draw_clicks, load_ratings
from examples.demo.trainer import MODEL
from examples.demo.training import Data
from petps.delta import DeltaLog, open_log
from petps.pool import Pool
from petps.train import RowwiseAdagrad, ShardedTables, TableSpec
from petps.train.tracker import Tracker

__all__ = [
    "DIM",
    "MICRO_BATCHES",
    "POLICY",
    "SOURCES",
    "WORLD",
    "Settings",
    "Task",
    "timeline_of",
]

WORLD: Final = 2  # ranks
PARTITIONS: Final = 8
DIM: Final = 16
ROW_LEARNING_RATE: Final = 0.1
MICRO_BATCHES: Final = 4
PUBLISH_EVERY: Final = 10  # steps, at least
VERSIONS_MAX: Final = 40  # of the log, about: so there is time to score one before the next
STEPS_MIN: Final = 120  # with few samples, batches become smaller: two kills need several versions
BATCH_MAX: Final = 256  # samples per step of one rank
BATCH_MIN: Final = 32
POLICY: Final = "merged"  # of the store: for the trainer, and for the process that merges
SCORES: Final = 12  # versions to score, about
CLICKS: Final = 100_000  # the default
HELD_OUT: Final = 0.1
TRAINER_KILLED_AT: Final = 0.4  # of the steps

SOURCES: Final = {
    Data.RATINGS: "ratings of Book-Crossing (Ziegler et al., WWW 2005)",
    Data.CLICKS: "clicks drawn with the seed",
}


def timeline_of(rank: int) -> str:
    """Return the name of the file, in the work folder, with a rank's time line."""
    return f"timeline-{rank}.json"


@dataclass(frozen=True, slots=True)
class Settings:
    """The options and the work folder, as every rank receives them."""

    folder: str
    log: str
    data: str = Data.RATINGS.value
    ratings: int | None = None  # None: all
    seed: int = 1
    kafka: dict[str, str] = field(default_factory=dict)

    def as_text(self) -> str:
        """Return the settings as a command-line argument."""
        return json.dumps(asdict(self))

    def path(self, name: str) -> Path:
        """Return the path of a file in the work folder."""
        return Path(self.folder) / name


class Task:
    """Samples to train on, in steps, and held-out samples. Every process has the same task."""

    def __init__(self, settings: Settings) -> None:
        if Data(settings.data) is Data.RATINGS:
            samples = load_ratings()
        else:
            samples = draw_clicks(settings.ratings or CLICKS, settings.seed)
        self.samples = samples.at(slice(settings.ratings))
        self.train, self.held_out = self.samples.split(HELD_OUT)
        batch = len(self.train) // (WORLD * STEPS_MIN)
        self.batch = min(BATCH_MAX, max(BATCH_MIN, batch))
        """Samples per step of one rank."""
        steps = len(self.train) // (WORLD * self.batch)
        self.publish_every = PUBLISH_EVERY * max(1, round(steps / VERSIONS_MAX / PUBLISH_EVERY))
        """The steps between two versions of the log. The store has every second one."""
        self.store_every = 2 * self.publish_every
        self.steps = steps - steps % self.store_every
        """The number of steps. The last one has a version in the store, for the comparison."""
        self._score_every = self.store_every * max(1, self.steps // self.store_every // SCORES)
        self._settings = settings
        self._order = np.random.default_rng(settings.seed).permutation(len(self.train))

    @property
    def fields(self) -> tuple[str, ...]:
        """The id fields; each is a table."""
        return self.samples.fields

    def keys_by_field(self) -> Iterator[tuple[str, Keys]]:
        """Yield each field's keys, with those of held-out samples: uint64[n], ascending."""
        for name, column in zip(self.fields, self.samples.keys.T, strict=True):
            yield name, np.unique(column)

    def is_scored(self, step: int) -> bool:
        """Return whether held-out samples are scored by the version of this step, if there is one.

        A version that was delayed has another step, and is not scored. The last step has one.
        """
        return step % self._score_every == 0 or step == self.steps

    def is_killed_after(self, step: int) -> bool:
        """Return whether the trainer may be killed after the log's version of this step.

        The store has none of it. So the server then has rows that the new run does not have.
        """
        return step >= TRAINER_KILLED_AT * self.steps and step % self.store_every != 0

    def batches(self, rank: int, first: int) -> Iterator[tuple[int, Samples]]:
        """Yield a rank's part of each step from ``first`` on: one epoch in a random order."""
        for step in range(first, self.steps + 1):
            begin = ((step - 1) * WORLD + rank) * self.batch
            yield step, self.train.at(self._order[begin : begin + self.batch])

    def tables(self, rank: int, tracker: Tracker | None = None) -> ShardedTables:
        """Create or reopen the tables of a rank, in the file of its pool."""
        specs = [
            # Each rank has about half of the keys, or perhaps all of a small field.
            TableSpec(name, DIM, capacity=1024 + len(keys))
            for name, keys in self.keys_by_field()
        ]
        return ShardedTables(
            self._settings.path(f"rank-{rank}.pool"),
            specs,
            RowwiseAdagrad(ROW_LEARNING_RATE),
            rank=rank,
            world=WORLD,
            partitions=PARTITIONS,
            seed=self._settings.seed,
            tracker=tracker,
        )

    def log(self) -> DeltaLog:
        """Open the log, and create it if it does not exist."""
        settings = self._settings
        return open_log(settings.log, partitions=PARTITIONS, options=settings.kafka)

    def make_served_pool(self, durability: str) -> Path:
        """Create the server's pool with empty tables, which the log feeds."""
        path = self._settings.path("served.pool")
        with Pool.create(path, durability=durability) as pool:
            pool.create_model(MODEL, PARTITIONS)
            for name, keys in self.keys_by_field():
                capacity = 1024 + 2 * len(keys)
                pool.create_table(
                    name, dim=DIM, dtype="f32", capacity=capacity, feed="delta", model=MODEL
                )
        return path
