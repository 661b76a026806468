"""petps.v1 over real channels: every method, every error, limits, versions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import petps
import petps.v1.petps_pb2 as messages
from petps import _native, errors
from petps.server import Serving
from petps.server.grpc.codes import GRPC_CODES
from tests.python.server.conftest import Start
from tests.python.server.grpc_calls import (
    TIMEOUT,
    commit,
    pack_keys,
    read_until,
    refusal_of,
    unpack_present,
    values,
    wait_for_waiting_pulls,
)

Stub = Any


@pytest.fixture
def pool(pool: Path) -> Path:
    with petps.open(pool) as opened:
        opened.create_table("half", dim=4, capacity=100, dtype="f16", default=0.5)
        opened.create_table("bytes", dim=4, capacity=100, dtype="int8")
        keys = np.arange(100, dtype=np.uint64)
        opened.push("items", keys, values(keys))
        opened.push("half", keys[:10], values(keys[:10]))
    return pool


# ---- methods


def test_pull_returns_found_rows_and_a_bitmap(stub: Stub) -> None:
    keys = [7, 5000, 3, 7, 99, 6000]
    reply = stub.Pull(messages.PullRequest(table="items", keys=pack_keys(*keys)))
    assert reply.instance == "default@0"
    assert unpack_present(reply.rows, 6) == [True, False, True, True, True, False]
    assert (reply.rows.rows_found, reply.rows.row_bytes) == (4, 16)
    rows = np.frombuffer(reply.rows.rows, "<f4").reshape(-1, 4)
    assert (rows == values([7, 3, 7, 99])).all()
    empty = stub.Pull(messages.PullRequest(model="default@0", table="items"))
    assert (empty.rows.rows_found, empty.rows.rows) == (0, b"")


def test_pull_returns_the_exact_bits_of_the_pool(stub: Stub) -> None:
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 256, (70, 16), np.uint8).view("<f4")  # includes NaN and infinity
    keys = rng.integers(0, 1 << 63, 70).astype(np.uint64)
    pushed = stub.Push(
        messages.PushRequest(table="items", keys=keys.tobytes(), rows=rows.tobytes())
    )
    assert pushed.inserted == 70
    reply = stub.Pull(messages.PullRequest(table="items", keys=keys.tobytes()))
    assert reply.rows.rows == rows.tobytes()
    assert len(reply.rows.present) == 16  # whole words of 64


@pytest.mark.parametrize("table", ["half", "bytes"])
def test_rows_have_the_requested_form(stub: Stub, table: str) -> None:
    expected = values([200, 201])
    stub.Push(
        messages.PushRequest(
            table=table, keys=pack_keys(200, 201), rows=expected.tobytes(), form=messages.FORM_F32
        )
    )
    request = messages.PullRequest(table=table, keys=pack_keys(200, 1 << 60, 201))
    stored = stub.Pull(request).rows
    request.form = messages.FORM_F32
    decoded = stub.Pull(request).rows
    dtype = {"half": "f16", "bytes": "int8"}[table]
    encoded = _native.encode_rows(dtype, expected)
    assert stored.rows == encoded.tobytes()
    assert stored.row_bytes == encoded.shape[1]
    assert decoded.rows == _native.decode_rows(dtype, 4, encoded).tobytes()
    assert decoded.row_bytes == 16
    assert decoded.present == stored.present


def test_pull_many_returns_all_tables_of_one_version(serving: Serving, stub: Stub) -> None:
    commit(serving, 5)
    section = messages.PullManyRequest.Section
    reply = stub.PullMany(
        messages.PullManyRequest(
            model="default",
            sections=[
                section(table="half", keys=pack_keys(1, 50)),
                section(table="items", keys=pack_keys(2)),
                section(table="half", keys=b""),
                section(table="half", keys=pack_keys(2)),
            ],
        )
    )
    assert (reply.instance, reply.applied_version) == ("default@0", 5)
    assert [part.rows_found for part in reply.sections] == [1, 1, 0, 1]
    assert unpack_present(reply.sections[0], 2) == [True, False]
    assert (np.frombuffer(reply.sections[1].rows, "<f4") == values([2])).all()
    assert (np.frombuffer(reply.sections[3].rows, "<f2") == values([2])).all()


def test_push_updates_and_deletes(stub: Stub) -> None:
    mixed = stub.Push(
        messages.PushRequest(
            table="items",
            keys=pack_keys(1, 2, 500, 600),
            rows=values([11, 12, 13, 14]).tobytes(),
            deleted=bytes([0b1010]),
        )
    )
    assert (mixed.inserted, mixed.updated, mixed.deleted, mixed.absent) == (1, 1, 1, 1)
    erased = stub.Push(messages.PushRequest(table="items", keys=pack_keys(1, 777)))
    assert (erased.deleted, erased.absent) == (1, 1)
    reply = stub.Pull(messages.PullRequest(table="items", keys=pack_keys(1, 2, 500, 600)))
    assert unpack_present(reply.rows, 4) == [False, False, True, False]
    assert (np.frombuffer(reply.rows.rows, "<f4") == values([13])).all()


def test_status_and_list_tables_describe_the_pool(serving: Serving, stub: Stub) -> None:
    status = json.loads(stub.Status(messages.StatusRequest()).json)
    assert status["port"] == serving.port
    assert {table["name"]: table["dtype"] for table in status["tables"]}["half"] == "f16"
    reply = stub.ListTables(messages.ListTablesRequest())
    (instance,) = reply.instances
    assert (instance.name, instance.model, instance.partitions) == ("default@0", "default", 8)
    assert list(instance.aliases) == ["default"]
    half = {table.name: table for table in reply.tables}["half"]
    assert (half.instance, half.dtype, half.dim, half.row_bytes) == ("default@0", "f16", 4, 8)
    assert (half.capacity, half.rows, half.feed) == (100, 10, "push")
    assert (np.frombuffer(half.default_row, "<f2") == 0.5).all()
    assert len(stub.ListTables(messages.ListTablesRequest(model="default")).tables) == 4


def test_set_hot_keys_reaches_the_server(serving: Serving, stub: Stub) -> None:
    stub.SetHotKeys(messages.SetHotKeysRequest(table="items", keys=pack_keys(1, 2, 3)))
    assert serving._server.stats()["hot_sets"] == 1


# ---- errors


def test_every_error_code_has_a_grpc_code() -> None:
    assert set(GRPC_CODES) == set(errors.BY_CODE)
    assert grpc.StatusCode.OK not in GRPC_CODES.values()


@pytest.mark.parametrize("code", sorted(errors.BY_CODE))
def test_every_error_reaches_the_client(serving: Serving, stub: Stub, code: str) -> None:

    def fail() -> dict[str, Any]:
        raise errors.BY_CODE[code]("what is wrong, and the remedy")

    serving._grpc._service._status = fail
    if code == "STALE":  # only requests that name a model have the details of a STALE
        serving._grpc._service._details = lambda error, request: ()
    grpc_code, text, details = refusal_of(lambda: stub.Status(messages.StatusRequest()))
    assert (grpc_code, text) == (GRPC_CODES[code], "what is wrong, and the remedy")
    assert details["petps-code"] == code


PULL, PUSH = messages.PullRequest, messages.PushRequest
WRONG = [
    ("Pull", PULL(table="none"), "NOT_FOUND", "has no table 'none'; it has items"),
    ("Pull", PULL(model="other", table="items"), "NOT_FOUND", "other"),
    ("Pull", PULL(table="items", keys=b"1234567"), "INVALID_ARGUMENT", "not a multiple of 8"),
    ("PullMany", messages.PullManyRequest(), "INVALID_ARGUMENT", "without sections"),
    ("Push", PUSH(table="items", keys=pack_keys(1), rows=b"123"), "INVALID_ARGUMENT", "16 bytes"),
    ("Push", PUSH(table="items", keys=b"1"), "INVALID_ARGUMENT", "not a multiple of 8"),
    ("Push", PUSH(table="fed", keys=pack_keys(1)), "FAILED_PRECONDITION", "fed by deltas"),
    (
        "Push",
        PUSH(table="items", keys=pack_keys(1, 2), rows=bytes(32), deleted=bytes(9)),
        "INVALID_ARGUMENT",
        "deleted has 9 bytes",
    ),
    (
        "Push",
        PUSH(table="half", keys=pack_keys(1), rows=bytes(8), form=messages.FORM_F32),
        "INVALID_ARGUMENT",
        "1 rows of dim 4 as float32 are 16 bytes, got 8",
    ),
    (
        "Push",
        PUSH(
            table="half",
            keys=pack_keys(1),
            rows=np.array([1, 1e9, 1, 1], "<f4").tobytes(),
            form=messages.FORM_F32,
        ),
        "INVALID_ARGUMENT",
        "NaN or infinity",
    ),
    ("ListTables", messages.ListTablesRequest(model="x"), "NOT_FOUND", "x"),
    ("SetHotKeys", messages.SetHotKeysRequest(table="x"), "NOT_FOUND", "no table 'x'"),
]


@pytest.mark.parametrize(("method", "request_", "code", "text"), WRONG)
def test_wrong_requests_are_refused(
    stub: Stub,
    method: str,
    request_: Any,
    code: str,
    text: str,
) -> None:
    grpc_code, message, details = refusal_of(lambda: getattr(stub, method)(request_))
    assert grpc_code is GRPC_CODES[code], message
    assert text in message
    assert details["petps-code"] == code


def test_a_push_to_a_full_table_returns_its_counts(stub: Stub) -> None:
    keys = np.arange(200, dtype=np.uint64)
    request = PUSH(
        table="half",
        keys=keys.tobytes(),
        rows=values(keys).tobytes(),
        form=messages.FORM_F32,
    )
    code, text, details = refusal_of(lambda: stub.Push(request))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "is full (capacity 100)" in text
    report = messages.PushReply.FromString(details["petps-push-reply-bin"])
    assert (report.updated, report.inserted, report.refused) == (10, 90, 100)


def test_keys_of_another_shard_are_refused(
    start: Start, connect: Callable[[Serving], Stub], tmp_path: Path
) -> None:
    shards = {
        "model": "default",
        "version": 3,
        "partitions": 8,
        "servers": [
            {"address": "a:1", "partitions": ["0-3"]},
            {"address": "b:1", "partitions": ["4-7"]},
        ],
    }
    path = tmp_path / "map.json"
    path.write_text(json.dumps(shards))
    stub = connect(start(server={"shard_map": path, "address": "a:1"}))
    keys = np.arange(100, dtype=np.uint64)
    partitions = _native.partition_of(keys, 8)
    own, others = keys[partitions < 4], keys[partitions >= 4]
    assert stub.Pull(PULL(table="items", keys=own.tobytes())).rows.rows_found == len(own)
    code, _, details = refusal_of(lambda: stub.Pull(PULL(table="items", keys=others.tobytes())))
    assert code is grpc.StatusCode.ABORTED
    assert (details["petps-code"], details["petps-map-version"]) == ("WRONG_SHARD", "3")


def test_requests_above_the_limits_are_refused(
    start: Start, connect: Callable[[Serving], Stub]
) -> None:
    limits = {"keys_per_pull": 10, "keys_per_push": 5, "body_bytes": 4096}
    stub = connect(start(server={"limits": limits}))
    small = PULL(table="items", keys=pack_keys(*range(10)))
    assert stub.Pull(small).rows.rows_found == 10
    for call, text in [
        (
            lambda: stub.Pull(PULL(table="items", keys=pack_keys(*range(11)))),
            "above the limit of 10",
        ),
        (lambda: stub.Push(PUSH(table="items", keys=pack_keys(*range(6)))), "above the limit of 5"),
        (lambda: stub.Pull(PULL(table="items", keys=bytes(1 << 20))), "larger than max"),
    ]:
        code, message, _ = refusal_of(call)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert text in message
        assert stub.Pull(small).rows.rows_found == 10


def test_a_reply_above_the_limit_is_refused(
    start: Start, connect: Callable[[Serving], Stub]
) -> None:
    stub = connect(start(server={"limits": {"body_bytes": 4096}}))
    keys = pack_keys(*[1] * 400)
    code, message, _ = refusal_of(lambda: stub.Pull(PULL(table="items", keys=keys)))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "split the request" in message
    request = PULL(table="half", keys=keys)
    assert stub.Pull(request).rows.rows_found == 400
    request.form = messages.FORM_F32
    code, message, _ = refusal_of(lambda: stub.Pull(request))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "FORM_STORED" in message


# ---- versions


def test_a_pull_of_a_later_version_is_stale(serving: Serving, stub: Stub) -> None:
    commit(serving, 4)
    request = PULL(table="items", keys=pack_keys(1), min_version=5)
    code, text, details = refusal_of(lambda: stub.Pull(request))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "version 5 was requested" in text
    assert (details["petps-code"], details["petps-applied-version"]) == ("STALE", "4")


def test_a_pull_waits_for_its_version(serving: Serving, stub: Stub) -> None:
    request = PULL(table="items", keys=pack_keys(1), min_version=7, wait_ms=60_000)
    waiting = stub.Pull.future(request, timeout=TIMEOUT)
    wait_for_waiting_pulls(serving)
    assert not waiting.done()
    # Other pulls continue.
    assert stub.Pull(PULL(table="items", keys=pack_keys(1))).applied_version == 0
    commit(serving, 7)
    assert waiting.result().applied_version == 7


def test_a_deadline_ends_the_wait_for_a_version(serving: Serving, stub: Stub) -> None:
    request = PULL(table="items", keys=pack_keys(1), min_version=7, wait_ms=60_000)
    code, _, _ = refusal_of(lambda: stub.Pull(request, timeout=0.2))
    # The server's STALE may arrive first, because its wait ends with the deadline too.
    assert code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
    assert stub.Pull(PULL(table="items", keys=pack_keys(1))).rows.rows_found == 1


def test_a_watch_reports_commits_switches_and_drops(serving: Serving, stub: Stub) -> None:
    tables = serving._tables
    stream = stub.WatchVersions(messages.WatchVersionsRequest(), timeout=TIMEOUT)
    first = next(stream)
    assert (first.instance.name, first.instance.applied_version) == ("default@0", 0)
    commit(serving, 3)
    changes = read_until(stream, "default@0", lambda change: change.instance.applied_version == 3)
    assert list(changes[-1].instance.aliases) == ["default"]

    instance = tables.create_instance("default", "default@1", 8)
    tables.set_alias("default", tables.resolve("default@0").id)
    tables.set_alias("default", instance.id)
    seen = read_until(stream, "default@1", lambda change: "default" in change.instance.aliases)
    commit(serving, 9, instance.id)
    seen += read_until(stream, "default@1", lambda change: change.instance.applied_version == 9)
    frozen = [change for change in seen if change.instance.name == "default@0"][-1].instance
    assert frozen.frozen
    assert list(frozen.aliases) == []

    tables.drop_instance(tables.resolve("default@0").id)
    read_until(stream, "default@0", lambda change: change.dropped)
    stream.cancel()


def test_a_watch_of_one_model_reports_only_that_model(serving: Serving, stub: Stub) -> None:
    other = serving._tables.create_instance("other", "other@0", 1)
    stream = stub.WatchVersions(messages.WatchVersionsRequest(model="other"), timeout=TIMEOUT)
    assert next(stream).instance.name == "other@0"
    commit(serving, 3)
    commit(serving, 4, other.id, partitions=1)
    change = next(stream)
    assert (change.instance.name, change.instance.applied_version) == ("other@0", 4)
    request = messages.WatchVersionsRequest(model="none")
    code, _, _ = refusal_of(lambda: next(stub.WatchVersions(request)))
    assert code is grpc.StatusCode.NOT_FOUND
