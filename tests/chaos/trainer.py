"""The trainer of the chaos suite: publishes versions, and continues after each kill and error.

Its state has the version that wrote each key last, the generation of the instance that it feeds,
and all versions with rows, of which the first is the base that it begins with. It saves the state
before it publishes a version. So the base with which it continues holds every row that may be in
the log, and no row ever becomes older. A file `switch` holds the generation that it shall feed, a
file `stop` ends it. Arguments: folder, log, seed.
"""

from __future__ import annotations

import io
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from petps.checkpoint import BaseInfo, split_by_partition, write_base
from petps.delta import open_log
from petps.delta.files import publish_file
from petps.errors import PetpsError
from petps.publish import Publisher
from tests.chaos.history import History, now_ns, read_history
from tests.chaos.rows import (
    ALL,
    KEYS,
    MODEL,
    PARTITIONS,
    SCHEMA,
    TABLE,
    Numbers,
    instance_of,
    keys_of,
    rows_of,
)

PAUSE_SECONDS: Final = 0.4  # between two versions
RETRY_SECONDS: Final = 0.5
GIVE_UP_MS: Final = 5000  # of a message that the broker does not acknowledge


@dataclass
class State:
    """Holds what the trainer knows. ``writers``: the version that wrote each key last."""

    writers: Numbers = field(default_factory=lambda: np.ones(KEYS, np.int64))
    generation: int = 0
    versions: list[int] = field(default_factory=lambda: [1])

    @staticmethod
    def read(folder: Path) -> State:
        """Return the state that was saved last."""
        path = folder / "state.npz"
        if not path.exists():
            return State()
        with np.load(path) as values:
            return State(values["writers"], int(values["generation"]), values["versions"].tolist())

    def save(self, folder: Path) -> None:
        """Replace the saved state."""
        buffer = io.BytesIO()
        versions = np.array(self.versions, np.int64)
        np.savez(buffer, writers=self.writers, generation=self.generation, versions=versions)
        publish_file(folder / "state.npz", buffer.getvalue())


class Trainer:
    """One life of the trainer."""

    def __init__(self, folder: Path, place: str, seed: int) -> None:
        self._folder, self._place, self._seed = folder, place, seed
        self._state = State.read(folder)
        path = folder / "published.jsonl"
        recorded = {int(r["version"]) for r in read_history(path) if r["event"] == "begun"}
        self._history = History(path)
        for version in self._state.versions:
            if version not in recorded:  # killed between saving the state and this record
                self._history.write(event="begun", version=version, at=now_ns())

    def run(self) -> None:
        """Publish until `stop` exists, in as many runs as errors and switches ask for.

        At the end the log has the whole state.
        """
        is_complete = False
        while not (is_complete and self._is_stopped()):
            try:
                self._run_once()
                is_complete = True
            except PetpsError as error:
                is_complete = False
                self._history.write(event="failed", at=now_ns(), error=str(error)[:300])
                time.sleep(RETRY_SECONDS)

    def _is_stopped(self) -> bool:
        return (self._folder / "stop").exists()

    def _wanted_generation(self) -> int:
        path = self._folder / "switch"
        return int(path.read_text()) if path.exists() else 0

    def _run_once(self) -> None:
        options = {"message.timeout.ms": GIVE_UP_MS}
        log = open_log(self._place, partitions=PARTITIONS, options=options)
        try:
            publisher = Publisher(log, MODEL, tables=[SCHEMA])
            wanted = self._wanted_generation()
            if wanted != self._state.generation:
                self._state.generation = wanted
                self._state.save(self._folder)
            self._begin(publisher)
            while not self._is_stopped() and self._wanted_generation() == self._state.generation:
                self._publish(publisher)
                time.sleep(PAUSE_SECONDS)
        finally:
            log.close()

    def _begin(self, publisher: Publisher) -> None:
        """Begin the run with a base of the whole state."""
        state, generation = self._state, self._state.generation
        rows = split_by_partition(
            SCHEMA,
            ALL,
            lambda keys: (
                rows_of(keys, state.writers[keys.astype(np.int64)], generation).view(np.uint8),
                None,
            ),
            PARTITIONS,
        )
        base = self._folder / "bases" / str(publisher.run)
        version = publisher.version + 1
        info = BaseInfo(instance=instance_of(generation), version=0, partitions=PARTITIONS)
        write_base(base, MODEL, info, {SCHEMA: rows})
        instance = instance_of(generation) if generation else None
        self._history.write(
            event="base", version=version, generation=generation, run=publisher.run, at=now_ns()
        )
        publisher.begin_base(str(base), version=version, instance=instance)
        self._history.write(event="begun run", version=version, run=publisher.run, at=now_ns())

    def _publish(self, publisher: Publisher) -> None:
        version, state = publisher.version + 1, self._state
        keys = keys_of(self._seed, version)
        state.writers[keys.astype(np.int64)] = version
        state.versions.append(version)
        state.save(self._folder)
        self._history.write(event="begun", version=version, at=now_ns())
        publisher.publish(TABLE, keys, rows_of(keys, np.full(len(keys), version), state.generation))
        publisher.commit(version)
        self._history.write(event="committed", version=version, at=now_ns())


def main(folder: Path, place: str, seed: int) -> None:
    """Run the trainer until it is killed or stopped."""
    Trainer(folder, place, seed).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
