"""Room server: the life of a server process, with its HTTP and gRPC endpoints ("doors").

Owns:        open -> recover -> serve -> ingest -> drain -> close (lifecycle.py); signals and the
             ready file (process.py); what SIGHUP changes (reload.py); messages to the service
             manager (notify.py); whether threads make progress (progress.py); the check of a
             configuration's places (check.py); backups by schedule (backups.py); health, metrics
             and the status page (http.py, metrics.py, page/); what the page shows: what is wrong
             (problems.py, incidents.py), the last hour (history.py), the other servers
             (members.py), put together by watch.py; why it is not ready (readiness.py); gRPC
             (grpc/); administration (admin.py, admin_requests.py, changes.py, refusals.py,
             served.py); its part of a cluster (cluster/); tables that grow automatically
             (growth.py), rows that expire (expiry.py), rows that are checked and restored
             (scrub.py, scrubber.py, repair.py); credentials (credentials.py, access.py, tls.py);
             the common form of a status (status.py); the shard map's file (shard_map.py,
             FORMAT.md); the native server of a configuration (native_server.py).
Never does:  answer pulls or pushes (native room server does); interpret deltas (room
             server/ingest does).
Called by:   cli serve, demo, tests.
Invariants:  Pulls are served before ingest and the other doors start. SIGTERM and SIGINT drain and
             close. A failure of ingest never stops the serving of pulls.
"""

from petps.server.lifecycle import Serving
from petps.server.process import serve
from petps.server.status import normalise_status

__all__ = ["Serving", "normalise_status", "serve"]
