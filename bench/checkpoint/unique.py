"""tracker.jagged_unique: ids a second, against a loop of numpy.unique and torch.unique.

The grid is DECK's Figure 6. Each table draws its ids from half as many row numbers as it has ids,
so 0.43 of them are distinct. `tracker.jagged_unique.hashed` has as many ids spread over all
numbers, as hashes are. torch takes part if it can be imported (bench.report uses .venv-train if
that exists), with as many threads as it chooses; petps uses one thread.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from petps.train.tracker import jagged_unique

# A rival this much slower than the fastest is left out of cells with more ids in as many tables.
HOPELESS: Final = 3.0
SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)
Ids = npt.NDArray[np.int64]
Result = dict[str, Any]


def figures(work: dict[str, Any]) -> Iterator[Result]:
    """Yield one result for each cell of both grids, then the worst of each."""
    loops = _loops()
    for prefix, is_hashed in (
        ("tracker.jagged_unique", False),
        ("tracker.jagged_unique.hashed", True),
    ):
        results = []
        for tables in work["tables"]:
            rivals = dict(loops)
            for ids in sorted(work["ids"]):
                values, offsets = _draw(int(ids), int(tables))
                if is_hashed:
                    values = _hashed(values)
                rates = _rates(values, offsets, int(work["rounds"]), rivals)
                rivals = _drop_hopeless(rates, rivals)
                results.append(_compare(f"{prefix}.{ids}.{tables}", rates))
                yield results[-1]
        worst = min(results, key=lambda result: float(result["ratio"]))
        yield worst | {"name": prefix, "cell": worst["name"]}


def _hashed(values: Ids) -> Ids:
    """Return odd multiples: as many distinct numbers, spread over all below 2^63."""
    return ((values.view(np.uint64) * SPREAD) >> np.uint64(1)).view(np.int64)


def _draw(ids: int, tables: int) -> tuple[Ids, Ids]:
    ids_per_table = ids // tables
    values = np.random.default_rng(1).integers(
        0, max(1, ids_per_table // 2), ids_per_table * tables
    )
    return values, np.arange(tables + 1) * ids_per_table


def _rates(
    values: Ids, offsets: Ids, rounds: int, rivals: dict[str, Callable[[Ids], object]]
) -> dict[str, float]:
    """Return the ids a second of each side; they alternate, and the best round of each counts."""
    parts = np.split(values, offsets[1:-1])
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
    return rates


def _drop_hopeless(
    rates: dict[str, float], rivals: dict[str, Callable[[Ids], object]]
) -> dict[str, Callable[[Ids], object]]:
    best = max(rates[name] for name in rivals)
    return {name: unique for name, unique in rivals.items() if rates[name] * HOPELESS > best}


def _compare(name: str, rates: dict[str, float]) -> Result:
    loops = {name: rate for name, rate in rates.items() if name.startswith("loop")}
    fastest = max(loops, key=lambda name: loops[name])
    return {
        "name": name,
        "value": rates["any"],
        "unit": "ids/s",
        "ratio_to": fastest,
        "ratio": rates["any"] / rates[fastest],
        "ratio_ascending": rates["ascending"] / rates[fastest],
        "rates": rates,
    }


def _loops() -> dict[str, Callable[[Ids], object]]:
    loops: dict[str, Callable[[Ids], object]] = {"loop of numpy.unique": np.unique}
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        print(
            "tracker.jagged_unique: torch is not installed, so only numpy is compared",
            file=sys.stderr,
            flush=True,
        )
        return loops
    return loops | {"loop of torch.unique": lambda part: torch.unique(torch.from_numpy(part))}
