"""The chart as a cluster: controllers, zones, upgrades by zone, and pods that drain themselves."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from petps.config import parse
from tests.deploy.chart import EXAMPLES, NAME, NAMESPACE, Objects, refusal_of, render

VALUES = {path.stem: path for path in EXAMPLES}
ZONES = ("eu-west-1a", "eu-west-1b", "eu-west-1c")
DOMAIN = f"{NAME}-pods.{NAMESPACE}.svc.cluster.local:7070"


def objects(*settings: str, example: str = "cluster") -> Objects:
    return Objects(render(VALUES[example], *settings))


def environment(container: Any) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def test_servers_and_controllers_read_one_section() -> None:
    found = objects()
    cluster = parse(found.toml).cluster
    assert cluster.endpoints == [f"https://etcd-{n}.etcd:2379" for n in range(3)]
    assert (cluster.prefix, cluster.replace_after, cluster.moves) == ("/petps/ctr", "30m", 2)
    assert (cluster.user, str(cluster.password_file)) == (
        "petps-ctr",
        "/etc/petps/cluster/password",
    )
    assert (str(cluster.ca), cluster.certificate) == ("/etc/petps/cluster/ca.crt", None)
    asked = parse(objects("cluster.clientCertificate=true").toml).cluster
    assert str(asked.certificate) == "/etc/petps/cluster/tls.crt"
    assert str(asked.key) == "/etc/petps/cluster/tls.key"
    controller = found.find("Deployment", f"{NAME}-controller")["spec"]["template"]["spec"]
    for pod in (found.pod, controller):
        (secret,) = [volume for volume in pod["volumes"] if volume["name"] == "cluster"]
        assert secret["secret"] == {"secretName": "petps-etcd", "defaultMode": 0o440}
        for container in pod["containers"]:
            mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
            assert mounts["cluster"]["mountPath"] == "/etc/petps/cluster"
            assert mounts["config"]["mountPath"] == "/etc/petps/config"
    assert "--shard-map" not in found.server["args"]
    assert not [doc for doc in found.all("ConfigMap") if "shards" in doc["metadata"]["name"]]


def test_a_controller_is_no_server() -> None:
    """No Service, budget or policy of servers selects a controller, nor the reverse."""
    found = objects()
    deployment = found.find("Deployment", f"{NAME}-controller")
    assert deployment["spec"]["replicas"] == 2
    template = deployment["spec"]["template"]
    controller = template["metadata"]["labels"]
    servers = [document["spec"]["template"] for document in found.all("StatefulSet")]
    assert selects(deployment["spec"]["selector"]["matchLabels"], controller)
    for service in found.all("Service"):
        assert not selects(service["spec"]["selector"], controller)
        assert all(selects(service["spec"]["selector"], s["metadata"]["labels"]) for s in servers)
    for kind, key in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        own = found.find(kind)["spec"][key]["matchLabels"]
        its = found.find(kind, f"{NAME}-controller")["spec"][key]["matchLabels"]
        assert selects(its, controller)
        assert not selects(own, controller)
        for server in servers:
            assert selects(own, server["metadata"]["labels"])
            assert not selects(its, server["metadata"]["labels"])
    (container,) = template["spec"]["containers"]
    config = ["--config", "/etc/petps/config/petps.toml"]
    assert container["args"] == ["controller", *config, "--name", "$(POD_NAME)"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert template["spec"]["securityContext"]["runAsNonRoot"]
    assert not template["spec"]["automountServiceAccountToken"]
    assert "ingress" not in found.find("NetworkPolicy", f"{NAME}-controller")["spec"]


def test_each_zone_has_pods_that_know_it() -> None:
    found = objects()
    sets = {document["metadata"]["name"]: document["spec"] for document in found.all("StatefulSet")}
    assert list(sets) == [f"{NAME}-{zone}" for zone in ZONES]
    templates = {name: spec["template"] for name, spec in sets.items()}
    for zone, (name, spec) in zip(ZONES, sets.items(), strict=True):
        pod = spec["template"]["spec"]
        assert spec["replicas"] == 2
        assert pod["nodeSelector"] == {"topology.kubernetes.io/zone": zone}
        (server,) = pod["containers"]
        variables = environment(server)
        assert variables["PETPS_CLUSTER_ZONE"] == zone
        assert variables["PETPS_SERVER_ADDRESS"] == f"$(POD_NAME).{DOMAIN}"
        # $(POD_NAME) is replaced only after its own definition.
        names = [entry["name"] for entry in server["env"]]
        assert names.index("POD_NAME") < names.index("PETPS_SERVER_ADDRESS")
        own = spec["selector"]["matchLabels"]
        assert [
            other
            for other, template in templates.items()
            if selects(own, template["metadata"]["labels"])
        ] == [name]
    (budget,) = [
        document for document in found.all("PodDisruptionBudget")
        if document["metadata"]["name"] == NAME
    ]  # fmt: skip
    assert budget["spec"]["maxUnavailable"] == 1


def test_without_zones_a_pod_asks_for_its_label() -> None:
    found = objects("cluster.zones=[]")
    (document,) = found.all("StatefulSet")
    assert document["metadata"]["name"] == NAME
    assert "nodeSelector" not in found.pod
    field = environment(found.server)["PETPS_CLUSTER_ZONE"]["fieldRef"]["fieldPath"]
    assert field == "metadata.labels['topology.kubernetes.io/zone']"


@pytest.mark.parametrize("upgraded", [[], ["eu-west-1a"], ["eu-west-1a", "eu-west-1c"]])
def test_an_upgrade_changes_the_named_zones(upgraded: list[str]) -> None:
    names = ",".join(f'"{zone}"' for zone in upgraded)
    found = objects(f"cluster.upgradeZones=[{names}]")
    changed = [
        zone
        for zone, document in zip(ZONES, found.all("StatefulSet"), strict=True)
        if document["spec"]["updateStrategy"]
        .get("rollingUpdate", {"partition": 0})["partition"] < document["spec"]["replicas"]
    ]  # fmt: skip
    assert changed == (upgraded or [*ZONES])


def test_a_pod_drains_before_it_stops_and_takes_it_back_when_it_starts() -> None:
    found = objects()
    assert found.pod["terminationGracePeriodSeconds"] == 5 + 600 + 5 + 60
    shell, option, script = found.server["lifecycle"]["preStop"]["exec"]["command"]
    assert (shell, option) == ("/bin/sh", "-c")
    drain, then = script.split(";")
    address, config = "$PETPS_SERVER_ADDRESS", ["--config", "/etc/petps/config/petps.toml"]
    assert shlex.split(drain) == ["petps", "cluster", "drain", address, "--wait", "600", *config]
    assert shlex.split(then) == ["sleep", "5"]
    undrain, create = found.pod["initContainers"]
    *words, otherwise, true = shlex.split(undrain["command"][2])
    assert words == ["petps", "cluster", "drain", address, "--undo", *config]
    assert (otherwise, true) == ("||", "true")  # without etcd, a server starts as ever
    assert environment(undrain)["PETPS_SERVER_ADDRESS"] == f"$(POD_NAME).{DOMAIN}"
    assert create["args"][0] == "create"
    still = objects("cluster.stopDrainSeconds=0")
    assert [container["name"] for container in still.pod["initContainers"]] == ["create"]
    assert still.server["lifecycle"]["preStop"] == {"sleep": {"seconds": 5}}
    assert still.pod["terminationGracePeriodSeconds"] == 70


def test_one_controller_has_no_budget() -> None:
    budgets = objects('cluster.controller={"replicas":1,"resources":{}}').all("PodDisruptionBudget")
    assert [document["metadata"]["name"] for document in budgets] == [NAME]


@pytest.mark.parametrize("example", ["try", "replicas", "shards"])
def test_without_etcd_there_is_no_controller(example: str) -> None:
    found = objects(example=example)
    assert not found.has("Deployment")
    assert "PETPS_CLUSTER_ZONE" not in environment(found.server)


@pytest.mark.parametrize(
    ("example", "setting", "message"),
    [
        ("try", 'cluster.user="petps"', "cluster.user is of a cluster"),
        ("try", 'cluster.zones=["a"]', "cluster.zones is of a cluster"),
        ("try", "cluster.stopDrainSeconds=5", "cluster.stopDrainSeconds is of a cluster"),
        ("try", "config.cluster.moves=3", "config.cluster is of a cluster"),
        ("shards", 'cluster.endpoints=["https://etcd:2379"]', "both give a shard map"),
        ("cluster", 'cluster.existingSecret=""', "cluster.existingSecret is missing"),
        ("cluster", 'cluster.upgradeZones=["eu-west-1d"]', "which is not in cluster.zones"),
        ("cluster", 'cluster.endpoints=["http://etcd:2379"]', "Write https://"),
        ("cluster", 'cluster.endpoints=["https://me:it@etcd:2379"]', "/cluster/endpoints"),
        ("cluster", 'cluster.zones=["A"]', "/cluster/zones"),
        ("cluster", 'cluster.zones=["a","a"]', "/cluster/zones"),
        ("cluster", "cluster.controller.replicas=0", "/cluster/controller/replicas"),
        ("cluster", 'config.cluster.password="x"', "/config/cluster/password"),
        ("cluster", 'config.cluster.zone="a"', "/config/cluster/zone"),
    ],
)
def test_bad_values_are_refused(example: str, setting: str, message: str) -> None:
    assert message in refusal_of(VALUES[example], setting)
