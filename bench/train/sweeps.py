"""train.sweep.<what>.<factor>: the named figures with one thing changed.

Each point compares nested with synchronous; the first two sweeps also have dual and frozen alone.
Figures are medians over the steps:

- ``dense``: the dense time over the lookup's, as in NestPipe's Figure 10 (c), (d): layers;
- ``link``: the link's wait in all transfers over the lookup's time; gathering and gloo are extra;
- ``length``: the keys of a sample over the named number, as in Figure 10 (e). The dense time is
  proportional, as there. Runs have a quarter of the samples;
- ``dim``: the values of a row over the named number, as in Figure 10 (a), (b). The dense time is
  assumed to be proportional (the paper gives none). Runs have a quarter of the samples, so
  ``length.1`` is also the first point of this sweep.

Each point also runs the simulation of its steps, and yields its error as train.simulator_error.

It needs PyTorch; bench.lines runs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from bench.train.simulate import step_seconds
from bench.train.steps import (
    ALONE,
    ALONE_AHEAD,
    LATENCY_SHARE,
    MICRO_BATCHES,
    Result,
    link_of,
    processors_per_rank,
    runs,
    simulator_error,
    stages_of,
)

MODES: Final = ("synchronous", "nested", "dual", "frozen")
NO_WAITS: Final = {"slow": False, "dense_s": 0.0}
FEWER: Final = 4  # the runs with longer samples or wider rows have 1 / FEWER of the samples


def points(
    sizes: dict[str, Any], link: dict[str, Any]
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yield name, number of MODES, settings. link: the settings of the named figures."""
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
    """Yield a result for each point."""
    # The second run of a process, like those that follow: the first one looks up in new memory.
    link = link_of(runs(sizes, [{"mode": "synchronous"}] * 2)[1])
    chosen = list(points(sizes, link))
    wanted: list[dict[str, Any]] = []
    for _, modes, more in chosen:
        # The stage times that the simulation needs, at this point's sizes.
        wanted += [more | NO_WAITS | run for run in (ALONE, ALONE_AHEAD)]
        wanted += [more | {"mode": mode} for mode in MODES[:modes]]
    results = iter(runs(sizes, wanted, **link))
    share = processors_per_rank(2)
    beside = {}
    for name, modes, more in chosen:
        alone, ahead = next(results), next(results)
        by_mode = {mode: next(results) for mode in MODES[:modes]}
        median = {mode: result["medians"] for mode, result in by_mode.items()}
        base, nested = median["synchronous"], median["nested"]
        stages = stages_of(alone, link | more, share, ahead)
        for mode, measured in median.items():
            simulated_s = step_seconds(mode, stages, MICRO_BATCHES, share)
            beside[f"{name}.{mode}"] = (simulated_s, measured["seconds"])
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
            "mb_a_step": by_mode["nested"]["bytes"] / 1e6,
            "dedup_ratio": by_mode["nested"]["dedup_ratio"],
        }
    yield from simulator_error(beside)
