"""The gRPC door: ``petps.v1`` (petps/v1/petps.proto), health and reflection, on its own thread.

Owns:        the event loop; the calls in flight; the mapping of names to ids; the conversion of
             rows to the requested form; the mapping of errors (codes.py); the watchers of versions
             (watch.py).
Never does:  look up rows, or check keys and limits. Each call becomes a frame for the native
             server's own workers (``_native.Calls``), which treat it like one from the native port.
Called by:   lifecycle.
Invariants:  Everything except GrpcServer's methods runs on the loop's thread. Nothing there blocks.
             A watcher holds at most one change per instance.
Threads:     one thread at a time may call GrpcServer's methods.
"""

from petps.server.grpc.door import GrpcServer

__all__ = ["GrpcServer"]
