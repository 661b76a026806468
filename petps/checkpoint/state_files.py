"""The files of states and lineages. STORE.md.

Owns:        load(), encode_state(), write_lineage(), read_lineage(), encode_document(),
             read_document(), new_name().
Never does:  change a state; create the file of a state (commit.py).
Called by:   commit.py, store.py, shares.py, bundle.py.
Invariants:  what does not match its checksum is never returned.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple, replace
from operator import attrgetter
from typing import Any, Final

import xxhash

from petps.checkpoint.chunk import Column, Table
from petps.checkpoint.fields import check_paths, check_records, check_values
from petps.checkpoint.files import Files
from petps.checkpoint.quantise import Quantising
from petps.checkpoint.state import Chunk, Lineage, Part, Sealed, State, Version
from petps.codec import Quantisation
from petps.errors import DataLoss, InvalidArgument, NotFound, Unimplemented

__all__ = [
    "FORMAT",
    "describe_tables",
    "encode_document",
    "encode_state",
    "load",
    "new_name",
    "newest_state",
    "read_document",
    "read_lineage",
    "read_tables",
    "state_path",
    "write_lineage",
]

FORMAT_NAME: Final = "petps-store"
FORMAT: Final = 2  # in format 1 every chunk has keys and a filter
# What a document of another shape raises while it is read.
_UNREADABLE: Final = (
    AttributeError, InvalidArgument, KeyError, OverflowError, TypeError, ValueError,
)  # fmt: skip
SEALED_CHUNKS: Final = 64  # the least number of chunks in a sealed file
_STATE: Final = re.compile(r"(\d{20})\.json")


def new_name() -> str:
    """Return a name that no file has ever had."""
    return uuid.uuid4().hex


_CHUNK_FIELDS: Final = tuple(Chunk.__slots__)


def encode_document(values: dict[str, Any]) -> bytes:
    """Return format and values as JSON, with the checksum of that JSON inserted at its end."""
    document = {"format": f"{FORMAT_NAME}-{FORMAT}", **values}
    text = json.dumps(document, separators=(",", ":")).encode()
    return text[:-1] + f',"checksum":"{xxhash.xxh3_64_hexdigest(text)}"}}'.encode()


def _has_checksum(text: bytes, checksum: object) -> bool:
    """Return whether encode_document() returned ``text``, with this checksum."""
    end = f',"checksum":"{checksum}"}}'.encode()
    return text.endswith(end) and xxhash.xxh3_64_hexdigest(text[: -len(end)] + b"}") == checksum


def read_document(files: Files, path: str, checksum: str | None = None) -> dict[str, Any]:
    """Return the values that encode_document() encoded; checksum: of the whole file, if known.

    Raise DataLoss, NotFound, and Unimplemented for a newer format.
    """
    text = files.read(path)
    where = f"{files.name}/{path}"
    try:
        values: dict[str, Any] = json.loads(text)
        name, _, number = str(values["format"]).rpartition("-")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataLoss(f"{where} is no file of a petps checkpoint store") from error
    is_ours = name == FORMAT_NAME and re.fullmatch(r"[0-9]{1,9}", number) is not None
    if is_ours and int(number) > FORMAT:
        raise Unimplemented(f"{where} has format {number}, this release reads {FORMAT}: upgrade")
    is_whole = checksum is None or xxhash.xxh3_64_hexdigest(text) == checksum
    is_intact = is_whole and _has_checksum(text, values.get("checksum"))
    if not is_ours or not is_intact:
        raise DataLoss(f"{where} does not fit its checksum: restore it from a copy of the store")
    return values


_fields_of: Final = attrgetter(*_CHUNK_FIELDS)


def _describe_chunks(chunks: Iterable[Chunk]) -> dict[str, Any]:
    return {"fields": _CHUNK_FIELDS, "chunks": [_fields_of(chunk) for chunk in chunks]}


def _seal(files: Files, lineage: Lineage) -> Lineage:
    """Write the ended chunks to a sealed file of their own, once there are enough of them.

    An ended chunk no longer changes, except that purge, compaction or rollback may remove it, or
    rollback reopen it. Then its file is no longer named, and the lineage's own file lists the
    remaining chunks of that file again.
    """
    present = {id(chunk) for chunk in lineage.chunks}
    sealed = [
        sealed_file
        for sealed_file in lineage.sealed
        if present.issuperset(map(id, sealed_file.chunks))
    ]
    sealed_ids = {id(chunk) for sealed_file in sealed for chunk in sealed_file.chunks}
    ended = tuple(
        chunk for chunk in lineage.chunks if not chunk.is_open and id(chunk) not in sealed_ids
    )
    if len(ended) >= SEALED_CHUNKS:
        path, body = f"lines/{new_name()}.json", encode_document(_describe_chunks(ended))
        files.write(path, [body])
        sealed.append(Sealed(path, xxhash.xxh3_64_hexdigest(body), ended))
    return replace(lineage, sealed=tuple(sealed))


def describe_tables(tables: Mapping[str, Table]) -> dict[str, Any]:
    """Return the columns by table: name, dtype, dim, and the parameters of a quantised column."""
    return {
        name: [
            [
                column.name,
                column.dtype,
                column.dim,
                column.quantisation and asdict(column.quantisation),
            ]
            for column in table.columns
        ]
        for name, table in tables.items()
    }


def read_tables(values: Mapping[str, Any]) -> dict[str, Table]:
    """Return the tables that describe_tables() described."""
    return {
        name: Table(
            name,
            tuple(
                Column(
                    column,
                    dtype,
                    dim,
                    None if quantisation is None else Quantisation(**quantisation),
                )
                for column, dtype, dim, quantisation in columns
            ),
        )
        for name, columns in values.items()
    }


def _encode_lineage(lineage: Lineage) -> bytes:
    sealed_ids = {id(chunk) for sealed in lineage.sealed for chunk in sealed.chunks}
    return encode_document(
        {
            **_describe_chunks(chunk for chunk in lineage.chunks if id(chunk) not in sealed_ids),
            "began": lineage.base_version,
            "sealed": [[sealed.file, sealed.checksum] for sealed in lineage.sealed],
            "tables": describe_tables(lineage.tables),
            "written": lineage.history,
            "versions": [
                {
                    **asdict(entry),
                    "parts": {name: astuple(part) for name, part in entry.parts.items()},
                }
                for entry in lineage.versions
            ],
        }
    )


def write_lineage(files: Files, lineage: Lineage) -> Lineage:
    """Write a lineage, and return it with the name of its file."""
    lineage = replace(_seal(files, lineage), file=f"lines/{new_name()}.json")
    files.write(lineage.file, [_encode_lineage(lineage)])
    return lineage


def read_lineage(files: Files, path: str) -> Lineage:
    """Read a lineage that write_lineage() wrote. Raise DataLoss, NotFound."""
    values = read_document(files, path)
    try:
        versions = tuple(_read_version(entry) for entry in values["versions"])
        check_records(versions)
        check_paths(name for name, _ in values["sealed"])
        check_values("int", "began", [values["began"]])
        sealed = tuple(
            Sealed(name, checksum, _read_chunks(read_document(files, name, checksum)))
            for name, checksum in values["sealed"]
        )
        ended = (chunk for sealed_file in sealed for chunk in sealed_file.chunks)
        history = tuple(
            (version, kind, count, seconds) for version, kind, count, seconds in values["written"]
        )
        for position, kind in enumerate(("int", "str", "int", "float")):
            check_values(kind, "written", [record[position] for record in history])
        tables, chunks = read_tables(values["tables"]), (*ended, *_read_chunks(values))
        if missing := {chunk.table for chunk in chunks} - tables.keys():
            raise ValueError(f"chunks of table {min(missing)!r}, which it does not have")
        return Lineage(path, values["began"], versions, chunks, tables, history, sealed)
    except _UNREADABLE as error:
        raise DataLoss(f"{files.name}/{path}: {error}") from error


def _read_version(entry: Mapping[str, Any]) -> Version:
    parts = {name: Part(*fields) for name, fields in entry["parts"].items()}
    check_records(list(parts.values()))
    return Version(**{**entry, "parts": parts})


def _read_chunks(values: Mapping[str, Any]) -> tuple[Chunk, ...]:
    records = (dict(zip(_CHUNK_FIELDS, fields, strict=True)) for fields in values["chunks"])
    chunks = tuple(Chunk(**{**record, "layout": tuple(record["layout"])}) for record in records)
    check_records(chunks)
    return chunks


def load(files: Files) -> State:
    """Return the newest state. Raise NotFound if there is no store; raise DataLoss."""
    last, missing = -1, None
    # Repeat: during the listing and reading, a writer may commit newer states and remove old ones.
    while True:
        newest = newest_state(files)
        if newest == last:
            break
        last = newest
        try:
            if newest:
                return _read_state(files, newest)
        except NotFound as error:
            missing = error
    if not newest:
        raise NotFound(
            f"{files.name} holds no checkpoint store: `petps checkpoint write` or Store.create "
            "begins one"
        )
    raise DataLoss(
        f"{files.name}: state {newest} needs a file that is lost: {missing}; restore it from "
        "a copy of the store"
    )


def _read_state(files: Files, number: int) -> State:
    values = read_document(files, state_path(number))
    try:
        check_paths([*values["lines"], *values["trash"]])
        for name in ("restores", "rollbacks"):
            check_values("int", name, [values[name]])
        check_values("str", "model", [values["model"]])
        lineages = tuple(read_lineage(files, path) for path in values["lines"])
        if not all(lineage.versions for lineage in lineages):
            raise ValueError("a lineage without a version")
        tables = read_tables(values["tables"])
        if any(lineage.tables.keys() != tables.keys() for lineage in lineages):
            raise ValueError("a lineage with other tables than the store")
        quantising = values["quantising"]
        return State(
            number,
            values["model"],
            tables,
            lineages,
            tuple(values["trash"]),
            None if quantising is None else Quantising(**quantising),
            values["restores"],
            values["rollbacks"],
        )
    except _UNREADABLE as error:
        raise DataLoss(f"{files.name}: state {number}: {error}") from error


def encode_state(state: State) -> bytes:
    """Return the contents of the file of a state."""
    return encode_document(
        {
            "model": state.model,
            "tables": describe_tables(state.tables),
            "quantising": None if state.quantising is None else asdict(state.quantising),
            "restores": state.restores,
            "rollbacks": state.rollbacks,
            "lines": [lineage.file for lineage in state.lineages],
            "trash": state.trash,
        }
    )


def state_path(number: int) -> str:
    """Return the path of the file of a state."""
    return f"states/{number:020d}.json"


def newest_state(files: Files) -> int:
    """Return the highest number of a state; 0: there is none."""
    matches = map(_STATE.fullmatch, files.list("states"))
    return max((int(match[1]) for match in matches if match), default=0)
