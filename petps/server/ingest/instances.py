"""SingleInstance: the Instances of an ingest that follows one instance."""

from __future__ import annotations

from petps.errors import InvalidArgument
from petps.server.ingest.protocols import BaseReader, InstanceTables

__all__ = ["SingleInstance"]


class SingleInstance:
    """One instance as Instances: it owns every partition, and no other instance can begin."""

    def __init__(self, instance: InstanceTables) -> None:
        self._instance = instance

    def owner(self, partition: int) -> InstanceTables:
        """See Instances."""
        del partition
        return self._instance

    def begin(self, name: str, base: BaseReader, run: int) -> InstanceTables | None:
        """See Instances."""
        del run
        raise InvalidArgument(
            f"{base.name} begins instance {name}, but this ingest follows only "
            f"{self._instance.name}"
        )

    def complete(self, instance: InstanceTables) -> None:
        """Do nothing. See Instances."""
