"""Benchmarks. A run measures each figure together with the limit that it is compared to."""

from typing import Final

# Of the clients of measurements: on a busy machine one ends late, and does not fail.
DEADLINE_MS: Final = 60_000
