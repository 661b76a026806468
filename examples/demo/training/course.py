"""The steps of the demo with --train: train, stream, serve, score, kill twice, compare."""

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
from examples.demo.kill import wait_for_pull
from examples.demo.processes import ServerProcess
from examples.demo.report import Comparison
from examples.demo.state import State, compare
from examples.demo.trace import Trace
from examples.demo.traffic import Mode, Traffic, latency_of
from examples.demo.training import Data, scoring
from examples.demo.training.live import Live, same
from examples.demo.training.measures import (
    Outage,
    Reports,
    Served,
    Version,
    checkpoints_of,
    fresh_of,
    served_of,
    stages_of,
)
from examples.demo.training.plots import Facts, write_plots
from examples.demo.training.ranks import RankReport, Ranks
from examples.demo.training.report import FinalScores, ServerBack, TrainerBack, TrainingReport
from examples.demo.training.screen import TrainingLines, TrainingScreen
from examples.demo.training.snapshots import (
    Trained,
    has_snapshot,
    read_snapshot,
    remove_snapshots,
)
from examples.demo.training.task import DIM, SOURCES, WORLD, Settings, Task
from examples.demo.training.upkeep import (
    MERGE,
    PURGE,
    History,
    TendingProcess,
    check_kept,
    read_tended,
)
from petps.checkpoint import Store
from petps.errors import InternalError, InvalidArgument, Unavailable
from petps.pool import Pool

__all__ = ["Course", "Options"]

SERVER_KILLED_AT: Final = 0.75
PULLS_PER_SECOND: Final = 100  # during training, on the same two processors
SERVABLE_SECONDS: Final = 120.0
TENDED_SECONDS: Final = 60.0  # until the last merge and the first purge, after the last step
TENDED_POLL_SECONDS: Final = 0.1
DEADLINE_MS: Final = 30_000
COMPARE_KEYS: Final = 10_000  # keys per pull of the comparison
TOO_SHORT: Final = "training ended before trainer and server were killed: take more --ratings"


@dataclass(frozen=True, slots=True)
class Options:
    """The options of the demo with --train."""

    settings: Settings
    durability: str
    plots: Path


class Course:
    """One run of the demo with --train."""

    def __init__(self, options: Options, screen: TrainingScreen) -> None:
        self._options = options
        self._settings = options.settings
        self._screen = screen
        self._reports = Reports()
        with screen.show_spinner("reading the samples (the first time: downloading 27 MB)"):
            try:
                self._task = Task(self._settings)
            except Unavailable as error:
                raise Unavailable(f"{error}; or take --data clicks, without a download") from error
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
        self._history = History(self._settings.path("store"))
        self._life = self._restored = 0  # of the trainer; the step at which this life began
        self._outages: list[Outage] = []
        self._served_versions: list[Served] = []
        self._messages: dict[str, Any] = {}  # the server's own freshness, up to the first kill
        self._catch_ups = 0
        self._trainer_killed_at = 0.0
        self._printed = 0  # the number of scored versions printed
        self._ranks: Ranks
        self._server: ServerProcess
        self._traffic: Traffic
        self._client: petps_client.Client
        self._live: Live
        self._tending: TendingProcess

    def run(self) -> TrainingReport:
        """Run all steps and return the report. Raise errors of petps.errors.

        All child processes have exited when it returns or raises.
        """
        started = time.monotonic()
        self._screen.print_header(self._report)
        with ExitStack() as stack:
            self._prepare(stack)
            self._follow(self._is_time_to_kill_trainer)
            self._kill_trainer()
            self._follow(self._is_time_to_kill_server)
            self._kill_server()
            self._follow(None)
            self._measure()
            self._stop_tending()
            self._compare()
            self._check_store()
            self._server.stop_cleanly()
        self._report.seconds = round(time.monotonic() - started, 1)
        facts = Facts(
            self._report, self._reports, self._served_versions, self._outages, self._history
        )
        write_plots(self._options.plots, self._settings.path("."), facts)
        return self._report

    # ---- before training

    def _prepare(self, stack: ExitStack) -> None:
        settings, task = self._settings, self._task
        folder, store = settings.path("."), settings.path("store")
        with closing(task.log()) as log:
            if any(log.end_offsets(range(log.partitions)).values()):
                raise InvalidArgument(f"log {log.name} is not empty: give the demo an empty log")
        pool = task.make_served_pool(self._options.durability)
        with Pool.open(pool) as opened:
            info = opened.status()["pool"]
        self._report.medium, self._report.durability = info["medium"], info["durability"]
        with self._screen.show_spinner("starting the server"):
            server = ServerProcess(folder, pool, settings.log, settings.kafka, store)
            self._server = stack.enter_context(server)
            self._server.start()
            facts = self._server.wait_ready()
        self._screen.print_server(self._server, facts, self._report)
        field = task.fields[0]
        keys = task.held_out.keys[:, 0]
        trace = Trace(*np.unique(keys, return_inverse=True))
        url, check = self._server.url, self._server.check_running
        self._traffic = stack.enter_context(
            Traffic(url, trace, check, table=field, pace=PULLS_PER_SECOND)
        )
        self._traffic.set_window(Mode.PACED, 0, len(keys))
        self._client = stack.enter_context(petps_client.connect(url, deadline_ms=DEADLINE_MS))
        on_scored = self._report.scored.append
        self._live = stack.enter_context(
            Live(
                task,
                store,
                self._read_snapshot,
                self._client,
                self._traffic.newest_version,
                server.ingest,
                on_scored,
            )
        )
        self._ranks = stack.enter_context(Ranks(settings))
        self._tending = stack.enter_context(TendingProcess(folder, store))
        with self._screen.show_spinner("starting the trainer's processes, which import PyTorch"):
            started = self._ranks.start()
            self._wait_for(lambda event: event.kind == "ready")
        self._tending.start()  # the store exists now
        self._screen.print_training(self._report, time.monotonic() - started)

    # ---- during training

    def _receive(self) -> RankReport | None:
        """Take the next report, or None if all ranks have finished.

        Raise an error if the server, the scoring or a rank has failed.
        """
        self._server.check_running()
        if self._reports.step > 0:
            self._tending.check_running()
        self._observe_store()
        if self._live.error is not None:
            raise self._live.error
        if self._reports.ended == WORLD:
            return None
        event = self._ranks.next()
        self._reports.add(event)
        if event.kind == "ready":
            self._life, self._restored = event.life, event.fields["restored"]
        if event.kind == "stored" and self._task.is_scored(event.fields["step"]):
            version = self._reports.version_of(event.fields["step"])
            if version is not None:
                self._live.request(version)
        return event

    def _observe_store(self) -> None:
        """Note what the store holds now, and remove the snapshots that nothing needs any more."""
        if not self._history.observe():
            return
        listed = self._history.listed
        newest = max(listed, default=0)

        def is_needed(life: int, step: int) -> bool:
            is_listed = step in listed and life == self._life_of(step)
            return is_listed or (step > newest and life == self._life)

        remove_snapshots(self._settings, is_needed)

    def _life_of(self, step: int) -> int:
        """Return the life of the trainer that wrote the store's version of this step."""
        return self._life if step > self._restored else 0

    def _read_snapshot(self, version: Version) -> dict[str, Trained] | None:
        return self._read_trained(version.life, version.step)

    def _read_trained(self, life: int, step: int) -> dict[str, Trained] | None:
        """Return the trainer's rows after a step, or None if they were removed or not written."""
        if not has_snapshot(self._settings, life, step):
            return None
        try:
            return read_snapshot(self._settings, life, step)
        except FileNotFoundError:
            return None

    def _ingest(self) -> dict[str, Any]:
        ingest = self._server.ingest()
        if ingest is None:
            raise Unavailable(f"the server's status cannot be read:\n{self._server.last_output()}")
        return ingest

    def _wait_for(self, is_awaited: Callable[[RankReport], bool]) -> RankReport:
        """Take reports until the awaited one, and return it."""
        while (event := self._receive()) is not None:
            if is_awaited(event):
                return event
        raise InternalError(TOO_SHORT)

    def _wait_until_served(self, version: int, since: int = 0) -> float:
        """Take reports until a pull of samples[since:] has the version. Return the pull's end."""
        while self._traffic.newest_version() < version and self._receive() is not None:
            pass
        return self._traffic.wait_for_version(version, SERVABLE_SECONDS, since).end

    def _follow(self, is_last: Callable[[RankReport], bool] | None) -> None:
        """Print scored versions until the last report; None: to the end of training."""
        lines = TrainingLines(self._task.steps)
        with self._screen.show_table(lines):
            while (event := self._receive()) is not None:
                lines.set_completed(self._reports.step)
                self._print_scored(lines)
                if is_last is not None and is_last(event):
                    return
            if is_last is not None:
                raise InternalError(TOO_SHORT)
            self._live.finish(SERVABLE_SECONDS)
            self._print_scored(lines)

    def _print_scored(self, lines: TrainingLines) -> None:
        """Print the versions that were scored since the last call."""
        for scored in self._report.scored[self._printed :]:
            lines.add_line(scored)
            self._printed += 1

    def _is_time_to_kill_trainer(self, event: RankReport) -> bool:
        """Return whether to kill the trainer now. Rank 0 waits for it: see its _report_version().

        The store has a version, from which the trainer continues.
        """
        is_version = event.kind == "version" and self._task.is_killed_after(event.fields["step"])
        return is_version and bool(self._reports.stored)

    def _is_time_to_kill_server(self, event: RankReport) -> bool:
        """Return whether to kill the server now."""
        return (
            event.kind == "version" and event.fields["step"] >= SERVER_KILLED_AT * self._task.steps
        )

    def _kill_trainer(self) -> None:
        """Kill and restart the trainer. _measure_new_run() finds when its rows were served."""
        reports = self._reports
        with self._screen.show_spinner("kill -9 of the trainer's processes, and their restart"):
            self._trainer_killed_at = self._ranks.kill()
            self._messages = self._ingest()["freshness"]  # not before: training would go on
            self._ranks.start()
            ready = self._wait_for(lambda event: event.kind == "ready" and event.life > 0)
            first = self._wait_for(lambda event: event.kind == "step")
        restored = ready.fields["restored"]
        self._report.trainer_back = TrainerBack(
            step=next(step.fields["number"] for step in reports.steps[::-1] if step.life == 0),
            restored=restored,
            unlearnt=sum(version.step > restored for version in reports.versions),
            to_first_step=round(first.at - self._trainer_killed_at, 3),
            open=round(ready.fields["open_s"], 3),
            restore=round(ready.fields["restore_s"], 3),
        )
        self._screen.print_trainer_back(self._report.trainer_back)

    def _kill_server(self) -> None:
        samples, failures = self._traffic.samples, self._traffic.failures
        version, step = self._traffic.newest_version(), self._reports.step
        self._catch_ups += _catch_ups(self._ingest())  # the new process counts from 0
        with self._screen.show_spinner("kill -9 of the server, and its restart"):
            killed = time.monotonic()
            self._server.kill()
            seen, failed = len(samples), len(failures)
            started = self._server.start()
            field, keys = next(iter(self._keys.items()))
            first = wait_for_pull(self._server, lambda client: client.pull(field, keys[:100]))
            facts = self._server.wait_ready()
            while self._ranks.has_reports() and self._receive() is not None:
                pass  # reports of the time while the server was down
            served = self._wait_until_served(self._reports.versions[-1].version, seen)
        self._outages.append(Outage("server killed", step, killed, served))
        waited = max(sample.end - sample.begin for sample in samples[max(0, seen - 1) :])
        self._report.server_back = ServerBack(
            step=step,
            version_before=version,
            exec_to_first_pull_ms=round(1e3 * (first - started), 3),
            open_to_first_pull_ms=round(1e3 * (first - facts["opened_at"]), 3),
            open_ms=facts["open_ms"],
            client_waited_ms=round(1e3 * waited, 3),
            client_failures=len(failures) - failed,
            caught_up_ms=round(1e3 * (served - started), 3),
        )
        self._screen.print_server_back(self._report.server_back)

    # ---- the end

    def _measure(self) -> None:
        report, reports = self._report, self._reports
        with self._screen.show_spinner("waiting until the last version is served"):
            last = reports.versions[-1].version
            self._traffic.wait_for_version(last, SERVABLE_SECONDS)
        samples = self._traffic.samples
        report.versions = len(reports.versions)
        self._measure_new_run()
        report.stages = stages_of(reports, WORLD * self._task.batch)
        self._served_versions = served_of(reports.versions, samples, self._outages)
        report.freshness = fresh_of(self._served_versions, self._messages)
        report.pull = latency_of(
            [
                sample
                for sample in samples
                if not any(outage.begin < sample.end < outage.end for outage in self._outages)
            ]
        )

    def _measure_new_run(self) -> None:
        """Compute when the first version after the trainer's kill was served."""
        back, killed = self._report.trainer_back, self._trainer_killed_at
        assert back is not None
        first = next(version for version in self._reports.versions if version.life > 0)
        served = served_of([first], self._traffic.samples, [])[0]
        served_at = first.begin + served.fresh_ms / 1e3
        self._outages.insert(0, Outage("trainer killed", back.step, killed, served_at))
        self._report.trainer_back = replace(
            back,
            to_served=round(served_at - killed, 3),
            catch_ups=self._catch_ups + _catch_ups(self._ingest()),
        )

    def _stop_tending(self) -> None:
        """Wait until the store has been merged and purged, and stop the process that does it."""
        history, deadline = self._history, time.monotonic() + TENDED_SECONDS
        folder = self._settings.path(".")
        with self._screen.show_spinner("waiting until the store is merged and purged"):
            while True:
                self._tending.check_running()
                history.observe(at_once=True)
                # It reports what it has done a moment after the store shows it.
                reported = {span.stage for span in read_tended(folder)}
                is_done = history.merges and history.purged and reported >= {MERGE, PURGE}
                if is_done or time.monotonic() > deadline:
                    break
                time.sleep(TENDED_POLL_SECONDS)
        self._tending.stop()

    def _check_store(self) -> None:
        """Restore every version that the store has kept, and compare it with the trainer's rows."""
        with self._screen.show_spinner("restoring every version that the store has kept"):
            kept = check_kept(
                Store.open(self._settings.path("store")),
                lambda step: self._read_trained(self._life_of(step), step),
            )
        self._report.checkpoints = checkpoints_of(self._reports, self._history, kept)

    def _compare(self) -> None:
        """Compare the last version: every row, and the score of every held-out sample."""
        self._traffic.set_window(Mode.STOPPED, 0, 0)
        task, version = self._task, self._reports.versions[-1].version
        with self._screen.show_spinner("reading the trainer's rows from its pools"):
            trained = scoring.rows_of_pools(task)
        result = Comparison()
        with self._screen.show_bar("comparing every row", self._report.keys) as advance:
            for name, keys in self._keys.items():
                for first in range(0, len(keys), COMPARE_KEYS):
                    part = keys[first : first + COMPARE_KEYS]
                    answer = self._client.pull_answer(name, part, min_version=version)
                    result += compare(State(*trained[name].of(part)), answer.rows, answer.mask)
                    advance(len(part))
        self._report.comparison = result
        self._report.rows = sum(len(rows.keys) for rows in trained.values())
        with self._screen.show_spinner("scoring held-out samples by served and trained rows"):
            scorer = scoring.Scorer(task)
            store = Store.open(self._settings.path("store"))
            served = scorer.score(
                scoring.served_weights(self._ingest()["dense"], store, task.steps),
                scoring.served_bags(self._client, task, version),
            )
            reference = scorer.score(
                scoring.weights_of_version(store, task.steps), scoring.trained_bags(trained)
            )
        self._report.final = FinalScores(
            version=version,
            samples=len(reference),
            log_loss=log_loss(served, scorer.labels),
            auc_trainer=area_under_curve(reference, scorer.labels),
            auc_served=area_under_curve(served, scorer.labels),
            logits_equal=same(reference, served),
        )


def _catch_ups(ingest: dict[str, Any]) -> int:
    return sum(partition["catch_ups"] for partition in ingest["partitions"])
