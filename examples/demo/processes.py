"""The demo's child processes: a real `petps serve`, and the trainer."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final, Self

from examples.demo.interrupt import delay_signals
from examples.demo.state import State
from examples.demo.trainer import MODEL, TrainerSettings
from petps.errors import DeadlineExceeded, InternalError, Unavailable

__all__ = ["Child", "ServerProcess", "TrainerProcess"]

ROOT: Final = Path(__file__).resolve().parents[2]  # of the repository: `examples` is below it
READY_SECONDS: Final = 180.0
READY_POLL_SECONDS: Final = 0.0005
STOP_SECONDS: Final = 60.0
STATUS_SECONDS: Final = 60.0
LAST_OUTPUT_LINES: Final = 15


def _environment() -> dict[str, str]:
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        # Three processes share two processors: a matrix product on both would delay the others.
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


class Child:
    """A child process in a session of its own, so that Ctrl-C reaches only the demo itself.

    Enter it as a context manager before you start it: leaving the block always terminates the
    process.
    """

    def __init__(self, name: str, output: Path) -> None:
        self._name = name
        self._output = output
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def spawn(self, arguments: list[str], pipes: bool) -> None:
        """Start Python with ``arguments``; pipes: whether to pipe its standard input and output."""
        with self._output.open("a") as output, delay_signals():
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else output,
                stderr=output,
                text=True,
                env=_environment(),
                start_new_session=True,
            )

    def check_running(self) -> subprocess.Popen[str]:
        """Return the process. Raise Unavailable with its last output if it has exited."""
        process = self._process
        if process is None or process.poll() is not None:
            code = "not started" if process is None else f"exit status {process.returncode}"
            raise Unavailable(f"the {self._name} is not running ({code}):\n{self.last_output()}")
        return process

    def last_output(self) -> str:
        """Return the end of its output."""
        if not self._output.exists():
            return ""
        with self._output.open(errors="replace") as output:
            return "".join(deque(output, LAST_OUTPUT_LINES)).rstrip()

    def append_output(self, text: str) -> None:
        """Append text to the file of its output."""
        with self._output.open("a") as output:
            output.write(text)

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process is gone."""
        process = self.check_running()
        process.send_signal(signal.SIGKILL)
        process.wait()

    def stop(self) -> int | None:
        """Request the process to exit, and kill it if it does not. Return its exit status.

        Returns None if it was not started.
        """
        process = self._process
        if process is None:
            return None
        if process.poll() is None:
            self.request_exit(process)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
        return process.returncode

    def request_exit(self, process: subprocess.Popen[str]) -> None:
        """Send SIGTERM. Children that exit when their input ends override this."""
        process.terminate()


class ServerProcess(Child):
    """`petps serve` on 127.0.0.1. It keeps its ports over a restart.

    ``store``: the checkpoint store from which it catches up.
    """

    def __init__(
        self,
        folder: Path,
        pool: Path,
        log: str,
        kafka: Mapping[str, str],
        store: Path | None = None,
    ) -> None:
        super().__init__("server", folder / "server.txt")
        self._config = folder / "server.toml"
        self._config.write_text(
            f"[pool]\npath = {json.dumps(str(pool))}\n"
            + (f"[ingest]\nstore = {json.dumps(str(store))}\n" if store else "")
        )
        self._pool = pool
        self._log = log
        self._kafka = kafka
        self._ready = folder / "ready.json"
        self.port = 0
        self.http_port = 0

    @property
    def url(self) -> str:
        """The URL for clients."""
        return f"petps://127.0.0.1:{self.port}/{MODEL}"

    def start(self) -> float:
        """Start the server without waiting. Return the start time, as of time.monotonic()."""
        self._ready.unlink(missing_ok=True)
        begun = time.monotonic()
        options = {
            "--config": self._config,
            "--log": self._log,
            "--model": MODEL,
            "--port": self.port,
            "--http-port": self.http_port,
            "--grpc-port": 0,
            "--ready-file": self._ready,
        }
        arguments = [str(part) for option in options.items() for part in option]
        for name, value in self._kafka.items():
            arguments += ["--kafka-option", f"{name}={value}"]
        self.spawn(["-m", "petps.cli", "serve", str(self._pool), *arguments], pipes=False)
        return begun

    def wait_ready(self) -> dict[str, Any]:
        """Wait until the server is ready, and return the contents of its ready file."""
        deadline = time.monotonic() + READY_SECONDS
        while not self._ready.exists():
            self.check_running()
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"the server is not ready after {READY_SECONDS:.0f} s")
            time.sleep(READY_POLL_SECONDS)
        facts: dict[str, Any] = json.loads(self._ready.read_text())
        self.port, self.http_port = facts["port"], facts["http_port"]
        return facts

    def ingest(self) -> dict[str, Any] | None:
        """Return the ingest part of the server's status.

        Return None if ingest has not begun, or if the server does not reply.
        """
        url = f"http://127.0.0.1:{self.http_port}/status.json"
        try:
            with urllib.request.urlopen(url, timeout=STATUS_SECONDS) as reply:
                status: dict[str, dict[str, Any]] = json.load(reply)
        except (OSError, http.client.HTTPException, ValueError):
            return None
        return status.get("ingest")

    def stop_cleanly(self) -> None:
        """Stop the server. Raise InternalError if its exit status is not 0."""
        code = self.stop()
        if code != 0:
            raise InternalError(
                f"the server terminated with exit status {code}:\n{self.last_output()}"
            )


class TrainerProcess(Child):
    """The trainer. ``call`` sends a command and returns its answer, as ``begin`` and ``end`` do."""

    def __init__(self, folder: Path, settings: TrainerSettings) -> None:
        super().__init__("trainer", folder / "trainer.txt")
        self._settings = settings

    def start(self) -> None:
        """Start the trainer without waiting."""
        self.spawn(["-m", "examples.demo.trainer", self._settings.as_text()], pipes=True)

    def begin(self, do: str, **arguments: Any) -> None:
        """Send a command; end() returns its answer."""
        try:
            self._pipe(self.check_running().stdin).write(json.dumps({"do": do, **arguments}) + "\n")
            self._pipe(self.check_running().stdin).flush()
        except BrokenPipeError:
            raise Unavailable(f"the trainer has exited:\n{self.last_output()}") from None

    def end(self) -> dict[str, Any]:
        """Wait for the answer. Raise InternalError if the trainer failed."""
        line = self._pipe(self.check_running().stdout).readline()
        if not line:
            raise Unavailable(f"the trainer has exited:\n{self.last_output()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise InternalError(f"the trainer: {answer['error']}")
        return answer

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and return its answer."""
        self.begin(do, **arguments)
        return self.end()

    def state(self, path: Path) -> State:
        """Return the trainer's rows. The file ``path`` holds them for a moment."""
        self.call("save", path=str(path))
        state = State.read(path)
        path.unlink()
        return state

    def request_exit(self, process: subprocess.Popen[str]) -> None:
        """Close the trainer's input, which makes it exit."""
        self._pipe(process.stdin).close()

    @staticmethod
    def _pipe(stream: IO[str] | None) -> IO[str]:
        assert stream is not None
        return stream
