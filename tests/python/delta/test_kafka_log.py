"""The Kafka log: topic, options, errors, backpressure, retention, security."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.cimpl import TopicPartition

from petps.delta import MAX_MESSAGE_BYTES, Delivery, Event, Lost, Message
from petps.delta.kafka import KafkaLog, client, parse_address
from petps.delta.kafka.options import KafkaOptions
from petps.delta.kafka.subscription import BUFFER_BYTES_MIN, KafkaSubscription
from petps.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    PetpsError,
    Unavailable,
)
from tests.kafka.broker import PASSWORD, USER, Broker
from tests.python.delta.events import message, numbers, publish, read, take, topic_of
from tests.python.waiting import wait_until


@pytest.fixture
def place(kafka: Broker, topic: Callable[[], str]) -> str:
    return f"kafka://{kafka.address}/{topic()}"


# ---- address and options


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("kafka://", "no address"),
        ("kafka://host:1", "no address"),
        ("kafka:///topic", "no address"),
        ("kafka://host:1/", "no address"),
        ("kafka://h:1/a/b", "topic 'a/b'"),
        ("kafka://h:1/a b", "topic 'a b'"),
        ("kafka://h:1/" + "a" * 250, "249"),
        ("kafka://h:port/a", "'h:port' is no broker"),
        ("kafka://h:1,/a", "'' is no broker"),
        ("kafka://user:secret@h:1/a", "sasl.username"),
        ("http://h:1/a", "no address"),
    ],
)
def test_bad_addresses_are_refused(address: str, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        KafkaLog(address)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"acks": "1"}, "acks cannot be set: a message is durable"),
        ({"auto.offset.reset": "latest"}, "never replaced"),
        ({"error_cb": "x"}, "cannot be set"),
        ({"no.such.option": "x"}, 'No such configuration property: "no.such.option"'),
        ({"socket.timeout.ms": "fast"}, "socket.timeout.ms"),
        ({"topic.replication.factor": "two"}, "not a number"),
        ({"topic.max.message.bytes": "big"}, "not a number"),
    ],
)
def test_bad_options_are_refused(options: dict[str, str], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        KafkaLog("kafka://127.0.0.1:9/t", options=options)


def test_a_missing_password_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"sasl.password.file: .*missing"):
        KafkaLog("kafka://h:1/t", options={"sasl.password.file": str(tmp_path / "missing")})


# ---- the topic


def test_the_first_publisher_creates_the_topic(kafka: Broker, place: str) -> None:
    options = {
        "topic.retention.ms": 3_600_000,
        "topic.replication.factor": 1,
        "topic.min.insync.replicas": 1,
        "topic.compression.type": "zstd",
    }
    with KafkaLog(place, partitions=5, options=options) as log:
        log.publish(4, message(1))
    with KafkaLog(place) as log:
        assert log.partitions == 5
        admin = AdminClient({"bootstrap.servers": kafka.address, "log_level": 0})
        resource = ConfigResource("topic", topic_of(log))
        entries = admin.describe_configs([resource])[resource].result(30)
    for name, value in (
        ("retention.ms", "3600000"),
        ("cleanup.policy", "delete"),
        ("compression.type", "zstd"),
        ("max.message.bytes", "1048588"),
    ):
        assert entries[name].value == value
    with pytest.raises(InvalidArgument, match="has 5 partitions, not 4: the number can never"):
        KafkaLog(place, partitions=4).publish(0, message(1))
    for name in ("replication.factor", "no.such.setting"):
        log = KafkaLog(f"{place}-2", partitions=1, options={f"topic.{name}": 3})
        with pytest.raises(InvalidArgument, match=re.escape(name)):
            log.start_offsets([0])


def test_reading_does_not_create_a_missing_topic(kafka: Broker, place: str) -> None:
    # The broker creates topics automatically (auto.create.topics.enable), with one partition.
    for log in (KafkaLog(place), KafkaLog(place, partitions=3, create=False)):
        with pytest.raises(NotFound, match="first publisher creates the topic"):
            log.end_offsets([0])
        with pytest.raises(NotFound):
            log.subscribe({0: 0})
        with pytest.raises(NotFound):
            log.publish(0, message(0))
        log.close()
    topics = (
        AdminClient({"bootstrap.servers": kafka.address, "log_level": 0})
        .list_topics(timeout=10)
        .topics
    )
    assert parse_address(place).topic not in topics


def test_the_largest_message_is_delivered(place: str) -> None:
    with KafkaLog(place, partitions=1) as log:
        empty = Message([("n", b"0")], b"")
        body = (b"\x00\x01\x80\xff" * MAX_MESSAGE_BYTES)[: MAX_MESSAGE_BYTES - empty.size]
        log.publish(0, Message(empty.headers, body))
        log.flush()
        (event,) = read(log, 1)
        assert isinstance(event, Delivery)
        assert event.message.size == MAX_MESSAGE_BYTES
        assert bytes(event.message.body) == body


# ---- errors reach the caller


def test_unreachable_brokers_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "REQUEST_SECONDS", 1.0)
    options = {"message.timeout.ms": 500, "socket.connection.setup.timeout.ms": 1000}
    log = KafkaLog("kafka://127.0.0.1:9/t", partitions=2, options=options)
    assert log.partitions == 2
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9/t.*check the address"):
        log.end_offsets([0, 1])
    start = time.monotonic()
    for _ in range(100):
        with pytest.raises(Unavailable):
            log.end_offsets([0, 1])
    assert time.monotonic() - start < 30  # less than a second each
    with pytest.raises(Unavailable):
        log.publish(0, message(1))
    log.close()


def test_a_client_that_knows_no_leaders_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """librdkafka's client may keep a partition without a leader after the brokers are back."""

    class Client:
        def __init__(self, answer: Any) -> None:
            self._answer = answer

        def list_offsets(self, requests: dict[Any, Any], **_: Any) -> dict[Any, Future[Any]]:
            future: Future[Any] = Future()
            if isinstance(self._answer, Exception):
                future.set_exception(self._answer)
            else:
                future.set_result(SimpleNamespace(offset=self._answer))
            return dict.fromkeys(requests, future)

        def poll(self, timeout: float) -> None:
            pass

    error = KafkaError(KafkaError._NOENT, "Failed to query partition leaders: No leaders found")
    clients = [Client(KafkaException(error)), Client(7)]
    monkeypatch.setattr(client.KafkaAdmin, "_connect", lambda self: clients.pop(0))
    admin = client.KafkaAdmin(parse_address("kafka://b:9092/t"), KafkaOptions(), "log")
    with pytest.raises(Unavailable, match=r"log: .*No leaders found.*that the brokers are up"):
        admin.offsets([0], start=False)
    assert admin.offsets([0], start=False) == {0: 7}


def test_an_undelivered_message_raises_in_later_calls(kafka: Broker, place: str) -> None:
    with KafkaLog(place, partitions=2) as patient:
        publish(patient, 0)
    log = KafkaLog(place, options={"message.timeout.ms": 1000})
    assert log.partitions == 2
    kafka.kill()
    try:
        log.publish(0, message(1))
        with pytest.raises(PetpsError, match="not delivered"):
            log.flush()
        with pytest.raises(PetpsError, match="not delivered"):
            log.publish(0, message(2))
        log.close()
    finally:
        kafka.start()
    assert numbers(read(KafkaLog(place), 1)) == [0]


def test_close_raises_if_a_message_was_not_delivered(kafka: Broker, place: str) -> None:
    log = KafkaLog(place, partitions=1, options={"message.timeout.ms": 8000})
    publish(log, 0)
    kafka.kill()
    try:
        log.publish(0, message(1))
        # publish() ends with such a poll, which may receive an error that no call has raised yet.
        producer = log._producer
        assert producer is not None
        wait_until(lambda: producer.poll(0.1) > 0 and log._failed)
        with pytest.raises(PetpsError, match="not delivered"):
            log.close()
        log.close()
    finally:
        kafka.start()


def test_a_full_queue_makes_the_publisher_wait(kafka: Broker, place: str) -> None:
    """Stop the broker: the queue stays within its limit, and no message is lost."""
    options = {"queue.buffering.max.kbytes": 1024, "message.timeout.ms": 120_000}
    log = KafkaLog(place, partitions=1, options=options)
    publish(log, 0)
    kafka.kill()
    done: list[int] = []

    def publish_large() -> None:
        for number in range(1, 65):
            log.publish(0, message(number, 65_536))
            done.append(number)

    thread = threading.Thread(target=publish_large)
    thread.start()
    wait_until(lambda: len(done) >= 10)
    time.sleep(0.5)
    assert len(done) <= 17  # 1 MiB, in messages of 64 KiB
    kafka.start()
    thread.join(60)
    assert len(done) == 64
    log.close()
    assert numbers(read(KafkaLog(place), 65)) == list(range(65))


def test_a_closed_log_refuses_messages(place: str) -> None:
    log = KafkaLog(place, partitions=1)
    log.close()
    log.close()
    with pytest.raises(FailedPrecondition, match="closed"):
        log.publish(0, message(1))


def test_a_paused_partition_uses_no_buffer(place: str) -> None:
    with KafkaLog(place, partitions=2) as log:
        for number in range(100):
            log.publish(0, message(number, 100_000))
            log.publish(1, message(number, 100_000))
        log.flush()
        subscription = log.subscribe({0: 0, 1: 0})
        assert isinstance(subscription, KafkaSubscription)
        subscription.pause(1)
        first: list[Event] = []

        def is_full() -> bool:
            first.extend(subscription.poll(max_bytes=1, timeout=0))
            return subscription._buffered >= BUFFER_BYTES_MIN - 200_000

        wait_until(is_full)
        subscription.pause(0)
        subscription.resume(1)
        polls = 0
        others: list[Event] = []
        while len(others) < 100:
            take(subscription, others, len(others) + 1)
            polls += 1
        assert numbers(others) == list(range(100))
        assert polls < 50, "the messages came one by one"
        subscription.resume(0)
        take(subscription, first, 100)
        assert numbers(first) == list(range(100))
        subscription.close()


# ---- a killed broker


def test_a_subscription_outlives_a_killed_broker(kafka: Broker, place: str) -> None:
    with KafkaLog(place, partitions=1) as log:
        publish(log, *range(5))
        subscription = log.subscribe({0: 0})
        events: list[Event] = []
        take(subscription, events, 5)
        kafka.restart()
        publish(log, *range(5, 10))
        take(subscription, events, 10)
        assert numbers(events) == list(range(10))
        subscription.close()


# ---- removed or damaged messages


def test_messages_removed_by_retention_are_lost_not_skipped(kafka: Broker, place: str) -> None:
    options = {"topic.retention.ms": 1_000_000, "topic.segment.bytes": 1 << 20}
    with KafkaLog(place, partitions=1, options=options) as log:
        for number in range(20):
            log.publish(0, message(number, 200_000))
            log.flush()
        subscription = log.subscribe({0: 3})
        admin = AdminClient({"bootstrap.servers": kafka.address, "log_level": 0})
        at = TopicPartition(topic_of(log), 0, 12)
        admin.delete_records([at])[at].result(30)
        assert log.start_offsets([0]) == {0: 12}
        (lost,) = read(log, 1, start=3)
        assert isinstance(lost, Lost)
        assert (lost.offset, lost.start, lost.end) == (3, 12, 20)
        assert "offsets 3 to 11 are gone from the log: retention" in lost.reason
        assert numbers(read(log, 8, start=12)) == list(range(12, 20))
        subscription.close()


def test_messages_removed_during_a_pause_are_lost(kafka: Broker, place: str) -> None:
    with KafkaLog(place, partitions=1) as log:
        publish(log, *range(10))
        subscription = log.subscribe({0: 0})
        subscription.pause(0)
        assert subscription.poll(max_bytes=1 << 20, timeout=0.3) == []
        at = TopicPartition(topic_of(log), 0, 10)
        admin = AdminClient({"bootstrap.servers": kafka.address, "log_level": 0})
        admin.delete_records([at])[at].result(30)
        subscription.resume(0)
        events = wait_until(lambda: subscription.poll(max_bytes=1 << 20, timeout=0.2))
        # Either read before their removal, or lost; never skipped.
        assert numbers(events)[0] in (0, "Lost")
        subscription.close()


def test_a_position_in_a_topic_that_was_created_again_is_lost(kafka: Broker, place: str) -> None:
    log = KafkaLog(place, partitions=1)
    publish(log, *range(10))
    admin = AdminClient({"bootstrap.servers": kafka.address, "log_level": 0})
    name = topic_of(log)
    admin.delete_topics([name])[name].result(30)
    wait_until(lambda: name not in admin.list_topics(timeout=50).topics)
    log.close()
    with KafkaLog(place, partitions=1) as new_log:
        publish(new_log, 100)
        (lost,) = read(new_log, 1, start=10)
        assert isinstance(lost, Lost)
        assert "the log was replaced or lost its end" in lost.reason


def test_offsets_may_have_gaps(kafka: Broker, place: str) -> None:
    """Write transactions, which leave offsets without messages: aborts, and markers at the end."""
    with KafkaLog(place, partitions=1) as log:
        publish(log, 0)
        producer = Producer({"bootstrap.servers": kafka.address, "transactional.id": place})
        producer.init_transactions()
        for number, abort in ((-1, True), (1, False)):
            producer.begin_transaction()
            producer.produce(
                topic_of(log), b"x", partition=0, headers=[("n", str(number).encode())]
            )
            producer.flush()
            if abort:
                producer.abort_transaction()
            else:
                producer.commit_transaction()
        assert log.last_messages([0])[0].headers == [("n", b"1")]
        publish(log, 2)
        events = read(log, 3)
        assert numbers(events) == [0, 1, 2]
        assert [event.offset for event in events] == [0, 3, 5]


def test_missing_keys_values_and_bodies_become_empty(kafka: Broker, place: str) -> None:
    with KafkaLog(place, partitions=1) as log:
        assert log.start_offsets([0]) == {0: 0}
        producer = Producer({"bootstrap.servers": kafka.address, "log_level": 0})
        producer.produce(topic_of(log), None, key=b"k", partition=0)
        producer.produce(
            topic_of(log), b"x", partition=0, headers=[("a", None), ("\u00e4", b"\xff")]
        )
        producer.flush()
        first, second = read(log, 2)
        assert isinstance(first, Delivery)
        assert isinstance(second, Delivery)
        assert first.message == Message([], b"")
        assert second.message == Message([("a", b""), ("\u00e4", b"\xff")], b"x")


# ---- TLS, SASL, observers


@pytest.fixture
def secure(kafka: Broker, topic: Callable[[], str]) -> tuple[str, dict[str, str]]:
    return (
        f"kafka://{kafka.sasl_address}/{topic()}",
        {
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": kafka.certificate("ca.pem"),
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": USER,
            "sasl.password": PASSWORD,
        },
    )


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-512", "PLAIN"])
def test_sasl_over_tls(secure: tuple[str, dict[str, str]], tmp_path: Path, mechanism: str) -> None:
    place, options = secure
    options["sasl.mechanism"] = mechanism
    file = tmp_path / "password"
    file.write_text(options.pop("sasl.password") + "\n")
    options["sasl.password.file"] = str(file)
    with KafkaLog(place, partitions=1, options=options) as log:
        publish(log, 7)
        assert numbers(read(log, 1)) == [7]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sasl.password": "wrong"}, "check sasl.username, sasl.password and sasl.mechanism"),
        ({"sasl.username": "nobody"}, "check sasl.username"),
        ({"sasl.mechanism": "SCRAM-SHA-256"}, "and sasl.mechanism"),
        ({"ssl.ca.location": None}, "check ssl.ca.location"),
    ],
    ids=str,
)
def test_refused_credentials_are_reported_with_the_remedy(
    secure: tuple[str, dict[str, str]], change: dict[str, str | None], reason: str
) -> None:
    place, options = secure
    options |= {name: value for name, value in change.items() if value is not None}
    for name, value in change.items():
        if value is None:
            del options[name]
    with KafkaLog(place, partitions=1, options=options) as log:
        with pytest.raises(PermissionDenied, match=reason) as caught:
            log.publish(0, message(7))
        assert "wrong" not in str(caught.value)


def test_tls_with_client_certificates(
    kafka: Broker, topic: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"kafka://{kafka.tls_address}/{topic()}"
    options = {
        "security.protocol": "SSL",
        "ssl.ca.location": kafka.certificate("ca.pem"),
        "ssl.certificate.location": kafka.certificate("client.pem"),
        "ssl.key.location": kafka.certificate("client.key"),
    }
    with KafkaLog(place, partitions=1, options=options) as log:
        publish(log, 7)
        assert numbers(read(log, 1)) == [7]
    monkeypatch.setattr(client, "REQUEST_SECONDS", 2.0)
    del options["ssl.certificate.location"], options["ssl.key.location"]
    with pytest.raises(PetpsError, match=r"127.0.0.1"):
        KafkaLog(place, options=options).end_offsets([0])


def test_recorded_positions_are_committed_for_observers(kafka: Broker, place: str) -> None:
    from confluent_kafka import Consumer

    with KafkaLog(place, partitions=2, options={"group.id": "watched"}) as log:
        publish(log, 1)
        subscription = log.subscribe({0: 0, 1: 0})
        wait_until(lambda: subscription.poll(max_bytes=1 << 20, timeout=0.2))
        subscription.observe({0: 1, 1: 0})
        observer = Consumer({"bootstrap.servers": kafka.address, "group.id": "watched"})
        places = [TopicPartition(topic_of(log), p) for p in (0, 1)]

        def committed() -> list[int] | None:
            with contextlib.suppress(KafkaException):  # no coordinator yet
                return [at.offset for at in observer.committed(places, timeout=10)]
            return None

        wait_until(lambda: committed() == [1, 0])
        observer.close()
        # A subscription does not read the positions of the group.
        other = log.subscribe({0: 0})
        assert numbers(wait_until(lambda: other.poll(max_bytes=1 << 20, timeout=0.2))) == [1]
        other.close()
        subscription.close()
