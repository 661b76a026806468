"""train.clustering.<keys>.<N>: what clustering by keys saves on the link, as micro-batches shrink.

As in NestPipe's Figure 9, the batch stays the same and N grows, in mode nested. A key crosses once
for each micro-batch that has it, so a plain division sends more bytes the smaller the micro-batches
are. Clustering puts samples that share keys into one micro-batch. ``sessions``: samples come in
random order, and each draws its keys from those of one session. ``named``: the keys of the named
figures. Batches are clustered before the clock starts, because a rank has one processor here;
``arranging_ms`` is the time that this takes for a batch.

train.clustering.auto.<link>: steps of sessions with ``arrange="auto"`` over steps without, on links
of two speeds: the pipeline clusters in its prefetch stage, if its trial has shown that it pays.

It needs PyTorch; bench.lines runs it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any, Final

from bench.train.steps import MICRO_BATCHES, Result, run, runs
from petps.train.options import AUTO
from petps.train.where_pays import BLOCK, BLOCKS, FIRST_TRIAL

DISTINCT_BATCHES: Final = 8  # of those that decide themselves; their training repeats them


def figures(sizes: dict[str, Any]) -> Iterator[Result]:
    """Yield a result for each kind of keys and each N."""
    kinds = {
        "sessions": {name: sizes[name] for name in ("sessions", "session_keys")},
        "named": {"sessions": 0},
    }
    counts = {"sessions": sizes["clustered_counts"], "named": sizes["named_counts"]}
    plain = sizes | kinds["named"]
    alone = run(plain, mode="synchronous")
    lookup = alone["lookup_stall_s"]
    chosen = [(kind, count) for kind in kinds for count in counts[kind]]
    wanted = [
        kinds[kind] | {"micro_batches": count, "clustered": clustered}
        for kind, count in chosen
        for clustered in (False, True)
    ]
    results = iter(
        runs(
            plain,
            wanted,
            mode="nested",
            slow=True,
            bytes_per_second=alone["bytes"] / (sizes["link"] * lookup),
            dense_s=sizes["dense"] * lookup,
        )
    )
    for kind, count in chosen:
        cut, clustered = next(results), next(results)
        yield {
            "name": f"train.clustering.{kind}.{count}",
            "value": clustered["bytes"] / 1e6,
            "unit": "MB",
            "ratio_to": "samples as they come",
            "ratio": clustered["bytes"] / cut["bytes"],
            "arranging_ms": 1e3 * clustered["arranged_s"],
            "plain": _summarise(cut),
            "clustered": _summarise(clustered),
        }
    yield from _decided(plain | kinds["sessions"], alone)


def _decided(sizes: dict[str, Any], alone: dict[str, Any]) -> Iterator[Result]:
    """Yield a result for each link. Its time for the named keys is a multiple of the lookup's."""
    lookup = alone["lookup_stall_s"]
    trial = {
        "warm_up": FIRST_TRIAL + BLOCK * BLOCKS + 8,
        "micro_batches": MICRO_BATCHES,
        "distinct_batches": DISTINCT_BATCHES,
    }
    wanted = [
        {"bytes_per_second": alone["bytes"] / (link * lookup), "arrange": arrange}
        for link in sizes["auto_links"]
        for arrange in [None, AUTO] * sizes["rounds"]
    ]
    results = runs(sizes | trial, wanted, mode="nested", slow=True, dense_s=sizes["dense"] * lookup)
    count = 2 * sizes["rounds"]
    for number, link in enumerate(sizes["auto_links"]):
        own = results[number * count : (number + 1) * count]
        pairs = list(zip(own[::2], own[1::2], strict=True))
        ratios = [auto["step_s"] / never["step_s"] for never, auto in pairs]
        yield {
            "name": f"train.clustering.auto.{link}",
            "value": 1e3 * statistics.median(auto["step_s"] for _, auto in pairs),
            "unit": "ms",
            "ratio_to": "samples as they come",
            "ratio": statistics.median(ratios),
            "ratio_low": min(ratios),
            "ratio_high": max(ratios),
            "clustered": [auto["arranges"] for _, auto in pairs],
        }


def _summarise(result: dict[str, Any]) -> dict[str, float]:
    median = result["medians"]
    return {
        "dedup_ratio": result["dedup_ratio"],
        "mb": result["bytes"] / 1e6,
        "step_ms": 1e3 * median["seconds"],
        "crossing_ms": 1e3 * median["crossing"],
        "exposed_ms": 1e3 * median["exposed"],
        "exposed_share": median["exposed"] / median["crossing"],
    }
