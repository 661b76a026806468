"""train.shaped.<link>: the named figures over links that the kernel shapes, and over SlowLink.

There are two ranks, each in a network namespace of its own. Between them is a veth pair whose
sides send at a limited rate (tc tbf). SlowLink gets the same rate and no latency. The name of a
rate is the time of all transfers at that rate over that of the lookup; the named figures have 0.5.

It needs PyTorch; bench.lines runs it. Without root it prints why it has no results.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

from bench.train.namespaces import Shaped, shaped, unavailable
from bench.train.steps import Result, run, runs

MODES: Final = ("synchronous", "nested")


def inside(link: Shaped) -> list[list[str]]:
    """Return the prefixes of the ranks' commands."""
    return [[*side, "env", f"GLOO_SOCKET_IFNAME={link.interface}"] for side in link.inside]


def figures(sizes: dict[str, Any]) -> Iterator[Result]:
    """Yield a result for each rate."""
    why = unavailable()
    if why:
        print(f"skipped train.shaped: {why}", file=sys.stderr, flush=True)
        return
    alone = run(sizes, mode="synchronous")
    dense = {"dense_s": alone["lookup_stall_s"]}
    rates = {
        f"{factor:g}": alone["bytes"] / (factor * alone["lookup_stall_s"])
        for factor in sizes["shaped_factors"]
    }
    modes = [{"mode": mode} for mode in MODES]
    slow = [run | {"slow": True, "bytes_per_second": r} for r in rates.values() for run in modes]
    waiting = iter(runs(sizes, slow, **dense))
    for name, rate in rates.items():
        with shaped(rate) as link:
            results = runs(sizes, modes, inside=inside(link), **dense)
        by_kernel = dict(zip(MODES, results, strict=True))
        by_waiting = {mode: next(waiting) for mode in MODES}
        base, nested = (by_kernel[mode]["medians"] for mode in MODES)
        yield {
            "name": f"train.shaped.{name}",
            "value": 1e3 * nested["seconds"],
            "unit": "ms",
            "ratio_to": "the synchronous loop over the same link",
            "ratio": nested["seconds"] / base["seconds"],
            "mb_per_second": rate / 1e6,
            "shaped": _summarise(by_kernel),
            "slow_link": _summarise(by_waiting),
        }


def _summarise(by_mode: dict[str, dict[str, Any]]) -> dict[str, Any]:
    base, nested = (by_mode[mode]["medians"] for mode in MODES)
    return {
        "synchronous_ms": 1e3 * base["seconds"],
        "nested_ms": 1e3 * nested["seconds"],
        "ratio": nested["seconds"] / base["seconds"],
        "synchronous_crossing_ms": 1e3 * base["crossing"],
        "crossing_ms": 1e3 * nested["crossing"],
        "exposed_share": nested["exposed"] / nested["crossing"],
        "lookup_hidden": 1 - nested["lookup_stall"] / base["lookup_stall"],
    }
