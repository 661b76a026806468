"""Each rule of the chaos suite finds what breaks it, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from tests.chaos import check
from tests.chaos.faults import AT_ONCE, KINDS, NODES, SERVERS, links_of, make_schedule
from tests.chaos.inject import numbers_of
from tests.chaos.rows import keys_of, read_rows, rows_of
from tests.chaos.tools import NotAvailable, program
from tests.chaos.truth import PARTITION_OF, SECOND, Fault, Observations, Published, Reachability

SEED = 7
KEY = int(keys_of(SEED, 2)[0])  # versions 1 and 2 wrote it
OTHER = next(key for key in range(100) if key not in keys_of(SEED, 2) and key != KEY)


@pytest.fixture
def published() -> Published:
    records = [{"event": "begun", "version": 2, "at": 2 * SECOND}]
    return Published(records, SEED)


def pull(**changes: Any) -> dict[str, Any]:
    """Return a pull in which nothing is wrong, but for the changes."""
    return {
        "op": "pull", "client": "c0.0.1", "node": "c0", "seen": 2, "call": 10 * SECOND,
        "return": 11 * SECOND, "keys": [KEY], "versions": [2], "generations": [0], "missing": [],
        "applied": 2, "instance": "default@0", **changes,
    }  # fmt: skip


def rules_of(records: list[Mapping[str, Any]], published: Published) -> list[str]:
    reachability = Reachability([], Observations())
    return [v.rule for v in check.check_pulls(records, published, reachability)]


def test_a_right_answer_breaks_no_rule(published: Published) -> None:
    assert rules_of([pull()], published) == []
    assert rules_of([pull(keys=[KEY, OTHER], versions=[2, 1])], published) == []


def test_a_row_may_be_newer_than_the_answer_but_not_older(published: Published) -> None:
    assert rules_of([pull(applied=1, seen=1)], published) == []
    assert rules_of([pull(versions=[1])], published) == [check.OLD_ROW]


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"wrong": {str(KEY): [1.0]}}, check.TORN),
        ({"missing": [KEY]}, check.LOST_ROW),
        ({"seen": 3}, check.BACK),
        ({"versions": [3]}, check.UNKNOWN_ROW),  # nobody has begun it
        ({"return": SECOND}, check.UNKNOWN_ROW),  # it was begun later
        ({"keys": [OTHER]}, check.UNKNOWN_ROW),  # it wrote other keys
        ({"generations": [0, 1]}, check.MIXED),
        ({"instance": "default@1"}, check.MIXED),
    ],
)
def test_a_wrong_answer_breaks_its_rule(
    published: Published, changes: dict[str, Any], rule: str
) -> None:
    assert rules_of([pull(**changes)], published) == [rule]


def test_a_client_does_not_return_to_an_older_instance(published: Published) -> None:
    newer = pull(generations=[1], instance="default@1")
    assert rules_of([newer, pull()], published) == [check.INSTANCE_BACK]
    assert rules_of([newer, pull(client="c0.0.2")], published) == []


def test_rows_that_were_seen_early_are_counted() -> None:
    pulls = [pull(), pull(versions=[1], applied=1, seen=1), pull(client="c1.0.1", versions=[1])]
    assert check.count_rows_ahead(pulls) == 1


def test_torn_and_foreign_rows_show_themselves() -> None:
    keys = np.array([5, 6], np.uint64)
    rows = rows_of(keys, np.array([3, 4]), 1)
    versions, generations, is_whole = read_rows(keys, rows)
    assert (versions.tolist(), generations.tolist()) == ([3, 4], [1, 1])
    assert is_whole.all()
    torn = rows.copy()
    torn[0, 16:] = rows_of(keys, np.array([2, 4]), 1)[0, 16:]
    assert read_rows(keys, torn)[2].tolist() == [False, True]
    assert read_rows(keys, rows[::-1])[2].tolist() == [False, False]


# ---- failed pulls


def observed(*, applied: int = 2, owned: list[int] | None = None, instance: str = "default@0",
             server: str = "s0") -> list[dict[str, Any]]:  # fmt: skip
    """Return what a server said each second from 0 to 20 s."""
    partitions = [PARTITION_OF[KEY]] if owned is None else owned
    return [
        {
            "server": server, "from": at * SECOND, "until": at * SECOND + 1, "applied": applied,
            "owned": partitions, "instance": instance,
        }
        for at in range(20)
    ]  # fmt: skip


def failed(faults: list[Fault], records: list[dict[str, Any]]) -> list[str]:
    record = {
        "op": "pull", "client": "c0.0.1", "node": "c0", "seen": 2, "call": 10 * SECOND,
        "return": 14 * SECOND, "keys": [KEY], "error": "Unavailable",
    }  # fmt: skip
    reachability = Reachability(faults, Observations.of(records))
    return [violation.rule for violation in check.check_failure(record, reachability)]


def fault(kind: str, node: str, begin: float, end: float, *links: tuple[str, str]) -> Fault:
    return Fault(kind, (node,), int(begin * SECOND), int(end * SECOND), frozenset(links))


def test_a_pull_must_not_fail_while_a_server_can_answer() -> None:
    assert failed([], observed()) == [check.FAILED]
    assert failed([fault("kill", "s0", 11, 12)], observed()) == []
    assert failed([fault("kill", "s0", 11, 12)], observed() + observed(server="s1")) == [
        check.FAILED
    ]


@pytest.mark.parametrize(
    "records",
    [
        observed(applied=1),
        observed(owned=[]),
        [*observed()[:12], *observed(instance="default@1")[12:]],
        observed()[:12],
        observed()[12:],
    ],
)
def test_a_server_that_may_be_unable_excuses_a_failed_pull(records: list[dict[str, Any]]) -> None:
    assert failed([], records) == []


def test_a_server_that_soon_has_the_version_excuses_nothing() -> None:
    records = [*observed(applied=1)[:10], *observed()[10:]]
    assert failed([], records) == [check.FAILED]
    records = [*observed(applied=1)[:11], *observed()[11:]]
    assert failed([], records) == []
    records = [*observed()[:11], *observed(applied=1)[11:]]
    assert failed([], records) == []


def test_faults_excuse_while_they_last_and_only_on_their_links() -> None:
    way = ("c0", "s0")
    assert failed([fault("one-way", "s0", 11, 12, way)], observed()) == []
    assert failed([fault("one-way", "s0", 11, 12, way[::-1])], observed()) == []
    assert failed([fault("cut", "s0", 11, 12, ("s0", "e0"))], observed()) == [check.FAILED]
    assert failed([fault("cut", "s0", 5, 8, way)], observed()) == []  # a connection sends again
    assert failed([fault("cut", "s0", 1, 2, way)], observed()) == [check.FAILED]
    assert failed([fault("pause", "s0", 1, 2)], observed()) == [check.FAILED]
    assert failed([fault("pause", "s0", 8, 9)], observed()) == []
    assert failed([fault("stall", "s0", 11, 12)], observed()) == []
    assert failed([fault("clock", "s0", 9, 12)], observed()) == [check.FAILED]
    assert failed([fault("disk", "s0", 9, 12)], observed()) == [check.FAILED]


# ---- pushes


def push(client: int, value: int, call: int, end: int | None, key: int = 1) -> dict[str, Any]:
    record = {"client": client, "key": key, "push": True, "value": value, "call": call}
    return record if end is None else {**record, "return": end}


def read(client: int, value: int, call: int, end: int, key: int = 1) -> dict[str, Any]:
    return {**push(client, value, call, end, key), "push": False}


def linearizable(records: list[dict[str, Any]]) -> list[str]:
    try:
        program("linearize")
    except NotAvailable as reason:
        pytest.skip(f"no checker of histories: {reason}")
    return [v.rule for v in check.check_linearizable(check.operations_of(records))]


def test_linearizable_histories_are_accepted() -> None:
    reads = [read(1, 0, 0, 1), read(2, 0, 3, 4), read(2, 7, 6, 7)]
    assert linearizable([push(1, 7, 2, 5), *reads]) == []
    # A push in doubt may come late, early, or never.
    assert linearizable([push(1, 7, 0, None), read(2, 0, 1, 2), read(2, 7, 9, 10)]) == []
    assert linearizable([push(1, 7, 0, None), read(2, 0, 1, 2)]) == []


def test_histories_that_are_not_linearizable_are_refused() -> None:
    lost = [push(1, 7, 0, 1), read(2, 0, 2, 3)]
    assert linearizable(lost) == [check.NOT_LINEAR]
    back = [push(1, 7, 0, 1), push(1, 8, 2, 9), read(2, 8, 3, 4), read(2, 7, 5, 6)]
    assert linearizable(back) == [check.NOT_LINEAR]
    assert linearizable([push(1, 7, 5, None), read(2, 7, 1, 2)]) == [check.NOT_LINEAR]
    assert linearizable([read(2, 9, 1, 2)]) == [check.NOT_LINEAR]
    assert linearizable([*lost, read(3, 0, 0, 1, key=2)]) == [check.NOT_LINEAR]


def test_a_lost_push_is_found_at_the_end() -> None:
    pushes = [push(1, 7, 0, 1), push(2, 8, 2, 3)]
    assert [v.rule for v in check.check_lost_pushes(pushes, {1: 7})] == [check.LOST_PUSH]
    assert [v.rule for v in check.check_lost_pushes(pushes, {})] == [check.LOST_PUSH]
    assert list(check.check_lost_pushes(pushes, {1: 8})) == []
    concurrent = [push(1, 7, 0, 5), push(2, 8, 2, 3), push(1, 9, 4, None)]
    assert list(check.check_lost_pushes(concurrent, {1: 7})) == []
    assert list(check.check_lost_pushes(concurrent, {1: 9})) == []


def test_a_torn_pushed_row_is_found() -> None:
    rules = [v.rule for v in check.check_torn_pushes([read(1, -1, 0, 1), read(1, 5, 2, 3)])]
    assert rules == [check.TORN]


# ---- the schedule


def test_a_schedule_follows_from_its_seed() -> None:
    assert make_schedule(3, 180) == make_schedule(3, 180)
    assert make_schedule(3, 180) != make_schedule(4, 180)


@pytest.mark.parametrize("seed", range(20))
def test_a_schedule_has_every_kind_and_ends_in_time(seed: int) -> None:
    faults = make_schedule(seed, 180)
    assert {fault.kind for fault in faults} == set(KINDS)
    for fault in faults:
        assert fault.node in NODES
        assert fault.length > 0
        assert fault.begin + fault.length < 180
        at_once = [f for f in faults if f.begin <= fault.begin < f.begin + f.length]
        assert len(at_once) <= AT_ONCE
        assert [f.node for f in at_once].count(fault.node) == 1


def test_a_one_way_fault_disturbs_one_direction() -> None:
    one_way = [f for f in make_schedule(1, 3600) if f.kind == "one-way"]
    for fault in one_way:
        ends = {pair[1 if fault.inward else 0] for pair in links_of(fault)}
        assert ends == {fault.node}
    assert {fault.inward for fault in one_way} == {True, False}
    cut = next(f for f in make_schedule(1, 3600) if f.kind == "cut")
    assert {pair[::-1] for pair in links_of(cut)} == links_of(cut)


def test_partitions_are_read_from_the_text_of_a_status() -> None:
    assert numbers_of("none") == []
    assert numbers_of("0-2, 5") == [0, 1, 2, 5]
    assert len(SERVERS) == 4
