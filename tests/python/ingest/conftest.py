"""Fixtures of the ingest tests: a clean stream, and an ingest beside its publisher."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petps.delta.directory import DirectoryLog
from petps.publish import Publisher
from petps.server.ingest import Ingest
from tests.python.ingest.driver import SCHEMAS, P, Stream, publish_versions, stream_of
from tests.python.ingest.model import Letters, MemoryTables

VERSIONS = 12


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Stream:
    """Return the stream of a run of publisher a with VERSIONS versions."""
    log = DirectoryLog(tmp_path_factory.mktemp("clean"), partitions=P)
    publisher = Publisher(log, "m", tables=SCHEMAS, run=5, publisher_id="a")
    publisher.begin_continue(None)
    publish_versions(publisher, np.random.default_rng(3), VERSIONS)
    stream = stream_of(log, publisher.position())
    log.close()
    return stream


class Bench:
    """A log with a publisher, and an ingest of the log, which the test starts."""

    def __init__(self, tmp_path: Path, **options: Any) -> None:
        self.log = DirectoryLog(tmp_path / "log", partitions=P)
        self.instance = MemoryTables(SCHEMAS, P)
        self.publisher = Publisher(self.log, "m", tables=SCHEMAS)
        self.publisher.begin_continue(None)
        self.letters = Letters()
        self.ingest = Ingest(self.log, self.instance, dead_letters=self.letters, **options)

    def publish(self, keys: int = 50, value: float = 1) -> int:
        self.publisher.publish("user", np.arange(keys), np.full((keys, 4), value, np.float32))
        return self.publisher.commit()

    def stop(self) -> None:
        assert self.ingest.stop(60)
        self.log.close()


@pytest.fixture
def idle_bench(tmp_path: Path) -> Iterator[Bench]:
    """Yield a bench whose ingest the test starts; the fixture stops it."""
    bench = Bench(tmp_path)
    yield bench
    bench.stop()


@pytest.fixture
def bench(idle_bench: Bench) -> Bench:
    """Return a bench whose ingest runs."""
    idle_bench.ingest.start()
    return idle_bench
