"""The stages before training: from the loader's batch to its rows on the device (PIPELINE.md).

Owns:        LookupStages; BatchWork, what the stages know of a batch.
Never does:  change rows.
Called by:   pipeline.py.
Invariants:  the keys of at most ROUTED_AHEAD batches beyond the current one are exchanged, the
             same number on all ranks.
Threads:     in modes that run ahead, each stage has its own; otherwise the caller's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from petps.train.batch import Batch
from petps.train.buffer import Buffer, SharedRows, find_shared_rows
from petps.train.options import Resources
from petps.train.routing import KeyRequests, Layout, OwnedKeys, exchange, route_keys
from petps.train.stages import Chain
from petps.train.streams import Handoff
from petps.train.write_back import WriteBack

__all__ = ["BatchWork", "LookupStages"]

# How many batches beyond the current one have their keys exchanged. The number is the same on all
# ranks, so that all can stop after the same step (drain). It cannot be larger: retrieving the
# third batch waits for the write-back of the first, which drain() does not train.
ROUTED_AHEAD: Final = 2


@dataclass(eq=False, slots=True)
class BatchWork:
    """A batch on its way through the stages. Each stage fills in what it finds.

    is_past_end: whether the loader has no batch of this number. requests, owned: see routing.py.
    positions: those of ``owned``, on the device. inputs: for each micro-batch and feature, inverse
    and offsets on the device. buffer: the rows. shared: the rows that the batch before also has.
    handoffs: the results of stages that the training of this batch uses.
    """

    number: int
    parts: list[Batch]
    reader: bytes
    is_past_end: bool
    requests: KeyRequests = field(init=False)
    owned: OwnedKeys = field(init=False)
    positions: list[list[Any]] = field(init=False)
    inputs: list[dict[str, tuple[Any, Any]]] = field(init=False)
    buffer: Buffer = field(init=False)
    shared: SharedRows | None = None
    handoffs: list[Handoff | None] = field(default_factory=list)

    def name_row(self, layout: Layout, micro: int, block: int, row: int) -> str:
        """Return the table and key of a row of a micro-batch's block, for errors."""
        for feature, (inverse, _) in self.inputs[micro].items():
            table = layout.table_of(feature)
            if layout.block_of[table] == block:
                places = (inverse == row).nonzero()
                if len(places):
                    key = self.parts[micro].keys[feature].keys[int(places[0])]
                    return f"table {layout.names[table]}, key {key}"
        return f"row {row}"


class LookupStages:
    """The batches of ``loader`` in order, each with its rows.

    number: the number of the last batch that next() returned.
    """

    def __init__(
        self, loader: Iterator[Batch], resources: Resources, write_back: WriteBack
    ) -> None:
        options = resources.options
        self._resources = resources
        self._loader = loader
        self._write_back = write_back
        self._timeline = resources.timeline
        self._runs_ahead = options.runs_ahead
        self.number = options.first_step - 1
        self._last = None if options.steps is None else self.number + options.steps
        self._reading = options.first_step
        self._reader = b""  # the loader's state after its last batch
        self._all_ended = threading.Event()
        self._stopped = False
        self._older: Buffer | None = None
        self._routes_allowed = threading.Semaphore(0)
        self._chain: Chain | None = None
        self._stages: list[tuple[str, Callable[[BatchWork], BatchWork | None]]] = [
            ("to-device", self._to_device),
            ("route", self._route),
            ("exchange", self._exchange),
            ("retrieve", self._retrieve),
        ]

    def next(self) -> BatchWork | None:
        """Return the next batch, or None at the end of all loaders. Raise what a stage raised."""
        work: BatchWork | None
        if self._runs_ahead:
            if self._chain is None:
                self._routes_allowed.release(ROUTED_AHEAD)
                self._chain = Chain(self._prefetch, self._stages, self._resources.thread_name)
            self._routes_allowed.release()
            work = self._chain.next()
        else:
            work = self._prefetch()
            for _, stage in self._stages:
                work = stage(work) if work is not None else None
        if work is not None:
            self.number = work.number
        return work

    def drain(self) -> None:
        """Drop the batches whose keys peers may have begun to exchange, after this rank did too.

        Raises what a stage raised.
        """
        if self._chain is not None:
            limit = self.number + ROUTED_AHEAD
            self._last = limit if self._last is None else min(self._last, limit)
            self._write_back.end_after(self.number)
            self._routes_allowed.release()
            self._chain.drain()

    def stop(self) -> None:
        """Stop the stages as soon as they notice, and drop their batches. Does not wait."""
        self._stopped = True
        if self._chain is not None:
            self._chain.give_up()
            self._routes_allowed.release()

    def _prefetch(self) -> BatchWork | None:
        number, options = self._reading, self._resources.options
        if (self._last is not None and number > self._last) or self._all_ended.is_set():
            return None
        self._reading += 1
        with self._timeline.span("prefetch", "prefetch", number):
            batch = next(self._loader, None)
            if batch is None:  # other ranks may have more: continue with empty batches
                return BatchWork(number, [Batch({})] * options.micro_batches, self._reader, True)
            self._reader = batch.reader
            if self._resources.arrange is not None:
                with self._timeline.span("prefetch", "arrange", number):
                    batch = self._resources.arrange(batch)
            pin = self._resources.lanes.to_device.pin
            parts = [_map_dense(part, pin) for part in batch.parts(options.micro_batches)]
            return BatchWork(number, parts, batch.reader, False)

    def _to_device(self, work: BatchWork) -> BatchWork:
        lane = self._resources.lanes.to_device
        with self._timeline.span("to-device", "to-device", work.number), lane.use():
            work.parts = [_map_dense(part, lane.copy_in) for part in work.parts]
            dense = [values for part in work.parts for values in part.dense.values()]
            work.handoffs.append(lane.hand("samples", dense))
        return work

    def _route(self, work: BatchWork) -> BatchWork | None:
        if self._runs_ahead:
            self._routes_allowed.acquire()
            if self._stopped or (self._last is not None and work.number > self._last):
                return None
        with self._timeline.span("route", "route", work.number):
            work.requests = route_keys(work.parts, self._resources.tables, self._resources.layout)
        return work

    def _exchange(self, work: BatchWork) -> BatchWork | None:
        lane = self._resources.lanes.exchange
        with self._timeline.span("exchange", "exchange", work.number), lane.use():
            samples = sum(part.samples for part in work.parts)
            layout, link = self._resources.layout, self._resources.links.keys
            work.owned = exchange(work.requests, samples, work.is_past_end, layout, link)
            if work.owned.are_all_past_end:
                self._all_ended.set()
                return None
            work.positions = [
                [lane.copy_in(positions) for positions in blocks] for blocks in work.owned.positions
            ]
            work.inputs = [
                {
                    feature: (lane.copy_in(inverse), lane.copy_in(part.keys[feature].offsets))
                    for feature, inverse in inverses.items()
                }
                for part, inverses in zip(work.parts, work.requests.inverse, strict=True)
            ]
            tensors = [tensor for part in work.inputs for pair in part.values() for tensor in pair]
            tensors += [positions for blocks in work.positions for positions in blocks]
            work.handoffs.append(lane.hand("keys", tensors))
        return work

    def _retrieve(self, work: BatchWork) -> BatchWork:
        # A key that is in this batch and the one before the last, but not in the last, is in no
        # intersection: its row must be read from the pool after that batch's write-back. If the
        # last batch removes rows, all rows and counts are read after that (REMOVAL.md).
        is_after_removal = self._resources.tables.removes_at(work.number - 1)
        behind = 2 if self._runs_ahead and not is_after_removal else 1
        if not self._write_back.wait(work.number - behind):
            return work  # drain() drops it
        if is_after_removal:
            self._older = None  # it has rows that are removed, and nothing that the pool lacks
        layout, lane = self._resources.layout, self._resources.lanes.retrieve
        with self._timeline.span("retrieve", "retrieve", work.number), lane.use():
            work.buffer = Buffer(work.number, work.owned, self._resources.tables, layout, lane)
            tensors = work.buffer.tensors
            if self._runs_ahead and self._older is not None:
                work.shared = find_shared_rows(self._older, work.buffer, layout, lane)
                tensors += [*work.shared.older, *work.shared.newer]
            self._older = work.buffer
            work.handoffs.append(lane.hand("retrieved", tensors))
        return work


def _map_dense(batch: Batch, convert: Callable[[Any], Any]) -> Batch:
    dense = {name: convert(values) for name, values in batch.dense.items()}
    return Batch(batch.keys, dense, batch.reader)
