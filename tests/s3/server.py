"""A real S3 server for tests: Versity's gateway over a folder, one process on 127.0.0.1.

Go builds it from source (go.mod pins it, go.sum has the sums). The program is kept in .cache/s3, so
that only the first run needs a network. `python -m tests.s3.server` builds it ahead of the tests.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from tests.go_programs import NotAvailable, go_program
from tests.ports import stable_port

__all__ = ["NotAvailable", "Server", "program"]

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
CACHE: Final = ROOT / ".cache" / "s3"
PROGRAM: Final = "github.com/versity/versitygw/cmd/versitygw"
BUILD_SECONDS_MAX: Final = 900
START_SECONDS_MAX: Final = 60
START_TRIES: Final = 3  # another process may take a port between its choice and its use
KEY: Final = "trainer"
SECRET: Final = "a-secret-of-tests"
BUCKET: Final = "models"
HEALTH: Final = "/health"


def program() -> Path:
    """Return the path of the server, which is built once. Raise NotAvailable."""
    pins = [HERE / "go.mod", HERE / "go.sum"]
    return go_program(
        "versitygw", CACHE, pins, PROGRAM, seconds_max=BUILD_SECONDS_MAX, flags=["-ldflags=-s -w"]
    )


class Server:
    """One server and its data. It can be killed, paused, and started again on the same port."""

    def __init__(self, folder: Path) -> None:
        """Start a server whose buckets are folders of ``folder``. Raise NotAvailable."""
        self._folder = folder
        self._program = program()
        self._process: subprocess.Popen[bytes] | None = None
        for name in ("buckets", "metadata"):
            (folder / name).mkdir(parents=True)
        (folder / "buckets" / BUCKET).mkdir()
        for tries_left in reversed(range(START_TRIES)):
            self._port = stable_port()
            try:
                self.start()
                return
            except RuntimeError:
                if tries_left == 0:
                    raise

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment in which every client of S3 uses this server."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_DEFAULT_REGION": "us-east-1",
            # Not the machine's own configuration.
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            # The client does not retry, so that tests of a dead server are short.
            "AWS_MAX_ATTEMPTS": "1",
        }

    @property
    def port(self) -> int:
        """Return the port, which stays the same."""
        return self._port

    def path(self, url: str) -> Path:
        """Return the local path at which the server keeps an object or a folder of objects."""
        return self._folder / "buckets" / url.removeprefix("s3://")

    def start(self) -> None:
        """Start the process, and return when it answers."""
        assert self._process is None
        command = [
            str(self._program), "--quiet", "--port", f"127.0.0.1:{self._port}", "--access", KEY,
            "--secret", SECRET, "--health", HEALTH, "posix", "--sidecar",
            str(self._folder / "metadata"), str(self._folder / "buckets"),
        ]  # fmt: skip
        with open(self._folder / "server.log", "ab") as log:
            self._process = subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECONDS_MAX
        while time.monotonic() < deadline and self._process.poll() is None:
            if self._answers():
                return
            time.sleep(0.02)
        self.kill()
        raise RuntimeError(f"the S3 server did not start: {self.log()}")

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=1)
        try:
            connection.request("GET", HEALTH)
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def kill(self) -> None:
        """Kill the server with -9, also if it is not running."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait()

    def log(self) -> str:
        """Return the end of the server's output."""
        return (self._folder / "server.log").read_text(errors="replace")[-2000:]


def _main() -> None:
    """Build the server; exit with status 1 and the reason if that is not possible."""
    try:
        program()
    except NotAvailable as reason:
        sys.exit(str(reason))


if __name__ == "__main__":
    _main()
