"""One rank of the trainer, a process of its own: it trains, publishes and writes versions.

`python -m examples.demo.training.rank RANK LIFE SETTINGS` trains from the store's newest version,
if there is one, to the task's last step. LIFE is the number of earlier starts of the trainer. The
process exits when its standard input ends. It reports events on standard output, one line of JSON
each; "at", "begin" and "end" are CLOCK_MONOTONIC seconds:
  ready     restored (a step, 0: none), open_s, restore_s
  step      number, loss, seconds, exposed, crossing, lookup_stall,
            stall: the wait for versions                               rank 0 only
  version   version, step, begin: a version of the log exists          rank 0 only
  stored    step, begin: the store has a version of that step          rank 0 only
  stages    seconds by stage, and the number of steps; compacted: how many repeated ids were
            dropped; dedup: the dedup ratio of all batches, in the given order and clustered
  ended
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any, Final

import torch
from torch import distributed

from examples.demo.trainer import MODEL
from examples.demo.training.model import Loader, Ranker
from examples.demo.training.snapshots import Snapshots
from examples.demo.training.task import (
    MICRO_BATCHES,
    POLICY,
    WORLD,
    Settings,
    Task,
    timeline_of,
)
from petps.checkpoint import POLICIES
from petps.errors import PetpsError
from petps.train import (
    ByKeys,
    Every,
    Links,
    Pipeline,
    PipelineOptions,
    RankedOutput,
    Timeline,
    open_store,
    publisher_of,
)
from petps.train.ranks import Written
from petps.train.tracker import Tracker

__all__ = ["main"]

FAILED: Final = 3


class CountingTracker(Tracker):
    """A tracker that counts the repeated ids that compact() drops."""

    dropped = 0

    def compact(self) -> int:
        """See Tracker."""
        dropped = super().compact()
        self.dropped += dropped
        return dropped


class Rank:
    """Rank ``rank`` of WORLD. ``life``: see the module."""

    def __init__(self, rank: int, life: int, settings: Settings) -> None:
        self._rank = rank
        self._life = life
        self._settings = settings
        self.task = Task(settings)
        self._timeline = Timeline(keep=True)
        self._steps = 0
        self._tracker = CountingTracker()
        self._arrange = ByKeys(MICRO_BATCHES, seed=settings.seed)
        self._model = Ranker(self.task, settings.seed)
        self._reporting = threading.Lock()
        self._has_stored = False
        self._awaits_kill = False

    def report(self, event: str, **fields: Any) -> None:
        """Print an event on standard output. Any thread may call it."""
        line = json.dumps({"event": event, "at": time.monotonic(), **fields})
        with self._reporting:
            print(line, flush=True)

    def report_once(self, event: str, **fields: Any) -> None:
        """Print an event if this is rank 0."""
        if self._rank == 0:
            self.report(event, **fields)

    def report_stages(self) -> None:
        """Print the seconds of each stage so far."""
        self.report(
            "stages",
            seconds=self._timeline.totals(),
            steps=self._steps,
            compacted=self._tracker.dropped,
            dedup=self._arrange.ratios,
        )

    def run(self) -> None:
        """Train from the newest version to the last step."""
        settings = self._settings
        distributed.init_process_group(
            "gloo",
            store=distributed.FileStore(str(settings.path(f"meeting-{self._life}")), WORLD),
            rank=self._rank,
            world_size=WORLD,
        )
        links = Links.of_processes()
        optimizer = self._model.optimizer()
        started = time.monotonic()
        with (
            closing(self.task.log()) as log,
            self.task.tables(self._rank, self._tracker) as tables,
        ):
            opened = time.monotonic()
            store = open_store(settings.path("store"), MODEL, tables, links)
            publisher = publisher_of(log, MODEL, tables, links.dense)
            with RankedOutput(
                tables,
                links,
                store=store,
                policy=POLICIES[POLICY](),
                checkpoint=Every(steps=self.task.store_every),
                publisher=publisher,
                publish=Every(steps=self.task.publish_every),
                model=self._model,
                optimizer=optimizer,
                dense=self._write_dense,
                staging=settings.path("staging"),
                bases=settings.path("bases"),
                arrange=False,
                on_version=self._report_version,
                timeline=self._timeline,
            ) as feed:
                restored = feed.restore()
                first = restored.step + 1
                seconds = {"open_s": opened - started, "restore_s": time.monotonic() - opened}
                feed.begin_run(restored)
                snapshots = Snapshots(settings, self.task, tables, self._life, self._timeline)
                self.report("ready", restored=first - 1, **seconds)
                with Pipeline(
                    self._model,
                    tables,
                    iter(Loader(self.task, self._rank, first)),
                    optimizer=optimizer,
                    options=PipelineOptions(MICRO_BATCHES, arrange=self._arrange, first_step=first),
                    links=links,
                    hooks=[snapshots, feed],
                    timeline=self._timeline,
                ) as pipeline:
                    self._train(pipeline)
        distributed.destroy_process_group()
        self.report("ended")

    def _train(self, pipeline: Pipeline) -> None:
        for step in pipeline:
            self._steps += 1
            self.report_once(
                "step",
                number=step.number,
                loss=step.loss,
                seconds=step.seconds,
                exposed=step.exposed,
                crossing=step.crossing,
                lookup_stall=step.lookup_stall,
                stall=step.hooks,
            )
            if step.number % self.task.publish_every == 0:
                self.report_stages()
            while self._rank == 0 and self._awaits_kill:
                time.sleep(1)  # a late kill would find a newer version in the store
        self.report_stages()
        self._timeline.write(self._settings.path(timeline_of(self._rank)), rank=self._rank)

    def _report_version(self, written: Written) -> None:
        if written.kind == "publish":
            # Before the report: what is stored by now, the parent reads before this version.
            if self._has_stored and self._life == 0 and self.task.is_killed_after(written.step):
                self._awaits_kill = True
            self.report_once(
                "version", version=written.version, step=written.step, begin=written.begin
            )
        else:
            self.report_once("stored", step=written.step, begin=written.begin)
            self._has_stored = True  # not before the report

    def _write_dense(self, step: int, state: Mapping[str, Any]) -> str:
        """Write the version's dense weights, on rank 0, and return their location."""
        # After a kill, the next life repeats steps with other weights. So the name has the life.
        path = self._settings.path(f"dense-{self._life}-{step}.pt")
        part = path.with_suffix(".part")
        prefix = "dense."
        dense = {name.removeprefix(prefix): value for name, value in state.items()}
        torch.save(dense, part)
        part.replace(path)
        return str(path)


def _end_with_input() -> None:
    """Exit at once, as by a kill, when the parent process exits or closes the input."""
    # os.read() takes no lock of sys.stdin, for which the exit of Python would wait.
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(FAILED)


def main() -> None:
    """Run the process."""
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_input, name="petps-demo-input", daemon=True).start()
    try:
        settings = Settings(**json.loads(sys.argv[3]))
        Rank(int(sys.argv[1]), int(sys.argv[2]), settings).run()
    except PetpsError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(FAILED)  # threads of the pipeline may still wait for a rank that is gone


if __name__ == "__main__":
    main()
