"""The environment variable of each configuration key. docs/how-to/configure.md has the rule.

A variable is PETPS_ and the key's path in upper case, with '_' for '.': PETPS_SERVER_PORT. Two
sections differ. The variables of [tls] begin with PETPS_SERVER_TLS_, because clients read others
that begin with PETPS_TLS_. The name of a table stands between double underscores:
PETPS_TABLES__ITEMS__DIM.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["KAFKA", "NAME", "PREFIX", "TABLES", "KeyPath", "table_of", "variable_of"]

KeyPath = tuple[str, ...]
"""("server", "limits", "pin_ms"), ("tables", "items", "dim"), ("kafka", "security.protocol")."""

PREFIX: Final = "PETPS_"
TABLES: Final = "PETPS_TABLES__"
KAFKA: Final = "PETPS_KAFKA_"
NAME: Final = "<name>"  # in the path of a key whose section or name the user chooses


def variable_of(path: KeyPath) -> str:
    """Return the environment variable of a key. The parts '<name>' stay as they are."""
    if path[0] == "tables":
        return f"{TABLES}{_escaped(path[1])}__{path[2].upper()}"
    if path[0] == "kafka":
        return KAFKA + (path[1] if path[1] == NAME else path[1].upper().replace(".", "_"))
    section = ("server", "tls") if path[0] == "tls" else path[:1]
    return PREFIX + "_".join((*section, *path[1:])).upper()


def _escaped(table: str) -> str:
    return table if table == NAME else re.sub("[^0-9_]", _escape, table)


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    return character.upper() if "a" <= character <= "z" else f"x{ord(character):02X}"


def _unescape(found: re.Match[str]) -> str:
    return chr(int(found[1], 16)) if found[1] else found[0].lower()


def table_of(text: str) -> str | None:
    """Return the table's name that _escaped() gives as ``text``; None: it gives no such text."""
    name = re.sub("x([0-9A-F]{2})|[A-Z]", _unescape, text)
    return name if _escaped(name) == text else None
