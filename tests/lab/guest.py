"""A small emulated Linux guest with persistent memory and RDMA, which runs commands of this tree.

The guest is Debian's kernel in QEMU. It has an NVDIMM as fsdax or device-DAX, soft-RoCE, and two
virtio network cards that see only each other. Its / is the host's /, read-only, so programs built
on the host run in it. One folder is shared for writing. The emulation is 5 to 30 times slower than
the host, so the guest shows what works, never how fast it is. Killing QEMU keeps stores that were
never flushed, because they are in the host's memory. tests/crash finds missing flushes instead.
"""

from __future__ import annotations

import fcntl
import hashlib
import lzma
import os
import shlex
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "tests" / "lab"
BUILT = ROOT / "build" / "lab"  # kernel/, vmlinux, initramfs, stamp
FSDAX = Path("/run/pmem")  # in the guest
DEVDAX = Path("/dev/dax0.0")  # in the guest

QEMU = "qemu-system-x86_64"
MEMORY_MEBIBYTES = 2048
# Modules of the initramfs: they give access to the host's folders and to a port for the output.
BOOT_MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay", "virtio_console")
DOWNLOAD_SECONDS_MAX = 300
# Added to the command's own limit: time to boot and to power off on a busy machine.
BOOT_SECONDS_MAX = 120

Medium = Literal["none", "fsdax", "devdax"]


class NotAvailable(Exception):
    """No guest can run here. The text names the reason and the remedy."""


@dataclass(frozen=True)
class Result:
    """The exit status of a command, and its output (stdout and stderr together)."""

    status: int
    output: str


def missing_programs() -> list[str]:
    """Return the programs that are missing here and that `deploy/bootstrap.sh lab` installs."""
    programs = (QEMU, "busybox", "cpio", "depmod", "ndctl", "mkfs.ext4", "rdma", "ip", "setpriv")
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return [program for program in programs if shutil.which(program, path=path) is None]


def build(seconds_max: float = DOWNLOAD_SECONDS_MAX) -> None:
    """Download Debian's kernel and make the initramfs, unless they exist already.

    Raise NotAvailable if a program is missing, or if a step fails or takes too long.
    """
    missing = missing_programs()
    if missing:
        raise NotAvailable(f"no {', '.join(missing)}: `deploy/bootstrap.sh lab` installs them")
    BUILT.mkdir(parents=True, exist_ok=True)
    with (BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp = BUILT / "stamp"
        if stamp.is_file() and stamp.read_text() == _stamp():
            return
        if not (BUILT / "kernel" / "boot").is_dir():
            _fetch_kernel(seconds_max)
        kernel = _kernel_version()
        _call(["depmod", "-b", str(BUILT / "kernel"), kernel])
        image = (BUILT / "kernel" / "boot" / f"vmlinuz-{kernel}").read_bytes()
        (BUILT / "vmlinux").write_bytes(_unpack(image))
        _make_initramfs(kernel)
        stamp.write_text(_stamp())


def _stamp() -> str:
    content = (LAB / "guest_init.sh").read_bytes() + Path(__file__).read_bytes()
    return hashlib.sha256(content).hexdigest()


def _call(command: list[str], seconds_max: float = 60, cwd: Path | None = None) -> str:
    environment = {**os.environ, "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"}
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=seconds_max,
            cwd=cwd,
            env=environment,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotAvailable(f"{shlex.join(command)}: {error}") from None
    if process.returncode != 0:
        raise NotAvailable(f"{shlex.join(command)}: {process.stderr.strip()[-500:]}")
    return process.stdout


def _fetch_kernel(seconds_max: float) -> None:
    """Download the generic kernel, because the -cloud- kernel has neither 9p nor soft-RoCE."""
    depends = _call(["apt-cache", "depends", "linux-image-amd64"])
    packages = [line.split()[1] for line in depends.splitlines() if "Depends:" in line]
    if not packages:
        raise NotAvailable("apt knows no linux-image-amd64: run apt-get update, on Debian")
    downloads = BUILT / "download"
    shutil.rmtree(downloads, ignore_errors=True)
    downloads.mkdir()
    _call(["apt-get", "download", "-qq", packages[0]], seconds_max, downloads)
    (package,) = downloads.glob("*.deb")
    shutil.rmtree(BUILT / "unpacking", ignore_errors=True)
    _call(["dpkg", "-x", str(package), str(BUILT / "unpacking")])
    (BUILT / "unpacking").rename(BUILT / "kernel")
    shutil.rmtree(downloads)


def _kernel_version() -> str:
    (folder,) = (BUILT / "kernel" / "lib" / "modules").iterdir()
    return folder.name


def _unpack(image: bytes) -> bytes:
    """Return the ELF kernel of a bzImage (Linux' Documentation/x86/boot.rst).

    It boots faster, because the guest need not unpack it.
    """
    sectors = image[0x1F1] or 4
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = (sectors + 1) * 512 + offset
    payload = image[start : start + length]
    if payload[:6] == b"\xfd7zXZ\0":
        kernel = lzma.LZMADecompressor().decompress(payload)
    else:
        process = subprocess.run(["zstd", "-dcq"], input=payload, capture_output=True, check=False)
        kernel = process.stdout
    if kernel[:4] != b"\x7fELF":
        raise NotAvailable("the kernel is packed neither by xz nor by zstd (apt-get install zstd)")
    return kernel


def _make_initramfs(kernel: str) -> None:
    root = BUILT / "initramfs.d"
    shutil.rmtree(root, ignore_errors=True)
    for name in ("bin", "modules", "proc", "sys", "dev", "lower", "upper", "new"):
        (root / name).mkdir(parents=True)
    shutil.copy("/bin/busybox", root / "bin" / "busybox")
    shutil.copy(LAB / "guest_init.sh", root / "init")
    (root / "init").chmod(0o755)
    order: list[str] = []
    for module in BOOT_MODULES:
        find = ["modprobe", "-C", "/dev/null", "-d", str(BUILT / "kernel"), "-S", kernel]
        for line in _call([*find, "--show-depends", module]).splitlines():
            if not line.startswith("insmod "):
                continue
            path = Path(line.split()[1])
            name = path.name.removesuffix(".xz")
            if name in order:
                continue
            content = path.read_bytes()
            if path.suffix == ".xz":
                content = lzma.decompress(content)
            (root / "modules" / name).write_bytes(content)
            order.append(name)
    (root / "modules" / "order").write_text("".join(f"{name}\n" for name in order))
    archive = BUILT / "initramfs"
    _call(["sh", "-c", f"find . | cpio -o -H newc --quiet > {shlex.quote(str(archive))}"], cwd=root)
    shutil.rmtree(root)


class Guest:
    """A guest that boots for each command. Boots share the NVDIMM's image in `folder`.

    The guest can write to `folder`, at the same path. Its name must not have a space.
    """

    def __init__(
        self,
        folder: Path,
        *,
        medium: Medium = "none",
        rdma: bool = False,
        medium_bytes: int = 1 << 30,
    ) -> None:
        self.folder = folder
        self._medium = medium
        self._medium_bytes = medium_bytes
        self._rdma = rdma
        build()

    def run(
        self, command: str, seconds_max: float = 120, environment: Mapping[str, str] | None = None
    ) -> Result:
        """Boot, run a line of bash in the repository's root, and power off.

        `seconds_max` limits the command itself; its status is 124 if it takes longer. Raise
        TimeoutError if the guest does not power off in time.
        """
        with self.boot(command, seconds_max, environment) as running:
            running.wait()
            return running.result()

    @contextmanager
    def boot(
        self, command: str, seconds_max: float = 120, environment: Mapping[str, str] | None = None
    ) -> Iterator[Running]:
        """Yield the guest while the command runs. Kill it at the end of the block."""
        for name in ("status", "output", "console"):
            (self.folder / name).unlink(missing_ok=True)
        exports = [f"export {n}={shlex.quote(v)}" for n, v in (environment or {}).items()]
        (self.folder / "command.sh").write_text("\n".join([*exports, command, ""]))
        kernel = _kernel_version()
        settings = {
            "KERNEL": kernel,
            "MODULES": str(BUILT / "kernel" / "lib" / "modules" / kernel),
            "TREE": str(ROOT),
            "SHARE": str(self.folder),
            "MEDIUM": self._medium,
            "RDMA": str(int(self._rdma)),
            "SECONDS_MAX": str(seconds_max),
        }
        lines = [f"{name}={shlex.quote(value)}\n" for name, value in settings.items()]
        (self.folder / "guest.env").write_text("".join(lines))
        # setpriv makes the kernel kill QEMU when this process exits for any reason.
        with subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", QEMU, *self._arguments()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        ) as process:
            running = Running(process, self.folder, seconds_max + BOOT_SECONDS_MAX)
            try:
                yield running
            finally:
                running.kill()

    def _arguments(self) -> list[str]:
        def folder(name: str, path: Path, options: str) -> list[str]:
            shared = f"local,id={name},path={path},security_model=none,multidevs=remap{options}"
            return ["-fsdev", shared, "-device", f"virtio-9p-pci,fsdev={name},mount_tag={name}"]

        machine, memory = "q35", f"{MEMORY_MEBIBYTES}M"
        arguments = ["-nodefaults", "-display", "none", "-no-reboot", "-smp", "2"]
        arguments += ["-accel", "tcg,thread=multi", "-cpu", "max"]
        arguments += ["-kernel", str(BUILT / "vmlinux"), "-initrd", str(BUILT / "initramfs")]
        arguments += ["-append", "console=ttyS0 quiet panic=-1 net.ifnames=0 mitigations=off "]
        # The kernel's check of its timer fails on a busy host, and then the kernel panics.
        arguments[-1] += "random.trust_cpu=on tsc=nowatchdog no_timer_check"
        arguments += ["-serial", f"file:{self.folder / 'console'}", "-device", "virtio-rng-pci"]
        arguments += folder("root", Path("/"), ",readonly=on")
        arguments += folder("share", self.folder, "")
        arguments += ["-device", "virtio-serial-pci"]
        arguments += ["-chardev", f"file,id=output,path={self.folder / 'output'}"]
        arguments += ["-device", "virtserialport,chardev=output,name=output"]
        for number in range(2):
            arguments += ["-netdev", f"hubport,id=port{number},hubid=1"]
            card = f"virtio-net-pci,netdev=port{number},mac=52:54:00:09:00:0{number},romfile="
            arguments += ["-device", card]
        if self._medium != "none":
            image = self.folder / "nvdimm"
            if not image.exists():
                with image.open("wb") as file:
                    file.truncate(self._medium_bytes)
            machine += ",nvdimm=on"
            memory += f",slots=2,maxmem={MEMORY_MEBIBYTES + (self._medium_bytes >> 20) + 1024}M"
            backend = f"memory-backend-file,id=backend,share=on,mem-path={image}"
            arguments += ["-object", f"{backend},size={image.stat().st_size}"]
            arguments += ["-device", "nvdimm,id=nvdimm,memdev=backend"]
        return ["-machine", machine, "-m", memory, *arguments]


class Running:
    """One boot of a guest."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, seconds_max: float) -> None:
        self._process = process
        self._folder = folder
        self._until = time.monotonic() + seconds_max

    @property
    def output(self) -> str:
        """Return the output of the command so far."""
        path = self._folder / "output"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def is_off(self) -> bool:
        return self._process.poll() is not None

    def wait(self) -> None:
        """Wait until the guest is off. Raise TimeoutError if that takes too long."""
        try:
            self._process.wait(max(0.0, self._until - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"the guest did not power off in time: {self._read_console()}"
            ) from None

    def kill(self) -> None:
        """Kill QEMU: a power cut that keeps the caches (see the module). No effect if it is off."""
        self._process.kill()
        self._process.wait()

    def result(self) -> Result:
        """Return the result of a guest that is off. Raise RuntimeError if it has none."""
        status = self._folder / "status"
        if not status.exists() or not status.read_text().strip():
            raise RuntimeError(
                f"the guest powered off before its command ended: {self._read_console()}"
            )
        return Result(int(status.read_text()), self.output)

    def _read_console(self) -> str:
        console = self._folder / "console"
        texts = [self.output, console.read_text(errors="replace") if console.exists() else ""]
        if self.is_off and self._process.stderr is not None:
            texts.append(self._process.stderr.read().decode(errors="replace"))
        return "\n".join(text[-3000:] for text in texts)
