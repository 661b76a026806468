"""What rows and servers were at a time, from what was published, broken and observed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from petps.delta.schema import partition_of
from tests.chaos.rows import ALL, PARTITIONS, keys_of

SECOND: Final = 1_000_000_000
SOON_NS: Final = SECOND // 2
STALL: Final = "stall"  # the machine had no processor for the suite itself
# A connection that was cut sends again after twice the time of the cut, and a server that starts
# is asked again after a backoff of clients.
GRACE_SECONDS: Final = 1.5
PARTITION_OF: Final[list[int]] = partition_of(ALL, PARTITIONS).tolist()


class Published:
    """The versions that the trainer has begun, and which keys each wrote."""

    def __init__(self, records: Iterable[Mapping[str, Any]], seed: int) -> None:
        self._begun: dict[int, int] = {1: 0}  # time by version
        self.committed = 0
        for record in records:
            if record["event"] == "begun":
                self._begun.setdefault(int(record["version"]), int(record["at"]))
            elif record["event"] == "committed":
                self.committed = max(self.committed, int(record["version"]))
        self._writers: list[list[int]] = [[] for _ in ALL]
        for version in sorted(self._begun):
            for key in keys_of(seed, version).tolist():
                self._writers[key].append(version)

    @property
    def versions(self) -> int:
        """Return how many versions were begun."""
        return len(self._begun)

    def writer(self, key: int, version: int) -> int:
        """Return the version that wrote the key last, at an applied version."""
        writers = self._writers[key]
        return writers[bisect_right(writers, version) - 1] if version >= 1 else 0

    def is_written(self, key: int, version: int, at: int) -> bool:
        """Return whether this version wrote this key, and was begun by then."""
        writers = self._writers[key]
        place = bisect_right(writers, version) - 1
        return place >= 0 and writers[place] == version and self._begun[version] <= at


@dataclass(frozen=True)
class Fault:
    """A fault as it happened. end: of its effects; of a process, when it is ready again.

    links: the (source, target) that were cut or slow; empty: ``nodes`` did not run.
    """

    kind: str
    nodes: tuple[str, ...]
    begin: int
    end: int
    links: frozenset[tuple[str, str]] = frozenset()

    @property
    def stops_nodes(self) -> bool:
        """Return whether the nodes answered nothing."""
        return self.kind in ("kill", "pause", "restart", STALL)


@dataclass
class Observations:
    """Holds what servers said about themselves, by server, in the order of time."""

    of_server: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)

    @staticmethod
    def of(records: Iterable[Mapping[str, Any]]) -> Observations:
        """Return the observations in the records of the observer."""
        observations = Observations()
        for record in records:
            observations.of_server.setdefault(record["server"], []).append(record)
        return observations

    def around(self, server: str, begin: int, end: int) -> Sequence[Mapping[str, Any]]:
        """Return the last record that ended before ``begin`` to the first that began after ``end``.

        Empty if one of the two is missing.
        """
        records = self.of_server.get(server, [])
        first = max((i for i, r in enumerate(records) if r["until"] <= begin), default=None)
        last = min((i for i, r in enumerate(records) if r["from"] >= end), default=None)
        return [] if first is None or last is None else records[first : last + 1]


@dataclass(frozen=True)
class Reachability:
    """Tells which servers a client could have had an answer from."""

    faults: Sequence[Fault]
    observations: Observations

    def has_clear_way(self, node: str, server: str, begin: int, end: int) -> bool:
        """Return whether nothing disturbed the server, or its links with the node, meanwhile."""
        for fault in self.faults:
            grace = int(GRACE_SECONDS * SECOND)
            if fault.links:
                if not fault.links & {(node, server), (server, node)}:
                    continue
                grace += fault.end - fault.begin
            elif not fault.stops_nodes or server not in fault.nodes:
                continue
            if fault.begin <= end and fault.end + grace >= begin:
                return False
        return True

    def could_answer(
        self, node: str, server: str, partition: int, seen: int, begin: int, end: int
    ) -> bool:
        """Return whether a server surely could answer for a partition, all the time.

        It owned the partition and served one instance. It had applied the version that the client
        had seen, before the pull or soon after its beginning, while a client waits.
        """
        if not self.has_clear_way(node, server, begin, end):
            return False
        records = self.observations.around(server, begin, end)
        soon = begin + (SOON_NS if end - begin >= 2 * SOON_NS else 0)
        late = [i for i, record in enumerate(records) if record["until"] <= soon]
        return (
            bool(records)
            and all(record["applied"] >= seen for record in records[late[-1] :])
            and all(partition in record["owned"] for record in records)
            and len({record["instance"] for record in records}) == 1
        )

    def servers(self) -> list[str]:
        """Return the servers that were observed."""
        return sorted(self.observations.of_server)
