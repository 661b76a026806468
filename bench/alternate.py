"""A comparison of two builds, whose benchmark programs alternate in one run.

``make bench ONLY=pull,apply,index BEFORE=FOLDER`` alternates the programs of FOLDER, which is the
``build/release/bench`` of another checkout, with those of this checkout. For each configuration it
prints the median over the rounds of (this build / the other build). It compares each build's ratio
to the limit that the program measures in the same windows, so that other load on the machine
disturbs both builds alike. A result above 1 means that this build is faster, whatever the unit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tomllib
from pathlib import Path
from typing import Final

from bench import report
from bench.record import ROOT
from bench.targets import Result

# Parts that are measured by C++ programs alone. Parts that use the Python package are not compared.
COMPARED: Final = ("pull.inprocess", "pull.tcp", "apply", "index.search")
TARGET: Final = 0.97
# "cores" says how near the two cores were; results of near and far cores are not compared.
SETTINGS: Final = (
    "medium", "access", "durability", "connections", "in_flight", "request_keys", "senders",
    "threads", "batch", "cores",
)  # fmt: skip
# configuration -> (ratio to the limit, whether higher is better)
Figures = dict[str, tuple[float, bool]]


def configuration_of(result: Result) -> str:
    """Return the name and the settings of a result, which are the same for both builds."""
    words = [f"{key}={result[key]}" for key in SETTINGS if key in result]
    return " ".join([str(result["name"]), *words])


def measure(folder: Path, part: report.Part, work: report.Workload) -> Figures:
    """Run the part once with the programs of `folder`. Return the figure of each configuration."""
    os.environ["PETPS_BENCH_FOLDER"] = str(folder)
    figures: Figures = {}
    for result in part(work):
        higher_is_better = str(result["unit"]).endswith("/s")
        figures[configuration_of(result)] = (float(result["ratio"]), higher_is_better)
    return figures


def ratio_of(before: tuple[float, bool], after: tuple[float, bool]) -> float:
    """Return how many times as fast `after` is as `before`."""
    return after[0] / before[0] if after[1] else before[0] / after[0]


def main() -> None:
    """Alternate both builds and print the median ratio of each configuration."""
    parser = argparse.ArgumentParser(prog="python -m bench.alternate", description=__doc__)
    parser.add_argument("before", type=Path, help="build/release/bench of the other checkout")
    parser.add_argument("--only", default="", help=f"parts, by comma: {', '.join(COMPARED)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workload", default="full")
    options = parser.parse_args()
    prefixes = options.only.split(",") if options.only else [""]
    parts = [name for name in COMPARED if any(name.startswith(word) for word in prefixes)]
    if not parts:
        parser.error(f"--only {options.only}: choose among {', '.join(COMPARED)}")
    if not options.before.is_dir():
        parser.error(f"{options.before} is no folder; build the other checkout with `make bench`")
    work = tomllib.loads((ROOT / "bench" / "workloads" / f"{options.workload}.toml").read_text())
    work["rounds"] = 1
    report.OUTPUT.mkdir(parents=True, exist_ok=True)
    this_build = ROOT / "build" / "release" / "bench"
    ratios: dict[str, list[float]] = {}
    for number in range(options.rounds):
        # The first build of a pair runs on a colder machine, so the order alternates. The builds
        # alternate part by part: a machine that is busy for a minute then disturbs both alike.
        order = [options.before, this_build] if number % 2 == 0 else [this_build, options.before]
        for part in (part for name, part in report.PARTS if name in parts):
            figures = {folder: measure(folder.resolve(), part, work) for folder in order}
            for name, after in figures[this_build].items():
                if name in figures[options.before]:
                    ratio = ratio_of(figures[options.before][name], after)
                    ratios.setdefault(name, []).append(ratio)
        print(f"round {number + 1} of {options.rounds}", flush=True)
    rows = [
        {
            "name": name,
            "ratio": statistics.median(round_ratios),
            "target": TARGET,
            "rounds": round_ratios,
        }
        for name, round_ratios in ratios.items()
    ]
    (report.OUTPUT / "alternate.json").write_text(json.dumps(rows, indent=1) + "\n")
    if not rows:
        raise SystemExit("no configuration was measured with both builds: ask for more rounds")
    for row in rows:
        mark = "met" if float(str(row["ratio"])) >= TARGET else "MISSED"
        print(f"{row['ratio']:.3f}  {mark:6}  {row['name']}")


if __name__ == "__main__":
    main()
