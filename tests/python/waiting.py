"""Waiting for a condition, with a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Return the result of ``condition`` once it is true; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not true after {seconds} s"
        time.sleep(0.005)
    return result
