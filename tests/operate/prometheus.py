"""A real Prometheus for tests, and its promtool: Debian's package, which bootstrap.sh unpacks."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tests.ports import stable_port

ROOT: Final = Path(__file__).resolve().parents[2]
UNPACKED: Final = ROOT / ".cache" / "prometheus" / "usr" / "bin"
START_SECONDS_MAX: Final = 60.0


class NotInstalled(Exception):
    """This machine has no Prometheus. Tests are skipped visibly."""


def tool(name: str) -> str:
    """Return the path of ``prometheus`` or ``promtool``. Raises NotInstalled."""
    path = shutil.which(name) or shutil.which(name, path=str(UNPACKED))
    if path is None:
        raise NotInstalled(f"{name} is not installed: run deploy/bootstrap.sh operate")
    return path


class Prometheus:
    """A running Prometheus."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the result of an expression now. Raises AssertionError with Prometheus' error."""
        parameters = urllib.parse.urlencode({"query": expression})
        result: list[dict[str, Any]] = self.read(f"/api/v1/query?{parameters}")["result"]
        return result

    def read(self, path: str) -> Any:
        """Return the data of an answer of the API. Raises AssertionError with its error."""
        try:
            with urllib.request.urlopen(self._url + path, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.read().decode()}") from None

    def is_ready(self) -> bool:
        """Return whether it answers queries."""
        with contextlib.suppress(OSError), urllib.request.urlopen(self._url + "/-/ready"):
            return True
        return False


@contextlib.contextmanager
def running(folder: Path, config: dict[str, Any]) -> Iterator[Prometheus]:
    """Run Prometheus with a configuration, and its data in ``folder``. Raises NotInstalled."""
    file, port = folder / "prometheus.yml", stable_port()
    file.write_text(json.dumps(config))  # JSON is YAML
    command = [
        tool("prometheus"), f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
    ]  # fmt: skip
    with (
        (folder / "prometheus.log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        try:
            prometheus = Prometheus(port)
            deadline = time.monotonic() + START_SECONDS_MAX
            while not prometheus.is_ready():
                assert process.poll() is None, (folder / "prometheus.log").read_text()
                assert time.monotonic() < deadline, "Prometheus is not ready"
                time.sleep(0.05)
            yield prometheus
        finally:
            process.kill()
