"""The delta record: decode(encode(r)) == r, and each wrong message is refused with its fault."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from petps.delta import (
    MAX_MESSAGE_BYTES,
    BaseBody,
    CommitBody,
    ContinueBody,
    DeltaError,
    Fault,
    Kind,
    Message,
    Record,
    RecordHeader,
    RowsBody,
    TableCount,
    TableSchema,
    arrow,
    decode_record,
    encode_record,
    headers,
    read_header,
)
from petps.delta.record import Body
from petps.delta.schema import check_instance, partition_of
from petps.errors import DataLoss, InvalidArgument, PetpsError

SCHEMA = TableSchema("user", "f32", 8)
HEADER = RecordHeader(
    model="ranking",
    kind=Kind.ROWS,
    run=7,
    publisher="trainer-a",
    step=1234,
    seq=3,
    version=12,
    time_ns=1_790_000_000_123_456_789,
    partition=2,
    partitions=4,
    table="user",
    dtype="f32",
    dim=8,
)
PLAIN = replace(HEADER, table="", dtype="", dim=0)


def rows_record(n: int = 5, *, deletions: bool = True, seed: int = 1) -> Record:
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 1 << 63, n, dtype=np.uint64)
    rows = rng.integers(0, 256, (n, SCHEMA.row_bytes), dtype=np.uint8)
    deleted = None
    if deletions and n:
        deleted = rng.random(n) < 0.4
        deleted[0] = True
        rows[deleted] = 0
    return Record(HEADER, RowsBody(keys, rows, deleted))


def decode(message: Message, schema: TableSchema | None = SCHEMA) -> Record:
    return decode_record(
        message,
        model="ranking",
        partition=2,
        partitions=4,
        schema_of=lambda name: schema if name == "user" else None,
    )


def assert_same(left: Record, right: Record) -> None:
    assert left.header == right.header
    if isinstance(left.body, RowsBody) and isinstance(right.body, RowsBody):
        np.testing.assert_array_equal(left.body.keys, right.body.keys)
        np.testing.assert_array_equal(left.body.rows, right.body.rows)
        if left.body.deleted is None or right.body.deleted is None:
            assert left.body.deleted is right.body.deleted
        else:
            np.testing.assert_array_equal(left.body.deleted, right.body.deleted)
    else:
        assert left.body == right.body


def reseal(message: Message, body: bytes | None = None, **changes: bytes) -> Message:
    """Return the message with another body or header values, and a checksum that fits them."""
    fields = {name: value for name, value in message.headers if name not in ("format", "checksum")}
    return headers.seal(list((fields | changes).items()), message.body if body is None else body)


def replace_header(message: Message, name: str, value: bytes) -> Message:
    """Return the message with one header altered and the checksum unchanged."""
    return Message([(n, value if n == name else v) for n, v in message.headers], message.body)


def fault_of(message: Message, schema: TableSchema | None = SCHEMA) -> tuple[Fault, str]:
    with pytest.raises(DeltaError) as caught:
        decode(message, schema)
    assert isinstance(caught.value, DataLoss)
    return caught.value.fault, str(caught.value)


@pytest.mark.parametrize("n", [0, 1, 5, 8, 9, 1000])
@pytest.mark.parametrize("deletions", [False, True])
def test_decoded_rows_equal_the_encoded_ones(n: int, deletions: bool) -> None:
    record = rows_record(n, deletions=deletions)
    assert_same(decode(encode_record(record)), record)


def test_rows_are_views_of_the_body() -> None:
    message = encode_record(rows_record(100, deletions=False))
    body = np.frombuffer(message.body, dtype=np.uint8)
    decoded = decode(message).body
    assert isinstance(decoded, RowsBody)
    assert np.shares_memory(decoded.keys, body)
    assert np.shares_memory(decoded.rows, body)
    assert decoded.keys.flags.aligned
    assert decoded.rows.flags.c_contiguous


def test_an_unaligned_body_is_decoded() -> None:
    record = rows_record(100)
    message = encode_record(record)
    for shift in range(1, 8):
        shifted = memoryview(b"x" * shift + bytes(message.body))[shift:]
        decoded = decode(Message(message.headers, shifted))
        assert_same(decoded, record)
        assert isinstance(decoded.body, RowsBody)
        assert decoded.body.keys.flags.aligned


def test_equal_deltas_have_equal_bytes() -> None:
    first, second = rows_record(50), rows_record(50)
    assert isinstance(second.body, RowsBody)
    assert second.body.deleted is not None
    second.body.rows[second.body.deleted] = 0xAB  # the row bytes of a deletion do not matter
    assert bytes(encode_record(first).body) == bytes(encode_record(second).body)
    assert encode_record(first).headers == encode_record(second).headers


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (
            Kind.COMMIT,
            CommitBody(tables={"user": TableCount(here=3, everywhere=9)}, dense="s3://d"),
        ),
        (Kind.COMMIT, CommitBody(tables={})),
        (Kind.BASE, BaseBody(location="/bases/ranking-12")),
        (Kind.CONTINUE, ContinueBody(previous_run=6, last_seq=(1 << 64) - 1)),
    ],
)
def test_decoded_markers_equal_the_encoded_ones(kind: Kind, body: Body) -> None:
    record = Record(replace(PLAIN, kind=kind), body)
    assert_same(decode(encode_record(record)), record)


@pytest.mark.parametrize("seed", range(100))
def test_random_records_equal_after_decoding(seed: int) -> None:
    rng = np.random.default_rng(seed)

    def u64(low: int = 0) -> int:
        edges = (low, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
        return edges[int(rng.integers(0, 5))] if rng.random() < 0.5 else int(rng.integers(low, 99))

    n = int(rng.integers(0, 40))
    dtype = ["f32", "f16", "bf16", "int8"][seed % 4]
    schema = TableSchema("user", dtype, int(rng.integers(1, 40)))
    mask = rng.random(n) < rng.choice([0, 0.3, 1])
    rows = rng.integers(0, 256, (n, schema.row_bytes), dtype=np.uint8)
    rows[mask] = 0
    header = replace(
        HEADER,
        run=u64(1),
        seq=u64(1),
        step=u64(),
        version=u64(),
        time_ns=u64(),
        publisher="".join(
            rng.choice(list("aZ0 \n\0\u00e4\u65e5\U0001f600"), int(rng.integers(0, 12)))
        ),
        dtype=dtype,
        dim=schema.dim,
    )
    keys = np.array([u64() for _ in range(n)], dtype=np.uint64)
    record = Record(header, RowsBody(keys, rows, mask if mask.any() else None))
    assert_same(decode(encode_record(record), schema), record)


@pytest.mark.parametrize("row_bytes", [1, 9, 16, 512, 4096])
@pytest.mark.parametrize("limit", [16 << 10, 64 << 10, MAX_MESSAGE_BYTES])
def test_rows_per_message_fill_a_message(row_bytes: int, limit: int) -> None:
    n = arrow.rows_per_message(row_bytes, limit)
    header = replace(
        HEADER,
        model="m" * 63,
        table="t" * 63,
        publisher="p" * 63,
        run=(1 << 64) - 1,
        step=(1 << 64) - 1,
        time_ns=(1 << 64) - 1,
        seq=(1 << 64) - 1,
        version=(1 << 64) - 1,
        dim=row_bytes,
    )
    keys = np.arange(n, dtype=np.uint64)
    deleted = keys % 2 == 0
    rows = np.ones((n, row_bytes), np.uint8)
    size = encode_record(Record(header, RowsBody(keys, rows, deleted))).size
    assert limit - 4096 - row_bytes - 9 <= size <= limit
    assert [s.stop - s.start for s in arrow.slices(2 * n + 1, row_bytes, limit)] == [n, n, 1]


def test_the_largest_row_fits_alone() -> None:
    assert arrow.rows_per_message(4096 * 4, 16 << 10) == 1


def test_a_message_that_is_too_large_is_refused() -> None:
    n = MAX_MESSAGE_BYTES // 40 + 1
    record = rows_record(n, deletions=False)
    with pytest.raises(
        DeltaError, match=r"too-large: a message of \d+ bytes; the limit is 1000000"
    ):
        encode_record(record)


def test_headers_of_other_programs_are_ignored() -> None:
    record = rows_record()
    message = encode_record(record)
    message.headers.insert(0, ("traceparent", b"\xff\x00"))
    message.headers.append(("mirrored-from", b"x" * 5000))
    assert_same(decode(message), record)


def test_a_truncated_body_is_refused() -> None:
    message = encode_record(rows_record(100))
    for cut in (0, 1, 100, len(message.body) - 1):
        fault, text = fault_of(Message(message.headers, bytes(message.body[:cut])))
        assert fault is Fault.CHECKSUM
        assert "truncated or altered" in text


def test_every_flipped_bit_is_detected() -> None:
    message = encode_record(rows_record(2))
    body = bytes(message.body)
    for at in range(len(body)):
        flipped = body[:at] + bytes([body[at] ^ 1 << at % 8]) + body[at + 1 :]
        assert fault_of(Message(message.headers, flipped))[0] is Fault.CHECKSUM
    for name, value in message.headers:
        for at in range(len(value)):
            flipped = value[:at] + bytes([value[at] ^ 1 << at % 8]) + value[at + 1 :]
            with pytest.raises(DeltaError):
                decode(replace_header(message, name, flipped))


def test_swapped_header_values_are_detected() -> None:
    message = encode_record(rows_record())
    values = dict(message.headers)
    swapped = replace_header(message, "run", values["seq"])
    swapped = replace_header(swapped, "seq", values["run"])
    assert fault_of(swapped)[0] is Fault.CHECKSUM


@pytest.mark.parametrize("name", [*headers.FIELDS, "checksum"])
def test_a_missing_header_is_named(name: str) -> None:
    message = encode_record(rows_record())
    rest = Message([(n, v) for n, v in message.headers if n != name], message.body)
    fault, text = fault_of(rest)
    assert fault is (Fault.FOREIGN if name == "format" else Fault.HEADER_MISSING)
    assert name in text


def test_a_repeated_header_is_refused() -> None:
    message = encode_record(rows_record())
    message.headers.append(("seq", b"9"))
    assert fault_of(message) == (
        Fault.HEADER_INVALID,
        "header-invalid: header seq appears twice",
    )


@pytest.mark.parametrize("value", [b"petps-delta-2", b"petps-delta-999999999"])
def test_a_newer_format_is_refused(value: bytes) -> None:
    fault, text = fault_of(replace_header(encode_record(rows_record()), "format", value))
    assert fault is Fault.NEWER_FORMAT
    assert "this release reads up to 1: upgrade the server first" in text


@pytest.mark.parametrize(
    "value", [b"", b"x", b"petps-delta-", b"petps-delta-0", b"avro-1", b"petps-delta-" + b"9" * 50]
)
def test_a_foreign_format_is_refused(value: bytes) -> None:
    assert (
        fault_of(replace_header(encode_record(rows_record()), "format", value))[0] is Fault.FOREIGN
    )


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("run", b"-1", "header run is no u64"),
        ("run", b"0", "run and seq begin with 1"),
        ("seq", b"1e3", "header seq is no u64"),
        ("seq", b"0", "run and seq begin with 1"),
        ("version", b"18446744073709551616", "header version is no u64"),
        ("time", b"", "header time is no u64"),
        ("step", "٣".encode(), "header step is no u64"),
        ("kind", b"row", "header kind is 'row'"),
        ("partition", b"4", "partition 4 is not below partitions 4"),
        ("model", b"\xff\xfe", "header model is not UTF-8"),
    ],
)
def test_an_invalid_header_is_named(name: str, value: bytes, reason: str) -> None:
    fault, text = fault_of(reseal(encode_record(rows_record()), **{name: value}))
    assert fault is Fault.HEADER_INVALID
    assert reason in text


@pytest.mark.parametrize(
    ("changes", "fault", "reason"),
    [
        ({"model": b"other"}, Fault.WRONG_MODEL, "message of model 'other', expected 'ranking'"),
        (
            {"partition": b"1"},
            Fault.WRONG_PARTITION,
            "message of partition 1, found in partition 2",
        ),
        ({"partitions": b"8"}, Fault.WRONG_PARTITION, "written for 8 partitions"),
        ({"table": b"users"}, Fault.WRONG_TABLE, "model ranking has no table 'users'"),
        ({"dim": b"16"}, Fault.WRONG_DIM, "table user has dim 8, the message 16"),
        ({"dtype": b"f16"}, Fault.WRONG_DTYPE, "table user holds f32 rows, the message 'f16'"),
    ],
)
def test_a_message_in_the_wrong_place_is_refused(
    changes: dict[str, bytes], fault: Fault, reason: str
) -> None:
    actual, text = fault_of(reseal(encode_record(rows_record()), **changes))
    assert actual is fault
    assert reason in text


def stream(batch: pa.RecordBatch, times: int = 1) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        for _ in range(times):
            writer.write_batch(batch)
    return bytes(sink.getvalue())


KEYS = pa.array([1, 2], pa.uint64())
ROWS = pa.array([b"a" * 32, None], pa.binary(32))


@pytest.mark.parametrize(
    ("body", "fault", "reason"),
    [
        (b"", Fault.BODY_INVALID, "not an Arrow IPC stream"),
        (b"garbage" * 100, Fault.BODY_INVALID, "not an Arrow IPC stream"),
        (
            stream(pa.record_batch([ROWS], ["row"])),
            Fault.COLUMN_MISSING,
            "no column 'key' in ['row']",
        ),
        (stream(pa.record_batch([KEYS], ["key"])), Fault.COLUMN_MISSING, "no column 'row'"),
        (
            stream(pa.record_batch([KEYS, KEYS, ROWS], ["key", "key", "row"])),
            Fault.COLUMN_MISSING,
            "more than one column 'key'",
        ),
        (
            stream(pa.record_batch([KEYS.cast(pa.int64()), ROWS], ["key", "row"])),
            Fault.COLUMN_TYPE,
            "column 'key' is int64, expected uint64",
        ),
        (
            stream(pa.record_batch([KEYS, ROWS.cast(pa.binary())], ["key", "row"])),
            Fault.COLUMN_TYPE,
            "column 'row' is binary, expected fixed_size_binary[32]",
        ),
        (
            stream(pa.record_batch([pa.array([1, None], pa.uint64()), ROWS], ["key", "row"])),
            Fault.KEY_NULL,
            "1 keys are null",
        ),
        (
            stream(
                pa.record_batch([KEYS, pa.array([b"a" * 16] * 2, pa.binary(16))], ["key", "row"])
            ),
            Fault.WRONG_DIM,
            "rows of 16 bytes, the table's have 32",
        ),
        (stream(pa.record_batch([KEYS, ROWS], ["key", "row"]), 2), Fault.BODY_INVALID, "more than"),
        (stream(pa.record_batch([KEYS, ROWS], ["key", "row"]), 0), Fault.BODY_INVALID, "not an"),
    ],
)
def test_a_wrong_body_is_refused(body: bytes, fault: Fault, reason: str) -> None:
    actual, text = fault_of(reseal(encode_record(rows_record()), body))
    assert actual is fault
    assert reason in text


def test_further_columns_are_ignored() -> None:
    batch = pa.record_batch([pa.array([0.5, 0.25]), KEYS, ROWS], ["state.adam", "key", "row"])
    body = decode(reseal(encode_record(rows_record()), stream(batch))).body
    assert isinstance(body, RowsBody)
    assert body.keys.tolist() == [1, 2]
    assert body.deleted is not None
    assert body.deleted.tolist() == [False, True]


@pytest.mark.parametrize(
    ("kind", "values", "reason"),
    [
        (Kind.BASE, {}, "body of a base record: location Field required"),
        (Kind.BASE, {"location": ""}, "location"),
        (Kind.CONTINUE, {"previous_run": -1, "last_seq": 0}, "previous_run"),
        (Kind.CONTINUE, {"previous_run": 1, "last_seq": 1 << 64}, "last_seq"),
        (Kind.COMMIT, {"tables": {"user": 3}}, "tables.user"),
        (Kind.COMMIT, [], "body of a commit record"),
    ],
)
def test_a_wrong_marker_body_is_refused(kind: Kind, values: object, reason: str) -> None:
    message = encode_record(Record(replace(PLAIN, kind=Kind.BASE), BaseBody(location="x")))
    body = json.dumps(values).encode()
    fault, text = fault_of(reseal(message, body, kind=kind.value.encode()))
    assert fault is Fault.BODY_INVALID
    assert reason in text


def test_read_header_does_not_decode_the_body() -> None:
    assert read_header(reseal(encode_record(rows_record()), b"no arrow")) == HEADER


@pytest.mark.parametrize("seed", range(8))
def test_mutated_bodies_raise_a_delta_error_or_decode(seed: int) -> None:
    """Decode any bytes that a publisher could seal: no crash, no hang, no other error."""
    rng = np.random.default_rng(seed)
    message = encode_record(rows_record(40, seed=seed))
    for _ in range(2000):
        body = bytearray(message.body)
        for _ in range(int(rng.integers(1, 6))):
            at = int(rng.integers(0, len(body)))
            match int(rng.integers(0, 5)):
                case 0:
                    body[at] ^= 1 << int(rng.integers(0, 8))
                case 1:
                    del body[at : at + int(rng.integers(1, 64))]
                case 2:
                    body[at:at] = bytes(rng.integers(0, 256, 16, dtype=np.uint8))
                case 3:
                    body[at : at + 4] = struct.pack("<i", int(rng.integers(-(1 << 31), 1 << 31)))
                case _:
                    body[at : at + 8] = struct.pack("<q", int(rng.integers(-(1 << 62), 1 << 62)))
            if not body:
                break
        mutated = reseal(message, bytes(body))
        try:
            record = decode(mutated)
        except DeltaError:
            assert len(fault_of(mutated)[1]) < 500
            continue
        assert isinstance(record.body, RowsBody)
        n = len(record.body.keys)
        assert record.body.rows.shape == (n, SCHEMA.row_bytes)
        assert int(record.body.keys.sum(dtype=np.uint64)) >= 0  # every byte is readable
        assert int(record.body.rows.sum(dtype=np.uint64)) >= 0


@pytest.mark.parametrize(
    ("name", "dtype", "dim", "reason"),
    [
        ("", "f32", 8, "a name has 1 to 63"),
        ("a/b", "f32", 8, "table 'a/b'"),
        ("a" * 64, "f32", 8, "a name has 1 to 63"),
        ("t", "f64", 8, "unknown dtype 'f64'; known: f32, f16, bf16, int8"),
        ("t", "f32", 0, "dim 0 is outside 1..4096"),
        ("t", "f32", 4097, "dim 4097 is outside 1..4096"),
    ],
)
def test_bad_schemas_are_refused(name: str, dtype: str, dim: int, reason: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        TableSchema(name, dtype, dim)
    assert reason in str(caught.value)


def test_partition_is_xxh3_of_the_little_endian_key() -> None:
    """Check fixed values from the reference xxHash, seed 0."""
    keys = np.array([0, 1, 2, 255, 1 << 32, (1 << 64) - 1], dtype=np.uint64)
    assert partition_of(keys, 1000).tolist() == [
        0xC77B3ABB6F87ACD9 % 1000,
        *[_xxh3(key) % 1000 for key in keys.tolist()[1:]],
    ]
    assert partition_of(keys, 1).tolist() == [0] * 6


def _xxh3(key: int) -> int:
    import xxhash

    return xxhash.xxh3_64_intdigest(key.to_bytes(8, "little"), seed=0)


def test_delta_errors_belong_to_petps_errors() -> None:
    assert issubclass(DeltaError, PetpsError)


def test_an_instance_name_has_no_newline_at_its_end() -> None:
    assert check_instance("m", "m@1") == "m@1"
    with pytest.raises(InvalidArgument, match="write m@NAME"):
        check_instance("m", "m@1\n")
