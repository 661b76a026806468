"""The tools that check deploy/, and the schemas of Kubernetes. `make deploy-check` installs them.

Go builds helm, kubeconform and compose-go from source (go.mod pins them, go.sum has the sums); pip
installs the schemas and a parser of YAML (deploy/requirements/deploy.txt). All of them lie in
.cache/deploy. `python -m tests.deploy.tools` installs what is missing there; tests never do, and
are skipped without them.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
CACHE: Final = ROOT / ".cache" / "deploy"
REQUIREMENTS: Final = ROOT / "deploy/requirements/deploy.txt"
GO_SOURCES: Final = ("go.mod", "go.sum", "monitoring/main.go")
# The name of the program, and its package.
PROGRAMS: Final = {
    "helm": "helm.sh/helm/v4/cmd/helm",
    "kubeconform": "github.com/yannh/kubeconform/cmd/kubeconform",
    "compose-go": "github.com/compose-spec/compose-go/v2/cmd",
    # Decodes objects of the Prometheus operator strictly, because Kubernetes has no schema of them.
    "monitoring": "./monitoring",
}
BUILD_SECONDS_MAX: Final = 3600
OLDEST: Final = (1, 30, 0)  # the oldest Kubernetes of deploy/helm/petps/Chart.yaml
INSTALL: Final = "make deploy-check installs it"


class NotAvailable(Exception):
    """The tool is not installed, or cannot be installed here. Tests are skipped visibly."""


def _folder(name: str, *sources: Path) -> Path:
    """Return the folder of what is made from these files."""
    pins = b"".join(path.read_bytes() for path in sources)
    return CACHE / f"{name}-{hashlib.sha256(pins).hexdigest()[:16]}"


def _programs() -> Path:
    return _folder("bin", *(HERE / name for name in GO_SOURCES))


def _packages() -> Path:
    return _folder("python", REQUIREMENTS)


def program(name: str) -> str:
    """Return the path of a program of PROGRAMS, or of one that Debian installs. NotAvailable."""
    # deploy/bootstrap.sh unpacks Prometheus there.
    search = f"{os.environ['PATH']}:/usr/sbin:/sbin:{ROOT}/.cache/prometheus/usr/bin"
    path = str(_programs() / name) if name in PROGRAMS else shutil.which(name, path=search)
    if path is None or not os.access(path, os.X_OK):
        raise NotAvailable(f"{name} is not installed: {INSTALL}")
    return path


@cache
def yaml() -> Any:
    """Return the module PyYAML. Raise NotAvailable."""
    if not _packages().is_dir():
        raise NotAvailable(f"PyYAML is not installed: {INSTALL}")
    sys.path.append(str(_packages()))
    try:
        return importlib.import_module("yaml")
    finally:
        sys.path.remove(str(_packages()))


def schemas() -> list[Path]:
    """Return a folder for each Kubernetes whose schemas are used. Raise NotAvailable."""
    folder = _packages() / "schemas"
    if not folder.is_dir():
        raise NotAvailable(f"the schemas of Kubernetes are not installed: {INSTALL}")
    return sorted(folder.iterdir())


def _build_programs(folder: Path) -> None:
    go = shutil.which("go")
    if go is None:
        raise NotAvailable("Go is missing: install Go 1.26 or newer")
    # local: an older Go is an error, not the reason to download another one.
    environment = os.environ | {"GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly"}
    for name, package in PROGRAMS.items():
        print(f"deploy: building {name}", flush=True)
        command = [go, "build", "-trimpath", "-ldflags=-s -w", "-o", str(folder / name), package]
        process = subprocess.run(
            command, cwd=HERE, env=environment, capture_output=True, text=True, check=False,
            timeout=BUILD_SECONDS_MAX,
        )  # fmt: skip
        if "checksum mismatch" in process.stderr:  # fail, do not skip: the download differs
            raise RuntimeError(f"the sources of {name} differ from go.sum: {process.stderr}")
        if process.returncode != 0:
            raise NotAvailable(f"Go could not build {name}: {process.stderr[-300:].strip()}")


def _install_packages(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--target", str(folder), "--requirement", str(REQUIREMENTS)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        raise NotAvailable(f"pip could not install {REQUIREMENTS.name}: {process.stderr[-300:]}")
    _write_schemas(folder / "kubernetes_validate", folder / "schemas")


def _write_schemas(package: Path, folder: Path) -> None:
    """Write the strict schemas of OLDEST and of the newest Kubernetes for kubeconform.

    There a schema has no address of its own, and refers to the definitions beside it.
    """
    versions = {
        tuple(map(int, path.name.removeprefix("v").partition("-")[0].split("."))): path
        for path in package.glob("*/v*-local-strict")
    }
    for version in (OLDEST, max(versions)):
        target = folder / ".".join(map(str, version))
        target.mkdir(parents=True)
        for path in versions[version].glob("*.json"):
            document = json.loads(path.read_text())
            document.pop("$id", None)
            text = json.dumps(document).replace("/api/_definitions.json", "_definitions.json")
            (target / path.name).write_text(text)
    shutil.rmtree(package)  # 50 MB of other versions


def _install(folder: Path, install: Callable[[Path], None]) -> None:
    """Make the folder appear whole: a call that is killed leaves a temporary one."""
    if folder.is_dir():
        return
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return
        temporary = folder.with_suffix(".new")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        install(temporary)
        temporary.rename(folder)


def main() -> int:
    """Install what is missing. Return 1, after a line for each, if something cannot be had."""
    status = 0
    steps: list[tuple[Path, Callable[[Path], None]]] = [
        (_packages(), _install_packages),
        (_programs(), _build_programs),
    ]
    for folder, install in steps:
        try:
            _install(folder, install)
        except (NotAvailable, OSError, subprocess.TimeoutExpired) as reason:
            print(f"deploy: {reason}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
