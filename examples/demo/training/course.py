"""The course of the demo with --train: train, stream, serve, score, two kills, comparison."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import petps_client

from examples.demo.dlrm import area_under_curve, log_loss
from examples.demo.kill import first_pull
from examples.demo.processes import ServerProcess
from examples.demo.report import Comparison
from examples.demo.state import State, compare
from examples.demo.trace import Trace
from examples.demo.traffic import Mode, Traffic, latency_of
from examples.demo.training import Data, scoring
from examples.demo.training.live import Live, same
from examples.demo.training.measures import Outage, Reports, Served, fresh_of, served_of, stages_of
from examples.demo.training.plots import Facts, write_plots
from examples.demo.training.report import FinalScores, ServerBack, TrainerBack, TrainingReport
from examples.demo.training.screen import TrainingLines, TrainingScreen
from examples.demo.training.task import DIM, SOURCES, WORLD, Settings, Task
from examples.demo.training.workers import WorkerReport, Workers
from petps.checkpoint import Store
from petps.errors import InternalError, InvalidArgument, Unavailable
from petps.pool import Pool

__all__ = ["Course", "Options"]

SCORES: Final = 12  # about this many versions are scored
TRAINER_AT: Final = 0.4  # of the steps
SERVER_AT: Final = 0.75
PULLS_PER_SECOND: Final = 100  # during training, on the same two processors
SERVABLE_SECONDS: Final = 120.0
DEADLINE_MS: Final = 30_000
COMPARE_KEYS: Final = 10_000  # compared at a time
ENDED: Final = "training ended before both were killed: take more --ratings"


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the demo with --train."""

    settings: Settings
    durability: str
    plots: Path


class Course:
    """One run. ``run`` returns the report; it raises errors of petps.errors."""

    def __init__(self, options: Options, screen: TrainingScreen) -> None:
        self._options = options
        self._settings = options.settings
        self._screen = screen
        self._reports = Reports()
        with screen.working("the samples are read (the first time: downloaded, 27 MB)"):
            try:
                self._task = Task(self._settings)
            except Unavailable as error:
                raise Unavailable(f"{error}; or take --data clicks, which needs none") from error
        task = self._task
        self._keys = dict(task.keys_by_field())
        self._report = TrainingReport(
            data=SOURCES[Data(self._settings.data)],
            ratings=len(task.samples),
            trained=len(task.train),
            held_out=len(task.held_out),
            fields=list(task.fields),
            keys=sum(map(len, self._keys.values())),
            dim=DIM,
            workers=WORLD,
            batch=task.batch,
            steps=task.steps,
            log=self._settings.log,
            processors=os.cpu_count() or 1,
            plots=str(options.plots),
        )
        self._score_every = task.store_every * max(1, task.steps // task.store_every // SCORES)
        self._outages: list[Outage] = []
        self._served_versions: list[Served] = []
        self._messages: dict[str, Any] = {}  # the server's own freshness, up to the first kill
        self._catch_ups = 0
        self._trainer_killed = 0.0
        self._shown = 0  # the number of scored versions printed
        self._workers: Workers
        self._server: ServerProcess
        self._traffic: Traffic
        self._client: petps_client.Client
        self._live: Live

    def run(self) -> TrainingReport:
        """Run all steps in order. Child processes end before it returns, whatever happens."""
        begun = time.monotonic()
        self._screen.begin(self._report)
        with ExitStack() as stack:
            self._prepare(stack)
            # After a version that is not in the store: then servers have rows that the new run
            # does not have.
            self._follow(lambda event: self._comes(event, TRAINER_AT) and not event.more["stored"])
            self._kill_trainer()
            self._follow(lambda event: self._comes(event, SERVER_AT))
            self._kill_server()
            self._follow(None)
            self._measure()
            self._compare()
            self._close_cleanly()
        self._report.seconds = round(time.monotonic() - begun, 1)
        facts = Facts(self._report, self._reports, self._served_versions, self._outages)
        write_plots(self._options.plots, self._settings.path("."), facts)
        return self._report

    # ---- before training

    def _prepare(self, stack: ExitStack) -> None:
        settings, task = self._settings, self._task
        folder, store = settings.path("."), settings.path("store")
        with closing(task.log()) as log:
            if any(log.end_offsets(range(log.partitions)).values()):
                raise InvalidArgument(f"{log.name} is not empty: give the demo a log of its own")
        pool = task.make_served_pool(self._options.durability)
        with Pool.open(pool) as opened:
            made = opened.status()["pool"]
        self._report.medium, self._report.durability = made["medium"], made["durability"]
        with self._screen.working("the server starts"):
            server = ServerProcess(folder, pool, settings.log, settings.kafka, store)
            self._server = stack.enter_context(server)
            self._server.start()
            facts = self._server.wait_ready()
        self._screen.serving(self._server, facts, self._report)
        field = task.fields[0]
        asked = task.held_out.keys[:, 0]
        trace = Trace(*np.unique(asked, return_inverse=True))
        url, check = self._server.url, self._server.running
        self._traffic = stack.enter_context(
            Traffic(url, trace, check, table=field, pace=PULLS_PER_SECOND)
        )
        self._traffic.ask(Mode.PACED, 0, len(asked))
        self._client = stack.enter_context(petps_client.connect(url, deadline_ms=DEADLINE_MS))
        scored = self._report.scored.append
        self._live = stack.enter_context(
            Live(task, store, self._client, self._traffic.version_seen, server.ingest, scored)
        )
        self._workers = stack.enter_context(Workers(settings))
        with self._screen.working("the trainer's workers start, and import PyTorch"):
            begun = self._workers.start()
            self._until(lambda event: event.what == "ready")
        self._screen.training(self._report, time.monotonic() - begun)

    # ---- while training goes on

    def _receive(self) -> WorkerReport | None:
        """Take the next report, or None if all workers have ended.

        Raises if the server, the scoring or a worker has failed.
        """
        self._server.running()
        if self._live.failed is not None:
            raise self._live.failed
        if self._reports.ended == WORLD:
            return None
        event = self._workers.next()
        self._reports.take(event)
        if event.what == "version":
            newest = self._reports.versions[-1]
            if newest.stored and newest.step % self._score_every == 0:
                self._live.ask(newest)
        return event

    def _ingest(self) -> dict[str, Any]:
        found = self._server.ingest()
        if found is None:
            raise Unavailable(f"the server's status cannot be read:\n{self._server.last_words()}")
        return found

    def _until(self, holds: Callable[[WorkerReport], bool]) -> WorkerReport:
        """Take reports until one for which ``holds`` is true, and return it."""
        while (event := self._receive()) is not None:
            if holds(event):
                return event
        raise InternalError(ENDED)

    def _served(self, version: int, since: int = 0) -> float:
        """Take reports until the client is served the version. Return when, by samples[since:]."""
        while self._traffic.version_seen() < version and self._receive() is not None:
            pass
        return self._traffic.wait_for_version(version, SERVABLE_SECONDS, since).end

    def _follow(self, until: Callable[[WorkerReport], bool] | None) -> None:
        """Take reports until one for which ``until`` is true; None: to the end of training."""
        lines = TrainingLines(self._task.steps)
        with self._screen.growing(lines):
            while (event := self._receive()) is not None:
                lines.reached(self._reports.step)
                self._show(lines)
                if until is not None and until(event):
                    return
            if until is not None:
                raise InternalError(ENDED)
            self._live.finish(SERVABLE_SECONDS)
            self._show(lines)

    def _show(self, lines: TrainingLines) -> None:
        """Print the versions that were scored since the last call."""
        for each in self._report.scored[self._shown :]:
            lines.line(each)
            self._shown += 1

    def _comes(self, event: WorkerReport, share: float) -> bool:
        """Return whether this reports a version of a step beyond that share of the steps."""
        return event.what == "version" and event.more["step"] >= share * self._task.steps

    def _kill_trainer(self) -> None:
        """Kill and restart the workers. The new run's first serving is measured at the end."""
        reports = self._reports
        self._messages = self._ingest()["freshness"]
        with self._screen.working("kill -9 of the trainer's workers; they start again"):
            self._trainer_killed = self._workers.kill()
            self._workers.start()
            ready = self._until(lambda event: event.what == "ready" and event.life > 0)
            first = self._until(lambda event: event.what == "step")
        restored = ready.more["restored"]
        self._report.trainer_back = TrainerBack(
            step=next(each.more["number"] for each in reports.steps[::-1] if each.life == 0),
            restored=restored,
            unlearnt=sum(each.step > restored for each in reports.versions),
            to_first_step=round(first.at - self._trainer_killed, 3),
            open=round(ready.more["open_s"], 3),
            restore=round(ready.more["restore_s"], 3),
        )
        self._screen.trainer_back(self._report.trainer_back)

    def _kill_server(self) -> None:
        samples, failures = self._traffic.samples, self._traffic.failures
        version, step = self._traffic.version_seen(), self._reports.step
        self._catch_ups += _catch_ups(self._ingest())  # the new process counts from 0
        with self._screen.working("kill -9 of the server; it starts again"):
            killed = time.monotonic()
            self._server.kill()
            seen, failed = len(samples), len(failures)
            begun = self._server.start()
            field, keys = next(iter(self._keys.items()))
            first = first_pull(self._server, lambda client: client.pull(field, keys[:100]))
            facts = self._server.wait_ready()
            while self._workers.has_reports() and self._receive() is not None:
                pass  # reports from while the server was down
            served = self._served(self._reports.versions[-1].version, seen)
        self._outages.append(Outage("server killed", step, killed, served))
        waited = max(each.end - each.begin for each in samples[max(0, seen - 1) :])
        self._report.server_back = ServerBack(
            step=step,
            version_before=version,
            exec_to_first_pull_ms=round(1e3 * (first - begun), 3),
            open_to_first_pull_ms=round(1e3 * (first - facts["opened_at"]), 3),
            open_ms=facts["open_ms"],
            client_waited_ms=round(1e3 * waited, 3),
            client_failures=len(failures) - failed,
            caught_up_ms=round(1e3 * (served - begun), 3),
        )
        self._screen.server_back(self._report.server_back)

    # ---- the end

    def _measure(self) -> None:
        report, reports = self._report, self._reports
        with self._screen.working("the last version is served"):
            last = reports.versions[-1].version
            self._traffic.wait_for_version(last, SERVABLE_SECONDS)
        samples = self._traffic.samples
        report.versions = len(reports.versions)
        self._measure_new_run()
        report.stages = stages_of(reports, WORLD * self._task.batch)
        self._served_versions = served_of(reports.versions, samples, self._outages)
        report.freshness = fresh_of(self._served_versions, self._messages)
        report.pull = latency_of(
            [each for each in samples if not any(o.begin < each.end < o.end for o in self._outages)]
        )

    def _measure_new_run(self) -> None:
        """Compute when the first version after the trainer's kill was served."""
        back, killed = self._report.trainer_back, self._trainer_killed
        assert back is not None
        first = next(each for each in self._reports.versions if each.life > 0)
        served = served_of([first], self._traffic.samples, [])[0]
        ended = first.begin + served.fresh_ms / 1e3
        self._outages.insert(0, Outage("trainer killed", back.step, killed, ended))
        self._report.trainer_back = replace(
            back,
            to_served=round(ended - killed, 3),
            catch_ups=self._catch_ups + _catch_ups(self._ingest()),
        )

    def _compare(self) -> None:
        """Compare the last version: every key, and every held-out sample, by the rows of both."""
        self._traffic.ask(Mode.REST, 0, 0)
        task, version = self._task, self._reports.versions[-1].version
        with self._screen.working("the trainer's rows are read from its pools"):
            trained = scoring.rows_of_pools(task)
        result = Comparison()
        with self._screen.bar("comparing every row", self._report.keys) as advance:
            for name, keys in self._keys.items():
                for first in range(0, len(keys), COMPARE_KEYS):
                    part = keys[first : first + COMPARE_KEYS]
                    answer = self._client.pull_answer(name, part, min_version=version)
                    result += compare(State(*trained[name].of(part)), answer.rows, answer.mask)
                    advance(len(part))
        self._report.comparison = result
        self._report.rows = sum(len(each.keys) for each in trained.values())
        with self._screen.working("held-out samples are scored by either's rows"):
            scorer = scoring.Scorer(task)
            store = Store.open(self._settings.path("store"))
            served = scorer.score(
                scoring.served_weights(self._ingest()["dense"], store, task.steps),
                scoring.served_bags(self._client, task, version),
            )
            own = scorer.score(
                scoring.weights_of_version(store, task.steps), scoring.trained_bags(trained)
            )
        self._report.final = FinalScores(
            version=version,
            samples=len(own),
            log_loss=log_loss(served, scorer.labels),
            auc_trainer=area_under_curve(own, scorer.labels),
            auc_served=area_under_curve(served, scorer.labels),
            logits_equal=same(own, served),
        )

    def _close_cleanly(self) -> None:
        code = self._server.stop()
        if code != 0:
            raise InternalError(
                f"the server ended with exit status {code}:\n{self._server.last_words()}"
            )


def _catch_ups(ingest: dict[str, Any]) -> int:
    return sum(each["catch_ups"] for each in ingest["partitions"])
