"""The alert rules: each fires in its failure, and only it; none fires in health."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from petps.server.metric_set import METRICS
from tests.operate.alert_cases import CASES, HEALTHY, WHO, Case
from tests.operate.prometheus import ROOT

RULES: Final = ROOT / "deploy" / "prometheus" / "petps.rules.yml"


def alerts() -> list[str]:
    return re.findall(r"^      - alert: (\w+)$", RULES.read_text(), re.MULTILINE)


def runbook_page(alert: str) -> str:
    kebab = re.sub(r"(?<!^)(?=[A-Z])", "-", alert.removeprefix("Petps")).lower()
    return f"docs/runbook/{kebab}.md"


def severity_of(alert: str) -> str:
    match = re.search(rf"- alert: {alert}\n.*?severity: (\w+)", RULES.read_text(), re.DOTALL)
    assert match is not None
    return match[1]


def expect_alerts(minute: int, alert: str, expected: list[dict[str, Any]]) -> dict[str, Any]:
    return {"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": expected}


def unit_test(series: dict[str, str], checks: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": checks,
    }


def test_of(case: Case) -> dict[str, Any]:
    labels = dict(re.findall(r'(\w+)="(.*?)"', WHO))
    fired = {
        "exp_labels": {**labels, **case.labels, "severity": severity_of(case.alert)},
        "exp_annotations": {"summary": case.summary, "runbook_url": runbook_page(case.alert)},
    }
    checks = [expect_alerts(case.after, case.alert, [fired])]
    checks += [expect_alerts(case.after, alert, []) for alert in alerts() if alert != case.alert]
    if case.silent is not None:
        checks.append(expect_alerts(case.silent, case.alert, []))
    return unit_test({**HEALTHY, **case.series}, checks)


test_of.__test__ = False  # type: ignore[attr-defined]


def run_promtool(promtool: Path, folder: Path, tests: list[dict[str, Any]]) -> None:
    file = folder / "test.json"  # JSON is YAML
    content = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}
    file.write_text(json.dumps(content))
    done = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules(promtool: Path) -> None:
    done = subprocess.run([promtool, "check", "rules", RULES], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_rule_fires_in_health(promtool: Path, tmp_path: Path) -> None:
    minutes = (1, 30, 150, 179)
    checks = [expect_alerts(minute, alert, []) for alert in alerts() for minute in minutes]
    run_promtool(promtool, tmp_path, [unit_test(HEALTHY, checks)])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_a_rule_fires_in_its_failure_and_no_other_does(
    promtool: Path, tmp_path: Path, case: Case
) -> None:
    run_promtool(promtool, tmp_path, [test_of(case)])


def test_each_rule_has_a_case() -> None:
    assert {case.alert for case in CASES} == set(alerts())


def test_the_rules_use_metrics_that_exist() -> None:
    expressions = re.sub(r"^ +summary: .*$", "", RULES.read_text(), flags=re.MULTILINE)
    known = {
        f"{facts.name}{suffix}"
        for facts in METRICS.values()
        for suffix in (("_bucket", "_count", "_sum") if facts.kind == "histogram" else ("",))
    }
    used = set(re.findall(r"\bpetps_[a-z_]+", expressions))
    assert used <= known
    tested = {name.partition("{")[0] for name in HEALTHY} | {
        name.partition("{")[0] for case in CASES for name in case.series
    }
    assert used <= tested, "each metric of a rule has a series in alert_cases.py"


@pytest.mark.parametrize("alert", alerts())
def test_each_rule_names_its_page_and_its_number(alert: str) -> None:
    text = RULES.read_text().partition(f"- alert: {alert}\n")[2].partition("- alert: ")[0]
    assert f"runbook_url: {runbook_page(alert)}\n" in text
    (summary,) = re.findall(r'summary: "(.*)"', text)
    assert "$value" in summary or "$labels.partition" in summary
    assert summary.endswith(".")
    assert severity_of(alert) in ("critical", "warning", "info")
