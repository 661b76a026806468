"""The checks, a module for each heading of the documents."""

from __future__ import annotations

from typing import Final

__all__ = ["MODULES"]

# In the order of the documents.
MODULES: Final = (
    "machine",
    "limits",
    "clock",
    "pool",
    "file_system",
    "configuration",
    "credentials",
    "kafka",
    "stores",
)
