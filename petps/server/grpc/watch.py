"""WatchVersions: detects changes of instances, and delivers them to the callers that watch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Final

from petps import _native
from petps.errors import ResourceExhausted
from petps.server.grpc.limits import MAX_WATCHERS

__all__ = ["InstanceState", "Versions", "instances_of"]

# Versions are applied a few times a second; 20 ms later is soon enough for a watcher.
POLL_SECONDS: Final = 0.02


@dataclass(frozen=True, slots=True)
class InstanceState:
    """State of an instance. ``aliases``: the names that refer to it."""

    id: int
    name: str
    model: str
    partitions: int
    applied_version: int
    aliases: tuple[str, ...]
    frozen: bool


def instances_of(tables: _native.Tables) -> dict[int, InstanceState]:
    """Return the current state of each instance, by id."""
    records = tables.instances()
    names: dict[int, set[str]] = {record.id: set() for record in records}
    for alias, instance_id in tables.aliases().items():
        names.setdefault(instance_id, set()).add(alias)
    for model in {record.model for record in records}:
        with contextlib.suppress(LookupError):  # dropped after instances() was read
            names.setdefault(tables.resolve(model).id, set()).add(model)
    return {
        record.id: InstanceState(
            id=record.id,
            name=record.name,
            model=record.model,
            partitions=record.partitions,
            applied_version=tables.applied_version(record.id),
            aliases=tuple(sorted(names[record.id])),
            frozen=record.frozen,
        )
        for record in records
    }


class _Watcher:
    """Pending changes of one caller: the last state of each instance that changed."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.pending: dict[int, tuple[InstanceState, bool]] = {}
        self.changed = asyncio.Event()

    def add_change(self, state: InstanceState, dropped: bool) -> None:
        if self._model in ("", state.model, state.name):
            self.pending[state.id] = (state, dropped)
            self.changed.set()


class Versions:
    """Detector of changes, active while a caller watches. Runs in the loop's thread."""

    def __init__(self, tables: _native.Tables) -> None:
        self._tables = tables
        self._states: dict[int, InstanceState] = {}
        self._watchers: set[_Watcher] = set()
        self._task: asyncio.Task[None] | None = None

    async def watch(self, model: str) -> AsyncIterator[tuple[InstanceState, bool]]:
        """Yield (state, is dropped): first of every instance, then of each that changes.

        model: a model, an instance, or '' for all. The iteration has no end; the caller stops it.
        """
        with self._watching(model) as watcher:
            while True:
                await watcher.changed.wait()
                watcher.changed.clear()
                while watcher.pending:
                    yield watcher.pending.pop(next(iter(watcher.pending)))

    @contextlib.contextmanager
    def _watching(self, model: str) -> Iterator[_Watcher]:
        if len(self._watchers) >= MAX_WATCHERS:
            raise ResourceExhausted(
                f"{MAX_WATCHERS} calls watch versions already: end one, or watch another replica"
            )
        watcher = _Watcher(model)
        if self._task is None:
            self._states = instances_of(self._tables)
            self._task = asyncio.create_task(self._poll())
        for state in self._states.values():
            watcher.add_change(state, False)
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
            if not self._watchers:
                self._task.cancel()
                self._task = None

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            states = instances_of(self._tables)
            changes = [
                (state, False) for state in states.values() if self._states.get(state.id) != state
            ]
            changes += [(state, True) for id_, state in self._states.items() if id_ not in states]
            self._states = states
            for watcher in self._watchers:
                for state, dropped in changes:
                    watcher.add_change(state, dropped)
