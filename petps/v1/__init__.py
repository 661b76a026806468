"""Room v1: the messages and the service of gRPC, package ``petps.v1``.

Owns:        petps.proto. The build generates ``petps_pb2`` and ``petps_pb2_grpc`` from it.
Never does:  implement the calls; room server does.
Called by:   server (grpc/), and its clients: ``petps_pb2_grpc.PetpsStub(channel)``.
Invariants:  Field numbers are never reused.
"""
