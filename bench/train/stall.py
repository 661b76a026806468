"""train.checkpoint_stall.*, train.tracking, train.everything: what versions cost a training.

Two ranks train in mode `nested`, as in steps.py, and write versions to a store and to a log.

It needs PyTorch; bench.lines runs it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any, Final

from bench.train.steps import ALONE, runs

NESTED: Final[dict[str, Any]] = {"mode": "nested", "calibrated": True}
Result = dict[str, Any]


def figures(sizes: dict[str, Any]) -> Iterator[Result]:
    """Yield the figures. Rounds without and with versions alternate.

    The first version of a store is a base: one in each round, and one in the long run.
    """
    every, seconds = sizes["steps_between"], sizes["seconds_between"]
    off = NESTED | {"steps": sizes["versions_by_steps"] * every}
    on = off | {"versions": {"steps": every}, "tended": True}
    results = runs(sizes, [ALONE, ALONE, *[off, on] * sizes["rounds"]])[2:]
    without, having = results[::2], results[1::2]
    steps = [result["step_s"] for result in having]
    ratios = [step / result["step_s"] for step, result in zip(steps, without, strict=True)]
    yield {
        "name": "train.everything",
        "value": 1e3 * statistics.median(steps),
        "unit": "ms",
        "ratio_to": "the same steps without versions and tracking",
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "versions": [result["versions"] for result in having],
    }
    tracking = [result["tracking_s"] / result["step_s"] for result in having]
    yield _share("train.tracking", tracking, "a step")
    due = sizes["versions_by_steps"]
    stalls = [_stall(result, due) for result in having]
    yield _share("train.checkpoint_stall.30steps", stalls) | {
        "versions": [result["versions"] for result in having],
        "seconds": off["steps"] * statistics.median(steps),
    }
    length = math.ceil(sizes["versions_by_seconds"] * seconds / statistics.median(steps))
    long_run = NESTED | {"steps": length, "versions": {"seconds": seconds}}
    result = runs(sizes, [ALONE, ALONE, long_run])[2]
    stall = _stall(result, sizes["versions_by_seconds"])
    yield _share("train.checkpoint_stall.30s", [stall]) | {
        "versions": result["versions"],
        "seconds": length * result["step_s"],
    }


def _stall(result: dict[str, Any], due: int) -> float:
    """Return the share of the time, as if all versions that were due had been written.

    If a version takes longer than the time between two, the next one waits for it, and holds both.
    """
    return float(result["hooks_s"] / result["step_s"] * due / max(1, result["versions"]))


def _share(name: str, shares: list[float], of: str = "the time of the training") -> Result:
    share = statistics.median(shares)
    return {
        "name": name,
        "value": share,
        "unit": "share",
        "ratio_to": of,
        "ratio": share,
        "ratio_low": min(shares),
        "ratio_high": max(shares),
    }
