"""Stores that someone altered and sealed again: a checksum does not tell who wrote a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from petps.checkpoint import Store
from petps.checkpoint.published import Published
from petps.errors import DataLoss
from tests.fuzz import stores
from tests.python.checkpoint.memory import MemoryFiles

STATE = "states/00000000000000000003.json"
CHUNK_FILE, CHUNK_LENGTH, CHUNK_LAYOUT = 4, 6, 13


def altered(path: str, change: Callable[[Any], object]) -> MemoryFiles:
    """Return the golden store with one document changed and sealed again."""
    files = stores.add_position(stores.read_golden("store-1"))
    document = json.loads(files[path])
    change(document)
    files[path] = stores.encode(document)
    stores.seal(files)
    return MemoryFiles(files)


def newest_lineage() -> str:
    """Return the path of the lineage that the newest state names."""
    files = stores.read_golden("store-1")
    path: str = json.loads(files[STATE])["lines"][-1]
    return path


def read_all(files: MemoryFiles) -> None:
    """Read every version and its parts."""
    store = Store.open(files)
    store.verify()
    for entry in store.state.versions():
        store.restore(entry.version)
        Published.of(store, entry.version)


def test_the_store_is_whole_without_a_change() -> None:
    read_all(altered(newest_lineage(), lambda document: None))


def set_chunk(field: int, value: Any) -> Callable[[Any], None]:
    """Return a change of a field of the first chunk."""

    def change(document: Any) -> None:
        document["chunks"][0][field] = value

    return change


def set_version(field: str, value: Any) -> Callable[[Any], None]:
    """Return a change of a field of the first version."""
    return lambda document: document["versions"][0].update({field: value})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (set_chunk(CHUNK_LENGTH, {}), "length must be an integer"),
        (set_chunk(CHUNK_LENGTH, -1), "length must be an integer from 0 to .*, got -1"),
        (set_chunk(CHUNK_LENGTH, True), "length must be .* got True"),
        (set_chunk(CHUNK_LAYOUT, [456, 1.5, 1416, -1]), "layout must be"),
        (set_chunk(CHUNK_LAYOUT, [456, 776, 1 << 40, -1]), "layout"),
        (set_chunk(CHUNK_FILE, "../../secret"), "is no file of a store"),
        (set_chunk(CHUNK_FILE, "data/../../secret"), "is no file of a store"),
        (set_chunk(CHUNK_FILE, "/etc/passwd"), "is no file of a store"),
        (set_chunk(0, "other"), "chunks of table 'other', which it does not have"),
        (set_version("created_ns", "x"), "created_ns must be an integer"),
        (set_version("seconds", 10**400), "int too large"),
        (set_version("seconds", None), "seconds must be a finite number"),
        (set_version("parts", {"dense": ["../x", 0, ""]}), "is no file of a store"),
        (set_version("parts", []), "AttributeError|has no attribute"),
        (lambda document: document.update(versions=[]), "a lineage without a version"),
        (lambda document: document["written"][0].__setitem__(2, "x"), "written must be an integer"),
    ],
)
def test_a_lineage_with_other_values_is_refused(
    change: Callable[[Any], None], expected: str
) -> None:
    with pytest.raises(DataLoss, match=expected):
        read_all(altered(newest_lineage(), change))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("trash", ["../../secret"]),
        ("trash", ["/etc/passwd"]),
        ("trash", [1]),
        ("lines", ["../x.json"]),
        ("restores", "many"),
        ("model", 5),
        ("tables", {"other": [["row", "f32", 4, None]]}),
    ],
)
def test_a_state_with_other_values_is_refused(field: str, value: Any) -> None:
    with pytest.raises(DataLoss):
        Store.open(altered(STATE, lambda document: document.update({field: value})))


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"format":"petps-store-\xc2\xb2"}', b"[]"])
def test_a_document_of_another_shape_is_refused(text: bytes) -> None:
    files = MemoryFiles(stores.read_golden("store-1") | {STATE: text})
    with pytest.raises(DataLoss):
        Store.open(files)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("parts/position", b"["),
        ("parts/position", b'{"run":"5","seqs":[3],"version":2}'),
        ("parts/position", b'{"run":5,"seqs":3,"version":2}'),
        ("parts/unpublished", b"["),
        ("parts/unpublished", b"[]"),
        ("parts/unpublished", b'{"items":-1,"more":2}\n' + bytes(8)),
        ("parts/unpublished", b'{"items":1.0}\n' + bytes(8)),
    ],
)
def test_a_position_of_another_shape_is_refused(path: str, body: bytes) -> None:
    files = altered(newest_lineage(), lambda document: None).held
    files[path] = body
    stores.seal(files)
    store = Store.open(MemoryFiles(files))
    with pytest.raises(DataLoss, match="version 2: its part petps"):
        Published.of(store, 2)
