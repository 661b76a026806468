"""petps/_native.pyi and its parts have exactly the names of the extension module."""

from __future__ import annotations

import ast
from pathlib import Path

from petps import _native

PETPS = Path(__file__).parents[3] / "petps"
NAMES = ("_native.pyi", "_native_records.pyi", "_native_router.pyi")
STUB = ast.parse("".join((PETPS / name).read_text() for name in NAMES))


def public(names: list[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def members(node: ast.Module | ast.ClassDef) -> set[str]:
    names = set()
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.ClassDef):
            names.add(item.name)
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            names.add(item.target.id)
    return names


def test_the_module_has_the_names_of_the_stub() -> None:
    assert public(list(members(STUB))) == public(dir(_native))


def test_each_class_has_the_members_of_the_stub() -> None:
    classes = [node for node in STUB.body if isinstance(node, ast.ClassDef)]
    assert len(classes) > 8
    for node in classes:
        bound = getattr(_native, node.name)
        assert public(list(members(node))) == public(dir(bound)), node.name
        for name in members(node):
            assert hasattr(bound, name), f"{node.name}.{name}"
