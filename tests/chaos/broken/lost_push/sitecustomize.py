"""Breaks a rule: one push in fifty is acknowledged, and nobody has it."""

import random
import sys
from typing import Any, Final

LOST: Final = 0.02

if "tests.chaos.clients" in sys.orig_argv:
    from petps_client import client

    _push = client.Client.push

    def _push_most(self: Any, *arguments: Any, **options: Any) -> Any:
        if random.random() < LOST:
            return None
        return _push(self, *arguments, **options)

    client.Client.push = _push_most  # type: ignore[method-assign]
