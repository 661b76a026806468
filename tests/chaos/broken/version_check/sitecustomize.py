"""Breaks a rule: a client does not ask for the version that it has seen."""

import sys
from typing import Any

if "tests.chaos.clients" in sys.orig_argv:
    from petps_client import client

    _pull = client.Client.pull_answer

    def _pull_any(self: Any, *arguments: Any, min_version: int = 0, **options: Any) -> Any:
        return _pull(self, *arguments, **options)

    client.Client.pull_answer = _pull_any  # type: ignore[method-assign]
