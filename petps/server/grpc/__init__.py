"""The gRPC door: ``petps.v1`` (petps/v1/petps.proto), health and reflection, on its own thread.

Owns:        the event loop, which calls are in flight, names -> ids, rows in the form asked for,
             the mapping of errors (codes.py), who watches versions (watch.py).
Never does:  look rows up, judge keys or limits: every call becomes a frame for the native server's
             own workers (``_native.Calls``), which answer it as one from the native port.
Called by:   lifecycle.
Invariants:  everything but GrpcDoor's methods runs on the loop's thread; nothing there blocks; a
             watcher holds one change an instance at most.
Threads:     GrpcDoor's methods by one thread at a time.
"""

from petps.server.grpc.door import GrpcDoor

__all__ = ["GrpcDoor"]
