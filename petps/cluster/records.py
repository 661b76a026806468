"""The records of a cluster in etcd, and their keys. FORMAT.md beside this describes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Final, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from petps.cluster.maps import ClusterMap
from petps.errors import FailedPrecondition, InvalidArgument

__all__ = [
    "FORMAT",
    "Choice",
    "Drop",
    "Keys",
    "Member",
    "Move",
    "PartitionReport",
    "Received",
    "Registration",
    "Sent",
    "Settings",
    "State",
    "Wish",
    "dump",
    "read_state",
]

FORMAT: Final = 1  # of every record; a reader refuses a higher one
FOLLOW: Final = "follow"  # the target follows the partition, and does not own it yet
HANDOVER: Final = "handover"  # the source shall take no more pushes, and send the last rows
SWITCH: Final = "switch"  # the target owns the partition, and the source still follows it
OPEN: Final = "open"  # the target may take pushes to the partition
Phase = Literal["follow", "handover", "switch", "open"]
Record = TypeVar("Record")
Numbered = TypeVar("Numbered", "Move", "Sent", "Received", "Wish")


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """The state of a partition that a member follows or owns.

    version: the last one that is applied. run: the publisher's run; messages of earlier ones are
    passed over. 0 if that is unknown.
    """

    version: int
    is_caught_up: bool
    run: int = 0


@dataclass(frozen=True, slots=True)
class Registration:
    """The facts of a server that stay known while it is away.

    is_pushed: it has tables that pushes feed. pool: the UUID of its pool. partitions: P. is_manual:
    it lets the cluster switch the model (`ingest.switch = "manual"`). is_fed: it follows a log.
    has_store: it has a [cluster] store, through which push-fed rows move.
    """

    address: str
    grpc_address: str | None
    zone: str
    weight: float
    pool: str
    release: str
    is_pushed: bool
    partitions: int
    is_manual: bool = False
    is_fed: bool = True
    has_store: bool = False


@dataclass(frozen=True, slots=True)
class Member:
    """The report of a server; its lease ends the record when the server is away.

    map_version: of the map that it uses, and that is on its disk. instance: the one that the
    model's name refers to. error: why it does not use the map of etcd, or has not switched the
    model; or ''. instances: all of the model that its pool has. whole: those of which it has every
    row of the partitions that it follows.
    """

    address: str
    pool: str
    map_version: int
    instance: str
    partitions: Mapping[int, PartitionReport]
    error: str = ""
    instances: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Move:
    """A move of a partition in its phase: FOLLOW or SWITCH, and if rows are copied more of them.

    source None: the partition gains a replica. target None: it loses one. map_version: of the map
    that was written with the phase, or with the one before. version: the applied version that the
    target must have before the switch. is_copied: pushes feed a table, so the source sends the rows
    to the target. attempt: grows with each handover that is taken back. pause_ms: the limit of each
    part of a handover. has_kept: the target had rows to remove, newer than those of all owners.
    run: the newest of the owners when the move began; 0: unknown.
    """

    partition: int
    source: str | None
    target: str | None
    phase: Phase
    reason: str
    map_version: int
    version: int = 0
    is_copied: bool = False
    attempt: int = 1
    pause_ms: int = 0
    has_kept: bool = False
    run: int = 0


@dataclass(frozen=True, slots=True)
class Sent:
    """How far the source of a move is. The source writes it.

    copy: a new name each time that it begins. parts, rows: complete in the store. is_close: only
    the rows of the last pushes are missing. is_released: it takes no more pushes, and no row is
    missing, in this ``attempt`` of the move. error: why it does not go on.
    """

    partition: int
    address: str
    copy: str
    attempt: int
    parts: int = 0
    rows: int = 0
    is_close: bool = False
    is_released: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class Received:
    """How many parts of a copy the target has, durably. The target writes it."""

    partition: int
    address: str
    copy: str
    parts: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Drop:
    """An order to a server: remove the rows and the progress of a partition.

    It holds once the server uses a map of at least ``map_version`` that does not name it for the
    partition. The server deletes the order when it is done. is_copied: the rows of tables that
    pushes feed are at another server, or were only its copy; else they stay. is_foreign: the rows
    are of another log, so they are removed however new they seem, and the runs are forgotten.
    """

    address: str
    partition: int
    map_version: int
    is_copied: bool = False
    is_foreign: bool = False


@dataclass(frozen=True, slots=True)
class Wish:
    """A move that an operator wants; the controller begins it."""

    partition: int
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Choice:
    """An order to all servers: the model's name refers to this instance.

    It holds for a server that uses a map of at least ``map_version`` and has the instance whole.
    before: the instance before, for the way back.
    """

    instance: str
    map_version: int
    before: str


@dataclass(frozen=True, slots=True)
class Settings:
    """The wishes of an operator that hold for a whole model."""

    replicas: int = 1


@dataclass(frozen=True)
class State:
    """Everything that etcd has of a model, at one revision. ``revisions``: of each key read."""

    model: str
    map: ClusterMap | None = None
    members: Mapping[str, Member] = field(default_factory=dict)
    registrations: Mapping[str, Registration] = field(default_factory=dict)
    moves: Mapping[int, Move] = field(default_factory=dict)
    sent: Mapping[int, Sent] = field(default_factory=dict)
    received: Mapping[int, Received] = field(default_factory=dict)
    drops: Mapping[tuple[str, int], Drop] = field(default_factory=dict)
    wishes: Mapping[int, Wish] = field(default_factory=dict)
    drained: frozenset[str] = frozenset()
    settings: Settings = Settings()
    is_rebalancing: bool = False
    choice: Choice | None = None
    switch: str = ""
    """The instance that an operator wants the model's name to refer to; '': no other."""
    revisions: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_pushed(self) -> bool:
        """Return whether pushes feed a table of the model, so that each partition has one owner."""
        return any(registration.is_pushed for registration in self.registrations.values())


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of a model below a prefix."""

    prefix: str
    model: str

    @staticmethod
    def election(prefix: str) -> str:
        """Return the key of the elected controller."""
        return f"{prefix}/controller"

    @staticmethod
    def models(prefix: str) -> str:
        """Return the prefix of the keys of all models."""
        return f"{prefix}/models/"

    @property
    def root(self) -> str:
        """Return the prefix of all keys of the model."""
        return f"{self.prefix}/models/{self.model}/"

    @property
    def orders(self) -> str:
        """Return the prefix of what servers read: the map, moves, copies, and orders to remove."""
        return f"{self.root}orders/"

    @property
    def map(self) -> str:
        """Return the key of the map."""
        return f"{self.orders}map"

    def drops_of(self, address: str) -> str:
        """Return the prefix of what a server shall remove."""
        return f"{self.orders}drops/{address}/"

    def drop(self, address: str, partition: int) -> str:
        """Return the key of a Drop."""
        return f"{self.drops_of(address)}{partition}"

    @property
    def members(self) -> str:
        """Return the prefix of what servers report."""
        return f"{self.root}members/"

    def member(self, address: str) -> str:
        """Return the key of a Member."""
        return f"{self.members}{address}"

    def registration(self, address: str) -> str:
        """Return the key of a Registration."""
        return f"{self.root}servers/{address}"

    def move(self, partition: int) -> str:
        """Return the key of a Move."""
        return f"{self.orders}moves/{partition}"

    def sent(self, partition: int) -> str:
        """Return the key of a Sent."""
        return f"{self.orders}sent/{partition}"

    def received(self, partition: int) -> str:
        """Return the key of a Received."""
        return f"{self.orders}received/{partition}"

    def wish(self, partition: int) -> str:
        """Return the key of a Wish."""
        return f"{self.root}wishes/{partition}"

    def drained(self, address: str) -> str:
        """Return the key that says that a server gives everything away."""
        return f"{self.root}drained/{address}"

    @property
    def settings(self) -> str:
        """Return the key of the Settings."""
        return f"{self.root}settings"

    @property
    def choice(self) -> str:
        """Return the key of the Choice."""
        return f"{self.orders}instance"

    @property
    def switch(self) -> str:
        """Return the key of the instance that an operator wants."""
        return f"{self.root}switch"

    @property
    def rebalance(self) -> str:
        """Return the key that says that the partitions shall be divided by weight."""
        return f"{self.root}rebalance"


def dump(record: Any) -> str:
    """Return a record as its JSON."""
    if isinstance(record, ClusterMap):
        return record.dump()
    return json.dumps({"format": FORMAT, **asdict(record)}, sort_keys=True)


def read_state(keys: Keys, values: Mapping[str, str], revisions: Mapping[str, int]) -> State:
    """Return the state in the values below ``keys.root``. Keys that are unknown are passed over.

    Raises InvalidArgument for a record that is not valid, and FailedPrecondition for one that a
    newer release wrote. Both name the key.
    """
    members: dict[str, Member] = {}
    registrations: dict[str, Registration] = {}
    moves: dict[int, Move] = {}
    sent: dict[int, Sent] = {}
    received: dict[int, Received] = {}
    drops: dict[tuple[str, int], Drop] = {}
    wishes: dict[int, Wish] = {}
    drained = set()
    cluster_map, settings, choice, switch = None, Settings(), None, ""
    for key, text in values.items():
        kind, _, rest = key.removeprefix(keys.root).partition("/")
        if key == keys.map:
            cluster_map = _parsed(key, text, ClusterMap.of)
        elif key == keys.settings:
            settings = _record(key, text, Settings)
        elif key == keys.choice:
            choice = _record(key, text, Choice)
        elif key == keys.switch:
            switch = _parsed(key, text, lambda document: str(document["instance"]))
        elif kind == "members":
            members[rest] = _record(key, text, Member)
        elif kind == "servers":
            registrations[rest] = _record(key, text, Registration)
        elif kind == "wishes":
            _add(wishes, key, text, Wish)
        elif kind == "drained":
            drained.add(rest)
        elif kind == "orders":
            order = rest.partition("/")[0]
            if order == "drops":
                drop = _record(key, text, Drop)
                drops[drop.address, drop.partition] = drop
            elif order == "moves":
                _add(moves, key, text, Move)
            elif order == "sent":
                _add(sent, key, text, Sent)
            elif order == "received":
                _add(received, key, text, Received)
    if cluster_map is not None:
        for number in (*moves, *wishes):
            if not 0 <= number < len(cluster_map.owners):
                raise InvalidArgument(
                    f"etcd's keys {keys.move(number)} or {keys.wish(number)} are of no partition: "
                    f"the map has 0 to {len(cluster_map.owners) - 1}"
                )
    return State(
        keys.model,
        cluster_map,
        members,
        registrations,
        moves,
        sent,
        received,
        drops,
        wishes,
        frozenset(drained),
        settings,
        keys.rebalance in values,
        choice,
        switch,
        revisions,
    )


def _add(records: dict[int, Numbered], key: str, text: str, kind: type[Numbered]) -> None:
    """Add a record whose key ends with its partition; pass over a key that ends otherwise."""
    number = key.rpartition("/")[2]
    if not number.isdecimal():
        return
    record = _record(key, text, kind)
    if number != str(record.partition):
        raise InvalidArgument(
            f"etcd's key {key} has no valid record: it is of partition {record.partition}"
        )
    records[record.partition] = record


def _record(key: str, text: str, kind: type[Record]) -> Record:
    """Return a record of a kind; members of its document that are unknown are passed over."""
    adapter: TypeAdapter[Record] = _adapter(kind)  # type: ignore[arg-type]
    return _parsed(key, text, lambda _: adapter.validate_json(text, strict=True))


@cache
def _adapter(kind: Any) -> Any:
    return TypeAdapter(kind)


def _parsed(key: str, text: str, parse: Callable[[Mapping[str, Any]], Record]) -> Record:
    try:
        document = json.loads(text)
        version = document.get("format", FORMAT)
        if not isinstance(version, int) or version < 1:
            raise ValueError(f"format {version!r}")
        if version <= FORMAT:
            return parse(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise InvalidArgument(
            f"etcd's key {key} has no valid record: {place}: {first['msg']}"
        ) from None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise InvalidArgument(
            f"etcd's key {key} has no valid record: {type(error).__name__}: {error}"
        ) from None
    raise FailedPrecondition(
        f"etcd's key {key} has format {version}, but this release knows formats up to {FORMAT}: "
        "upgrade petps here first"
    )
