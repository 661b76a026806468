"""The failure drill: breaks real servers, and shows what an operator sees and how it ends.

`make drill` runs it. A real Prometheus scrapes the servers and evaluates the rules of
deploy/prometheus. For each failure, the report has the alert that fired and after how long, what
/readyz and `petps status` said, and whether all was well again after what the runbook page says.
"""

from __future__ import annotations

import argparse
import ssl
import sys
import tempfile
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.drill.prometheus import Watcher, watcher
from tests.drill.scenarios import SCENARIOS, Scenario
from tests.operate.prometheus import NotInstalled
from tests.system.servers import petps, wait_until

ROOT: Final = Path(__file__).resolve().parents[2]
REPORT: Final = ROOT / "build" / "drill.md"


@dataclass
class Seen:
    """Holds what one failure showed."""

    scenario: type[Scenario]
    seconds: float = 0.0
    """From the failure to the alert's condition."""
    wait: int = 0
    """What the rule adds in operation, in seconds."""
    summary: str = ""
    others: list[str] = field(default_factory=list)
    """Other alerts that fired."""
    ready: str = ""
    status: str = ""
    page: str = ""
    seconds_to_end: float = 0.0
    fault: str = ""
    skipped: str = ""


def read(scenario: Scenario, path: str) -> tuple[int, str]:
    """Return the code and text of a page of the server's HTTP door."""
    trust = ssl.create_default_context()
    trust.check_hostname = False
    trust.verify_mode = ssl.CERT_NONE  # its certificate may have expired
    url = f"{scenario.scheme}://127.0.0.1:{scenario.server.wait_ready()['http_port']}/{path}"
    try:
        with urllib.request.urlopen(url, timeout=30, context=trust) as reply:
            return reply.status, reply.read().decode().strip()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode().strip()


def url_of(scenario: Scenario) -> list[str]:
    """Return the addresses of the HTTP doors of all servers."""
    ports = [server.wait_ready()["http_port"] for server in scenario.servers]
    return [f"{scenario.scheme}://127.0.0.1:{port}" for port in ports]


def run(kind: type[Scenario], folder: Path, prometheus: Watcher) -> Seen:
    """Run a scenario from health to health."""
    seen = Seen(kind, wait=prometheus.waits[kind.alert])
    with closing(kind(folder)) as scenario:
        urls = url_of(scenario)
        prometheus.watch(urls)
        addresses = {url.partition("//")[2] for url in urls}
        up = dict.fromkeys(addresses, "up")
        wait_until("the servers are scraped", lambda: prometheus.scraped() == up)
        wait_until("no alert fires in health", lambda: not prometheus.firing())
        assert read(scenario, "readyz")[0] == 200
        start = time.monotonic()
        scenario.fail()
        wait_until(f"{kind.alert} fires", lambda: kind.alert in prometheus.firing())
        seen.seconds = time.monotonic() - start
        if not kind.is_ready:
            wait_until("not ready", lambda: read(scenario, "readyz")[0] == 503)
        firing = prometheus.firing()
        seen.summary = firing.pop(kind.alert, "")
        seen.others = sorted(firing)
        code, text = read(scenario, "readyz")
        seen.ready = f"{code} {text}"
        assert (code == 200) == kind.is_ready, seen.ready
        seen.status = petps("status", scenario.server.pool).splitlines()[0].strip()
        seen.page = prometheus.runbook_of(kind.alert)
        assert (ROOT / seen.page).is_file(), f"{seen.page} does not exist"
        start = time.monotonic()
        scenario.mend()
        prometheus.watch(url_of(scenario))  # a server that was started again has other ports
        wait_until("no alert fires any more", lambda: not prometheus.firing())
        wait_until("ready again", lambda: read(scenario, "readyz")[0] == 200)
        seen.seconds_to_end = time.monotonic() - start
        prometheus.watch([])
    return seen


def lines_of(seen: Seen) -> list[str]:
    """Return the part of the report about one failure."""
    lines = [f"## {seen.scenario.name[0].upper()}{seen.scenario.name[1:]}", ""]
    if seen.skipped:
        return [*lines, f"Not run: {seen.skipped}.", ""]
    if seen.fault:
        return [*lines, f"FAILED: {seen.fault}", ""]
    others = f" Others: {', '.join(seen.others)}." if seen.others else ""
    return [
        *lines,
        f"- Alert: {seen.scenario.alert}. Its condition held after {seen.seconds:.1f} s.{others}",
        f"- The rule waits {seen.wait} s more.",
        f"- Summary: {seen.summary}",
        f"- /readyz: {seen.ready}",
        f"- `petps status`: {seen.status}",
        f"- Page: [{seen.page}](../{seen.page})",
        f"- All was well {seen.seconds_to_end:.1f} s after its remedy.",
        "",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the drill and return 0 if every failure was seen and ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names of classes of tests/drill/scenarios.py")
    names = set(filter(None, parser.parse_args(arguments).only.split(",")))
    unknown = names - {kind.__name__ for kind in SCENARIOS}
    if unknown:
        known = ", ".join(kind.__name__ for kind in SCENARIOS)
        parser.error(f"--only: unknown {sorted(unknown)}; choose from {known}")
    chosen = [kind for kind in SCENARIOS if not names or kind.__name__ in names]
    results: list[Seen] = []
    with tempfile.TemporaryDirectory() as name, watcher(Path(name) / "prometheus") as prometheus:
        for kind in chosen:
            folder = Path(name) / kind.__name__
            folder.mkdir()
            print(f"{kind.name} ...", file=sys.stderr, flush=True)
            try:
                results.append(run(kind, folder, prometheus))
            except NotInstalled as error:
                results.append(Seen(kind, skipped=str(error)))
            except Exception as error:
                traceback.print_exc()
                results.append(Seen(kind, fault=f"{type(error).__name__}: {error}"))
    report = "\n".join(
        ["# The failure drill", "", *(line for seen in results for line in lines_of(seen))]
    )
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(report)
    print(report)
    failed = sum(bool(seen.fault) for seen in results)
    skipped = sum(bool(seen.skipped) for seen in results)
    print(f"{len(results) - failed - skipped} passed, {failed} failed, {skipped} not run")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
