"""Breaks a rule: a server answers by the first map that it has seen, and accepts no later one.

Its ingest and its removal of partitions follow the newer maps.
"""

import sys
from typing import Any

if "serve" in sys.orig_argv:
    from petps.server import lifecycle
    from petps.server.cluster.map import FIRST_VERSION

    _use = lifecycle.Serving._use_shard_map

    def _use_first(self: lifecycle.Serving, new_map: Any) -> None:
        if self._map is None or self._map.owners.version == FIRST_VERSION:
            _use(self, new_map)
        else:
            self._map = new_map

    lifecycle.Serving._use_shard_map = _use_first  # type: ignore[method-assign]
