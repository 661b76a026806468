"""The demo's trainer, a process of its own: it learns rows, and publishes the changed ones.

`python -m examples.demo.trainer SETTINGS` reads one command a line on standard input and answers
each with one line, both JSON. It exits when its input ends. Commands ({"do": ...}):
  learn    begin, end, expire   learn accesses[begin:end]; expire cold objects if ``expire``
  sweep                         apply weight decay: every row changes
  base     folder               write a base there, and begin the log's run with it
  publish                       publish the rows that changed since the last time, as a version
  save     path                 write rows float32[n, dim] and present bool[n] as an .npz
The answer is {"error": text} if a command failed. Times are CLOCK_MONOTONIC seconds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from examples.demo.model import Settings, SkipGram
from examples.demo.trace import Trace, load_trace
from petps.checkpoint import BaseInfo, split_by_partition, write_base
from petps.delta import TableSchema, open_log
from petps.errors import InvalidArgument, PetpsError
from petps.publish import Publisher

__all__ = ["MODEL", "TABLE", "Trainer", "TrainerSettings", "main"]

MODEL: Final = "demo"
TABLE: Final = "objects"
# An object expires if it was not accessed in this many accesses, and only once in all.
EXPIRE_IDLE: Final = 50_000
EXPIRE_COUNT_MAX: Final = 1
EXPIRE_LIMIT: Final = 2_000  # at a time


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """The settings that the demo passes to the process."""

    log: str
    partitions: int
    seed: int
    kafka: dict[str, str] = field(default_factory=dict)

    def as_text(self) -> str:
        """Return the settings as a command-line argument."""
        return json.dumps(asdict(self))


class Trainer:
    """A model and its publisher. ``do`` executes the commands of the process."""

    def __init__(self, settings: TrainerSettings, trace: Trace) -> None:
        self._trace = trace
        self._model = SkipGram(len(trace.keys), Settings(), settings.seed)
        self._schema = TableSchema(TABLE, "f32", self._model.settings.dim)
        self._log = open_log(settings.log, partitions=settings.partitions, options=settings.kafka)
        self._publisher = Publisher(self._log, MODEL, tables=[self._schema])
        self._step = 0

    def do(self, command: dict[str, Any]) -> dict[str, Any]:
        """Execute one command and return its answer. Raise PetpsError."""
        name = command.pop("do", None)
        commands: dict[Any, Callable[..., dict[str, Any]]] = {
            "learn": self.learn,
            "sweep": self.sweep,
            "base": self.base,
            "publish": self.publish,
            "save": self.save,
        }
        if name not in commands:
            raise InvalidArgument(
                f"command {name!r} is unknown to the trainer; known: {', '.join(commands)}"
            )
        return commands[name](**command)

    def learn(self, begin: int, end: int, expire: bool) -> dict[str, Any]:
        """Learn accesses[begin:end]."""
        started = time.monotonic()
        self._model.learn(self._trace.accesses, begin, end)
        self._step = end
        expired = 0
        if expire:
            expired = self._model.expire(end, EXPIRE_IDLE, EXPIRE_COUNT_MAX, EXPIRE_LIMIT)
        return {"seconds": time.monotonic() - started, "expired": expired}

    def sweep(self) -> dict[str, Any]:
        """Shrink every vector."""
        self._model.sweep()
        return {"rows": int(np.count_nonzero(self._model.present))}

    def base(self, folder: str) -> dict[str, Any]:
        """Write all rows as a base, and begin the run with it."""
        begin = time.monotonic()
        self._model.take_changed()
        version = self._publisher.version + 1
        keys = self._trace.keys[np.flatnonzero(self._model.present)]
        partitions = self._log.partitions
        info = BaseInfo(instance=MODEL, version=version, partitions=partitions)
        rows = split_by_partition(self._schema, keys, self._rows_of, partitions)
        write_base(folder, MODEL, info, {self._schema: rows})
        self._publisher.begin_base(folder, version=version, step=self._step)
        return {"version": version, "rows": len(keys), "begin": begin, "end": time.monotonic()}

    def _rows_of(self, keys: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint8], None]:
        rows = self._model.rows[np.searchsorted(self._trace.keys, keys)]
        return rows.view(np.uint8), None

    def publish(self) -> dict[str, Any]:
        """Publish the changed rows, and deletions of expired objects."""
        objects = self._model.take_changed()
        deleted = ~self._model.present[objects]
        begin = time.monotonic()
        self._publisher.publish(
            TABLE, self._trace.keys[objects], self._model.rows[objects], deleted, step=self._step
        )
        version = self._publisher.commit()
        return {
            "version": version,
            "rows": int(np.count_nonzero(~deleted)),
            "deleted": int(np.count_nonzero(deleted)),
            "begin": begin,
            "end": time.monotonic(),
        }

    def save(self, path: str) -> dict[str, Any]:
        """Write the state to a file, for comparison."""
        np.savez(path, rows=self._model.rows, present=self._model.present)
        return {"rows": int(np.count_nonzero(self._model.present))}

    def close(self) -> None:
        """Close the log."""
        self._log.close()


def main() -> None:
    """Run the process: read commands, write answers."""
    trainer = Trainer(TrainerSettings(**json.loads(sys.argv[1])), load_trace())
    try:
        for line in sys.stdin:
            try:
                answer = trainer.do(json.loads(line))
            except PetpsError as error:
                answer = {"error": str(error)}
            print(json.dumps(answer), flush=True)
    finally:
        trainer.close()


if __name__ == "__main__":
    main()
