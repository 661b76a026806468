"""Breaks a rule: the target of a move owns the partition before it has the rows.

A server says of keys whose log it has not read that it lacks them, and clients ask its replica. So
that the checks see the rule alone, servers do not say so here.
"""

import sys

if "controller" in sys.orig_argv:
    from petps.cluster import steps

    steps._Work._has_caught_up = lambda *_: True  # type: ignore[method-assign]
elif "serve" in sys.orig_argv:
    from petps.server.cluster.unread import Unread

    Unread._set = lambda *_: None  # type: ignore[method-assign]
