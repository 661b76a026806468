"""train.sweep.<what>.<factor>: the named figures with one thing changed.

Nested beside synchronous, of the first two also dual and frozen alone; medians over the steps:

- ``dense``: the dense time, over the lookup's; NestPipe's Figure 10 (c), (d): layers;
- ``link``: what the link waits in all transfers, over the lookup's time; gathering and gloo come
  on top;
- ``length``: keys of a sample, over the named ones; Figure 10 (e); the dense time is proportional,
  as there; a quarter of the samples;
- ``dim``: values of a row, over the named ones; Figure 10 (a), (b); the dense time is taken to be
  proportional (the paper gives none); a quarter of the samples, ``length.1`` is its beginning.

Run by bench.report in the environment of `make test-train`: `python -m bench.train.sweeps
'<sizes as JSON>'` prints a JSON line a result.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any, Final

from bench.train.steps import LATENCY_SHARE, MICRO_BATCHES, Result, link_of, runs

MODES: Final = ("synchronous", "nested", "dual", "frozen")
FEWER: Final = 4  # samples of the longer and wider runs


def points(
    sizes: dict[str, Any], link: dict[str, Any]
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Name, how many of MODES, settings. link: that of the named figures."""
    lookup = link["dense_s"]
    for factor in sizes["dense_factors"]:
        yield f"dense.{factor:g}", 4, {"dense_s": factor * lookup}
    waited = 2 * MICRO_BATCHES * link["latency_s"] / LATENCY_SHARE
    for factor in sizes["link_factors"]:
        slower = factor * lookup / waited
        yield (
            f"link.{factor:g}",
            4,
            {
                "latency_s": slower * link["latency_s"],
                "bytes_per_second": link["bytes_per_second"] / slower,
            },
        )
    few = {"samples": sizes["samples"] // FEWER}
    for factor in sizes["length_factors"]:
        longer = {"length": factor * sizes["length"], "dense_s": factor * lookup / FEWER}
        yield f"length.{factor}", 2, few | longer
    for factor in sizes["dim_factors"]:
        wider = {"dim": factor * sizes["dim"], "dense_s": factor * lookup / FEWER}
        yield f"dim.{factor}", 2, few | wider


def figures(sizes: dict[str, Any]) -> Iterator[Result]:
    """A result a point."""
    # The second run of a process, as those that follow are: the first looks up in new memory.
    link = link_of(runs(sizes, [{"mode": "synchronous"}] * 2)[1])
    chosen = list(points(sizes, link))
    wanted = [more | {"mode": mode} for _, modes, more in chosen for mode in MODES[:modes]]
    told = iter(runs(sizes, wanted, **link))
    for name, modes, more in chosen:
        found = {mode: next(told) for mode in MODES[:modes]}
        median = {mode: each["medians"] for mode, each in found.items()}
        base, nested = median["synchronous"], median["nested"]
        yield {
            "name": f"train.sweep.{name}",
            "value": 1e3 * nested["seconds"],
            "unit": "ms",
            "ratio_to": "the synchronous loop",
            "ratio": nested["seconds"] / base["seconds"],
            "others": {mode: median[mode]["seconds"] / base["seconds"] for mode in MODES[2:modes]},
            "exposed_share": nested["exposed"] / nested["crossing"],
            "lookup_hidden": 1 - nested["lookup_stall"] / base["lookup_stall"],
            "dense_ms": 1e3 * (link | more)["dense_s"],
            "synchronous_lookup_ms": 1e3 * base["lookup_stall"],
            "synchronous_crossing_ms": 1e3 * base["crossing"],
            "crossing_ms": 1e3 * nested["crossing"],
            "exposed_ms": 1e3 * nested["exposed"],
            "mb_a_step": found["nested"]["bytes"] / 1e6,
            "dedup_ratio": found["nested"]["dedup_ratio"],
        }


if __name__ == "__main__":
    for result in figures(json.loads(sys.argv[1])):
        print(json.dumps(result), flush=True)
