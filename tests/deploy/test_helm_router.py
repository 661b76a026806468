"""The routers of the chart: what they are told, who reaches them, and that servers let them in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from petps.cli.app import app
from tests.deploy.chart import EXAMPLES, NAME, NAMESPACE, Objects, refusal_of, render

VALUES = {path.stem: path for path in EXAMPLES}
ROUTER = f"{NAME}-router"
PODS = f"{NAME}-pods.{NAMESPACE}.svc.cluster.local:7070"


def objects(*settings: str, example: str = "router") -> Objects:
    return Objects(render(VALUES[example], *settings))


def container_of(found: Objects) -> Any:
    (container,) = found.find("Deployment", ROUTER)["spec"]["template"]["spec"]["containers"]
    return container


def options_of(found: Objects) -> dict[str, str]:
    """Return the options that a router gets, and fail if `petps router` has none of this name."""
    command, *words = container_of(found)["args"]
    assert command == "router"
    known = {
        name
        for parameter in get_command(app).commands["router"].params  # type: ignore[attr-defined]
        for name in parameter.opts
    }
    options = dict(word.partition("=")[::2] for word in words)
    assert set(options) <= known
    return options


def test_a_router_is_told_the_name_of_all_pods_and_uses_tls() -> None:
    found = objects()
    assert options_of(found) == {
        "--servers": f"petps+tls://{PODS}",
        "--host": "0.0.0.0",
        "--ca": "/etc/petps/tls/ca.crt",
        "--tls-certificate": "/etc/petps/tls/tls.crt",
        "--tls-key": "/etc/petps/tls/tls.key",
        "--log-format": "json",
    }
    pod = found.find("Deployment", ROUTER)["spec"]["template"]["spec"]
    assert pod["volumes"][1]["secret"] == {"secretName": "petps-tls", "defaultMode": 0o440}
    for probe, path in (("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
        asked = container_of(found)[probe]["httpGet"]
        assert asked == {"path": path, "port": "http", "scheme": "HTTPS"}


def test_plain_text_must_be_accepted() -> None:
    found = objects("router.replicas=1", example="try")
    assert options_of(found) == {
        "--servers": f"petps://{PODS}", "--host": "0.0.0.0", "--insecure": "",
    }  # fmt: skip
    assert container_of(found)["readinessProbe"]["httpGet"]["scheme"] == "HTTP"
    budgets = {document["metadata"]["name"] for document in found.all("PodDisruptionBudget")}
    assert budgets == {NAME}  # one router has none


def test_a_router_has_no_rights_and_lets_requests_end() -> None:
    found = objects()
    spec = found.find("Deployment", ROUTER)["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert not spec["automountServiceAccountToken"]
    context = container_of(found)["securityContext"]
    assert context["readOnlyRootFilesystem"]
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert container_of(found)["lifecycle"]["preStop"] == {"sleep": {"seconds": 5}}
    assert spec["terminationGracePeriodSeconds"] > 5 + 5  # [router] drain_seconds


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def test_nothing_takes_a_router_for_a_server_nor_a_server_for_a_router() -> None:
    found = objects()
    server = found.all("StatefulSet")[0]["spec"]["template"]["metadata"]["labels"]
    router = found.find("Deployment", ROUTER)["spec"]["template"]["metadata"]["labels"]
    of_router = {
        "Service": found.find("Service", ROUTER)["spec"]["selector"],
        "PodDisruptionBudget": found.find("PodDisruptionBudget", ROUTER)["spec"]["selector"][
            "matchLabels"
        ],
        "NetworkPolicy": found.find("NetworkPolicy", ROUTER)["spec"]["podSelector"]["matchLabels"],
    }
    for selector in of_router.values():
        assert selects(selector, router)
        assert not selects(selector, server)
    for name in (NAME, f"{NAME}-pods"):
        selector = found.find("Service", name)["spec"]["selector"]
        assert selects(selector, server)
        assert not selects(selector, router)


@pytest.mark.parametrize("has_routers", [True, False])
def test_servers_let_routers_in_whoever_their_clients_are(has_routers: bool) -> None:
    found = objects(f"router.replicas={2 if has_routers else 0}")
    rules = found.find("NetworkPolicy")["spec"]["ingress"]
    selectors = [peer["podSelector"]["matchLabels"] for rule in rules for peer in rule["from"]
                 if "podSelector" in peer]  # fmt: skip
    own = {"app.kubernetes.io/name": "petps-router", "app.kubernetes.io/instance": "ctr"}
    assert (own in selectors) == has_routers
    assert {"petps.example/client": "true"} in selectors


@pytest.mark.parametrize("values", [path for path in EXAMPLES if path.stem != "router"],
                         ids=lambda path: path.stem)  # fmt: skip
def test_there_is_none_unless_it_is_asked_for(values: Path) -> None:
    assert "petps-router" not in render(values)


@pytest.mark.parametrize(
    ("example", "setting", "message"),
    [
        ("certificates", "router.replicas=2", "cannot pass on the certificates"),
        ("router", "router.replicas=-1", "/router/replicas"),
        ("router", 'router.servers="petps://h:1"', "/router"),
    ],
)
def test_bad_values_are_refused(example: str, setting: str, message: str) -> None:
    assert message in refusal_of(VALUES[example], setting)
