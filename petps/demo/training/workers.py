"""The trainer: its worker processes, which begin and end together, and what they say."""

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

from petps.demo.processes import Child
from petps.demo.training.task import WORLD, Settings
from petps.errors import DeadlineExceeded

__all__ = ["Said", "Workers"]

GRACE_SECONDS: Final = 1.0
PEER_GONE: Final = "a peer is gone"  # petps.train.link's words
SILENCE_SECONDS: Final = 180.0  # PyTorch's import on a machine that does much else, and no step


@dataclass(frozen=True, slots=True)
class Said:
    """A line of worker ``rank``: see worker.py. life: how often the trainer was started before."""

    rank: int
    life: int
    what: str
    at: float
    more: dict[str, Any]


class WorkerProcess(Child):
    """One of them; its words go to ``heard``."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(f"trainer's worker {rank}", folder / f"worker-{rank}.txt")
        self.rank = rank
        self._ear: threading.Thread | None = None

    def start(self, life: int, settings: Settings, heard: queue.Queue[Said]) -> None:
        """Starts it without waiting."""
        arguments = [str(self.rank), str(life), settings.as_text()]
        self.spawn(["-m", "petps.demo.training.worker", *arguments], pipes=True)
        self._ear = threading.Thread(
            target=self._hear, args=(life, heard), name=f"petps-demo-hear-{self.rank}", daemon=True
        )
        self._ear.start()

    def _hear(self, life: int, heard: queue.Queue[Said]) -> None:
        assert self._process is not None
        lines = self._process.stdout
        assert lines is not None
        with suppress(ValueError):  # closed: nobody listens any more
            for line in lines:
                if not line.endswith("\n"):
                    return  # killed within its last line
                try:
                    said = json.loads(line)
                except ValueError:  # a library's own words
                    self.note(line)
                    continue
                heard.put(Said(self.rank, life, said.pop("is"), said.pop("at"), said))

    def has_failed(self) -> bool:
        """Whether it ended by an error."""
        return self._process is None or self._process.poll() not in (None, 0)

    def bury(self) -> None:
        """After SIGKILL: returns when it is gone, and all that it said was heard."""
        assert self._process is not None
        assert self._ear is not None
        self._process.wait()
        self._ear.join()
        self.stop()

    def ask_to_end(self, process: Any) -> None:
        """It ends with its input."""
        process.stdin.close()


class Workers:
    """Entered before they are started: whatever happens, leaving it ends them all."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._processes: list[WorkerProcess] = []
        self._heard: queue.Queue[Said] = queue.Queue()
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
        """Starts all without waiting. Returns when, on the clock of time.monotonic()."""
        self.life += 1
        begun = time.monotonic()
        for rank in range(WORLD):
            each = WorkerProcess(self._settings.path("."), rank)
            self._processes.append(each)
            each.start(self.life, self._settings, self._heard)
        return begun

    def kill(self) -> float:
        """SIGKILL to all at once; returns when they are gone. When it was sent."""
        sent = time.monotonic()
        for each in self._processes:
            each.running().send_signal(signal.SIGKILL)
        for each in self._processes:
            each.bury()
        self._processes.clear()
        return sent

    def _raise_first_cause(self) -> None:
        """Raises Unavailable with the last words of one that failed, and not by its peer's end."""
        time.sleep(GRACE_SECONDS)  # a peer's end is noticed before whoever ended is seen to be gone
        failed = [each for each in self._processes if each.has_failed()]
        min(failed, key=lambda each: PEER_GONE in each.last_words()).running()

    def has_said(self) -> bool:
        """Whether next() would return at once."""
        return not self._heard.empty()

    def next(self) -> Said:
        """What one of them says next. Raises Unavailable when one has ended by an error."""
        deadline = time.monotonic() + SILENCE_SECONDS
        while True:
            with suppress(queue.Empty):
                return self._heard.get(timeout=0.2)
            if any(each.has_failed() for each in self._processes):
                self._raise_first_cause()
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"the trainer's workers say nothing for {SILENCE_SECONDS:.0f} s"
                )
