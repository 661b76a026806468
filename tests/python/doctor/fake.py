"""FakeFacts: a machine on which everything is well, until a test changes a fact."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from petps import config
from petps.delta.kafka.topic import TopicFacts
from petps.doctor import Finding, Level, Subject, all_checks, diagnose
from petps.doctor.facts import (
    CertificateFacts,
    ClockFacts,
    FileFacts,
    GrantFacts,
    SpaceFacts,
    StoreFacts,
)
from petps.doctor.superblock import Superblock, TableRecord
from petps.errors import PetpsError
from petps.server.shard_map import ShardMap, parse

T = TypeVar("T")
POOL = "/data/my.pool"
NOW = 1_800_000_000.0
GIB = 1 << 30
UUID = "0123"
BOOT = "11111111-2222-3333-4444-555555555555"


def superblock(**changes: Any) -> Superblock:
    """Return the superblock of a closed pool with one table."""
    table = TableRecord("items", "default@0", "f32", 4, 16, 1000, 10, "push", 0)
    values: dict[str, Any] = {
        "format": 3,
        "uuid": UUID,
        "boot_id": bytes(16),
        "unit": 2 << 20,
        "generation": 1,
        "sequence": 7,
        "is_clean": True,
        "durability": "power",
        "tables": (table,),
        "partitions": {"default@0": 8},
    }
    return Superblock(**{**values, **changes})


def topic(**changes: Any) -> TopicFacts:
    """Return a good topic."""
    settings = {
        "retention.ms": str(7 * 86_400_000),
        "retention.bytes": "-1",
        "cleanup.policy": "delete",
        "max.message.bytes": "1048588",
        "min.insync.replicas": "2",
        **changes.pop("settings", {}),
    }
    return TopicFacts(
        **{"partitions": 8, "replicas": 3, "in_sync": 3, "settings": settings, **changes}
    )


def shard_map(address: str = "127.0.0.1:7070", partitions: int = 8) -> ShardMap:
    """Return a map of one server."""
    servers = [{"address": address, "partitions": [f"0-{partitions - 1}"]}]
    content = {"model": "default", "version": 1, "partitions": partitions, "servers": servers}
    return parse(json.dumps(content).encode(), "map")


def mountinfo(kind: str = "ext4", source: str = "/dev/sda1", options: str = "rw") -> str:
    """Return the mounts of a machine whose pool is on a file system of its own."""
    return (
        "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw\n"
        f"23 22 8:2 / /data rw,relatime shared:2 - {kind} {source} {options}\n"
    )


@dataclass
class FakeFacts:
    """See petps.doctor.Facts. A value that is an error is raised."""

    texts: dict[str, str] = field(
        default_factory=lambda: {
            "/proc/sys/kernel/osrelease": "6.18.0-1\n",
            "/proc/self/mountinfo": mountinfo(),
            "/proc/sys/kernel/random/boot_id": BOOT,
            "/proc/meminfo": "MemTotal: 67108864 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n",
            "/proc/self/cgroup": "0::/system.slice/petps.service\n",
            "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
            "/sys/kernel/mm/transparent_hugepage/shmem_enabled": "always [advise] never\n",
            "/proc/sys/vm/max_map_count": "65530\n",
            "/proc/sys/vm/overcommit_memory": "0\n",
            "/proc/sys/vm/swappiness": "60\n",
            "/proc/net/tcp": "  sl  local_address\n",
        }
    )
    folders: dict[str, list[str]] = field(
        default_factory=lambda: {"/sys/devices/system/node": ["node0", "possible"]}
    )
    files: dict[str, FileFacts] = field(
        default_factory=lambda: {
            "/": FileFacts("folder", 0o755),
            "/data": FileFacts("folder", 0o755),
            POOL: FileFacts("file", 0o640, size=GIB, allocated=GIB, device=(8, 2), inode=77),
        }
    )
    spaces: dict[str, SpaceFacts] = field(default_factory=dict)
    forbidden: set[str] = field(default_factory=set)
    limits: dict[str, tuple[int, int]] = field(default_factory=dict)
    features: dict[str, bool] = field(default_factory=lambda: {"avx2": True, "clwb": True})
    variables: dict[str, str] = field(default_factory=dict)
    clock_facts: ClockFacts | None = field(default_factory=lambda: ClockFacts(True, 0.01))
    pool: Superblock | PetpsError = field(default_factory=superblock)
    copied_on_write: bool | None = False
    shared_blocks: bool | None = False
    addresses: set[str] = field(default_factory=lambda: {"127.0.0.1", "::1", "0.0.0.0", "::"})
    socket_owners: dict[int, int] = field(default_factory=dict)
    status: dict[str, Any] | PetpsError | None = None
    certificate: CertificateFacts | PetpsError | None = None
    grant_list: Sequence[GrantFacts] | PetpsError = ()
    topic_facts: TopicFacts | PetpsError = field(default_factory=topic)
    partitions: int | PetpsError = 8
    stores: dict[str, StoreFacts | PetpsError] = field(default_factory=dict)
    count: int = 8
    architecture: str = "x86_64"
    uid: int = 0
    map: ShardMap | PetpsError | None = None

    def text(self, path: str) -> str | None:
        return self.texts.get(path)

    def names(self, folder: str) -> Sequence[str]:
        return self.folders.get(folder, [])

    def link(self, path: str) -> str | None:
        return path

    def file(self, path: str) -> FileFacts | None:
        return self.files.get(path)

    def space(self, path: str) -> SpaceFacts | None:
        return self.spaces.get(path, SpaceFacts(100 * GIB, 200 * GIB, 10**6, 10**7))

    def may(self, path: str, rights: str) -> bool:
        return path not in self.forbidden

    def is_copied_on_write(self, path: str) -> bool | None:
        return self.copied_on_write

    def has_shared_blocks(self, path: str) -> bool | None:
        return self.shared_blocks

    def environment(self, name: str) -> str | None:
        return self.variables.get(name)

    def limit(self, name: str) -> tuple[int, int]:
        return self.limits.get(name, (-1, -1))

    def processors(self) -> int:
        return self.count

    def machine(self) -> str:
        return self.architecture

    def now(self) -> float:
        return NOW

    def clock(self) -> ClockFacts | None:
        return self.clock_facts

    def cpu_features(self) -> Mapping[str, bool]:
        return self.features

    def pool_format(self) -> int:
        return 4

    def row_bytes(self, dtype: str, dim: int) -> int:
        return 4 * dim

    def footprint(self, row_bytes: int, capacity: int) -> Mapping[str, int]:
        rows = row_bytes * capacity
        return {"records": 0, "index": 20 * capacity, "rows": rows, "memory": capacity}

    def superblock(self, path: str) -> Superblock:
        return _value(self.pool)

    def has_address(self, host: str) -> bool:
        return host in self.addresses

    def socket_owner(self, inode: int) -> int | None:
        return self.socket_owners.get(inode)

    def sockets(self, process: int) -> set[int]:
        return {inode for inode, owner in self.socket_owners.items() if owner == process}

    def server_status(self, pool: str) -> Mapping[str, Any]:
        assert self.status is not None
        return _value(self.status)

    def user(self) -> int:
        return self.uid

    def shard_map(self, path: str) -> ShardMap:
        assert self.map is not None
        return _value(self.map)

    def certificates(self, tls: config.TlsConfig) -> CertificateFacts:
        assert self.certificate is not None
        return _value(self.certificate)

    def grants(self, path: str) -> Sequence[GrantFacts]:
        return _value(self.grant_list)

    def topic(self, log: str, options: Mapping[str, Any]) -> TopicFacts:
        return _value(self.topic_facts)

    def log_partitions(self, folder: str) -> int:
        return _value(self.partitions)

    def store(self, url: str) -> StoreFacts:
        return _value(self.stores.get(url, StoreFacts(3, True)))


def _value(value: T | PetpsError) -> T:
    if isinstance(value, PetpsError):
        raise value
    return value


def serve(facts: FakeFacts, holder: int = 4711, **status: Any) -> None:
    """Let a process have the pool open; with a status it is a server that answers."""
    facts.texts["/proc/locks"] = f"1: FLOCK  ADVISORY  WRITE {holder} 08:02:77 0 EOF\n"
    facts.texts[f"/proc/{holder}/comm"] = "petps\n"
    facts.texts[f"/proc/{holder}/cgroup"] = "0::/system.slice/petps.service\n"
    facts.status = {"pool": {"failed": False}, "software": "petps 0.1.0", "unready": None, **status}


def settings(**sections: dict[str, Any]) -> config.Config:
    """Return a configuration of POOL."""
    pool = {"path": POOL, **sections.pop("pool", {})}
    return config.merge(None, {"pool": pool, **sections}, "test")


def find(
    name: str, facts: FakeFacts, settings_: config.Config | None = None, *, pool: str | None = POOL
) -> list[Finding]:
    """Return the findings of one check."""
    path = None if settings_ is None else "/etc/petps.toml"
    subject = Subject(facts, config=settings_, config_path=path, pool=pool)
    chosen = [known for known in all_checks() if known.name == name]
    assert len(chosen) == 1, name
    return diagnose(subject, chosen)


def levels(findings: Iterable[Finding]) -> list[Level]:
    """Return the levels of findings."""
    return [finding.level for finding in findings]


Change = Callable[[FakeFacts], None]


def with_text(path: str, text: str) -> Change:
    """Return a change of a file of the kernel."""
    return lambda facts: facts.texts.update({path: text})


def with_value(**values: Any) -> Change:
    """Return a change of other facts."""

    def change(facts: FakeFacts) -> None:
        for name, value in values.items():
            current = getattr(facts, name)
            if isinstance(current, dict) and isinstance(value, dict):
                current.update(value)
            else:
                setattr(facts, name, value)

    return change
