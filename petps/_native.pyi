"""Types of the extension module (native/bindings). Thin: no logic, the GIL released on all work.

Arrays are checked, never converted: a wrong dtype, shape or a strided array raises
``petps.errors.InvalidArgument`` that names the argument. Everything else raises the class of
``petps.errors`` that native/base/status.h names. Methods of a closed ``Tables`` (and of its tables)
raise ``FailedPrecondition``. Do not write to an array while a call is reading it.
"""

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

__version__: str
LOST_POOL_EXIT_STATUS: int
"""Of a process that stop_on_lost_pool() ended: native/media/bus_error.h."""

def stop_on_lost_pool() -> None:
    """Ends this process with a message and LOST_POOL_EXIT_STATUS when a page of a pool is lost.

    A disk that failed, a file that was truncated, a lost mount (SIGBUS). For commands that own
    their process, never for libraries.
    """

Keys = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Durability = Literal["power", "process"]

class PoolInfo:
    path: str
    medium: str
    """'file', 'dax' or 'dram'."""
    durability: str
    volatile: bool
    read_only: bool
    failed: bool
    """A drain failed since it was opened: the pool is read-only until reopened."""
    uuid: str
    generation: int
    was_clean: bool
    lost_power: bool
    size_bytes: int
    unit_bytes: int
    readers_refused: str
    """Why no process may read the pool beside this one; empty: it may."""
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
    def as_dict(self) -> dict[str, Any]: ...

class TableStatus:
    rows: int
    capacity: int
    slots: int
    free_slots: int
    retired_slots: int
    index_bytes: int
    header_bytes: int
    row_bytes_total: int
    allocator_bytes: int
    displaced: int
    walked: bool
    def as_dict(self) -> dict[str, Any]: ...

class ApplyReport:
    inserted: int
    updated: int
    deleted: int
    absent: int
    refused: int
    """New keys refused because the table is at capacity."""
    superseded: int
    """Entries of the batch that a later one of the same key replaced."""
    def as_dict(self) -> dict[str, Any]: ...

class VerifyReport:
    clean: bool
    rows: int
    buckets: int
    stale_tags: int
    high_counters: int
    unreachable_slots: int
    problem_count: int
    problems: list[str]
    def as_dict(self) -> dict[str, Any]: ...

class Progress:
    """What a partition of an instance has applied.

    ``state``: 'following', 'catching_up' (to version ``target``), 'passing' (run ``target`` feeds
    another instance), 'incomplete' (rows of version ``target`` never came), 'conflict' (of two
    publishers of ``run``) or 'lost_power' (rows may be older than any progress). ``publisher``: 24
    bits that tell who wrote ``run``; 0: not known.
    """

    instance: int
    partition: int
    run: int
    seq: int
    offset: int
    version: int
    state: str
    target: int
    publisher: int
    def __init__(
        self,
        *,
        instance: int,
        partition: int,
        run: int,
        seq: int,
        offset: int,
        version: int,
        state: str = "following",
        target: int = 0,
        publisher: int = 0,
    ) -> None: ...
    def as_dict(self) -> dict[str, Any]: ...

class Scan:
    """Pages of a table, each a copy; holds off migration until closed or exhausted."""

    def __enter__(self) -> Scan: ...
    def __exit__(self, *exc: object) -> None: ...
    def __iter__(self) -> Scan: ...
    def __next__(self) -> tuple[Keys, Bytes]:
        """keys: uint64[n], rows: uint8[n, row_bytes]; n may be 0."""
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
        """uint8[row_bytes]: the stored row shown for a missing key."""
    def apply(
        self,
        keys: Keys,
        rows: Bytes | None,
        deleted: Mask | None = None,
        stamp: int = 0,
        threads: int = 1,
    ) -> ApplyReport:
        """keys: uint64[n], rows: uint8[n, row_bytes] or None (all deletions), deleted: bool[n].

        Durable at the pool's level when it returns. Later entries of the same key win. ``stamp`` is
        the low 32 bits of the writing version (a wider number is cut). ``threads``: how many may
        work on a large batch, the caller among them.
        """
    def pull(self, keys: Keys, out: Floats | Bytes, mask: Mask | None = None) -> int:
        """Fills out (float32[n, dim], or uint8[n, row_bytes] for stored bytes) and mask (bool[n]).

        Missing keys get the table's default row. Returns how many keys were found.
        """
    def keys(self) -> Keys:
        """uint64[n]: every key, in no order; one written meanwhile may be missing or twice."""
    def scan(self, buckets_per_page: int = 4096) -> Scan: ...
    def status(self) -> TableStatus: ...
    def set_hot_keys(self, keys: Keys) -> None: ...
    def migrate(self, hot_keys: Keys) -> int: ...
    def rehome(self) -> int: ...
    def bucket_reads(self, keys: Keys) -> tuple[int, int]:
        """(buckets read, keys found) for the keys that are there."""

class Tables:
    """One open pool. ``close`` stores the free lists; dropped without it, it recovers at open."""

    @staticmethod
    def create(
        path: str,
        *,
        durability: Durability = "power",
        unit_bytes: int = ...,
        background: bool = True,
        replace: bool = False,
    ) -> Tables:
        """path '' makes a volatile pool in anonymous memory; replace: what a device holds."""
    @staticmethod
    def discard(path: str) -> None:
        """Removes a pool that nobody has open: the file, or what makes a device hold one."""
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

        allow_lost_power: also one that lost power, if read_only (for verify). accept_lost_power:
        take such a pool, which verify found clean, back into service: every recorded progress then
        needs a base.
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
        """Drop it; its space is used again once no reader holds it.

        Raise FailedPrecondition if an alias names it.
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
    ) -> Table: ...
    def find(self, instance: str, table: str) -> Table:
        """Raises NotFound that names the tables of the instance."""
    def find_id(self, table: int) -> Table: ...
    def tables(self) -> list[Table]: ...
    def set_feed(self, table: int, feed: Literal["push", "delta"]) -> None: ...
    def set_durability(self, durability: Durability) -> None: ...
    def record_progress(self, progress: Progress) -> None: ...
    def record_all_progress(self, all: list[Progress]) -> None: ...
    def progress(self, instance: int, partition: int) -> Progress | None: ...
    def all_progress(self) -> list[Progress]: ...
    def applied_version(self, instance: int) -> int: ...
    def walk(self) -> None: ...
    def walked(self) -> bool: ...
    def reclaim(self) -> int: ...
    def verify(self) -> VerifyReport: ...

class LiveReader:
    """A pool of this machine, read in this process while a server writes it.

    FailedPrecondition: no server has made POOL.readers, closed, or used in a forked child.
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
        """Return the tables of the instance that ``model`` names now, in this order."""
    def pull(
        self, table: TableRecord, keys: Keys, out: Floats | Bytes, mask: Mask | None = None
    ) -> int | None:
        """Pull as Table.pull does. Return None if the table was dropped before the last key."""
    def hold_pin_for_test(self) -> None:
        """Take a pin that the process holds until it exits."""
    def disable_pins_for_test(self) -> None: ...

class ShardMap:
    """Who owns which partitions of a model. InvalidArgument names the first fault."""

    def __init__(
        self,
        *,
        model: str,
        version: int,
        partitions: int,
        servers: list[tuple[str, list[int]]],
    ) -> None:
        """servers: (address, partitions) each; those with the same partitions are replicas."""
    @property
    def model(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def partitions(self) -> int: ...
    @property
    def servers(self) -> list[tuple[str, list[int]]]: ...
    def owned_by(self, address: str) -> list[int]:
        """The partitions of one server; none when the map does not name it."""

class CallReply:
    """The reply of a call. Its methods raise the error that it is."""

    @property
    def ticket(self) -> int: ...
    def check(self) -> None: ...
    def pulled(self) -> tuple[int, list[tuple[int, int, int, bytes, bytes]]]:
        """(applied version, [(code, row bytes, rows found, presence bitmap, rows packed)])."""
    def pushed(self) -> tuple[int, int, int, int, int]:
        """(inserted, updated, deleted, absent, refused)."""

class Calls:
    """Requests of this process to its own server: submitted, then taken by ticket.

    keys: 8 little-endian bytes each. Errors: Unavailable (stopped), ResourceExhausted (too many).
    """

    @property
    def ready_descriptor(self) -> int:
        """Readable while replies wait; take() resets it."""
    def pull(
        self,
        instance: int,
        sections: list[tuple[int, bytes]],
        *,
        min_version: int = 0,
        wait_ms: int = 0,
    ) -> int:
        """sections: (table id, keys)."""
    def push(
        self,
        table: TableRecord,
        keys: bytes,
        rows: bytes,
        *,
        deleted: bytes = b"",
        stamp: int = 0,
    ) -> int:
        """rows: as stored, packed; empty: all keys are deleted. deleted: a bit a key."""
    def set_hot_keys(self, table: int, keys: bytes) -> int: ...
    def take(self) -> list[CallReply]: ...

class Server:
    """The native server over the tables of an open pool. ``Tables.close`` refuses while it runs."""

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
    ) -> Server:
        """Listens and serves when it returns. Unknown limits raise InvalidArgument.

        address: its own in the shard map, by default host:port. call_workers: threads of
        ``calls``. rdma: "off", "auto" (the first device with an active port) or a device's name;
        without such a device, or over a pool in a file that is not in memory, FailedPrecondition.
        real_time: priority of workers, 1 to 99, FailedPrecondition where it is not permitted.
        """
    @property
    def calls(self) -> Calls: ...
    @property
    def port(self) -> int: ...
    @property
    def address(self) -> str: ...
    def set_shard_map(self, map: ShardMap) -> None:
        """From now on. InvalidArgument (model, partitions), FailedPrecondition (version)."""
    def stop(self) -> None:
        """Accepts no more, answers what arrived. DeadlineExceeded: cut after drain_ms.

        Afterwards the other methods raise FailedPrecondition; port, address and calls stay.
        """
    def stats(self) -> dict[str, Any]: ...
    def status_json(self) -> str: ...
    def set_status_member(self, name: str, json: str) -> None: ...

def encode_rows(dtype: str, rows: Floats) -> Bytes:
    """rows: float32[n, dim] -> uint8[n, row_bytes(dtype, dim)]."""

def decode_rows(dtype: str, dim: int, rows: Bytes) -> Floats:
    """rows: uint8[n, row_bytes] -> float32[n, dim]."""

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
    """rows: float32[n, dim] -> uint8[n, quantised_row_bytes(method, bits, dim)].

    InvalidArgument names the first row with a NaN, an infinity or a range beyond float32.
    """

def dequantise_rows(method: str, bits: int, dim: int, rows: Bytes) -> Floats:
    """rows: uint8[n, quantised_row_bytes] -> float32[n, dim]."""

def quantised_row_bytes(method: str, bits: int, dim: int) -> int: ...
def jagged_unique(
    values: Keys,
    offsets: Keys,
    *,
    ascending: bool = ...,
    inverse: bool = ...,
    counts: bool = ...,
) -> tuple[Keys, Keys, npt.NDArray[np.uint32] | None, Keys | None]:
    """Distinct ids of each table of values: uint64[n], offsets: uint64[tables + 1].

    Gives ids uint64[m], their offsets uint64[tables + 1], and if asked inverse uint32[n] (the place
    of each value's id in its table's part) and counts uint64[m]. InvalidArgument names an offset
    that falls or does not end with the values.
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
    """out[i] = the first values of rows[at[i]]: float32[n, width], int64[m], float32[m, dim].

    InvalidArgument names a position that is none, and nothing is written; likewise below.
    """

def add_rows(into: Floats, at: npt.NDArray[np.int64], rows: Floats) -> None:
    """into[at[i]] += rows[i], in order: float32[n, dim], int64[m], float32[m, dim]."""

def copy_rows(
    into: Floats, to: npt.NDArray[np.int64], rows: Floats, from_: npt.NDArray[np.int64]
) -> None:
    """into[to[i]] = rows[from_[i]]: float32 rows of one width."""

def common_keys(left: Keys, right: Keys) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Positions in left and right of the keys that both have: ascending uint64[n], uint64[m]."""

def first_not_finite(rows: Floats) -> int:
    """Index of the first row of float32[n, dim] with a NaN or infinity, or n."""

def partition_of(keys: Keys, partitions: int) -> npt.NDArray[np.uint32]:
    """keys: uint64[n] -> uint32[n], each below ``partitions``: xxh3(key) mod partitions."""

def set_time_slice(short: bool) -> None:
    """Whether this thread, and those that it starts, take short turns on a busy processor.

    Who does is not kept waiting when it wakes up (Linux 6.12 and later), at the same share.
    """

def cpu_features() -> dict[str, bool]: ...
def formats() -> dict[str, int]:
    """Version of every format this build reads and writes, by name."""

def crc32c(data: bytes | memoryview, seed: int = 0) -> int: ...
