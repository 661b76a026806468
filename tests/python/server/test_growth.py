"""Tables that grow automatically, up to their ceiling, while rows are pushed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import petps_client
import pytest

from petps import config
from petps.errors import InvalidArgument, ResourceExhausted
from petps.server import Serving
from petps.server.growth import FULL_SHARE
from tests.python.server.conftest import settings
from tests.python.waiting import wait_until

ITEMS = {"dim": 4, "capacity": 1000, "grow": "auto", "capacity_max": 3000}


def capacity_of(serving: Serving, table: str) -> int:
    (entry,) = (entry for entry in serving.status()["tables"] if entry["name"] == table)
    return int(entry["capacity"])


def test_a_table_grows_up_to_its_ceiling(pool: Path) -> None:
    lines: list[str] = []
    with (
        Serving(settings(pool, tables={"items": ITEMS}), log=lines.append) as serving,
        petps_client.connect(f"petps://127.0.0.1:{serving.port}") as client,
    ):

        def push(first: int, last: int) -> None:
            keys = np.arange(first, last, dtype=np.uint64)
            client.push("items", keys, np.full((len(keys), 4), 3.0, np.float32))

        push(100, int(FULL_SHARE * 1000) - 1)
        assert capacity_of(serving, "items") == 1000
        push(int(FULL_SHARE * 1000) - 1, 900)
        wait_until(lambda: capacity_of(serving, "items") == 2000)
        push(900, 1900)
        wait_until(lambda: capacity_of(serving, "items") == 3000)
        push(1900, 3000)
        with pytest.raises(ResourceExhausted):
            push(3000, 3001)
        ceiling = "table 'items' is at its capacity_max of 3,000 rows"
        wait_until(lambda: ceiling in lines)
        _, mask = client.pull("items", np.arange(3000, dtype=np.uint64), return_mask=True)
        assert mask.all()
        assert capacity_of(serving, "fed") == 1000
    assert "table 'items' has grown from 1,000 to 2,000 rows" in lines
    assert "table 'items' has grown from 2,000 to 3,000 rows" in lines
    assert lines.count(ceiling) == 1
    with Serving(settings(pool, tables={"items": ITEMS}), log=lines.append):
        pass
    assert not any("is ignored" in line for line in lines), "it has grown as configured"


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"grow": "auto"}, "belong together"),
        ({"capacity_max": 5000}, "belong together"),
        ({"grow": "auto", "capacity_max": 999}, "below the capacity of 1000"),
        ({"grow": "sometimes"}, "grow"),
    ],
)
def test_settings_that_contradict_each_other(keys: dict[str, object], text: str) -> None:
    given: dict[str, dict[str, Any]] = {
        "pool": {"path": "p"},
        "tables": {"items": {"dim": 4, "capacity": 1000} | keys},
    }
    with pytest.raises(InvalidArgument, match=text):
        config.merge(None, given, "test")
