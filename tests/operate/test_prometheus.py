"""A real Prometheus scrapes a real server: every rule and every panel has data, and none lies."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from petps.server import Serving
from tests.operate.prometheus import ROOT, NotInstalled, Prometheus, running
from tests.operate.watched import KEYS, Watched
from tests.python.waiting import wait_until

RULES: Final = ROOT / "deploy" / "prometheus" / "petps.rules.yml"
DASHBOARDS: Final = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
# Of the other server in the shard map, which does not run.
EXPECTED_ALERTS: Final = {"PetpsShardUnreachable"}
# The disk of this machine may be nearly full, and a busy machine answers late.
ANY_ALERTS: Final = {"PetpsDiskNearlyFull", "PetpsDown", "PetpsLatencyHigh"}
WINDOW: Final = "2m"


@pytest.fixture(scope="module")
def prometheus(
    watched: tuple[Watched, Serving], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    server, serving = watched
    config = {
        "global": {"evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [server.job(serving)],
    }
    try:
        with running(tmp_path_factory.mktemp("prometheus"), config) as started:
            with server.connect() as client:

                def has_rates() -> bool:
                    client.pull("fed", KEYS)
                    client.pull("items", KEYS)
                    rate = started.query(f"rate(petps_table_pulls_total[{WINDOW}]) > 0")
                    return len(rate) == 2

                wait_until(has_rates, 120)
            yield started
    except NotInstalled as error:
        pytest.skip(str(error))


def queries_of(dashboard: Path) -> Iterator[tuple[str, str]]:
    """Yield (panel, query), with values for the variables."""
    for panel in json.loads(dashboard.read_text())["panels"]:
        for target in panel.get("targets", []):
            query = target["expr"].replace("$__rate_interval", WINDOW)
            yield panel["title"], re.sub(r"\$(instance|table)\b", ".*", query)


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_has_data(prometheus: Prometheus, dashboard: Path) -> None:
    wait_until(lambda: prometheus.query("ALERTS"), 120)
    queries = list(queries_of(dashboard))
    assert len(queries) > 20

    def have_data() -> bool:
        empty = [f"{title}: {query}" for title, query in queries if not prometheus.query(query)]
        print("no data yet: ", *empty, sep="\n")
        return not empty

    wait_until(have_data, 120)  # there is none while a busy machine answers a scrape late


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_complete(dashboard: Path) -> None:
    content: dict[str, Any] = json.loads(dashboard.read_text())
    assert content["uid"] == dashboard.stem
    assert content["title"].startswith("petps: ")
    panels = content["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(ids) == len(set(ids))
    variables = {variable["name"] for variable in content["templating"]["list"]}
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not taken & cells, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        for target in panel.get("targets", []):
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= variables


def test_every_rule_runs_and_only_true_alerts_are_pending(prometheus: Prometheus) -> None:
    def rules() -> list[dict[str, Any]]:
        (group,) = prometheus.read("/api/v1/rules")["groups"]
        found: list[dict[str, Any]] = group["rules"]
        return found

    wait_until(lambda: all(rule["health"] != "unknown" for rule in rules()))
    assert [(rule["name"], rule["lastError"]) for rule in rules() if rule["health"] != "ok"] == []

    def active() -> set[str]:
        return {rule["name"] for rule in rules() if rule["alerts"]} - ANY_ALERTS

    # One late scrape makes an alert pending; the next one takes it back.
    wait_until(lambda: active() == EXPECTED_ALERTS, 120)
    for rule in rules():
        for name in set(re.findall(r"\bpetps_[a-z_]+", rule["query"])):
            if name != "petps_ingest_waiting_rows":  # exists only in its failure
                print(rule["name"], name)
                wait_until(lambda: prometheus.query(name), 120)  # noqa: B023


def test_prometheus_renames_no_label(prometheus: Prometheus) -> None:
    assert [name for name in prometheus.read("/api/v1/labels") if "exported" in name] == []
    wait_until(lambda: prometheus.query('up{job="petps"} == 1'), 120)
