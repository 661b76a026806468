"""Kafka messages of HugeCTR HPS as a source for a delta log.

A message is the signature "HCTR" (four bytes), value_size u32, then {key, value[value_size]},
repeated; all numbers are little-endian. A key is 4 or 8 bytes, a value float32[dim]. The topic is
``hps_et.<model>.<table>``. A message has no seq, version, checksum or deletion. So the source
accepts only messages that fit the format exactly. It counts every other message by its fault, and
skips it.

The source commits a version every ``version_seconds``, and then writes its positions in the topics
to a file. After a kill, a new source reads again, in order, the messages that are in no version.
"""

from __future__ import annotations

import json
import logging
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from petps.delta import Damage, Delivery, DeltaError, Event, Fault, Lost, TableSchema, open_log
from petps.delta.files import publish_file
from petps.errors import DataLoss, InvalidArgument
from petps.publish.publisher import Publisher

__all__ = ["HpsCounts", "HpsSource", "decode_hps"]

_log = logging.getLogger("petps.publish")

SIGNATURE: Final = b"HCTR"
HEADER: Final = struct.Struct("<4sI")
KEY_BYTES: Final = (4, 8)
POLL_BYTES: Final = 8 << 20
POLL_SECONDS: Final = 0.1
STATE_FORMAT: Final = "petps-hps-positions-1"


def decode_hps(
    body: bytes | memoryview, dim: int, key_bytes: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]:
    """Return keys uint64[n] and rows float32[n, dim]; n is 0 for a mere header. Raise DeltaError.

    A key of 8 bytes keeps its 64 bits (HPS treats them as signed).
    """
    if len(body) < HEADER.size:
        raise DeltaError(Fault.TOO_SHORT, f"{len(body)} bytes, but a header has {HEADER.size}")
    signature, value_bytes = HEADER.unpack_from(body)
    if signature != SIGNATURE:
        raise DeltaError(Fault.FOREIGN, f"the message begins with {signature!r}, not {SIGNATURE!r}")
    if value_bytes != 4 * dim:
        raise DeltaError(Fault.WRONG_DIM, f"values of {value_bytes} bytes, expected {4 * dim}")
    pair = np.dtype([("key", f"<u{key_bytes}"), ("row", "<f4", (dim,))])
    if (len(body) - HEADER.size) % pair.itemsize:
        raise DeltaError(
            Fault.TORN,
            f"{len(body) - HEADER.size} bytes are no whole number of pairs of {pair.itemsize}: the "
            "message is cut off, or has keys of another width",
        )
    pairs = np.frombuffer(body, dtype=pair, offset=HEADER.size)
    rows = np.ascontiguousarray(pairs["row"])
    if not np.isfinite(rows).all():
        raise DeltaError(Fault.NOT_FINITE, "a value is NaN or infinite")
    return pairs["key"].astype(np.uint64), rows


@dataclass
class HpsCounts:
    """Counts of a source. ``lost``: messages that retention removed before they were read."""

    messages: int = 0
    rows: int = 0
    versions: int = 0
    lost: int = 0
    refused: dict[str, int] = field(default_factory=dict)


class HpsSource:
    """Reader of the topics of a model's tables, which publishes their rows.

    brokers: host:port[,host:port]. publisher: a publisher whose run has begun. state: a file with
    the positions to begin at. If it does not exist, the source reads the topics from their
    beginning, as HPS does. run() raises the errors of Kafka and of the publisher; a new source with
    a new publisher continues from the file.
    """

    def __init__(
        self,
        brokers: str,
        model: str,
        tables: Mapping[str, TableSchema],
        publisher: Publisher,
        *,
        state: Path,
        key_bytes: int = 8,
        version_seconds: float = 1.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if key_bytes not in KEY_BYTES:
            raise InvalidArgument(f"key_bytes must be 4 or 8, got {key_bytes}")
        self._brokers = brokers
        self._model = model
        self._tables = dict(tables)
        self._publisher = publisher
        self._state = state
        self._key_bytes = key_bytes
        self._version_seconds = version_seconds
        # HPS messages have no checksum of their own.
        self._options = {"check.crcs": True, **(options or {})}
        self.counts = HpsCounts()

    def run(self, is_stopped: Callable[[], bool], *, once: bool = False) -> HpsCounts:
        """Read and publish until ``is_stopped()``.

        ``once``: also stop when a version has everything that the topics held at the start.
        """
        with ExitStack() as stack:
            saved = _read_state(self._state)
            readers = {}
            ends: dict[str, dict[int, int]] = {}
            for table in self._tables:
                topic = f"hps_et.{self._model}.{table}"
                log = open_log(
                    f"kafka://{self._brokers}/{topic}", create=False, options=self._options
                )
                stack.callback(log.close)
                partitions = range(log.partitions)
                positions = {**log.start_offsets(partitions), **saved.get(topic, {})}
                ends[table] = log.end_offsets(partitions)
                readers[table] = log.subscribe(positions)
                stack.callback(readers[table].close)
            due = time.monotonic() + self._version_seconds
            has_events = False
            while True:
                for table, reader in readers.items():
                    for event in reader.poll(max_bytes=POLL_BYTES, timeout=POLL_SECONDS):
                        has_events = True
                        next_offset = self._take(table, event)
                        if next_offset is not None:
                            reader.seek(event.partition, next_offset)
                positions_now = {table: reader.positions() for table, reader in readers.items()}
                is_done = once and all(
                    positions_now[table][p] >= end
                    for table, table_ends in ends.items()
                    for p, end in table_ends.items()
                )
                is_ending = is_done or is_stopped()
                if has_events and (is_ending or time.monotonic() >= due):
                    self._commit(positions_now)
                    has_events = False
                    due = time.monotonic() + self._version_seconds
                if is_ending:
                    return self.counts

    def _take(self, table: str, event: Event) -> int | None:
        """Publish the rows of an event. Return the offset to seek to, or None to read on."""
        if isinstance(event, Lost):
            start = min(event.start, event.end)
            self.counts.lost += max(0, event.start - event.offset)
            _log.warning(
                "[publish] table %s, partition %d: %s", table, event.partition, event.reason
            )
            return start
        self.counts.messages += 1
        try:
            if isinstance(event, Damage):
                raise DeltaError(Fault.LOG_DAMAGED, event.reason)
            assert isinstance(event, Delivery)
            schema = self._tables[table]
            keys, rows = decode_hps(event.message.body, schema.dim, self._key_bytes)
        except DeltaError as error:
            name = error.fault.value
            if name not in self.counts.refused:
                _log.warning(
                    "[publish] table %s: skipped a message of HPS (partition %d, offset %d): %s",
                    table,
                    event.partition,
                    event.offset,
                    error,
                )
            self.counts.refused[name] = self.counts.refused.get(name, 0) + 1
            return None
        if len(keys):  # HPS sends a header without pairs as a beacon
            self._publisher.publish(table, keys, rows)
            self.counts.rows += len(keys)
        return None

    def _commit(self, positions: dict[str, dict[int, int]]) -> None:
        self._publisher.commit()
        self.counts.versions += 1
        topics = {
            f"hps_et.{self._model}.{table}": {str(p): offset for p, offset in offsets.items()}
            for table, offsets in positions.items()
        }
        text = json.dumps({"format": STATE_FORMAT, "topics": topics})
        publish_file(self._state, text.encode() + b"\n")


def _read_state(path: Path) -> dict[str, dict[int, int]]:
    try:
        values = json.loads(path.read_text())
        if values["format"] != STATE_FORMAT:
            raise ValueError(values["format"])
        return {
            topic: {int(p): int(offset) for p, offset in offsets.items()}
            for topic, offsets in values["topics"].items()
        }
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataLoss(
            f"{path} holds no positions of HPS's topics; remove it to read them from the beginning"
        ) from None
