"""The simulation of the training loop against times computed by hand. Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from bench.train.scale import (
    FITTED,
    PAPER,
    RANKS,
    STAGES,
    STEP_MS,
    balance,
    factors,
    fit_growth,
    paper_steps,
    stages_with,
)
from bench.train.simulate import Stages, Task, simulate, step_seconds

PLENTY = 8.0


def _ends(tasks: Sequence[Task], processors: float) -> list[Any]:
    simulate(tasks, processors)
    return [pytest.approx(task.end) for task in tasks]


def _cpu(thread: str, seconds: float, *after: Task) -> Task:
    return Task(thread, seconds, True, after)


def _wait(thread: str, seconds: float, *after: Task) -> Task:
    return Task(thread, seconds, False, after)


def test_a_thread_does_one_task_after_another() -> None:
    assert _ends([_cpu("a", 1), _cpu("a", 2), _wait("a", 3)], PLENTY) == [1, 3, 6]


def test_a_thread_keeps_its_order_even_if_a_later_task_is_ready() -> None:
    first = _wait("b", 5)
    assert _ends([first, _cpu("a", 1, first), _cpu("a", 1)], PLENTY) == [5, 6, 7]


def test_tasks_share_a_processor_and_waits_take_none() -> None:
    # "a" and "b" run at half speed until 2; the rest of "b" alone until 3; the wait is undisturbed.
    assert _ends([_cpu("a", 1), _cpu("b", 2), _wait("c", 2.5)], 1) == [2, 3, 2.5]
    assert _ends([_cpu("a", 1), _cpu("b", 2)], 2) == [1, 2]
    assert _ends([_cpu("a", 1), _wait("b", 1)], 0.5) == [2, 1]
    # Three on two processors: until 1.5 each gets two thirds of one; then two run at full speed.
    assert _ends([_cpu("a", 1), _cpu("b", 2), _cpu("c", 2)], 2) == [1.5, 2.5, 2.5]


def test_a_later_task_slows_down_a_running_one() -> None:
    # "a" runs alone for one second, then beside "c", which begins after a wait.
    let_go = _wait("b", 1)
    assert _ends([_cpu("a", 2), let_go, _cpu("c", 1, let_go)], 1) == [3, 1, 3]


def test_tasks_without_duration_end_at_once() -> None:
    first = _cpu("a", 0)
    assert _ends([first, _wait("b", 0, first), _cpu("a", 1)], 1) == [0, 0, 1]


def test_tasks_that_wait_for_each_other_are_refused() -> None:
    behind = _cpu("b", 1)
    ahead = _cpu("a", 1, behind)
    behind.after = [ahead]
    with pytest.raises(AssertionError, match="wait for each other"):
        simulate([ahead, behind], 1)


def _stages(**changed: Any) -> Stages:
    cpu = {"prefetch": 1, "route": 1.5, "exchange": 0.5, "retrieve": 3, "freshen": 0.5, "dense": 0,
           "reduce": 0.25, "update": 0.25, "write-back": 1} | changed.pop("cpu", {})  # fmt: skip
    given = {"cpu": cpu, "transfer_cpu": 0.0, "transfer": 0.5, "dense": 8.0} | changed
    return Stages(**given)


# With N = 2: lookup 3 + 3 + 1, four transfers of 0.5, dense 8, reduce and update 0.5.
def test_the_synchronous_loop_is_the_sum() -> None:
    assert step_seconds("synchronous", _stages(), 2, PLENTY) == pytest.approx(7 + 2 + 8 + 0.5)


def test_the_synchronous_loop_needs_one_processor() -> None:
    assert step_seconds("synchronous", _stages(), 2, 1) == pytest.approx(17.5)
    # With half a processor, computing takes twice as long; waiting does not.
    assert step_seconds("synchronous", _stages(), 2, 0.5) == pytest.approx(2 * 7.5 + 2 + 8)


def test_dual_hides_the_lookup_but_not_freshening() -> None:
    assert step_seconds("dual", _stages(), 2, PLENTY) == pytest.approx(0.5 + 2 + 8 + 0.5)


def test_dual_is_as_slow_as_its_slowest_stage() -> None:
    assert step_seconds("dual", _stages(cpu={"route": 19}), 2, PLENTY) == pytest.approx(20)
    assert step_seconds("dual", _stages(cpu={"write-back": 20}), 2, PLENTY) == pytest.approx(20)


def test_a_wait_for_peers_does_not_delay_routing() -> None:
    # Routing takes 6 of the processor, exchanging 4 of the clock: 10 if one thread did both.
    given = _stages(cpu={"route": 5, "exchange": 0}, wait={"exchange": 4.0}, dense=1.0)
    assert step_seconds("dual", given, 2, PLENTY) == pytest.approx(6)
    assert step_seconds("synchronous", given, 2, PLENTY) == pytest.approx(10 + 3 + 1 + 2 + 1 + 0.5)


def test_frozen_exposes_the_first_and_the_last_transfer() -> None:
    assert step_seconds("frozen", _stages(), 2, PLENTY) == pytest.approx(7 + 0.5 + 8 + 0.5 + 0.5)
    assert step_seconds("frozen", _stages(), 8, PLENTY) == pytest.approx(7 + 0.5 + 8 + 0.5 + 0.5)


def test_smaller_first_and_last_micro_batches_expose_less() -> None:
    # The micro-batches at both ends have half the samples and 0.8 of the mean rows: they expose
    # 2 x 0.5 x 0.8.
    uneven = _stages(samples=(2 / 3, 4 / 3, 4 / 3, 2 / 3), rows=(0.8, 1.2, 1.2, 0.8))
    assert step_seconds("frozen", uneven, 4, PLENTY) == pytest.approx(7 + 0.8 + 8 + 0.5)


def test_nested_hides_both() -> None:
    assert step_seconds("nested", _stages(), 2, PLENTY) == pytest.approx(0.5 + 1 + 8 + 0.5)


def test_nested_on_a_slow_link_takes_the_links_time() -> None:
    # Four transfers of 5, one after another; the computing (4 per micro-batch) fits beside them.
    simulated = step_seconds("nested", _stages(transfer=5.0), 2, PLENTY)
    assert simulated == pytest.approx(0.5 + 20 + 0.5)


def test_nested_on_one_processor_takes_all_processor_time() -> None:
    # 7 of lookup, 1 of freshening, reducing and updating. Only waiting can be hidden, and there is
    # no waiting.
    simulated = step_seconds("nested", _stages(transfer=0.0, dense=0.0), 2, 1)
    assert simulated == pytest.approx(8)


MEASURED = {"prefetch": 2, "route": 16, "exchange": 2, "retrieve": 9, "write-back": 9,
            "freshen": 2, "reduce": 1, "update": 5}  # fmt: skip


def test_the_fit_reproduces_the_papers_synchronous_column() -> None:
    growth, steps = fit_growth(), paper_steps()
    assert min(growth.terms) >= 0
    assert steps[RANKS[-1]] == pytest.approx(STEP_MS)
    for ranks in RANKS:
        step = growth.dense + growth.lookup(ranks) + growth.transfers(ranks)
        assert step == pytest.approx(steps[ranks], rel=0.08), ranks
    # Figure 2: shares of the step for the fewest and for the most ranks.
    assert growth.lookup(128) / steps[128] == pytest.approx(0.244, abs=0.01)
    assert growth.transfers(1536) / steps[1536] == pytest.approx(0.205, abs=0.015)


def test_stages_add_up_to_the_fitted_growth() -> None:
    growth = fit_growth()
    for only_routing in (False, True):
        stages = stages_with(growth, MEASURED, 1024, 1, only_routing)
        lookup = sum(stages.cpu[name] for name in STAGES)
        assert lookup == pytest.approx(growth.lookup(1024))
        assert 16 * stages.transfer == pytest.approx(growth.transfers(1024))
    synchronous = step_seconds("synchronous", stages, 8, PLENTY)
    assert synchronous == pytest.approx(growth.dense + growth.beside(1024))


def test_the_shape_of_the_papers_table() -> None:
    growth = fit_growth()
    simulated = {method: factors(growth, MEASURED, method) for method in PAPER}
    for ranks in RANKS[1:]:
        order = [simulated[m][ranks] for m in ("synchronous", "groups", "dual", "nested")]
        assert order == sorted(order), ranks
    for method in ("dual", "nested"):
        for ranks in RANKS:
            assert simulated[method][ranks] == pytest.approx(PAPER[method][ranks], rel=0.05)
    assert simulated[FITTED][1536] == pytest.approx(PAPER[FITTED][1536], rel=0.05)
    # One thread routes. If most of a lookup, or all of its growth, were routing, nested would wait
    # for that thread.
    assert factors(growth, MEASURED, "nested", only_routing=True)[1536] < 0.8
    routing = MEASURED | {"route": 90}
    assert factors(growth, routing, "nested")[1536] < 0.8
    divided = routing | balance(routing)
    assert factors(growth, divided, "nested")[1536] == pytest.approx(0.94, rel=0.02)
