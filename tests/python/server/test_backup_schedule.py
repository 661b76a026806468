"""Backups by schedule: when they are made, what the status shows, and wrong settings."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import petps
from petps import config
from petps.errors import InvalidArgument
from petps.pool.restore import list_backups
from petps.server import Serving
from tests.python.server.backed_up import World, ignore
from tests.python.waiting import wait_until


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


def test_backups_by_schedule(world: World) -> None:
    lines: list[str] = []
    world.publish(100)
    schedule = {"store": str(world.store), "every": "1s", "keep": "all=1h"}
    with Serving(world.settings(backup=schedule), log=lines.append) as serving:
        wait_until(lambda: serving.status()["backup"]["written"] >= 3)
        state = serving.status()["backup"]
        assert state["error"] is None
        assert state["last"]["version"] >= 3
        metrics = serving._metrics_text("")[0].decode()
        assert "petps_backup_failed 0.0" in metrics
        (shown,) = re.findall(r"^petps_backup_last_success_timestamp_seconds (.*)", metrics, re.M)
        assert time.time() - 60 < float(shown) <= time.time()
        assert any(re.match(r"backup \d+ of default@0 \(full", line) for line in lines)
    entries = list_backups(str(world.store))
    times = [entry["created_ns"] for entry in entries]
    assert len(times) >= 3
    assert all(b - a > 0.9e9 for a, b in pairwise(times))


def test_a_schedule_that_fails_says_so_and_recovers(world: World) -> None:
    lines: list[str] = []
    world.publish(100)
    place = world.folder / "place"
    place.write_text("not a folder")
    schedule = {"store": str(place / "store"), "every": "1s"}
    with Serving(world.settings(backup=schedule), log=lines.append) as serving:
        wait_until(lambda: serving.status()["backup"]["failures"] >= 2)
        state = serving.status()["backup"]
        assert "Not a directory" in state["error"]
        assert state["last"] is None
        assert "petps_backup_failed 1.0" in serving._metrics_text("")[0].decode()
        assert sum("no backup was made" in line for line in lines) == 1
        place.unlink()
        wait_until(lambda: serving.status()["backup"]["written"] >= 1)
        assert serving.status()["backup"]["error"] is None


def test_a_clock_that_was_ahead_does_not_stop_the_schedule(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with petps.open(world.pool) as opened:
        opened.back_up(world.store)
    year = 365 * 86_400
    real = time.time
    monkeypatch.setattr("petps.server.backups.time.time", lambda: real() - year)
    with Serving(world.settings(backup={"store": str(world.store)}), log=ignore) as serving:
        wait_until(lambda: serving.status()["backup"]["written"] == 1)


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"store": "s", "every": "never"}, "must be above 0"),
        ({"store": "s", "every": "6"}, "such as 90s"),
        ({"store": "s", "keep": "all=1d,all=2d"}, "at most once"),
        ({"store": ""}, "has no name"),
        ({"store": "ftp://me:secret@host/s"}, "has a password"),
        ({"store": "ftp://me:sec/ret@host/s"}, "has a password"),
        ({"store": "https://host/s?sig=secret"}, "has a '\\?' or a '#'"),
        ({"store": "s3://bucket/s#secret"}, "has a '\\?' or a '#'"),
        ({"store": "s", "keep": "all"}, "rules such as all=2d"),
        ({"store": "s", "keep": "all=1h,yearly=1d"}, "rules such as all=2d"),
        ({"stores": "s"}, "stores"),
    ],
)
def test_a_section_that_is_wrong(section: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text) as caught:
        config.merge(None, {"pool": {"path": "p"}, "backup": section}, "test")
    assert "secret" not in str(caught.value).removeprefix("test: ")


@pytest.mark.parametrize("store", ["s3://bucket/a b", "http://h:9000/a@b", "/srv/what?", "a#b"])
def test_a_store_may_have(store: str) -> None:
    given = config.merge(None, {"pool": {"path": "p"}, "backup": {"store": store}}, "test")
    assert given.backup.store == store


def test_the_store_of_ingest_has_no_credential_either() -> None:
    sections: dict[str, Any] = {"pool": {"path": "p"}, "ingest": {"store": "s3://b/s?x=secret"}}
    with pytest.raises(InvalidArgument, match=r"\[ingest\] store: .*a '\?' or a '#'") as caught:
        config.merge(None, sections, "test")
    assert "secret" not in str(caught.value)
