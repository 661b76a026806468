"""Types of the extension module (native/bindings). It has no logic, and works without the GIL.

Arrays are checked, never converted: a wrong dtype, a wrong shape or a strided array raises
``petps.errors.InvalidArgument``, which names the argument. Other errors raise the class of
``petps.errors`` that native/base/status.h names. Methods of a closed ``Tables`` (and of its tables)
raise ``FailedPrecondition``. Do not write to an array while a call is reading it.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from petps._native_records import ApplyReport as ApplyReport
from petps._native_records import Caller as Caller
from petps._native_records import DamagedRow as DamagedRow
from petps._native_records import Gate as Gate
from petps._native_records import Grant as Grant
from petps._native_records import Progress as Progress
from petps._native_records import ScrubCursor as ScrubCursor
from petps._native_records import ScrubStep as ScrubStep
from petps._native_records import ServerTls as ServerTls
from petps._native_records import ShardMap as ShardMap
from petps._native_records import Span as Span
from petps._native_records import TableStatus as TableStatus
from petps._native_records import VerifyReport as VerifyReport
from petps._native_records import host_of as host_of
from petps._native_router import CallReply as CallReply
from petps._native_router import Router as Router
from petps._native_router import RouterInstance as RouterInstance
from petps._native_router import RouterNames as RouterNames
from petps._native_router import RouterTable as RouterTable

__version__: str
software: str
"""Version and revision: "petps 0.1.0 (1a2b3c4d5e6f)"."""
LOST_POOL_EXIT_STATUS: int
"""The exit status of a process that stop_on_lost_pool() ended (native/media/bus_error.h)."""
MAX_PARTITIONS: int
MAX_SHARD_SERVERS: int
EXPIRY_CELLS: int
EXPIRY_STEPS: int
VERSIONS_AHEAD: int
"""Of event time: native/pool/clock.h."""

def footprint_of(row_bytes: int, capacity: int) -> dict[str, int]:
    """Return the most bytes of a new pool's table: 'records', 'index', 'rows', and 'memory'."""

def stop_on_lost_pool() -> None:
    """From now on, exit with a message and LOST_POOL_EXIT_STATUS when a page of a pool is lost.

    A page is lost (SIGBUS) when a disk fails, a file is truncated or a mount disappears. Call it
    from commands that own their process, never from libraries.
    """

Keys = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Stamps = npt.NDArray[np.uint32]
GoesOn = Callable[[int, int], bool] | None
# native/pool/clock.h: cell_ns, time_ns, version, bounds, shown_ns, debt_ns
Clock = tuple[int, int, int, list[int], int, int]
Durability = Literal["power", "process"]

class PoolInfo:
    path: str
    medium: str
    """'file', 'dax' or 'dram'."""
    durability: str
    volatile: bool
    read_only: bool
    failed: bool
    """Whether a drain failed since the open: the pool is read-only until it is opened again."""
    uuid: str
    generation: int
    was_clean: bool
    lost_power: bool
    size_bytes: int
    allocated_bytes: int
    free_bytes: int
    unit_bytes: int
    readers_refused: str
    """Why no other process may read the pool beside this one; empty if others may."""
    epoch_current: int
    epoch_retired_items: int
    def as_dict(self) -> dict[str, Any]: ...

class InstanceRecord:
    id: int
    model: str
    name: str
    partitions: int
    frozen: bool
    def as_dict(self) -> dict[str, Any]: ...

class TableRecord:
    id: int
    name: str
    instance: int
    dim: int
    dtype: str
    """'f32', 'f16', 'bf16' or 'int8'."""
    row_bytes: int
    capacity: int
    feed: str
    """'push' or 'delta'."""
    bucket_count: int
    expire_after: int
    """Seconds; 0: the rows never expire."""
    def as_dict(self) -> dict[str, Any]: ...

class Scan:
    """Iterator over copies of a table's pages. No key migrates until it is closed or exhausted."""

    def __enter__(self) -> Scan: ...
    def __exit__(self, *exc: object) -> None: ...
    def __iter__(self) -> Scan: ...
    def __next__(self) -> tuple[Keys, Bytes]:
        """Return the next page: keys uint64[n], rows uint8[n, row_bytes]; n may be 0."""
    def close(self) -> None: ...
    buckets_done: int
    buckets: int

class Table:
    @property
    def record(self) -> TableRecord: ...
    @property
    def id(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def row_bytes(self) -> int: ...
    def default_row(self) -> Bytes:
        """Return the row that a pull returns for a missing key, as stored: uint8[row_bytes]."""
    def apply(
        self,
        keys: Keys,
        rows: Bytes | None,
        deleted: Mask | None = None,
        stamp: int | Stamps = 0,
        threads: int = 1,
    ) -> ApplyReport:
        """Write rows and delete keys. They are durable, at the pool's level, on return.

        keys: uint64[n]; rows: uint8[n, row_bytes], or None to delete all keys; deleted: bool[n].
        The last entry of a repeated key wins. ``stamp``: the version of the rows, of which the low
        32 bits are stored, or these bits of each, uint32[n]. ``threads``: the number of threads,
        the caller included, that may work on a large batch.
        """
    def pull(
        self,
        keys: Keys,
        out: Floats | Bytes,
        mask: Mask | None = None,
        stamps: Stamps | None = None,
    ) -> int:
        """Fill out (float32[n, dim], or uint8[n, row_bytes] for stored bytes) and mask (bool[n]).

        stamps (uint32[n]): those of the found rows. Missing keys get the table's default row.
        Return the number of keys found.
        """
    def keys(self) -> Keys:
        """Return all keys, uint64[n]. A key written meanwhile may be missing, or appear twice."""
    def keys_and_stamps(self) -> tuple[Keys, Stamps]: ...
    def scan(self, buckets_per_page: int = 4096) -> Scan: ...
    def status(self) -> TableStatus: ...
    def set_hot_keys(self, keys: Keys) -> None: ...
    def migrate(self, hot_keys: Keys) -> int: ...
    def rehome(self) -> int: ...
    def scrub(self, cursor: ScrubCursor, bytes: int) -> ScrubStep:
        """Compare the rows of the next buckets, of about ``bytes``, with their headers and keys.

        Changes nothing but the cursor. native/table/SCRUB.md.
        """
    def remove_damaged(self, rows: list[DamagedRow]) -> int:
        """Remove rows, each only while its key still has that damaged row. Return how many."""
    def note_missing(self, keys: Keys) -> None:
        """Remember keys as missing that an earlier open removed, except those that exist."""
    def restore(self, keys: Keys, rows: Bytes, stamps: Stamps) -> ApplyReport:
        """Write the rows of those keys that nothing has written or deleted since their removal."""
    def missing_keys(self) -> Keys:
        """Return the keys that are missing now, uint64[n], unordered."""
    def find_damaged(self, keys: Keys) -> Mask:
        """Return bool[n]: which of the keys have a damaged row now."""
    def bucket_reads(self, keys: Keys) -> tuple[int, int]:
        """Return (buckets read, keys found); only found keys count."""

class Tables:
    """An open pool. ``close`` stores the free lists; without it, the next open recovers them."""

    @staticmethod
    def create(
        path: str,
        *,
        durability: Durability = "power",
        unit_bytes: int = ...,
        background: bool = True,
        replace: bool = False,
    ) -> Tables:
        """Create a pool; path '' creates a volatile one in anonymous memory.

        replace: overwrite what a device holds.
        """
    @staticmethod
    def discard(path: str) -> None:
        """Remove a pool that no process has open: delete the file, or clear the device's header."""
    @staticmethod
    def open(
        path: str,
        *,
        read_only: bool = False,
        allow_lost_power: bool = False,
        accept_lost_power: bool = False,
        background: bool = True,
    ) -> Tables:
        """Open a pool.

        allow_lost_power: with read_only, also open a pool that lost power (for verify).
        accept_lost_power: take such a pool back into service after verify found it clean. Every
        partition with progress then needs a base.
        """
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
    def info(self) -> PoolInfo: ...
    def create_instance(self, model: str, name: str, partitions: int) -> InstanceRecord: ...
    def instances(self) -> list[InstanceRecord]: ...
    def set_alias(self, alias: str, instance: int, *, unless_frozen: bool = False) -> None:
        """Switch the alias atomically, and freeze the instance that it named before.

        unless_frozen: raise FailedPrecondition if the instance is frozen, that is, an alias was
        switched away from it.
        """
    def previous_of_aliases(self) -> dict[str, int]:
        """Return the previous instance of each alias, if that instance still exists."""
    def drop_instance(self, instance: int) -> None:
        """Drop the instance; its space is reused once no reader holds it.

        Raise FailedPrecondition if an alias names it.
        """
    def drop_table(self, table: int) -> None:
        """Drop a table that pushes feed, by its id; its space is reused once no reader holds it.

        Raise FailedPrecondition if deltas feed it.
        """
    def aliases(self) -> dict[str, int]: ...
    def resolve(self, model: str) -> InstanceRecord: ...
    def create_table(
        self,
        name: str,
        *,
        instance: int,
        dim: int,
        dtype: str,
        capacity: int,
        feed: Literal["push", "delta"] = "push",
        default_row: Bytes | None = None,
        expire_after: int = 0,
    ) -> Table: ...
    def set_expiry(self, table: int, seconds: int) -> None: ...
    def tick(self, table: int, now_ns: int) -> None: ...
    def set_when_full(self, table: int, rule: str) -> None: ...
    def clocks(self, table: int) -> list[Clock]: ...
    def adopt_clock(self, table: int, partition: int, clock: Clock) -> None: ...
    def expire(self, table: int, *, paced: bool = True, progress: GoesOn = None) -> int:
        """Delete a table's expired rows; return how many (native/table/EXPIRY.md)."""
    def grow(
        self, table: int, capacity: int, *, paced: bool = True, progress: GoesOn = None
    ) -> None:
        """Give a table, by its id, more capacity (native/table/GROW.md).

        progress: receives the buckets copied and the buckets in all, at most every 50 ms; False
        gives up, and so does an exception, which is raised.
        """
    def shrink(self, progress: GoesOn = None) -> int:
        """Give the blocks of free space back to the disk; return its bytes."""
    def find(self, instance: str, table: str) -> Table:
        """Return a table of an instance. Raise NotFound, which lists the instance's tables."""
    def find_id(self, table: int) -> Table: ...
    def tables(self) -> list[Table]: ...
    def set_feed(self, table: int, feed: Literal["push", "delta"]) -> None: ...
    def set_durability(self, durability: Durability) -> None: ...
    def record_progress(self, progress: Progress) -> None: ...
    def record_all_progress(
        self, all: list[Progress], commits: Sequence[tuple[int, int, int, int]] = ()
    ) -> None:
        """commits: (instance, partition, version, time_ns) that the progress covers, in order."""
    def progress(self, instance: int, partition: int) -> Progress | None: ...
    def all_progress(self) -> list[Progress]: ...
    def applied_version(self, instance: int) -> int: ...
    def set_unread(self, instance: int, partitions: Sequence[int]) -> None:
        """Set the partitions of which the pool was opened without rows, until their log is read.

        Pulls of their keys by a shard map get NOT_FOUND.
        """
    def walk(self) -> None: ...
    def walked(self) -> bool: ...
    def reclaim(self) -> int: ...
    def verify(self, goes_on: Callable[[], bool] | None = None) -> VerifyReport:
        """Read everything and check it, also beside pulls and writes.

        goes_on: called at most every 50 ms; False ends it, and so does an exception, which is
        raised.
        """

class LiveReader:
    """Reader of a pool in this process, while a server on the same machine writes the pool.

    Methods raise FailedPrecondition if no server has made POOL.readers, after close(), and in a
    forked child.
    """

    @staticmethod
    def open(path: str) -> LiveReader: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def path(self) -> str: ...
    def tables(self) -> list[tuple[str, TableRecord]]:
        """Return (instance, table) of all tables that exist now."""
    def resolve(self, model: str) -> InstanceRecord: ...
    def instances(self) -> list[InstanceRecord]: ...
    def find(self, model: str, tables: list[str]) -> list[TableRecord]:
        """Return the named tables, in this order, of the instance that ``model`` names now."""
    def pull(
        self, table: TableRecord, keys: Keys, out: Floats | Bytes, mask: Mask | None = None
    ) -> int | None:
        """Pull as Table.pull does. Return None if the table was dropped before the last key."""
    def hold_pin_for_test(self) -> None:
        """Take a pin that the process holds until it exits."""
    def disable_pins_for_test(self) -> None: ...

class Calls:
    """Requests of this process to its own server. pull() and push() return a ticket at once.

    take() returns the replies, which carry the tickets. keys: 8 little-endian bytes each. Errors:
    Unavailable (the server stopped), ResourceExhausted (too many calls in flight).
    """

    @property
    def ready_descriptor(self) -> int:
        """Return a descriptor that is readable while replies wait; take() resets it."""
    def pull(
        self,
        instance: int,
        sections: list[tuple[int, bytes]],
        *,
        min_version: int = 0,
        wait_ms: int = 0,
        trace: bytes = b"",
    ) -> int:
        """Submit a pull and return its ticket. sections: (table id, keys).

        trace: the trace id and the span id of a sampled caller; empty: there is none.
        """
    def push(
        self,
        table: TableRecord,
        keys: bytes,
        rows: bytes,
        *,
        deleted: bytes = b"",
        stamp: int = 0,
    ) -> int:
        """Submit a push and return its ticket.

        rows: packed, as stored; empty to delete all keys. deleted: one bit for each key.
        """
    def set_hot_keys(self, table: int, keys: bytes) -> int: ...
    def hold(self, bytes: int) -> None:
        """Count bytes that a door holds for its calls. Raise ResourceExhausted if there is no room.

        At most 64 KiB at a time are never refused.
        """
    def release(self, bytes: int) -> None:
        """Count bytes of hold() no more."""
    def drop(self, ticket: int) -> None: ...
    def take(self) -> list[CallReply]: ...

class Server:
    """Native server over the tables of an open pool. ``Tables.close`` raises while it runs."""

    @staticmethod
    def start(
        tables: Tables,
        *,
        host: str = "127.0.0.1",
        port: int = 7070,
        workers: int = 1,
        gather: Literal["auto", "copy", "sendmsg", "zerocopy"] = "auto",
        hot_set_seconds: int = 10,
        drain_ms: int = 5000,
        limits: dict[str, int] = ...,
        shard_map: ShardMap | None = None,
        address: str = "",
        call_workers: int = 0,
        rdma: str = "off",
        real_time: int = 0,
        busy_poll_us: int = 0,
        gate: Gate | None = None,
        tls: ServerTls | None = None,
        trace_sample: float | None = None,
        paused_pushes: list[int] = ...,
        paused_pulls: list[int] = ...,
    ) -> Server:
        """Start a server, which listens and serves on return.

        address: the server's address in the shard map; by default host:port. call_workers: threads
        of ``calls``. rdma: "off", "auto" (the first device with an active port) or a device's name.
        real_time: priority of the workers, 1 to 99; 0: none. busy_poll_us: microseconds after a
        request in which a worker looks for the next one without sleeping. gate: who may do what;
        None: everybody may do everything. tls: None: plain text. trace_sample: the share of pulls
        without a caller's context that spans() returns, 0 to 1; None: it returns none.
        paused_pushes, paused_pulls: as set_pauses(), from the first request on.

        Raise InvalidArgument for an unknown limit. Raise FailedPrecondition if the RDMA device does
        not exist, if RDMA shall serve a pool whose file is not in memory, or if the process may not
        use real-time priorities.
        """
    @property
    def calls(self) -> Calls: ...
    @property
    def port(self) -> int: ...
    @property
    def address(self) -> str: ...
    def set_shard_map(self, map: ShardMap) -> None:
        """Use this map from now on.

        Raise InvalidArgument (another model or partition count) or FailedPrecondition (an older
        version).
        """
    def set_pauses(self, pushes: list[int], pulls: list[int]) -> None:
        """Refuse pushes to some partitions with WRONG_SHARD, and pulls after keep_pulls().

        On return, each push that was accepted before is applied or refused.
        """
    def keep_pulls(self, until_ns: int) -> None:
        """Answer pulls of paused partitions until this time.monotonic_ns(). At first: 0."""
    def track_pushes(self, partition: int, is_tracked: bool) -> None:
        """Begin, or end, to remember the keys that pushes to a partition write.

        Those of earlier pushes may be missing: read all rows afterwards.
        """
    def take_pushed(self, partition: int) -> dict[int, Keys]:
        """Return the keys of pushes to a tracked partition since the last call, by table id.

        Raise ResourceExhausted if there were too many: some keys are lost then.
        """
    def stop(self, drain_ms: int | None = None) -> None:
        """Accept no more requests, answer those that arrived, then stop.

        drain_ms: another one than that of start().

        Raise DeadlineExceeded if requests were cut after drain_ms. Afterwards the other methods
        raise FailedPrecondition; port, address and calls remain usable.
        """
    def stats(self) -> dict[str, Any]: ...
    def spans(self, most: int) -> tuple[list[Span], int]:
        """Return at most ``most`` new spans, and how many were dropped since the start."""
    def incidents_after(self, number: int) -> list[tuple[int, str, str]]:
        """Return (number, text, host of the peer or "") of the newest incidents after this number.

        Older ones, and some of a flood, are missing.
        """
    def refusals(self) -> list[str]:
        """Return how many peers were refused for each reason, in words."""
    def progress(self) -> tuple[list[int], int]:
        """Return counts that grow: of each worker, and of the writer of pushes.

        That of a worker grows at least twice a second. That of the writer is odd while it applies
        pushes.
        """
    def status_json(self) -> str: ...
    def set_status_member(self, name: str, json: str) -> None: ...

def encode_rows(dtype: str, rows: Floats) -> Bytes:
    """Encode rows: float32[n, dim] -> uint8[n, row_bytes(dtype, dim)]."""

def decode_rows(dtype: str, dim: int, rows: Bytes) -> Floats:
    """Decode rows: uint8[n, row_bytes] -> float32[n, dim]."""

def row_bytes(dtype: str, dim: int) -> int: ...
def quantise_rows(
    method: str,
    bits: int,
    rows: Floats,
    *,
    bins: int = ...,
    ratio: float = ...,
    seed: int = ...,
) -> Bytes:
    """Quantise rows: float32[n, dim] -> uint8[n, quantised_row_bytes(method, bits, dim)].

    InvalidArgument names the first row with a NaN, an infinity or a range beyond float32.
    """

def dequantise_rows(method: str, bits: int, dim: int, rows: Bytes) -> Floats:
    """Dequantise rows: uint8[n, quantised_row_bytes] -> float32[n, dim]."""

def quantised_row_bytes(method: str, bits: int, dim: int) -> int: ...
def jagged_unique(
    values: Keys,
    offsets: Keys,
    *,
    ascending: bool = ...,
    inverse: bool = ...,
    counts: bool = ...,
) -> tuple[Keys, Keys, npt.NDArray[np.uint32] | None, Keys | None]:
    """Return the distinct ids of each table.

    values: uint64[n], table after table; offsets: uint64[tables + 1]. The result is ids uint64[m],
    their offsets uint64[tables + 1], and on request inverse uint32[n] (the place of each value's id
    in its table's part) and counts uint64[m]. InvalidArgument names an offset that is smaller than
    the one before, or a last offset that is not n.
    """

def route_ask(
    values: list[Keys],
    block_of: Keys,
    *,
    world: int,
    micros: int,
    partitions: int,
    seen: bool,
) -> tuple[Keys, Keys, Keys, npt.NDArray[np.uint32]]:
    """Return the keys that a worker requests from all owners, and their bookkeeping.

    values: the keys of each (micro-batch, table). Returned are: keys uint64[n] in the order (owner,
    micro-batch, table, key); how often each key occurs in its part (uint64[n], or [0]); counts
    uint64[world, micros, tables]; and for each value its row within its micro-batch and block
    (uint32, below 2^31). Raise InvalidArgument for shapes that do not fit.
    """

def route_merge(
    keys: Keys, seen: Keys, wanted: Keys, block_of: Keys, *, world: int, micros: int
) -> tuple[Keys, Keys, Keys, npt.NDArray[np.int64]]:
    """Merge the keys that all workers request from this one.

    keys: in the order (rank, micro-batch, table, key); wanted: their counts. Returned are: the
    distinct keys of each table, ascending; their offsets uint64[tables + 1]; the sums of ``seen``
    (or [0]); and, in the order (micro-batch, block, rank, table, key), rows in their blocks
    (int64). Raise InvalidArgument for counts that do not add up.
    """

def gather_rows(rows: Floats, at: npt.NDArray[np.int64], out: Floats) -> None:
    """Set out[i] to the first dim values of rows[at[i]].

    rows: float32[n, width]; at: int64[m]; out: float32[m, dim]. This function, add_rows and
    copy_rows write nothing if a position is out of range: InvalidArgument names it.
    """

def add_rows(into: Floats, at: npt.NDArray[np.int64], rows: Floats) -> None:
    """Add rows[i] to into[at[i]], in order: float32[m, dim], float32[n, dim], int64[m]."""

def copy_rows(
    into: Floats, to: npt.NDArray[np.int64], rows: Floats, from_: npt.NDArray[np.int64]
) -> None:
    """Set into[to[i]] to rows[from_[i]]: float32 rows of one width."""

def common_keys(left: Keys, right: Keys) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the positions of the common keys in left and right, which are ascending uint64."""

def first_not_finite(rows: Floats) -> int:
    """Return the index of the first row of float32[n, dim] with a NaN or infinity, or n."""

def partition_of(keys: Keys, partitions: int) -> npt.NDArray[np.uint32]:
    """Return the partition of each key: xxh3(key) mod partitions. uint64[n] -> uint32[n]."""

def hash_rows(rows: Bytes) -> Keys:
    """Return XXH3-64 of each stored row: uint8[n, width] -> uint64[n]."""

def set_time_slice(short: bool) -> None:
    """Give this thread, and those that it starts, short time slices or the usual ones.

    With short ones it waits less when it wakes up on a busy processor (Linux 6.12 and later).
    """

def lower_priority(niceness: int = 10) -> None:
    """Let this thread give way to others, pulls above all: native/base/time_slice.h."""

def cpu_features() -> dict[str, bool]: ...
def formats() -> dict[str, int]:
    """Return the version of every format that this build reads and writes, by name."""

def crc32c(data: bytes | memoryview, seed: int = 0) -> int: ...
