"""The directory log: a DeltaLog of append-only files, for one machine or one shared folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from petps.delta.directory.read import EndTracker, PartitionReader
from petps.delta.directory.segments import (
    list_segments,
    partition_folder,
    read_log_file,
    write_log_file,
)
from petps.delta.directory.write import PartitionWriter
from petps.delta.headers import Message
from petps.delta.log import Delivery, Event
from petps.errors import InvalidArgument

__all__ = ["DirectoryLog", "DirectorySubscription"]

SEGMENT_BYTES: Final = 64 << 20  # a few seconds of a busy trainer; the unit of retention
MIN_SEGMENT_BYTES: Final = 4096
# An idle subscription polls the files. The interval doubles from the first to the last. A poll
# costs a few system calls per partition.
FIRST_WAIT_SECONDS: Final = 0.0005
LAST_WAIT_SECONDS: Final = 0.005
LAST_MESSAGE_TRIES: Final = 64  # offsets that last_messages() tries if the last are damaged


class DirectorySubscription:
    """Fair reader of partitions: each may fill an equal share of a poll."""

    def __init__(self, root: Path, positions: Mapping[int, int]) -> None:
        self._readers = {
            partition: PartitionReader(partition_folder(root, partition), partition, offset)
            for partition, offset in positions.items()
        }
        self._paused: set[int] = set()

    def poll(self, *, max_bytes: int, timeout: float) -> list[Event]:
        """See Subscription."""
        deadline = time.monotonic() + timeout
        wait = FIRST_WAIT_SECONDS
        while True:
            events = self._read(max_bytes)
            remaining = deadline - time.monotonic()
            if events or remaining <= 0:
                return events
            time.sleep(min(wait, remaining))
            wait = min(2 * wait, LAST_WAIT_SECONDS)

    def _read(self, max_bytes: int) -> list[Event]:
        active = [p for p in self._readers if p not in self._paused]
        events: list[Event] = []
        for partition in active:
            events += self._readers[partition].read(max(1, max_bytes // len(active)))
        return events

    def seek(self, partition: int, offset: int) -> None:
        """See Subscription."""
        self._readers[partition].seek(offset)

    def positions(self) -> dict[int, int]:
        """See Subscription."""
        return {partition: reader.position for partition, reader in self._readers.items()}

    def pause(self, partition: int) -> None:
        """See Subscription."""
        self._paused.add(partition)

    def resume(self, partition: int) -> None:
        """See Subscription."""
        self._paused.discard(partition)

    def observe(self, positions: Mapping[int, int]) -> None:
        """Do nothing: a directory log has no tools that show positions. See Subscription."""

    def close(self) -> None:
        """Close the files."""
        for reader in self._readers.values():
            reader.close()


class DirectoryLog:
    """A delta log in a folder. Opening it for reading takes no lock; publishing locks a partition.

    ``partitions``: Create the log with this number if it is missing; None opens an existing log.
    ``retention_bytes``: Remove a partition's oldest segments beyond this size; None keeps all.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        partitions: int | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        retention_bytes: int | None = None,
    ) -> None:
        if segment_bytes < MIN_SEGMENT_BYTES:
            raise InvalidArgument(
                f"segment_bytes must be at least {MIN_SEGMENT_BYTES}, got {segment_bytes}: each "
                "message would get a file of its own"
            )
        self._root = Path(path)
        if partitions is not None and not (self._root / "log.json").exists():
            write_log_file(self._root, partitions)
        self._file = read_log_file(self._root)
        if partitions is not None and partitions != self._file.partitions:
            raise InvalidArgument(
                f"{self._root} has {self._file.partitions} partitions, not {partitions}: "
                "the number can never change; use another folder"
            )
        self._segment_bytes = segment_bytes
        self._retention_bytes = retention_bytes
        self._writers: dict[int, PartitionWriter] = {}
        self._ends: dict[int, EndTracker] = {}
        self._mutex = threading.Lock()

    def __enter__(self) -> DirectoryLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """See DeltaLog."""
        return f"directory log {self._root}"

    @property
    def path(self) -> Path:
        """Return the log's folder."""
        return self._root

    @property
    def partitions(self) -> int:
        """See DeltaLog."""
        return self._file.partitions

    def publish(self, partition: int, message: Message) -> None:
        """See DeltaLog. Raises LogLocked if another process writes the partition."""
        with self._mutex:
            self._writer(partition).append(message)

    def flush(self) -> None:
        """See DeltaLog. Calls fdatasync once for each partition written since the last flush."""
        with self._mutex:
            for writer in self._writers.values():
                writer.flush()

    def _writer(self, partition: int) -> PartitionWriter:
        self._check_partition(partition)
        writer = self._writers.get(partition)
        if writer is None:
            writer = PartitionWriter(
                partition_folder(self._root, partition),
                partition,
                segment_bytes=self._segment_bytes,
                retention_bytes=self._retention_bytes,
            )
            self._writers[partition] = writer
        return writer

    def _check_partition(self, partition: int) -> None:
        if not 0 <= partition < self._file.partitions:
            raise InvalidArgument(
                f"{self.name} has partitions 0 to {self._file.partitions - 1}, not {partition}"
            )

    def subscribe(self, positions: Mapping[int, int]) -> DirectorySubscription:
        """See DeltaLog."""
        for partition in positions:
            self._check_partition(partition)
        return DirectorySubscription(self._root, positions)

    def start_offsets(self, partitions: Sequence[int]) -> dict[int, int]:
        """See DeltaLog."""
        starts = {}
        for partition in partitions:
            segments = list_segments(partition_folder(self._root, partition))
            starts[partition] = segments[0] if segments else 0
        return starts

    def end_offsets(self, partitions: Sequence[int]) -> dict[int, int]:
        """See DeltaLog."""
        with self._mutex:
            for partition in partitions:
                if partition not in self._ends:
                    self._check_partition(partition)
                    self._ends[partition] = EndTracker(partition_folder(self._root, partition))
            return {partition: self._ends[partition].end() for partition in partitions}

    def last_messages(self, partitions: Sequence[int]) -> dict[int, Message]:
        """See DeltaLog."""
        messages = {partition: self._last_message(partition) for partition in partitions}
        return {
            partition: message for partition, message in messages.items() if message is not None
        }

    def _last_message(self, partition: int) -> Message | None:
        end = self.end_offsets([partition])[partition]
        start = self.start_offsets([partition])[partition]
        reader = PartitionReader(partition_folder(self._root, partition), partition, end)
        try:
            for offset in range(end - 1, max(start, end - LAST_MESSAGE_TRIES) - 1, -1):
                reader.seek(offset)
                events = reader.read(1)
                if events and isinstance(events[0], Delivery) and events[0].offset == offset:
                    return events[0].message
        finally:
            reader.close()
        return None

    def trim(self, partition: int, before: int) -> None:
        """Remove the segments whose offsets are all below ``before``, but not the newest one."""
        with self._mutex:
            self._writer(partition).trim(before)

    def close(self) -> None:
        """See DeltaLog."""
        with self._mutex:
            writers, self._writers = self._writers, {}
            try:
                for writer in writers.values():
                    if not writer.broken:  # otherwise an earlier call has raised its error
                        writer.flush()
            finally:
                for writer in writers.values():
                    writer.close()
