"""The Helm chart: rendering it with values, and looking at the objects."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, Final

from tests.deploy.tools import ROOT, program, yaml

CHART: Final = ROOT / "deploy/helm/petps"
EXAMPLES: Final = sorted((ROOT / "deploy/helm/examples").glob("*.yaml"))
RELEASE: Final = "ctr"
NAME: Final = "ctr-petps"
NAMESPACE: Final = "models"


def helm(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run helm. The caller looks at the status."""
    return subprocess.run(
        [program("helm"), *map(str, arguments)], capture_output=True, text=True, check=False
    )


def render(values: Path, *settings: str, chart: Path = CHART) -> str:
    """Return the objects of the chart with a file of values, as YAML documents."""
    options = [word for setting in settings for word in ("--set-json", setting)]
    process = helm(
        "template", RELEASE, chart, "--namespace", NAMESPACE, "--values", values, *options
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def refusal_of(values: Path, setting: str) -> str:
    """Return why the chart refuses a setting, given as JSON."""
    process = helm("template", RELEASE, CHART, "--values", values, "--set-json", setting)
    assert process.returncode != 0, process.stdout[-500:]
    return process.stderr


class Objects:
    """The objects of a rendered chart."""

    def __init__(self, text: str) -> None:
        """Parse the documents of ``text``."""
        self.documents: list[Any] = [doc for doc in yaml().safe_load_all(text) if doc]

    def find(self, kind: str, name: str = NAME) -> Any:
        """Return the object of this kind and name."""
        found = [
            document
            for document in self.documents
            if (document["kind"], document["metadata"]["name"]) == (kind, name)
        ]
        assert len(found) == 1, (kind, name, len(found))
        return found[0]

    def all(self, kind: str) -> list[Any]:
        """Return all objects of this kind."""
        return [document for document in self.documents if document["kind"] == kind]

    def has(self, kind: str) -> bool:
        """Return whether there is an object of this kind."""
        return any(document["kind"] == kind for document in self.documents)

    @property
    def pod(self) -> Any:
        """Return the specification of a server's pod, with zones of the first one."""
        return self.all("StatefulSet")[0]["spec"]["template"]["spec"]

    @property
    def server(self) -> Any:
        """Return the container of the server."""
        (container,) = self.pod["containers"]
        return container

    @property
    def toml(self) -> str:
        """Return petps.toml."""
        text: str = self.find("ConfigMap")["data"]["petps.toml"]
        return text
