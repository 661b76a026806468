"""train.clustering.<keys>.<N>: what clustering by keys saves on the link, as micro-batches shrink.

As in NestPipe's Figure 9, the batch stays the same and N grows, in mode nested. A key crosses once
for each micro-batch that has it, so a plain division sends more bytes the smaller the micro-batches
are. Clustering puts samples that share keys into one micro-batch. ``sessions``: samples come in
random order, and each draws its keys from those of one session. ``named``: the keys of the named
figures. Batches are clustered before the clock starts, because a rank has one processor here;
``arranging_ms`` is the time that this takes for a batch.

It needs PyTorch; bench.lines runs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.train.steps import Result, run, runs


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
