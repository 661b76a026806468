"""Folders of a store in which a worker's write of a bundle is stopped, or kills the worker.

Ray's workers import them by name.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from petps.checkpoint.files import LocalFiles


class GatedFiles(LocalFiles):
    """Files that stop a write within a bundle at a gate. A stopped process leaves its id."""

    @property
    def gate(self) -> Path:
        """The gate: a file beside the store."""
        return Path(f"{self.name}.gate")

    def waiting(self) -> set[int]:
        """Return the ids of the processes that have stopped at the gate."""
        folder = Path(f"{self.name}.waiting")
        return {int(path.name) for path in folder.iterdir()} if folder.exists() else set()

    def write(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        """See Files."""
        super().write(path, self._slowly(pieces) if path.startswith("data/") else pieces)

    def _slowly(self, pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for number, piece in enumerate(pieces):
            if number == 1 and self.gate.exists():
                folder = Path(f"{self.name}.waiting")
                folder.mkdir(exist_ok=True)
                (folder / str(os.getpid())).touch()
                while self.gate.exists():
                    time.sleep(0.01)
            yield piece


class DeadlyFiles(LocalFiles):
    """Files that kill a process while it writes a bundle, unless it owns the store."""

    @property
    def _owner(self) -> Path:
        return Path(f"{self.name}.owner")

    def own(self) -> None:
        """Make the calling process the owner, which survives."""
        self._owner.write_text(str(os.getpid()))

    def write(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        """See Files."""
        super().write(path, self._deadly(pieces) if path.startswith("data/") else pieces)

    def _deadly(self, pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for number, piece in enumerate(pieces):
            if number == 1 and os.getpid() != int(self._owner.read_text()):
                os.kill(os.getpid(), signal.SIGKILL)
            yield piece
