"""A client of a server that is being killed: its first connection may take several tries."""

from __future__ import annotations

import threading
from typing import Any

import petps_client


def connect_when_up(url: str, stop: threading.Event, **options: Any) -> petps_client.Client:
    """Call petps_client.connect() repeatedly while the server is down, until ``stop`` is set."""
    while True:
        try:
            return petps_client.connect(url, **options)
        except (petps_client.Unavailable, petps_client.DeadlineExceeded):
            if stop.wait(0.01):
                raise
