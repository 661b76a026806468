"""Which partitions a server takes for unread when it opens its pool, and until when."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from petps.server.cluster.unread import Unread

PARTITIONS = 4


class Pool:
    """Instances 1, 2, ... of the model "m". rows: of each; applied: versions by partition."""

    def __init__(
        self, served: int, applied: Mapping[int, Mapping[int, int]], rows: Mapping[int, int]
    ) -> None:
        self.served, self.applied, self.rows = served, applied, rows
        self.unread: dict[int, list[int]] = {}

    def instances(self) -> list[Any]:
        return [
            SimpleNamespace(id=number, model="m", name=f"m@{number}", partitions=PARTITIONS)
            for number in self.applied
        ]

    def resolve(self, name: str) -> Any:
        return self.instances()[self.served - 1 if name == "m" else int(name[2:]) - 1]

    def progress(self, instance: int, partition: int) -> Any:
        version = self.applied[instance].get(partition)
        state = "following" if version else "passing"
        return None if version is None else SimpleNamespace(run=0, version=version, state=state)

    def tables(self) -> list[Any]:
        return [
            SimpleNamespace(
                record=SimpleNamespace(instance=number, feed="delta"),
                status=lambda count=count: SimpleNamespace(rows=count),
            )
            for number, count in self.rows.items()
        ]

    def set_unread(self, instance: int, partitions: list[int]) -> None:
        self.unread[instance] = partitions


def unread_of(pool: Pool) -> Unread:
    return Unread(pool, "m")  # type: ignore[arg-type]


def test_partitions_without_progress_are_unread_until_they_are_read() -> None:
    pool = Pool(1, {1: {0: 7, 2: 0}}, {1: 100})
    unread = unread_of(pool)
    assert pool.unread == {1: [1, 2, 3]}
    unread.note("m@1", lambda _: [0, 1])
    unread.note("m@1", lambda _: [0, 2])
    assert pool.unread == {1: [3]}
    unread.note("m@1", lambda _: [3])
    assert pool.unread == {1: []}
    unread.add("m@1", [2])
    assert pool.unread == {1: [2]}


def test_an_instance_that_petps_load_filled_is_read() -> None:
    for recorded in ({}, {0: 0}):
        pool = Pool(1, {1: recorded}, {1: 100})
        unread_of(pool)
        assert pool.unread == {}


def test_an_empty_instance_stays_unread_after_the_name_has_left_it() -> None:
    """The log of a lost pool led to a newer instance, and clients may ask for this one still."""
    pool = Pool(1, {1: {}, 2: {}}, {1: 0, 2: 0})
    unread = unread_of(pool)
    assert pool.unread == {1: [0, 1, 2, 3]}
    unread.note("m@2", lambda _: [0, 1, 2, 3])
    assert pool.unread == {1: [0, 1, 2, 3]}
    unread.add("m@2", [1])
    assert pool.unread == {1: [0, 1, 2, 3], 2: [1]}


def test_older_instances_are_unread_only_if_nothing_fed_them() -> None:
    pool = Pool(3, {1: {0: 5}, 2: {}, 3: dict.fromkeys(range(PARTITIONS), 9)}, {1: 9, 2: 0, 3: 9})
    unread_of(pool)
    assert pool.unread == {2: [0, 1, 2, 3], 3: []}
