"""Reading of settings into a Config, with errors that name source, section, key and remedy.

A command option wins over the environment, the environment over the file, the file over the
default.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from petps.config.environment import read_environment
from petps.config.reference import nested_section
from petps.config.schema import Config, flattened
from petps.config.secret import hide_password, is_secret
from petps.config.variable import KeyPath
from petps.errors import InvalidArgument, NotFound
from petps.regular_file import read_regular_file

__all__ = ["COMMAND_LINE", "Settings", "load", "merge", "parse", "read_settings"]

MAX_CONFIG_BYTES = 1 << 20  # 4,096 tables take 800 KiB; a larger file is the wrong file
COMMAND_LINE: Final = "command line"


@dataclass(frozen=True)
class Settings:
    """A configuration, and where its values come from."""

    config: Config
    sources: Mapping[KeyPath, str]
    """By key: the file, the variable, or COMMAND_LINE. Keys with their default are missing."""


def read_settings(
    file: Path | None,
    environ: Mapping[str, str],
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Settings:
    """Return the settings of ``file``, the environment, and ``options``, by section and key.

    A later one wins; an option None is not given. Raises NotFound, or InvalidArgument with a line
    for each fault.
    """
    document: dict[str, Any] = {}
    sources: dict[KeyPath, str] = {}

    def add(path: KeyPath, value: Any, source: str) -> None:
        place = document
        for part in path[:-1]:
            place = place.setdefault(part, {})
        place[path[-1]] = value
        sources[path] = source

    if file is not None:
        document = _flat_kafka(_document(_text_of(file), str(file)))
        sources |= dict.fromkeys(_leaves(document, ()), str(file))
    for path, (variable, value) in read_environment(environ).items():
        if not _has_place(document, path):
            raise InvalidArgument(f"{file}: [{path[0]}] is a section: write [{path[0]}] and keys")
        add(path, value, variable)
    for section, values in (options or {}).items():
        for name, value in values.items():
            if value is not None:
                add((section, name), value, COMMAND_LINE)

    def source_of(place: KeyPath) -> str:
        return _source_of(place, sources) or ("configuration" if file is None else str(file))

    return Settings(_validate(document, source_of), sources)


def _has_place(document: Any, path: KeyPath) -> bool:
    for part in path[:-1]:
        document = document.get(part, {})
        if not isinstance(document, dict):
            return False
    return True


def _leaves(document: dict[str, Any], path: KeyPath) -> Iterator[KeyPath]:
    for name, value in document.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name)


def _flat_kafka(document: dict[str, Any]) -> dict[str, Any]:
    kafka = document.get("kafka")
    return document | {"kafka": dict(flattened(kafka))} if isinstance(kafka, dict) else document


def _source_of(place: KeyPath, sources: Mapping[KeyPath, str]) -> str:
    """Return where the value at ``place`` comes from, or its keys, or those beside it; '': none."""
    for end in range(len(place), 0, -1):
        below = [source for path, source in sources.items() if path[:end] == place[:end]]
        if below:
            return ", ".join(dict.fromkeys(below))
    return ""


def load(path: Path | str) -> Config:
    """Return the configuration in ``path``.

    Raises NotFound or InvalidArgument (file, key, remedy).
    """
    return parse(_text_of(Path(path)), str(path))


def _text_of(path: Path) -> str:
    try:
        if path.is_dir():
            raise InvalidArgument(f"{path} is a folder; name the configuration file in it")
        content = read_regular_file(path, MAX_CONFIG_BYTES)
        if len(content) > MAX_CONFIG_BYTES:
            raise InvalidArgument(
                f"{path} has {path.stat().st_size:,} bytes, which is no configuration file (at "
                f"most {MAX_CONFIG_BYTES:,}); is it the pool?"
            )
        return content.decode("utf-8")
    except FileNotFoundError:
        raise NotFound(
            f"{path}: no such configuration file; `petps config` shows its possible keys"
        ) from None
    except UnicodeDecodeError:
        raise InvalidArgument(f"{path} is not a text file in UTF-8") from None
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}") from None


def parse(text: str, source: str = "configuration") -> Config:
    """Return the configuration in ``text``; ``source`` names it in messages."""
    return _validate(_document(text, source), lambda _: source)


def _document(text: str, source: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidArgument(f"{source} is not valid TOML: {error}") from None


def merge(base: Config | None, overrides: dict[str, dict[str, Any]], source: str) -> Config:
    """Return ``base`` with the values of ``overrides``, by section and key, in place of its own.

    A value None overrides nothing. Raises InvalidArgument, which names ``source`` and the key.
    """
    document = {} if base is None else base.model_dump()
    for section, values in overrides.items():
        chosen = {name: value for name, value in values.items() if value is not None}
        document[section] = {**document.get(section, {}), **chosen}
    return _validate(document, lambda _: source)


def _validate(document: dict[str, Any], source_of: Callable[[KeyPath], str]) -> Config:
    try:
        return Config.model_validate(document)
    except ValidationError as error:
        faults = [(_location_of(fault), fault) for fault in error.errors()]
        lines = [f"{source_of(tuple(place))}: {_describe(fault, place)}" for place, fault in faults]
        raise InvalidArgument("\n".join(dict.fromkeys(lines))) from None


def _location_of(fault: Any) -> list[str]:
    # The location has names of a union's members ("float", "list[float]"), useless to the user.
    parts = [str(part) for part in fault["loc"]]
    return [part for part in parts if part not in ("float", "list[float]", "[key]")]


def _describe(fault: Any, location: list[str]) -> str:
    """Return one of pydantic's faults as text: `[server] port: ...`."""
    where = _where(location)
    if fault["type"] == "extra_forbidden":
        return f"{where} is not a known key{_nearest(location)}"
    if fault["type"] == "missing":
        return f"{where} is missing; `petps config` describes it"
    if fault["type"] == "string_pattern_mismatch":
        return f"{where} must be 1 to 63 letters, digits, '_', '-' or '.', got {fault['input']!r}"
    if fault["type"] in ("model_type", "dict_type"):
        return f"{where} is a section: write [{'.'.join(location)}] and its keys below"
    message = str(fault["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    given = "" if isinstance(fault["input"], dict) else f", not {fault['input']!r}"
    if location[:1] in (["kafka"], ["cluster"]) and is_secret(".".join(location[1:])):
        given = ""
    given = hide_password(given)
    return f"{where}: {message}{given}"


def _where(location: list[str]) -> str:
    if len(location) < 2 or (len(location) == 2 and location[0] == "tables"):
        return f"[{'.'.join(location)}]" if location else "the file"
    return f"[{'.'.join(location[:-1])}] {location[-1]}"


def _nearest(location: list[str]) -> str:
    known = list(_known_keys(location[:-1]))
    nearest = difflib.get_close_matches(location[-1], known, n=1)
    if nearest:
        return f"; did you mean '{nearest[0]}'?"
    return f"; known are {', '.join(known)}" if known else ""


def _known_keys(section: list[str]) -> Iterable[str]:
    """Return the keys of the section at this path."""
    model: type[BaseModel] = Config
    for depth, part in enumerate(section):
        if depth > 0 and section[depth - 1] == "tables":
            continue  # the table's name
        model = nested_section(model.model_fields[part].annotation) or model
    return model.model_fields
