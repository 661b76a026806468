"""The image of deploy/container: building it without a daemon, and running it as an engine would.

Debian's buildah builds in a chroot (--isolation chroot). The Containerfile begins with
debian:12-slim; here its argument BASE names an image that debootstrap makes, because there may be
no registry. That base also has this machine's settings of apt and pip, so that mirrors work.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from tests.deploy.tools import ROOT, NotAvailable, program

WORK: Final = ROOT / "build/deploy"
BASE: Final = "localhost/petps-base"
IMAGE: Final = "localhost/petps-check"
REVISION: Final = "0123456789ab"
WAIT_SECONDS: Final = 120.0
# Files of this machine that the base gets.
SETTINGS: Final = (
    "etc/apt/sources.list",
    "etc/apt/sources.list.d",
    "etc/apt/apt.conf.d",
    "etc/pip.conf",
    "etc/resolv.conf",
    "etc/hosts",
    "etc/ssl/certs/ca-certificates.crt",
    "usr/local/share/ca-certificates",  # installing ca-certificates makes that file again
)
# What an engine does with --read-only --cap-drop ALL --security-opt no-new-privileges. Arguments:
# the root of the image, the volume, the configuration, the user, the group, the folder to work in;
# then the environment and the command.
RUN: Final = r"""
set -e
root=$1; volume=$2; configuration=$3; user=$4; group=$5; folder=$6; shift 6
mount --make-rprivate /
mount --bind "$root" "$root"
mount --bind "$volume" "$root$folder"
mount --bind "$configuration" "$root/etc/petps/petps.toml"
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/tmp"
mount -t tmpfs tmpfs "$root/dev"
for name in null zero full random urandom; do cp -a "/dev/$name" "$root/dev/$name"; done
mkdir "$root/dev/shm"
mount -t tmpfs tmpfs "$root/dev/shm"
mount -o remount,bind,ro "$root"
ip link set lo up
exec chroot "$root" /usr/bin/setpriv --reuid "$user" --regid "$group" --clear-groups \
  --no-new-privs --bounding-set=-all --inh-caps=-all env -i -C "$folder" "$@"
"""


def wait_until(event: str, condition: Callable[[], Any]) -> Any:
    """Return the first true value of `condition()`. Fail after WAIT_SECONDS."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not in {WAIT_SECONDS} s: {event}"
        time.sleep(0.05)
    return value


def buildah(*arguments: object) -> str:
    """Return the output of a command of buildah that must succeed, with a storage of our own."""
    storage = ["--root", WORK / "storage", "--runroot", WORK / "run"]
    command = [program("buildah"), *storage, "--storage-driver", "overlay", *arguments]
    process = subprocess.run(
        list(map(str, command)), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False, env=os.environ | {"BUILDAH_ISOLATION": "chroot"},
    )  # fmt: skip
    assert process.returncode == 0, process.stdout[-6000:]
    return process.stdout.strip()


def _mirror() -> str:
    """Return the address of Debian that apt of this machine uses."""
    targets = ["apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)"]
    lines = subprocess.run(targets, capture_output=True, text=True, check=True).stdout.split("\n")
    for line in lines:
        release, _, address = line.partition(" ")
        if release == "bookworm" and "security" not in address:
            return address
    raise NotAvailable("apt of this machine has no bookworm, from which to make the base")


def build() -> dict[str, Any]:
    """Build the image, and return its configuration. Raise NotAvailable."""
    if os.geteuid() != 0:
        raise NotAvailable("building an image without a daemon needs root")
    program("buildah")
    WORK.mkdir(parents=True, exist_ok=True)
    root = WORK / "base"
    if not root.is_dir():
        temporary = WORK / "base.new"
        shutil.rmtree(temporary, ignore_errors=True)
        # In namespaces, so that what it mounts goes with it: removing what a killed call left must
        # not remove what is mounted there.
        subprocess.run(
            [
                *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
                *(program("debootstrap"), "--variant=minbase", "bookworm"),
                *(str(temporary), _mirror()),
            ],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        for name in SETTINGS:
            source, target = Path("/") / name, temporary / name
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True)
            elif source.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
        temporary.rename(root)
        container = buildah("from", "--name", "petps-base", "scratch")
        buildah("add", container, root, "/")
        for name in ("PIP_CERT", "PIP_INDEX_URL", "SSL_CERT_FILE"):
            if name in os.environ:
                buildah("config", "--env", f"{name}={os.environ[name]}", container)
        buildah("commit", container, BASE)
        buildah("rm", container)
    buildah(
        "build", "--layers", "--format", "docker", "--pull=never", "--build-arg", f"BASE={BASE}",
        "--build-arg", f"REVISION={REVISION}", "--file", "deploy/container/Containerfile",
        "--tag", IMAGE, ".",
    )  # fmt: skip
    inspected = json.loads(buildah("inspect", "--type", "image", IMAGE))
    configuration: dict[str, Any] = inspected["Docker"]["config"]
    return configuration


class Container:
    """A running container. Its command is the first process of a PID namespace, as in an engine."""

    def __init__(
        self,
        root: Path,
        configuration: dict[str, Any],
        volume: Path,
        file: Path,
        command: Sequence[str] | None = None,
    ) -> None:
        """Start it.

        Args:
            root: The image's files.
            configuration: The image's configuration.
            volume: The folder to mount at the image's volume.
            file: The file to mount at /etc/petps/petps.toml.
            command: Instead of the image's command.
        """
        self._configuration = configuration
        self._root = root
        (folder,) = configuration["Volumes"]
        user, group = configuration["User"].split(":")
        words = [*configuration["Entrypoint"], *(command or configuration["Cmd"])]
        arguments = [root, volume, file, user, group, folder, *configuration["Env"], *words]
        self._output = volume.parent / f"output.{time.monotonic_ns()}"
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "unshare",
                 "--mount", "--pid", "--fork", "--kill-child", "--net", "--ipc", "--uts",
                 "--", "sh", "-c", RUN, "run", *map(str, arguments)],
                stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    @property
    def output(self) -> str:
        """Return what it has printed so far."""
        return self._output.read_text()

    def _first_process(self) -> int:
        number = self._process.pid
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{number}/task/{number}/children").read_text().split()
            return int(children[0]) if children else 0
        return 0

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the container, as its user."""
        user, group = self._configuration["User"].split(":")
        first = self._first_process()
        enter = ["nsenter", "--target", str(first), "--mount", "--net", "--pid", "--ipc"]
        enter += ["--root", "--wd=/", "--setuid", user, "--setgid", group]
        return subprocess.run(
            [*enter, "env", "-i", *self._configuration["Env"], *command],
            capture_output=True, text=True, check=False, timeout=WAIT_SECONDS,
        )  # fmt: skip

    def is_healthy(self) -> bool:
        """Return the result of the image's health check."""
        assert self._process.poll() is None, self.output
        kind, *command = self._configuration["Healthcheck"]["Test"]
        assert kind == "CMD"
        return self.run(*command).returncode == 0

    def wait(self) -> int:
        """Return the exit status of the command, once it ends."""
        return self._process.wait(WAIT_SECONDS)

    def signal(self, number: int) -> None:
        """Signal the first process, as an engine does."""
        os.kill(self._first_process(), number)

    def stop(self, grace_seconds: float) -> int:
        """Stop it as an engine does: the image's signal, then SIGKILL. Return the exit status."""
        self.signal(getattr(signal, self._configuration["StopSignal"]))
        try:
            return self._process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            return self._process.wait(WAIT_SECONDS)

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()  # and with it, its namespace
        self._process.wait()
