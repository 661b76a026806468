"""tracker.jagged_unique: ids a second beside a loop of numpy.unique and torch.unique.

The grid is DECK's Figure 6. Each table's ids are drawn from half as many row numbers as it has ids,
so 0.43 of them are distinct.
torch takes part where it can be imported, with as many threads as it likes; petps uses one.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from petps.tracker import jagged_unique

# A side this much slower than another is left out where there are more ids in as many tables.
HOPELESS: Final = 3.0
Ids = npt.NDArray[np.int64]
Result = dict[str, Any]


def figures(work: dict[str, Any]) -> Iterator[Result]:
    """One result a cell of the grid, and the worst of them."""
    loops = _loops()
    results = []
    for tables in work["tables"]:
        rivals = dict(loops)
        for ids in sorted(work["ids"]):
            result, rates = _cell(int(ids), int(tables), int(work["rounds"]), rivals)
            results.append(result)
            yield result
            best = max(rates.values())
            rivals = {name: rivals[name] for name, rate in rates.items() if rate * HOPELESS > best}
    worst = min(results, key=lambda result: float(result["ratio"]))
    yield worst | {"name": "tracker.jagged_unique", "cell": worst["name"]}


def _cell(
    ids: int, tables: int, rounds: int, rivals: dict[str, Callable[[Ids], object]]
) -> tuple[Result, dict[str, float]]:
    """The result of one cell, and the rate of each rival. In turn, the best of each."""
    each = ids // tables
    values = np.random.default_rng(1).integers(0, max(1, each // 2), each * tables)
    offsets = np.arange(tables + 1) * each
    parts = [values[i * each : (i + 1) * each] for i in range(tables)]
    sides: dict[str, Callable[[], object]] = {
        "any": lambda: jagged_unique(values, offsets),
        "ascending": lambda: jagged_unique(values, offsets, order="ascending"),
        "inverse and counts": lambda: jagged_unique(values, offsets, inverse=True, counts=True),
    }
    for name, unique in rivals.items():
        sides[name] = lambda unique=unique: [unique(part) for part in parts]  # type: ignore[misc]
    rates = dict.fromkeys(sides, 0.0)
    for _ in range(rounds):
        for name, side in sides.items():
            started = time.perf_counter()
            side()
            rates[name] = max(rates[name], len(values) / (time.perf_counter() - started))
    found = {name: rates[name] for name in rivals}
    fastest = max(found, key=lambda name: found[name])
    result = {
        "name": f"tracker.jagged_unique.{ids}.{tables}",
        "value": rates["any"],
        "unit": "ids/s",
        "ratio_to": fastest,
        "ratio": rates["any"] / rates[fastest],
        "ratio_ascending": rates["ascending"] / rates[fastest],
        "rates": rates,
    }
    return result, found


def _loops() -> dict[str, Callable[[Ids], object]]:
    loops: dict[str, Callable[[Ids], object]] = {"loop of numpy.unique": np.unique}
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        print("tracker.jagged_unique: no torch, so beside numpy alone", file=sys.stderr, flush=True)
        return loops
    return loops | {"loop of torch.unique": lambda part: torch.unique(torch.from_numpy(part))}
