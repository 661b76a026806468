"""Block devices and file systems for tests of power cuts, failing writes and full disks.

This module runs in the guest, as root. The devices are RAM disks, so a snapshot or a copy is cheap.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.lab.guest import ROOT

LAB_POOL: Final = str(ROOT / "build" / "release" / "lab_pool")
RAM_DISKS = 4
DISK: Final = "/dev/ram0"
RAM_DISK_BYTES = 1 << 30  # pages that were never written take no memory
SECTOR_BYTES = 512
# The smallest file system of mkfs.xfs has 300 MB, that of mkfs.btrfs 109 MB.
DISK_BYTES = {"ext2": 64 << 20, "ext4": 64 << 20, "xfs": 320 << 20, "btrfs": 160 << 20}
MKFS = {
    "ext2": ["mkfs.ext2", "-q", "-F", "-b", "4096"],
    "ext4": ["mkfs.ext4", "-q", "-F", "-b", "4096"],
    "xfs": ["mkfs.xfs", "-q", "-f", "-m", "reflink=1"],
    "btrfs": ["mkfs.btrfs", "-q", "-f"],
}
# The file system that holds the folders of an overlay.
BELOW_OVERLAY = "ext4"
WAIT_SECONDS = 120
LOST_POOL_STATUS = 74  # kLostPoolExitStatus of media/bus_error.h


def call(*command: str, allowed: tuple[int, ...] = (0,)) -> str:
    """Return the output of a command. Raise RuntimeError if its exit status is not `allowed`."""
    process = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WAIT_SECONDS,
        env={**os.environ, "DM_DISABLE_UDEV": "1"},
        check=False,
    )
    if process.returncode not in allowed:
        raise RuntimeError(f"{' '.join(command)}: status {process.returncode}: {process.stdout}")
    return process.stdout


def load_modules(file_system: str) -> None:
    """Make RAM disks /dev/ram0 to /dev/ram3; load device mapper and the file system."""
    Path("/sys/kernel/rcu_expedited").write_text("1")  # speeds up mounts and devices
    kilobytes = RAM_DISK_BYTES >> 10
    call("modprobe", "brd", f"rd_nr={RAM_DISKS}", f"rd_size={kilobytes}")
    for module in ("dm-mod", "dm-log-writes", "dm-snapshot", "dm-flakey"):
        call("modprobe", module)
    for module in {"overlay": ["overlay", "ext4"], "tmpfs": []}.get(file_system, [file_system]):
        call("modprobe", module)


def disk_file_system(file_system: str) -> str:
    """Return the file system of the disk itself."""
    return BELOW_OVERLAY if file_system == "overlay" else file_system


def make_file_system(file_system: str, device: str) -> None:
    """Make a file system of the size in DISK_BYTES, whatever the size of the device."""
    name = disk_file_system(file_system)
    command = [*MKFS[name]]
    size = DISK_BYTES[name]
    if name == "xfs":
        call(*command, "-d", f"size={size}", device)
    elif name == "btrfs":
        call(*command, "-b", str(size), device)
    else:
        call(*command, device, str(size >> 12))


def mount(file_system: str, device: str, at: Path) -> Path:
    """Mount the device, after a repair if it has no journal. Return the folder for the pool."""
    at.mkdir(parents=True, exist_ok=True)
    if file_system == "ext2":
        call("e2fsck", "-fy", device, allowed=(0, 1))
    if file_system == "btrfs":  # the kernel remembers other devices with the same id
        call("btrfs", "device", "scan", "--forget")
    call("mount", "-t", disk_file_system(file_system), device, str(at))
    return mount_overlay(at) if file_system == "overlay" else at


def mount_overlay(at: Path) -> Path:
    """Mount an overlay of the folders `lower` and `upper` of `at`. Return its folder."""
    for folder in ("lower", "upper", "work", "merged"):
        (at / folder).mkdir(exist_ok=True)
    options = f"lowerdir={at}/lower,upperdir={at}/upper,workdir={at}/work"
    call("mount", "-t", "overlay", "-o", options, "overlay", str(at / "merged"))
    return at / "merged"


def unmount(file_system: str, at: Path) -> None:
    if file_system == "overlay":
        call("umount", str(at / "merged"))
    call("umount", str(at))


@contextmanager
def map_device(name: str, table: str) -> Iterator[str]:
    """Create a device-mapper device, yield its path, and remove it unless the block raised."""
    call("dmsetup", "create", name, "--table", table)
    yield f"/dev/mapper/{name}"
    call("dmsetup", "remove", "--retry", name)


def ask(*arguments: str) -> str:
    """Return the output of lab_pool, and how it exited if a signal or a lost pool stopped it."""
    process = subprocess.run(
        [LAB_POOL, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    if process.returncode < 0:
        return f"killed by {signal.Signals(-process.returncode).name} after: {process.stdout}"
    if process.returncode == LOST_POOL_STATUS:
        return f"lost the pool after: {process.stdout}"
    return process.stdout.strip()


def sectors_of(file_system: str) -> int:
    return DISK_BYTES[disk_file_system(file_system)] // SECTOR_BYTES


def pretend_another_boot() -> None:
    """Replace the boot id that processes see, as a power cut would."""
    fake = Path("/run/boot_id")
    fake.write_text("01234567-89ab-cdef-0123-456789abcdef\n")
    call("mount", "--bind", str(fake), "/proc/sys/kernel/random/boot_id")
