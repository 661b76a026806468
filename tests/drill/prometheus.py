"""A real Prometheus (Debian's) that scrapes servers and evaluates the rules of deploy/prometheus.

An alert of the rules waits for its `for`, and looks back over a window. A drill cannot wait for
them: here `for` is left out and windows are WINDOW_SHARE of their length. So an alert fires as soon
as its condition holds, and `waits` tells how much later it fires in operation.
"""

from __future__ import annotations

import contextlib
import json
import re
import urllib.parse
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from tests.operate.prometheus import ROOT, Prometheus, running

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


class Watcher:
    """A Prometheus that scrapes and evaluates once a second."""

    def __init__(self, prometheus: Prometheus, targets: Path, waits: dict[str, int]) -> None:
        """``waits`` has the seconds of the `for` of each alert."""
        self._prometheus, self._targets, self.waits = prometheus, targets, waits

    def watch(self, urls: Iterable[str]) -> None:
        """Scrape the HTTP doors at these URLs, and no others."""
        _write_targets(self._targets, urls)

    def firing(self) -> dict[str, str]:
        """Return the alerts that fire now, each with a summary."""
        return {
            alert["labels"]["alertname"]: alert["annotations"]["summary"]
            for alert in self._prometheus.read("/api/v1/alerts")["alerts"]
            if alert["state"] == "firing"
        }

    def runbook_of(self, alert: str) -> str:
        """Return the page that the rule names."""
        groups = self._prometheus.read("/api/v1/rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        (page,) = {r["annotations"]["runbook_url"] for r in rules if r["name"] == alert}
        return str(page)

    def scraped(self) -> dict[str, str]:
        """Return the health of each target, by its address."""
        targets = self._prometheus.read("/api/v1/targets")["activeTargets"]
        return {target["labels"]["instance"]: target["health"] for target in targets}


@contextlib.contextmanager
def watcher(folder: Path) -> Iterator[Watcher]:
    """Run Prometheus until the end of the block. Raises NotInstalled."""
    folder.mkdir()
    targets, rules = folder / "targets.json", folder / "rules.yml"
    _write_targets(targets, [])
    text, waits = hurried(RULES.read_text())
    rules.write_text(text)
    job = {
        "job_name": "petps",
        # An expired certificate must not hide the server from its own alert.
        "tls_config": {"insecure_skip_verify": True},
        "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "1s"}],
        "relabel_configs": [
            {"source_labels": ["scheme"], "target_label": "__scheme__"},
            {"regex": "scheme", "action": "labeldrop"},
        ],
    }
    each_second = ("scrape_interval", "scrape_timeout", "evaluation_interval")
    config = {
        "global": dict.fromkeys(each_second, "1s"),
        "rule_files": [str(rules)],
        "scrape_configs": [job],
    }
    with running(folder, config) as prometheus:
        yield Watcher(prometheus, targets, waits)


def _write_targets(path: Path, urls: Iterable[str]) -> None:
    parts = [urllib.parse.urlsplit(url) for url in urls]
    groups = [{"targets": [p.netloc], "labels": {"scheme": p.scheme}} for p in parts]
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(groups))
    temporary.replace(path)
