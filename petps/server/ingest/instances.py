"""Instances of an ingest that follows a single instance."""

from __future__ import annotations

from petps.errors import InvalidArgument
from petps.server.ingest.protocols import BaseReader, InstanceTables

__all__ = ["SingleInstance"]


class SingleInstance:
    """One instance as Instances: it owns every partition, and no other instance can begin."""

    def __init__(self, store: InstanceTables) -> None:
        self._store = store

    def owner(self, partition: int) -> InstanceTables:
        """See Instances."""
        del partition
        return self._store

    def begin(self, name: str, base: BaseReader, run: int) -> InstanceTables | None:
        """See Instances."""
        del run
        raise InvalidArgument(
            f"{base.name} begins instance {name}, but this ingest follows only "
            f"{self._store.instance}"
        )

    def complete(self, store: InstanceTables) -> None:
        """Do nothing. See Instances."""
