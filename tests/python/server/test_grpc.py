"""petps.v1 over real channels: every method, every error, limits, health, watching, drain."""

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
    await_parked,
    commit,
    packed,
    present,
    refused,
    until,
    values,
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


def test_pull(start: Start, connect: Callable[[Serving], Stub]) -> None:
    stub = connect(start())
    keys = [7, 5000, 3, 7, 99, 6000]
    reply = stub.Pull(messages.PullRequest(table="items", keys=packed(*keys)))
    assert reply.instance == "default@0"
    assert present(reply.rows, 6) == [True, False, True, True, True, False]
    assert (reply.rows.rows_found, reply.rows.row_bytes) == (4, 16)
    found = np.frombuffer(reply.rows.rows, "<f4").reshape(-1, 4)
    assert (found == values([7, 3, 7, 99])).all()
    empty = stub.Pull(messages.PullRequest(model="default@0", table="items"))
    assert (empty.rows.rows_found, empty.rows.rows) == (0, b"")


def test_pull_gives_the_bits_of_the_pool(start: Start, connect: Callable[[Serving], Stub]) -> None:
    stub = connect(start())
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
def test_form_as_asked(start: Start, connect: Callable[[Serving], Stub], table: str) -> None:
    stub = connect(start())
    want = values([200, 201])
    stub.Push(
        messages.PushRequest(
            table=table, keys=packed(200, 201), rows=want.tobytes(), form=messages.FORM_F32
        )
    )
    request = messages.PullRequest(table=table, keys=packed(200, 1 << 60, 201))
    stored = stub.Pull(request).rows
    request.form = messages.FORM_F32
    wide = stub.Pull(request).rows
    dtype = {"half": "f16", "bytes": "int8"}[table]
    encoded = _native.encode_rows(dtype, want)
    assert stored.rows == encoded.tobytes()
    assert stored.row_bytes == encoded.shape[1]
    assert wide.rows == _native.decode_rows(dtype, 4, encoded).tobytes()
    assert wide.row_bytes == 16
    assert wide.present == stored.present


def test_pull_many(start: Start, connect: Callable[[Serving], Stub]) -> None:
    serving = start()
    commit(serving, 5)
    section = messages.PullManyRequest.Section
    reply = connect(serving).PullMany(
        messages.PullManyRequest(
            model="default",
            sections=[
                section(table="half", keys=packed(1, 50)),
                section(table="items", keys=packed(2)),
                section(table="half", keys=b""),
                section(table="half", keys=packed(2)),
            ],
        )
    )
    assert (reply.instance, reply.applied_version) == ("default@0", 5)
    assert [part.rows_found for part in reply.sections] == [1, 1, 0, 1]
    assert present(reply.sections[0], 2) == [True, False]
    assert (np.frombuffer(reply.sections[1].rows, "<f4") == values([2])).all()
    assert (np.frombuffer(reply.sections[3].rows, "<f2") == values([2])).all()


def test_push_updates_and_deletes(start: Start, connect: Callable[[Serving], Stub]) -> None:
    stub = connect(start())
    mixed = stub.Push(
        messages.PushRequest(
            table="items",
            keys=packed(1, 2, 500, 600),
            rows=values([11, 12, 13, 14]).tobytes(),
            deleted=bytes([0b1010]),
        )
    )
    assert (mixed.inserted, mixed.updated, mixed.deleted, mixed.absent) == (1, 1, 1, 1)
    gone = stub.Push(messages.PushRequest(table="items", keys=packed(1, 777)))
    assert (gone.deleted, gone.absent) == (1, 1)
    reply = stub.Pull(messages.PullRequest(table="items", keys=packed(1, 2, 500, 600)))
    assert present(reply.rows, 4) == [False, False, True, False]
    assert (np.frombuffer(reply.rows.rows, "<f4") == values([13])).all()


def test_status_and_list_tables(start: Start, connect: Callable[[Serving], Stub]) -> None:
    serving = start()
    stub = connect(serving)
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


def test_set_hot_keys(start: Start, connect: Callable[[Serving], Stub]) -> None:
    serving = start()
    stub = connect(serving)
    stub.SetHotKeys(messages.SetHotKeysRequest(table="items", keys=packed(1, 2, 3)))
    assert serving._server.stats()["hot_sets"] == 1


# ---- errors


def test_every_code_has_its_line() -> None:
    assert set(GRPC_CODES) == set(errors.BY_CODE)
    assert grpc.StatusCode.OK not in GRPC_CODES.values()


@pytest.mark.parametrize("code", sorted(errors.BY_CODE))
def test_every_code_travels(start: Start, connect: Callable[[Serving], Stub], code: str) -> None:
    serving = start()

    def fail() -> dict[str, Any]:
        raise errors.BY_CODE[code]("what is wrong, and the remedy")

    serving._grpc._service._status = fail
    if code == "STALE":  # only requests that name a model have the details of a STALE
        serving._grpc._service._details = lambda error, request: ()
    got, text, details = refused(lambda: connect(serving).Status(messages.StatusRequest()))
    assert (got, text) == (GRPC_CODES[code], "what is wrong, and the remedy")
    assert details["petps-code"] == code


PULL, PUSH = messages.PullRequest, messages.PushRequest
WRONG = [
    ("Pull", PULL(table="none"), "NOT_FOUND", "has no table 'none'; it has items"),
    ("Pull", PULL(model="other", table="items"), "NOT_FOUND", "other"),
    ("Pull", PULL(table="items", keys=b"1234567"), "INVALID_ARGUMENT", "no multiple of 8"),
    ("PullMany", messages.PullManyRequest(), "INVALID_ARGUMENT", "without sections"),
    ("Push", PUSH(table="items", keys=packed(1), rows=b"123"), "INVALID_ARGUMENT", "16 bytes"),
    ("Push", PUSH(table="items", keys=b"1"), "INVALID_ARGUMENT", "no multiple of 8"),
    ("Push", PUSH(table="fed", keys=packed(1)), "FAILED_PRECONDITION", "fed by deltas"),
    (
        "Push",
        PUSH(table="items", keys=packed(1, 2), rows=bytes(32), deleted=bytes(9)),
        "INVALID_ARGUMENT",
        "deleted has 9 bytes",
    ),
    (
        "Push",
        PUSH(table="half", keys=packed(1), rows=bytes(8), form=messages.FORM_F32),
        "INVALID_ARGUMENT",
        "1 rows of dim 4 as float32 are 16 bytes, got 8",
    ),
    (
        "Push",
        PUSH(
            table="half",
            keys=packed(1),
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
def test_wrong_requests(
    start: Start,
    connect: Callable[[Serving], Stub],
    method: str,
    request_: Any,
    code: str,
    text: str,
) -> None:
    stub = connect(start())
    got, message, details = refused(lambda: getattr(stub, method)(request_))
    assert got is GRPC_CODES[code], message
    assert text in message
    assert details["petps-code"] == code


def test_full_table_tells_what_it_took(start: Start, connect: Callable[[Serving], Stub]) -> None:
    keys = np.arange(200, dtype=np.uint64)
    request = PUSH(
        table="half",
        keys=keys.tobytes(),
        rows=values(keys).tobytes(),
        form=messages.FORM_F32,
    )
    code, text, details = refused(lambda: connect(start()).Push(request))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "is full (capacity 100)" in text
    report = messages.PushReply.FromString(details["petps-push-reply-bin"])
    assert (report.updated, report.inserted, report.refused) == (10, 90, 100)


def test_wrong_shard(start: Start, connect: Callable[[Serving], Stub], tmp_path: Path) -> None:
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
    ours, others = keys[partitions < 4], keys[partitions >= 4]
    assert stub.Pull(PULL(table="items", keys=ours.tobytes())).rows.rows_found == len(ours)
    code, _, details = refused(lambda: stub.Pull(PULL(table="items", keys=others.tobytes())))
    assert code is grpc.StatusCode.ABORTED
    assert (details["petps-code"], details["petps-map-version"]) == ("WRONG_SHARD", "3")


def test_limits(start: Start, connect: Callable[[Serving], Stub]) -> None:
    limits = {"keys_per_pull": 10, "keys_per_push": 5, "body_bytes": 4096}
    stub = connect(start(server={"limits": limits}))
    small = PULL(table="items", keys=packed(*range(10)))
    assert stub.Pull(small).rows.rows_found == 10
    for call, text in [
        (lambda: stub.Pull(PULL(table="items", keys=packed(*range(11)))), "above the limit of 10"),
        (lambda: stub.Push(PUSH(table="items", keys=packed(*range(6)))), "above the limit of 5"),
        (lambda: stub.Pull(PULL(table="items", keys=bytes(1 << 20))), "larger than max"),
    ]:
        code, message, _ = refused(call)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert text in message
        assert stub.Pull(small).rows.rows_found == 10


def test_answer_above_the_limit(start: Start, connect: Callable[[Serving], Stub]) -> None:
    stub = connect(start(server={"limits": {"body_bytes": 4096}}))
    keys = packed(*[1] * 400)
    code, message, _ = refused(lambda: stub.Pull(PULL(table="items", keys=keys)))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "split the request" in message
    request = PULL(table="half", keys=keys)
    assert stub.Pull(request).rows.rows_found == 400
    request.form = messages.FORM_F32
    code, message, _ = refused(lambda: stub.Pull(request))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "FORM_STORED" in message


# ---- versions


def test_stale(start: Start, connect: Callable[[Serving], Stub]) -> None:
    serving = start()
    commit(serving, 4)
    request = PULL(table="items", keys=packed(1), min_version=5)
    code, text, details = refused(lambda: connect(serving).Pull(request))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "version 5 is asked for" in text
    assert (details["petps-code"], details["petps-applied-version"]) == ("STALE", "4")


def test_pull_waits_for_its_version(start: Start, connect: Callable[[Serving], Stub]) -> None:
    serving = start()
    stub = connect(serving)
    request = PULL(table="items", keys=packed(1), min_version=7, wait_ms=60_000)
    waiting = stub.Pull.future(request, timeout=TIMEOUT)
    await_parked(serving)
    assert not waiting.done()
    # Other pulls continue.
    assert stub.Pull(PULL(table="items", keys=packed(1))).applied_version == 0
    commit(serving, 7)
    assert waiting.result().applied_version == 7


def test_deadline_ends_a_wait(start: Start, connect: Callable[[Serving], Stub]) -> None:
    serving = start()
    stub = connect(serving)
    request = PULL(table="items", keys=packed(1), min_version=7, wait_ms=60_000)
    code, _, _ = refused(lambda: stub.Pull(request, timeout=0.2))
    # The server's STALE may arrive just before: its wait ends with the deadline too.
    assert code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
    assert stub.Pull(PULL(table="items", keys=packed(1))).rows.rows_found == 1


def test_watch_sees_commits_switches_and_drops(
    start: Start, connect: Callable[[Serving], Stub]
) -> None:
    serving = start()
    tables = serving._tables
    stream = connect(serving).WatchVersions(messages.WatchVersionsRequest(), timeout=TIMEOUT)
    first = next(stream)
    assert (first.instance.name, first.instance.applied_version) == ("default@0", 0)
    commit(serving, 3)
    changes = until(stream, "default@0", lambda change: change.instance.applied_version == 3)
    assert list(changes[-1].instance.aliases) == ["default"]

    made = tables.create_instance("default", "default@1", 8)
    tables.set_alias("default", tables.resolve("default@0").id)
    tables.set_alias("default", made.id)
    seen = until(stream, "default@1", lambda change: "default" in change.instance.aliases)
    commit(serving, 9, made.id)
    seen += until(stream, "default@1", lambda change: change.instance.applied_version == 9)
    frozen = [change for change in seen if change.instance.name == "default@0"][-1].instance
    assert frozen.frozen
    assert list(frozen.aliases) == []

    tables.drop_instance(tables.resolve("default@0").id)
    until(stream, "default@0", lambda change: change.dropped)
    stream.cancel()


def test_watch_of_one_model(start: Start, connect: Callable[[Serving], Stub]) -> None:
    serving = start()
    other = serving._tables.create_instance("other", "other@0", 1)
    stub = connect(serving)
    stream = stub.WatchVersions(messages.WatchVersionsRequest(model="other"), timeout=TIMEOUT)
    assert next(stream).instance.name == "other@0"
    commit(serving, 3)
    commit(serving, 4, other.id, partitions=1)
    change = next(stream)
    assert (change.instance.name, change.instance.applied_version) == ("other@0", 4)
    request = messages.WatchVersionsRequest(model="none")
    code, _, _ = refused(lambda: next(stub.WatchVersions(request)))
    assert code is grpc.StatusCode.NOT_FOUND
