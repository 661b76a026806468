"""A server that follows a topic: a late topic, a killed broker, a broken message."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import petps_client
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import TopicPartition

from petps.delta import TableSchema, open_log, read_header
from petps.errors import FailedPrecondition
from petps.publish import Position, Publisher
from petps.server import Serving
from tests.kafka.broker import PASSWORD, USER, Broker
from tests.python.server.conftest import Start
from tests.python.waiting import wait_until

SCHEMA = TableSchema("fed", "f32", 4)
KEYS = np.arange(50, dtype=np.uint64)


def ingest_of(serving: Serving, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Return ingest's status once it meets the condition."""

    def ingest_if_true() -> dict[str, Any] | None:
        ingest: dict[str, Any] = serving.status()["ingest"]
        return ingest if condition(ingest) else None

    ingest: dict[str, Any] = wait_until(ingest_if_true)
    return ingest


def follows(ingest: dict[str, Any]) -> bool:
    return {entry["state"] for entry in ingest["partitions"]} == {"following"}


def publish(publisher: Publisher, value: float) -> int:
    publisher.publish("fed", KEYS, np.full((50, 4), value, np.float32))
    return publisher.commit()


def pull_value(serving: Serving) -> float:
    with petps_client.connect(f"petps://127.0.0.1:{serving.port}/default") as client:
        rows = client.pull("fed", KEYS)
    assert (rows == rows[0, 0]).all()
    return float(rows[0, 0])


def test_a_server_follows_its_topic_through_failures(
    start: Start, kafka: Broker, topic: Callable[[], str]
) -> None:
    place = f"kafka://{kafka.address}/{topic()}"
    serving = start(ingest={"log": place}, kafka={"group.id": "watched"})
    missing = ingest_of(serving, lambda ingest: ingest["error"])
    assert "the first publisher creates the topic" in missing["error"]
    assert pull_value(serving) == 0

    log = open_log(place, partitions=8)
    publisher = Publisher(log, "default", tables=[SCHEMA])
    publisher.begin_continue(None)
    version = publish(publisher, 1)
    ingest = ingest_of(serving, lambda ingest: ingest["version"] == version and follows(ingest))
    assert pull_value(serving) == 1
    ingest_of(serving, lambda ingest: ingest["error"] == "")

    kafka.kill()
    away = ingest_of(serving, lambda ingest: ingest["error"])
    assert place in away["error"]
    assert pull_value(serving) == 1
    kafka.start()
    version = publish(publisher, 2)
    ingest = ingest_of(serving, lambda ingest: ingest["version"] == version and not ingest["error"])
    assert pull_value(serving) == 2
    assert sum(entry["lag_records"] for entry in ingest["partitions"]) == 0
    assert sum(entry["gaps"] for entry in ingest["partitions"]) == 0

    # A broken message goes unchanged to the topic of dead letters, with its reason.
    producer = Producer({"bootstrap.servers": kafka.address, "log_level": 0})
    producer.produce(place.split("/")[-1], b"hello", partition=3, headers=[("x", b"y")])
    producer.flush()

    def is_stale(ingest: Any) -> bool:  # it is counted a moment before the state shows it
        broken = ingest["partitions"][3]
        return bool(broken["gaps"]) and broken["state"] == "stale"

    ingest = ingest_of(serving, is_stale)
    assert ingest["partitions"][3]["dead_letters"] == 1
    letters = open_log(f"{place}.dead-letters", partitions=1, create=False)
    last = wait_until(lambda: _last(letters))
    headers = dict(last.headers)
    assert headers["dead-letter.reason"].startswith(b"foreign: no header format")
    assert headers["dead-letter.partition"] == b"3"
    assert headers["x"] == b"y"
    assert bytes(last.body) == b"hello"
    letters.close()
    # The next message shows that none was missing.
    version = publish(publisher, 3)
    ingest = ingest_of(serving, lambda ingest: ingest["version"] == version and follows(ingest))
    assert pull_value(serving) == 3
    log.close()


def _last(log: Any) -> Any:
    try:
        return log.last_messages([0]).get(0)
    except LookupError:
        return None


def test_a_wrong_password_is_reported_and_pulls_continue(
    start: Start, kafka: Broker, topic: Callable[[], str]
) -> None:
    options = {
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": kafka.certificate("ca.pem"),
        "sasl.mechanism": "PLAIN",
        "sasl.username": USER,
        "sasl.password": PASSWORD,
    }
    place = f"kafka://{kafka.sasl_address}/{topic()}"
    log = open_log(place, partitions=8, options=options)
    publisher = Publisher(log, "default", tables=[SCHEMA])
    publisher.begin_continue(None)
    version = publish(publisher, 5)
    wrong = start(ingest={"log": place}, kafka={**options, "sasl.password": "wrong"})
    ingest = ingest_of(wrong, lambda ingest: ingest["error"])
    assert "check sasl.username, sasl.password" in ingest["error"]
    assert pull_value(wrong) == 0
    wrong.close()
    right = start(ingest={"log": place}, kafka=options)
    ingest_of(right, lambda ingest: ingest["version"] == version)
    assert pull_value(right) == 5
    log.close()


def test_versions_continue_in_an_emptied_topic(kafka: Broker, topic: Callable[[], str]) -> None:
    place = f"kafka://{kafka.address}/{topic()}"
    log = open_log(place, partitions=2)
    first = Publisher(log, "default", tables=[SCHEMA])
    first.begin_continue(None)
    publish(first, 1)
    admin = AdminClient({"bootstrap.servers": kafka.address, "log_level": 0})
    name = place.split("/")[-1]
    removed = [TopicPartition(name, p, end) for p, end in log.end_offsets(range(2)).items()]
    for future in admin.delete_records(removed).values():
        future.result(30)
    assert log.last_messages(range(2)) == {}
    with pytest.raises(FailedPrecondition, match=r"last version is unknown: give begin_cont"):
        Publisher(log, "default", tables=[SCHEMA]).begin_continue(None)
    with pytest.raises(FailedPrecondition, match=r"is unknown: give begin_base\(\) a version"):
        Publisher(log, "default", tables=[SCHEMA]).begin_base("b")
    second = Publisher(log, "default", tables=[SCHEMA])
    second.begin_continue(first.position())
    assert publish(second, 2) == 2
    log.close()


def test_the_newest_run_and_version_are_read_from_the_topic(
    kafka: Broker, topic: Callable[[], str], tmp_path: Path
) -> None:
    place = f"kafka://{kafka.address}/{topic()}"
    position: Position | None = None
    for round_number in range(3):
        log = open_log(place, partitions=8)
        publisher = Publisher(log, "default", tables=[SCHEMA])
        assert publisher.version == 2 * round_number
        assert position is None or publisher.run > position.run
        publisher.begin_continue(position)
        publish(publisher, 1)
        assert publish(publisher, 2) == 2 * round_number + 2
        position = publisher.position()
        log.close()
        last = open_log(place).last_messages(range(8))
        headers = [read_header(message) for message in last.values()]
        assert {header.run for header in headers} == {publisher.run}
        assert tuple(header.seq for header in headers) == position.seqs
