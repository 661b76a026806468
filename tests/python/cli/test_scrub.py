"""`petps scrub`, on a pool that no server has open and on one that a server has."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petps import _native, config
from petps.pool.audited import audit_log_of
from petps.server import Serving
from tests.python.cli.conftest import COUNT, Command, expected
from tests.python.cli.test_server_target import settings
from tests.python.server.damaged import damage_row


@pytest.fixture(params=["closed", "served"])
def reached(request: pytest.FixtureRequest, filled: Path) -> Any:
    """Return the pool, with the row of key 700 damaged, without a server or with one."""
    with contextlib.ExitStack() as stack:
        if request.param == "served":
            given: dict[str, dict[str, Any]] = {"pool": {"path": filled}}
            given["scrub"] = {"every": "never"}
            served = config.merge(settings(filled), given, "test")
            stack.enter_context(Serving(served, log=lambda _: None))
        damage_row(filled, expected(np.array([700], np.uint64))[0])
        yield filled


def test_damaged_rows_are_removed_and_listed(run: Command, reached: Path) -> None:
    message = run.fails(9, "scrub", reached)
    assert f"{reached} had 1 damaged rows: check the disk and the memory" in message
    assert "items of default@0: 1,000 rows read, 1 damaged, 1 removed, 1 missing now" in message
    entry = run.json("pull", reached, "items", 700, 701)["rows"]
    assert [row["found"] for row in entry] == [False, True]
    status = run.json("status", reached)
    number = next(str(table["id"]) for table in status["tables"])
    assert status["scrub"]["tables"][number]["missing"] == 1
    assert status["scrub"]["tables"][number]["last_pass"] > 0
    assert "missing: 1 rows of table 'items' of default@0 were damaged" in run("status", reached)
    lines = [json.loads(line) for line in Path(f"{reached}.damage").read_text().splitlines()]
    assert [line["key"] for line in lines if "key" in line] == [700]
    audit = audit_log_of(reached)
    assert audit is not None
    assert "scrub all tables" in audit.read_text()

    assert run.json("scrub", reached, "--table", "items", "--unpaced")["tables"] == [
        {
            "table": "items", "instance": "default@0", "rows": COUNT - 1, "damaged": 0,
            "removed": 0, "unremoved": 0, "default_row_damaged": False, "missing": 1,
        }
    ]  # fmt: skip
    run("push", reached, "items", "700=1,2,3,4")
    run("scrub", reached)
    assert "missing:" not in run("status", reached)


def test_what_cannot_be_scrubbed_says_why(run: Command, filled: Path) -> None:
    assert "has no table 'other'" in run.fails(3, "scrub", filled, "--table", "other")
    assert "address for clients" in run.fails(2, "scrub", "petps://127.0.0.1:1")
    assert "there is no pool" in run.fails(3, "scrub", filled.with_name("none"))


def test_a_closed_pool_is_clean_afterwards(run: Command, filled: Path) -> None:
    damage_row(filled, expected(np.array([7], np.uint64))[0])
    run.fails(9, "scrub", filled)
    assert run.json("verify", filled)["clean"]
    tables = _native.Tables.open(str(filled), read_only=True)
    assert tables.info().was_clean
    tables.close()
