"""Checks of the machine: kernel, processors, memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from petps.doctor.finding import Finding, note, ok, warning
from petps.doctor.memory import GIB, memory_limits, needed_memory, size_text
from petps.doctor.registry import check
from petps.doctor.subject import Subject

TOPIC: Final = "The machine"
# The kernel of the oldest system on which every test has run (docs/reference/compatibility.md).
TESTED_KERNEL: Final = (6, 1)
SLICES_KERNEL: Final = (6, 12)  # native/base/time_slice.h
FOLIOS_KERNEL: Final = (6, 16)  # ext4; native/media/DURABILITY.md
NODES: Final = "/sys/devices/system/node"
HUGE_PAGES: Final = "/sys/kernel/mm/transparent_hugepage"


def kernel_of(subject: Subject) -> tuple[int, int]:
    """Return the version of the kernel; (0, 0) if it is unknown."""
    text = subject.facts.text("/proc/sys/kernel/osrelease") or ""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (0, 0) if match is None else (int(match[1]), int(match[2]))


@check(
    "kernel-version",
    TOPIC,
    looks_at="the version of the kernel",
    why="Newer kernels let a waking worker interrupt a busy processor (6.12), and give a pool on "
    "ext4 neighbouring memory (6.16), which makes updates faster. Before 6.1 nothing was tested.",
)
def kernel_version(subject: Subject) -> Iterator[Finding]:
    """Compare the kernel with those that petps was tested on."""
    release = (subject.facts.text("/proc/sys/kernel/osrelease") or "unknown").strip()
    version = kernel_of(subject)
    if version == (0, 0):
        yield note(f"the kernel's version is unknown ({release})")
    elif version < TESTED_KERNEL:
        yield warning(f"Linux {release}", "upgrade to Linux 6.1 or newer")
    elif version < SLICES_KERNEL:
        yield note(
            f"Linux {release}: a busy processor delays pulls by up to a time slice",
            "upgrade to Linux 6.12 or newer, or set server.real_time",
        )
    elif version < FOLIOS_KERNEL and subject.mount is not None and subject.mount.kind == "ext4":
        yield note(f"Linux {release}: updates of a pool on ext4 are faster from Linux 6.16 on")
    else:
        yield ok(f"Linux {release}")


@check(
    "cpu-features",
    TOPIC,
    looks_at="the features of the processor that the native code uses",
    why="Searches and row formats use AVX2 or AVX-512 where they exist. On persistent memory each "
    "written line is flushed, which takes long without clwb or clflushopt.",
)
def cpu_features(subject: Subject) -> Iterator[Finding]:
    """Report what native code has chosen, and what it leaves out."""
    facts = subject.facts
    used = facts.cpu_features()
    names = [name for name, is_used in used.items() if is_used]
    limited_to = facts.environment("PETPS_CPU")
    if limited_to:
        yield warning(
            f"PETPS_CPU={limited_to} leaves wider instructions unused",
            "unset PETPS_CPU, which is for tests",
        )
    if facts.machine() in ("x86_64", "AMD64"):
        if not used.get("avx2"):
            yield note(
                "the processor has no AVX2, or native code may not use it: searches are slow"
            )
        is_on_dax = subject.is_device or _is_dax(subject)
        if is_on_dax and not (used.get("clwb") or used.get("clflushopt")):
            yield warning(
                "the pool is on persistent memory, and the processor has neither clwb nor "
                "clflushopt",
                "use a processor that has them (Intel since 2015, AMD since 2019)",
            )
    yield ok("native code uses " + (", ".join(names) or "no optional feature"))


def _is_dax(subject: Subject) -> bool:
    mount = subject.mount
    return mount is not None and any(option.startswith("dax") for option in mount.options)


@check(
    "processors",
    TOPIC,
    looks_at="the processors that this process may use, and the limit of its control group",
    why="A server has a worker for each processor, at most 8, beside threads for ingest and "
    "upkeep. A control group that allows fewer processors stops them all, for up to 100 ms.",
)
def processors(subject: Subject) -> Iterator[Finding]:
    """Compare the worker threads with the processors."""
    count = subject.facts.processors()
    server = None if subject.config is None else subject.config.server
    quota = memory_limits(subject).processors
    if quota is not None and quota < count:
        yield warning(
            f"the control group {memory_limits(subject).group} allows {quota:g} of {count} "
            "processors",
            "raise CPUQuota (cpu.max), or set server.workers to fewer than it allows",
        )
    if server is None:
        yield ok(f"{count} processors")
        return
    workers = server.workers or min(count, 8)
    if workers > count:
        yield warning(
            f"server.workers is {workers}, and {count} processors may be used",
            "lower server.workers",
        )
    elif server.real_time and workers >= count:
        yield warning(
            f"server.real_time gives {workers} workers all {count} processors, and ingest, HTTP "
            "and the system get none",
            "set server.workers below the number of processors",
        )
    elif server.busy_poll_us and workers >= count:
        yield warning(
            f"server.busy_poll_us lets {workers} workers occupy all {count} processors",
            "set server.workers below the number of processors, or server.busy_poll_us to 0",
        )
    else:
        yield ok(f"{count} processors for {workers} workers")


@check(
    "numa",
    TOPIC,
    looks_at="the NUMA nodes, and the one of the pool's persistent memory",
    why="A row in the memory of another node takes longer to read.",
)
def numa(subject: Subject) -> Iterator[Finding]:
    """Compare the node of a DAX device with the processors of this process."""
    facts = subject.facts
    nodes = [name for name in facts.names(NODES) if re.fullmatch(r"node\d+", name)]
    place = _node_file(subject)
    node = -1 if place is None else int(facts.text(place) or -1)
    if node >= 0:
        processors_text = (facts.text(f"{NODES}/node{node}/cpulist") or "").strip()
        remedy = f"start the server with `numactl --cpunodebind={node}` (systemd: CPUAffinity)"
        if not processors_text:
            yield note(f"the pool's memory is node {node}, which has no processors (CXL)")
        elif len(nodes) > 1:
            yield note(
                f"the pool's memory is node {node}, near processors {processors_text}", remedy
            )
        else:
            yield ok("the machine has one NUMA node")
    elif len(nodes) > 1:
        yield note(
            f"the machine has {len(nodes)} NUMA nodes, and the page cache may be on any of them",
            "a server on one node is fastest: `numactl --cpunodebind=0 --membind=0 petps serve`",
        )
    else:
        yield ok("the machine has one NUMA node")


def _node_file(subject: Subject) -> str | None:
    if subject.is_device and subject.pool_path is not None:
        return f"/sys/bus/dax/devices/{subject.pool_path.rpartition('/')[2]}/numa_node"
    if subject.mount is not None and subject.mount.source.startswith("/dev/pmem"):
        return f"/sys/class/block/{subject.mount.source.rpartition('/')[2]}/device/numa_node"
    return None


@check(
    "huge-pages",
    TOPIC,
    looks_at="transparent huge pages, and pages that are reserved",
    why="Each row on a small page costs a page walk. petps asks the kernel by madvise for huge "
    "pages of pools in memory, and for the trainer's tracker. The pages of a pool in a file are as "
    "large as its file system makes them. Reserved pages (vm.nr_hugepages) are of no use to petps.",
)
def huge_pages(subject: Subject) -> Iterator[Finding]:
    """Report the setting of transparent huge pages, and memory that is reserved in vain."""
    facts = subject.facts
    enabled = _chosen(facts.text(f"{HUGE_PAGES}/enabled"))
    if enabled is None:
        yield note("the kernel has no transparent huge pages")
    elif enabled == "never":
        yield note(
            "transparent huge pages are 'never'",
            f"echo madvise > {HUGE_PAGES}/enabled (kernel option transparent_hugepage=madvise)",
        )
    else:
        yield ok(f"transparent huge pages are '{enabled}'")
    mount = subject.mount
    if mount is not None and mount.kind == "tmpfs":
        shared = _chosen(facts.text(f"{HUGE_PAGES}/shmem_enabled"))
        is_huge = any(option in mount.options for option in ("huge=always", "huge=advise"))
        if shared in ("never", None) and not is_huge:
            yield note(
                f"the pool is in memory ({mount.at}), without huge pages",
                f"mount it with huge=advise, or echo advise > {HUGE_PAGES}/shmem_enabled",
            )
    pages = ((subject.status or {}).get("pool") or {}).get("sampled_pages") or {}
    if pages.get("mapped_bytes"):
        share = pages["huge_bytes"] / pages["mapped_bytes"]
        yield note(
            f"{100 * share:.0f} % of what the server has mapped of its pool is on huge pages"
        )
    values = meminfo(subject)
    reserved, size = values.get("HugePages_Total", 0), values.get("Hugepagesize", 0)
    if reserved and reserved * size >= GIB:
        yield note(
            f"{size_text(reserved * size)} are reserved as huge pages, which petps does not use",
            "set vm.nr_hugepages to 0 unless another program needs them",
        )


def _chosen(text: str | None) -> str | None:
    match = re.search(r"\[(\w+)\]", text or "")
    return None if match is None else match[1]


def meminfo(subject: Subject) -> dict[str, int]:
    """Return /proc/meminfo: counts as they are, sizes in bytes."""
    values = {}
    for line in (subject.facts.text("/proc/meminfo") or "").splitlines():
        match = re.match(r"(\S+):\s+(\d+)( kB)?", line)
        if match is not None:
            values[match[1]] = int(match[2]) * (1024 if match[3] else 1)
    return values


@check(
    "memory",
    TOPIC,
    looks_at="the memory of the machine and of the control group, against what the tables need",
    why="A server needs memory beside its pool: for the free lists of its tables, requests and "
    "replies. The page cache of the pool counts in the control group too. At the limit, the kernel "
    "ends the server, or evicts the rows that pulls need.",
)
def memory(subject: Subject) -> Iterator[Finding]:
    """Compare the memory with what full tables need."""
    values = meminfo(subject)
    total = values.get("MemTotal", 0)
    limits = memory_limits(subject)
    need = needed_memory(subject)
    available = min(total, limits.memory) if limits.memory else total
    whose = f"the control group {limits.group}" if limits.memory else "this machine"
    if not total:
        yield note("the memory of this machine is unknown")
    elif need.server > available:
        yield warning(
            f"the server needs up to {size_text(need.server)} beside its pool, and {whose} has "
            f"{size_text(available)}",
            "raise MemoryMax (memory.max), use a larger machine, or lower the capacity of tables "
            "and server.limits.memory_bytes",
        )
    elif need.pool > available - need.server:
        yield note(
            f"full tables take {size_text(need.pool)}, and {whose} has {size_text(available)}: "
            "pulls of rows that are not in the page cache wait for the disk",
            "more memory, a smaller dtype, or persistent memory",
        )
    else:
        yield ok(f"{whose} has {size_text(available)}")
    if limits.high and limits.high < need.server:
        yield warning(
            f"the control group {limits.group} slows the server down from "
            f"{size_text(limits.high)} on (memory.high)",
            "raise MemoryHigh",
        )


@check(
    "swap",
    TOPIC,
    looks_at="swap space and vm.swappiness",
    why="The memory of the server that is swapped out delays each pull that touches it by a read "
    "of the disk.",
)
def swap(subject: Subject) -> Iterator[Finding]:
    """Report swap space that is in use."""
    values = meminfo(subject)
    total, free = values.get("SwapTotal", 0), values.get("SwapFree", 0)
    swappiness = int((subject.facts.text("/proc/sys/vm/swappiness") or "60").strip())
    if total == 0:
        yield ok("no swap space")
    elif total - free > total // 10:
        yield warning(
            f"{size_text(total - free)} of {size_text(total)} swap space are in use",
            "find what uses the memory, and set MemorySwapMax=0 for the server's unit",
        )
    elif swappiness > 10:
        yield note(
            f"{size_text(total)} of swap space, and vm.swappiness is {swappiness}",
            "set vm.swappiness to 1, or MemorySwapMax=0 for the server's unit",
        )
    else:
        yield ok(f"{size_text(total)} of swap space, vm.swappiness {swappiness}")


@check(
    "service",
    TOPIC,
    looks_at="the unit of systemd that the server runs in",
    why="A server that nothing starts again stays away after a crash or a restart of the machine.",
)
def service(subject: Subject) -> Iterator[Finding]:
    """Name the unit of the running server."""
    for holder in subject.holders:
        group = memory_limits(subject).group
        unit = re.search(r"([^/]+\.service)", group)
        if unit is not None:
            yield ok(f"the server (process {holder}) is in the unit {unit[1]}")
        elif re.search(r"kubepods|docker|containerd|libpod", group):
            yield ok(f"the server (process {holder}) is in a container ({group})")
        else:
            yield note(
                f"the server (process {holder}) is in no unit of systemd and no container",
                "start it as a service: docs/how-to/operate.md has a unit",
            )
