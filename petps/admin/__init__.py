"""Room admin: administration of a running server, package ``petps.admin.v1``.

Owns:        admin.proto and its classes; socket_of(), the place of a server's socket.
Never does:  carry out a request (room server does).
Called by:   server, cli.
Invariants:  Field numbers are never reused.
Threads:     any.
"""

from petps.admin.socket import MAX_SOCKET_BYTES, USER_KEY, socket_of

__all__ = ["MAX_SOCKET_BYTES", "USER_KEY", "socket_of"]
