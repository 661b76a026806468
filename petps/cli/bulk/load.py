"""The load of a base by the workers of a Ray cluster: read pieces, write parts, commit.

Owns:        Input, load_base().
Never does:  read or write rows (pieces.py and petps.checkpoint.bulk do, in the workers).
Called by:   petps load --on ray.
Invariants:  the base and the error are those that one worker would give; a load that fails or is
             interrupted leaves no base, and removes its files.
Threads:     one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from petps.checkpoint.bulk import NewBase, plan_parts, write_part
from petps.checkpoint.ray_tasks import IN_FLIGHT_MAX
from petps.cli.bulk.pieces import Piece, find_error, plan_pieces, read_piece
from petps.cli.bulk.report import Report, TableReport
from petps.errors import DataLoss, InvalidArgument, PetpsError

if TYPE_CHECKING:
    from petps.checkpoint.chunk import Table
    from petps.checkpoint.spills import Spill
    from petps.checkpoint.state import Chunk
    from petps.cli.sources.arrow_files import ParquetFile

__all__ = ["Bar", "Input", "Tasks", "load_base"]

Argument = TypeVar("Argument")
# Takes a text and a number of rows; the block's function takes how many more are done.
Bar = Callable[[str, int], contextlib.AbstractContextManager[Callable[[int], None]]]


class Tasks(Protocol):
    """Runs functions, perhaps on other machines: RayTasks."""

    def run_all(
        self,
        function: Callable[[Argument], Any],
        arguments: Iterable[Argument],
        *,
        in_flight_max: int = ...,
    ) -> Generator[tuple[Argument, Any]]:
        """Yield each argument with the result, or a PetpsError, in any order."""


@dataclass(frozen=True, slots=True)
class Input:
    """A table of the base, and the files of its rows, in order: the last row of a key wins."""

    table: Table
    sources: Sequence[ParquetFile]


def load_base(
    tasks: Tasks,
    base: NewBase,
    inputs: Sequence[Input],
    *,
    workers: int | None = None,
    allow_not_finite: bool = False,
    bar: Bar = lambda text, rows: contextlib.nullcontext(lambda count: None),
) -> Report:
    """Load tables into a new base, and commit it.

    Args:
        tasks: The cluster.
        base: Its folder is one that all workers see, or a URL that fsspec knows.
        inputs: All tables of the base.
        workers: Tasks at a time; None: as many as the cluster has processors.
        allow_not_finite: Accept rows with NaN or infinity.
        bar: Shows the progress.

    Raises:
        FailedPrecondition: Another process has written a base here meanwhile.
        InvalidArgument: A row does not fit; the error is that of `petps load`.
        DataLoss: A file is damaged.
        IoError: The store does not answer.
        Unavailable: A task's workers died too often, or the commit has no answer. Only after the
            latter the base may exist.
    """
    in_flight_max = IN_FLIGHT_MAX if workers is None else workers
    start = time.monotonic()
    try:
        spills = _read(tasks, base, inputs, in_flight_max, allow_not_finite, bar)
        read_seconds = time.monotonic() - start
        chunks = _write(tasks, base, spills, inputs, in_flight_max, bar)
        entry = base.commit(chunks)
    except BaseException:
        base.discard()
        raise
    return Report(
        base.files.name,
        base.model,
        entry.version,
        base.partitions,
        tuple(_report_table(given, chunks[given.table.name]) for given in inputs),
        read_seconds,
        time.monotonic() - start - read_seconds,
        base.left,
    )


@dataclass(frozen=True, slots=True)
class _Origin:
    """A piece, and how many files of its table come before its own."""

    piece: Piece
    sources: Sequence[ParquetFile]
    before: int


def _plan(base: NewBase, inputs: Sequence[Input], allow_not_finite: bool) -> list[_Origin]:
    """Return all pieces, in the order of the tables and of their files."""
    origins: list[_Origin] = []
    for given in inputs:
        if not any(source.rows for source in given.sources):
            raise InvalidArgument(
                f"table {given.table.name} has no row in its {len(given.sources):,} files: servers "
                "that follow such a base remove all their rows; check the names of the files"
            )
        for before, source in enumerate(given.sources):
            pieces = plan_pieces(
                len(origins),
                given.table,
                source,
                base.files,
                base.prefix,
                base.partitions,
                allow_not_finite=allow_not_finite,
            )
            origins += [_Origin(piece, given.sources, before) for piece in pieces]
    return origins


def _read(
    tasks: Tasks,
    base: NewBase,
    inputs: Sequence[Input],
    in_flight_max: int,
    allow_not_finite: bool,
    bar: Bar,
) -> dict[str, list[Spill]]:
    """Let workers read all pieces. Return the spills by table, those of later rows last."""
    origins = _plan(base, inputs, allow_not_finite)
    pieces = [origin.piece for origin in origins]
    spills: dict[int, tuple[Spill, ...]] = {}
    errors: dict[int, PetpsError] = {}
    with (
        bar("reading", sum(piece.rows for piece in pieces)) as advance,
        contextlib.closing(
            tasks.run_all(read_piece, pieces, in_flight_max=in_flight_max)
        ) as results,
    ):
        for piece, result in results:
            error = result if isinstance(result, PetpsError) else result.error
            if error is None:
                if result.spills:
                    base.check_is_shared(result.spills[0])
                spills[piece.number] = result.spills
                advance(piece.rows)
            else:
                errors[piece.number] = error
            # The first error in the order of rows counts, whichever worker was the fastest.
            if errors and all(number in spills for number in range(min(errors))):
                break
    if errors:
        first, error = origins[min(errors)], errors[min(errors)]
        if isinstance(error, DataLoss | InvalidArgument):
            find_error(first.piece.table, first.sources[: first.before + 1], allow_not_finite)
        raise error
    return {
        given.table.name: [
            spill
            for piece in pieces
            if piece.table is given.table
            for spill in spills[piece.number]
        ]
        for given in inputs
    }


def _write(
    tasks: Tasks,
    base: NewBase,
    spills: dict[str, list[Spill]],
    inputs: Sequence[Input],
    in_flight_max: int,
    bar: Bar,
) -> dict[str, list[list[Chunk]]]:
    """Let workers write all parts. Return their chunks by table, in the order of partitions."""
    plans = [
        plan
        for given in inputs
        for plan in plan_parts(
            base.files, base.prefix, given.table, spills[given.table.name], base.partitions
        )
    ]
    chunks: dict[tuple[str, int], list[Chunk]] = {}
    with (
        bar("writing", sum(plan.rows for plan in plans)) as advance,
        contextlib.closing(
            tasks.run_all(write_part, plans, in_flight_max=in_flight_max)
        ) as results,
    ):
        for plan, result in results:
            if isinstance(result, PetpsError):
                raise result
            chunks[plan.table.name, plan.start] = result
            advance(plan.rows)
    return {
        given.table.name: [
            chunks[plan.table.name, plan.start] for plan in plans if plan.table is given.table
        ]
        for given in inputs
    }


def _report_table(given: Input, chunks: Sequence[Sequence[Chunk]]) -> TableReport:
    return TableReport(
        given.table.name,
        len(given.sources),
        sum(source.rows or 0 for source in given.sources),
        sum(chunk.rows for part in chunks for chunk in part),
        sum(chunk.length + chunk.bloom_length for part in chunks for chunk in part),
    )
