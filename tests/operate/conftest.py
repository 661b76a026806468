"""Fixtures: a watched server, and promtool, without which tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from petps.server import Serving
from tests.operate.prometheus import NotInstalled, tool
from tests.operate.watched import Watched, watched_server


@pytest.fixture(scope="package")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Watched, Serving]]:
    with watched_server(tmp_path_factory.mktemp("watched")) as served:
        yield served


@pytest.fixture(scope="session")
def promtool() -> Path:
    try:
        return Path(tool("promtool"))
    except NotInstalled as error:
        pytest.skip(str(error))
