"""A plan crosses as text and is the same on every rank."""

from __future__ import annotations

import pytest

from petps.checkpoint import Column, Table
from petps.checkpoint.checkpointer import Decision
from petps.codec import Quantisation
from petps.train.plan import Plan

QUANTISED = {
    "item": Table(
        "item",
        (
            Column("row", "adaptive4", 8, Quantisation("adaptive", 4, bins=25, ratio=0.75)),
            Column("variance", "f32", 8),
        ),
    )
}


@pytest.mark.parametrize(
    "plan",
    [
        Plan((), "", False, 0, None, False),
        Plan(("publish", "checkpoint"), "rank 1: \u00e9", True, 1 << 63, None, True),
        Plan(("publish",), "", True, 7, Decision("base", None, QUANTISED), False),
        Plan((), "", False, 7, Decision("delta", 12, {"a": Table.of("a", 2)}), False),
    ],
)
def test_a_plan_is_the_same_after_it_crossed(plan: Plan) -> None:
    decoded = Plan.decode(plan.encode())
    assert decoded == plan
    assert repr(decoded) == repr(plan)  # also the parameters of a quantisation
