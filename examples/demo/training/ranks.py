"""The trainer's processes, one per rank, which start and end together, and their reports."""

from __future__ import annotations

import json
import queue
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from examples.demo.processes import Child
from examples.demo.training.task import WORLD, Settings
from petps.errors import DeadlineExceeded

__all__ = ["RankReport", "Ranks"]

GRACE_SECONDS: Final = 60.0  # for a failed process to end, on a busy machine
POLL_SECONDS: Final = 0.05
PEER_GONE: Final = "a peer is gone"  # in an error of petps.train.link
SILENCE_SECONDS: Final = 180.0  # enough for PyTorch's import on a busy machine, and for any step


@dataclass(frozen=True, slots=True)
class RankReport:
    """A line of output of a rank; see rank.py. life: the earlier starts of the trainer."""

    rank: int
    life: int
    kind: str
    at: float
    fields: dict[str, Any]


class RankProcess(Child):
    """The process of one rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(f"trainer's rank {rank}", folder / f"rank-{rank}.txt")
        self.rank = rank
        self._receiver: threading.Thread | None = None

    def start(self, life: int, settings: Settings, reports: queue.Queue[RankReport]) -> None:
        """Start the process without waiting. Put its reports into ``reports``."""
        arguments = [str(self.rank), str(life), settings.as_text()]
        self.spawn(["-m", "examples.demo.training.rank", *arguments], pipes=True)
        self._receiver = threading.Thread(
            target=self._receive,
            args=(life, reports),
            name=f"petps-demo-reports-{self.rank}",
            daemon=True,
        )
        self._receiver.start()

    def _receive(self, life: int, reports: queue.Queue[RankReport]) -> None:
        assert self._process is not None
        lines = self._process.stdout
        assert lines is not None
        with suppress(ValueError):  # stop() closed the stream: the reports are not needed any more
            for line in lines:
                if not line.endswith("\n"):
                    return  # the process was killed while it wrote its last line
                try:
                    fields = json.loads(line)
                except ValueError:  # output of a library
                    self.append_output(line)
                    continue
                reports.put(
                    RankReport(self.rank, life, fields.pop("event"), fields.pop("at"), fields)
                )

    def has_failed(self) -> bool:
        """Return whether the process has exited with an error."""
        return self._process is None or self._process.poll() not in (None, 0)

    def wait_until_read(self) -> None:
        """Wait, after the process has exited, until all its reports are read."""
        assert self._receiver is not None
        self._receiver.join(GRACE_SECONDS)

    def wait_until_gone(self) -> None:
        """Wait, after SIGKILL, until the process is gone and all its reports are read."""
        assert self._process is not None
        assert self._receiver is not None
        self._process.wait()
        self._receiver.join()
        self.stop()

    def request_exit(self, process: Any) -> None:
        """Close the input of the process, which makes it exit."""
        process.stdin.close()


class Ranks:
    """All processes of the trainer.

    Enter it as a context manager before you start them: leaving the block terminates them all.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._processes: list[RankProcess] = []
        self._reports: queue.Queue[RankReport] = queue.Queue()
        self.life = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.stop()

    def start(self) -> float:
        """Start all without waiting. Return the start time, as of time.monotonic()."""
        self.life += 1
        started = time.monotonic()
        for rank in range(WORLD):
            process = RankProcess(self._settings.path("."), rank)
            self._processes.append(process)
            process.start(self.life, self._settings, self._reports)
        return started

    def kill(self) -> float:
        """Send SIGKILL to all at once, and wait until they are gone. Return when it was sent."""
        sent = time.monotonic()
        running = [process.check_running() for process in self._processes]
        for popen in running:  # after all checks: a rank exits soon after its peer
            popen.send_signal(signal.SIGKILL)
        for process in self._processes:
            process.wait_until_gone()
        self._processes.clear()
        return sent

    def _raise_first_cause(self) -> None:
        """Raise Unavailable with the output of a rank that did not fail because a peer failed."""
        deadline = time.monotonic() + GRACE_SECONDS
        while True:  # a peer may notice the failure before the failed process exits
            failed = [process for process in self._processes if process.has_failed()]
            first = min(failed, key=lambda process: PEER_GONE in process.last_output())
            if PEER_GONE not in first.last_output() or time.monotonic() > deadline:
                first.check_running()
            time.sleep(POLL_SECONDS)

    def has_reports(self) -> bool:
        """Return whether next() would return at once."""
        return not self._reports.empty()

    def next(self) -> RankReport:
        """Return the next report of any rank.

        Raise Unavailable if a process has failed, and DeadlineExceeded after SILENCE_SECONDS
        without a report.
        """
        deadline = time.monotonic() + SILENCE_SECONDS
        while True:
            with suppress(queue.Empty):
                return self._reports.get(timeout=0.2)
            failed = [process for process in self._processes if process.has_failed()]
            if failed:
                for process in failed:
                    process.wait_until_read()  # what it reported before it failed comes first
                with suppress(queue.Empty):
                    return self._reports.get_nowait()
                self._raise_first_cause()
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"no report of the trainer's processes within {SILENCE_SECONDS:.0f} s"
                )
