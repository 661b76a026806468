"""The composition of deploy/compose: the specification of Compose, and petps' own parsers."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from petps.config import load
from tests.deploy.tools import ROOT, program, yaml

COMPOSE = ROOT / "deploy/compose"
FILE = COMPOSE / "compose.yaml"


def compose_go(file: Path) -> subprocess.CompletedProcess[str]:
    """Read the file by the schema of the specification. References are not looked at."""
    return subprocess.run(
        [program("compose-go"), str(file)], cwd=file.parent, capture_output=True, text=True,
        check=False, env={"PATH": os.environ["PATH"], "HOME": "/"},
    )  # fmt: skip


def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml().safe_load(FILE.read_text())["services"]
    return found


def test_it_follows_the_specification_of_compose() -> None:
    process = compose_go(FILE)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("healthcheck:", "healthchek:", "healthchek"),
        ("condition: service_healthy", "condition: service_healthi", "condition"),
    ],
)
def test_a_fault_is_found(tmp_path: Path, old: str, new: str, message: str) -> None:
    file = tmp_path / "compose.yaml"
    text = FILE.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    process = compose_go(file)
    assert process.returncode != 0
    assert message in process.stderr


def test_every_reference_is_declared() -> None:
    document = yaml().safe_load(FILE.read_text())
    for name, service in document["services"].items():
        assert set(service.get("depends_on", {})) <= set(document["services"]), name
        sources = {volume.partition(":")[0] for volume in service.get("volumes", [])}
        named = {source for source in sources if not source.startswith(".")}
        assert named <= set(document["volumes"]), name


def test_every_port_is_of_this_machine_only() -> None:
    ports = [port for service in services().values() for port in service.get("ports", [])]
    assert len(ports) == 6
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in ports), ports


def test_every_service_that_stays_has_a_health_check() -> None:
    for name, service in services().items():
        if name not in ("create", "petps"):  # their image has one
            assert service["healthcheck"]["test"][0] == "CMD", name
            assert not service["image"].endswith(":latest"), name
            assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), name


def test_petps_reads_its_configuration() -> None:
    config = load(COMPOSE / "petps.toml")
    config.check_doors()
    petps = services()["petps"]
    assert set(petps["ports"]) == {
        f"127.0.0.1:{port}:{port}"
        for port in (config.server.port, config.server.grpc_port, config.server.http_port)
    }
    assert f"pool:{config.pool.path.parent}" in petps["volumes"]
    grace = float(petps["stop_grace_period"].removesuffix("s"))
    assert grace >= config.server.drain_seconds + 30
    inside = services()["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"].split(",")[0]
    assert str(config.ingest.log).startswith(f"kafka://{inside.removeprefix('INSIDE://')}/")


def test_prometheus_reads_its_configuration(tmp_path: Path) -> None:
    text = (COMPOSE / "prometheus.yml").read_text()
    (tmp_path / "petps").symlink_to(ROOT / "deploy/prometheus")
    file = tmp_path / "prometheus.yml"
    file.write_text(text)
    process = subprocess.run(
        [program("promtool"), "check", "config", str(file)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    port = load(COMPOSE / "petps.toml").server.http_port
    assert f'targets: ["petps:{port}"]' in text


def test_grafana_finds_the_dashboards_and_their_data_source() -> None:
    """A dashboard that names a data source by its uid names the one that is provisioned."""
    provisioning = COMPOSE / "grafana/provisioning"
    sources = yaml().safe_load((provisioning / "datasources/prometheus.yaml").read_text())
    known = {source["uid"] for source in sources["datasources"]}
    (provider,) = yaml().safe_load((provisioning / "dashboards/petps.yaml").read_text())[
        "providers"
    ]
    mounts = [volume.split(":")[:2] for volume in services()["grafana"]["volumes"]]
    assert ["../grafana", provider["options"]["path"]] in mounts
    for dashboard in (ROOT / "deploy/grafana").glob("*.json"):
        uids = set(re.findall(r'"uid": "([^"$]+)"', json.dumps(_panels(dashboard))))
        assert uids <= known | {"-- Grafana --", "-- Mixed --"}, dashboard.name


def _panels(dashboard: Path) -> Any:
    document = json.loads(dashboard.read_text())
    return [document.get("panels", []), document.get("annotations", {})]
