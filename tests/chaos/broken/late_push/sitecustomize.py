"""Breaks a rule: the owner of a push-fed partition takes pushes after it has promised not to."""

import sys

if "serve" in sys.orig_argv:
    from petps.server.cluster import pauses

    pauses.Pauses._apply = lambda self: None  # type: ignore[method-assign]
