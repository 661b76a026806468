"""Checks of the file system that a pool is on, and of its space."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from petps.doctor.checks.machine import kernel_of
from petps.doctor.finding import Finding, Level, fault, note, ok, warning
from petps.doctor.memory import needed_memory, size_text
from petps.doctor.mounts import file_system_of, mount_of
from petps.doctor.registry import check
from petps.doctor.subject import Subject

TOPIC: Final = "The file system of the pool"
EXTENT_BYTES: Final = 64 << 20  # the largest piece by which a pool grows
FREE_SHARE: Final = 0.05
INODES_MIN: Final = 1000
HUGE_PAGE: Final = 2 << 20
BTRFS_KERNEL: Final = (6, 18)
# Kernels whose ext4 driver leaves out a flush without a journal; native/media/DURABILITY.md.
SKIPPING_KERNELS: Final = ((5, 5), (6, 4))


@check(
    "file-system",
    TOPIC,
    looks_at="the kind of file system that the pool is on, by the table in "
    "[durability](../explanation/durability.md)",
    why="A store into the mapped pool must never find the disk full, and what a sync returns for "
    "must be on the disk. Not every file system does both.",
)
def file_system(subject: Subject) -> Iterator[Finding]:
    """Look the file system up in the table of supported ones."""
    mount = subject.mount
    if mount is None:
        if subject.pool_path is not None and not subject.is_device:
            yield note("the mount of the pool is unknown")
        return
    known = file_system_of(mount)
    kind = f"{mount.kind} ({mount.at})"
    if known is None:
        yield warning(f"{kind} is not known to petps", "put the pool on ext4 or xfs")
        return
    findings = []
    if "ro" in mount.options:
        findings.append(
            fault(f"{kind} is mounted read-only", "see dmesg for the cause, and mount it again")
        )
    is_old = mount.kind == "btrfs" and kernel_of(subject) >= BTRFS_KERNEL
    if known.level is not Level.OK and not is_old:
        findings.append(Finding(known.level, f"{kind} {known.about}", known.remedy))
    if mount.kind in ("ext2", "ext3", "ext4") and _skips_flush(subject):
        findings.append(
            note(
                f"{kind} has no journal, and this kernel then leaves out a flush: each sync "
                "becomes a sync of the whole file system",
                "make it with a journal, upgrade to Linux 6.5, or keep nothing else on it",
            )
        )
    yield from findings or [ok(f"{kind} {known.about}")]


def _skips_flush(subject: Subject) -> bool:
    mount, kernel = subject.mount, kernel_of(subject)
    if mount is None or not SKIPPING_KERNELS[0] <= kernel <= SKIPPING_KERNELS[1]:
        return False
    if mount.kind != "ext4":
        return mount.kind == "ext2"
    device = (subject.facts.link(mount.source) or mount.source).rpartition("/")[2]
    task = subject.facts.text(f"/sys/fs/ext4/{device}/journal_task")
    return task is not None and task.strip() in ("", "<none>")


@check(
    "dax",
    TOPIC,
    looks_at="persistent memory: the dax option of a mount, the alignment of a device",
    why="Without dax, a pool on persistent memory goes through the page cache: it takes DRAM, and "
    "each acknowledged write a sync.",
)
def dax(subject: Subject) -> Iterator[Finding]:
    """Look at the mount or the device of a pool on persistent memory."""
    facts, mount = subject.facts, subject.mount
    if subject.is_device and subject.pool_path is not None:
        folder = f"/sys/bus/dax/devices/{subject.pool_path.rpartition('/')[2]}"
        alignment = (facts.text(f"{folder}/align") or "").strip()
        if alignment.isdecimal() and int(alignment) < HUGE_PAGE:
            yield warning(
                f"{subject.pool_path} is aligned to {size_text(int(alignment))}, so it has no huge "
                "pages",
                "make the namespace again with `ndctl create-namespace --align=2M`",
            )
        else:
            yield ok(f"{subject.pool_path} is device-DAX")
        return
    if mount is None or not mount.source.startswith("/dev/pmem"):
        return
    if any(option in ("dax", "dax=always") for option in mount.options):
        yield ok(f"{mount.at} is mounted with dax")
    elif "dax=inode" in mount.options:
        yield note(
            f"{mount.at} is mounted with dax=inode: only files with the attribute use it",
            "mount it with dax=always; `petps status` shows the medium 'dax'",
        )
    else:
        yield warning(
            f"{mount.at} is on persistent memory and mounted without dax",
            f"mount -o remount,dax=always {mount.at} (the namespace must be of mode fsdax)",
        )


@check(
    "pool-blocks",
    TOPIC,
    looks_at="blocks that the pool shares with a copy (reflink, snapshot), and copy-on-write",
    why="A store into a shared block needs a new one at that moment, and finds the disk full. "
    "petps unshares the blocks when it opens the pool, and refuses it where that is impossible.",
)
def pool_blocks(subject: Subject) -> Iterator[Finding]:
    """Look for shared blocks, and for btrfs without NOCOW."""
    path = subject.pool_path
    if path is None or subject.is_device or subject.facts.file(path) is None:
        return
    if subject.facts.is_copied_on_write(path):
        yield fault(
            f"{path} lies on btrfs and is copied on write: petps refuses to open it",
            "make an empty file with `chattr +C` in the folder, copy the pool into it with "
            "`cp --reflink=never`, and open that; or move the pool to ext4 or xfs",
        )
    elif subject.facts.has_shared_blocks(path):
        yield warning(
            f"{path} shares blocks with another file",
            "copy pools with `cp --reflink=never`, and while no server has them open",
        )
    else:
        yield ok("the pool has its blocks for itself")


@check(
    "disk-space",
    TOPIC,
    looks_at="the free space, against what the tables can still need, with capacity_max",
    why="On a full disk, pushes and deltas for new keys fail, and partitions stop. Nothing that "
    "was acknowledged is lost.",
)
def disk_space(subject: Subject) -> Iterator[Finding]:
    """Compare the free space with the full tables."""
    path = subject.pool_path
    if path is None:
        return
    if subject.is_device:
        yield from _space_of_device(subject, path)
        return
    space = subject.facts.space(os.path.dirname(path))
    if space is None:
        return
    found = subject.facts.file(path)
    taken = 0 if found is None else found.allocated
    more = max(0, needed_memory(subject).pool - taken)
    free = f"{size_text(space.free)} of {size_text(space.total)} are free"
    if space.free < EXTENT_BYTES:
        yield fault(
            f"the disk of the pool is full: {free}",
            "delete what is not needed, `petps shrink`, or enlarge the disk",
        )
    elif more > space.free:
        yield warning(
            f"{free}, and full tables take {size_text(more)} more",
            "enlarge the disk, let rows expire (docs/how-to/table-full.md), or lower capacity_max",
        )
    elif space.free < FREE_SHARE * space.total:
        yield warning(f"only {free} on the disk of the pool", "enlarge the disk")
    else:
        yield ok(f"{free}, and full tables take {size_text(more)} more")


def _space_of_device(subject: Subject, path: str) -> Iterator[Finding]:
    size = (
        subject.facts.text(f"/sys/bus/dax/devices/{path.rpartition('/')[2]}/size") or ""
    ).strip()
    need = needed_memory(subject).pool
    if not size.isdecimal():
        yield note(f"the size of {path} is unknown")
    elif need > int(size):
        yield warning(
            f"{path} has {size_text(int(size))}, and full tables take {size_text(need)}",
            "use a larger device, or lower the capacity of tables",
        )
    else:
        yield ok(f"{path} has {size_text(int(size))}, and full tables take {size_text(need)}")


@check(
    "inodes",
    TOPIC,
    looks_at="free inodes of the file systems of the pool, the log and the stores",
    why="A log, bases and backups are many files. Without an inode, none can be made.",
)
def inodes(subject: Subject) -> Iterator[Finding]:
    """Look at the free inodes of each file system."""
    folders = [] if subject.pool_path is None else [os.path.dirname(subject.pool_path)]
    folders += [folder for _, folder in other_folders(subject)]
    seen: set[str] = set()
    findings = []
    for folder in folders:
        mount = mount_of(subject.facts, folder)
        place = folder if mount is None else mount.at
        space = subject.facts.space(folder)
        if place in seen or space is None:
            continue
        seen.add(place)
        if space.inodes and space.free_inodes < INODES_MIN:
            findings.append(
                fault(
                    f"{place} has {space.free_inodes:,} of {space.inodes:,} inodes free",
                    "delete small files, or make the file system again with more inodes",
                )
            )
    if seen:
        yield from findings or [ok(f"free inodes at {', '.join(sorted(seen))}")]


@check(
    "other-space",
    TOPIC,
    looks_at="the free space where the log, the bases, dead letters and stores are, if in folders",
    why="A full disk there stops publishing, backups or catching up.",
)
def other_space(subject: Subject) -> Iterator[Finding]:
    """Look at the free space of the folders of the configuration."""
    fine = []
    for name, folder in other_folders(subject):
        space = subject.facts.space(folder)
        if space is None:
            continue
        free = f"{name} ({folder}): {size_text(space.free)} of {size_text(space.total)} are free"
        if space.free < EXTENT_BYTES:
            yield fault(free, "delete what is not needed there, or enlarge the disk")
        elif space.free < FREE_SHARE * space.total:
            yield warning(free, "enlarge the disk, or keep fewer versions")
        else:
            fine.append(free)
    if fine:
        yield ok("; ".join(fine))


def other_folders(subject: Subject) -> list[tuple[str, str]]:
    """Return (key of the configuration, folder) of the places beside the pool that exist."""
    config = subject.config
    if config is None:
        return []
    places = [
        ("ingest.log", config.ingest.log),
        ("ingest.store", config.ingest.store),
        ("backup.store", config.backup_store()),
        ("pool.folder", None if config.pool.folder is None else str(config.pool.folder)),
    ]
    folders = []
    for name, place in places:
        path = None if place is None else place.removeprefix("file://")
        if path is not None and "://" not in path:
            folders.append((name, nearest_folder(subject, os.path.abspath(path))))
    return folders


def nearest_folder(subject: Subject, path: str) -> str:
    """Return the path, or the nearest folder above it that exists."""
    while path != "/" and subject.facts.file(path) is None:
        path = os.path.dirname(path)
    return path
