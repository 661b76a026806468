"""Room server: the life of a server process, its HTTP and its gRPC door.

Owns:        open -> recover -> serve -> ingest -> drain -> close (lifecycle.py), health, metrics,
             the status page (http.py, metrics.py, page.html), gRPC (grpc/), the one form of a
             status (status.py), the shard map's file (shard_map.py, FORMAT.md).
Never does:  answer pulls or pushes (native room server does), decide what a delta means (ingest).
Called by:   cli serve, demo, tests.
Invariants:  pulls are served before ingest and the other doors start; SIGTERM and SIGINT drain and
             closes; an ingest that fails never stops the serving of pulls.
"""

from petps.server.lifecycle import Serving, serve
from petps.server.status import normalised

__all__ = ["Serving", "normalised", "serve"]
