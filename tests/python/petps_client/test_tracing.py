"""Spans of a client's pulls: when there are some, and what they say."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import numpy as np
import petps_client
import pytest
from petps_client import _native, tracing

from tests.otel.sdk import program
from tests.python.petps_client.served import Served

KEYS = np.arange(10, dtype=np.uint64)


def test_a_program_without_opentelemetry_imports_none() -> None:
    code = (
        "import sys, petps_client.client, petps_client.puller\n"
        "assert not petps_client.tracing.is_sampled()\n"
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_only_pulls_within_a_sampled_span_are_traced(client: petps_client.Client) -> None:
    with program() as traced:
        client.pull("f32", KEYS)
        assert traced.spans() == []
        with traced.span():
            client.pull("f32", KEYS, np.empty((10, 12), np.float32))
            client.pull_answer("f32", KEYS)
        assert len(traced.spans("petps.pull")) == 2
    with program(is_sampling=False) as traced, traced.span():
        client.pull("f32", KEYS)
        assert not tracing.is_sampled()
    assert traced.spans() == []


def test_a_span_is_active_during_the_call_only(client: petps_client.Client) -> None:
    with program() as traced, traced.span() as span:
        client.pull("f32", KEYS)
        from opentelemetry import trace

        assert trace.get_current_span() is span


def test_the_rows_are_those_of_an_untraced_pull(client: petps_client.Client) -> None:
    untraced = client.pull_many_answer({"f32": KEYS, "int8": [5, 5, 1 << 40]})
    with program() as traced, traced.span():
        answer = client.pull_many_answer({"f32": KEYS, "int8": [5, 5, 1 << 40]})
    for table in ("f32", "int8"):
        np.testing.assert_array_equal(answer.rows[table], untraced.rows[table])
        np.testing.assert_array_equal(answer.masks[table], untraced.masks[table])
    (pull,) = traced.spans("petps.pull")
    facts = dict(pull.attributes or {})
    assert facts["petps.tables"] == ("f32", "int8")
    assert (facts["petps.keys"], facts["petps.misses"]) == (13, 1)
    assert (facts["petps.model"], facts["petps.instance"]) == ("ranking", "ranking@1")
    (shard,) = traced.spans("petps.pull.shard")
    assert shard.parent is not None
    assert pull.context is not None
    assert shard.parent.span_id == pull.context.span_id


def test_a_failed_pull_has_its_code(client: petps_client.Client, served: Served) -> None:
    with program() as traced, traced.span(), pytest.raises(petps_client.Stale):
        client.pull("f32", KEYS, min_version=99)
    (pull,) = traced.spans("petps.pull")
    (shard,) = traced.spans("petps.pull.shard")
    for span in (pull, shard):
        assert (span.attributes or {})["petps.code"] == "STALE"
        assert not span.status.is_ok
        assert span.events == ()
    served.stop()

    def refused() -> bool:
        with traced.span(), pytest.raises(petps_client.PetpsError) as caught:
            client.pull("f32", KEYS, deadline_ms=300)
        return caught.type is petps_client.Unavailable  # the deadline may cut an attempt short

    for _ in range(20):
        with program() as traced:
            if refused():
                break
    else:
        raise AssertionError("the pulls ended with other errors")
    (shard,) = traced.spans("petps.pull.shard")
    facts = dict(shard.attributes or {})
    assert facts["server.port"] == served.port
    assert isinstance(facts["petps.retries"], int)
    assert shard.end_time is not None


def test_an_asynchronous_pull_belongs_to_the_callers_span(client: petps_client.Client) -> None:
    async def pull(traced: Any) -> None:
        with traced.span("asynchronous"):
            await client.pull_async("f32", KEYS)

    with program() as traced:
        asyncio.run(pull(traced))
    (pulled,) = traced.spans("petps.pull")
    (parent,) = traced.spans("asynchronous")
    assert pulled.parent is not None
    assert parent.context is not None
    assert pulled.parent.span_id == parent.context.span_id


def test_a_prefetch_belongs_to_the_span_that_began_it(client: petps_client.Client) -> None:
    puller = petps_client.Puller(client, ["f32"])
    with program() as traced:
        with traced.span("before"):
            puller.prefetch({"f32": KEYS})
        puller.pull({"f32": KEYS})
    (pulled,) = traced.spans("petps.pull")
    (parent,) = traced.spans("before")
    assert pulled.parent is not None
    assert parent.context is not None
    assert pulled.parent.span_id == parent.context.span_id


def test_parts_beyond_the_known_shards_have_spans_too() -> None:
    class Native:
        def shards(self) -> int:
            return 1

        def pull(self, *arguments: Any) -> tuple[int, int, str]:
            trace = arguments[-1]
            assert isinstance(trace, Trace)
            assert len(trace.part_ids) == 1
            return 2, 3, "m@1"

    class Trace:
        def __init__(self, trace_id: bytes, span_id: bytes, part_ids: list[bytes]) -> None:
            assert (len(trace_id), len(span_id)) == (16, 8)
            self.part_ids = part_ids

        def parts(self) -> list[tuple[str, int, int, int, int, str]]:
            now = 2_000_000_000 * 10**9
            return [
                ("[::1]:7070", 4, 1, 2, now, "WRONG_SHARD"),
                ("", 0, 0, 0, now, "OK"),
                ("h:7070 (1.2.3.4:7070)", 4, 2, 1, now, "OK"),
            ]

    native: Any = Native()
    with pytest.MonkeyPatch.context() as patch, program() as traced, traced.span():
        patch.setattr(_native, "PullTrace", Trace)
        tracing.traced_pull(native, [("t", KEYS, None, None, None)], "f32", 0)
    old, new = traced.spans("petps.pull.shard")
    assert dict(old.attributes or {}) == {
        "server.address": "::1",
        "server.port": 7070,
        "petps.keys": 4,
        "petps.misses": 3,
        "petps.retries": 1,
        "petps.code": "WRONG_SHARD",
    }
    assert (new.attributes or {})["server.address"] == "h"
    assert new.status.is_ok


def test_a_span_names_few_tables() -> None:
    class Native:
        def shards(self) -> int:
            return 0

        def pull(self, *_: object) -> tuple[int, int, str]:
            return 0, 0, ""

    native: Any = Native()
    with program() as traced, traced.span():
        tracing.traced_pull(native, [(f"t{i}", KEYS, None, None, None) for i in range(20)], "f32")
    (pull,) = traced.spans("petps.pull")
    facts = dict(pull.attributes or {})
    assert facts["petps.tables"] == tuple(f"t{i}" for i in range(8))
    assert facts["petps.keys"] == 200


def test_ids_of_a_wrong_length_are_refused() -> None:
    for lengths in ((15, 8, 8), (16, 9, 8), (16, 8, 0)):
        trace_id, span_id, part_id = map(bytes, lengths)
        with pytest.raises(petps_client.InvalidArgument, match="an id of a trace has"):
            _native.PullTrace(trace_id, span_id, [part_id])
