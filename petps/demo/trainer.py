"""The demo's trainer, a process of its own: learns, and publishes what changed.

`python -m petps.demo.trainer SETTINGS` reads one command a line on standard input and answers each
with one line, both JSON; it ends with its input. Commands ({"do": ...}):
  learn    begin, end, expire   learns accesses[begin:end]; expires cold objects if asked to
  sweep                         weight decay: every row changes
  base     folder               writes a base there, and begins the log's run with it
  publish                       publishes what changed since the last time, as a version
  save     path                 writes rows float32[n, dim] and present bool[n] as an .npz
Answers carry {"error": text} when a command failed. Times are CLOCK_MONOTONIC seconds.
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

from petps.checkpoint.base import BaseWriter
from petps.delta import TableSchema, open_log
from petps.demo.model import Settings, SkipGram
from petps.demo.trace import Trace, load_trace
from petps.errors import InvalidArgument, PetpsError
from petps.publish import Publisher

__all__ = ["MODEL", "TABLE", "Trainer", "TrainerSettings", "main"]

MODEL: Final = "demo"
TABLE: Final = "objects"
# Objects unseen for so many accesses, and accessed only once in all, expire.
EXPIRE_IDLE: Final = 50_000
EXPIRE_COUNT_MAX: Final = 1
EXPIRE_LIMIT: Final = 2_000  # at a time


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """What the demo tells the process."""

    log: str
    partitions: int
    seed: int
    kafka: dict[str, str] = field(default_factory=dict)

    def as_text(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


class Trainer:
    """A model and its publisher. ``do`` is the process's one command."""

    def __init__(self, settings: TrainerSettings, trace: Trace) -> None:
        self._trace = trace
        self._model = SkipGram(len(trace.keys), Settings(), settings.seed)
        self._schema = TableSchema(TABLE, "f32", self._model.settings.dim)
        self._log = open_log(settings.log, partitions=settings.partitions, options=settings.kafka)
        self._publisher = Publisher(self._log, MODEL, tables=[self._schema])
        self._step = 0

    def do(self, command: dict[str, Any]) -> dict[str, Any]:
        """One command's answer. Raises PetpsError."""
        what = command.pop("do", None)
        commands: dict[Any, Callable[..., dict[str, Any]]] = {
            "learn": self.learn,
            "sweep": self.sweep,
            "base": self.base,
            "publish": self.publish,
            "save": self.save,
        }
        if what not in commands:
            raise InvalidArgument(f"the trainer does not know {what!r}")
        return commands[what](**command)

    def learn(self, begin: int, end: int, expire: bool) -> dict[str, Any]:
        """Learns accesses[begin:end]."""
        started = time.monotonic()
        self._model.learn(self._trace.accesses, begin, end)
        self._step = end
        expired = 0
        if expire:
            expired = self._model.expire(end, EXPIRE_IDLE, EXPIRE_COUNT_MAX, EXPIRE_LIMIT)
        return {"seconds": time.monotonic() - started, "expired": expired}

    def sweep(self) -> dict[str, Any]:
        """Shrinks every vector."""
        self._model.sweep()
        return {"rows": int(np.count_nonzero(self._model.present))}

    def base(self, folder: str) -> dict[str, Any]:
        """Writes all rows as a base, and begins the run with it."""
        begin = time.monotonic()
        self._model.take_changed()
        version = self._publisher.version + 1
        writer = BaseWriter(
            folder,
            model=MODEL,
            instance=MODEL,
            partitions=self._log.partitions,
            positions={},
            version=version,
        )
        present = np.flatnonzero(self._model.present)
        rows = writer.add_table(self._schema, self._trace.keys[present], self._rows_of)
        writer.commit()
        self._publisher.begin_base(folder, version=version, step=self._step)
        return {"version": version, "rows": rows, "begin": begin, "end": time.monotonic()}

    def _rows_of(self, keys: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint8], None]:
        rows = self._model.rows[np.searchsorted(self._trace.keys, keys)]
        return rows.view(np.uint8), None

    def publish(self) -> dict[str, Any]:
        """Publishes what changed: rows, and deletions of what expired."""
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
        """Writes the state, for comparison."""
        np.savez(path, rows=self._model.rows, present=self._model.present)
        return {"rows": int(np.count_nonzero(self._model.present))}

    def close(self) -> None:
        """Closes the log."""
        self._log.close()


def main() -> None:
    """The process: commands in, answers out."""
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
