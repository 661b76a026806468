"""The delta record: one message of a delta log, decoded. FORMAT.md defines the bytes.

Owns:        Message, the record classes, encode_record, read_header, decode_record.
Never does:  read or write a log; know which records were applied; loop over rows in Python.
Called by:   publish (encode), ingest (decode). There is no second encoder or decoder.
Invariants:  decode(encode(r)) == r. read_header() returns a header only after its checksum matched.
             The arrays of a decoded record are views of the message's body.
Threads:     pure functions.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from petps.delta import arrow, headers
from petps.delta.errors import DeltaError, Fault
from petps.delta.headers import Message
from petps.delta.schema import INSTANCE, TableSchema

__all__ = [
    "BaseBody",
    "CommitBody",
    "ContinueBody",
    "Kind",
    "Record",
    "RecordHeader",
    "RowsBody",
    "TableCount",
    "decode_record",
    "encode_record",
    "read_header",
]

U64_MAX: Final = (1 << 64) - 1
_U64 = Annotated[int, Field(ge=0, le=U64_MAX)]
MAX_LOCATION_BYTES: Final = 4096  # PATH_MAX, which is longer than the URLs of object stores


class Kind(enum.Enum):
    """Kind of a message. Messages carry the values: never rename one."""

    ROWS = "rows"
    COMMIT = "commit"
    BASE = "base"
    CONTINUE = "continue"


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """Header of a message: its publisher, time and place. Times are nanoseconds since 1970.

    The meaning of ``version`` depends on the kind. For a commit it is the version that is complete,
    for a base the version that the base holds, for rows and continue the lowest version that they
    can become part of. ``table`` is empty unless the kind is ROWS.
    """

    model: str
    kind: Kind
    run: int
    publisher: str
    step: int
    seq: int
    version: int
    time_ns: int
    partition: int
    partitions: int
    table: str = ""
    dtype: str = ""
    dim: int = 0

    @property
    def begins_run(self) -> bool:
        """Return whether the message begins a run: seq 1, and a base or a continue marker."""
        return self.seq == 1 and self.kind in (Kind.BASE, Kind.CONTINUE)


@dataclass(frozen=True, slots=True)
class RowsBody:
    """Rows: keys uint64[n]; rows uint8[n, row_bytes] as stored; deleted bool[n] or None."""

    keys: npt.NDArray[np.uint64]
    rows: npt.NDArray[np.uint8]
    deleted: npt.NDArray[np.bool_] | None


class _Body(BaseModel):
    # Unknown fields are allowed: a later release may add some without a new format number.
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class TableCount(_Body):
    """Number of rows and deletions of a table in a version: in this partition and in all."""

    here: _U64
    everywhere: _U64


class CommitBody(_Body):
    """Marker that a version is complete. ``dense`` locates its dense weights, if it has any."""

    tables: dict[str, TableCount]
    dense: Annotated[str, Field(max_length=MAX_LOCATION_BYTES)] | None = None


class BaseBody(_Body):
    """Marker that the base at ``location`` (petps/checkpoint) holds every row up to this message.

    ``instance`` (``model@name``) is the instance that the run feeds; if it does not exist yet, the
    base creates it. None selects the instance that the previous runs fed.
    """

    location: Annotated[str, Field(min_length=1, max_length=MAX_LOCATION_BYTES)]
    instance: Annotated[str, Field(pattern=INSTANCE)] | None = None


class ContinueBody(_Body):
    """Marker that this run continues from the previous run's state up to ``last_seq``.

    That state contains the previous run's messages of this partition up to ``last_seq``. {0, 0}
    means that it contains no delta of this partition.
    """

    previous_run: _U64
    last_seq: _U64


Body = RowsBody | CommitBody | BaseBody | ContinueBody
_BODIES: Final[dict[Kind, type[_Body]]] = {
    Kind.COMMIT: CommitBody,
    Kind.BASE: BaseBody,
    Kind.CONTINUE: ContinueBody,
}


@dataclass(frozen=True, slots=True)
class Record:
    """A decoded message."""

    header: RecordHeader
    body: Body


def encode_record(record: Record) -> Message:
    """Return the message for ``record``. Raises DeltaError(TOO_LARGE) over MAX_MESSAGE_BYTES."""
    header = record.header
    body: bytes | memoryview
    if isinstance(record.body, RowsBody):
        body = arrow.encode_rows(record.body.keys, record.body.rows, record.body.deleted)
    else:
        # Omit a missing instance, so that a base has the same bytes as before instances existed.
        body = record.body.model_dump_json(exclude_none=isinstance(record.body, BaseBody)).encode()
    fields = [
        ("model", header.model),
        ("table", header.table),
        ("kind", header.kind.value),
        ("run", str(header.run)),
        ("publisher", header.publisher),
        ("step", str(header.step)),
        ("seq", str(header.seq)),
        ("version", str(header.version)),
        ("time", str(header.time_ns)),
        ("partition", str(header.partition)),
        ("partitions", str(header.partitions)),
        ("dtype", header.dtype),
        ("dim", str(header.dim)),
    ]
    return headers.seal([(name, value.encode()) for name, value in fields], body)


def read_header(message: Message) -> RecordHeader:
    """Check size, format, fields and the checksum over everything, and return the header.

    The body is not decoded. Raises DeltaError.
    """
    fields = headers.unseal(message)
    kind_name = fields.text("kind")
    try:
        kind = Kind(kind_name)
    except ValueError:
        raise DeltaError(Fault.HEADER_INVALID, f"header kind is {kind_name!r}") from None
    header = RecordHeader(
        model=fields.text("model"),
        kind=kind,
        run=fields.number("run"),
        publisher=fields.text("publisher"),
        step=fields.number("step"),
        seq=fields.number("seq"),
        version=fields.number("version"),
        time_ns=fields.number("time"),
        partition=fields.number("partition"),
        partitions=fields.number("partitions"),
        table=fields.text("table"),
        dtype=fields.text("dtype"),
        dim=fields.number("dim"),
    )
    if header.seq == 0 or header.run == 0:
        raise DeltaError(Fault.HEADER_INVALID, "run and seq begin with 1, but a header has 0")
    if header.partition >= header.partitions:
        raise DeltaError(
            Fault.HEADER_INVALID,
            f"partition {header.partition} is not below partitions {header.partitions}",
        )
    return header


def decode_record(
    message: Message,
    *,
    model: str,
    partition: int,
    partitions: int,
    schema_of: Callable[[str], TableSchema | None],
    header: RecordHeader | None = None,
) -> Record:
    """Decode a message. The arrays of the returned Record are views of the message's body.

    Args:
        message: A message with any bytes, even damaged or hostile ones.
        model, partition, partitions: The place that the message must belong to.
        schema_of: Function that returns the schema of a table by name, or None if it is unknown.
        header: The result of read_header() for this message, if the caller has it.

    Raises:
        DeltaError: Names what is wrong. No bytes cause another exception.
    """
    header = header or read_header(message)
    check_place(header, model=model, partition=partition, partitions=partitions)
    if header.kind is Kind.ROWS:
        schema = schema_of(header.table)
        check_schema(header, schema)
        assert schema is not None
        keys, rows, deleted = arrow.decode_rows(message.body, schema.row_bytes)
        return Record(header, RowsBody(keys, rows, deleted))
    try:
        body = _BODIES[header.kind].model_validate_json(bytes(message.body))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DeltaError(
            Fault.BODY_INVALID, f"body of a {header.kind.value} record: {where} {first['msg']}"
        ) from None
    assert isinstance(body, CommitBody | BaseBody | ContinueBody)
    return Record(header, body)


def check_place(header: RecordHeader, *, model: str, partition: int, partitions: int) -> None:
    """Raise DeltaError if the message belongs to another model, partition or partition count."""
    if header.model != model:
        raise DeltaError(
            Fault.WRONG_MODEL, f"message of model {header.model!r}, expected {model!r}"
        )
    if header.partitions != partitions:
        raise DeltaError(
            Fault.WRONG_PARTITION,
            f"written for {header.partitions} partitions, but model {model} has {partitions}: "
            "the number can never change",
        )
    if header.partition != partition:
        raise DeltaError(
            Fault.WRONG_PARTITION,
            f"message of partition {header.partition}, found in partition {partition}",
        )


def check_schema(header: RecordHeader, schema: TableSchema | None) -> None:
    """Raise DeltaError if a rows message does not fit the table that it names."""
    if schema is None:
        raise DeltaError(
            Fault.WRONG_TABLE,
            f"model {header.model} has no table {header.table!r}: create it, or fix the publisher",
        )
    if header.dim != schema.dim:
        raise DeltaError(
            Fault.WRONG_DIM, f"table {schema.name} has dim {schema.dim}, the message {header.dim}"
        )
    if header.dtype != schema.dtype:
        raise DeltaError(
            Fault.WRONG_DTYPE,
            f"table {schema.name} holds {schema.dtype} rows, the message {header.dtype!r}",
        )
