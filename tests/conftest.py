"""Fixtures of several suites."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.kafka.broker import Broker, NotAvailable
from tests.seed import SEED

KAFKA_GROUP = "kafka"

# No test fails on a clock; a failure prints what repeats it.
settings.register_profile("petps", deadline=None, print_blob=True)
settings.load_profile("petps")


def pytest_report_header() -> str:
    return f"PETPS_SEED={SEED}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """What failed says the seed too."""
    report = (yield).get_result()  # type: ignore[attr-defined]
    if report.failed:
        report.sections.append(("seed", f"PETPS_SEED={SEED}"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests that use the broker run in one process, so that one broker serves them all."""
    for item in items:
        if "kafka" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group(KAFKA_GROUP))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Some versions of pytest-xdist lose the groups without a word."""
    group = item.get_closest_marker("xdist_group")
    if group is not None and item.config.getoption("loadgroup", False):
        assert item.nodeid.endswith(f"@{group.args[0]}"), "pytest-xdist does not see its group"


@pytest.fixture(scope="session")
def kafka() -> Iterator[Broker]:
    """A running broker; a test that kills it starts it again."""
    folder = Path(tempfile.mkdtemp(prefix="petps-kafka-"))
    try:
        broker = Broker(folder)
    except NotAvailable as reason:
        pytest.skip(f"no Kafka broker: {reason}")
    try:
        yield broker
    finally:
        broker.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def seed() -> int:
    """Of this run."""
    return SEED


@pytest.fixture
def topic() -> Callable[[], str]:
    """Names of topics that nobody else uses."""
    return lambda: f"t-{uuid.uuid4().hex[:12]}"
