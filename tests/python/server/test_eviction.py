"""Tables that evict rows when they are full, as the configuration says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import petps_client
import pytest

import petps
from petps import config
from petps.errors import InvalidArgument, ResourceExhausted
from petps.pool.pool import Pool
from petps.server import Serving
from tests.python.server.conftest import settings
from tests.python.waiting import wait_until

ITEMS = {"dim": 4, "capacity": 1000}


def push(client: Any, first: int, last: int, table: str = "items") -> None:
    keys = np.arange(first, last, dtype=np.uint64)
    client.push(table, keys, np.full((len(keys), 4), 3.0, np.float32))


@pytest.mark.parametrize("rule", ["evict_oldest", "evict_coldest"])
def test_a_full_table_makes_room(pool: Path, rule: str) -> None:
    lines: list[str] = []
    tables = {"items": ITEMS | {"when_full": rule}}
    with (
        Serving(settings(pool, tables=tables), log=lines.append) as serving,
        petps_client.connect(f"petps://127.0.0.1:{serving.port}") as client,
    ):
        for first in range(1000, 9000, 200):
            push(client, first, first + 200)
            keys = np.arange(first, first + 200, dtype=np.uint64)
            assert client.pull("items", keys, return_mask=True)[1].all()
        entry = next(t for t in serving.status()["tables"] if t["name"] == "items")
        assert entry["rows"] <= 1000
        assert entry["evicted"] >= 7000
        assert (entry["heat_bytes"] > 0) == (rule == "evict_coldest")
        assert "petps_table_evicted_rows_total" in serving._metrics_text("")[0].decode()
    with petps.open(pool) as opened:
        assert opened.verify().clean
        with pytest.raises(ResourceExhausted):  # the rule is the server's
            opened.push("items", np.arange(50_000, 52_000), np.ones((2000, 4), np.float32))


def test_rows_that_are_pulled_stay(pool: Path) -> None:
    tables = {"items": ITEMS | {"when_full": "evict_coldest"}}
    with (
        Serving(settings(pool, tables=tables), log=lambda _: None) as serving,
        petps_client.connect(f"petps://127.0.0.1:{serving.port}") as client,
    ):
        push(client, 100, 1000)
        hot = np.arange(100, dtype=np.uint64)
        # One in 16 is counted: 1,250 samples, 12.5 a row, so that chance leaves none without one.
        for _ in range(200):
            client.pull("items", hot)
        for first in range(1000, 5000, 100):
            for _ in range(40):
                client.pull("items", hot)
            push(client, first, first + 100)
        assert client.pull("items", hot, return_mask=True)[1].sum() >= 95


def test_a_new_instance_gets_the_rule_too(pool: Path) -> None:
    tables = {"items": ITEMS | {"when_full": "evict_oldest"}}
    with Serving(settings(pool, tables=tables), log=lambda _: None) as serving:
        Pool(serving._tables, is_borrowed=True).create_instance("default@1")
        client = petps_client.connect(f"petps://127.0.0.1:{serving.port}/default@1")
        push(client, 0, 1000)

        def has_room() -> bool:
            try:
                push(client, 1000, 1100)
            except ResourceExhausted:
                return False
            return True

        wait_until(has_room)
        client.close()


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        (
            {"tables": {"t": ITEMS | {"when_full": "evict_oldest", "feed": "delta"}}},
            "through the log",
        ),
        (
            {
                "tables": {"t": ITEMS | {"when_full": "evict_oldest"}},
                "server": {"shard_map": "map.json", "address": "a:1"},
            },
            "without a shard map",
        ),
        ({"tables": {"t": ITEMS | {"when_full": "evict"}}}, "when_full"),
    ],
)
def test_rules_that_cannot_be(sections: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        config.merge(None, {"pool": {"path": "p"}} | sections, "test")
