"""Scoring of held-out samples by served rows during training, on a thread of its own.

The server continues to apply deltas during a pull. The pulled rows are of exactly one version if,
after the pull, the log held nothing beyond that version's commit and the server had applied
everything up to there. Then the trainer's own rows of that version, from the checkpoint store,
must give the same scores. Otherwise the rows are of that version or newer, and only their loss is
reported.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import petps_client

from examples.demo.dlrm import Logits, area_under_curve, log_loss
from examples.demo.training import scoring
from examples.demo.training.measures import Version
from examples.demo.training.report import Scored
from examples.demo.training.task import Task
from petps.checkpoint import Store
from petps.checkpoint.published import Published
from petps.errors import DeadlineExceeded

__all__ = ["Live", "same"]

LOOK_SECONDS: Final = 0.02


def same(one: Logits, other: Logits) -> bool:
    """Return whether the logits are equal bit by bit."""
    return one.tobytes() == other.tobytes()


class Live:
    """A scorer of the version requested last; ``told`` is called with each result.

    seen: returns the version that is served. ingest: returns the server's current status of
    ingest. ``failed`` has the error that ended the thread.
    """

    def __init__(
        self,
        task: Task,
        store: Path,
        client: petps_client.Client,
        seen: Callable[[], int],
        ingest: Callable[[], dict[str, Any] | None],
        told: Callable[[Scored], None],
    ) -> None:
        self._task = task
        self._place = store
        self._client = client
        self._seen = seen
        self._ingest = ingest
        self._told = told
        self._scorer = scoring.Scorer(task)
        self._wanted: Version | None = None
        self._wake = threading.Condition()
        self._stop = self._finishing = False
        self.failed: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="petps-demo-live", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._wake:
            self._stop = True
            self._wake.notify()
        self._thread.join()

    def ask(self, version: Version) -> None:
        """Score this version next, which the store must have. It replaces one not yet begun."""
        with self._wake:
            self._wanted = version
            self._wake.notify()

    def finish(self, seconds: float) -> None:
        """Wait until the requested versions are scored. Raise scoring's error, DeadlineExceeded."""
        with self._wake:
            self._finishing = True
            self._wake.notify()
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"held-out samples are not scored within {seconds:.0f} s")
        if self.failed is not None:
            raise self.failed

    def _main(self) -> None:
        try:
            while (version := self._next()) is not None:
                if self._served(version):
                    self._score(version)
        except BaseException as error:
            self.failed = error

    def _next(self) -> Version | None:
        with self._wake:
            self._wake.wait_for(lambda: self._stop or self._finishing or self._wanted is not None)
            version, self._wanted = self._wanted, None
            return None if self._stop else version

    def _served(self, version: Version) -> bool:
        """Wait until it is served. Return False at the end, or if a newer one is requested."""
        with self._wake:
            while self._seen() < version.version:
                if self._stop or self._wanted is not None:
                    return False
                self._wake.wait(LOOK_SECONDS)
        return True

    def _score(self, version: Version) -> None:
        """Score the version, unless the server is gone or already has a newer one."""
        try:
            ingest = self._ingest()
            if ingest is None or ingest["version"] != version.version:
                return
            store = Store.open(self._place)
            weights = scoring.served_weights(ingest["dense"], store, version.step)
            bags = scoring.served_bags(self._client, self._task, version.version)
            logits = self._scorer.score(weights, bags)
            after = self._ingest()
        except petps_client.PetpsError:  # the kill; the course notices any other failure
            return
        labels = self._scorer.labels
        found = Scored(
            step=version.step,
            version=version.version,
            life=version.life,
            training_loss=version.training_loss,
            log_loss=log_loss(logits, labels),
            auc=area_under_curve(logits, labels),
            equal=self._compared(store, version.step, after, logits),
        )
        self._told(found)

    def _compared(
        self, store: Store, step: int, after: dict[str, Any] | None, logits: Logits
    ) -> bool | None:
        """Return whether the trainer's rows score the same, or None if newer rows were served."""
        published = Published.of(store, step)
        if after is None or published is None or not _is_exactly(after, published):
            return None
        rows = scoring.rows_of_version(store, step, self._task)
        weights = scoring.weights_of_version(store, step)
        return same(logits, self._scorer.score(weights, scoring.trained_bags(rows)))


def _is_exactly(ingest: dict[str, Any], published: Published) -> bool:
    """Return whether everything up to the version is applied, and the log holds no more."""
    position = published.position
    return all(
        each["lag_records"] == 0
        and (each["run"], each["seq"]) == (position.run, position.seqs[each["partition"]])
        for each in ingest["partitions"]
    )
