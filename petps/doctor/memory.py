"""What the tables need of memory and disk, and what control groups allow."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from petps.doctor.subject import Subject
from petps.pool.footprint import SERVER_BYTES

__all__ = ["GIB", "GroupLimits", "Need", "memory_limits", "needed_memory", "size_text", "tables_of"]

GIB: Final = 1 << 30
MIB: Final = 1 << 20
REQUESTS_SHARE: Final = 8  # server.limits.memory_bytes = 0 is this part of the memory
REQUESTS_MAX: Final = 2 << 30
NO_LIMIT: Final = 1 << 60  # cgroup version 1 has a number of this size


@dataclass(frozen=True)
class GroupLimits:
    """The limits of the server's control group, or else of this process's. None and 0: no limit."""

    group: str
    memory: int
    high: int
    processors: float | None


@dataclass(frozen=True)
class Need:
    """The most bytes that full tables take. pool: on the disk; server: of memory beside it."""

    pool: int
    server: int


def size_text(size: float) -> str:
    """Return a size as text: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def memory_limits(subject: Subject) -> GroupLimits:
    """Return the strictest limits on the way from the control group to the root."""
    process = str(subject.holders[0]) if subject.holders and subject.holders[0] else "self"
    groups = subject.facts.text(f"/proc/{process}/cgroup") or ""
    unified, memory_group, cpu_group = "/", "", ""
    for line in groups.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            unified = path
        elif "memory" in controllers.split(","):
            memory_group = path
        elif "cpu" in controllers.split(","):
            cpu_group = path
    memory = [*_numbers(subject, "/sys/fs/cgroup", unified, "memory.max")]
    memory += _numbers(subject, "/sys/fs/cgroup/memory", memory_group, "memory.limit_in_bytes")
    high = [*_numbers(subject, "/sys/fs/cgroup", unified, "memory.high")]
    quotas = []
    for folder in _folders("/sys/fs/cgroup", unified):
        match = re.match(r"(\d+) (\d+)", subject.facts.text(f"{folder}/cpu.max") or "")
        quotas += [] if match is None else [int(match[1]) / int(match[2])]
    for folder in _folders("/sys/fs/cgroup/cpu", cpu_group):
        quota = (subject.facts.text(f"{folder}/cpu.cfs_quota_us") or "").strip()
        period = (subject.facts.text(f"{folder}/cpu.cfs_period_us") or "").strip()
        quotas += [int(quota) / int(period)] if quota.isdecimal() and period.isdecimal() else []
    return GroupLimits(
        group=unified if unified != "/" else memory_group or "/",
        memory=min(memory, default=0),
        high=min(high, default=0),
        processors=min(quotas, default=None),
    )


def _folders(root: str, group: str) -> Iterator[str]:
    """Yield the folder of a group and those above it."""
    while True:
        yield root + group.rstrip("/")
        if group in ("", "/"):
            return
        group = os.path.dirname(group)


def _numbers(subject: Subject, root: str, group: str, name: str) -> Iterator[int]:
    for folder in _folders(root, group):
        text = (subject.facts.text(f"{folder}/{name}") or "").strip()
        if text.isdecimal() and int(text) < NO_LIMIT:
            yield int(text)


def tables_of(subject: Subject) -> dict[tuple[str, str], tuple[int, int]]:
    """Return (row bytes, the capacity that it may reach) of each table, by instance and name.

    The tables are those of the pool, and those of the configuration that do not exist yet.
    """
    tables: dict[tuple[str, str], tuple[int, int]] = {}
    config = subject.config
    configured = {} if config is None else config.tables
    existing: set[str] = set()
    if subject.superblock is not None:
        for record in subject.superblock.tables:
            grown = configured.get(record.name)
            capacity = max(record.capacity, (grown.capacity_max or 0) if grown else 0)
            tables[record.instance, record.name] = (record.row_bytes, capacity)
            existing.add(record.name)
    for name, table in configured.items():
        if name not in existing:
            row_bytes = subject.facts.row_bytes(table.dtype, table.dim)
            tables["", name] = (row_bytes, max(table.capacity, table.capacity_max or 0))
    return tables


def needed_memory(subject: Subject) -> Need:
    """Return the most that all tables can take."""
    pool, memory = 0, 0
    for row_bytes, capacity in tables_of(subject).values():
        most = subject.facts.footprint(row_bytes, capacity)
        pool = (pool or most["records"]) + most["index"] + most["rows"]
        memory += most["memory"]
    return Need(pool, memory + SERVER_BYTES + _requests(subject) if pool else 0)


def _requests(subject: Subject) -> int:
    """Return the memory that requests and replies may hold."""
    limits = None if subject.config is None else subject.config.server.limits
    if limits is not None and limits.memory_bytes:
        return limits.memory_bytes
    match = re.search(r"MemTotal:\s+(\d+)", subject.facts.text("/proc/meminfo") or "")
    total = 0 if match is None else int(match[1]) * 1024
    return min(total // REQUESTS_SHARE, REQUESTS_MAX)
