"""Folders of a store in which a worker's write of a bundle can be stopped, or kills it.

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
    """Stands still within a bundle while there is a gate; who stands says its process id."""

    @property
    def gate(self) -> Path:
        """A file beside the store."""
        return Path(f"{self.name}.gate")

    def waiting(self) -> set[int]:
        """Processes that stood at the gate."""
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
    """Whoever writes a bundle is killed within it, but for the process that owns the store."""

    @property
    def _owner(self) -> Path:
        return Path(f"{self.name}.owner")

    def own(self) -> None:
        """The process that calls lives."""
        self._owner.write_text(str(os.getpid()))

    def write(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        """See Files."""
        super().write(path, self._deadly(pieces) if path.startswith("data/") else pieces)

    def _deadly(self, pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for number, piece in enumerate(pieces):
            if number == 1 and os.getpid() != int(self._owner.read_text()):
                os.kill(os.getpid(), signal.SIGKILL)
            yield piece
