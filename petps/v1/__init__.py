"""Room v1: the messages and the service of gRPC, package ``petps.v1``.

Owns:        petps.proto; the build makes ``petps_pb2`` and ``petps_pb2_grpc`` of it.
Never does:  anything: what a call does is server's.
Called by:   server (grpc/), and whoever speaks to it: ``petps_pb2_grpc.PetpsStub(channel)``.
Invariants:  numbers of fields are never reused.
"""
