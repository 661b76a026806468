"""A real etcd for tests: one member or several on 127.0.0.1, which can be killed and stopped.

Debian's etcd-server is unpacked into .cache/etcd by `deploy/bootstrap.sh`, because installing it
would start a server. A program `etcd` on the PATH is used too.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from petps.cluster.etcd import Access, Etcd
from petps.errors import PetpsError
from tests.ports import stable_port

ROOT: Final = Path(__file__).resolve().parents[2]
UNPACKED: Final = ROOT / ".cache" / "etcd" / "usr" / "bin" / "etcd"
START_SECONDS_MAX: Final = 60
START_TRIES: Final = 3  # another process may take a port between its choice and its use


class NotAvailable(Exception):
    """This machine has no etcd. Tests are skipped visibly."""


def program() -> Path:
    """Return the path of etcd. Raises NotAvailable."""
    installed = shutil.which("etcd")
    if installed is not None:
        return Path(installed)
    if UNPACKED.exists():
        return UNPACKED
    raise NotAvailable(
        "no etcd: `deploy/bootstrap.sh` unpacks it, and installs nothing else for it"
    )


class EtcdServers:
    """The members of one etcd. Their data lies in memory where that is possible."""

    def __init__(self, folder: Path, members: int = 1, options: Sequence[str] = ()) -> None:
        """Start ``members``. ``options``: of each member. Raises NotAvailable."""
        self._program, self._folder, self._options = program(), folder, options
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        for tries_left in reversed(range(START_TRIES)):
            self._ports = [stable_port() for _ in range(members)]
            self._peers = [stable_port() for _ in range(members)]
            try:
                for number in range(members):
                    self.start(number)
                self.wait()
                return
            except RuntimeError:
                self.close()
                shutil.rmtree(folder, ignore_errors=True)
                if tries_left == 0:
                    raise

    @property
    def endpoints(self) -> list[str]:
        """Return the URLs for clients."""
        return [f"{self.scheme}://127.0.0.1:{port}" for port in self._ports]

    scheme = "http"

    def access(self) -> Access:
        """Return how to reach it."""
        return Access(tuple(self.endpoints))

    def start(self, number: int = 0) -> None:
        """Start a member, with its data of before."""
        peer = [f"http://127.0.0.1:{port}" for port in self._peers]
        client = self.endpoints[number]
        self._folder.mkdir(parents=True, exist_ok=True)
        command = [
            str(self._program), "--name", f"m{number}", "--data-dir",
            str(self._folder / f"m{number}"), "--listen-client-urls", client,
            "--advertise-client-urls", client, "--listen-peer-urls", peer[number],
            "--initial-advertise-peer-urls", peer[number], "--initial-cluster",
            ",".join(f"m{n}={url}" for n, url in enumerate(peer)),
            "--heartbeat-interval", "100", "--election-timeout", "1000",
            "--snapshot-count", "10000", *self._options,
        ]  # fmt: skip
        environment = {**os.environ, "ETCD_LOG_LEVEL": "warn"}
        with (self._folder / f"m{number}.log").open("ab") as log:
            self._children[number] = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment
            )

    def wait(self) -> None:
        """Wait until every member that runs answers."""
        deadline = time.monotonic() + START_SECONDS_MAX
        for number in sorted(self._children):
            self._wait_for(number, deadline)

    def _wait_for(self, number: int, deadline: float) -> None:
        etcd = Etcd(replace(self.access(), endpoints=(self.endpoints[number],)))
        while True:
            try:
                etcd.read("/")
                etcd.close()
                return
            except PetpsError as error:
                ended = [n for n, child in self._children.items() if child.poll() is not None]
                if ended or time.monotonic() > deadline:
                    log = (self._folder / f"m{ended[0] if ended else 0}.log").read_text()
                    raise RuntimeError(f"etcd does not start: {error}; {log[-500:]}") from None
                time.sleep(0.02)

    def kill(self, number: int = 0) -> None:
        """Kill a member with -9."""
        child = self._children.pop(number)
        child.kill()
        child.wait()

    def pause(self, number: int = 0) -> None:
        """Stop a member: it keeps its connections, and answers nothing."""
        self._children[number].send_signal(signal.SIGSTOP)

    def resume(self, number: int = 0) -> None:
        """Let a member go on."""
        self._children[number].send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill all members."""
        for number in list(self._children):
            self.kill(number)
