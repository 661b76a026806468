"""Room admin: administration of a running server, package ``petps.admin.v1``.

Owns:        admin.proto and its classes; the place of a server's socket, and the form of the
             address of its admin port.
Never does:  carry out a request (room server does).
Called by:   server, cli.
Invariants:  Field numbers are never reused.
Threads:     any.
"""

from petps.admin.socket import ADMIN_SCHEME, MAX_SOCKET_BYTES, USER_KEY, socket_of

__all__ = ["ADMIN_SCHEME", "MAX_SOCKET_BYTES", "USER_KEY", "socket_of"]
