"""Orders to remove rows that change while others are obeyed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from petps.cluster.records import Drop
from petps.server.cluster import removal
from tests.python.waiting import wait_until


def test_an_order_that_waits_by_now_is_not_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    removed: list[int] = []

    def remove(
        tables: Any, model: str, partition: int, *, may_go_on: Callable[[], bool], **_: Any
    ) -> None:
        if partition == 0:
            begun.set()
            assert goes_on.wait(60)
        if not may_go_on():
            raise removal.Stopped
        removed.append(partition)

    monkeypatch.setattr(removal, "remove_partition", remove)
    worker = removal.Removal(
        None,  # type: ignore[arg-type]
        "m",
        held=nullcontext,
        may_remove=lambda partition, version: True,
        log=lambda line: None,
    )
    orders = {partition: Drop("here:1", partition, 3) for partition in range(3)}
    worker.set_orders(orders)
    assert begun.wait(60)
    worker.set_orders({0: orders[0], 2: Drop("here:1", 2, 4)})  # 2 is another order by now
    goes_on.set()
    wait_until(lambda: worker.waiting() == [0, 2] and removed == [0, 2])
    worker.close()
    assert removed == [0, 2]
