"""What bounds the connections of a gRPC port: options of gRPC's core, which owns them."""

from __future__ import annotations

from typing import Final

__all__ = ["CONNECTION_LIMITS"]

# Of one port. gRPC cannot bound those of one peer.
MAX_CONNECTIONS: Final = 1024

CONNECTION_LIMITS: Final = (
    ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    # From accepting a peer until its TLS and HTTP/2 have begun; by default two minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Without a call for this time the connection ends; a client reconnects at its next call.
    ("grpc.max_connection_idle_ms", 300_000),
)
