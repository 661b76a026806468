"""A real Prometheus (Debian's) that scrapes servers and evaluates the rules of deploy/prometheus.

An alert of the rules waits for its `for`, and looks back over a window. A drill cannot wait for
them: here `for` is left out and windows are WINDOW_SHARE of their length. So an alert fires as soon
as its condition holds, and `waits` tells how much later it fires in operation.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Self

from tests.operate.prometheus import ROOT, tool
from tests.ports import stable_port
from tests.system.servers import wait_until

RULES: Final = ROOT / "deploy/prometheus/petps.rules.yml"
SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
WINDOW_SHARE: Final = 60
WINDOW_SECONDS_MIN: Final = 10  # a rate needs samples


def hurried(rules: str) -> tuple[str, dict[str, int]]:
    """Return rules without `for` and with short windows; and by alert, the seconds of its `for`."""

    def shorten(window: re.Match[str]) -> str:
        seconds = int(window[1]) * SECONDS[window[2]]
        return f"[{max(WINDOW_SECONDS_MIN, seconds // WINDOW_SHARE)}s]"

    waits: dict[str, int] = {}
    lines: list[str] = []
    for line in rules.splitlines():
        if alert := re.match(r"\s*- alert: (\w+)", line):
            waits[alert[1]] = 0
        if wait := re.match(r"\s*for: (\d+)([smhd])\s*$", line):
            waits[list(waits)[-1]] = int(wait[1]) * SECONDS[wait[2]]
        else:
            lines.append(re.sub(r"\[(\d+)([smhd])\]", shorten, line))
    return "\n".join(lines) + "\n", waits


class Prometheus:
    """A process that scrapes and evaluates once a second. Close it."""

    def __init__(self, folder: Path) -> None:
        """Start it. Raises NotInstalled."""
        path = tool("prometheus")
        folder.mkdir()
        self.port = stable_port()
        self._targets = folder / "targets.json"
        self.watch([])
        text, self.waits = hurried(RULES.read_text())
        (folder / "rules.yml").write_text(text)
        (folder / "prometheus.yml").write_text(f"""
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: [{folder}/rules.yml]
scrape_configs:
  - job_name: petps
    # An expired certificate must not hide the server from its own alert.
    tls_config: {{insecure_skip_verify: true}}
    file_sd_configs: [{{files: [{self._targets}], refresh_interval: 1s}}]
    relabel_configs:
      - {{source_labels: [scheme], target_label: __scheme__}}
      - {{regex: scheme, action: labeldrop}}
""")
        command = [
            path,
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/tsdb",
        ]
        command += [f"--web.listen-address=127.0.0.1:{self.port}"]
        with (folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until("Prometheus answers", self._is_up)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        self._process.wait(30)

    def watch(self, urls: Iterable[str]) -> None:
        """Scrape the HTTP doors at these URLs, and no others."""
        parts = [urllib.parse.urlsplit(url) for url in urls]
        groups = [{"targets": [p.netloc], "labels": {"scheme": p.scheme}} for p in parts]
        temporary = self._targets.with_suffix(".new")
        temporary.write_text(json.dumps(groups))
        temporary.replace(self._targets)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the vector that the expression has now."""
        data = self._get("query", query=expression)
        vector: list[dict[str, Any]] = data["result"]
        return vector

    def firing(self) -> dict[str, str]:
        """Return the alerts that fire now, each with a summary."""
        alerts = self._get("alerts")["alerts"]
        return {
            alert["labels"]["alertname"]: alert["annotations"]["summary"]
            for alert in alerts
            if alert["state"] == "firing"
        }

    def runbook_of(self, alert: str) -> str:
        """Return the page that the rule names."""
        rules = [rule for group in self._get("rules")["groups"] for rule in group["rules"]]
        (page,) = {r["annotations"]["runbook_url"] for r in rules if r["name"] == alert}
        return str(page)

    def scraped(self) -> dict[str, str]:
        """Return the health of each target, by its address."""
        targets = self._get("targets")["activeTargets"]
        return {target["labels"]["instance"]: target["health"] for target in targets}

    def _get(self, what: str, **parameters: str) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as reply:
            answer = json.load(reply)
        assert answer["status"] == "success", answer
        return answer["data"]

    def _is_up(self) -> bool:
        assert self._process.poll() is None, "Prometheus has ended"
        with contextlib.suppress(OSError):
            self._get("alerts")
            return True
        time.sleep(0.1)
        return False
