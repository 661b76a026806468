"""Fixtures and hooks that several suites share."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.etcd import server as etcd_server
from tests.kafka.broker import Broker, NotAvailable
from tests.s3 import server as s3_server
from tests.seed import SEED

KAFKA_GROUP = "kafka"
# Of calls that give none: those that tests expect to succeed do so on a machine that stalls, too.
DEADLINE_MS = 20_000
# `make page` runs it in an environment of its own, the only one with Playwright.
collect_ignore = [] if importlib.util.find_spec("playwright") else ["page"]

# No example fails because it is slow. A failure prints the blob that reproduces it.
settings.register_profile("petps", deadline=None, print_blob=True)
settings.load_profile("petps")


def pytest_configure() -> None:
    """Let clients of tests have a longer default deadline than those of users."""
    if importlib.util.find_spec("petps_client") is not None:
        connect = importlib.import_module("petps_client").connect
        connect.__kwdefaults__["deadline_ms"] = DEADLINE_MS


def pytest_report_header() -> str:
    return f"PETPS_SEED={SEED}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Add the seed to the report of a failed test."""
    report = (yield).get_result()  # type: ignore[attr-defined]
    if report.failed:
        report.sections.append(("seed", f"PETPS_SEED={SEED}"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run all tests that use the broker in one process, so that one broker serves them all."""
    for item in items:
        if "kafka" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group(KAFKA_GROUP))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail if pytest-xdist ignores groups, which some versions do silently."""
    group = item.get_closest_marker("xdist_group")
    if group is not None and item.config.getoption("loadgroup", False):
        assert item.nodeid.endswith(f"@{group.args[0]}"), "pytest-xdist does not see its group"


@pytest.fixture(scope="session")
def kafka() -> Iterator[Broker]:
    """Yield a running broker. A test that kills the broker must start it again."""
    folder = Path(tempfile.mkdtemp(prefix="petps-kafka-"))
    try:
        broker = Broker(folder)
    except NotAvailable as reason:
        pytest.skip(f"no Kafka broker: {reason}")
    try:
        with pytest.MonkeyPatch.context() as patch:  # tests of silence set less
            patch.setattr("petps.delta.kafka.client.REQUEST_SECONDS", 20.0)
            patch.setattr("petps.delta.kafka.log.READ_SECONDS", 60.0)
            yield broker
    finally:
        broker.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def s3() -> Iterator[s3_server.Server]:
    """Yield a running S3 server, which clients find by the environment.

    A test that kills the server must start it again.
    """
    pytest.importorskip("s3fs")
    folder = Path(tempfile.mkdtemp(prefix="petps-s3-"))
    try:
        server = s3_server.Server(folder)
    except s3_server.NotAvailable as reason:
        pytest.skip(f"no S3 server: {reason}")
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in server.environment.items():
                patch.setenv(name, value)
            yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def make_etcd() -> Iterator[Callable[..., etcd_server.EtcdServers]]:
    """Yield a function that starts an etcd with ``members``. Skips without etcd or its client."""
    pytest.importorskip("etcd3gw")
    running: list[etcd_server.EtcdServers] = []
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # a disk may stall for seconds
    folder = Path(tempfile.mkdtemp(prefix="petps-etcd-", dir=memory))

    def start(members: int = 1, **options: Any) -> etcd_server.EtcdServers:
        try:
            etcd = etcd_server.EtcdServers(folder / str(len(running)), members, **options)
        except etcd_server.NotAvailable as reason:
            pytest.skip(f"no etcd: {reason}")
        running.append(etcd)
        return etcd

    yield start
    for etcd in running:
        etcd.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def seed() -> int:
    """Return the seed of this run."""
    return SEED


@pytest.fixture
def topic() -> Callable[[], str]:
    """Return a function that makes names of topics which no other test uses."""
    return lambda: f"t-{uuid.uuid4().hex[:12]}"
