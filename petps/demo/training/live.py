"""Held-out samples scored by served rows while training goes on: a thread of its own.

The server goes on applying deltas meanwhile. What was pulled is of one version exactly if, once it
was pulled, the log held nothing beyond that version's commit, and the server had applied all up to
there: then the trainer's own rows of that version, from the checkpoint store, must give the same
scores. Otherwise the rows are of that version or newer ones, and only their loss is told.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import petps_client

from petps.checkpoint import Store
from petps.checkpoint.published import Published
from petps.demo.dlrm import Logits, area_under_curve, log_loss
from petps.demo.training import scoring
from petps.demo.training.measures import Version
from petps.demo.training.report import Scored
from petps.demo.training.task import Task
from petps.errors import DeadlineExceeded

__all__ = ["Live", "same"]

LOOK_SECONDS: Final = 0.02


def same(one: Logits, other: Logits) -> bool:
    """Bit by bit."""
    return one.tobytes() == other.tobytes()


class Live:
    """Scores the newest version that it was asked to; ``told`` is called with each result.

    seen: the version that is served; ingest: the server's status of it, now. ``failed`` has the
    error that ended it.
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
        """Scores this one next, which the store has too; not one asked for before and not begun."""
        with self._wake:
            self._wanted = version
            self._wake.notify()

    def finish(self, seconds: float) -> None:
        """Until what was asked for is scored. Raises what scoring raised, DeadlineExceeded."""
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
        """Waits for it; False: the end, or a newer one is wanted."""
        with self._wake:
            while self._seen() < version.version:
                if self._stop or self._wanted is not None:
                    return False
                self._wake.wait(LOOK_SECONDS)
        return True

    def _score(self, version: Version) -> None:
        """Not where the server is gone, or further already."""
        try:
            ingest = self._ingest()
            if ingest is None or ingest["version"] != version.version:
                return
            store = Store.open(self._place)
            weights = scoring.served_weights(ingest["dense"], store, version.step)
            bags = scoring.served_bags(self._client, self._task, version.version)
            logits = self._scorer.score(weights, bags)
            after = self._ingest()
        except petps_client.PetpsError:  # killed on purpose; if not, the demo sees it
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
        """Whether the trainer's rows give the same; None: more was served by then."""
        published = Published.of(store, step)
        if after is None or published is None or not _is_exactly(after, published):
            return None
        rows = scoring.rows_of_version(store, step, self._task)
        weights = scoring.weights_of_version(store, step)
        return same(logits, self._scorer.score(weights, scoring.trained_bags(rows)))


def _is_exactly(ingest: dict[str, Any], published: Published) -> bool:
    """All up to the version's position is applied, and the log holds no more."""
    position = published.position
    return all(
        each["lag_records"] == 0
        and (each["run"], each["seq"]) == (position.run, position.seqs[each["partition"]])
        for each in ingest["partitions"]
    )
