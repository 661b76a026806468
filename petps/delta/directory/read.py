"""Reader of one partition of a directory log while other processes write it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from petps.delta.directory.frame import (
    FRAME_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    SEGMENT_HEADER_BYTES,
    State,
    check_segment_header,
    find_frame,
    parse_frame_header,
    unpack_message,
    walk,
)
from petps.delta.directory.segments import list_segments, segment_path
from petps.delta.log import Damage, Delivery, Event, Lost
from petps.errors import DataLoss

__all__ = ["EndTracker", "PartitionReader", "find_end"]

# Bytes that each read requests at least, so that any frame fits.
READ_BYTES: Final = MAX_PAYLOAD_BYTES + 4096
IDLE_READS_PER_LISTING: Final = 64  # these take a third of a second in an idle subscription


class PartitionReader:
    """Reader that follows one partition. It reads a torn tail again until the frame is whole.

    Bytes count as damage only if whole frames or a later segment follow them. A Damage event then
    names the missing offsets.
    """

    def __init__(self, folder: Path, partition: int, offset: int) -> None:
        self._folder = folder
        self._partition = partition
        self._next = offset
        self._descriptor = -1
        self._first = -1  # first offset of the open segment
        self._at = 0  # byte position in the open segment
        self._is_lost = False
        self._idle = 0  # number of consecutive reads without an event

    @property
    def position(self) -> int:
        """Return the offset of the next event."""
        return self._next

    def seek(self, offset: int) -> None:
        """Continue reading at ``offset``."""
        self.close()
        self._next = offset
        self._is_lost = False

    def close(self) -> None:
        """Close the open segment."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def read(self, max_bytes: int) -> list[Event]:
        """Return available events of about ``max_bytes``; empty if there is nothing new."""
        if self._is_lost:
            return []
        if self._descriptor < 0:
            event = self._find_position()
            if event is not None:
                self._is_lost = isinstance(event, Lost)
                return [event]
            if self._descriptor < 0:
                return []
        events = self._read_segment(max_bytes) or self._read_following(max_bytes)
        self._idle = 0 if events else self._idle + 1
        return events

    def _open(self, first: int) -> bool:
        path = segment_path(self._folder, first)
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # retention has removed it
            return False
        header = os.pread(descriptor, SEGMENT_HEADER_BYTES, 0)
        if len(header) < SEGMENT_HEADER_BYTES:  # the writer is creating it
            os.close(descriptor)
            return False
        try:
            check_segment_header(str(path), header, self._partition, first)
        except BaseException:
            os.close(descriptor)
            raise
        self.close()
        self._descriptor, self._first, self._at = descriptor, first, SEGMENT_HEADER_BYTES
        return True

    def _find_position(self) -> Event | None:
        """Open the segment that holds the next offset, and go to that offset.

        Return None, or the event that reports why the offset cannot be read (Lost or Damage).
        """
        segments = list_segments(self._folder)
        if not segments:
            return Lost(self._partition, self._next, 0, 0) if self._next else None
        if self._next < segments[0]:
            return self._lost_event(segments[0])
        first = max(start for start in segments if start <= self._next)
        if not self._open(first):
            return None
        return self._skip_to(self._next, last=first == segments[-1])

    def _lost_event(self, start: int) -> Lost:
        return Lost(self._partition, self._next, start, EndTracker(self._folder).end())

    def _skip_to(self, offset: int, *, last: bool) -> Event | None:
        size = os.fstat(self._descriptor).st_size
        expected = self._first
        while expected < offset:
            header = os.pread(self._descriptor, FRAME_HEADER_BYTES, self._at)
            frame = (
                parse_frame_header(header, base=self._at)
                if len(header) == FRAME_HEADER_BYTES
                else None
            )
            if frame is not None and frame.offset == expected and frame.end <= size:
                self._at = frame.end
                expected += 1
                continue
            following = self._resync(expected)
            if following is not None:
                expected = following
                continue
            if last:
                self.close()
                return self._lost_event(list_segments(self._folder)[0])
            expected = offset  # the damage extends past the offset: the next read reports it
        if expected > offset:
            event = Damage(self._partition, offset, expected, "frames before it are damaged")
            self._next = expected
            return event
        return None

    def _resync(self, above: int) -> int | None:
        """Go to the next whole frame after damage. Return its offset, or None if there is none."""
        size = os.fstat(self._descriptor).st_size
        data = memoryview(os.pread(self._descriptor, max(0, size - self._at), self._at))
        frame = find_frame(data, 0, above)
        if frame is None:
            return None
        self._at += frame.start
        return frame.offset

    def _read_segment(self, max_bytes: int) -> list[Event]:
        if os.fstat(self._descriptor).st_size <= self._at:
            return []
        data = memoryview(os.pread(self._descriptor, max(max_bytes, READ_BYTES), self._at))
        result = walk(data, 0, self._next)
        events: list[Event] = []
        taken_bytes = 0
        for frame in result.frames:
            if taken_bytes >= max_bytes:
                return events
            payload = data[frame.payload : frame.payload + frame.length]
            try:
                message = unpack_message(payload)
            except DataLoss as error:
                events.append(Damage(self._partition, self._next, self._next + 1, str(error)))
            else:
                events.append(Delivery(self._partition, self._next, self._next + 1, message))
            self._at += frame.end - frame.start
            self._next += 1
            taken_bytes += frame.length
        if not events and result.state is State.BAD:
            return self._damage()
        return events

    def _damage(self) -> list[Event]:
        """Report damage at the current position if whole frames follow it."""
        start = self._next
        following = self._resync(start)
        if following is None:
            return []
        self._next = following
        return [Damage(self._partition, start, following, "frames do not fit their checksums")]

    def _read_following(self, max_bytes: int) -> list[Event]:
        """Continue in the segment that begins with the next offset; Damage if it begins later."""
        if self._next > self._first and self._open(self._next):
            return self._read_segment(max_bytes)
        # A later segment without the next one exists only after damage or retention, so list the
        # segments rarely.
        if self._idle % IDLE_READS_PER_LISTING:
            return []
        segments = list_segments(self._folder)
        if not segments or segments[-1] <= self._next:
            return []
        # A later segment exists, so this one is complete. Its missing offsets were written since
        # the last read, or are lost.
        events = self._read_segment(max_bytes)
        if events:
            return events
        start = self._next
        if segments[0] > start:
            self._is_lost = True
            return [self._lost_event(segments[0])]
        following = min(first for first in segments if first > start)
        self.seek(following)
        return [Damage(self._partition, start, following, "the end of a segment file is missing")]


class EndTracker:
    """The end offset of a partition, from frame headers. Each call reads only new headers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._first = -1
        self._at = 0
        self._end = 0

    def end(self) -> int:
        """Return the offset that the next message will take."""
        segments = list_segments(self._folder)
        if not segments:
            return 0
        if segments[-1] != self._first:
            self._first = self._end = segments[-1]
            self._at = SEGMENT_HEADER_BYTES
        try:
            descriptor = os.open(segment_path(self._folder, self._first), os.O_RDONLY)
        except FileNotFoundError:
            return self._end
        try:
            self._walk_headers(descriptor)
        finally:
            os.close(descriptor)
        return self._end

    def _walk_headers(self, descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        if size < self._at:  # a writer cut a torn tail that looked whole
            self._at, self._end = SEGMENT_HEADER_BYTES, self._first
        while size - self._at >= FRAME_HEADER_BYTES:
            header = os.pread(descriptor, FRAME_HEADER_BYTES, self._at)
            frame = parse_frame_header(header, base=self._at)
            if frame is None or frame.offset < self._end:
                data = memoryview(os.pread(descriptor, size - self._at, self._at))
                next_frame = find_frame(data, 0, self._end)
                if next_frame is None:
                    return
                self._at += next_frame.end
                self._end = next_frame.offset + 1
                continue
            if frame.end > size:
                return
            self._at, self._end = frame.end, frame.offset + 1


def find_end(descriptor: int, first_offset: int) -> tuple[int, int]:
    """Return (byte position, log offset) after a segment's last whole frame, even past damage."""
    data = memoryview(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
    at, expected = min(SEGMENT_HEADER_BYTES, len(data)), first_offset
    while True:
        frames = walk(data, at, expected).frames
        if frames:
            at, expected = frames[-1].end, frames[-1].offset + 1
        following = find_frame(data, at, expected)
        if following is None:
            return at, expected
        at, expected = following.start, following.offset
