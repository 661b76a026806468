"""A comparison of two recorded runs: python -m bench.compare BEFORE AFTER

BEFORE and AFTER are folders that `make bench` wrote. For each name that both have it prints both
ratios (both values, where a result has no limit) and how many times as good AFTER is. The ratios
are to limits of the same run, so the two may come from different days or machines; rates may not,
and two runs differ by some per cent in any case. `make bench BEFORE=BUILD` alternates two builds
in one run, which tells smaller changes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from bench.record import read_results
from bench.targets import Result, is_higher_better, missed

# A change of a figure by less than this is not marked.
NOISE: Final = 0.05


def change_of(before: Result, after: Result) -> float | None:
    """Return how many times as good `after` is; None if the results cannot be compared."""
    field = "value" if before["ratio"] is None or after["ratio"] is None else "ratio"
    if before["unit"] != after["unit"] or not before[field] or not after[field]:
        return None
    change = float(after[field] / before[field])
    return change if is_higher_better(after) else 1 / change


def main() -> None:
    """Print the comparison as a table."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(
        prog="python -m bench.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", type=Path, help="the output of a run, such as bench/published")
    parser.add_argument("after", type=Path, help="the output of another run")
    options = parser.parse_args()
    before_results, before_config = read_results(options.before)
    after_results, after_config = read_results(options.after)
    table = Table()
    columns = ("name", before_config["revision"], after_config["revision"], "unit", "times as good")
    for place, column in enumerate(columns):
        table.add_column(str(column), justify="right" if place in (1, 2, 4) else "left")
    earlier = {result["name"]: result for result in before_results}
    later = {result["name"]: result for result in after_results}
    for name, after in later.items():
        if name not in earlier:
            continue
        before, change = earlier[name], change_of(earlier[name], after)
        has_ratios = before["ratio"] is not None and after["ratio"] is not None
        cells = [_figure(result, has_ratios) for result in (before, after)]
        unit = "ratio" if has_ratios else after["unit"]
        table.add_row(name, *cells, unit, "" if change is None else _marked(change))
    Console().print(table)
    for path, only in (
        (options.before, [name for name in earlier if name not in later]),
        (options.after, [name for name in later if name not in earlier]),
    ):
        if only:
            print(f"only in {path}: {', '.join(only)}")
    for name in ("cpu", "processors", "kernel", "workload"):
        if before_config[name] != after_config[name]:
            print(f"the {name} differs: {before_config[name]} and {after_config[name]}")


def _figure(result: Result, has_ratio: bool) -> str:
    value = result["ratio"] if has_ratio else result["value"]
    if value is None:
        return "skipped"
    return f"{value:.4g}" + (" (missed)" if missed(result) else "")


def _marked(change: float) -> str:
    if abs(change - 1) < NOISE:
        return f"{change:.2f}"
    return f"[{'green' if change > 1 else 'red'}]{change:.2f}"


if __name__ == "__main__":
    main()
