"""What a store holds at one moment, and how one moment follows another. STORE.md.

Owns:        Chunk, Version, Sealed, Line, State; load(), commit(), obsolete().
Never does:  rows.
Called by:   store.py, policies, the CLI's lists.
Invariants:  a State and what is in it never change; a change is a new one, made whole or not.
"""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from typing import Any, Final

import xxhash

from petps.checkpoint.chunk import Column, Table
from petps.checkpoint.files import Files
from petps.checkpoint.quantise import Quantising
from petps.codec import Quantisation
from petps.errors import (
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    IoError,
    NotFound,
    PetpsError,
    Unimplemented,
)

__all__ = [
    "OPEN",
    "Chunk",
    "Line",
    "Part",
    "Sealed",
    "State",
    "Version",
    "commit",
    "load",
    "new_name",
    "obsolete",
    "read_line",
    "read_signed",
    "signed",
    "write_line",
]

FORMAT_NAME: Final = "petps-store"
FORMAT: Final = 2  # 1: every chunk has keys and a filter
STATES_KEPT: Final = 8
OPEN: Final = 0  # a span's end
SEALED_CHUNKS: Final = 64  # in a file, at least
_STATE: Final = re.compile(r"(\d{20})\.json")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of a table in a bundle, and the versions they belong to."""

    table: str
    first: int
    end: int  # OPEN, or the first version they do not belong to
    layer: int  # 0: of the base; 1: as written; more: merged
    file: str
    offset: int
    length: int
    bloom_offset: int
    bloom_length: int
    rows: int
    min_key: int
    max_key: int
    checksum: str  # xxh3-64 of the Arrow stream, 16 hex digits
    # Where in it the keys, each column and the null mask begin; -1: no keys, no mask.
    layout: tuple[int, ...]

    def holds(self, version: int) -> bool:
        """Whether the version is in its span."""
        return self.first <= version and (self.end == OPEN or version < self.end)

    @property
    def stop(self) -> int:
        """Where its Arrow stream ends in the bundle."""
        return self.offset + self.length

    @property
    def keyed(self) -> bool:
        """Whether it says its keys; else they are min_key and those that follow it."""
        return self.layout[0] >= 0

    @property
    def open(self) -> bool:
        """Whether it belongs to versions to come."""
        return self.end == OPEN


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes that ride along with a version."""

    file: str
    bytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Version:
    """One checkpoint. ``kind``: base, delta (since the last) or difference (since the base)."""

    version: int
    kind: str
    created_ns: int
    seconds: float  # from the first byte until it was committed, but for that last write
    rows: int
    bytes: int
    kept: bool = False  # purge leaves it
    parts: Mapping[str, Part] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sealed:
    """Chunks of a line that have ended, in a file of their own: states to come name that."""

    file: str
    checksum: str  # xxh3-64 of the file, 16 hex digits
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Line:
    """A base and what was written after it."""

    file: str
    began: int  # the version of its base, which purge may have dropped since
    versions: tuple[Version, ...]
    chunks: tuple[Chunk, ...]
    tables: Mapping[str, Table]  # as its chunks hold them
    # version, kind, bytes, seconds; those that were purged too
    written: tuple[tuple[int, str, int, float], ...]
    sealed: tuple[Sealed, ...] = ()  # which of the chunks need not be said again

    @property
    def base_bytes(self) -> int:
        """Of its base's chunks."""
        return sum(chunk.length + chunk.bloom_length for chunk in self.chunks if chunk.layer == 0)

    def of(self, version: int) -> list[Chunk]:
        """The chunks of a version, in the order in which they lie over each other."""
        found = [chunk for chunk in self.chunks if chunk.holds(version)]
        return sorted(found, key=lambda chunk: chunk.first)

    def deltas(self) -> list[Chunk]:
        """Open chunks above the base, in order: IncrCP's Row_0, DECK's living deltas."""
        return sorted(
            (chunk for chunk in self.chunks if chunk.layer > 0 and chunk.open),
            key=lambda chunk: chunk.first,
        )


@dataclass(frozen=True, slots=True)
class State:
    """All of a store."""

    number: int
    model: str
    tables: Mapping[str, Table]  # the trainer's own
    lines: tuple[Line, ...] = ()
    trash: tuple[str, ...] = ()  # files of earlier states that may be removed
    quantising: Quantising | None = None
    restores: int = 0  # how often a training has resumed from a version
    rollbacks: int = 0  # how often versions were dropped to go on from an older one

    @property
    def line(self) -> Line:
        """The newest. Raises NotFound."""
        if not self.lines:
            raise NotFound("the store has no version yet: write one")
        return self.lines[-1]

    def versions(self) -> list[Version]:
        """All, oldest first."""
        return [version for line in self.lines for version in line.versions]

    def version(self, version: int) -> Version:
        """One of them. Raises NotFound."""
        return next(each for each in self.line_of(version).versions if each.version == version)

    def line_of(self, version: int) -> Line:
        """Whose version it is. Raises NotFound that names what there is."""
        for line in self.lines:
            if any(each.version == version for each in line.versions):
                return line
        known = [each.version for each in self.versions()]
        text = "none" if not known else f"{len(known)}, {known[0]} to {known[-1]}"
        raise NotFound(f"there is no version {version} in the store; it has {text}")

    def files(self) -> set[str]:
        """All that the state names, lines among them."""
        found = {line.file for line in self.lines}
        for line in self.lines:
            found |= {sealed.file for sealed in line.sealed}
            found |= {chunk.file for chunk in line.chunks}
            found |= {part.file for version in line.versions for part in version.parts.values()}
        return found

    def with_line(self, line: Line) -> State:
        """The newest line replaced."""
        return replace(self, lines=(*self.lines[:-1], line))


def new_name() -> str:
    """One that no file ever had."""
    return uuid.uuid4().hex


_CHUNK_FIELDS: Final = tuple(Chunk.__slots__)


def signed(values: dict[str, Any]) -> bytes:
    """Format and values as JSON with its checksum, which is of the text before and a brace."""
    named = {"format": f"{FORMAT_NAME}-{FORMAT}", **values}
    text = json.dumps(named, separators=(",", ":")).encode()
    return text[:-1] + f',"checksum":"{xxhash.xxh3_64_hexdigest(text)}"}}'.encode()


def _fits(text: bytes, checksum: object) -> bool:
    """Whether signed() made it."""
    end = f',"checksum":"{checksum}"}}'.encode()
    return text.endswith(end) and xxhash.xxh3_64_hexdigest(text[: -len(end)] + b"}") == checksum


def read_signed(files: Files, path: str, checksum: str | None = None) -> dict[str, Any]:
    """What signed() made; checksum: of the whole file.

    Raises DataLoss, NotFound, Unimplemented for a newer format.
    """
    text = files.read(path)
    where = f"{files.name}/{path}"
    try:
        values: dict[str, Any] = json.loads(text)
        name, _, number = str(values["format"]).rpartition("-")
    except (ValueError, KeyError, TypeError) as error:
        raise DataLoss(f"{where} is not of a petps checkpoint store") from error
    ours = name == FORMAT_NAME and number.isdigit()
    if ours and int(number) > FORMAT:
        raise Unimplemented(f"{where} has format {number}, this release reads {FORMAT}: upgrade")
    whole = checksum is None or xxhash.xxh3_64_hexdigest(text) == checksum
    fits = whole and _fits(text, values.get("checksum"))
    if not ours or not fits:
        raise DataLoss(f"{where} does not fit its checksum: restore it from a copy of the store")
    return values


_fields_of: Final = attrgetter(*_CHUNK_FIELDS)


def _chunks_values(chunks: Iterable[Chunk]) -> dict[str, Any]:
    return {
        "fields": _CHUNK_FIELDS,
        "chunks": [_fields_of(chunk) for chunk in chunks],
    }


def _seal(files: Files, line: Line) -> Line:
    """Puts ended chunks by, once there are many: they change no more, but for purge and the like.

    A file of which a chunk is gone since is named no more, and those that stay are said again.
    """
    present = {id(chunk) for chunk in line.chunks}
    whole = [each for each in line.sealed if present.issuperset(map(id, each.chunks))]
    said = {id(chunk) for each in whole for chunk in each.chunks}
    ended = tuple(chunk for chunk in line.chunks if not chunk.open and id(chunk) not in said)
    if len(ended) >= SEALED_CHUNKS:
        path, body = f"lines/{new_name()}.json", signed(_chunks_values(ended))
        files.write(path, [body])
        whole.append(Sealed(path, xxhash.xxh3_64_hexdigest(body), ended))
    return replace(line, sealed=tuple(whole))


def _tables_values(tables: Mapping[str, Table]) -> dict[str, Any]:
    """By table its columns: name, dtype, dim, and the parameters of a quantised one."""
    return {
        name: [
            [each.name, each.dtype, each.dim, each.quantisation and asdict(each.quantisation)]
            for each in table.columns
        ]
        for name, table in tables.items()
    }


def _read_tables(values: Mapping[str, Any]) -> dict[str, Table]:
    return {
        name: Table(
            name,
            tuple(
                Column(column, dtype, dim, None if chosen is None else Quantisation(**chosen))
                for column, dtype, dim, chosen in columns
            ),
        )
        for name, columns in values.items()
    }


def _line_bytes(line: Line) -> bytes:
    sealed = {id(chunk) for each in line.sealed for chunk in each.chunks}
    return signed(
        {
            **_chunks_values(chunk for chunk in line.chunks if id(chunk) not in sealed),
            "began": line.began,
            "sealed": [[each.file, each.checksum] for each in line.sealed],
            "tables": _tables_values(line.tables),
            "written": line.written,
            "versions": [
                {
                    "version": each.version,
                    "kind": each.kind,
                    "created_ns": each.created_ns,
                    "seconds": each.seconds,
                    "rows": each.rows,
                    "bytes": each.bytes,
                    "kept": each.kept,
                    "parts": {
                        name: [part.file, part.bytes, part.checksum]
                        for name, part in each.parts.items()
                    },
                }
                for each in line.versions
            ],
        }
    )


def write_line(files: Files, line: Line) -> Line:
    """The line with the file that it was written to."""
    line = replace(_seal(files, line), file=f"lines/{new_name()}.json")
    files.write(line.file, [_line_bytes(line)])
    return line


def read_line(files: Files, path: str) -> Line:
    """What write_line() wrote. Raises DataLoss, NotFound."""
    values = read_signed(files, path)
    try:
        versions = tuple(
            Version(
                **{
                    **each,
                    "parts": {name: Part(*values) for name, values in each["parts"].items()},
                }
            )
            for each in values["versions"]
        )
        sealed = tuple(
            Sealed(name, checksum, _chunks_of(read_signed(files, name, checksum)))
            for name, checksum in values["sealed"]
        )
        ended = (chunk for each in sealed for chunk in each.chunks)
        return Line(
            path,
            values["began"],
            versions,
            (*ended, *_chunks_of(values)),
            _read_tables(values["tables"]),
            tuple((version, kind, count, took) for version, kind, count, took in values["written"]),
            sealed,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataLoss(f"{files.name}/{path}: {error}") from error


def _chunks_of(values: Mapping[str, Any]) -> tuple[Chunk, ...]:
    named = (dict(zip(_CHUNK_FIELDS, each, strict=True)) for each in values["chunks"])
    return tuple(Chunk(**{**each, "layout": tuple(each["layout"])}) for each in named)


def load(files: Files) -> State:
    """The newest state. Raises NotFound where there is no store, and DataLoss."""
    last, missing = -1, None
    while True:  # while the newest is read or listed, a writer may have made newer ones
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
    values = read_signed(files, _state_path(number))
    try:
        lines = tuple(read_line(files, path) for path in values["lines"])
        wanted = values["quantising"]
        return State(
            number,
            values["model"],
            _read_tables(values["tables"]),
            lines,
            tuple(values["trash"]),
            None if wanted is None else Quantising(**wanted),
            values["restores"],
            values["rollbacks"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DataLoss(f"{files.name}: state {number}: {error}") from error


def _state_path(number: int) -> str:
    return f"states/{number:020d}.json"


def commit(files: Files, before: State | None, after: State) -> State:
    """Makes ``after`` the state that follows ``before``; returns it as it was written.

    Raises FailedPrecondition when another writer was faster, and IoError; then ``before`` stands,
    and what was written for ``after`` is named by nobody.
    """
    number = 1 if before is None else before.number + 1
    old = {line.file: line for line in before.lines} if before else {}
    lines = []
    for line in after.lines:
        if old.get(line.file) is not line:
            line = write_line(files, line)
        lines.append(line)
    after = replace(after, number=number, lines=tuple(lines), trash=())
    if before is not None:
        after = replace(after, trash=tuple(sorted(before.files() - after.files())))
    body = signed(
        {
            "model": after.model,
            "tables": _tables_values(after.tables),
            "quantising": None if after.quantising is None else asdict(after.quantising),
            "restores": after.restores,
            "rollbacks": after.rollbacks,
            "lines": [line.file for line in after.lines],
            "trash": after.trash,
        }
    )
    path = _state_path(number)
    try:
        files.create(path, body)
    except AlreadyExists:
        if files.read(path) != body:  # ours: a try that was repeated had succeeded
            raise _overtaken(files, number) from None
    except IoError:
        # It may stand all the same, and be named to nobody as made.
        with contextlib.suppress(PetpsError):
            files.remove(path)
        raise
    if newest_state(files) > number:  # ours was removed long ago, and could be made anew
        with contextlib.suppress(PetpsError):
            files.remove(path)
        raise _overtaken(files, number)
    return after


def _overtaken(files: Files, number: int) -> FailedPrecondition:
    return FailedPrecondition(
        f"{files.name}: another writer made state {number} meanwhile: open the store again, and "
        "see that one process writes it"
    )


def newest_state(files: Files) -> int:
    """The highest number of a state; 0: there is none."""
    found = map(_STATE.fullmatch, files.list("states"))
    return max((int(match[1]) for match in found if match), default=0)


def obsolete(before: State) -> list[str]:
    """What nobody needs once the state after ``before`` stands; that one may still be lost."""
    oldest = before.number - STATES_KEPT + 1
    return [*before.trash, *([_state_path(oldest)] if oldest > 0 else [])]
