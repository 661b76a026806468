"""What bounds the connections and calls of a gRPC port (DOORS.md)."""

from __future__ import annotations

from typing import Final

__all__ = [
    "CONNECTION_LIMITS",
    "MAX_CALLS",
    "MAX_HEALTH_CALLS",
    "MAX_REFLECTION_CALLS",
    "MAX_WATCHERS",
    "OPEN_REQUESTS_RECEIVED",
    "OPEN_REQUEST_BYTES",
    "REFLECTION_SECONDS",
    "REQUESTS_RECEIVED",
    "REQUEST_SECONDS",
]

# Of one port. gRPC cannot bound those of one peer.
MAX_CONNECTIONS: Final = 1024

# Options of gRPC's core, which owns the connections.
CONNECTION_LIMITS: Final = (
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    # From accepting a peer until its TLS and HTTP/2 have begun; by default two minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Without a call for this time the connection ends; a client reconnects at its next call.
    ("grpc.max_connection_idle_ms", 300_000),
)

# Calls in flight over all connections, watchers included. gRPC refuses more (RESOURCE_EXHAUSTED).
MAX_CALLS: Final = 512
MAX_WATCHERS: Final = 256
# Of these, health, which needs no credential.
MAX_HEALTH_CALLS: Final = 128
# Of these, streams of reflection, which need none either, and how long each of them may last.
MAX_REFLECTION_CALLS: Final = 16
REFLECTION_SECONDS: Final = 60.0
# A request that needs no credential: the name of a service or of a symbol.
OPEN_REQUEST_BYTES: Final = 4096
# A request must be complete this long after its call began.
REQUEST_SECONDS: Final = 10.0
# Requests of one grant that are received at the same time, because gRPC's memory for them counts
# only when they are complete. Further ones wait, as part of that time.
REQUESTS_RECEIVED: Final = 16
# The same for all requests of one peer that need no credential.
OPEN_REQUESTS_RECEIVED: Final = 4
