"""The programs of the chaos suite: Go builds them once from go.mod and keeps them in .cache/chaos.

`switch` connects the network namespaces, and `linearize` checks histories with Porcupine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.go_programs import NotAvailable, go_program

__all__ = ["ROOT", "NotAvailable", "program"]

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
CACHE: Final = ROOT / ".cache" / "chaos"
BUILD_SECONDS_MAX: Final = 600


def program(name: str) -> Path:
    """Return the path of a program, which is built once. Raise NotAvailable."""
    sources = [HERE / "go.mod", HERE / "go.sum", HERE / name / "main.go"]
    return go_program(name, CACHE, sources, f"./{name}", seconds_max=BUILD_SECONDS_MAX)
