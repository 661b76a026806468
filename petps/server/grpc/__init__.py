"""The gRPC door: ``petps.v1`` (petps/v1/petps.proto), health and reflection, in its own thread.

Owns:        the event loop; the calls in flight; the mapping of names to ids; the conversion of
             rows to the requested form; the mapping of errors (codes.py); the watchers of versions
             (watch.py); the shard map as a message (shards.py).
Never does:  look up rows, or check keys and limits. Each call becomes a request to the native
             server's workers (``_native.Calls``), like a request from the native port.
Called by:   lifecycle.
Invariants:  Everything except GrpcServer's methods runs in the loop's thread, and never blocks it.
             A watcher holds at most one change per instance.
Threads:     One thread at a time may call GrpcServer's methods.
"""

from petps.server.grpc.door import GrpcServer

__all__ = ["GrpcServer"]
