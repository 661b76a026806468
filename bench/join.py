"""Put runs together: `python -m bench.join RUN LATER_RUN... --output FOLDER`.

A part that several runs have is taken from the last of them. config.json then says in ``joined``
which revision measured each part that is not of the first run's revision. The ratios within a part
are of one run; compare no values of different runs with each other.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

from bench.record import write_run
from bench.targets import Result

# The runs must have measured the same things.
ALIKE = ("workload", "processors")


def join(folders: list[Path]) -> tuple[list[Result], dict[str, Any]]:
    """Return the results and the configuration of all runs. Raises SystemExit if they differ."""
    results: dict[str, list[Result]] = {}
    config: dict[str, Any] = {}
    for folder in folders:
        own = json.loads((folder / "config.json").read_text())
        if not config:
            config = {"joined": {}} | copy.deepcopy(own)
        for name in ALIKE:
            if own[name] != config[name]:
                raise SystemExit(f"{folder} has {name} {own[name]}, not {config[name]}")
        for part, seconds in own["part_seconds"].items():
            config["part_seconds"][part] = seconds
            config["measured_again"].pop(part, None)
            config["joined"].pop(part, None)
            results[part] = []
            revision = own.get("joined", {}).get(part, own["revision"])
            if revision != config["revision"]:
                config["joined"][part] = revision
            if part in own["measured_again"]:
                config["measured_again"][part] = own["measured_again"][part]
        for result in json.loads((folder / "all.json").read_text()):
            if result["part"] in own["part_seconds"]:
                results[result["part"]].append(result)
    return [result for part in results.values() for result in part], config


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.join", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="outputs of runs, the oldest first")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    results, config = join(options.runs)
    options.output.mkdir(parents=True, exist_ok=True)
    write_run(options.output, results, config)


if __name__ == "__main__":
    main()
