"""Configuration keys from environment variables, whose names are in variable.py."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

from petps.config.reference import keys
from petps.config.schema import Config, TableConfig
from petps.config.variable import KAFKA, NAME, PREFIX, TABLES, KeyPath, table_of, variable_of
from petps.errors import InvalidArgument

__all__ = ["read_environment"]

# Variables of clients (petps/admin/client.py, client/python), which no server reads.
OF_CLIENTS: Final = frozenset(
    {"PETPS_TLS_CA", "PETPS_TLS_CERTIFICATE", "PETPS_TLS_KEY", "PETPS_TLS_SERVER_NAME"}
)
# Kubernetes gives each pod such variables for every Service of its namespace.
_SERVICE_LINK: Final = re.compile(r"\w+_(SERVICE_(HOST|PORT)\w*|PORT_\d+_(TCP|UDP|SCTP)\w*)")
_LINK_VALUE: Final = re.compile("(tcp|udp|sctp)://")
_LINK_REMEDY: Final = (
    "Kubernetes sets it for a Service whose name begins with 'petps-': set enableServiceLinks: "
    "false in the pod, or rename the Service"
)


def read_environment(environ: Mapping[str, str]) -> dict[KeyPath, tuple[str, Any]]:
    """Return (variable, value) of each key that the environment sets. An empty variable sets none.

    A value is not validated yet. Raises InvalidArgument for every variable that begins like one of
    a section and is none.
    """
    sections = tuple(f"{PREFIX}{section.upper()}_" for section in Config.model_fields)
    names = [name for name in environ if name.startswith(sections) and name not in OF_CLIENTS]
    if not names:
        return {}
    known = {variable_of(key.path): key.path for key in keys() if NAME not in key.path}
    found: dict[KeyPath, tuple[str, Any]] = {}
    faults = []
    for name in sorted(names):
        path = known.get(name) or _named_path(name)
        if name.endswith("_PORT") and _LINK_VALUE.match(environ[name]):
            faults.append(f"{name}: {_LINK_REMEDY}")
        elif path is None:
            faults.append(f"{name} is not a known variable{_remedy(name, list(known))}")
        elif environ[name]:
            found[path] = (name, _value(path, environ[name]))
    if faults:
        raise InvalidArgument("\n".join(faults))
    return found


def _named_path(variable: str) -> KeyPath | None:
    """Return the key of a table's variable, or of an option of Kafka; None: it has neither form."""
    if variable.startswith(TABLES):
        table, _, key = variable.removeprefix(TABLES).rpartition("__")
        name = table_of(table)
        known = name is not None and key.isupper() and key.lower() in TableConfig.model_fields
        return ("tables", name, key.lower()) if known and name else None
    option = variable.removeprefix(KAFKA)
    if option in ("", variable) or option != option.upper():
        return None
    return ("kafka", option.lower().replace("_", "."))


def _value(path: KeyPath, text: str) -> Any:
    """Return the value in ``text``: as it is for keys that take text, else as JSON.

    Text that is no JSON stays text, which the schema then refuses.
    """
    if path[0] == "kafka" or _takes_text(_annotation_of(path)):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _annotation_of(path: KeyPath) -> Any:
    if path[0] == "tables":
        return TableConfig.model_fields[path[2]].annotation
    annotation: Any = Config
    for part in path:
        annotation = annotation.model_fields[part].annotation
    return annotation


def _takes_text(annotation: Any) -> bool:
    if annotation in (str, Path):
        return True
    if get_origin(annotation) is Literal:
        return any(isinstance(value, str) for value in get_args(annotation))
    if get_origin(annotation) is list:
        return False
    return any(_takes_text(member) for member in get_args(annotation) if member is not annotation)


def _remedy(name: str, known: list[str]) -> str:
    """Return the end of an error about an unknown variable: what it may have meant."""
    if _SERVICE_LINK.fullmatch(name):
        return f": {_LINK_REMEDY}"
    if name.startswith("PETPS_TABLES_"):
        table, _, key = name.removeprefix(TABLES).rpartition("__")
        near = difflib.get_close_matches(key.lower(), TableConfig.model_fields, n=1)
        if name.startswith(TABLES) and table and near:
            meant = variable_of(("tables", table_of(table) or table, near[0]))
            return f"; did you mean {meant}?"
        return (
            f"; write {TABLES}NAME__KEY, such as {TABLES}ITEMS__DIM, with x2D for '-' and x2E for "
            "'.' in the name"
        )
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"; did you mean {near[0]}?" if near else ""
