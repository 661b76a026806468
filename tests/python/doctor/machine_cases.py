"""Cases of the machine, its limits and clock, the pool and its file system."""

from __future__ import annotations

from petps.doctor.facts import (
    ClockFacts,
    SpaceFacts,
)
from petps.errors import DataLoss
from tests.python.doctor.case import (
    DEFAULT,
    FAULT,
    NOTE,
    ONE_NODE,
    WARNING,
    Case,
    every,
    give_capacity,
    held_without_answer,
    mounted,
    on_device,
    served,
    with_file,
)
from tests.python.doctor.fake import (
    GIB,
    NOW,
    POOL,
    UUID,
    superblock,
    with_text,
    with_value,
)

MACHINE_CASES = [
    Case(
        "kernel-version", WARNING, "Linux 5.10", with_text("/proc/sys/kernel/osrelease", "5.10.0")
    ),
    Case("kernel-version", NOTE, "Linux 6.6", with_text("/proc/sys/kernel/osrelease", "6.6.1")),
    Case("kernel-version", NOTE, "Linux 6.14", with_text("/proc/sys/kernel/osrelease", "6.14.0")),
    Case("kernel-version", NOTE, "unknown", with_text("/proc/sys/kernel/osrelease", "odd")),
    Case(
        "cpu-features",
        WARNING,
        "PETPS_CPU=baseline",
        with_value(variables={"PETPS_CPU": "baseline"}),
    ),
    Case("cpu-features", NOTE, "no AVX2", with_value(features={"avx2": False})),
    Case(
        "cpu-features",
        WARNING,
        "clflushopt",
        every(on_device(), with_value(features={"clwb": False})),
    ),
    Case(
        "processors",
        WARNING,
        "allows 0.5 of 8",
        with_text("/sys/fs/cgroup/system.slice/petps.service/cpu.max", "50000 100000"),
    ),
    Case(
        "processors", WARNING, "allows 2 of 8", with_text("/sys/fs/cgroup/cpu.max", "200000 100000")
    ),
    Case("processors", WARNING, "workers is 16", config={}, changed={"server": {"workers": 16}}),
    Case("processors", WARNING, "real_time", config={}, changed={"server": {"real_time": 5}}),
    Case("processors", WARNING, "busy_poll", config={}, changed={"server": {"busy_poll_us": 50}}),
    Case("numa", NOTE, "2 NUMA nodes", with_value(folders=ONE_NODE)),
    Case(
        "numa",
        NOTE,
        "node 1, near processors 8-15",
        every(
            on_device(numa_node="1\n"),
            with_value(folders=ONE_NODE),
            with_text("/sys/devices/system/node/node1/cpulist", "8-15\n"),
        ),
    ),
    Case("numa", NOTE, "no processors (CXL)", on_device(numa_node="2\n")),
    Case(
        "huge-pages",
        NOTE,
        "'never'",
        with_text("/sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]"),
    ),
    Case(
        "huge-pages",
        NOTE,
        "without huge pages",
        every(
            mounted("tmpfs", "tmpfs"),
            with_text("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "always [never]"),
        ),
    ),
    Case(
        "huge-pages",
        NOTE,
        "25 % of what the server has mapped",
        served(pool={"sampled_pages": {"mapped_bytes": 4096, "huge_bytes": 1024}}),
    ),
    Case(
        "huge-pages",
        NOTE,
        "4.0 GiB are reserved",
        with_text("/proc/meminfo", DEFAULT + "HugePages_Total: 2048\nHugepagesize: 2048 kB\n"),
    ),
    Case(
        "memory",
        WARNING,
        "this machine has 256.0 MiB",
        with_text("/proc/meminfo", "MemTotal: 262144 kB"),
    ),
    Case(
        "memory",
        WARNING,
        "the control group /system.slice/petps.service has 256.0 MiB",
        with_text("/sys/fs/cgroup/system.slice/petps.service/memory.max", f"{256 << 20}\n"),
    ),
    Case(
        "memory",
        WARNING,
        "memory.high",
        with_text("/sys/fs/cgroup/system.slice/petps.service/memory.high", f"{256 << 20}\n"),
    ),
    Case(
        "memory",
        NOTE,
        "wait for the disk",
        lambda facts: give_capacity(facts, 4 << 30),
    ),
    Case(
        "swap",
        NOTE,
        "vm.swappiness is 60",
        with_text("/proc/meminfo", "SwapTotal: 1048576 kB\nSwapFree: 1048576 kB\n"),
    ),
    Case(
        "swap",
        WARNING,
        "are in use",
        with_text("/proc/meminfo", "SwapTotal: 1048576 kB\nSwapFree: 524288 kB\n"),
    ),
    Case(
        "service",
        NOTE,
        "in no unit",
        every(served(), with_text("/proc/4711/cgroup", "0::/user.slice/session-1.scope\n")),
    ),
    Case(
        "open-files", WARNING, "may open 1,024 files", with_value(limits={"NOFILE": (1024, 4096)})
    ),
    Case(
        "open-files",
        WARNING,
        "the server (process 4711) may open 1,024",
        every(
            served(), with_text("/proc/4711/limits", "Max open files            1024 4096 files\n")
        ),
    ),
    Case(
        "locked-memory",
        FAULT,
        "RDMA devices are: none",
        config={},
        changed={"server": {"rdma": "auto"}},
    ),
    Case(
        "locked-memory",
        WARNING,
        "may lock 8.0 MiB",
        every(
            with_value(folders={"/sys/class/infiniband": ["mlx5_0"]}),
            with_value(limits={"MEMLOCK": (8 << 20, 8 << 20)}),
        ),
        config={"server": {"rdma": "mlx5_0"}},
    ),
    Case(
        "real-time",
        FAULT,
        "priorities up to 0",
        with_value(limits={"RTPRIO": (0, 0)}),
        config={"server": {"real_time": 10, "workers": 1}},
    ),
    Case(
        "memory-maps",
        WARNING,
        "max_map_count is 100",
        with_text("/proc/sys/vm/max_map_count", "100"),
    ),
    Case(
        "memory-maps",
        WARNING,
        "overcommit_memory is 2",
        with_text("/proc/sys/vm/overcommit_memory", "2"),
    ),
    Case("memory-maps", FAULT, "of addresses", with_value(limits={"AS": (GIB, GIB)})),
    Case("core-dumps", NOTE, "no core dump", with_value(limits={"CORE": (0, -1)})),
    Case(
        "clock-synchronised",
        WARNING,
        "no time service",
        with_value(clock_facts=ClockFacts(False, 16.0)),
    ),
    Case(
        "clock-synchronised",
        WARNING,
        "wrong by 5.0 s",
        with_value(clock_facts=ClockFacts(True, 5.0)),
    ),
    Case("clock-synchronised", NOTE, "does not say", with_value(clock_facts=None)),
    Case("clock-steps", WARNING, "60 s in the future", with_file(POOL, modified=NOW + 60)),
    Case(
        "clock-steps", WARNING, "audit was written", with_file(f"{POOL}.audit", modified=NOW + 60)
    ),
    Case("clock-steps", WARNING, "last backup", served(backup={"last": {"finished_at": NOW + 9}})),
    Case("pool-file", FAULT, "no pool at", lambda facts: facts.files.pop(POOL)),
    Case("pool-file", FAULT, "no file and no device", with_file(POOL, kind="folder")),
    Case("pool-file", FAULT, "may not write /data/my.pool", with_value(forbidden={POOL})),
    Case("pool-file", FAULT, "may not write the folder", with_value(forbidden={"/data"})),
    Case("pool-file", WARNING, "others may write it", with_file(POOL, mode=0o666)),
    Case("pool-file", WARNING, "others may replace", with_file("/data", kind="folder", mode=0o777)),
    Case("pool-file", NOTE, "you are root", with_file(POOL, owner=1000)),
    Case("pool-format", FAULT, "format 9", with_value(pool=superblock(format=9))),
    Case("pool-format", FAULT, "its first bytes", with_value(pool=DataLoss("its first bytes"))),
    Case("pool-format", NOTE, "did not close", with_value(pool=superblock(is_clean=False))),
    Case(
        "pool-format",
        FAULT,
        "went down",
        with_value(pool=superblock(is_clean=False, durability="process")),
    ),
    Case("pool-format", NOTE, "one copy", with_value(pool=superblock(broken_copies=1))),
    Case("pool-lock", WARNING, "process 4711 (petps) has the pool open and", held_without_answer),
    Case("server-state", FAULT, "read-only", served(pool={"failed": True})),
    Case("server-state", WARNING, "lost the log", served(unready="lost the log")),
    Case("server-state", WARNING, "incident: odd", served(incidents=["odd"])),
    Case(
        "server-state",
        WARNING,
        "90 % full",
        served(tables=[{"name": "a", "instance": "m@0", "rows": 90, "capacity": 100}]),
    ),
    Case("server-state", WARNING, "lack TLS", served(insecure=True)),
    Case(
        "damaged-rows",
        WARNING,
        "1 rows were damaged",
        with_text(f"{POOL}.damage", f'{{"pool": "{UUID}"}}\n{{"table": 1, "key": 5}}\n'),
    ),
    Case("damaged-rows", NOTE, "of another pool", with_text(f"{POOL}.damage", '{"pool": "x"}\n')),
    Case("damaged-rows", FAULT, "does not begin", with_text(f"{POOL}.damage", "odd\n")),
    Case("file-system", WARNING, "tmpfs (/data) is memory", mounted("tmpfs", "tmpfs")),
    Case("file-system", WARNING, "overlay", mounted("overlay", "overlay")),
    Case(
        "file-system", WARNING, "nfs4 (/data) is not tested", mounted("nfs4", "h:/x", "rw,vers=4.2")
    ),
    Case("file-system", FAULT, "cannot allocate", mounted("nfs4", "h:/x", "rw,vers=4.1")),
    Case("file-system", WARNING, "fuse.sshfs", mounted("fuse.sshfs", "h:")),
    Case("file-system", FAULT, "not supported", mounted("zfs", "tank")),
    Case("file-system", WARNING, "not known", mounted("newfs", "x")),
    Case("file-system", FAULT, "read-only", mounted("ext4", "/dev/sda1", "ro")),
    Case(
        "file-system",
        WARNING,
        "btrfs",
        every(mounted("btrfs", "/dev/sda1"), with_text("/proc/sys/kernel/osrelease", "6.1.0")),
    ),
    Case(
        "file-system",
        NOTE,
        "no journal",
        every(
            with_text("/proc/sys/kernel/osrelease", "6.1.0"),
            with_text("/sys/fs/ext4/sda1/journal_task", "<none>\n"),
        ),
    ),
    Case("file-system", NOTE, "unknown", with_text("/proc/self/mountinfo", "")),
    Case("dax", WARNING, "without dax", mounted("ext4", "/dev/pmem0")),
    Case("dax", NOTE, "dax=inode", mounted("ext4", "/dev/pmem0", "rw,dax=inode")),
    Case("dax", WARNING, "aligned to 4.0 KiB", on_device(align="4096\n")),
    Case("pool-blocks", FAULT, "copied on write", with_value(copied_on_write=True)),
    Case("pool-blocks", WARNING, "shares blocks", with_value(shared_blocks=True)),
    Case(
        "disk-space", FAULT, "is full", with_value(spaces={"/data": SpaceFacts(1 << 20, GIB, 9, 9)})
    ),
    Case(
        "disk-space",
        WARNING,
        "1.0 GiB of 4.0 GiB are free, and",
        every(
            lambda facts: give_capacity(facts, 1 << 28),
            with_value(spaces={"/data": SpaceFacts(GIB, 4 * GIB, 9, 9)}),
        ),
    ),
    Case(
        "disk-space",
        WARNING,
        "only",
        with_value(spaces={"/data": SpaceFacts(GIB, 100 * GIB, 9, 9)}),
    ),
    Case(
        "disk-space",
        WARNING,
        "has 1.0 KiB",
        on_device(size="1024\n"),
    ),
    Case(
        "inodes", FAULT, "5 of 1,000", with_value(spaces={"/data": SpaceFacts(GIB, GIB, 5, 1000)})
    ),
    Case(
        "other-space",
        FAULT,
        "ingest.log (/logs): 1.0 MiB",
        every(
            with_file("/logs", kind="folder"),
            with_value(spaces={"/logs": SpaceFacts(1 << 20, GIB, 9, 9)}),
        ),
        config={"ingest": {"log": "/logs"}},
    ),
    Case(
        "other-space",
        WARNING,
        "backup.store (/): 1.0 GiB",
        with_value(spaces={"/": SpaceFacts(GIB, 100 * GIB, 9, 9)}),
        config={"backup": {"store": "/backups"}},
    ),
]
