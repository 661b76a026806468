"""Ingest without threads, and streams with the known rows after every seq."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from petps.delta import Delivery, DeltaLog, Message, RowsBody, TableSchema, decode_record
from petps.delta.directory import DirectoryLog
from petps.delta.schema import partition_of
from petps.publish import Position, Publisher
from petps.server.ingest import follow
from petps.server.ingest.applier import Applier, InlineApplier
from petps.server.ingest.follow import Follower
from petps.server.ingest.ingest import ROWS_MAX
from petps.server.ingest.partition import PartitionState
from petps.server.ingest.protocols import BaseSource
from petps.server.ingest.trace import TraceSink
from tests.python.ingest.model import Letters, MemoryTables
from tests.python.ingest.world import write_rows

SCHEMAS = [TableSchema("user", "f32", 4), TableSchema("item", "f32", 2)]
P = 3
Rows = dict[tuple[str, int], bytes]


class StepApplier:
    """Applier whose action runs once the caller has executed ``steps`` lines of ingest.

    So the applying thread runs at a chosen point of the reading thread. Lines count while an action
    is pending. An action that is waited for runs at once. After ``steps`` lines, ``again`` returns
    the next number; a negative one: never again.
    """

    def __init__(self, steps: int, again: Callable[[], int] = lambda: -1) -> None:
        self.steps = steps
        self.again = again
        self.pending: list[Callable[[], None]] = []

    def submit(self, action: Callable[[], None]) -> None:
        self.wait()
        self.pending.append(action)

    def wait(self) -> None:
        while self.pending:
            self.pending.pop()()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Count the lines that the block executes."""
        room = os.path.dirname(follow.__file__)

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            if not frame.f_code.co_filename.startswith(room):
                return None
            if event == "line" and self.pending and self.steps >= 0:
                self.steps -= 1
                if self.steps < 0:
                    self.steps = self.again()
                    self.wait()
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(before)


@dataclass
class Driver:
    """An ingest in the caller's thread, which follows a log until nothing changes any more."""

    log: DeltaLog
    instance: MemoryTables
    letters: Letters
    bases: BaseSource | None = None
    rows_max: int = ROWS_MAX
    poll_bytes: int = 1 << 20
    pace: Callable[[int], None] = lambda rows: None
    applier: Applier = field(default_factory=InlineApplier)
    trace: TraceSink | None = None

    def __post_init__(self) -> None:
        starts = self.log.start_offsets(range(P))
        self.states = {
            partition: PartitionState.of(
                partition, self.instance.progress(partition), starts[partition]
            )
            for partition in range(P)
        }
        self.follower = Follower(
            self.instance,
            self.bases,
            self.letters,
            self.states,
            rows_max=self.rows_max,
            pace=self.pace,
            retry_until_done=lambda action: action(),
            applier=self.applier,
            trace=self.trace,
        )
        self.subscription = self.log.subscribe({p: s.offset for p, s in self.states.items()})

    def read(self) -> None:
        """Read until the log has no more messages and no catch-up is running."""
        while True:
            events = self.subscription.poll(max_bytes=self.poll_bytes, timeout=0)
            sought: set[int] = set()
            for event in events:
                if event.partition in sought:
                    continue
                offset = self.follower.take(event)
                if offset is not None:
                    self.subscription.seek(event.partition, offset)
                    sought.add(event.partition)
            self.follower.flush()
            self.follower.stop_refused()
            if not events and not self.follower.catching_up:
                self.follower.settle()
                retries = self.follower.retry_full()
                for partition, retry_offset in retries.items():
                    self.subscription.seek(partition, retry_offset)
                if not retries:
                    return
            self.advance_catch_up()

    def advance_catch_up(self) -> None:
        for partition in self.follower.catching_up:
            self.subscription.pause(partition)
        for partition, offset in self.follower.advance_catch_up().items():
            if offset is not None:
                self.subscription.seek(partition, offset)
            self.subscription.resume(partition)

    def run(self) -> Driver:
        """Read until the log has no more messages and no base ends a stop."""
        self.read()
        while True:
            before = self.positions()
            self.follower.search_bases()
            self.advance_catch_up()
            self.read()
            if self.positions() == before:
                return self

    def positions(self) -> list[tuple[int, int, str]]:
        return [(state.run, state.seq, state.mode.value) for state in self.states.values()]

    def close(self) -> None:
        self.subscription.close()


@dataclass
class Stream:
    """A publisher's messages by partition, and the rows of each partition after each seq."""

    messages: dict[int, list[Message]]
    position: Position
    states: dict[tuple[int, int, int], Rows] = field(default_factory=dict)

    def rows_at(self, partition: int, run: int, seq: int) -> Rows:
        """Return the rows of a partition once {run, seq} is applied."""
        return {} if run == 0 else self.states[(partition, run, seq)]

    def final(self) -> dict[int, Rows]:
        """Return the rows of each partition at the end."""
        position = self.position
        return {p: self.rows_at(p, position.run, position.seqs[p]) for p in range(P)}


def publish_versions(
    publisher: Publisher, rng: np.random.Generator, versions: int, key_space: int = 60
) -> None:
    """Publish some versions of both tables, with repeated keys and deletions."""
    for _ in range(versions):
        for schema in SCHEMAS:
            n = int(rng.integers(0, 40))
            keys = rng.integers(0, key_space, n, dtype=np.uint64)
            rows = rng.standard_normal((n, schema.dim), dtype=np.float32)
            publisher.publish(schema.name, keys, rows, rng.random(n) < 0.2)
        publisher.commit()


def stream_of(log: DirectoryLog, position: Position) -> Stream:
    """Decode a log into the rows after each seq: the slow, obvious model."""
    stream = Stream({p: [] for p in range(P)}, position)
    rows: dict[int, Rows] = {p: {} for p in range(P)}
    subscription = log.subscribe(dict.fromkeys(range(P), 0))
    schemas = {schema.name: schema for schema in SCHEMAS}
    while events := subscription.poll(max_bytes=1 << 22, timeout=0):
        for event in events:
            assert isinstance(event, Delivery)
            p = event.partition
            stream.messages[p].append(event.message)
            record = decode_record(
                event.message, model="m", partition=p, partitions=P, schema_of=schemas.get
            )
            if isinstance(record.body, RowsBody):
                body = record.body
                for at, key in enumerate(body.keys.tolist()):
                    if body.deleted is not None and body.deleted[at]:
                        rows[p].pop((record.header.table, key), None)
                    else:
                        rows[p][(record.header.table, key)] = body.rows[at].tobytes()
            stream.states[(p, record.header.run, record.header.seq)] = dict(rows[p])
    subscription.close()
    return stream


def rows_by_partition(instance: MemoryTables) -> dict[int, Rows]:
    """Return the instance's rows by partition."""
    rows: dict[int, Rows] = {p: {} for p in range(P)}
    for name, table in instance.by_name.items():
        keys = np.array(list(table.rows), dtype=np.uint64)
        for key, p in zip(keys.tolist(), partition_of(keys, P).tolist(), strict=True):
            rows[p][(name, key)] = table.rows[key]
    return rows


def write_base(
    folder: Path,
    rows: dict[int, Rows],
    positions: dict[int, tuple[int, int]],
    version: int,
    instance: str = "m@1",
) -> Path:
    """Write a base of these rows."""
    by_table: dict[str, dict[int, bytes]] = {schema.name: {} for schema in SCHEMAS}
    for part in rows.values():
        for (table, key), row in part.items():
            by_table[table][key] = row
    return write_rows(
        folder,
        SCHEMAS,
        by_table,
        partitions=P,
        positions=positions,
        version=version,
        instance=instance,
    )
