"""Documentation of every key, generated from the schema so that both always agree."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from petps.config.schema import Config
from petps.config.variable import variable_of

__all__ = ["Key", "keys", "keys_markdown"]


@dataclass(frozen=True)
class Key:
    """One key of the file."""

    section: str
    """'pool', 'server.limits', 'tables.<name>'."""
    name: str
    kind: str
    """Allowed values: 'integer', "'power' or 'process'"."""
    default: str
    """In TOML's notation; or 'required' or 'none'."""
    description: str

    @property
    def path(self) -> tuple[str, ...]:
        """Return the parts of the key's full name: ("server", "limits", "pin_ms")."""
        return (*self.section.split("."), self.name)


def keys() -> Iterator[Key]:
    """Yield every key, in the order of the schema."""
    return _keys_of(Config, "")


def _keys_of(model: type[BaseModel], section: str) -> Iterator[Key]:
    later: list[tuple[type[BaseModel], str]] = []
    for name, field in model.model_fields.items():
        nested = nested_section(field.annotation)
        path = f"{section}.{name}" if section else name
        if nested is not None:
            later.append((nested, f"{path}.<name>" if _is_mapping(field.annotation) else path))
        elif _is_mapping(field.annotation):
            kind = _kind(get_args(field.annotation)[1])
            yield Key(path, "<name>", kind, "none", field.description or "")
        else:
            text = field.description or ""
            yield Key(section, name, _kind(field.annotation), _default(field), text)
    for nested, path in later:
        yield from _keys_of(nested, path)


def nested_section(annotation: Any) -> type[BaseModel] | None:
    """Return the section that a field holds, or None if it holds a value."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _is_mapping(annotation: Any) -> bool:
    return get_origin(annotation) is dict


_KIND_NAMES: dict[Any, str] = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true or false",
    Path: "path",
}


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is typing.Annotated:
        return _kind(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return " or ".join(f"'{value}'" for value in get_args(annotation))
    if get_origin(annotation) is list:
        return f"list of {_kind(get_args(annotation)[0])}s"
    members = [member for member in get_args(annotation) if member is not NoneType]
    if members:
        return " or ".join(_kind(member) for member in members)
    return _KIND_NAMES[annotation]


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None:
        return "none"
    if isinstance(field.default, bool):
        return str(field.default).lower()
    if isinstance(field.default, str):
        return f'"{field.default}"'
    return str(field.default)


def keys_markdown() -> str:
    """Return the keys as a Markdown document, with one table for each section."""
    lines = [
        "# Configuration keys",
        "",
        "`petps config --markdown` writes this document. Unknown keys and variables are refused.",
        "A command option wins over the environment, the environment over the file, and the file",
        "over the default. A variable is `PETPS_` and the key's path in upper case, with `_` for",
        "`.`; `[tls]` and the names of tables differ: docs/how-to/configure.md.",
    ]
    section = None
    for key in keys():
        if key.section != section:
            section = key.section
            lines += ["", f"## [{section}]", ""]
            lines += ["| key | variable | value | default | meaning |", "|---|---|---|---|---|"]
        lines.append(
            f"| `{key.name}` | `{variable_of(key.path)}` | {key.kind} | `{key.default}` | "
            f"{key.description} |"
        )
    return "\n".join(lines) + "\n"
