"""The span of a commit, and the context that the log carries."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from petps.delta import Delivery, Message, TableSchema, read_header
from petps.delta.directory import DirectoryLog
from petps.errors import FailedPrecondition, InvalidArgument, IoError
from petps.publish import Publisher
from petps.publish.trace import PublishSpan
from petps.traceparent import HEADER, parse_traceparent
from tests.otel.sdk import program

P = 2


@pytest.fixture
def log(tmp_path: Path) -> DirectoryLog:
    return DirectoryLog(tmp_path / "log", partitions=P)


def publish(log: DirectoryLog) -> None:
    publisher = Publisher(log, "m", tables=[TableSchema("t", "f32", 4)], publisher_id="me")
    publisher.begin_continue(None)
    publisher.publish("t", np.arange(9, dtype=np.uint64), np.ones((9, 4), np.float32))
    publisher.commit()


def messages(log: DirectoryLog) -> list[Message]:
    subscription = log.subscribe(dict.fromkeys(range(P), 0))
    events = []
    while batch := subscription.poll(max_bytes=1 << 22, timeout=0):
        events += batch
    subscription.close()
    return [event.message for event in events if isinstance(event, Delivery)]


def test_the_commits_of_a_traced_version_carry_its_span(log: DirectoryLog) -> None:
    with program() as traced, traced.span("train"):
        publish(log)
    (span,) = traced.spans("petps.publish")
    (train,) = traced.spans("train")
    assert span.context is not None
    assert span.parent is not None
    assert train.context is not None
    assert span.parent.span_id == train.context.span_id
    assert dict(span.attributes or {}) == {
        "petps.model": "m",
        "petps.version": 1,
        "petps.tables": ("t",),
        "petps.rows": 9,
        "petps.partitions": P,
    }
    carried = [(read_header(m).kind.value, dict(m.headers).get(HEADER)) for m in messages(log)]
    assert [kind for kind, value in carried if value is not None] == ["commit"] * P
    for _, value in carried:
        if value is None:
            continue
        caller = parse_traceparent(value)
        assert caller is not None
        assert int.from_bytes(caller.span_id, "big") == span.context.span_id
        assert int.from_bytes(caller.trace_id, "big") == span.context.trace_id


@pytest.mark.parametrize("has_provider", [True, False])
def test_a_version_that_is_not_sampled_has_the_same_headers_as_ever(
    log: DirectoryLog, has_provider: bool
) -> None:
    if has_provider:
        with program(is_sampling=False):
            publish(log)
    else:
        publish(log)
    for message in messages(log):
        assert HEADER not in dict(message.headers)


def test_the_span_begins_with_the_first_rows(log: DirectoryLog) -> None:
    publisher = Publisher(log, "m", tables=[TableSchema("t", "f32", 4)])
    publisher.begin_continue(None)
    with program() as traced:
        with traced.span("rows"):
            publisher.publish("t", [1], np.ones((1, 4), np.float32))
        publisher.commit()
        publisher.commit()
    (rows,) = traced.spans("rows")
    first, second = traced.spans("petps.publish")
    for span in (rows, first, second):
        assert span.start_time is not None
        assert span.end_time is not None
    assert (rows.start_time or 0) <= (first.start_time or 0) <= (rows.end_time or 0)
    assert (second.start_time or 0) >= (first.end_time or 0)


def test_a_commit_that_fails_has_a_span_that_says_so(
    log: DirectoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = Publisher(log, "m", tables=[TableSchema("t", "f32", 4)])
    publisher.begin_continue(None)
    publisher.commit()
    with program() as traced, pytest.raises(InvalidArgument):
        publisher.commit(version=1)  # refused before anything is written
    assert traced.spans() == []

    def fail() -> None:
        raise IoError("no space left on device")

    monkeypatch.setattr(log, "flush", fail)
    with program() as traced, pytest.raises(IoError):
        publisher.commit()
    (span,) = traced.spans("petps.publish")
    assert not span.status.is_ok
    with pytest.raises(FailedPrecondition):
        publisher.commit()


def test_a_message_without_room_goes_without_the_context() -> None:
    with program() as traced, traced.span() as span:
        carrier = PublishSpan(span)
        small = Message([], b"x")
        assert len(carrier.carried_by(small).headers) == 1
        full = Message([], bytes(1_000_000 - 100))
        assert full.size == 1_000_000
        assert carrier.carried_by(full) is full
