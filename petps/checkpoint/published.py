"""The parts of a version that say how much of a delta log it holds. FORMAT.md, STORE.md.

Owns:        BaseInfo and Published: the names and bytes of their parts.
Never does:  publish.
Called by:   base.py and a trainer's output, which write the parts; base.py and served.py, which
             read them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Final

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from petps.checkpoint.chunk import Keys
from petps.checkpoint.state import Version
from petps.checkpoint.store import Store
from petps.delta import Position
from petps.delta.schema import MAX_PARTITIONS, partition_of
from petps.errors import DataLoss

if TYPE_CHECKING:
    from typing import Self  # Python 3.11

__all__ = [
    "BASE_PART",
    "POSITION",
    "UNPUBLISHED",
    "BaseInfo",
    "ClockEntry",
    "JsonModel",
    "PositionEntry",
    "Published",
    "Unsigned",
    "list_positions",
]

BASE_PART: Final = "petps.base"  # the part that write_base() stores
# Names of the parts, beside the trainer's own. If several trainer processes publish one run, each
# writes both parts, with its rank appended (".0").
POSITION: Final = "petps.position"
UNPUBLISHED: Final = "petps.unpublished"
BOUNDS: Final = 50  # native/pool/clock.h kExpiryBounds
Unsigned = Annotated[int, Field(ge=0, lt=1 << 64)]


class JsonModel(BaseModel):
    """An object of a JSON file."""

    # Ignore unknown fields: a later release may add some without a new format number.
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    @classmethod
    def parse(cls, text: bytes, where: str) -> Self:
        """Parse JSON. Raise DataLoss that names ``where`` and the wrong field."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            field = ".".join(str(part) for part in first["loc"])
            raise DataLoss(f"{where}: {field}: {first['msg']}") from None


class PositionEntry(JsonModel):
    """A partition's position: the rows hold at least every delta up to {run, seq}."""

    partition: Annotated[int, Field(ge=0, lt=MAX_PARTITIONS)]
    run: Unsigned
    seq: Unsigned


class _PositionPart(JsonModel):
    """A publisher's position, as Position.as_json() writes it."""

    run: Unsigned
    seqs: tuple[Unsigned, ...]
    version: Unsigned
    instance: str | None = None


def list_positions(positions: Mapping[int, tuple[int, int]]) -> list[PositionEntry]:
    """Return the positions (run, seq), given by partition, in the form of BaseInfo."""
    return [
        PositionEntry(partition=partition, run=run, seq=seq)
        for partition, (run, seq) in sorted(positions.items())
    ]


class ClockEntry(JsonModel):
    """The event time of a partition of a table whose rows expire (native/table/EXPIRY.md)."""

    partition: Annotated[int, Field(ge=0, lt=MAX_PARTITIONS)]
    cell_ns: Annotated[int, Field(ge=1, lt=1 << 64)]
    time_ns: Unsigned
    version: Unsigned
    bounds: Annotated[list[Unsigned], Field(min_length=BOUNDS, max_length=BOUNDS)]
    shown_ns: Unsigned
    debt_ns: Unsigned


class BaseInfo(JsonModel):
    """The instance whose rows a version has, and how much of the log they hold.

    version: The log's version that the rows hold at least.
    positions: A partition that is left out is at (0, 0).
    dense: The location of that version's dense weights.
    behind: The number of partitions whose log is behind their rows; they are left out.
    by_partition: Whether each chunk holds keys of one partition.
    clocks: The event times of tables whose rows expire, by table: at least those of the positions.
    """

    instance: str
    version: Unsigned
    partitions: Annotated[int, Field(ge=1, le=MAX_PARTITIONS)]
    positions: list[PositionEntry] = []
    dense: str | None = None
    behind: Annotated[int, Field(exclude=True)] = 0
    by_partition: bool = True
    clocks: dict[str, list[ClockEntry]] = {}

    @staticmethod
    def has_parts(entry: Version) -> bool:
        """Return whether the version has the parts that of() reads."""
        return BASE_PART in entry.parts or bool(Published.positions(entry))

    @classmethod
    def of(cls, store: Store, version: int) -> BaseInfo | None:
        """Read the parts of a version; None if it has none. Raise NotFound, DataLoss, IoError."""
        if BASE_PART in store.state.version(version).parts:
            return cls.parse(store.part(version, BASE_PART), f"{store.name}: part {BASE_PART}")
        published = Published.of(store, version)
        if published is None:
            return None
        position, behind = published.position, published.behind()
        # A server must not catch up to rows that are newer than the log: if the trainer continued
        # from an older version, the server could not notice that it has undone rows. Seq 0 means
        # that the position is not known.
        positions = {
            partition: (position.run, seq)
            for partition, seq in enumerate(position.seqs)
            if seq > 0 and partition not in behind
        }
        return cls(
            instance=position.instance or store.state.model,
            version=position.version,
            partitions=len(position.seqs),
            positions=list_positions(positions),
            behind=len(behind),
            by_partition=False,
        )

    def to_json(self) -> bytes:
        """Return the bytes of the part, without the fields that are not needed."""
        return self.model_dump_json(exclude=None if self.clocks else {"clocks"}).encode()


@dataclass(frozen=True, slots=True)
class Published:
    """A version's rows hold all deltas of the log up to ``position``.

    owed: by table, uint64[n]: keys whose rows the log does not have yet.
    """

    position: Position
    owed: Mapping[str, Keys]

    def parts(self, rank: int | None = None) -> dict[str, bytes]:
        """Return the parts by name; rank: this process's, if several trainer processes publish."""
        suffix = "" if rank is None else f".{rank}"
        position = json.dumps(self.position.as_json()).encode()
        return {f"{POSITION}{suffix}": position, f"{UNPUBLISHED}{suffix}": _write_keys(self.owed)}

    @staticmethod
    def positions(entry: Version) -> list[str]:
        """Return the names of a version's position parts: one for each trainer process, or none."""
        return [name for name in entry.parts if name == POSITION or name.startswith(f"{POSITION}.")]

    @staticmethod
    def of(store: Store, version: int) -> Published | None:
        """Read the parts of a version; None if it has none. Raise NotFound, DataLoss, IoError.

        Each of several trainer processes knows the seqs of its own partitions only, so the highest
        seq of a partition counts. If the log of a process failed, its partitions have seq 0.
        """
        where = f"{store.name}, version {version}"
        positions: list[Position] = []
        owed: dict[str, list[Keys]] = {}
        for name in Published.positions(store.state.version(version)):
            read = _PositionPart.parse(store.part(version, name), f"{where}: its part {name}")
            positions.append(Position(read.run, read.seqs, read.version, read.instance))
            keys = _read_keys(store.part(version, UNPUBLISHED + name.removeprefix(POSITION)), where)
            for table, table_keys in keys.items():
                owed.setdefault(table, []).append(table_keys)
        if not positions:
            return None
        runs = {
            (position.run, position.version, position.instance, len(position.seqs))
            for position in positions
        }
        if len(runs) != 1:
            raise DataLoss(f"{where}: the positions of its trainer processes differ")
        seqs = tuple(
            max(partition_seqs)
            for partition_seqs in zip(*(position.seqs for position in positions), strict=True)
        )
        owed_keys = {table: np.concatenate(pieces) for table, pieces in owed.items()}
        return Published(replace(positions[0], seqs=seqs), owed_keys)

    def behind(self) -> frozenset[int]:
        """Return the partitions with rows newer than the log: those of the owed keys."""
        partitions = len(self.position.seqs)
        return frozenset(
            int(partition)
            for keys in self.owed.values()
            for partition in np.unique(partition_of(keys, partitions))
        )


def _write_keys(keys: Mapping[str, Keys]) -> bytes:
    """Encode keys as a line of JSON, {table: count}, and the keys of each table, little-endian."""
    head = json.dumps({name: len(table_keys) for name, table_keys in keys.items()}).encode()
    return b"\n".join(
        [head, b"".join(table_keys.astype("<u8").tobytes() for table_keys in keys.values())]
    )


def _read_keys(body: bytes, where: str) -> dict[str, Keys]:
    head, _, rest = body.partition(b"\n")
    try:
        counts = json.loads(head)
        is_whole = all(type(count) is int and count >= 0 for count in counts.values())
        is_whole = is_whole and 8 * sum(counts.values()) == len(rest)
    except (ValueError, AttributeError, RecursionError) as error:
        raise DataLoss(f"{where}: its part {UNPUBLISHED} cannot be read: {error}") from error
    if not is_whole:
        raise DataLoss(f"{where}: its part {UNPUBLISHED} is cut off")
    keys = np.frombuffer(rest, "<u8").astype(np.uint64)
    ends = np.cumsum(list(counts.values()), dtype=np.intp)
    return dict(zip(counts, np.split(keys, ends[:-1]), strict=True)) if counts else {}
