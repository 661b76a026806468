"""The tables of docs/reference/access.md, which tests try cell by cell."""

from __future__ import annotations

from pathlib import Path
from typing import Final

DOCUMENT: Final = Path(__file__).parents[2] / "docs/reference/access.md"


def table_of(section: str) -> list[list[str]]:
    """Return the cells of the section's table, with its header and without the line below it."""
    text = DOCUMENT.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[part.strip() for part in line.strip("|").split("|")] for line in lines]


def rows_of(section: str) -> list[list[str]]:
    """Return the cells of the section's table, without its header."""
    return table_of(section)[1:]
