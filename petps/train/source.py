"""A tracker's tenant and trained tables as a Source of checkpoints.

Owns:        TrackedSource.
Never does:  decide what is written; files.
Called by:   feed.py; Checkpointer.
Threads:     one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy.typing as npt

from petps.checkpoint import Store
from petps.checkpoint.state import Version
from petps.checkpoint.store import DIFFERENCE
from petps.errors import FailedPrecondition, InvalidArgument, NotFound
from petps.tracker import Reading, Tracker
from petps.train.table import Gathered, Keys, Mask, TrainedTable

__all__ = ["CHECKPOINT", "TrackedSource"]

CHECKPOINT: Final = "checkpoint"  # the tenant's name unless another is given


class TrackedSource:
    """Rows of trained tables, and which of them changed since a version.

    begin() comes before a version is written, committed() after it was: until then the tenant
    acknowledges nothing. A difference is never acknowledged, for the next one is since the same
    base. ``also`` sees what is gathered. The tenant is added to the tracker, unless it is there.
    owns(table, keys): bool[n], which of a store's keys are this worker's (None: all).
    """

    def __init__(
        self,
        tracker: Tracker,
        tables: Iterable[TrainedTable],
        *,
        tenant: str = CHECKPOINT,
        owns: Callable[[str, Keys], Mask] | None = None,
    ) -> None:
        self.tables = {table.name: table for table in tables}
        unknown = set(self.tables) - set(tracker.tables)
        if unknown:
            raise NotFound(f"the tracker has no table {min(unknown)!r}: add_table() it")
        self.tenant = tenant
        self.also: Callable[[str, Keys, Gathered], None] | None = None
        self._owns = owns
        self._tracker = tracker
        self._reading: Reading | None = None
        self._at: int | None = None  # the version that the tenant's position stands for
        if tenant not in tracker.tenants:
            tracker.add_tenant(tenant)

    def resume(self, store: Store, version: int) -> None:
        """The tables hold ``version``, the store's newest: what is touched now is since then.

        Raises FailedPrecondition if the store has newer ones, NotFound.
        """
        line = store.state.line_of(version)
        newest = store.state.versions()[-1].version
        if newest != version:
            raise FailedPrecondition(
                f"{store.name} has versions up to {newest}: roll back to {version}, then resume"
            )
        self._reading = None
        self._at = None  # until all is there: it may fail halfway, and be called again
        if self.tenant in self._tracker.tenants:
            self._tracker.remove_tenant(self.tenant)
        self._tracker.add_tenant(self.tenant)
        if line.versions[-1].kind != DIFFERENCE:
            self._at = version
            return
        # The next difference has what this one had.
        for chunk in line.deltas():
            if chunk.holds(version):
                keys = store.read([chunk])[0].keys
                if self._owns is not None:
                    keys = keys[self._owns(chunk.table, keys)]
                self._tracker.track(chunk.table, self._table(chunk.table).ids_of(keys))
        self._at = line.began

    def begin(self) -> None:
        """A version is written now: what is touched from here on belongs to the next."""
        self._reading = self._tracker.read(self.tenant)

    def committed(self, version: Version) -> None:
        """It exists."""
        if self._reading is None:
            raise FailedPrecondition("no version is written: begin() comes first")
        if version.kind == DIFFERENCE:
            self._reading.abandon()
        else:
            self._reading.acknowledge()
            self._at = version.version
        self._reading = None

    def cancelled(self) -> None:
        """It does not; what was read comes again."""
        if self._reading is not None:
            self._reading.abandon()
            self._reading = None

    def keys(self, table: str, since: int | None) -> Keys:
        """See Source. Raises FailedPrecondition if what changed since then is not known."""
        trained = self._table(table)
        if since is None:
            return trained.keys()
        if self._reading is None:
            raise FailedPrecondition("begin() comes before a version is written")
        if self._at is None or self._at > since:
            known = "nothing was written yet" if self._at is None else f"only since {self._at}"
            raise FailedPrecondition(
                f"table {table}: what changed since version {since} is not tracked ({known}): "
                "resume() from the store's newest version, or write a base"
            )
        return trained.keys_of(self._reading.ids(table))

    def rows(self, table: str, keys: Keys) -> tuple[Mapping[str, npt.NDArray[Any]], Mask | None]:
        """See Source."""
        gathered = self._table(table).gather(keys)
        if self.also is not None:
            self.also(table, keys, gathered)
        return gathered.columns, gathered.deleted

    def _table(self, name: str) -> TrainedTable:
        table = self.tables.get(name)
        if table is None:
            raise InvalidArgument(
                f"the trainer has no table {name!r}; it has: {', '.join(sorted(self.tables))}"
            )
        return table
