"""Checks of limits: files, memory, address space."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from petps.doctor.checks.machine import meminfo
from petps.doctor.finding import Finding, fault, note, ok, warning
from petps.doctor.memory import size_text
from petps.doctor.registry import check
from petps.doctor.subject import Subject

TOPIC: Final = "Limits"
# Beside connections: the pool and its files, the log's segments or brokers, gRPC, HTTP, libraries.
OTHER_FILES: Final = 512
CAP_SYS_NICE: Final = 23  # linux/capability.h
DEFAULT_CONNECTIONS: Final = 4096
RESERVED_BYTES: Final = 4 << 40  # of addresses; native/media/media.h kDefaultReserveBytes
OTHER_ADDRESSES: Final = 64 << 30  # of libraries, stacks and heaps, generously
# Of a process: libraries and thread stacks of which each takes several; the pool takes few.
MAPS_NEEDED: Final = 4096


@check(
    "open-files",
    TOPIC,
    looks_at="the limit of open files (LimitNOFILE) against server.limits.connections",
    why="Each connection is a file. At the limit, the server can accept no client, read no "
    "certificate and open no segment of the log.",
)
def open_files(subject: Subject) -> Iterator[Finding]:
    """Compare the limit of open files with the connections that the configuration allows."""
    config = subject.config
    connections = DEFAULT_CONNECTIONS if config is None else config.server.limits.connections
    soft, hard, whose = subject.limit("NOFILE", "Max open files")
    needed = connections + OTHER_FILES
    if 0 <= soft < needed:
        remedy = f"set LimitNOFILE={max(65_536, needed)} in the unit, or `ulimit -n {needed}`"
        if 0 <= hard < needed:
            remedy += " as root"
        yield warning(
            f"{whose} may open {soft:,} files, and {connections:,} connections need {needed:,}",
            remedy,
        )
    else:
        yield ok(f"{whose} may open {'any number of' if soft < 0 else f'{soft:,}'} files")


@check(
    "locked-memory",
    TOPIC,
    looks_at="the limit of locked memory (LimitMEMLOCK), if server.rdma is on",
    why="A network card reads the rows itself, so the whole pool is locked in memory.",
)
def locked_memory(subject: Subject) -> Iterator[Finding]:
    """Look at the limit and the device that RDMA needs."""
    if subject.config is None or subject.config.server.rdma == "off":
        return
    devices = subject.facts.names("/sys/class/infiniband")
    wanted = subject.config.server.rdma
    if not devices or (wanted != "auto" and wanted not in devices):
        yield fault(
            f"server.rdma is '{wanted}', and the RDMA devices are: {', '.join(devices) or 'none'}",
            "load the driver of the network card, name one of these devices, or set server.rdma "
            "to 'off'",
        )
    soft, _, whose = subject.limit("MEMLOCK", "Max locked memory")
    if soft >= 0:
        yield warning(
            f"{whose} may lock {size_text(soft)}, and RDMA locks the whole pool",
            "set LimitMEMLOCK=infinity in the unit",
        )
    else:
        yield ok(f"{whose} may lock any amount of memory")


@check(
    "real-time",
    TOPIC,
    looks_at="the limit of real-time priorities (LimitRTPRIO), if server.real_time is set",
    why="Without the right the server does not start.",
)
def real_time(subject: Subject) -> Iterator[Finding]:
    """Compare server.real_time with what the process may use."""
    if subject.config is None or not subject.config.server.real_time:
        return
    wanted = subject.config.server.real_time
    soft, _, whose = subject.limit("RTPRIO", "Max realtime priority")
    status = subject.facts.text("/proc/self/status") or ""
    rights = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    is_privileged = rights is not None and bool(int(rights[1], 16) >> CAP_SYS_NICE & 1)
    if 0 <= soft < wanted and not is_privileged:
        yield fault(
            f"server.real_time is {wanted}, and {whose} may use priorities up to {soft}",
            f"set LimitRTPRIO={wanted} in the unit, or server.real_time = 0",
        )
    else:
        yield ok(f"{whose} may use real-time priority {wanted}")


@check(
    "memory-maps",
    TOPIC,
    looks_at="vm.max_map_count, vm.overcommit_memory and the limit of address space",
    why="The server reserves 4 TiB of addresses at its start, which take no memory, and maps the "
    "pool there. Where the kernel counts addresses as memory, any allocation may fail.",
)
def memory_maps(subject: Subject) -> Iterator[Finding]:
    """Look at what limits mappings."""
    facts = subject.facts
    findings = []
    maps = (facts.text("/proc/sys/vm/max_map_count") or "").strip()
    if maps.isdecimal() and int(maps) < MAPS_NEEDED:
        findings.append(
            warning(f"vm.max_map_count is {maps}", "set vm.max_map_count to 65530 or more")
        )
    if (facts.text("/proc/sys/vm/overcommit_memory") or "").strip() == "2":
        values = meminfo(subject)
        limit, used = values.get("CommitLimit", 0), values.get("Committed_AS", 0)
        findings.append(
            warning(
                f"vm.overcommit_memory is 2: {size_text(used)} of {size_text(limit)} are promised, "
                "and an allocation beyond that fails",
                "set vm.overcommit_memory to 0, or raise vm.overcommit_ratio",
            )
        )
    soft, _, whose = subject.limit("AS", "Max address space")
    if 0 <= soft < RESERVED_BYTES + OTHER_ADDRESSES:
        findings.append(
            fault(
                f"{whose} may use {size_text(soft)} of addresses",
                "set LimitAS=infinity in the unit, or `ulimit -v unlimited`",
            )
        )
    yield from findings or [ok("mappings are not limited")]


@check(
    "core-dumps",
    TOPIC,
    looks_at="where core dumps go, and how large they may be",
    why="The mapped rows are not in a dump of the server, but its memory is: a server that has "
    "secrets makes none. Without a dump, a crash has only its last line in the log.",
)
def core_dumps(subject: Subject) -> Iterator[Finding]:
    """Report whether a crash would leave a dump."""
    config = subject.config
    if config is not None and (config.tls.key is not None or config.access.file is not None):
        yield ok("the server has secrets, so it makes no dump")
        return
    soft, _, whose = subject.limit("CORE", "Max core file size")
    if soft == 0:
        yield note(
            f"{whose} leaves no core dump after a crash",
            "set LimitCORE=infinity in the unit while you look for the cause of a crash",
        )
    else:
        yield ok(f"{whose} may leave a core dump")
