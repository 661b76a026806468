"""Read chunks from a store's files, and verify their checksums. STORE.md.

Owns:        Reader: rows, keys and filters of chunks.
Never does:  know versions; write.
Called by:   store.py, policies, shares.py.
Invariants:  rows that do not match their checksum are never returned.
Threads:     any.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, groupby, pairwise
from typing import Final

import numpy as np
import xxhash

from petps.checkpoint.chunk import Bloom, Keys, Rows, Table, decode, view
from petps.checkpoint.files import Files
from petps.checkpoint.state import Chunk
from petps.errors import DataLoss, NotFound, PetpsError

__all__ = ["Reader"]

# Two chunks of a bundle are read in one piece if the gap between them is at most this.
GAP_BYTES: Final = 64 << 10
READ_THREADS: Final = 4
# Reading fewer bytes takes less time than starting threads.
PARALLEL_BYTES: Final = 64 << 20


class Reader:
    """Reader of the chunks of one store."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._blooms: dict[tuple[str, int], Bloom] = {}
        self.read_bytes = 0
        """Bytes read in read_seconds. policy.TwoD estimates the time of a restore from both."""
        self.read_seconds = 0.0
        """Time during which at least one read(), also one that failed, was in flight."""
        self._mutex = threading.Lock()  # guards the two counters above and the two fields below
        self._in_flight = 0
        self._counted_until = 0.0  # read_seconds has the time up to here

    def read(self, chunks: Sequence[Chunk], tables: Mapping[str, Table]) -> list[Rows]:
        """Return the rows of chunks, stored as ``tables``. Raise DataLoss with file and offset."""
        order = sorted(range(len(chunks)), key=lambda n: (chunks[n].file, chunks[n].offset))
        runs = list(_runs(chunks, order))
        lengths = (chunks[run[-1]].stop_offset - chunks[run[0]].offset for run in runs)
        bounds = [0, *accumulate(lengths)]
        # Allocate once for all runs: a large allocation gets large pages, and so fewer page faults.
        memory = _allocate(bounds[-1])
        reads = zip(runs, pairwise(bounds), strict=True)
        # Read a file by one call, because a filesystem may read its pieces in parallel. Read a
        # large file by several calls.
        file_reads = groupby(
            reads, key=lambda read: (chunks[read[0][0]].file, read[1][0] // PARALLEL_BYTES)
        )
        out: list[Rows | None] = [None] * len(chunks)

        def read_file(path: str, reads: list[tuple[list[int], memoryview]]) -> None:
            self._fill(path, [(chunks[run[0]].offset, buffer) for run, buffer in reads])
            for run, buffer in reads:
                run_offset = chunks[run[0]].offset
                for number in run:
                    chunk = chunks[number]
                    body = buffer[chunk.offset - run_offset : chunk.stop_offset - run_offset]
                    out[number] = self._rows(tables[chunk.table], chunk, body)

        tasks = [
            (path, [(run, memory[start:stop]) for run, (start, stop) in group])
            for (path, _), group in file_reads
        ]
        with self._count_read(chunks):
            if len(tasks) > 1 and bounds[-1] >= PARALLEL_BYTES:
                with ThreadPoolExecutor(min(READ_THREADS, len(tasks))) as pool:
                    for _ in pool.map(lambda task: read_file(*task), tasks):
                        pass
            else:
                for task in tasks:
                    read_file(*task)
        return [rows for rows in out if rows is not None]

    @contextlib.contextmanager
    def _count_read(self, chunks: Sequence[Chunk]) -> Iterator[None]:
        """Count the time of the block, and the bytes of the chunks unless it raises."""
        self._count(reads=1)
        read_bytes = 0
        try:
            yield
            read_bytes = sum(chunk.length for chunk in chunks)
        finally:
            self._count(reads=-1, read_bytes=read_bytes)

    def _count(self, reads: int, read_bytes: int = 0) -> None:
        """Count that a read begins (1) or ends (-1) now and has read ``read_bytes``."""
        with self._mutex:
            now = time.monotonic()
            if self._in_flight:
                self.read_seconds += now - self._counted_until
            self._counted_until = now
            self._in_flight += reads
            self.read_bytes += read_bytes

    def read_ahead(
        self, groups: Sequence[Sequence[Chunk]], tables: Mapping[str, Table]
    ) -> Generator[list[Rows]]:
        """Yield read() of each group in order, and read READ_THREADS groups ahead in parallel.

        Ending the iterator early waits for no read: see below.
        """
        pool = ThreadPoolExecutor(READ_THREADS)
        ahead: deque[Future[list[Rows]]] = deque()
        try:
            for chunks in groups:
                ahead.append(pool.submit(self.read, chunks, tables))
                if len(ahead) == READ_THREADS:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            # Not a `with`, which joins the threads. The garbage collector ends an abandoned
            # iterator in any thread and inside any code, such as the start of a thread, which
            # holds a lock that a join takes.
            pool.shutdown(wait=False, cancel_futures=True)

    def _fill(self, path: str, pieces: Sequence[tuple[int, memoryview]]) -> None:
        try:
            self._files.read_into(path, pieces)
        except NotFound as error:
            raise DataLoss(f"{error}: restore the file from a copy of the store") from error

    def bytes(self, path: str, offset: int, length: int) -> memoryview:
        """Return a part of a file. Raise DataLoss."""
        body = _allocate(length)
        self._fill(path, [(offset, body)])
        return body

    def _rows(self, table: Table, chunk: Chunk, body: memoryview) -> Rows:
        where = f"{self._files.name}/{chunk.file} at {chunk.offset}"
        if xxhash.xxh3_64_hexdigest(body) != chunk.checksum:
            raise DataLoss(
                f"{where} does not fit its checksum: restore the file from a copy of the store"
            )
        if not chunk.layout:
            return decode(table, body, where)
        try:
            return view(table, body, chunk.rows, chunk.layout, chunk.min_key)
        except (ValueError, OverflowError) as error:
            raise DataLoss(f"{where} does not fit its layout: {error}") from error

    def read_keys(self, chunk: Chunk) -> Keys:
        """Return only a chunk's keys, uint64[rows]. Do not verify the checksum."""
        if not chunk.has_keys:
            return np.arange(chunk.rows, dtype=np.uint64) + np.uint64(chunk.min_key)
        body = self.bytes(chunk.file, chunk.offset + chunk.layout[0], 8 * chunk.rows)
        return np.frombuffer(body, "<u8")

    def is_whole(self, chunk: Chunk) -> bool:
        """Return whether the chunk exists and matches its checksum."""
        try:
            body = self.bytes(chunk.file, chunk.offset, chunk.length)
        except PetpsError:
            return False
        return xxhash.xxh3_64_hexdigest(body) == chunk.checksum

    def read_bloom(self, chunk: Chunk) -> Bloom:
        """Return the filter of a chunk, which must have keys, and cache the filter."""
        place = (chunk.file, chunk.offset)
        if place not in self._blooms:
            body = self.bytes(chunk.file, chunk.bloom_offset, chunk.bloom_length)
            self._blooms[place] = Bloom.read(body)
        return self._blooms[place]

    def forget_all_but(self, files: Iterable[str]) -> None:
        """Drop the cached filters of all other files."""
        paths = set(files)
        self._blooms = {place: bloom for place, bloom in self._blooms.items() if place[0] in paths}


def _allocate(length: int) -> memoryview:
    try:
        return np.empty(length, np.uint8).data
    except (MemoryError, ValueError) as error:
        raise DataLoss(f"chunks of {length} bytes: the lineage's file is damaged") from error


def _runs(chunks: Sequence[Chunk], numbers: Iterable[int]) -> Iterator[list[int]]:
    """Yield runs of chunk numbers that one read covers.

    ``numbers`` are in the order of file and offset. A run ends at a new file, at a gap above
    GAP_BYTES, and at PARALLEL_BYTES.
    """
    run: list[int] = []
    for number in numbers:
        chunk = chunks[number]
        if run and (
            chunks[run[-1]].file != chunk.file
            or chunk.offset - chunks[run[-1]].stop_offset > GAP_BYTES
            or chunk.stop_offset - chunks[run[0]].offset > PARALLEL_BYTES
        ):
            yield run
            run = []
        run.append(number)
    if run:
        yield run
