"""The fixture that starts servers and kills what is left of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.system.servers import Server


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Yield a function that starts a Server with its arguments."""
    servers: list[Server] = []

    def start(*arguments: Any, **options: Any) -> Server:
        servers.append(Server(*arguments, **options))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()
