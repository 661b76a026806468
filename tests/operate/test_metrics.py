"""/metrics against its reference, against promtool, and against a log that does not answer."""

from __future__ import annotations

import gzip
import re
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from petps.server import Serving
from petps.server.metric_set import METRICS, metrics_markdown
from tests.operate.prometheus import ROOT
from tests.operate.watched import Watched

# Shown only in a failure; test_truth and test_full see it.
ABSENT_IN_HEALTH = {"petps_ingest_waiting_rows"}
OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"

Served = tuple[Watched, Serving]


def test_the_reference_page_is_up_to_date() -> None:
    page = ROOT / "docs" / "reference" / "metrics.md"
    assert page.read_text() == metrics_markdown(), (
        "write it again: .venv/bin/python -c 'import pathlib, petps.server.metric_set as m; "
        'pathlib.Path("docs/reference/metrics.md").write_text(m.metrics_markdown())\''
    )


def test_a_server_shows_the_metrics_of_the_reference(watched: Served) -> None:
    text = watched[0].scrape(watched[1])[0].decode()
    shown: dict[str, tuple[str, set[str]]] = {}
    kinds = dict(re.findall(r"^# TYPE (petps_\S+) (\S+)$", text, re.MULTILINE))
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.startswith("petps_"):
                continue
            name = re.sub(r"_(bucket|count|sum)$", "", sample.name)
            name = name if name in kinds else sample.name
            labels = set(sample.labels) - {"le"}
            shown.setdefault(name, (kinds[name], labels))[1].update(labels)
    expected = {
        facts.name: ("gauge" if facts.kind == "info" else facts.kind, set(facts.labels))
        for facts in METRICS.values()
        if facts.name not in ABSENT_IN_HEALTH
    }
    assert shown == expected
    helps = dict(re.findall(r"^# HELP (petps_\S+) (.*)$", text, re.MULTILINE))
    assert helps == {name: METRICS[name].text for name in shown}
    assert not {"instance", "job"} & {label for _, labels in shown.values() for label in labels}
    for name in ("process_resident_memory_bytes", "python_gc_collections_total", "python_info"):
        assert f"\n{name}" in text


def test_promtool_has_no_remark(watched: Served, promtool: Path) -> None:
    text = watched[0].scrape(watched[1])[0]
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_openmetrics_and_gzip_are_answered_to_those_that_accept_them(watched: Served) -> None:
    server, serving = watched
    plain, headers = server.scrape(serving)
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert "Content-Encoding" not in headers
    body, headers = server.scrape(serving, Accept=OPENMETRICS, **{"Accept-Encoding": "gzip"})
    assert headers["Content-Encoding"] == "gzip"
    assert len(body) < len(plain) / 4
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    text = gzip.decompress(body).decode()
    parse: Callable[[str], Iterable[Metric]] = openmetrics.text_string_to_metric_families
    names = {family.name for family in parse(text)}
    assert "petps_table_pulls" in names
    assert text.endswith("# EOF\n")


def values_of(server: Watched, serving: Serving, name: str, **labels: str) -> list[float]:
    text = server.scrape(serving)[0].decode()
    return [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]


def test_each_table_has_its_pulls_keys_and_misses(watched: Served) -> None:
    for name, expected in (("pulls", 1), ("keys", 150), ("misses", 50)):
        assert values_of(*watched, f"petps_table_{name}_total", table="items") == [expected]
    assert values_of(*watched, "petps_table_latency_seconds_count", table="items") == [1]
    assert values_of(*watched, "petps_shard_member_reachable") == [0], "nothing listens there"
