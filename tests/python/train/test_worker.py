"""A rank whose pool another process still has. Does not cover Ray (tests/train/train_ray.py)."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from petps.errors import InUse
from petps.train import Sgd, TableSpec, ray
from petps.train.link import Links
from petps.train.ray import Worker

SPECS = [TableSpec("item", 4, 100)]


def worker_of(folder: Path) -> Worker:
    return Worker(0, 1, Links.alone(), folder)


def test_a_rank_waits_for_the_process_that_has_its_pool(tmp_path: Path) -> None:
    before = worker_of(tmp_path).open_tables(SPECS, Sgd(0.1))
    timer = threading.Timer(0.3, before.close)
    timer.start()
    with worker_of(tmp_path).open_tables(SPECS, Sgd(0.1), seed=7) as tables:
        assert tables.names == ["item"]
    timer.join()


def test_it_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "LEAVE_SECONDS", 0.2)
    with (
        worker_of(tmp_path).open_tables(SPECS, Sgd(0.1)),
        pytest.raises(InUse, match="open in another process"),
    ):
        worker_of(tmp_path).open_tables(SPECS, Sgd(0.1))
