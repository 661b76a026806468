"""Machine: the facts of this machine, and of what it can reach. It changes nothing."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import re
import resource
import socket
import ssl
import stat
import struct
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from petps import _native
from petps.doctor.facts import (
    CertificateFacts,
    ClockFacts,
    FileFacts,
    GrantFacts,
    SpaceFacts,
    StoreFacts,
)
from petps.doctor.superblock import Superblock, read_superblock
from petps.errors import NotFound, PetpsError

if TYPE_CHECKING:
    from petps.config import TlsConfig
    from petps.delta.kafka.topic import TopicFacts
    from petps.server.shard_map import ShardMap

__all__ = ["Machine"]

TEXT_BYTES_MAX: Final = 32 << 20  # a list of 100,000 damaged rows has 15 MB
READ_BYTES: Final = 64 << 10
STA_UNSYNC: Final = 0x40  # linux/timex.h
TIME_ERROR: Final = 5
FS_IOC_GETFLAGS: Final = 0x80086601
FS_NOCOW_FL: Final = 0x00800000
FS_IOC_FIEMAP: Final = 0xC020660B
FIEMAP_EXTENT_SHARED: Final = 0x2000
EXTENTS_AT_ONCE: Final = 256
EXTENT_CALLS_MAX: Final = 64
FIEMAP: Final = struct.Struct("=QQIIII")
EXTENT: Final = struct.Struct("=QQQQQIIII")
BTRFS_SUPER_MAGIC: Final = 0x9123683E
PROBE: Final = "petps-doctor-"  # the begin of a file's name that probes_writes writes and removes


class _Timex(ctypes.Structure):
    """The begin of struct timex (linux/timex.h), and room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


class Machine:
    """See Facts.

    probes_writes: write a small file to a store that must be writable, and remove it; else only
    local folders are looked at, by their permissions.
    """

    def __init__(self, *, probes_writes: bool = False) -> None:
        self._probes_writes = probes_writes
        self._libc = ctypes.CDLL(None, use_errno=True)

    def text(self, path: str) -> str | None:
        """See Facts."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                content = bytearray()
                # /proc/sys refuses a long read, whatever it has.
                while len(content) < TEXT_BYTES_MAX and (piece := os.read(file, READ_BYTES)):
                    content += piece
                return content.decode("utf-8", "replace")
            finally:
                os.close(file)
        except OSError:
            return None

    def names(self, folder: str) -> Sequence[str]:
        """See Facts."""
        try:
            return sorted(os.listdir(folder))
        except OSError:
            return []

    def link(self, path: str) -> str | None:
        """See Facts."""
        try:
            return os.path.realpath(path)
        except OSError:
            return None

    def file(self, path: str) -> FileFacts | None:
        """See Facts."""
        try:
            found = os.stat(path)
        except OSError:
            return None
        kinds = ((stat.S_ISREG, "file"), (stat.S_ISDIR, "folder"), (stat.S_ISCHR, "device"))
        return FileFacts(
            kind=next((name for test, name in kinds if test(found.st_mode)), "other"),
            mode=stat.S_IMODE(found.st_mode),
            owner=found.st_uid,
            size=found.st_size,
            allocated=found.st_blocks * 512,
            modified=found.st_mtime,
            device=(os.major(found.st_dev), os.minor(found.st_dev)),
            inode=found.st_ino,
        )

    def space(self, path: str) -> SpaceFacts | None:
        """See Facts."""
        try:
            found = os.statvfs(path)
        except OSError:
            return None
        return SpaceFacts(
            free=found.f_bavail * found.f_frsize,
            total=found.f_blocks * found.f_frsize,
            free_inodes=found.f_favail,
            inodes=found.f_files,
        )

    def may(self, path: str, rights: str) -> bool:
        """See Facts."""
        bits = {"r": os.R_OK, "w": os.W_OK, "x": os.X_OK}
        return os.access(path, sum(bits[right] for right in rights))

    def is_copied_on_write(self, path: str) -> bool | None:
        """See Facts."""
        about = ctypes.create_string_buffer(256)  # struct statfs begins with the kind
        if self._libc.statfs(os.fsencode(path), about) != 0:
            return None
        if ctypes.c_long.from_buffer(about).value & 0xFFFFFFFF != BTRFS_SUPER_MAGIC:
            return False
        answer = self._ioctl(path, FS_IOC_GETFLAGS, bytes(8))
        return None if answer is None else not struct.unpack("=q", answer)[0] & FS_NOCOW_FL

    def has_shared_blocks(self, path: str) -> bool | None:
        """See Facts. Large files are looked at in their first EXTENT_CALLS_MAX * 256 extents."""
        at = 0
        for _ in range(EXTENT_CALLS_MAX):
            request = FIEMAP.pack(at, (1 << 64) - 1 - at, 0, 0, EXTENTS_AT_ONCE, 0)
            answer = self._ioctl(
                path, FS_IOC_FIEMAP, request + bytes(EXTENTS_AT_ONCE * EXTENT.size)
            )
            if answer is None:
                return None
            count = FIEMAP.unpack_from(answer)[3]
            for number in range(count):
                start, _, length, _, _, flags, *_ = EXTENT.unpack_from(
                    answer, FIEMAP.size + number * EXTENT.size
                )
                if flags & FIEMAP_EXTENT_SHARED:
                    return True
                at = start + length
            if count < EXTENTS_AT_ONCE:
                return False
        return None

    def _ioctl(self, path: str, number: int, request: bytes) -> bytes | None:
        buffer = bytearray(request)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                fcntl.ioctl(file, number, buffer)
            finally:
                os.close(file)
        except OSError:
            return None
        return bytes(buffer)

    def environment(self, name: str) -> str | None:
        """See Facts."""
        return os.environ.get(name)

    def limit(self, name: str) -> tuple[int, int]:
        """See Facts."""
        soft, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
        return soft, hard

    def processors(self) -> int:
        """See Facts."""
        return len(os.sched_getaffinity(0))

    def machine(self) -> str:
        """See Facts."""
        return platform.machine()

    def now(self) -> float:
        """See Facts."""
        return time.time()

    def clock(self) -> ClockFacts | None:
        """See Facts."""
        state = _Timex()
        result = self._libc.adjtimex(ctypes.byref(state))
        if result < 0:  # a sandbox forbids it
            return None
        return ClockFacts(
            is_synchronised=result != TIME_ERROR and not state.status & STA_UNSYNC,
            error_seconds=state.maxerror / 1e6,
        )

    def cpu_features(self) -> Mapping[str, bool]:
        """See Facts."""
        return _native.cpu_features()

    def pool_format(self) -> int:
        """See Facts."""
        return _native.formats()["pool"]

    def row_bytes(self, dtype: str, dim: int) -> int:
        """See Facts."""
        return _native.row_bytes(dtype, dim)

    def footprint(self, row_bytes: int, capacity: int) -> Mapping[str, int]:
        """See Facts."""
        return _native.footprint_of(row_bytes, capacity)

    def superblock(self, path: str) -> Superblock:
        """See Facts."""
        return read_superblock(path)

    def has_address(self, host: str) -> bool:
        """See Facts."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((host, 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
        return True

    def socket_owner(self, inode: int) -> int | None:
        """See Facts."""
        processes = (int(name) for name in os.listdir("/proc") if name.isdecimal())
        return next((process for process in processes if inode in self.sockets(process)), None)

    def sockets(self, process: int) -> set[int]:
        """See Facts."""
        inodes: set[int] = set()
        for name in self.names(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):  # closed since it was listed
                match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{process}/fd/{name}"))
                inodes |= set() if match is None else {int(match[1])}
        return inodes

    def server_status(self, pool: str) -> Mapping[str, Any]:
        """See Facts. The check's own time limit bounds it."""
        from petps.admin.client import AdminClient

        with AdminClient(pool) as client:
            return client.status()

    def user(self) -> int:
        """See Facts."""
        return os.geteuid()

    def shard_map(self, path: str) -> ShardMap:
        """See Facts."""
        from petps.server.shard_map import MapFile

        return MapFile(Path(path)).read()

    def certificates(self, tls: TlsConfig) -> CertificateFacts:
        """See Facts."""
        from petps.server.tls import TlsFiles

        current = TlsFiles(tls, reload_native=lambda: None, log=lambda line: None).current
        authorities = []
        for certificate in current.context.get_ca_certs():
            subject: Any = certificate.get("subject", ())
            names = [value for part in subject for kind, value in part if kind == "commonName"]
            end = ssl.cert_time_to_seconds(str(certificate["notAfter"]))
            authorities.append((str(names[0]) if names else "without a name", float(end)))
        return CertificateFacts(current.names, current.expires_at, authorities)

    def grants(self, path: str) -> Sequence[GrantFacts]:
        """See Facts."""
        from petps.server.access_file import read_access_file

        return [
            GrantFacts(entry.name, entry.roles, float(entry.expires_s()))
            for entry in read_access_file(Path(path))
        ]

    def topic(self, log: str, options: Mapping[str, Any]) -> TopicFacts:
        """See Facts."""
        from petps.delta.kafka.topic import describe_topic

        return describe_topic(log, options)

    def log_partitions(self, folder: str) -> int:
        """See Facts."""
        from petps.delta import open_log

        log = open_log(folder, create=False)
        try:
            return log.partitions
        finally:
            log.close()

    def store(self, url: str) -> StoreFacts:
        """See Facts."""
        from petps.checkpoint import Store
        from petps.checkpoint.files import open_files

        files = open_files(url)
        try:
            state = Store.open(files).state
            versions: int | None = sum(len(lineage.versions) for lineage in state.lineages)
        except NotFound:
            versions = None
        if "://" not in url.removeprefix("file://"):
            folder = Path(url.removeprefix("file://")).absolute()
            while not folder.exists():
                folder = folder.parent
            return StoreFacts(versions, self.may(str(folder), "wx"))
        if versions is None and (bucket := _missing_bucket(url)):
            raise NotFound(f"there is no bucket or folder {bucket}: create it")
        if not self._probes_writes:
            return StoreFacts(versions, None)
        name = f"{PROBE}{uuid.uuid4().hex}"
        try:
            files.write(name, [b"petps doctor --probe-writes"])
            files.remove(name)
        except PetpsError as error:
            return StoreFacts(versions, False, {"error": str(error)})
        return StoreFacts(versions, True)


def _missing_bucket(url: str) -> str | None:
    """Return the first part of a URL's path, if the file system says that it does not exist.

    A store that does not exist yet looks the same as one in a bucket that does not exist.
    """
    import fsspec

    try:
        file_system, root = fsspec.core.url_to_fs(url)
        bucket = PurePosixPath(root).parts[0]
        return None if file_system.exists(bucket) else bucket
    except Exception:  # it may be forbidden to ask; what the store itself answered counts
        return None
