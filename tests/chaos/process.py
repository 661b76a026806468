"""A process of the chaos suite: it can be killed, paused, and started again by another thread."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


class Process:
    """A child in a namespace. Its output goes to NAME.N.log, one file for each life.

    before: called before each start.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        *,
        environment: Mapping[str, str] | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self._command, self._folder = list(command), folder
        self._environment = dict(environment or {})
        self._before = before
        self._lives = 0
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Return the pid; None while it does not run."""
        return None if self._child is None or self._child.poll() is not None else self._child.pid

    @property
    def log(self) -> Path:
        """Return the output of the present life."""
        return self._folder / f"{self.name}.{self._lives}.log"

    def start(self) -> None:
        """Start it, if it does not run."""
        if self.pid is not None:
            return
        self._before()
        self._lives += 1
        with self.log.open("wb") as log:
            self._child = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**os.environ, **self._environment}, start_new_session=True,
            )  # fmt: skip

    def kill(self) -> None:
        """Kill it with -9."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()

    def stop(self, seconds: float) -> int:
        """End it with SIGTERM. Return its exit status. Raise TimeoutExpired."""
        child = self._child
        assert child is not None
        child.send_signal(signal.SIGTERM)
        status = child.wait(seconds)
        self._child = None
        return status

    def wait(self, seconds: float) -> int:
        """Return its exit status, once it ends by itself. Raise TimeoutExpired."""
        assert self._child is not None
        return self._child.wait(seconds)

    def pause(self) -> None:
        """Stop it with SIGSTOP: it keeps its connections, and answers nothing."""
        if self._child is not None:
            self._child.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        if self._child is not None:
            self._child.send_signal(signal.SIGCONT)

    def has_failed(self) -> bool:
        """Return whether it has ended by itself with an error."""
        return self._child is not None and self._child.poll() not in (None, 0)
