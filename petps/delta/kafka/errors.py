"""Mapping of Kafka's errors to errors of petps."""

from __future__ import annotations

from typing import Final

from confluent_kafka import KafkaError

from petps.errors import (
    FailedPrecondition,
    InvalidArgument,
    IoError,
    NotFound,
    PermissionDenied,
    PetpsError,
    ResourceExhausted,
    Unavailable,
)

__all__ = ["AWAY", "DENIED", "GONE", "MOVING", "as_petps"]

# Errors that a retry does not fix. They are raised at once.
DENIED: Final = frozenset(
    {
        KafkaError._AUTHENTICATION,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.UNSUPPORTED_SASL_MECHANISM,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError._SSL,
    }
)
AWAY: Final = frozenset(
    {
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._RESOLVE,
        KafkaError._TIMED_OUT,
        KafkaError._MSG_TIMED_OUT,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError._PURGE_QUEUE,
        KafkaError._PURGE_INFLIGHT,
        KafkaError.NOT_ENOUGH_REPLICAS,
        KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    }
)
GONE: Final = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError.UNKNOWN_TOPIC_ID,
    }
)
# Temporary errors of a partition that changes its leader or was just created.
MOVING: Final = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.REPLICA_NOT_AVAILABLE,
    }
)
_REMEDY: Final = {
    KafkaError._SSL: "check ssl.ca.location, ssl.certificate.location and ssl.key.location",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "ask for the right to describe, read or write the topic",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "ask for the right to write idempotently, or to "
    "create the topic",
    KafkaError.UNSUPPORTED_SASL_MECHANISM: "check sasl.mechanism",
}
_PASSWORD: Final = "check sasl.username, sasl.password and sasl.mechanism"


def as_petps(error: KafkaError, subject: str) -> PetpsError:
    """Return the petps error for one of Kafka; ``subject`` names the log and the operation."""
    code, text = error.code(), f"{subject}: {error.str()}"
    if code in DENIED:
        return PermissionDenied(f"{text}; {_REMEDY.get(code, _PASSWORD)}")
    if code in GONE:
        return NotFound(
            f"{text}; the first publisher creates the topic, or create it with as many partitions "
            "as the model has"
        )
    if code == KafkaError.MSG_SIZE_TOO_LARGE:
        return FailedPrecondition(
            f"{text}; give the topic max.message.bytes of at least 1048588, or publish with a "
            "smaller chunk_bytes"
        )
    if code in (KafkaError.INVALID_REPLICATION_FACTOR, KafkaError.POLICY_VIOLATION):
        return InvalidArgument(f"{text}; set topic.replication.factor to an allowed value")
    if code in (KafkaError._INVALID_ARG, KafkaError.INVALID_CONFIG, KafkaError.INVALID_PARTITIONS):
        return InvalidArgument(text)
    if code == KafkaError.KAFKA_STORAGE_ERROR:
        return IoError(f"{text}; look at the broker's disk")
    if code == KafkaError._QUEUE_FULL:
        return ResourceExhausted(text)
    if code in AWAY or code in MOVING or error.retriable():
        return Unavailable(f"{text}; check the address, and that the brokers are up")
    return FailedPrecondition(text)
