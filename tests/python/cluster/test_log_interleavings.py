"""Every order of events of a move between pools that follow a log, some of them the wrong one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from petps.cluster import steps
from petps.cluster.maps import ClusterMap
from petps.cluster.records import Settings, dump
from tests.python.cluster import simulated, simulated_logs
from tests.python.cluster.simulated import KEYS, MODEL, Broken
from tests.python.cluster.simulated_logs import LOG_VERSION, OTHER_RUN, RUN, LogServer, LogWorld
from tests.python.cluster.test_interleavings import explore

STATES_MAX = 200_000

Applied = Mapping[str, tuple[int, int]]  # by server: the run and version of partition 0


def drain_a(applied: Applied, **budget: Any) -> LogWorld:
    """Return a world in which partition 0 must leave server a."""
    world = make_world(applied, **budget)
    world.etcd.commit((), {KEYS.drained("a"): "{}"})
    return world


def make_world(applied: Applied, **budget: Any) -> LogWorld:
    """Return a world in which a owns partition 0, and pools have these rows of it."""
    servers = [
        LogServer(name, applied={0: applied[name]} if name in applied else {}) for name in "ab"
    ]
    world = LogWorld(servers, ClusterMap(MODEL, 2, (("a",),)), **budget)
    world.etcd.commit((), {KEYS.settings: dump(Settings(1))})
    return world


OTHER_LOG: Applied = {"b": (OTHER_RUN, 7)}
NEWEST: Applied = {"a": (RUN, LOG_VERSION + 1)}  # and the log has less, for it was emptied


@pytest.fixture(autouse=True)
def forget_plans() -> None:
    """Forget the steps that a changed rule has planned."""
    simulated.forget_plans()


@pytest.mark.parametrize("kills", [0, 1])
def test_no_pool_of_another_log_owns_a_partition(kills: int) -> None:
    """If all owners are lost, nobody can say that a pool is of another log, and it is used."""
    world = drain_a(OTHER_LOG, kills=kills, is_lost_replaced=False)
    # A pool of another log that is away before that is known keeps its rows, for they look newer.
    states = explore(world, STATES_MAX, settles=kills == 0)
    print(f"{states} states")


@pytest.mark.parametrize("kills", [0, 1])
def test_a_target_with_a_fault_keeps_no_move_from_its_end(kills: int) -> None:
    states = explore(drain_a({}, kills=kills, faults=1, fragile="b"), STATES_MAX)
    print(f"{states} states")


def test_rows_that_the_log_has_no_more_are_kept_by_whoever_has_them() -> None:
    """It is for the operator to say what happens to them, so the order to remove them stays."""
    states = explore(make_world(NEWEST, kills=1), STATES_MAX, settles=False)
    print(f"{states} states")


# ---- each rule is needed: without it, some order of events breaks something


def test_a_pool_of_another_log_is_caught_without_the_comparison_of_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steps, "has_other_runs", lambda *_: False)
    with pytest.raises(Broken, match="no owner of partition 0 has it whole"):
        explore(drain_a(OTHER_LOG, kills=0), STATES_MAX)


def test_a_pool_of_another_log_is_caught_while_its_owner_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steps._Work, "_is_unknown", lambda *_: False)
    with pytest.raises(Broken, match="no owner of partition 0 has it whole"):
        explore(drain_a(OTHER_LOG, kills=1, is_lost_replaced=False), STATES_MAX)


def test_an_order_that_ignores_what_is_newest_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_logs, "find_newer", lambda *_: "")
    with pytest.raises(Broken, match="the newest rows of partition 0 are nowhere"):
        explore(make_world(NEWEST, kills=1), STATES_MAX, settles=False)


def test_a_cluster_that_waits_for_ever_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps._Work, "_lasting_fault", lambda *_: "")
    with pytest.raises(Broken, match="the cluster can never settle"):
        explore(drain_a(OTHER_LOG, kills=0), STATES_MAX)
