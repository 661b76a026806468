"""HPS messages that fit the format exactly become rows; all others are counted and skipped."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic, TopicPartition
from typer.testing import CliRunner

from petps.cli import app
from petps.delta import DeltaError, TableSchema
from petps.delta.directory import DirectoryLog
from petps.publish.hps import decode_hps
from tests.kafka.broker import Broker
from tests.python.ingest.driver import Driver
from tests.python.ingest.model import Letters, MemoryTables

P = 3  # the number of partitions of tests/python/ingest/driver.py
SCHEMA = TableSchema("user", "f32", 4)


def encode(keys: list[int], rows: npt.ArrayLike, *, key: str = "q", size: int = 16) -> bytes:
    """Return a message as KafkaMessageSink writes it, key by key."""
    body = struct.pack("<BBBBI", *b"HCTR", size)
    for number, row in zip(keys, np.asarray(rows, np.float32), strict=True):
        body += struct.pack(f"<{key}", number) + row.tobytes()
    return body


def row_of(key: int, salt: float = 0) -> npt.NDArray[np.float32]:
    return np.arange(4, dtype=np.float32) + np.float32(key % 1000) + np.float32(salt)


@pytest.mark.parametrize(("width", "code"), [(4, "I"), (8, "q")])
def test_decode_keys_of_4_and_8_bytes(width: int, code: str) -> None:
    sent = [0, 7, 2**31] if width == 4 else [0, 7, -1, 2**62]
    rows = [row_of(key) for key in sent]
    keys, decoded = decode_hps(encode(sent, rows, key=code), 4, width)
    assert keys.tolist() == [key % 2**64 for key in sent]
    assert (decoded == rows).all()
    keys, decoded = decode_hps(encode([], np.empty((0, 4))), 4, width)
    assert (keys.shape, decoded.shape) == ((0,), (0, 4))


GOOD = encode([1, 2], [row_of(1), row_of(2)])
BAD = {
    "too-short": [b"", b"HCTR", GOOD[:7]],
    "foreign": [b"RTCH" + GOOD[4:], b"\0" * 40, b'{"key": 1, "row": [1.0]}'],
    "wrong-dim": [encode([1], [row_of(1)], size=20), encode([1], [np.ones(5)], size=20)],
    "torn": [GOOD[:-1], GOOD[:9], GOOD + b"\0", encode([1], [row_of(1)], key="I")],
    "not-finite": [encode([1], [[1, np.nan, 1, 1]]), encode([1], [[1, 1, np.inf, 1]])],
}


@pytest.mark.parametrize("fault", BAD)
def test_a_message_that_does_not_fit_is_refused_with_its_fault(fault: str) -> None:
    for body in BAD[fault]:
        with pytest.raises(DeltaError) as caught:
            decode_hps(body, 4, 8)
        assert caught.value.fault.value == fault


def test_cuts_give_fewer_pairs_or_are_refused_and_flipped_header_bits_are_refused() -> None:
    for cut in range(len(GOOD)):
        try:
            keys, _ = decode_hps(GOOD[:cut], 4, 8)
        except DeltaError:
            continue
        assert keys.tolist() == [1, 2][: (cut - 8) // 24]
    for bit in range(64):
        flipped = bytearray(GOOD)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DeltaError):
            decode_hps(bytes(flipped), 4, 8)


class Site:
    """A topic of HPS, and the command of the bridge."""

    def __init__(self, broker: Broker, model: str, folder: Path) -> None:
        self.broker, self.model, self.folder = broker, model, folder
        self.topic = f"hps_et.{model}.user"
        self.producer = Producer({"bootstrap.servers": broker.address, "log_level": 0})
        self.admin = AdminClient({"bootstrap.servers": broker.address, "log_level": 0})
        self.admin.create_topics([NewTopic(self.topic, 2, 1)])[self.topic].result(30)

    def send(self, partition: int, body: bytes | None) -> None:
        self.producer.produce(self.topic, body, partition=partition)
        assert self.producer.flush(30) == 0

    def bridge(self, *more: str) -> Any:
        arguments = ["import-hps", self.broker.address, str(self.folder / "log")]
        arguments += ["--model", self.model, "--table", "user:4", "--partitions", str(P)]
        arguments += ["--state", str(self.folder / "state"), "--once", "--json", *more]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, (result.output, result.exception)
        return json.loads(result.stdout)

    def served(self) -> dict[int, bytes]:
        store = MemoryTables([SCHEMA], P, self.model)
        driver = Driver(DirectoryLog(self.folder / "log"), store, Letters()).run()
        assert all(state.is_following for state in driver.states.values())
        driver.close()
        return store.by_name["user"].rows


@pytest.fixture
def site(kafka: Broker, topic: Callable[[], str], tmp_path: Path) -> Site:
    return Site(kafka, topic(), tmp_path)


def test_rows_of_hps_are_served(site: Site) -> None:
    expected: dict[int, bytes] = {}
    for round_number in range(4):
        for partition in (0, 1):
            keys = list(range(partition, 60, 2))
            rows = [row_of(key, round_number) for key in keys]
            site.send(partition, encode(keys, rows))
            expected |= {key: row.tobytes() for key, row in zip(keys, rows, strict=True)}
    site.send(0, encode([], np.empty((0, 4))))  # a beacon
    bad = [body for bodies in BAD.values() for body in bodies]
    for body in bad:
        site.send(1, body)
    site.send(1, None)  # a tombstone
    site.send(1, encode([5], [row_of(5, 9)]))
    expected[5] = row_of(5, 9).tobytes()

    report = site.bridge()
    refused = {fault: len(bodies) for fault, bodies in BAD.items()}
    refused["too-short"] += 1
    assert report["refused"] == refused
    assert report["rows"] == 241
    assert report["messages"] == 8 + 1 + len(bad) + 1 + 1
    assert report["lost"] == 0
    assert site.served() == expected

    # The second run finds nothing new. The next run finds only new rows. After the file is removed,
    # a run reads everything again, in order.
    again = site.bridge()
    assert (again["messages"], again["versions"]) == (0, 0)
    site.send(0, encode([2, 1000], [row_of(2, 7), row_of(1000)]))
    expected |= {2: row_of(2, 7).tobytes(), 1000: row_of(1000).tobytes()}
    assert site.bridge()["rows"] == 2
    assert site.served() == expected
    (site.folder / "state").unlink()
    assert site.bridge()["rows"] == 243
    assert site.served() == expected


def test_messages_removed_by_retention_are_counted(site: Site) -> None:
    for number in range(10):
        site.send(0, encode([number], [row_of(number)]))
    assert site.bridge()["rows"] == 10
    for number in range(10, 20):
        site.send(0, encode([number], [row_of(number)]))
    at = TopicPartition(site.topic, 0, 15)
    site.admin.delete_records([at])[at].result(30)
    report = site.bridge()
    assert (report["lost"], report["rows"]) == (5, 5)
    assert set(site.served()) == {*range(10), *range(15, 20)}


def test_a_foreign_state_file_is_refused(site: Site) -> None:
    (site.folder / "state").write_text('{"format": "other"}')
    result = CliRunner().invoke(
        app,
        ["import-hps", site.broker.address, str(site.folder / "log"), "--model", site.model,
         "--table", "user:4", "--state", str(site.folder / "state"), "--once"],
    )  # fmt: skip
    assert result.exit_code != 0
    assert "holds no positions of HPS's topics; remove it" in result.stderr
