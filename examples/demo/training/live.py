"""Scoring of held-out samples by served rows during training, on a thread of its own.

The server continues to apply deltas during a pull. The pulled rows are of exactly one version if,
after the pull, the log ends with that version's commit and the server has applied all of it. The
log itself is asked for its end: the server asks once a second, and may have applied newer rows
since. Then the trainer's own rows of that version must give the same scores. They come from a
snapshot, because the store rounds rows. Otherwise the rows are of that version or newer, and only
their loss is reported.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final, Self

import petps_client

from examples.demo.dlrm import Logits, area_under_curve, log_loss
from examples.demo.training import scoring
from examples.demo.training.measures import Version
from examples.demo.training.report import Scored
from examples.demo.training.snapshots import Trained
from examples.demo.training.task import Task
from petps.checkpoint import Store
from petps.checkpoint.published import Published
from petps.delta import DeltaLog
from petps.errors import DataLoss, DeadlineExceeded, NotFound

__all__ = ["Live", "is_exactly", "same"]

CHECK_SECONDS: Final = 0.02


def same(first: Logits, second: Logits) -> bool:
    """Return whether the logits are equal bit by bit."""
    return first.tobytes() == second.tobytes()


class Live:
    """A thread that scores the version requested last, and calls ``on_scored`` with the result.

    ``read_snapshot`` returns the trainer's rows of a version, or None if they were removed.
    ``newest_version`` returns the version of the last pull. ``ingest`` returns the server's status
    of ingest. ``error`` is the error that terminated the thread.
    """

    def __init__(
        self,
        task: Task,
        store: Path,
        read_snapshot: Callable[[Version], Mapping[str, Trained] | None],
        client: petps_client.Client,
        newest_version: Callable[[], int],
        ingest: Callable[[], dict[str, Any] | None],
        on_scored: Callable[[Scored], None],
    ) -> None:
        self._task = task
        self._store = store
        self._read_snapshot = read_snapshot
        self._client = client
        self._newest_version = newest_version
        self._ingest = ingest
        self._on_scored = on_scored
        self._scorer = scoring.Scorer(task)
        self._requested: Version | None = None
        self._wake = threading.Condition()
        self._stop = self._finishing = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="petps-demo-live", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._wake:
            self._stop = True
            self._wake.notify()
        self._thread.join()

    def request(self, version: Version) -> None:
        """Score this version, which has a snapshot. It replaces an earlier waiting request."""
        with self._wake:
            self._requested = version
            self._wake.notify()

    def finish(self, seconds: float) -> None:
        """Wait until the requested version is scored. Raise scoring's error or DeadlineExceeded."""
        with self._wake:
            self._finishing = True
            self._wake.notify()
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"held-out samples are not scored within {seconds:.0f} s")
        if self.error is not None:
            raise self.error

    def _main(self) -> None:
        try:
            with closing(self._task.log()) as log:
                while (version := self._next()) is not None:
                    if self._wait_until_served(version):
                        self._score(version, log)
        except BaseException as error:
            self.error = error

    def _next(self) -> Version | None:
        with self._wake:
            self._wake.wait_for(
                lambda: self._stop or self._finishing or self._requested is not None
            )
            version, self._requested = self._requested, None
            return None if self._stop else version

    def _wait_until_served(self, version: Version) -> bool:
        """Wait for the version. Return False at the end, or if a newer one is requested."""
        with self._wake:
            while self._newest_version() < version.version:
                if self._stop or self._requested is not None:
                    return False
                self._wake.wait(CHECK_SECONDS)
        return True

    def _score(self, version: Version, log: DeltaLog) -> None:
        """Score the version, unless the server is gone or already has a newer one."""
        try:
            ingest = self._ingest_of(version)
            if ingest is None or ingest["version"] != version.version:
                return
            store = Store.open(self._store)
            weights = scoring.served_weights(ingest["dense"], store, version.step)
            bags = scoring.served_bags(self._client, self._task, version.version)
            logits = self._scorer.score(weights, bags)
            ends = log.end_offsets(range(log.partitions))
            after = self._ingest()
            published = Published.of(store, version.step)
            exact_weights = scoring.weights_of_version(store, version.step)
        except (NotFound, DataLoss):
            if self._is_purged(version.step):
                return
            raise
        except petps_client.PetpsError:  # the kill; the course notices any other failure
            return
        rows = self._read_snapshot(version)
        equal: bool | None = None
        if rows is not None and published is not None and is_exactly(after, published, ends):
            bags = scoring.trained_bags(scoring.rows_of_snapshot(rows))
            equal = same(logits, self._scorer.score(exact_weights, bags))
        labels = self._scorer.labels
        self._on_scored(
            Scored(
                step=version.step,
                version=version.version,
                life=version.life,
                training_loss=version.training_loss,
                log_loss=log_loss(logits, labels),
                auc=area_under_curve(logits, labels),
                equal=equal,
            )
        )

    def _ingest_of(self, version: Version) -> dict[str, Any] | None:
        """Return the status once it has a version that a pull has seen, a moment after the pull."""
        while True:
            ingest = self._ingest()  # not under the lock, which request() takes
            if ingest is None or ingest["version"] >= version.version or self._stop:
                return ingest
            with self._wake:
                self._wake.wait(CHECK_SECONDS)

    def _is_purged(self, step: int) -> bool:
        versions = Store.open(self._store).state.versions()
        return all(entry.version != step for entry in versions)


def is_exactly(
    ingest: dict[str, Any] | None, published: Published, ends: Mapping[int, int]
) -> bool:
    """Return whether the log, with these end offsets, ended with a version that ingest had applied.

    ``ingest`` is the server's status that was read after ``ends``.
    """
    if ingest is None:
        return False
    position = published.position
    return all(
        progress["offset"] == ends[progress["partition"]]
        and (progress["run"], progress["seq"])
        == (position.run, position.seqs[progress["partition"]])
        for progress in ingest["partitions"]
    )
