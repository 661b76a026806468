"""The catch-ups of one instance: a queue, and the search for bases that end a stop."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from petps.errors import PetpsError, ResourceExhausted
from petps.server.ingest.catch_up import CatchUp, catch_up, count_partitions_at_once
from petps.server.ingest.full import harms
from petps.server.ingest.order import mark_of
from petps.server.ingest.partition import BaseMarker, PartitionState, Refusal
from petps.server.ingest.protocols import (
    BaseReader,
    BaseSource,
    InstanceTable,
    InstanceTables,
    Progress,
)

__all__ = ["CatchUps"]

_log = logging.getLogger("petps.server.ingest")


class CatchUps:
    """Queue of catch-ups, which run one after the other, a step at a time.

    ``tables`` returns the instance's tables by name. ``settle`` waits until everything that was
    read is applied, because a table takes one batch at a time. ``note_dense`` receives the version
    of each base that partitions caught up to, and the location of its dense weights.
    """

    def __init__(
        self,
        instance: InstanceTables,
        bases: BaseSource | None,
        *,
        tables: Callable[[], Mapping[str, InstanceTable]],
        rows_max: int,
        pace: Callable[[int], None],
        settle: Callable[[], None],
        note_dense: Callable[[int, str | None], None],
    ) -> None:
        self._instance = instance
        self._bases = bases
        self._tables = tables
        self._rows_max = rows_max
        self._pace = pace
        self._settle = settle
        self._note_dense = note_dense
        self._queue: deque[CatchUp] = deque()

    @property
    def has_bases(self) -> bool:
        """Return whether there is any place to read bases from."""
        return self._bases is not None

    @property
    def partitions(self) -> list[int]:
        """Return the partitions of running and waiting catch-ups."""
        return [state.partition for current in self._queue for state, _ in current.targets]

    def add_for_marker(
        self,
        state: PartitionState,
        marker: BaseMarker,
        *,
        is_new_gap_if_failed: bool = False,
        offset_if_failed: int | None = None,
    ) -> bool:
        """Queue a catch-up to the base of a marker. Return False if there is no such base."""
        header = marker.header
        after = Progress(
            state.partition,
            header.run,
            header.seq,
            marker.next_offset,
            header.version,
            publisher=mark_of(header.publisher),
        )
        try:
            if self._bases is None:
                raise PetpsError(
                    f"the run begins with the base {marker.location}, and no checkpoint folder is "
                    "configured to read it from"
                )
            base = self._bases.open(marker.location)
            if not header.begins_run and not self._is_ours(base):
                raise PetpsError(f"it holds rows of {base.instance}, not of {self._instance.name}")
            if not header.begins_run and harms(state, base, self._tables()):
                raise PetpsError("it has more rows than the tables can hold")
        except PetpsError as error:
            state.explain(f"base {marker.location}: {error}")
            _log.error("[ingest] partition %d: %s", state.partition, state.reason)
            return False
        self._add(
            base,
            [(state, after)],
            marker,
            is_new_gap_if_failed=is_new_gap_if_failed,
            offset_if_failed=offset_if_failed,
        )
        return True

    def search(self, stopped: Sequence[PartitionState]) -> None:
        """Queue a catch-up of each stopped partition to the newest base that ends its stop.

        Partitions with the same base share a catch-up.
        """
        if not stopped or self._bases is None:
            return
        try:
            candidates = [
                base for base in self._bases.of_model(self._instance.model) if self._is_ours(base)
            ]
        except PetpsError as error:
            for state in stopped:
                state.explain_search(f"the bases cannot be listed: {error}")
            return
        targets_by_base: dict[str, tuple[BaseReader, list[tuple[PartitionState, Progress]]]] = {}
        for state in stopped:
            state.explain_search("")
            too_old = 0
            for base in candidates:
                run, seq = base.position(state.partition)
                if base.name in state.tried or harms(state, base, self._tables()):
                    continue
                if not state.is_repaired_by(run, seq):
                    too_old += 1
                    continue
                publisher = state.publisher if run == state.run else 0
                after = Progress(
                    state.partition,
                    run,
                    seq,
                    state.resume_offset,
                    base.version,
                    publisher=publisher,
                )
                targets_by_base.setdefault(base.name, (base, []))[1].append((state, after))
                break
            else:
                state.tried.clear()  # no base is left: the next search tries all again
                if too_old and too_old == len(candidates):
                    newest = candidates[0]
                    state.explain_search(
                        f"no base is newer than the stop (the newest is {newest.name}, version "
                        f"{newest.version})"
                    )
        for base, targets in targets_by_base.values():
            at_once = count_partitions_at_once(base)
            for start in range(0, len(targets), at_once):
                self._add(base, targets[start : start + at_once], None)

    def advance(self) -> dict[int, int | None]:
        """Run a step of the first catch-up; see Follower.advance_catch_up.

        The queue must not be empty, and no apply may be in flight.
        """
        current = self._queue[0]
        offsets: dict[int, int | None] = {}
        try:
            next(current.steps)
            return {}
        except StopIteration as end:
            refused: dict[int, Refusal] = end.value
            for state, after in current.targets:
                if state.partition in refused:
                    self._stop_full(current, state, refused[state.partition])
                    offsets[state.partition] = current.offset_if_failed
                    continue
                self._finish(current, state, after)
                offsets[state.partition] = state.offset
        except ResourceExhausted as error:
            for state, _ in current.targets:
                self._stop_full(current, state, Refusal(str(error), "", 0))
                offsets[state.partition] = current.offset_if_failed
        except PetpsError as error:
            for state, _ in current.targets:
                state.tried.add(current.base.name)
                reason = f"catch-up to {current.base.name}: {error}"
                self.fail(state, reason, is_new_gap=current.is_new_gap_if_failed)
                offsets[state.partition] = current.offset_if_failed
        self._queue.popleft()
        return offsets

    def close(self) -> None:
        """End all catch-ups unfinished: an open scan of one would keep the pool from closing."""
        for current in self._queue:
            current.steps.close()
        self._queue.clear()

    def fail(self, state: PartitionState, reason: str, *, is_new_gap: bool) -> None:
        """Stop a partition whose catch-up failed. See PartitionState.fail_catch_up."""
        state.fail_catch_up(self._instance.progress(state.partition), reason, is_new_gap=is_new_gap)
        _log.error("[ingest] partition %d: %s", state.partition, reason)

    def _add(
        self,
        base: BaseReader,
        targets: list[tuple[PartitionState, Progress]],
        marker: BaseMarker | None,
        *,
        is_new_gap_if_failed: bool = False,
        offset_if_failed: int | None = None,
    ) -> None:
        """Queue a catch-up of partitions to the base; targets: as in CatchUp."""
        self._settle()
        for state, _ in targets:
            state.begin_catch_up()
        steps = catch_up(
            self._instance,
            base,
            [(state.recorded, after) for state, after in targets],
            rows_max=self._rows_max,
            pace=self._pace,
        )
        self._queue.append(
            CatchUp(targets, base, marker, is_new_gap_if_failed, offset_if_failed, steps)
        )

    def _finish(self, current: CatchUp, state: PartitionState, after: Progress) -> None:
        marker = current.marker
        # Inside a run, rows of the current version may precede the marker.
        state.end_catch_up(after, begins_run=marker is not None and marker.header.begins_run)
        self._note_dense(current.base.version, current.base.dense)
        _log.info(
            "[ingest] partition %d caught up to %s (run %d, seq %d)",
            state.partition,
            current.base.name,
            after.run,
            after.seq,
        )

    def _stop_full(self, current: CatchUp, state: PartitionState, refusal: Refusal) -> None:
        """Mark a partition as full: the tables have no room for the base. Ingest retries."""
        reason = f"catch-up to {current.base.name}: {refusal.reason}"
        self.fail(state, reason, is_new_gap=current.is_new_gap_if_failed)
        state.wait_for_room(replace(refusal, reason=reason))

    def _is_ours(self, base: BaseReader) -> bool:
        return base.instance in (self._instance.name, self._instance.model)
