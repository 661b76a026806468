"""The Helm chart: lint, the schemas of Kubernetes, petps' own parsers, and what must hold."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from petps.config import parse
from petps.server import shard_map
from tests.deploy.chart import CHART, EXAMPLES, NAME, NAMESPACE, Objects, helm, render
from tests.deploy.tools import ROOT, program, schemas, yaml

EXAMPLE = {path.stem: path for path in EXAMPLES}
OPERATOR_KINDS = "ServiceMonitor,PrometheusRule"
every_example = pytest.mark.parametrize("values", EXAMPLES, ids=lambda path: path.stem)


def objects(example: str, *settings: str) -> Objects:
    return Objects(render(EXAMPLE[example], *settings))


@every_example
def test_lint(values: Path) -> None:
    process = helm("lint", "--strict", CHART, "--values", values)
    assert process.returncode == 0, process.stdout + process.stderr


@every_example
def test_kubernetes_accepts_the_objects(values: Path) -> None:
    text = render(values)
    for folder in schemas():  # of the oldest and of the newest Kubernetes
        location = f"{folder}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json"
        process = subprocess.run(
            [program("kubeconform"), "-strict", "-summary", "-schema-location", location,
             "-skip", OPERATOR_KINDS],
            input=text, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert process.returncode == 0, f"{folder.name}: {process.stdout}{process.stderr}"
        valid = re.search(r"Valid: (\d+)", process.stdout)
        assert valid is not None, process.stdout
        assert int(valid[1]) >= 5, process.stdout


def test_kubeconform_finds_a_wrong_field() -> None:
    text = render(EXAMPLE["try"]).replace("readOnlyRootFilesystem:", "readOnlyRoot:")
    location = f"{schemas()[-1]}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json"
    process = subprocess.run(
        [program("kubeconform"), "-strict", "-schema-location", location],
        input=text, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode != 0
    assert "readOnlyRoot" in process.stdout


def test_the_operator_of_prometheus_accepts_its_objects() -> None:
    def decode(text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program("monitoring")], input=text, capture_output=True, text=True, check=False
        )

    text = render(EXAMPLE["replicas"])
    process = decode(text)
    assert (process.returncode, process.stdout) == (0, "2\n"), process.stderr
    monitor = Objects(text).find("ServiceMonitor")["spec"]
    service = Objects(text).find("Service", f"{NAME}-pods")
    assert service["metadata"]["labels"][monitor["jobLabel"]] == "petps"  # in the alert rules
    process = decode(text.replace("tlsConfig:", "tls:"))
    assert process.returncode == 1
    assert 'unknown field "tls"' in process.stderr


@every_example
def test_petps_reads_its_configuration(values: Path) -> None:
    """Each key of the values arrives in the file, with its type, and the server accepts it."""
    text = Objects(render(values)).toml
    config = parse(text, values.name)
    config.check_doors()
    document = tomllib.loads(text)
    given = yaml().safe_load(values.read_text())["config"]
    for section, keys in given.items():
        for key, value in keys.items():
            arrived = document[section][key]
            assert (arrived, type(arrived)) == (value, type(value)), (section, key)
    if config.backup.store is not None and "shards" in text:
        assert "{address}" in config.backup.store


@pytest.mark.parametrize(
    "value", ['a"b\\c\nd\té\u2028#', 1, 0, -3, 2.5, 1e-9, 123456789012, True, [1, 2.5], ["a", "b"]]
)
def test_the_file_has_each_value_as_it_was_given(value: Any) -> None:
    text = objects("try", f"config.ingest={json.dumps({'some.key': value, 'none': None})}").toml
    arrived = tomllib.loads(text)["ingest"]
    assert arrived == {"some.key": value}
    assert type(arrived["some.key"]) is type(value)


@pytest.mark.parametrize("example", ["replicas", "shards"])
def test_each_pod_finds_itself_in_the_shard_map(example: str) -> None:
    found = objects(example)
    content = found.find("ConfigMap", f"{NAME}-shards")["data"]["shards.json"]
    servers = shard_map.parse(content.encode(), example)
    config = parse(found.toml)
    assert (servers.owners.model, servers.owners.partitions) == (
        config.model.name,
        config.model.partitions,
    )
    arguments = found.server["args"]
    address = arguments[arguments.index("--address") + 1]
    headless = found.find("StatefulSet")["spec"]["serviceName"]
    for ordinal in range(found.find("StatefulSet")["spec"]["replicas"]):
        own = address.replace("$(POD_NAME)", f"{NAME}-{ordinal}")
        assert own == f"{NAME}-{ordinal}.{headless}.{NAMESPACE}.svc.cluster.local:7070"
        assert servers.names(own)
        owned = servers.owned_by(own)
        assert owned == (list(range(8)) if example == "replicas" else [[*range(4)], [*range(4, 8)]][
            ordinal // 2
        ])  # fmt: skip
    mounts = {mount["name"]: mount["mountPath"] for mount in found.server["volumeMounts"]}
    assert arguments[arguments.index("--shard-map") + 1] == f"{mounts['shards']}/shards.json"


def test_grpc_addresses_are_in_the_map_on_request() -> None:
    def servers(*settings: str) -> list[dict[str, Any]]:
        found = objects("shards", *settings).find("ConfigMap", f"{NAME}-shards")
        content = found["data"]["shards.json"]
        shard_map.parse(content.encode(), "shards")
        entries: list[dict[str, Any]] = json.loads(content)["servers"]
        return entries

    assert not any("grpc_address" in entry for entry in servers())
    for entry in servers("shardMap.grpcAddresses=true", "config.server.grpc_port=7171"):
        assert entry["grpc_address"] == entry["address"].replace(":7070", ":7171")


def test_one_pod_needs_no_shard_map() -> None:
    found = objects("try")
    assert "--shard-map" not in found.server["args"]
    assert [doc["kind"] for doc in found.documents].count("ConfigMap") == 1


@every_example
def test_pods_have_no_rights(values: Path) -> None:
    pod = Objects(render(values)).pod
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not pod["automountServiceAccountToken"]
    for container in [*pod["initContainers"], *pod["containers"]]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    image = (ROOT / "deploy/container/Containerfile").read_text()
    ids = pod["securityContext"]
    assert f"USER {ids['runAsUser']}:{ids['runAsGroup']}\n" in image
    assert ids["fsGroup"] == ids["runAsGroup"]


@pytest.mark.parametrize(("drain", "grace"), [(0, 65), (5, 70), (7.5, 73), (600, 665)])
def test_the_grace_period_follows_the_drain(drain: float, grace: int) -> None:
    found = objects("try", f"config.server.drain_seconds={drain}")
    assert parse(found.toml).server.drain_seconds == drain
    assert found.server["lifecycle"]["preStop"] == {"sleep": {"seconds": 5}}
    assert found.pod["terminationGracePeriodSeconds"] == grace == 5 + math.ceil(drain) + 60


def test_no_probe_kills_a_server_that_answers_pulls() -> None:
    server = objects("replicas").server
    probes = ("startup", "liveness", "readiness")
    paths = {name: server[f"{name}Probe"]["httpGet"]["path"] for name in probes}
    assert paths == {"startup": "/livez", "liveness": "/livez", "readiness": "/readyz"}
    for name in probes:
        assert server[f"{name}Probe"]["httpGet"] | {"path": ""} == {
            "path": "",
            "port": "http",
            "scheme": "HTTPS",
        }
    startup = objects("replicas", "startupSeconds=901").server["startupProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] == 905
    assert objects("try").server["livenessProbe"]["httpGet"]["scheme"] == "HTTP"


def test_probes_without_a_certificate_use_the_socket() -> None:
    found = objects("certificates")
    pool = parse(found.toml).pool.path
    assert found.server["livenessProbe"]["exec"]["command"] == ["petps", "status", str(pool)]
    ready = found.server["readinessProbe"]["exec"]["command"]
    assert ready == ["petps", "status", str(pool), "--wait", "1"]


def test_a_pod_that_is_not_ready_keeps_its_name() -> None:
    found = objects("replicas")
    headless = found.find("Service", f"{NAME}-pods")["spec"]
    assert (headless["clusterIP"], headless["publishNotReadyAddresses"]) == ("None", True)
    assert not found.find("Service")["spec"]["publishNotReadyAddresses"]
    assert found.find("StatefulSet")["spec"]["podManagementPolicy"] == "Parallel"
    assert found.find("PodDisruptionBudget")["spec"]["unhealthyPodEvictionPolicy"] == (
        "IfHealthyBudget"
    )


def test_a_change_of_the_configuration_restarts_the_pods_and_one_of_the_map_does_not() -> None:
    def annotations(*settings: str) -> Any:
        template = objects("shards", *settings).find("StatefulSet")["spec"]["template"]
        return template["metadata"]["annotations"]

    before = annotations()
    assert annotations("shardMap.version=2") == before
    assert annotations("config.tables.items.capacity=2000000") != before


def test_a_device_is_given_by_its_plugin() -> None:
    found = objects("device")
    config = parse(found.toml)
    assert (str(config.pool.path), str(config.pool.folder)) == ("/dev/dax0.0", "/var/lib/petps")
    for container in [found.server, found.pod["initContainers"][0]]:
        assert container["resources"] == {
            "requests": {"cpu": "8", "memory": "16Gi"},
            "limits": {"rdma/hca": "1", "petps.example/dax": "1"},
        }


def test_secrets_are_files() -> None:
    found = objects("replicas")
    secrets = {
        volume["name"]: volume["secret"] for volume in found.pod["volumes"] if "secret" in volume
    }
    assert {name: secret["secretName"] for name, secret in secrets.items()} == {
        "tls": "petps-tls",
        "access": "petps-access",
        "kafka": "petps-kafka",
        "store": "petps-store",
    }
    assert {secret["defaultMode"] for secret in secrets.values()} == {0o440}
    config = parse(found.toml)
    mounts = {mount["name"]: mount["mountPath"] for mount in found.server["volumeMounts"]}
    for name, path in (
        ("tls", config.tls.certificate),
        ("tls", config.tls.key),
        ("access", config.access.file),
        ("kafka", Path(str(config.kafka["sasl.password.file"]))),
    ):
        assert path is not None
        assert str(path.parent) == mounts[name]
    environment = {entry["name"]: entry.get("value") for entry in found.server["env"]}
    assert environment["AWS_SHARED_CREDENTIALS_FILE"] == "/etc/petps/store/credentials"
    assert not found.has("Secret")


@pytest.mark.parametrize(
    ("example", "setting", "message"),
    [
        ("try", "config.server.insecure=false", "tls.existingSecret is missing"),
        ("try", "config.tables=null", "/config/tables"),
        ("replicas", 'access.existingSecret=""', "access.existingSecret is missing"),
        ("replicas", 'tls.existingSecret=""', "tls.existingSecret is missing"),
        ("device", 'tls.clientCertificates="required"', "leaves no probe"),
        ("certificates", "monitoring.serviceMonitor.enabled=true", "leaves Prometheus without"),
        ("shards", "replicas=3", "shardMap.servers has 4 entries, and replicas is 3"),
        ("replicas", r'config.kafka.sasl\.password="x"', "would be readable in a ConfigMap"),
        ("replicas", r'config.kafka.ssl\.key\.pem="x"', "would be readable in a ConfigMap"),
        ("try", "replicas=0", "replicas"),
        ("try", 'replicas="2"', "replicas"),
        ("try", "replica=2", "replica"),
        ("try", "config.server.http=false", "http"),
        ("try", 'config.server.host="127.0.0.1"', "host"),
        ("try", "config.server.port=70700", "port"),
        ("try", "config.server.drain_seconds=601", "drain_seconds"),
        ("try", "config.model.partitions=0", "partitions"),
        ("try", 'config.pool.path="/x"', "path"),
        ("try", "config.tabels={}", "tabels"),
        ("try", "config.tables.items.dim=4097", "dim"),
        ("try", 'storage.medium="disk"', "medium"),
        ("try", 'storage.medium="hostPath"', "hostPath"),
        ("try", 'storage.medium="device"', "device"),
        ("try", 'storage.size="many"', "size"),
        ("try", 'image.digest="sha256:12"', "digest"),
        ("try", 'tls.clientCertificates="yes"', "clientCertificates"),
        ("try", 'shardMap.servers=[{"partitions":["0-"]}]', "partitions"),
        ("try", "podDisruptionBudget.maxUnavailable=0", "maxUnavailable"),
    ],
)
def test_bad_values_are_refused(example: str, setting: str, message: str) -> None:
    process = helm(
        "template", "ctr", CHART, "--values", EXAMPLE[example], "--set-json", setting
    )  # fmt: skip
    assert process.returncode != 0, process.stdout[-500:]
    assert message in process.stderr


def test_the_chart_has_the_version_of_petps() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml().safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == project["version"]
    assert (
        f"ARG VERSION={project['version']}\n"
        in (ROOT / "deploy/container/Containerfile").read_text()
    )


def test_helm_packages_the_chart(tmp_path: Path) -> None:
    process = helm("package", CHART, "--destination", tmp_path)
    assert process.returncode == 0, process.stderr
    (package,) = tmp_path.iterdir()
    values = EXAMPLE["replicas"]
    assert render(values, chart=package) == render(values)
    assert os.path.getsize(package) < 100_000
