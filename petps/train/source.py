"""Trained tables and a tracker's tenant as a Source of checkpoints.

Owns:        TrackedSource.
Never does:  decide what is written; open files.
Called by:   output.py, ranks.py; Checkpointer.
Threads:     one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy.typing as npt

from petps.checkpoint import Store
from petps.checkpoint.state import Version
from petps.checkpoint.store import DIFFERENCE
from petps.errors import FailedPrecondition, InvalidArgument, NotFound
from petps.train.stamps import Stamps
from petps.train.table import Gathered, Keys, Mask, TrainedTable
from petps.train.tracker import Reading, Tracker

__all__ = ["CHECKPOINT", "TrackedSource"]

CHECKPOINT: Final = "checkpoint"  # the default name of the tenant


class TrackedSource:
    """The rows of trained tables, and which of them changed since a version.

    Call begin() before a version is written and acknowledge() after it; until then the tenant
    acknowledges nothing. A difference is never acknowledged, because the next difference is
    relative to the same base. The source passes all gathered rows to ``on_gathered``. The
    constructor adds the tenant to the tracker if it is missing. owns(table, keys): bool[n], which
    of a store's keys belong to this rank (None: all). stamps: the rows' versions in the log, for
    tables whose stored rows have a column for them.
    """

    def __init__(
        self,
        tracker: Tracker,
        tables: Iterable[TrainedTable],
        *,
        tenant: str = CHECKPOINT,
        owns: Callable[[str, Keys], Mask] | None = None,
        stamps: Stamps | None = None,
    ) -> None:
        self.tables = {table.name: table for table in tables}
        unknown = set(self.tables) - set(tracker.tables)
        if unknown:
            raise NotFound(f"the tracker has no table {min(unknown)!r}: call its add_table()")
        self.tenant = tenant
        self.on_gathered: Callable[[str, Keys, Gathered], None] | None = None
        self._owns, self._stamps = owns, stamps
        self._tracker = tracker
        self._reading: Reading | None = None
        self._since: int | None = None  # the version at which the tenant's position was
        if tenant not in tracker.tenants:
            tracker.add_tenant(tenant)

    def resume(self, store: Store, version: int) -> None:
        """Track changes since ``version``, the store's newest, which the tables now hold.

        Raises FailedPrecondition if the store has newer versions, NotFound if it lacks this one.
        """
        lineage = store.state.lineage_of(version)
        newest = store.state.versions()[-1].version
        if newest != version:
            raise FailedPrecondition(
                f"{store.name} has versions up to {newest}: roll back to {version}, then resume"
            )
        self._reading = None
        self._since = None  # unknown until all ids are tracked, because a read below may fail
        if self.tenant in self._tracker.tenants:
            self._tracker.remove_tenant(self.tenant)
        self._tracker.add_tenant(self.tenant)
        if lineage.versions[-1].kind != DIFFERENCE:
            self._since = version
            return
        # The next difference must contain the keys of this one.
        for chunk in lineage.open_delta_chunks():
            if chunk.holds(version):
                keys = store.read([chunk])[0].keys
                if self._owns is not None:
                    keys = keys[self._owns(chunk.table, keys)]
                self._tracker.track(chunk.table, self._table(chunk.table).ids_of(keys))
        self._since = lineage.base_version

    def begin(self) -> None:
        """Begin a version: ids touched from here on belong to the next one."""
        self._reading = self._tracker.read(self.tenant)

    def acknowledge(self, version: Version) -> None:
        """Acknowledge what was read: the version exists."""
        if self._reading is None:
            raise FailedPrecondition("call begin() before acknowledge()")
        if version.kind == DIFFERENCE:
            self._reading.abandon()
        else:
            self._reading.acknowledge()
            self._since = version.version
        self._reading = None

    def abandon(self, open_version: int | None = None) -> None:
        """Abandon what was read, so that the ids are read again: the version failed.

        open_version: its number, if it may exist nevertheless (Store.may_have_committed).
        """
        if self._reading is not None:
            self._reading.abandon()
            self._reading = None
        if self._since is None:
            self._since = open_version  # if a base exists, all later changes are tracked

    def keys(self, table: str, since: int | None) -> Keys:
        """See Source. Raise FailedPrecondition if the changes since then are not known."""
        trained = self._table(table)
        if since is None:
            return trained.keys()
        if self._reading is None:
            raise FailedPrecondition("call begin() before a version is written")
        if self._since is None or self._since > since:
            known = (
                "nothing was written yet" if self._since is None else f"only since {self._since}"
            )
            raise FailedPrecondition(
                f"table {table}: what changed since version {since} is not tracked ({known}): "
                "resume() from the store's newest version, or write a base"
            )
        return trained.keys_of(self._reading.ids(table))

    def rows(self, table: str, keys: Keys) -> tuple[Mapping[str, npt.NDArray[Any]], Mask | None]:
        """See Source."""
        gathered = self._table(table).gather(keys)
        if self.on_gathered is not None:
            self.on_gathered(table, keys, gathered)
        columns = gathered.columns
        if self._stamps is not None:  # after on_gathered, which may publish the rows
            columns = {**columns, **self._stamps.columns(table, keys, gathered)}
        return columns, gathered.deleted

    def _table(self, name: str) -> TrainedTable:
        table = self.tables.get(name)
        if table is None:
            raise InvalidArgument(
                f"the trainer has no table {name!r}; it has: {', '.join(sorted(self.tables))}"
            )
        return table
