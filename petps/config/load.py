"""Reading of a TOML file into a Config, with errors in the user's words."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from petps.config.schema import Config
from petps.errors import InvalidArgument, NotFound

__all__ = ["load", "merged", "parse"]

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
            f"{path}: no such configuration file; `petps config` shows what one may say"
        ) from None
    except UnicodeDecodeError:
        raise InvalidArgument(f"{path} is not a text file in UTF-8") from None
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}") from None
    return parse(text, str(path))


def parse(text: str, source: str = "configuration") -> Config:
    """Return the configuration in ``text``; ``source`` names it in messages."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(f"{source} is not valid TOML: {error}") from None
    return _validated(document, source)


def merged(base: Config | None, given: dict[str, dict[str, Any]], source: str) -> Config:
    """Return ``base`` with values of ``given`` in place of its own.

    ``given`` is by section and key; a value None is left out. Raises InvalidArgument that names
    ``source`` and the key.
    """
    document = {} if base is None else base.model_dump()
    for section, values in given.items():
        chosen = {name: value for name, value in values.items() if value is not None}
        document[section] = {**document.get(section, {}), **chosen}
    return _validated(document, source)


def _validated(document: dict[str, Any], source: str) -> Config:
    try:
        return Config.model_validate(document)
    except ValidationError as error:
        faults = list(dict.fromkeys(_describe(fault) for fault in error.errors()))
        raise InvalidArgument("\n".join(f"{source}: {fault}" for fault in faults)) from None


def _describe(fault: Any) -> str:
    """Return one fault of pydantic's list as text: `[server] port: ...`."""
    location = [str(part) for part in fault["loc"]]
    # The location has names of a union's members ("float", "list[float]"), useless to the user.
    location = [part for part in location if part not in ("float", "list[float]", "[key]")]
    where = _where(location)
    if fault["type"] == "extra_forbidden":
        return f"{where} is not a known key{_nearest(location)}"
    if fault["type"] == "missing":
        return f"{where} is missing; `petps config` says what it means"
    if fault["type"] == "string_pattern_mismatch":
        return f"{where}: {fault['input']!r} may have letters, digits, '_', '-' and '.', at most 63"
    if fault["type"] in ("model_type", "dict_type"):
        return f"{where} is a section: write [{'.'.join(location)}] and its keys below"
    message = str(fault["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    given = "" if isinstance(fault["input"], dict) else f", not {fault['input']!r}"
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
        annotation = model.model_fields[part].annotation
        candidates = [annotation, *get_args(annotation)]
        model = next(
            kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel)
        )
    return model.model_fields
