"""Promises of the Kafka log: topic, options, errors, backpressure, retention."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.cimpl import TopicPartition

from petps.delta import MAX_MESSAGE_BYTES, Delivery, Event, Lost, Message
from petps.delta.kafka import KafkaLog, client, parse_address
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
from tests.python.delta.events import message, numbers, read, take, topic_of, until


@pytest.fixture
def place(kafka: Broker, topic: Callable[[], str]) -> str:
    return f"kafka://{kafka.address}/{topic()}"


# ---- address and options


@pytest.mark.parametrize(
    ("address", "what"),
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
def test_bad_addresses_are_named(address: str, what: str) -> None:
    with pytest.raises(InvalidArgument, match=what):
        KafkaLog(address)


@pytest.mark.parametrize(
    ("options", "what"),
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
def test_bad_options_are_named(options: dict[str, str], what: str) -> None:
    with pytest.raises(InvalidArgument, match=what):
        KafkaLog("kafka://127.0.0.1:9/t", options=options)


def test_a_password_may_stand_in_a_file(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"sasl.password.file: .*missing"):
        KafkaLog("kafka://h:1/t", options={"sasl.password.file": str(tmp_path / "missing")})


# ---- the topic


def test_the_first_publisher_makes_the_topic(kafka: Broker, place: str) -> None:
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
        found = {
            n: e.value for n, e in admin.describe_configs([resource])[resource].result(30).items()
        }
    assert found["retention.ms"] == "3600000"
    assert found["cleanup.policy"] == "delete"
    assert found["compression.type"] == "zstd"
    assert found["max.message.bytes"] == "1048588"
    with pytest.raises(InvalidArgument, match="has 5 partitions, not 4: the number is fixed"):
        KafkaLog(place, partitions=4).publish(0, message(1))
    with pytest.raises(InvalidArgument, match=r"replication.factor"):
        KafkaLog(place + "-2", partitions=1, options={"topic.replication.factor": 3}).start_offsets(
            [0]
        )
    with pytest.raises(InvalidArgument, match=r"no\.such\.setting"):
        KafkaLog(place + "-3", partitions=1, options={"topic.no.such.setting": 3}).start_offsets(
            [0]
        )


def test_a_missing_topic_is_not_made_by_asking(kafka: Broker, place: str) -> None:
    # The broker creates topics automatically (auto.create.topics.enable), with one partition.
    for log in (KafkaLog(place), KafkaLog(place, partitions=3, create=False)):
        with pytest.raises(NotFound, match="first publisher makes the topic"):
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


def test_the_largest_message(place: str) -> None:
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


def test_brokers_that_are_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ASK_SECONDS", 1.0)
    options = {"message.timeout.ms": 500, "socket.connection.setup.timeout.ms": 1000}
    log = KafkaLog("kafka://127.0.0.1:9/t", partitions=2, options=options)
    assert log.partitions == 2
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9/t.*check the address"):
        log.end_offsets([0, 1])
    began = time.monotonic()
    for _ in range(100):
        with pytest.raises(Unavailable):
            log.end_offsets([0, 1])
    assert time.monotonic() - began < 30  # less than a second each
    with pytest.raises(Unavailable):
        log.publish(0, message(1))
    log.close()


def test_an_undelivered_message_reaches_the_caller(kafka: Broker, place: str) -> None:
    with KafkaLog(place, partitions=2) as patient:
        patient.publish(0, message(0))
        patient.flush()
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


def test_a_message_that_fails_after_its_publish_is_told_at_close(kafka: Broker, place: str) -> None:
    log = KafkaLog(place, partitions=1, options={"message.timeout.ms": 8000})
    log.publish(0, message(0))
    log.flush()
    kafka.kill()
    try:
        log.publish(0, message(1))
        # publish() ends with this poll, which may see a failure that no call has raised yet.
        producer = log._producer
        assert producer is not None
        until(lambda: producer.poll(0.1) > 0 and log._failed)
        with pytest.raises(PetpsError, match="not delivered"):
            log.close()
        log.close()
    finally:
        kafka.start()


def test_a_full_queue_makes_the_publisher_wait(kafka: Broker, place: str) -> None:
    """Stop the broker: at most the queue's bound is held, and nothing is lost when it returns."""
    options = {"queue.buffering.max.kbytes": 1024, "message.timeout.ms": 120_000}
    log = KafkaLog(place, partitions=1, options=options)
    log.publish(0, message(0))
    log.flush()
    kafka.kill()
    done: list[int] = []

    def publish() -> None:
        for number in range(1, 65):
            log.publish(0, message(number, 65_536))
            done.append(number)

    thread = threading.Thread(target=publish)
    thread.start()
    until(lambda: len(done) >= 10)
    time.sleep(0.5)
    assert len(done) <= 17  # 1 MiB, in messages of 64 KiB
    kafka.start()
    thread.join(60)
    assert len(done) == 64
    log.close()
    assert numbers(read(KafkaLog(place), 65)) == list(range(65))


def test_a_closed_log_takes_nothing(place: str) -> None:
    log = KafkaLog(place, partitions=1)
    log.close()
    log.close()
    with pytest.raises(FailedPrecondition, match="closed"):
        log.publish(0, message(1))


def test_a_paused_partition_takes_no_room_of_the_others(place: str) -> None:
    with KafkaLog(place, partitions=2) as log:
        for number in range(100):
            log.publish(0, message(number, 100_000))
            log.publish(1, message(number, 100_000))
        log.flush()
        subscription = log.subscribe({0: 0, 1: 0})
        assert isinstance(subscription, KafkaSubscription)
        subscription.pause(1)
        given: list[Event] = []

        def full() -> bool:
            given.extend(subscription.poll(max_bytes=1, timeout=0))
            return subscription._buffered >= BUFFER_BYTES_MIN - 200_000

        until(full)
        subscription.pause(0)
        subscription.resume(1)
        polls = 0
        others: list[Event] = []
        while len(others) < 100:
            take(subscription, others, len(others) + 1)
            polls += 1
        assert numbers(others) == list(range(100))
        assert polls < 50, "one by one"
        subscription.resume(0)
        take(subscription, given, 100)
        assert numbers(given) == list(range(100))
        subscription.close()


# ---- the broker dies


def test_a_subscription_outlives_a_killed_broker(kafka: Broker, place: str) -> None:
    with KafkaLog(place, partitions=1) as log:
        for number in range(5):
            log.publish(0, message(number))
        log.flush()
        subscription = log.subscribe({0: 0})
        events: list[Event] = []
        take(subscription, events, 5)
        kafka.restart()
        for number in range(5, 10):
            log.publish(0, message(number))
        log.flush()
        take(subscription, events, 10)
        assert numbers(events) == list(range(10))
        subscription.close()


# ---- removed or damaged messages


def test_retention_is_lost_and_never_skipped(kafka: Broker, place: str) -> None:
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


def test_retention_under_a_paused_reader_is_lost(kafka: Broker, place: str) -> None:
    with KafkaLog(place, partitions=1) as log:
        for number in range(10):
            log.publish(0, message(number))
        log.flush()
        subscription = log.subscribe({0: 0})
        subscription.pause(0)
        assert subscription.poll(max_bytes=1 << 20, timeout=0.3) == []
        at = TopicPartition(topic_of(log), 0, 10)
        admin = AdminClient({"bootstrap.servers": kafka.address, "log_level": 0})
        admin.delete_records([at])[at].result(30)
        subscription.resume(0)
        events = until(lambda: subscription.poll(max_bytes=1 << 20, timeout=0.2))
        # Either read before their removal, or lost; never skipped.
        assert numbers(events)[0] in (0, "Lost")
        subscription.close()


def test_a_topic_made_again_is_lost(kafka: Broker, place: str) -> None:
    log = KafkaLog(place, partitions=1)
    for number in range(10):
        log.publish(0, message(number))
    log.flush()
    admin = AdminClient({"bootstrap.servers": kafka.address, "log_level": 0})
    name = topic_of(log)
    admin.delete_topics([name])[name].result(30)
    until(lambda: name not in admin.list_topics(timeout=10).topics)
    log.close()
    with KafkaLog(place, partitions=1) as again:
        again.publish(0, message(100))
        again.flush()
        (lost,) = read(again, 1, start=10)
        assert isinstance(lost, Lost)
        assert "the log was replaced or lost its end" in lost.reason


def test_offsets_with_gaps(kafka: Broker, place: str) -> None:
    """Write transactions, which leave offsets without a message: aborts, markers at the end."""
    with KafkaLog(place, partitions=1) as log:
        log.publish(0, message(0))
        log.flush()
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
        log.publish(0, message(2))
        log.flush()
        events = read(log, 3)
        assert numbers(events) == [0, 1, 2]
        assert [event.offset for event in events] == [0, 3, 5]


def test_a_message_without_headers_or_body_is_given_as_it_is(kafka: Broker, place: str) -> None:
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
        log.publish(0, message(7))
        log.flush()
        assert numbers(read(log, 1)) == [7]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"sasl.password": "wrong"}, "check sasl.username, sasl.password and sasl.mechanism"),
        ({"sasl.username": "nobody"}, "check sasl.username"),
        ({"sasl.mechanism": "SCRAM-SHA-256"}, "and sasl.mechanism"),
        ({"ssl.ca.location": None}, "check ssl.ca.location"),
    ],
    ids=str,
)
def test_who_may_not_is_told_why(
    secure: tuple[str, dict[str, str]], change: dict[str, str | None], what: str
) -> None:
    place, options = secure
    options |= {name: value for name, value in change.items() if value is not None}
    for name, value in change.items():
        if value is None:
            del options[name]
    with KafkaLog(place, partitions=1, options=options) as log:
        with pytest.raises(PermissionDenied, match=what) as caught:
            log.publish(0, message(7))
        assert "wrong" not in str(caught.value)


def test_client_certificates(
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
        log.publish(0, message(7))
        log.flush()
        assert numbers(read(log, 1)) == [7]
    monkeypatch.setattr(client, "ASK_SECONDS", 2.0)
    del options["ssl.certificate.location"], options["ssl.key.location"]
    with pytest.raises(PetpsError, match=r"127.0.0.1"):
        KafkaLog(place, options=options).end_offsets([0])


def test_positions_are_shown_to_observers(kafka: Broker, place: str) -> None:
    from confluent_kafka import Consumer

    with KafkaLog(place, partitions=2, options={"group.id": "watched"}) as log:
        log.publish(0, message(1))
        log.flush()
        subscription = log.subscribe({0: 0, 1: 0})
        until(lambda: subscription.poll(max_bytes=1 << 20, timeout=0.2))
        subscription.observe({0: 1, 1: 0})
        observer = Consumer({"bootstrap.servers": kafka.address, "group.id": "watched"})
        wanted = [TopicPartition(topic_of(log), p) for p in (0, 1)]
        until(lambda: [at.offset for at in observer.committed(wanted, timeout=10)] == [1, 0])
        observer.close()
        # Positions in the group are never read back: only the pool's position counts.
        other = log.subscribe({0: 0})
        assert numbers(until(lambda: other.poll(max_bytes=1 << 20, timeout=0.2))) == [1]
        other.close()
        subscription.close()
