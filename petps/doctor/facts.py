"""Facts: what checks may ask of the machine and of what is outside it. Tests have a fake.

No method changes anything. Methods that read the kernel's files return None for what does not
exist or may not be read. Methods about files of petps and about other machines raise PetpsError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from petps.config import TlsConfig
    from petps.delta.kafka.topic import TopicFacts
    from petps.doctor.superblock import Superblock
    from petps.server.shard_map import ShardMap

__all__ = [
    "CertificateFacts",
    "ClockFacts",
    "Facts",
    "FileFacts",
    "GrantFacts",
    "SpaceFacts",
    "StoreFacts",
]


@dataclass(frozen=True)
class FileFacts:
    """A file, folder or device as stat() describes it."""

    kind: str
    """'file', 'folder', 'device' (of characters) or 'other'."""
    mode: int = 0o600
    """The permissions."""
    owner: int = 0
    size: int = 0
    allocated: int = 0
    """Bytes that it takes of the disk."""
    modified: float = 0.0
    device: tuple[int, int] = (0, 0)
    """(major, minor) of its file system."""
    inode: int = 0


@dataclass(frozen=True)
class SpaceFacts:
    """The space of a file system, for this user."""

    free: int
    total: int
    free_inodes: int
    inodes: int
    """0: the file system does not count them."""


@dataclass(frozen=True)
class ClockFacts:
    """What the kernel knows of its clock (adjtimex)."""

    is_synchronised: bool
    error_seconds: float
    """The largest error that the kernel assumes."""


@dataclass(frozen=True)
class CertificateFacts:
    """The files of [tls], which fit together."""

    names: Sequence[str]
    expires_at: float
    client_authorities: Sequence[tuple[str, float]] = ()
    """(name, end) of each CA of clients."""


@dataclass(frozen=True)
class GrantFacts:
    """One grant of the access file."""

    name: str
    roles: Sequence[str]
    expires_at: float = 0.0
    """0: it does not end."""


@dataclass(frozen=True)
class StoreFacts:
    """A checkpoint store that answered."""

    versions: int | None
    """None: there is no store there yet."""
    is_writable: bool | None
    """None: that was not tried."""
    details: Mapping[str, Any] = field(default_factory=dict)


class Facts(Protocol):
    """What a check may ask. Every method returns or raises within a bounded time."""

    def text(self, path: str) -> str | None:
        """Return the text of a file of the kernel."""

    def names(self, folder: str) -> Sequence[str]:
        """Return the names in a folder, sorted; none if it cannot be read."""

    def link(self, path: str) -> str | None:
        """Return the absolute path that a path leads to, without links."""

    def file(self, path: str) -> FileFacts | None:
        """Return what stat() says of a file."""

    def space(self, path: str) -> SpaceFacts | None:
        """Return the space of the file system of a path."""

    def may(self, path: str, rights: str) -> bool:
        """Return whether this user may read ('r'), write ('w') or enter ('x') a path."""

    def is_copied_on_write(self, path: str) -> bool | None:
        """Return whether btrfs writes each block of a file to a new place."""

    def has_shared_blocks(self, path: str) -> bool | None:
        """Return whether a file shares blocks with another one (a reflink, a snapshot)."""

    def environment(self, name: str) -> str | None:
        """Return an environment variable."""

    def limit(self, name: str) -> tuple[int, int]:
        """Return the (soft, hard) limit of this process: 'NOFILE', 'MEMLOCK'; -1: none."""

    def processors(self) -> int:
        """Return the processors that this process may use."""

    def machine(self) -> str:
        """Return the architecture: 'x86_64'."""

    def now(self) -> float:
        """Return the time in seconds since 1970."""

    def clock(self) -> ClockFacts | None:
        """Return the state of the clock."""

    def cpu_features(self) -> Mapping[str, bool]:
        """Return which features the native code uses."""

    def pool_format(self) -> int:
        """Return the newest format of a pool that this build knows."""

    def row_bytes(self, dtype: str, dim: int) -> int:
        """Return the bytes of a stored row."""

    def footprint(self, row_bytes: int, capacity: int) -> Mapping[str, int]:
        """Return the most bytes of a full table: 'index', 'rows', 'memory'."""

    def superblock(self, path: str) -> Superblock:
        """Return what the pool's superblock says, without locking or opening the pool."""

    def has_address(self, host: str) -> bool:
        """Return whether a server may listen on a numeric address of this machine."""

    def socket_owner(self, inode: int) -> int | None:
        """Return the process that has a socket open, if this user may know."""

    def sockets(self, process: int) -> set[int]:
        """Return the sockets that a process has open; none if this user may not know."""

    def server_status(self, pool: str) -> Mapping[str, Any]:
        """Return the status of the server that has a pool open, by its socket."""

    def user(self) -> int:
        """Return the user (uid) of this process."""

    def shard_map(self, path: str) -> ShardMap:
        """Return a shard map."""

    def certificates(self, tls: TlsConfig) -> CertificateFacts:
        """Return what the files of [tls] say. Raises for what a server would refuse."""

    def grants(self, path: str) -> Sequence[GrantFacts]:
        """Return the grants of an access file."""

    def topic(self, log: str, options: Mapping[str, Any]) -> TopicFacts:
        """Return what the brokers say of a log in Kafka."""

    def log_partitions(self, folder: str) -> int:
        """Return the partitions of a log in a folder."""

    def store(self, url: str) -> StoreFacts:
        """Return what is known of a checkpoint store."""
