"""Files of a checkpoint store that someone altered, with checksums computed again.

An input is edits of the files of golden stores.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import xxhash

from petps.checkpoint import Store
from petps.checkpoint.published import BaseInfo, Published
from petps.errors import PetpsError
from tests.python.checkpoint.memory import MemoryFiles

ROOT: Final = Path(__file__).resolve().parents[2]
# Edit: file, flags, offset, bytes to remove, bytes to insert.
EDIT: Final = struct.Struct("<BBHBB")
PARSE: Final = 1  # the bytes replace a JSON value
RAW: Final = 2  # checksums are not computed again


def read_golden(name: str) -> dict[str, bytes]:
    """Return the files of a golden store by path."""
    folder = ROOT / "tests/golden" / name
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def add_position(files: dict[str, bytes]) -> dict[str, bytes]:
    """Return a store whose versions have the parts of a publisher. See published.py."""
    position = {"run": 5, "seqs": [3], "version": 2, "instance": None}
    added = {
        "petps.position": ("parts/position", json.dumps(position).encode()),
        "petps.unpublished": ("parts/unpublished", b'{"items":1}\n' + bytes(8)),
    }
    result = files | dict(added.values())
    for path, body in files.items():
        if path.startswith("lines/"):
            document = json.loads(body)
            for entry in document["versions"]:
                entry["parts"] |= {name: [file, 0, ""] for name, (file, _) in added.items()}
            result[path] = encode(document)
    return result


def encode(document: dict[str, Any]) -> bytes:
    """Return a document as JSON; seal() sets its checksum."""
    return json.dumps(document, separators=(",", ":")).encode()


def seeds() -> list[bytes]:
    """Return valid inputs."""
    inputs = []
    for store, files in enumerate(GOLDEN):
        inputs.append(bytes([store]))
        for number, path in enumerate(files):
            for offset, text in ((0, b"["), (40, b"9"), (200, b'"a"')):
                edit = EDIT.pack(number, 0, offset, 1, len(text)) + text
                inputs.append(bytes([store]) + edit)
            if path.endswith(".json"):
                for place in range(0, 40, 8):
                    text = [b"null", b"-1", b"[]", b"{}", b"1e9"][place // 8]
                    edit = EDIT.pack(number, PARSE, place, 0, len(text)) + text
                    inputs.append(bytes([store]) + edit)
    return inputs


def run(data: bytes) -> None:
    """Open and read an altered store. Any exception but an error of petps is a finding."""
    if not data:
        return
    files = dict(GOLDEN[data[0] % len(GOLDEN)])
    paths = list(files)
    at, is_raw = 1, False
    while at + EDIT.size <= len(data):
        number, flags, offset, removed, inserted = EDIT.unpack_from(data, at)
        text = data[at + EDIT.size : at + EDIT.size + inserted]
        at += EDIT.size + inserted
        path = paths[number % len(paths)]
        body = files[path]
        if path.endswith(".json") and flags & PARSE:
            body = replace_value(body, offset, text)
        else:
            offset = min(offset, len(body))
            body = body[:offset] + text + body[offset + removed :]
        files[path] = body
        is_raw |= bool(flags & RAW)
    if not is_raw:
        seal(files)
    read(MemoryFiles(files))


def seal(files: dict[str, bytes]) -> None:
    """Compute all checksums again: those of parts and chunks, then those of the documents."""
    for path, body in files.items():
        if path.startswith("lines/"):
            with suppress(ValueError, TypeError, KeyError, AttributeError, IndexError):
                files[path] = encode(seal_content(json.loads(body), files))
    for path, body in files.items():
        start = body.rfind(b',"checksum":"')
        if path.endswith(".json") and start >= 0:
            text = body[:start] + b"}"
            checksum = xxhash.xxh3_64_hexdigest(text)
            files[path] = body[:start] + f',"checksum":"{checksum}"}}'.encode()


def seal_content(document: dict[str, Any], files: Mapping[str, bytes]) -> dict[str, Any]:
    """Set the checksums of a lineage's parts and chunks, as far as it has the right shape."""
    for entry in document["versions"]:
        for part in entry["parts"].values():
            body = files[part[0]]
            part[1:] = [len(body), xxhash.xxh3_64_hexdigest(body)]
    for chunk in document["chunks"]:
        body = files[chunk[4]][chunk[5] : chunk[5] + chunk[6]]
        chunk[12] = xxhash.xxh3_64_hexdigest(body)
    return document


def replace_value(body: bytes, place: int, text: bytes) -> bytes:
    """Replace a value of a JSON document by another JSON value."""
    try:
        document, value = json.loads(body), json.loads(text)
    except (ValueError, RecursionError):
        return body
    places: list[tuple[Any, Any]] = []

    def visit(node: Any) -> None:
        pairs = node.items() if isinstance(node, dict) else enumerate(node)
        for name, child in list(pairs):
            places.append((node, name))
            if isinstance(child, dict | list):
                visit(child)

    if isinstance(document, dict):
        visit(document)
    if places:
        node, name = places[place % len(places)]
        node[name] = value
    return encode(document)


GOLDEN: Final = [
    read_golden("store-1"),
    read_golden("base-2"),
    add_position(read_golden("store-1")),
]


def read(files: MemoryFiles) -> None:
    """Read all that a store has."""
    try:
        store = Store.open(files)
        store.verify()
        entries = store.state.versions()
    except PetpsError:
        return
    for entry in entries[:4]:
        for table in store.state.tables:
            with suppress(PetpsError):
                for _ in store.pieces(table, entry.version):
                    pass
        for name in entry.parts:
            with suppress(PetpsError):
                store.part(entry.version, name)
        with suppress(PetpsError):
            Published.of(store, entry.version)
        with suppress(PetpsError):
            BaseInfo.of(store, entry.version)
