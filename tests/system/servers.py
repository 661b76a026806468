"""Real `petps serve` processes, and clients that continue while servers are killed."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import petps_client

from tests.ports import stable_port

PETPS = (sys.executable, "-m", "petps.cli")
WAIT_SECONDS = 120.0
WAIT_MS = round(1e3 * WAIT_SECONDS)
PARTITIONS = 8  # the default of a new pool
_numbers = itertools.count()
T = TypeVar("T")


def wait_until(event: str, condition: Callable[[], T], seconds: float = WAIT_SECONDS) -> T:
    """Wait until `condition()` is true, and return its value. Fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not in {seconds} s: {event}"
        time.sleep(0.01)
    return value


def petps(*arguments: object) -> str:
    """Return the standard output of a command that must succeed."""
    command = [*PETPS, *map(str, arguments)]
    process = subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def connect(url: str, **options: Any) -> petps_client.Client:
    """Connect with a deadline that no busy machine exceeds: the calls are expected to succeed."""
    return petps_client.connect(url, deadline_ms=WAIT_MS, **options)


class Server:
    """A `petps serve` child. It prints to files, because a full pipe would block it."""

    def __init__(
        self,
        pool: Path,
        *arguments: object,
        folder: Path | None = None,
        command: Sequence[str] = PETPS,
        environment: dict[str, str] | None = None,
    ) -> None:
        """Start the server with free ports, unless `arguments` name others.

        `folder` is for its files, by default the folder of the pool. `command` and `environment`
        are those of another petps than this one (tests/upgrade).
        """
        self.pool = pool
        self.command, self.environment = command, environment
        self.folder = folder or pool.parent
        self.ready_file = self.folder / "ready.json"
        self._arguments = arguments
        self.launch()

    def launch(self) -> None:
        """Start the process, and do not wait until it is ready."""
        number = next(_numbers)
        self._output = self.folder / f"serve.{number}.out"
        self._errors = self.folder / f"serve.{number}.err"
        command = [*self.command, "serve", str(self.pool), "--port", "0", "--http-port", "0"]
        command += ["--grpc-port", "0", "--ready-file", str(self.ready_file)]
        command += map(str, self._arguments)
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            self.child = subprocess.Popen(
                command,
                stdout=output,
                stderr=errors,
                env={**os.environ, **(self.environment or {})},
                cwd=self.folder if self.environment else None,  # not this repository's packages
            )

    @property
    def output(self) -> str:
        """Return its standard output so far."""
        return self._output.read_text()

    @property
    def errors(self) -> str:
        """Return its standard error so far."""
        return self._errors.read_text()

    @property
    def is_running(self) -> bool:
        return self.child.poll() is None

    def wait_ready(self) -> dict[str, Any]:
        """Return the content of the ready file, once it exists."""

        def is_ready() -> bool:
            assert self.is_running, self.errors
            return self.ready_file.exists()

        wait_until("the server is ready", is_ready)
        facts: dict[str, Any] = json.loads(self.ready_file.read_text())
        assert facts["pid"] == self.child.pid
        return facts

    @property
    def url(self) -> str:
        """Return the address of the default model. Waits until the server is ready."""
        return f"petps://127.0.0.1:{self.wait_ready()['port']}/default"

    def read(self, path: str) -> bytes:
        """Return a page of HTTP."""
        url = f"http://127.0.0.1:{self.wait_ready()['http_port']}/{path}"
        with urllib.request.urlopen(url, timeout=30) as reply:
            page: bytes = reply.read()
        return page

    def status(self) -> dict[str, Any]:
        """Return the status by HTTP."""
        status: dict[str, Any] = json.loads(self.read("status.json"))
        return status

    def kill(self) -> None:
        """Kill the process with -9."""
        self.child.kill()
        self.child.wait()
        self.ready_file.unlink(missing_ok=True)

    def restart(self) -> None:
        """Kill the process with -9 if it runs, and start it again. Return when it is ready."""
        self.kill()
        self.launch()
        self.wait_ready()

    def stop(self, number: int = signal.SIGTERM) -> str:
        """Stop the server, which must print no error. Return its standard output."""
        self.end(number)
        assert self.errors == ""
        return self.output

    def end(self, number: int = signal.SIGTERM) -> None:
        """Stop the server. It may have printed errors, but its exit status must be 0."""
        self.child.send_signal(number)
        assert self.child.wait(WAIT_SECONDS) == 0, self.errors


class Fleet:
    """Servers of one model with a shard map, which the caller writes with own()."""

    def __init__(
        self, serve: Callable[..., Server], folder: Path, pools: Sequence[Path], ingest: str
    ) -> None:
        """Start one server per pool. `ingest` is the section [ingest] of their configuration."""
        config = folder / "petps.toml"
        config.write_text(f'[pool]\npath = "unused"\n[ingest]\n{ingest}\n')
        self.map_file = folder / "shards.json"
        self.version = 0
        # The map needs the ports, so the servers start with a map in which they own nothing.
        self._write_map({"127.0.0.1:1": list(range(PARTITIONS))}, {})
        settings = ("--config", config, "--shard-map", self.map_file)
        self.servers = [serve(pool, *settings, "--port", stable_port()) for pool in pools]
        self.addresses = [f"127.0.0.1:{server.wait_ready()['port']}" for server in self.servers]

    def url(self, *servers: int) -> str:
        """Return the address of the model at the servers with these numbers."""
        return f"petps://{','.join(self.addresses[server] for server in servers)}/default"

    def own(self, *partitions: list[Any], follows: dict[str, list[Any]] | None = None) -> None:
        """Give server i its list of partitions, and wait until every server has the map.

        `follows` has the partitions that an address follows without owning them.
        """
        self._write_map(dict(zip(self.addresses, partitions, strict=True)), follows or {})
        self._wait_for_map()

    def use_map(self, path: Path) -> None:
        """Rename the next version of the map over the map, and wait until every server has it."""
        path.replace(self.map_file)
        self.version += 1
        self._wait_for_map()

    def _wait_for_map(self) -> None:
        for server in self.servers:
            wait_until(
                f"shard map {self.version}",
                lambda: server.status()["shard"]["map_version"] >= self.version,  # noqa: B023
            )

    def _write_map(self, owners: dict[str, list[Any]], follows: dict[str, list[Any]]) -> None:
        self.version += 1
        servers: list[dict[str, Any]] = []
        for address, partitions in owners.items():
            followed = follows.get(address)
            if partitions or followed:
                servers.append({"address": address, "partitions": partitions})
            if followed:
                servers[-1]["follows"] = followed
        shards = {"version": self.version, "partitions": PARTITIONS, "servers": servers}
        temporary = self.map_file.with_suffix(".new")
        temporary.write_text(json.dumps({"model": "default", **shards}))
        temporary.replace(self.map_file)


class Puller(threading.Thread):
    """A thread that pulls from the start of a block to its end. No answer may be wrong.

    A wrong answer fails the block. If `through_kills`, answers may be late, and pulls may fail
    while a server is down.
    """

    def __init__(
        self,
        url: str,
        pull: Callable[[petps_client.Client], object],
        *,
        through_kills: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(daemon=True)
        self.pulls = 0
        self.error: BaseException | None = None
        self._url = url
        self._pull = pull
        self._expected: tuple[type[Exception], ...] = ()
        if through_kills:
            self._options = options
            self._expected = (petps_client.Unavailable, petps_client.DeadlineExceeded)
        else:
            self._options = {"deadline_ms": WAIT_MS, **options}
        self._done = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._done.set()
        self.join(WAIT_SECONDS)
        if error is None:
            self.check()

    def check(self) -> None:
        """Fail if an answer was wrong so far."""
        assert self.error is None, self.error

    def run(self) -> None:
        """Pull until the end of the block."""
        try:
            with self._connect() as client:
                while not self._done.is_set():
                    try:
                        self._pull(client)
                        self.pulls += 1
                    except self._expected:
                        continue  # a server is down at this moment
        except BaseException as error:
            self.error = error

    def _connect(self) -> petps_client.Client:
        while True:
            try:
                return petps_client.connect(self._url, **self._options)
            except self._expected:
                if self._done.wait(0.01):
                    raise
