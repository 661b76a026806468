"""Files in memory that crash, as a machine does, at a chosen operation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from petps.errors import AlreadyExists, DataLoss, IoError, NotFound


class Crash(BaseException):
    """A crash of the machine: no code handles it."""


class MemoryFiles:
    """Files in memory. Operation ``crash_at`` (from 1) crashes undone, or half done if ``torn``.

    fail_every: every operation with a multiple of this number raises IoError and does nothing, as
    on a full disk or an overloaded store.
    """

    def __init__(self, held: dict[str, bytes] | None = None) -> None:
        self.held = {} if held is None else held
        self.crash_at = 0
        self.torn = False
        self.fail_every = 0
        self.operations = 0

    name = "memory"

    def _step(self) -> bool:
        """Count an operation. Return False if the caller must do half of it and then crash."""
        self.operations += 1
        if self.fail_every and self.operations % self.fail_every == 0:
            raise IoError("memory: no space left on device")
        if self.operations == self.crash_at:
            if self.torn:
                return False
            raise Crash
        return True

    def write(self, path: str, pieces: Iterable[bytes | memoryview]) -> None:
        """See Files: after a crash, a part of an unsynced file may exist."""
        assert path not in self.held, "a name is used once"
        body = b"".join(bytes(piece) for piece in pieces)
        if not self._step():
            self.held[path] = body[: len(body) // 2]
            raise Crash
        self.held[path] = body

    def create(self, path: str, content: bytes) -> None:
        """See Files: all or nothing, and a crash hides from the caller which of the two."""
        if path in self.held:
            raise AlreadyExists(f"memory/{path} exists already")
        whole = self._step()
        self.held[path] = content
        if not whole:
            raise Crash

    def read(self, path: str) -> bytes:
        """See Files."""
        if path not in self.held:
            raise NotFound(f"memory/{path} does not exist")
        return self.held[path]

    def read_into(self, path: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """See Files."""
        body = self.read(path)
        for offset, buffer in pieces:
            if offset + len(buffer) > len(body):
                raise DataLoss(f"memory/{path} is cut at {len(body)} bytes")
            buffer[:] = body[offset : offset + len(buffer)]

    def list(self, folder: str) -> dict[str, float]:
        """See Files: all files are older than any limit."""
        return {path.partition("/")[2]: 1e9 for path in self.held if path.startswith(f"{folder}/")}

    def size(self, path: str) -> int:
        """See Files."""
        return len(self.read(path))

    def remove(self, path: str) -> None:
        """See Files."""
        if not self._step():
            self.held.pop(path, None)
            raise Crash
        self.held.pop(path, None)
