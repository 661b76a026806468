"""Reading of a TOML file into a Config, with errors that name section, key and remedy."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from petps.config.reference import nested_section
from petps.config.schema import Config
from petps.config.secret import hide_password, is_secret
from petps.errors import InvalidArgument, NotFound

__all__ = ["load", "merge", "parse"]

MAX_CONFIG_BYTES = 1 << 20  # 4,096 tables take 800 KiB; a larger file is the wrong file


def load(path: Path | str) -> Config:
    """Return the configuration in ``path``.

    Raises NotFound or InvalidArgument (file, key, remedy).
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if path.is_dir():
            raise InvalidArgument(f"{path} is a folder; name the configuration file in it")
        if size > MAX_CONFIG_BYTES:
            raise InvalidArgument(
                f"{path} has {size:,} bytes, which is no configuration file (at most "
                f"{MAX_CONFIG_BYTES:,}); is it the pool?"
            )
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise NotFound(
            f"{path}: no such configuration file; `petps config` shows its possible keys"
        ) from None
    except UnicodeDecodeError:
        raise InvalidArgument(f"{path} is not a text file in UTF-8") from None
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}") from None
    return parse(text, str(path))


def parse(text: str, source: str = "configuration") -> Config:
    """Return the configuration in ``text``; ``source`` names it in messages."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidArgument(f"{source} is not valid TOML: {error}") from None
    return _validate(document, source)


def merge(base: Config | None, overrides: dict[str, dict[str, Any]], source: str) -> Config:
    """Return ``base`` with the values of ``overrides``, by section and key, in place of its own.

    A value None overrides nothing. Raises InvalidArgument, which names ``source`` and the key.
    """
    document = {} if base is None else base.model_dump()
    for section, values in overrides.items():
        chosen = {name: value for name, value in values.items() if value is not None}
        document[section] = {**document.get(section, {}), **chosen}
    return _validate(document, source)


def _validate(document: dict[str, Any], source: str) -> Config:
    try:
        return Config.model_validate(document)
    except ValidationError as error:
        faults = list(dict.fromkeys(_describe(fault) for fault in error.errors()))
        raise InvalidArgument("\n".join(f"{source}: {fault}" for fault in faults)) from None


def _describe(fault: Any) -> str:
    """Return one of pydantic's faults as text: `[server] port: ...`."""
    location = [str(part) for part in fault["loc"]]
    # The location has names of a union's members ("float", "list[float]"), useless to the user.
    location = [part for part in location if part not in ("float", "list[float]", "[key]")]
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
    if location[:1] == ["kafka"] and is_secret(".".join(location[1:])):
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
