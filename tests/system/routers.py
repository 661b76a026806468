"""Routers as processes, in front of the servers of tests/system/servers.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.ports import stable_port
from tests.system import servers
from tests.system.servers import PETPS, wait_until

__all__ = ["Router"]


class Router:
    """A `petps router` child.

    deadline_seconds: of a request. By default a login or a push does not fail because a busy
    machine stalls for seconds.
    """

    def __init__(
        self, url: str, folder: Path, *arguments: object, deadline_seconds: float = 60.0
    ) -> None:
        self.folder, self._url, self._arguments = folder, url, arguments
        self._deadline_seconds = deadline_seconds
        self.port = stable_port()
        self.launch()

    def launch(self) -> None:
        """Start the process at the same port."""
        self.ready_file = self.folder / "router.ready"
        self._output = self.folder / "router.out"
        command = [*PETPS, "router", "--servers", self._url, "--port", str(self.port)]
        command += ["--http-port", "0", "--grpc-port", "0", "--ready-file", str(self.ready_file)]
        command += map(str, self._arguments)
        environment = {
            **os.environ,
            "PETPS_ROUTER_DEADLINE_SECONDS": str(self._deadline_seconds),
        }
        with self._output.open("ab") as output:
            self.child = subprocess.Popen(command, stdout=output, stderr=output, env=environment)

    @property
    def output(self) -> str:
        """Return what it has printed."""
        return self._output.read_text()

    def wait_ready(self) -> dict[str, Any]:
        """Return the content of the ready file, once it exists."""

        def is_ready() -> bool:
            assert self.child.poll() is None, self.output
            return self.ready_file.exists()

        wait_until("the router is ready", is_ready)
        facts: dict[str, Any] = json.loads(self.ready_file.read_text())
        return facts

    @property
    def url(self) -> str:
        """Return the address of the default model. Waits until the router is ready."""
        return f"petps://127.0.0.1:{self.wait_ready()['port']}/default"

    def read(self, path: str, token: str = "") -> str:
        """Return a page of HTTP."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        url = f"http://127.0.0.1:{self.wait_ready()['http_port']}/{path}"
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as reply:
            page: str = reply.read().decode()
        return page

    def is_well(self, path: str) -> bool:
        """Return whether a probe succeeds."""
        try:
            return self.read(path) is not None
        except urllib.error.HTTPError:
            return False

    def kill(self) -> None:
        """Kill the process with -9."""
        self.child.kill()
        self.child.wait()
        self.ready_file.unlink(missing_ok=True)

    def stop(self) -> str:
        """End it with SIGTERM, and return what it has printed."""
        self.child.send_signal(signal.SIGTERM)
        assert self.child.wait(servers.WAIT_SECONDS) == 0, self.output
        return self.output
