"""Reports for the page: those of a real server, with numbers of a busy hour put in."""

from __future__ import annotations

import copy
import math
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import petps
from petps import config
from petps.server import Serving
from petps.server.history import SAMPLES, SERIES
from petps.server.incidents import Timeline
from petps.server.problems import find_problems, headline

TABLES = ("ads", "items", "users", "words")


def status_of_a_real_server(folder: Path) -> dict[str, Any]:
    """Return the status of a server of two versions of a model that follows a log."""
    path = folder / "pool"
    with petps.create(path, durability="process") as pool:
        pool.create_model("ctr", partitions=4)
        for name in TABLES:
            pool.create_table(name, dim=16, capacity=1000, model="ctr", feed="delta")
        pool.create_instance("ctr@2")
    sections: dict[str, Any] = {
        "pool": {"path": path},
        "model": {"name": "ctr"},
        "ingest": {"log": folder / "log"},
        "server": {"port": 0, "http_port": 0, "grpc_port": 0},
    }
    with Serving(config.merge(None, sections, "test"), log=lambda line: None) as serving:
        deadline = time.monotonic() + 60
        while serving.unready() is not None:
            assert time.monotonic() < deadline, serving.unready()
            time.sleep(0.02)
        status = serving.status()
    status["pool"]["path"] = "ctr.pool"
    status["ingest"]["log"] = "kafka://kafka-1:9092/ctr-deltas"
    return status


class FakeReports:
    """A status and a history. ``change`` is called with each status before it is judged."""

    def __init__(self, base: dict[str, Any]) -> None:
        self._base = base
        self._timeline = Timeline()
        self._random = random.Random(7)
        self.asked = 0
        self.can_answer = threading.Event()
        self.can_answer.set()
        self.series = self._busy_hour()
        self.changes: list[Any] = []

    def status(self) -> dict[str, Any]:
        """Return the status as the server's watch would complete it."""
        assert self.can_answer.wait(60)
        self.asked += 1
        status = copy.deepcopy(self._base)
        status |= {"host": "127.0.0.1", "port": 7070, "uptime_s": 190_000.0, "members": []}
        status |= {"can_switch": True, "now": time.time()}
        status["stats"]["connections"] = 48
        for number, table in enumerate(status["tables"]):
            table |= {"rows": 120 + 140 * (number % 4), "missing_rows": 0}
        status["recent"] = self._recent(status)
        for part in status["ingest"]["partitions"]:
            part |= {"lag_seconds": 0.3, "version": 118, "run": 3, "seq": 40_120, "state":
                     "following", "reason": ""}  # fmt: skip
            part["freshness"] = {"p50_ms": 12.5, "p90_ms": 30.0, "p99_ms": 61.0}
        status["ingest"]["freshness"] = {"p50_ms": 12.5, "p90_ms": 30.0, "p99_ms": 61.0}
        status["ingest"]["version"] = 118
        for instance, version in zip(status["instances"], (118, 120), strict=True):
            instance |= {"applied_version": version, "run": 3}
        status["incidents"] = []
        for change in self.changes:
            change(status)
        self._timeline.note_incidents(status["incidents"])
        status["events"] = self._timeline.events()
        problems = find_problems(status)
        status |= self._timeline.note_problems(problems)
        status["events"] = self._timeline.events()
        status["headline"] = headline(problems, status["well_since"])
        return status

    def history(self) -> dict[str, Any]:
        """Return the hour."""
        now = time.time()
        return {
            "ended_at": now - 2, "now": now, "seconds": 10.0, "samples": SAMPLES,
            "series": self.series,
        }  # fmt: skip

    def _busy_hour(self) -> dict[str, list[float | None]]:
        times = np.arange(SAMPLES)
        noise = [self._random.gauss(0, 1) for _ in times]
        load = [4200 + 900 * math.sin(t / 60) + 90 * n for t, n in zip(times, noise, strict=True)]
        series: dict[str, list[float | None]] = {
            "pulls_per_second": list(load),
            "keys_per_second": [410 * value for value in load],
            "hit_rate": [0.982 + 0.002 * n for n in noise],
            "p50_us": [96 + value / 60 for value in load],
            "p99_us": [420 + value / 9 + 30 * abs(n) for value, n in zip(load, noise, strict=True)],
            "errors_per_second": [0.0] * SAMPLES,
            "lag_seconds": [0.3 + 0.05 * abs(n) for n in noise],
            "freshness_p50_ms": [12.0 + abs(n) for n in noise],
            "freshness_p99_ms": [58 + 6 * abs(n) for n in noise],
        }
        assert set(series) == set(SERIES)
        return series

    def _recent(self, status: dict[str, Any]) -> dict[str, Any]:
        recent: dict[str, Any] = copy.deepcopy(status["recent"])
        percentiles = {"count": 252_000, "p50_us": 166.0, "p99_us": 900.0}
        recent |= {
            "seconds": 64.0, "pulls_per_second": 4210.0, "keys_per_second": 1_726_000.0,
            "pushes_per_second": 0.0, "errors_per_second": 0.0, "bytes_received_per_second": 1.4e7,
            "bytes_sent_per_second": 1.1e8, "hit_rate": 0.982, "latency": {"pull": percentiles},
        }  # fmt: skip
        recent["tables"] = {
            str(table["id"]): {
                "pulls_per_second": 1000.0 + 7 * table["id"], "keys_per_second": 430_000.0,
                "keys": 27_000_000, "misses": 500_000, "hit_rate": 0.9815, **percentiles,
            }
            for table in status["tables"]
            if table["instance"] == status["instances"][0]["name"]
        }  # fmt: skip
        few = {"keys": 5_000_000, "misses": 90_000}
        recent["latest"] = {"seconds": 12.0, "tables": dict.fromkeys(recent["tables"], few)}
        return recent
