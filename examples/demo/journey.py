"""The steps of the demo: pool, base, server, deltas, kill, restart, deltas, comparison."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import petps_client

from examples.demo.kill import KillTest
from examples.demo.model import Settings
from examples.demo.processes import ServerProcess, TrainerProcess
from examples.demo.ranking import Hits, K, Ranker
from examples.demo.report import Comparison, Freshness, Group, Report
from examples.demo.screen import Screen
from examples.demo.state import compare
from examples.demo.trace import ATTRIBUTION, load_trace
from examples.demo.traffic import Mode, Sample, Traffic, latency_of
from examples.demo.trainer import MODEL, TABLE, TrainerSettings
from petps.pool import Pool

__all__ = ["ACCESSES_MIN", "Journey", "Options"]

PARTITIONS: Final = 8
STEP: Final = 4_000  # accesses per delta
ACCESSES_MIN: Final = 40_000  # with fewer, there would be less than two deltas before the kill
BASE_SHARE: Final = 0.4  # of the accesses: the trainer learns them before the server starts
RANK_EVERY: Final = 2  # deltas
EXPIRE_EVERY: Final = 5  # deltas
LINES: Final = 10  # of the table of deltas
SERVABLE_SECONDS: Final = 180.0
DEADLINE_MS: Final = 30_000  # of pulls that are not timed, on a busy machine
COMPARE_KEYS: Final = 10_000  # keys per pull of the comparison


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the demo."""

    accesses: int
    durability: str
    seed: int
    idle_seconds: float
    log: str | None = None  # None: a folder in the work folder
    kafka: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Delta:
    """A published delta, and when it was servable (time.monotonic())."""

    end: int
    version: int
    rows: int
    deleted: int
    begin: float
    servable: float


class Journey:
    """One run of the demo in ``folder``."""

    def __init__(self, options: Options, folder: Path, screen: Screen) -> None:
        self._options = options
        self._folder = folder
        self._screen = screen
        self._trace = load_trace()
        accesses = min(options.accesses, len(self._trace.accesses))
        self._begin = round(accesses * BASE_SHARE / STEP) * STEP
        self._end = accesses
        self._deltas: list[_Delta] = []
        self._report = Report(
            trace=ATTRIBUTION,
            accesses=accesses,
            base_accesses=self._begin,
            dim=Settings().dim,
            k=K,
            processors=os.cpu_count() or 1,
        )
        self._trainer: TrainerProcess
        self._server: ServerProcess
        self._traffic: Traffic
        self._client: petps_client.Client
        self._ranker: Ranker

    def run(self) -> Report:
        """Run all steps and return the report. Raise errors of petps.errors.

        All child processes have exited when it returns or raises.
        """
        started = time.monotonic()
        with ExitStack() as stack:
            self._prepare(stack)
            self._measure_idle()
            steps = range(self._begin, self._end, STEP)
            middle = len(steps) // 2
            self._follow(steps[:middle])
            self._kill()
            self._follow(steps[middle:])
            self._measure_apply()
            self._compare()
            self._server.stop_cleanly()
        self._report.seconds = round(time.monotonic() - started, 1)
        return self._report

    # ---- before the deltas

    def _prepare(self, stack: ExitStack) -> None:
        screen, report = self._screen, self._report
        screen.print_header(self._trace, report)
        pool_path = self._make_pool()
        log = self._options.log or str(self._folder / "log")
        kafka = self._options.kafka
        report.log = log
        with screen.show_spinner("the trainer learns the base"):
            settings = TrainerSettings(log, PARTITIONS, self._options.seed, kafka)
            self._trainer = stack.enter_context(TrainerProcess(self._folder, settings))
            self._trainer.start()
            learning = self._trainer.call("learn", begin=0, end=self._begin, expire=True)
            base = self._trainer.call("base", folder=str(self._folder / "bases" / "first"))
        report.base_rows = base["rows"]
        screen.print_base(self._begin, learning["seconds"], base, log)
        with screen.show_spinner("the server starts and loads the base"):
            server = ServerProcess(self._folder, pool_path, log, kafka)
            self._server = stack.enter_context(server)
            self._server.start()
            facts = self._server.wait_ready()
            ready = time.monotonic()
            self._traffic = stack.enter_context(
                Traffic(self._server.url, self._trace, self._server.check_running)
            )
            self._client = stack.enter_context(
                petps_client.connect(self._server.url, deadline_ms=DEADLINE_MS)
            )
            self._ranker = Ranker(
                self._trace.accesses, len(self._trace.keys), self._rows_of, self._options.seed
            )
            self._traffic.set_window(Mode.PACED, self._begin, self._begin + STEP)
            served = self._traffic.wait_for_version(base["version"], SERVABLE_SECONDS)
        screen.print_server(self._server, facts, served.end - ready)

    def _make_pool(self) -> Path:
        path = self._folder / "demo.pool"
        with Pool.create(path, durability=self._options.durability) as pool:
            pool.create_model(MODEL, PARTITIONS)
            pool.create_table(
                TABLE,
                dim=self._report.dim,
                dtype="f32",
                capacity=2 * len(self._trace.keys),
                feed="delta",
                model=MODEL,
            )
            info = pool.status()["pool"]
        self._report.medium, self._report.durability = info["medium"], info["durability"]
        self._screen.print_pool(path, info["medium"], info["durability"])
        return path

    def _measure_idle(self) -> None:
        """Pull without other load: first as fast as one thread can, then at the paced rate."""
        seconds = self._options.idle_seconds
        with self._screen.show_spinner("the client pulls without other load"):
            closed = self._collect_pulls(Mode.CLOSED, seconds)
            paced = self._collect_pulls(Mode.PACED, seconds)
        span = closed[-1].end - closed[0].begin
        self._report.pulls_per_second = round(len(closed) / span, 1)
        self._report.pull_idle = latency_of(paced)
        self._screen.print_idle(self._report)

    def _collect_pulls(self, mode: Mode, seconds: float) -> list[Sample]:
        self._traffic.set_window(mode, self._begin, self._begin + STEP)
        return self._traffic.samples_of(seconds, SERVABLE_SECONDS)

    # ---- deltas

    def _follow(self, steps: range) -> None:
        """Publish a delta for each step, while the client pulls for the following accesses."""
        lines = max(1, round(LINES * len(steps) * STEP / (self._end - self._begin)))
        # Each line has at least one prediction.
        per_line = max(RANK_EVERY, -(-len(steps) // lines))
        with self._screen.show_deltas(self._report, len(steps)) as show:
            for first in range(0, len(steps), per_line):
                hits = Hits(0, 0, 0)
                group = []
                for number, begin in enumerate(steps[first : first + per_line], start=first):
                    delta, step_hits = self._step(begin, number)
                    hits += step_hits
                    group.append(delta)
                    show.advance()
                self._report.groups.append(_group_of(group, hits))
                show.add_line(self._report.groups[-1])

    def _step(self, begin: int, number: int) -> tuple[_Delta, Hits]:
        """Predict accesses [begin, begin + STEP) by served rows, then learn and publish them."""
        end = min(begin + STEP, self._end)
        self._traffic.set_window(Mode.PACED, begin, end)
        self._trainer.begin("learn", begin=begin, end=end, expire=number % EXPIRE_EVERY == 0)
        hits = self._ranker.predict(begin, end) if number % RANK_EVERY == 0 else Hits(0, 0, 0)
        self._trainer.end()
        seen = len(self._traffic.samples)
        published = self._trainer.call("publish")
        served = self._traffic.wait_for_version(published["version"], SERVABLE_SECONDS, since=seen)
        delta = _Delta(
            end,
            published["version"],
            published["rows"],
            published["deleted"],
            published["begin"],
            served.end,
        )
        self._deltas.append(delta)
        return delta, hits

    def _rows_of(self, objects: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Return the served rows; a missing row is zeros, the table's default."""
        rows: npt.NDArray[np.float32] = self._client.pull(TABLE, self._trace.keys[objects])
        return rows

    def _kill(self) -> None:
        with self._screen.show_spinner(
            "kill -9 of the server while it applies a delta of all rows"
        ):
            test = KillTest(self._server, self._trainer, self._traffic, self._trace, self._folder)
            self._report.restart = test.run()
        self._screen.print_restart(self._report.restart)

    def _measure_apply(self) -> None:
        """Compute the freshness, and the latency of pulls while the server applied a delta."""
        samples = self._traffic.samples
        begins = np.array([sample.begin for sample in samples])
        during: list[Sample] = []
        for delta in self._deltas:
            first = max(0, int(np.searchsorted(begins, delta.begin)) - 1)
            for sample in samples[first:]:
                if sample.begin > delta.servable:
                    break
                if sample.end > delta.begin:
                    during.append(sample)
        self._report.pull_during_apply = latency_of(during)
        fresh = 1e3 * np.array([delta.servable - delta.begin for delta in self._deltas])
        p50, p99 = np.percentile(fresh, (50, 99))
        self._report.freshness = Freshness(len(fresh), round(float(p50), 2), round(float(p99), 2))
        self._report.deltas = len(self._deltas)
        self._report.rows_published = sum(delta.rows for delta in self._deltas)
        self._report.rows_deleted = sum(delta.deleted for delta in self._deltas)

    # ---- the end

    def _compare(self) -> None:
        """Pull every key of the trace and compare it bit by bit with the trainer's state."""
        self._traffic.set_window(Mode.STOPPED, 0, 0)
        state = self._trainer.state(self._folder / "last.npz")
        version = self._deltas[-1].version
        result = Comparison()
        with self._screen.show_bar("comparing every row", len(self._trace.keys)) as advance:
            for first in range(0, len(self._trace.keys), COMPARE_KEYS):
                chosen = slice(first, first + COMPARE_KEYS)
                answer = self._client.pull_answer(
                    TABLE, self._trace.keys[chosen], min_version=version
                )
                result += compare(state.part(chosen), answer.rows, answer.mask)
                advance(len(answer.mask))
        self._report.comparison = result
        self._report.rows = int(np.count_nonzero(state.present))
        self._report.pulls = len(self._traffic.samples)


def _group_of(deltas: list[_Delta], hits: Hits) -> Group:
    fresh = np.median([1e3 * (delta.servable - delta.begin) for delta in deltas])
    return Group(
        accesses=deltas[-1].end,
        version=deltas[-1].version,
        rows=sum(delta.rows for delta in deltas),
        deleted=sum(delta.deleted for delta in deltas),
        freshness_p50_ms=round(float(fresh), 2),
        asked=hits.asked,
        hits=hits.rows,
        popularity_hits=hits.popularity,
    )
