"""Records of the extension module: part of petps/_native.pyi."""

from collections.abc import Mapping
from typing import Any, Literal, NoReturn

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
    expire_after: int
    event_time_ns: int
    expired: int
    expiry_delay: float
    evicted: int
    missing_rows: int
    """Rows that the scrubber removed as damaged, and that nothing has written or deleted since."""
    damaged_slots: int
    """Slots of damaged rows, which stay unused."""
    heat_bytes: int
    def as_dict(self) -> dict[str, Any]: ...

class ApplyReport:
    inserted: int
    updated: int
    deleted: int
    absent: int
    refused: int
    """New keys that were refused because the table is full."""
    superseded: int
    """Entries of the batch that a later entry of the same key replaced."""
    def as_dict(self) -> dict[str, Any]: ...

class VerifyReport:
    clean: bool
    rows: int
    buckets: int
    stale_tags: int
    high_counters: int
    unreachable_slots: int
    complete: bool
    """Whether everything was read."""
    problem_count: int
    problems: list[str]
    def as_dict(self) -> dict[str, Any]: ...

class ScrubCursor:
    """Where a pass of the scrubber over a table is."""

    def __init__(self) -> None: ...

class DamagedRow:
    key: int
    slot: int
    stamp: int
    crc: int
    fault: str
    """'checksum', 'other key' (of the slot's header) or 'no slot' (of the entry)."""
    def as_dict(self) -> dict[str, Any]: ...

class ScrubStep:
    rows: int
    bytes: int
    buckets: int
    """Done by the pass, of ``bucket_count``."""
    bucket_count: int
    complete: bool
    default_row_damaged: bool
    damaged: list[DamagedRow]
    def as_dict(self) -> dict[str, Any]: ...

class Progress:
    """What a partition of an instance has applied.

    ``state``: 'following', 'catching_up' (to version ``target``), 'passing' (run ``target`` feeds
    another instance), 'incomplete' (rows of version ``target`` never came), 'conflict' (two
    publishers wrote ``run``) or 'lost_power' (rows may be older than any progress). ``publisher``:
    24 bits that identify the publisher of ``run``; 0 if it is not known.
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

class Grant:
    """Who may do what. Raise InvalidArgument unless it has either a hash or a certificate."""

    def __init__(
        self,
        name: str,
        *,
        token_sha256: bytes = b"",
        certificate: str = "",
        roles: list[str],
        models: list[str] = ...,
        requests_per_second: int = 0,
        bytes_per_second: int = 0,
        expires_s: int = 0,
    ) -> None:
        """models: empty for all. Limits: 0 for none. expires_s: seconds since 1970; 0: never."""
    @property
    def name(self) -> str: ...

class Caller:
    """Whose rights a request has."""

    @property
    def name(self) -> str: ...
    @property
    def is_anyone(self) -> bool: ...
    @property
    def may_see_all(self) -> bool: ...
    def may(self, role: str, model: str) -> bool: ...
    def may_everywhere(self, role: str) -> bool: ...
    def knows(self, model: str) -> bool: ...
    def spend_bytes(self, bytes: int) -> None:
        """Count the bytes of a reply."""

def host_of(address: str) -> str:
    """Return whom an address belongs to: without the port, and of IPv6 the first 64 bits."""

class Gate:
    """The grants in use, for every door (native/access/access.h)."""

    def __init__(self, mode: Literal["open", "certificates", "grants"]) -> None: ...
    @property
    def mode(self) -> str: ...
    @property
    def generation(self) -> int: ...
    def replace(self, grants: list[Grant]) -> None: ...
    def authenticate(self, token: str, certificate_names: list[str], peer: str) -> Caller:
        """Return the caller. Raise Unauthenticated, or ResourceExhausted after many failures."""
    def renew(self, caller: Caller) -> Caller | None:
        """Return the caller by the present grants; None if it is revoked or expired."""
    def charge(self, caller: Caller, bytes: int) -> None:
        """Count a request. Raise ResourceExhausted beyond the caller's limits."""
    def require(self, caller: Caller, role: str, model: str) -> None:
        """Raise PermissionDenied unless the caller has the role; model "": for all models."""
    def refuse(self, caller: Caller, role: str, what: str) -> NoReturn:
        """Raise PermissionDenied for ``what``, such as "model 'x'"."""
    def require_sight(self, caller: Caller) -> None:
        """Raise PermissionDenied unless the caller may see the status."""
    def counts(self) -> dict[str, int]: ...

class ServerTls:
    """Certificate and key of a server, from PEM files. The server speaks TLS 1.3 only."""

    def __init__(
        self,
        certificate: str,
        key: str,
        client_ca: str = "",
        client_certificates: Literal["off", "optional", "required"] = "off",
    ) -> None:
        """Read the files.

        certificate: the server's, followed by the intermediate ones. client_ca: the authorities of
        client certificates.

        Raise InvalidArgument, FailedPrecondition (expired) or IoError, each with the file, what is
        wrong and the remedy.
        """
    def reload(self) -> None:
        """Read all files again, for new connections. On an error the old ones stay in use."""
    def move(
        self,
        certificate: str,
        key: str,
        client_ca: str = "",
        client_certificates: Literal["off", "optional", "required"] = "off",
    ) -> None:
        """Read these files instead, from now on. On an error the old ones stay in use."""

class Span:
    """One answered pull, as a worker recorded it. Times are in nanoseconds."""

    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    """Zeros: the server began the trace."""
    start_ns: int
    """Since 1970."""
    duration_ns: int
    queued_ns: int
    waited_ns: int
    lookup_ns: int
    send_ns: int
    version: int
    instance: int
    keys: int
    rows_found: int
    sections: int
    tables: list[int]
    """Ids of the first sections' tables."""
    code: str
    source: Literal["tcp", "grpc", "rdma"]
    def as_dict(self) -> dict[str, Any]: ...

class ShardMap:
    """Assignment of a model's partitions to servers. InvalidArgument names the first fault."""

    def __init__(
        self,
        *,
        model: str,
        version: int,
        partitions: int,
        servers: list[tuple[str, list[int]]],
        zones: Mapping[str, str] = {},
    ) -> None:
        """Check and store the map. servers: (address, partitions) of each. zones: by address."""
    @property
    def model(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def partitions(self) -> int: ...
    @property
    def servers(self) -> list[tuple[str, list[int]]]: ...
    @property
    def zones(self) -> dict[str, str]: ...
    def owned_by(self, address: str) -> list[int]:
        """Return the partitions of a server; none if the map does not name it."""
