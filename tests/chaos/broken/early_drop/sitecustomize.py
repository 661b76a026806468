"""Breaks a rule: the source of a move removes its rows when the move begins, while it owns them."""

import sys
from dataclasses import replace
from typing import Any

if "serve" in sys.orig_argv:
    from petps.server.cluster import removal

    _begin_removal = removal.Removal.__init__

    def _begin_any(self: Any, *arguments: Any, **options: Any) -> None:
        _begin_removal(self, *arguments, **{**options, "may_remove": lambda *_: True})

    removal.Removal.__init__ = _begin_any  # type: ignore[method-assign]

if "controller" in sys.orig_argv:
    from petps.cluster import steps
    from petps.cluster.limits import Step
    from petps.cluster.records import Drop, dump

    _begin = steps._Work._begin

    def _begin_and_drop(self: Any, partition: int, source: str | None, *rest: Any) -> Step:
        step = _begin(self, partition, source, *rest)
        if source is None:
            return step
        drop = dump(Drop(source, partition, 0))
        return replace(step, puts={**step.puts, self._keys.drop(source, partition): drop})

    steps._Work._begin = _begin_and_drop  # type: ignore[method-assign, assignment]
