"""Mounts, and what petps knows of the file system on one."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final

from petps.doctor.facts import Facts
from petps.doctor.finding import Level

__all__ = ["FILE_SYSTEMS", "FileSystem", "Mount", "file_system_of", "mount_of"]


@dataclass(frozen=True)
class Mount:
    """One line of /proc/self/mountinfo."""

    at: str
    kind: str
    """The file system: 'ext4'."""
    source: str
    options: frozenset[str]


@dataclass(frozen=True)
class FileSystem:
    """A row of the table in native/media/DURABILITY.md, which a test compares with this one."""

    name: str
    """The first column of the table."""
    kinds: tuple[str, ...]
    """The kernel's names."""
    level: Level
    about: str
    remedy: str = ""


_MOVE: Final = "put the pool on ext4 or xfs of a disk of this machine"
FILE_SYSTEMS: Final = (
    FileSystem("ext4", ("ext4",), Level.OK, "is tested, power cuts and full disks included"),
    FileSystem("xfs", ("xfs",), Level.OK, "is tested, power cuts and full disks included"),
    FileSystem(
        "btrfs",
        ("btrfs",),
        Level.WARNING,
        "is tested, but before Linux 6.18 a full disk ends the server (status 74), and a snapshot "
        "of the pool makes the next open fail",
        _MOVE + ", or keep it out of snapshots and leave space free",
    ),
    FileSystem("ext2, ext3", ("ext2", "ext3"), Level.OK, "is tested, also with power cuts"),
    FileSystem(
        "tmpfs",
        ("tmpfs", "ramfs", "hugetlbfs"),
        Level.WARNING,
        "is memory: no row survives a restart of the machine",
        _MOVE + "; memory is right for tests, and for RDMA without persistent memory",
    ),
    FileSystem(
        "overlayfs",
        ("overlay",),
        Level.WARNING,
        "copies a pool of a lower layer when it is opened, and hides the file system below it",
        "mount a volume for the pool, so that it does not lie in the layers of a container",
    ),
    FileSystem(
        "NFS 4.2",
        ("nfs4.2",),
        Level.WARNING,
        "is not tested: a full disk is an error of the drain, no other process reads the pool "
        "beside the server, and only one machine may open it",
        _MOVE,
    ),
    FileSystem(
        "NFS 3, 4.0, 4.1",
        ("nfs", "nfs4"),
        Level.FAULT,
        "cannot allocate space: a full disk is found only when rows are already acknowledged "
        "under durability 'process'",
        _MOVE + ", or mount it with vers=4.2",
    ),
    FileSystem(
        "FUSE",
        ("fuse", "fuseblk", "virtiofs", "9p", "cifs", "smb3", "ceph", "lustre", "glusterfs"),
        Level.WARNING,
        "is not tested: what it promises depends on a program or on another machine",
        _MOVE,
    ),
    FileSystem(
        "ZFS, bcachefs",
        ("zfs", "bcachefs"),
        Level.FAULT,
        "is not supported: it copies every block that is written, so each store may find the disk "
        "full",
        _MOVE,
    ),
)
_BY_KIND: Final = {kind: system for system in FILE_SYSTEMS for kind in system.kinds}


def file_system_of(mount: Mount) -> FileSystem | None:
    """Return what petps knows of a mount's file system; None if petps does not know it."""
    kind = mount.kind.partition(".")[0]  # fuse.sshfs
    if kind in ("nfs", "nfs4") and "vers=4.2" in mount.options:
        kind = "nfs4.2"
    return _BY_KIND.get(kind)


def mount_of(facts: Facts, path: str) -> Mount | None:
    """Return the mount that an absolute path is on, also if the path does not exist yet."""
    best: Mount | None = None
    for line in (facts.text("/proc/self/mountinfo") or "").splitlines():
        mount = _parse(line)
        if mount is None:
            continue
        is_under = path == mount.at or path.startswith(mount.at.rstrip("/") + "/")
        # The last of several mounts at one place hides the others.
        if is_under and (best is None or len(mount.at) >= len(best.at)):
            best = mount
    return best


def _parse(line: str) -> Mount | None:
    left, separator, right = line.partition(" - ")
    fields, about = left.split(), right.split()
    if not separator or len(fields) < 6 or len(about) < 2:
        return None
    options = {*fields[5].split(","), *(about[2].split(",") if len(about) > 2 else ())}
    return Mount(os.fspath(_unescape(fields[4])), about[0], _unescape(about[1]), frozenset(options))


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
