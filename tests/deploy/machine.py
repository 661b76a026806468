"""A small machine with systemd as its first process, which runs the units of deploy/systemd.

It has namespaces, a network and a tree of control groups of its own. Its / is the host's /, and
what it writes there is in memory. So nothing of the host changes, but the kernel does for a unit
what it does on any machine: users, read-only folders, devices, system calls. It needs root.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from tests.deploy.tools import NotAvailable

SYSTEMD: Final = Path("/lib/systemd/systemd")
UNITS: Final = "/etc/petps-units"  # in the machine; systemd reads no other units
TARGETS: Final = ("sysinit", "basic", "shutdown", "network-online", "network", "multi-user")
WAIT_SECONDS: Final = 120.0
# $1: a mount point. $2: files that the machine has from the beginning. Then FROM TO FROM TO ...:
# folders of the host that have another path in the machine.
BOOT: Final = r"""
set -e
folder=$1; files=$2; shift 2
mount --make-rprivate /
mount -t tmpfs tmpfs "$folder"
mkdir "$folder/changes" "$folder/work" "$folder/root"
mount -t overlay overlay \
  -o "lowerdir=/,upperdir=$folder/changes,workdir=$folder/work" "$folder/root"
cd "$folder/root"
cp -R "$files/." .
while [ $# -gt 0 ]; do
  mkdir -p ".$2"
  mount --rbind "$1" ".$2"
  shift 2
done
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs tmp
mount -t tmpfs tmpfs dev
for name in null zero full random urandom tty; do cp -a "/dev/$name" "dev/$name"; done
mkdir dev/shm dev/pts
mount -t tmpfs tmpfs dev/shm
mount -t devpts -o newinstance,ptmxmode=666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
: >dev/kmsg
mkdir -p oldroot
pivot_root . oldroot
umount -l /oldroot
cd /
exec /lib/systemd/systemd --system --log-target=kmsg
"""


def wait_until(event: str, condition: Callable[[], Any]) -> Any:
    """Return the first true value of `condition()`. Fail after WAIT_SECONDS."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not in {WAIT_SECONDS} s: {event}"
        time.sleep(0.02)
    return value


def _control_groups() -> Path:
    """Return where the second version of control groups is mounted. Raise NotAvailable."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind = line.split()[:3]
        if kind == "cgroup2" and os.access(place, os.W_OK):
            return Path(place)
    raise NotAvailable("no control groups of version 2 that can be written here")


class Machine:
    """A running machine. Use it as a context manager."""

    def __init__(self, folder: Path, files: Mapping[str, str], folders: Mapping[Path, str]) -> None:
        """Boot it.

        Args:
            folder: An empty folder.
            files: Files that the machine has from the beginning: path -> content.
            folders: Folders of the host that have another path in the machine.
        """
        if os.geteuid() != 0 or not SYSTEMD.exists() or shutil.which("nsenter") is None:
            raise NotAvailable("a machine with systemd needs root, systemd and util-linux")
        self._group = _control_groups() / f"petps-deploy-{os.getpid()}"
        self._group.mkdir(exist_ok=True)
        binds = [str(word) for pair in folders.items() for word in pair]
        join = f'echo $$ >{shlex.quote(str(self._group))}/cgroup.procs && exec "$@"'
        # It ends with this process, also if that is killed at a test's timeout.
        unshare = ["setpriv", "--pdeathsig", "KILL"]
        unshare += ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--net", "--uts"]
        unshare += ["--ipc", "--cgroup", "--", "sh", "-c", BOOT, "boot"]
        unshare += [str(folder / "mount"), str(folder / "files"), *binds]
        environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "container": "petps",
            "SYSTEMD_UNIT_PATH": UNITS,
        }
        contents = dict(files) | {
            f"{UNITS}/{name}.target": Path(f"/lib/systemd/system/{name}.target").read_text()
            for name in TARGETS
        }
        contents[f"{UNITS}/default.target"] = "[Unit]\nDescription=Nothing\n"
        for path, content in contents.items():
            target = folder / "files" / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(content)
            target.chmod(0o755 if content.startswith("#!") else 0o644)
        (folder / "mount").mkdir()
        self._process = subprocess.Popen(
            ["sh", "-c", join, "join", *unshare],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            self._wait_for_systemd()
        except BaseException:
            self.close()
            raise

    def _wait_for_systemd(self) -> None:
        def answers() -> bool:
            if self._process.poll() is not None:
                assert self._process.stdout is not None
                raise NotAvailable(
                    "no machine with systemd can start here: " + self._process.stdout.read()[-300:]
                )
            if not self.exists("/run/systemd/private"):
                return False
            state = self.run("systemctl", "is-system-running", check=False).stdout.strip()
            return state in ("running", "degraded")

        wait_until("systemd answers", answers)

    def _first_process(self) -> int:
        number = self._process.pid
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{number}/task/{number}/children").read_text().split()
            return int(children[0]) if children else 0
        return 0

    def run(self, *command: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command as root in the machine, and return its status and output."""
        enter = ["nsenter", "--target", str(self._first_process()), "--mount", "--uts", "--ipc"]
        enter += ["--net", "--pid", "--cgroup", "--root", "--wd=/", "--"]
        environment = {"PATH": os.environ["PATH"], "SYSTEMD_PAGER": "", "HOME": "/root"}
        process = subprocess.run(
            [*enter, *map(str, command)], capture_output=True, text=True, check=False,
            env=environment, timeout=WAIT_SECONDS,
        )  # fmt: skip
        if check:
            assert process.returncode == 0, (command, process.stdout, process.stderr)
        return process

    def write(self, path: str, content: str, mode: int = 0o644) -> None:
        """Write a file in the machine."""
        target = self.path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)
        target.chmod(mode)

    def path(self, path: str) -> Path:
        """Return where the host sees a path of the machine."""
        return Path(f"/proc/{self._first_process()}/root{path}")

    def exists(self, path: str) -> bool:
        """Return whether there is such a path in the machine."""
        return self.path(path).exists()

    def show(self, unit: str, name: str) -> str:
        """Return a property of a unit."""
        return self.run("systemctl", "show", unit, f"--property={name}", "--value").stdout.strip()

    @property
    def log(self) -> str:
        """Return what systemd has logged."""
        return self.path("/dev/kmsg").read_text(errors="replace")

    def close(self) -> None:
        """Kill everything in the machine."""
        with contextlib.suppress(OSError):
            (self._group / "cgroup.kill").write_text("1")
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

        def is_removed() -> bool:
            with contextlib.suppress(OSError):
                for group in sorted(self._group.rglob("*/"), reverse=True):
                    group.rmdir()
                self._group.rmdir()
            return not self._group.exists()

        wait_until("the machine's processes are gone", is_removed)

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
