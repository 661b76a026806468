"""The image serves a pool, is healthy, stops within its time, and starts again on its volume.

make deploy-check
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from petps.config import load
from tests.deploy.image import IMAGE, REVISION, Container, build, buildah, wait_until
from tests.deploy.tools import ROOT

BUILD_SECONDS_MAX = 3600
CONFIGURATION = ROOT / "deploy/compose/petps.toml"
GRACE_SECONDS = 60.0  # stop_grace_period of deploy/compose/compose.yaml
URL = "petps://127.0.0.1:7070"
ROW = [float(value) for value in range(16)]
pytestmark = pytest.mark.timeout(BUILD_SECONDS_MAX)


@pytest.fixture(scope="module")
def image() -> dict[str, Any]:
    return build()


@pytest.fixture
def root(image: dict[str, Any]) -> Iterator[Path]:
    container = buildah("from", "--pull=never", IMAGE)
    try:
        yield Path(buildah("mount", container))
    finally:
        buildah("umount", container)
        buildah("rm", container)


@pytest.fixture
def volume(root: Path, image: dict[str, Any], tmp_path: Path) -> Path:
    """A new volume, which gets the owner of the image's folder, as engines do."""
    folder = tmp_path / "volume"
    folder.mkdir()
    (name,) = image["Volumes"]
    found = (root / name.lstrip("/")).stat()
    folder.chmod(found.st_mode & 0o777)
    subprocess.run(["chown", f"{found.st_uid}:{found.st_gid}", str(folder)], check=True)
    (root / "etc/petps/petps.toml").touch()  # where the file is mounted
    return folder


def test_what_the_image_says_of_itself(image: dict[str, Any]) -> None:
    assert image["User"] == "10001:10001"
    assert image["Entrypoint"] == ["/opt/petps/bin/petps"]
    assert image["Cmd"] == ["serve", "--config", "/etc/petps/petps.toml"]
    assert image["StopSignal"] == "SIGTERM"
    assert set(image["ExposedPorts"]) == {"7070/tcp", "7071/tcp", "7072/tcp"}
    labels = image["Labels"]
    assert labels["org.opencontainers.image.revision"] == REVISION
    assert labels["org.opencontainers.image.title"] == "petps"


def test_the_image_has_what_runs_and_no_more(root: Path) -> None:
    assert not list((root / "opt/petps").glob("lib/python3*/site-packages/pip"))
    for name in ("usr/bin/g++", "usr/bin/cmake", "source", "var/lib/apt/lists/lock"):
        assert not (root / name).exists(), name
    for path in (root / "opt/petps").rglob("*"):
        assert not path.is_file() or path.stat().st_uid == 0, path  # the server cannot change it
    listed = subprocess.run(
        ["du", "-sm", root, root / "opt/petps"], capture_output=True, text=True, check=True
    )
    print(listed.stdout)


def push(container: Container, key: int) -> None:
    row = ",".join(map(str, ROW))
    process = container.run("petps", "push", URL, "users", f"{key}={row}")
    assert process.returncode == 0, process


def has(container: Container, key: int) -> bool:
    process = container.run("petps", "pull", URL, "users", str(key), "--json")
    assert process.returncode == 0, process
    return bool(json.loads(process.stdout)["rows"][0]["row"] == ROW)


def test_a_pool_is_created_served_stopped_and_served_again(
    root: Path, image: dict[str, Any], volume: Path
) -> None:
    def start(*command: str) -> Container:
        return Container(root, image, volume, CONFIGURATION, command)

    create = ("create", "--if-missing", "--config", "/etc/petps/petps.toml")
    for expected in ("ready", "exists already, and stays as it is"):
        with start(*create) as container:
            assert container.wait() == 0, container.output
            assert expected in container.output
    pool = volume / load(CONFIGURATION).pool.path.name
    assert pool.stat().st_uid == 10001
    with start() as container:
        wait_until("the container is healthy", container.is_healthy)
        version = container.run("petps", "--version")
        assert REVISION in version.stdout, version
        push(container, 1)
        assert has(container, 1)
        refused = container.run("sh", "-c", "echo x >/opt/petps/x")
        assert "Read-only file system" in refused.stderr
        assert container.stop(GRACE_SECONDS) == 0, container.output
        assert container.output.rstrip().endswith("closed cleanly")
    with start() as container:
        wait_until("the container is healthy again", container.is_healthy)
        assert has(container, 1)
        push(container, 2)
        container.signal(signal.SIGKILL)
        container.wait()
    with start() as container:
        wait_until("it is healthy after a kill", container.is_healthy)
        assert has(container, 2)
        first = container.run("cat", "/proc/1/status").stdout
        assert re.search(r"^Name:\tpetps$", first, re.MULTILINE), first[:200]
        assert re.search(r"^CapBnd:\t0{16}$", first, re.MULTILINE)
        container.stop(GRACE_SECONDS)
