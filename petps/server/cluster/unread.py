"""Partitions of which the pool was opened without rows, and whose log is not read to its end."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from petps import _native

__all__ = ["Unread"]


class Unread:
    """Tells the pool what is unread, so that it answers no misses for keys of these partitions.

    A pool that was lost and created again has no rows, and the map names its server still. One with
    rows is served at once, however old they are: clients know which version they have seen. An
    instance with rows and without progress was filled by `petps load`, not by the log. One that is
    newer than the served one is served when it is whole.
    """

    def __init__(self, tables: _native.Tables, model: str) -> None:
        self._tables = tables
        self._left: dict[str, set[int]] = {}  # of each instance
        served = tables.resolve(model).id
        for instance in tables.instances():
            if instance.model != model or instance.id > served:
                continue
            recorded = [tables.progress(instance.id, p) for p in range(instance.partitions)]
            if instance.id != served and any(map(_is_of_log, recorded)):
                continue  # decision 122
            is_loaded = all(own is None or own.state == "passing" for own in recorded)
            if not (is_loaded and _has_rows(tables, instance)):
                unread = [p for p, own in enumerate(recorded) if not _has_applied(own)]
                self.add(instance.name, unread)

    def add(self, instance: str, partitions: Collection[int]) -> None:
        """Add partitions of an instance, whose rows were removed."""
        self._left.setdefault(instance, set()).update(partitions)
        self._set(instance)

    def note(self, served: str, read: Callable[[str], Collection[int]]) -> None:
        """Take out what is read of the instance that is served."""
        left = self._left.get(served)
        if not left:
            return
        if done := left.intersection(read(served)):
            left -= done
            self._set(served)

    def _set(self, instance: str) -> None:
        self._tables.set_unread(self._tables.resolve(instance).id, sorted(self._left[instance]))


def _has_rows(tables: _native.Tables, instance: _native.InstanceRecord) -> bool:
    return any(
        table.record.instance == instance.id
        and table.record.feed == "delta"
        and table.status().rows > 0
        for table in tables.tables()
    )


def _has_applied(progress: _native.Progress | None) -> bool:
    return progress is not None and (progress.run > 0 or progress.version > 0)


def _is_of_log(progress: _native.Progress | None) -> bool:
    """Return whether the pool's records say that the log fed the instance (Tables::is_partial)."""
    is_blank = progress is not None and progress.state == "following"
    return is_blank or _has_applied(progress)
