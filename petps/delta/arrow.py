"""Rows of a message as an Arrow IPC stream: {key uint64, row fixed-size binary, null = delete}.

It is a stream, not a file, because the footer of a file would be useless: a message is read once
from start to end, the log stores its length, and the checksum covers its integrity.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from petps.delta.errors import DeltaError, Fault
from petps.delta.headers import MAX_MESSAGE_BYTES

__all__ = [
    "KEY",
    "ROW",
    "decode_columns",
    "decode_rows",
    "encode_columns",
    "encode_rows",
    "locate_columns",
    "rows_per_message",
    "slices",
    "view_columns",
]

Keys = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
Layout = tuple[int, ...]

KEY: Final = "key"
ROW: Final = "row"
# Upper bound of a message's bytes without rows, which are really under 3,000: 15 headers of at most
# 63 bytes with their names, the schema of the stream, padding.
RESERVED_BYTES: Final = 4096
# Exceptions that Arrow may raise on bytes that petps did not write.
_ARROW_ERRORS: Final = (
    pa.ArrowException,
    OSError,
    ValueError,
    TypeError,
    MemoryError,
    OverflowError,
    EOFError,
    StopIteration,
)


def rows_per_message(row_bytes: int, limit: int = MAX_MESSAGE_BYTES) -> int:
    """Return the largest number of rows whose message fits into ``limit`` bytes; at least 1."""
    bits_per_row = 8 * (8 + row_bytes) + 1
    return max(1, 8 * (limit - RESERVED_BYTES) // bits_per_row)


def slices(n: int, row_bytes: int, limit: int = MAX_MESSAGE_BYTES) -> Iterator[slice]:
    """Cut n rows into consecutive slices, each small enough for one message."""
    step = rows_per_message(row_bytes, limit)
    for start in range(0, n, step):
        yield slice(start, min(n, start + step))


def encode_rows(keys: Keys, rows: Rows, deleted: Mask | None = None) -> memoryview:
    """Encode keys uint64[n], rows uint8[n, row_bytes], deleted bool[n] as an Arrow IPC stream.

    The rows of deletions are written as zeros, so that equal deltas have equal bytes.
    """
    return encode_columns(keys, {ROW: rows}, deleted)


def encode_columns(
    keys: Keys,
    columns: Mapping[str, Rows],
    deleted: Mask | None = None,
    *,
    keyed: bool = True,
    into: memoryview | None = None,
) -> memoryview:
    """Encode several columns uint8[n, width], as encode_rows() does; only ``row`` has nulls.

    Args:
        keys: uint64[n].
        columns: Column by name; must contain ``row``.
        deleted: bool[n], the rows to write as null in ``row`` and as zeros in every column.
        keyed: Whether to write the keys. Without them, the decoder must know the first key.
        into: Memory to write to. It needs room for the schema too, which grows with the number of
            columns: RESERVED_BYTES are enough for a few columns.

    Returns:
        The bytes of the stream; a part of ``into`` if it is given.
    """
    n = len(keys)
    validity = None
    if deleted is not None and deleted.any():
        columns = {
            name: np.where(deleted[:, None], np.uint8(0), rows) if rows[deleted].any() else rows
            for name, rows in columns.items()
        }
        validity = pa.py_buffer(np.packbits(~deleted, bitorder="little"))
    arrays = {}
    if keyed:
        buffer = pa.py_buffer(np.ascontiguousarray(keys, dtype="<u8"))
        arrays[KEY] = pa.Array.from_buffers(pa.uint64(), n, [None, buffer])
    for name, rows in columns.items():
        buffers = [validity if name == ROW else None, pa.py_buffer(np.ascontiguousarray(rows))]
        arrays[name] = pa.Array.from_buffers(pa.binary(rows.shape[1]), n, buffers)
    batch = pa.record_batch(arrays)
    if into is not None:
        buffer_writer = pa.FixedSizeBufferWriter(pa.py_buffer(into))
        with pa.ipc.new_stream(buffer_writer, batch.schema) as writer:
            writer.write_batch(batch)
        return into[: buffer_writer.tell()]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


def decode_rows(body: bytes | memoryview, row_bytes: int) -> tuple[Keys, Rows, Mask | None]:
    """Decode an IPC stream: keys uint64[n], rows uint8[n, row_bytes], deleted bool[n] or None.

    keys and rows are read-only views of ``body``; keys that are not aligned to 8 bytes are copied.
    Raises DeltaError.
    """
    keys, columns, deleted = decode_columns(body, {ROW: row_bytes})
    return keys, columns[ROW], deleted


def decode_columns(
    body: bytes | memoryview, widths: Mapping[str, int], first_key: int | None = None
) -> tuple[Keys, dict[str, Rows], Mask | None]:
    """Decode the named columns, each uint8[n, width], as decode_rows() does.

    first_key: For a stream without keys, its first key; the keys ascend from it by one.
    """
    try:
        with pa.ipc.open_stream(pa.py_buffer(body)) as reader:
            batch = reader.read_next_batch()
            batch.validate(full=True)
            try:
                reader.read_next_batch()
            except StopIteration:
                pass
            else:
                raise DeltaError(Fault.BODY_INVALID, "more than one record batch in a message")
    except DeltaError:
        raise
    except _ARROW_ERRORS as error:
        text = str(error) or type(error).__name__
        raise DeltaError(Fault.BODY_INVALID, f"not an Arrow IPC stream: {text[:200]}") from None
    arrays = {name: _row_column(batch, name, width) for name, width in widths.items()}
    n = batch.num_rows
    keys = _keys(batch) if first_key is None else _count_from(first_key, n)
    columns = {
        name: _view(column, n, widths[name]).reshape(n, widths[name])
        for name, column in arrays.items()
    }
    return np.require(keys, np.uint64, "A"), columns, _read_deletions(arrays[ROW], n)


def locate_columns(body: bytes | memoryview, names: Sequence[str]) -> Layout:
    """Return the offsets of keys, columns and the null mask of ``row`` in encode_columns()' bytes.

    The first is -1 if the stream has no keys, the last is -1 if it has no null mask.
    """
    stream = pa.py_buffer(body)
    with pa.ipc.open_stream(stream) as reader:
        batch = reader.read_next_batch()
    mask = batch.column(ROW).buffers()[0]
    column_names = set(batch.schema.names)
    buffers = [
        batch.column(name).buffers()[1] if name in column_names else None for name in (KEY, *names)
    ]
    offsets = [-1 if buffer is None else buffer.address - stream.address for buffer in buffers]
    return (*offsets, -1 if mask is None else mask.address - stream.address)


def view_columns(
    body: bytes | memoryview, n: int, widths: Mapping[str, int], layout: Layout, first_key: int
) -> tuple[Keys, dict[str, Rows], Mask | None]:
    """Decode without Arrow. The bytes must have the layout that locate_columns() returned.

    first_key: The first key; used only if the bytes have no keys.
    """
    if layout[0] < 0:
        keys = _count_from(first_key, n)
    else:
        keys = np.require(np.frombuffer(body, "<u8", n, layout[0]), np.uint64, "A")
    columns = {
        name: np.frombuffer(body, np.uint8, n * width, offset).reshape(n, width)
        for (name, width), offset in zip(widths.items(), layout[1:-1], strict=True)
    }
    if layout[-1] < 0:
        return keys, columns, None
    mask = np.frombuffer(body, np.uint8, (n + 7) // 8, layout[-1])
    return keys, columns, ~np.unpackbits(mask, count=n, bitorder="little").view(np.bool_)


def _count_from(first_key: int, n: int) -> Keys:
    return np.arange(n, dtype=np.uint64) + np.uint64(first_key)


def _keys(batch: pa.RecordBatch) -> Keys:
    column = _column(batch, KEY, pa.uint64())
    if column.null_count:
        raise DeltaError(Fault.KEY_NULL, f"{column.null_count} keys are null")
    return _view(column, batch.num_rows, 8).view("<u8")


def _column(batch: pa.RecordBatch, name: str, expected: pa.DataType) -> pa.Array:
    indices = batch.schema.get_all_field_indices(name)
    if len(indices) != 1:
        count_text = "no" if not indices else "more than one"
        raise DeltaError(
            Fault.COLUMN_MISSING, f"{count_text} column {name!r} in {batch.schema.names}"
        )
    column = batch.column(indices[0])
    if column.type != expected:
        raise DeltaError(
            Fault.COLUMN_TYPE, f"column {name!r} is {column.type}, expected {expected}"
        )
    return column


def _row_column(batch: pa.RecordBatch, name: str, row_bytes: int) -> pa.Array:
    for field in batch.schema:
        if field.name != name or not pa.types.is_fixed_size_binary(field.type):
            continue
        if field.type.byte_width != row_bytes:
            raise DeltaError(
                Fault.WRONG_DIM,
                f"rows of {field.type.byte_width} bytes, the table's have {row_bytes}",
            )
    return _column(batch, name, pa.binary(row_bytes))


def _view(column: pa.Array, n: int, width: int) -> Rows:
    data = column.buffers()[1]
    needed_bytes = (column.offset + n) * width
    if n == 0:
        return np.empty(0, dtype=np.uint8)
    if data is None or data.size < needed_bytes:
        raise DeltaError(Fault.BODY_INVALID, f"a column is shorter than its {n} rows")
    return np.frombuffer(data, dtype=np.uint8, count=n * width, offset=column.offset * width)


def _read_deletions(column: pa.Array, n: int) -> Mask | None:
    validity = column.buffers()[0]
    if n == 0 or validity is None or not column.null_count:
        return None
    if validity.size * 8 < column.offset + n:
        raise DeltaError(Fault.BODY_INVALID, f"a null mask is shorter than its {n} rows")
    bits = np.unpackbits(np.frombuffer(validity, dtype=np.uint8), bitorder="little")
    present: Mask = bits[column.offset : column.offset + n].view(np.bool_)
    return ~present
