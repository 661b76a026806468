"""The trainer: its worker processes, which start and end together, and their reports."""

from __future__ import annotations

import json
import queue
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from examples.demo.processes import Child
from examples.demo.training.task import WORLD, Settings
from petps.errors import DeadlineExceeded

__all__ = ["WorkerReport", "Workers"]

GRACE_SECONDS: Final = 1.0
PEER_GONE: Final = "a peer is gone"  # the error text of petps.train.link
SILENCE_SECONDS: Final = 180.0  # enough for PyTorch's import on a busy machine, and for any step


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A line of worker ``rank``: see worker.py. life: how often the trainer was started before."""

    rank: int
    life: int
    what: str
    at: float
    more: dict[str, Any]


class WorkerProcess(Child):
    """One worker process; its reports go to ``reports``."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(f"trainer's worker {rank}", folder / f"worker-{rank}.txt")
        self.rank = rank
        self._receiver: threading.Thread | None = None

    def start(self, life: int, settings: Settings, reports: queue.Queue[WorkerReport]) -> None:
        """Start the process without waiting."""
        arguments = [str(self.rank), str(life), settings.as_text()]
        self.spawn(["-m", "examples.demo.training.worker", *arguments], pipes=True)
        self._receiver = threading.Thread(
            target=self._receive,
            args=(life, reports),
            name=f"petps-demo-reports-{self.rank}",
            daemon=True,
        )
        self._receiver.start()

    def _receive(self, life: int, reports: queue.Queue[WorkerReport]) -> None:
        assert self._process is not None
        lines = self._process.stdout
        assert lines is not None
        with suppress(ValueError):  # the stream was closed: the reports are not needed any more
            for line in lines:
                if not line.endswith("\n"):
                    return  # the process was killed while it wrote its last line
                try:
                    fields = json.loads(line)
                except ValueError:  # output of a library
                    self.note(line)
                    continue
                reports.put(
                    WorkerReport(self.rank, life, fields.pop("is"), fields.pop("at"), fields)
                )

    def has_failed(self) -> bool:
        """Return whether it has ended with an error."""
        return self._process is None or self._process.poll() not in (None, 0)

    def bury(self) -> None:
        """After SIGKILL, wait until the process is gone and all its reports are read."""
        assert self._process is not None
        assert self._receiver is not None
        self._process.wait()
        self._receiver.join()
        self.stop()

    def ask_to_end(self, process: Any) -> None:
        """Close its input, which makes it exit."""
        process.stdin.close()


class Workers:
    """The worker processes. Enter it before they are started: leaving the block ends them all."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._processes: list[WorkerProcess] = []
        self._reports: queue.Queue[WorkerReport] = queue.Queue()
        self.life = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for each in self._processes:
            each.stop()

    def start(self) -> float:
        """Start all without waiting. Return the start time, as of time.monotonic()."""
        self.life += 1
        begun = time.monotonic()
        for rank in range(WORLD):
            each = WorkerProcess(self._settings.path("."), rank)
            self._processes.append(each)
            each.start(self.life, self._settings, self._reports)
        return begun

    def kill(self) -> float:
        """Send SIGKILL to all at once, wait until they are gone, and return when it was sent."""
        sent = time.monotonic()
        for each in self._processes:
            each.running().send_signal(signal.SIGKILL)
        for each in self._processes:
            each.bury()
        self._processes.clear()
        return sent

    def _raise_first_cause(self) -> None:
        """Raise Unavailable with the output of a worker that failed for its own reason."""
        time.sleep(GRACE_SECONDS)  # a peer may notice the end before the process has exited
        failed = [each for each in self._processes if each.has_failed()]
        min(failed, key=lambda each: PEER_GONE in each.last_words()).running()

    def has_reports(self) -> bool:
        """Return whether next() would return at once."""
        return not self._reports.empty()

    def next(self) -> WorkerReport:
        """Return a worker's next report. Raise Unavailable if a worker ended with an error.

        Raises DeadlineExceeded after SILENCE_SECONDS without a report.
        """
        deadline = time.monotonic() + SILENCE_SECONDS
        while True:
            with suppress(queue.Empty):
                return self._reports.get(timeout=0.2)
            if any(each.has_failed() for each in self._processes):
                self._raise_first_cause()
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"the trainer's workers say nothing for {SILENCE_SECONDS:.0f} s"
                )
