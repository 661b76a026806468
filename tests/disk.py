"""A server of this process sees room on its disk, however full this machine is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from petps.server.surroundings import Surroundings

__all__ = ["roomy_disk"]


@contextmanager
def roomy_disk() -> Iterator[None]:
    """Let the status of each server say that half of the disk, or more, is free."""
    read = Surroundings._disk

    def roomy(surroundings: Surroundings) -> dict[str, int] | None:
        disk = read(surroundings)
        return disk and {**disk, "free_bytes": max(disk["free_bytes"], disk["bytes"] // 2)}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Surroundings, "_disk", roomy)
        yield
