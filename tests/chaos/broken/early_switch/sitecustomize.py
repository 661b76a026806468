"""Breaks a rule: the target of a move owns the partition before it has the rows."""

import sys

if "controller" in sys.orig_argv:
    from petps.cluster import steps

    steps._Work._has_caught_up = lambda *_: True  # type: ignore[method-assign]
