"""A rank of the training figures: python -m bench.train.rank RANK 'SETTINGS as JSON'.

Tables, lookups and transfers over gloo are real; a SlowLink slows the transfers down. The dense
computation is a wait. The rank prints a line of JSON for each run: means over the steps after the
warm-up. ``runs`` has the settings in which each run differs from the others.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import json
import os
import resource
import statistics
import sys
import time
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import distributed

from bench.train.simulate import AHEAD
from bench.train.slow_link import LinkSchedule, SlowLink
from bench.train.steps import link_of, slowest
from bench.train.unfreshened import pipeline_of
from bench.train.versions import Stopwatch, writing_versions
from examples.demo.trace import load_trace
from petps.train import (
    Batch,
    ByKeys,
    Links,
    PipelineOptions,
    Ragged,
    RowwiseAdagrad,
    ShardedTables,
    TableSpec,
)
from petps.train.agree import gather_bytes
from petps.train.clustering import dedup_ratio
from petps.train.link import GroupLink
from petps.train.ranks import Written
from petps.train.timeline import Timeline
from petps.train.tracker import jagged_unique

FILL_ROWS: Final = 1 << 16
RATIOS: Final = 2  # the number of batches whose distinct keys are counted
FEATURE: Final = "item"
# The fields besides the item in a sequence, and how many values each has.
FIELDS: Final = {"author": 20_011, "tag": 1_009, "hour": 24}


class Waiting(torch.nn.Module):  # type: ignore[misc]
    """A model that takes as long as dense layers would; a row's gradient is the row itself."""

    def __init__(self, seconds: float, samples: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64))
        self._seconds_per_sample = seconds / samples

    def forward(self, lookups: Any, batch: Batch) -> Any:
        """Wait, and use the rows that the features share; the value of the loss does not matter."""
        time.sleep(self._seconds_per_sample * batch.samples)
        return _Shrinking.apply(next(iter(lookups.values())).rows, self.weight)


class _Shrinking(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, rows: Any, weight: Any) -> Any:
        ctx.save_for_backward(rows, weight)
        return weight.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        rows, weight = ctx.saved_tensors
        return rows.detach(), gradient * torch.ones_like(weight)


class Descent:
    """An optimizer of the one dense parameter, as importing torch.optim outlasts most runs."""

    def __init__(self, weight: Any) -> None:
        self._weight = weight

    def step(self) -> None:
        """Take a step down the gradient."""
        self._weight.data.add_(self._weight.grad, alpha=-1e-3)


def batches(settings: dict[str, Any], rank: int) -> list[Batch]:
    """Return sequences of ids in the order of access; each rank begins at another place.

    The batches are made before the clock starts; at most ``distinct_batches``, which the training
    repeats. With ``sessions`` above 0, each sample belongs
    instead to one of that many sessions, at random, and draws its ids from the ``session_keys``
    ids of its session.
    """
    trace = load_trace()
    samples, length = settings["samples"], settings["length"]
    offsets = np.arange(samples + 1, dtype=np.int64) * length
    at = len(trace.accesses) * rank // settings["world"]
    random = np.random.default_rng((settings["seed"], rank))
    all_batches = []
    count = settings["warm_up"] + settings["steps"] + AHEAD
    for _ in range(min(count, settings.get("distinct_batches", count))):
        if settings["sessions"]:
            places = _of_sessions(random, len(trace.keys), settings).ravel()
        else:
            places = trace.accesses.take(np.arange(at, at + offsets[-1]), mode="wrap")
        items = trace.keys[places]
        fields = {name: items % np.uint64(count) for name, count in FIELDS.items()}
        features = {"item": items, **fields}.items()
        all_batches.append(Batch({name: Ragged(keys, offsets) for name, keys in features}))
        at += samples * length
    return all_batches


def _of_sessions(random: np.random.Generator, ids: int, settings: dict[str, Any]) -> Any:
    """Return int64[samples, length]: positions of ids in the trace."""
    pools = random.integers(0, ids, (settings["sessions"], settings["session_keys"]))
    session = random.integers(0, len(pools), (settings["samples"], 1))
    shape = (settings["samples"], settings["length"])
    return pools[session, random.integers(0, settings["session_keys"], shape)]


@functools.cache
def _held(seed: int, rows: int) -> Any:
    """Return uint64: the trace's ids, and other ids up to about ``rows``."""
    others = np.random.default_rng(seed).integers(1, 1 << 63, rows, np.uint64)
    held = np.union1d(load_trace().keys, others)[:rows]
    return np.union1d(load_trace().keys, held)


def fill(tables: ShardedTables, settings: dict[str, Any]) -> None:
    """Give every key a row, so that no first occurrence of a key is measured."""
    table = tables[FEATURE]
    held = _held(settings["seed"], settings["rows"])
    for name, count in FIELDS.items():
        keys = np.arange(count, dtype=np.uint64)
        keys = keys[tables.owns(keys)]
        tables[name].write_back(0, keys, np.ones((len(keys), tables[name].width), np.float32))
    for keys in np.array_split(held, -(-len(held) // FILL_ROWS)):
        mine = keys[tables.owns(keys)]
        table.write_back(0, mine, np.ones((len(mine), table.width), np.float32))


def _faults() -> int:
    """Return the page faults so far: if they are many, they are what the figures measure."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _distinct(ragged: Ragged) -> int:
    return len(jagged_unique(ragged.keys, np.array([0, len(ragged.keys)])).ids)


def _over_mean(counts: list[int]) -> list[float]:
    return [count * len(counts) / sum(counts) for count in counts]


def train(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Run one rank with these settings; return what it prints."""
    world = settings["world"]
    links = Links.of_processes()
    schedule = LinkSchedule()
    slow = {"latency_s": 0.0, "bytes_per_second": 1e18}
    if settings["slow"]:
        slow = {name: settings[name] for name in slow}
    keys, rows, dense = (
        SlowLink(link, schedule, **slow) for link in (links.keys, links.rows, links.dense)
    )
    links = replace(links, keys=keys, rows=rows, dense=dense)
    model = Waiting(settings["dense_s"], settings["samples"])
    rows_of = {FEATURE: settings["rows"], **FIELDS}
    specs = [
        TableSpec(name, settings["dim"], 2 * count // world + 1000)
        for name, count in rows_of.items()
    ]
    timeline = Timeline()
    loader = batches(settings, rank)
    arrange = ByKeys(settings["micro_batches"]) if settings["clustered"] else None
    began = time.monotonic()
    if arrange is not None:  # before the clock: clustering would use the rank's only processor
        loader = [arrange(batch) for batch in loader]
    arranged = time.monotonic() - began
    with ShardedTables(None, specs, RowwiseAdagrad(0.1), rank=rank, world=world) as tables:
        fill(tables, settings)
        kind, mode = pipeline_of(settings["mode"])
        options = PipelineOptions(
            settings["micro_batches"], mode, arrange=settings["arrange"],
            deterministic=settings["arrange"] is None,
        )  # fmt: skip
        tracking = Stopwatch(tables.tracker.track)
        tables.tracker.track = tracking  # type: ignore[method-assign]
        compacting = Stopwatch(tables.tracker.compact)
        tables.tracker.compact = compacting  # type: ignore[method-assign]
        written: list[Written] = []
        with writing_versions(tables, links, model, settings, written) as hooks, kind(
            model, tables, itertools.cycle(loader), options=options, links=links,
            optimizer=Descent(model.weight), timeline=timeline, hooks=hooks,
        ) as pipeline:  # fmt: skip
            for _ in range(settings["warm_up"]):
                pipeline.step()
            timeline.reset()
            rows.bytes = keys.bytes = 0
            tracking.seconds = compacting.seconds = 0.0
            began, used, faults = time.monotonic(), time.process_time(), _faults()
            steps = list(itertools.islice(pipeline, settings["steps"]))
            seconds, used = time.monotonic() - began, time.process_time() - used
            faults = _faults() - faults
            decider = pipeline._where_pays
            stages, processor = timeline.totals(), timeline.processor_totals()
    count = len(steps)
    parts = list(loader[0].parts(settings["micro_batches"]))
    return {
        "step_s": seconds / count,
        "lookup_stall_s": sum(step.lookup_stall for step in steps) / count,
        "exposed_s": sum(step.exposed for step in steps) / count,
        "crossing_s": sum(step.crossing for step in steps) / count,
        "hooks_s": sum(step.hooks for step in steps) / count,
        "tracking_s": (tracking.seconds + compacting.seconds) / count,
        "versions": sum(version.kind == "checkpoint" for version in written),
        "bytes": rows.bytes / count,
        "key_bytes": keys.bytes / count,
        "stages_s": {name: total / count for name, total in stages.items()},
        "dense_s": settings["dense_s"],
        "process_s": used / count,
        "page_faults": faults / count,
        "processor_s": {name: total / count for name, total in processor.items()},
        "medians": {
            name: statistics.median(getattr(step, name) for step in steps)
            for name in ("seconds", "lookup_stall", "exposed", "crossing")
        },
        "samples": _over_mean([part.samples for part in parts]),
        "rows": _over_mean([sum(map(_distinct, part.keys.values())) for part in parts]),
        "arranged_s": arranged / len(loader),
        "arranges": decider is not None and decider.pays,
        "dedup_ratio": statistics.mean(
            dedup_ratio(batch.keys, settings["micro_batches"]) for batch in loader[:RATIOS]
        ),
    }


def main(rank: int, settings: dict[str, Any]) -> None:
    """Run one rank's runs on one processor.

    Two ranks have one processor each; of four, two share one. If all could use both processors,
    a stage of one rank would delay the step of another.
    """
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]})
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{settings['meeting']}", rank=rank, world_size=settings["world"]
    )
    link: dict[str, Any] = {}  # the settings from the last run that calibrates
    for run in settings["runs"]:
        result = train(rank, settings | run | (link if run.get("calibrated") else {}))
        print(json.dumps(result), flush=True)
        # A pipeline refers to itself, so its batches stay until the collector runs. A run's threads
        # keep what they freed, and each run has new threads.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        bodies = gather_bytes(GroupLink(None), json.dumps(result).encode())
        everyone = [json.loads(body) for body in bodies]
        if run.get("calibrates"):
            link = link_of(slowest(everyone))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
