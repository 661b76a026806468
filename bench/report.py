"""The program of ``make bench``: it runs the benchmarks and prints a table.

It writes three files to build/bench, after each result: an interrupted run leaves what it has
measured, and ``--resume`` continues it. results.json is a list of {name, value, unit, ratio_to,
ratio}. ``ratio`` is the value of petps divided by that of ``ratio_to``, in the same unit and run;
it is null if there is no reference. A name appears once, with its worst required configuration.
all.json has every configuration, and config.json describes the machine. bench/README.md explains
how to read the figures.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from bench.record import ROOT, Record, configuration
from bench.targets import Result, bounds, missed, worst

OUTPUT: Final = ROOT / "build" / "bench"
TRAIN_PYTHON: Final = ROOT / ".venv-train" / "bin" / "python"
# Users run a file; dram, beside it, shows what the medium costs.
MEDIA: Final = ("file", "dram")
Workload = dict[str, Any]


def _program_path(name: str) -> Path:
    folder = Path(os.environ.get("PETPS_BENCH_FOLDER", ROOT / "build" / "release" / "bench"))
    return folder / f"bench_{name}"


def _program(name: str) -> Path:
    path = _program_path(name)
    if not path.exists():
        raise SystemExit(f"{path} does not exist: run `make bench`, which builds it")
    return path


def _run(name: str, **arguments: object) -> Iterator[Result]:
    """Run a C++ program and yield the JSON objects that it prints."""
    flags = [f"--{key}={value}" for key, value in arguments.items()]
    process = subprocess.run(
        [_program(name), *flags], check=True, stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout.splitlines():
        yield json.loads(line)


def _on(medium: str, name: str, **arguments: object) -> Iterator[Result]:
    """Run a C++ program on a medium: file, in a folder that is removed afterwards, or dram."""
    with tempfile.TemporaryDirectory(dir=OUTPUT) as folder:
        yield from _run(name, medium=medium, folder=folder, **arguments)


def _inprocess(work: Workload) -> Iterator[Result]:
    for medium in MEDIA:
        yield from _on(
            medium, "pull_inprocess", rows=work["inprocess"]["rows"], rounds=work["rounds"]
        )


def _tcp(work: Workload) -> Iterator[Result]:
    for medium in MEDIA:
        yield from _on(medium, "pull_tcp", rounds=work["rounds"], **work["tcp"])


def _tls(work: Workload) -> Iterator[Result]:
    for medium in MEDIA:
        yield from _on(medium, "pull_tcp", tls=1, rounds=work["rounds"], **work["tcp"])


def _gather(work: Workload) -> Iterator[Result]:
    size = work["gather"]
    cells = {}
    for medium in MEDIA:
        for cell in _on(medium, "gather", part="grid", **size["grid"]):
            cells[cell["name"]] = cell
            yield cell
    counts = _instructions_per_row(size["counted_lists"])
    for mode, instructions in counts.items():
        grid_cell = cells[f"gather.{mode}.512.500"]
        share = grid_cell["server_kernel_share"]
        cpu = grid_cell["server_cpu_s_per_million_rows"]
        yield {
            "name": f"gather.cpu_instructions_per_row.{mode}",
            "value": instructions,
            "unit": "instructions",
            "ratio_to": None if instructions is None else "gather by copy",
            "ratio": None if instructions is None else instructions / counts["copy"],
            "row_bytes": 512,
            # CPU time of a server under pulls, with the kernel and the lookups.
            "user_cpu_s_per_million_rows": cpu * (1 - share),
            "system_cpu_s_per_million_rows": cpu * share,
        }


def _instructions_per_row(lists: int) -> dict[str, Any]:
    """Return the user-space instructions per row from row addresses to the system call, by mode.

    The values are None if valgrind is not installed.
    """
    modes = ("copy", "sendmsg", "zerocopy")
    if shutil.which("valgrind") is None:
        print(
            "skipped gather.cpu_instructions_per_row: it counts with valgrind; "
            "apt-get install valgrind",
            file=sys.stderr,
        )
        return dict.fromkeys(modes)
    rows = 500

    def count(mode: str, lists: int) -> int:
        command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
        command += [str(_program("gather_instructions")), f"--mode={mode}", f"--lists={lists}"]
        process = subprocess.run(
            [*command, f"--keys={rows}"], check=True, capture_output=True, text=True
        )
        match = re.search(r"Collected : (\d+)", process.stderr)
        if match is None:
            raise SystemExit(f"callgrind printed no count:\n{process.stderr}")
        return int(match.group(1))

    # The difference of two counts leaves out the start of the program and the first lists, which
    # grow buffers.
    first = 20
    return {
        mode: (count(mode, first + lists) - count(mode, first)) / (lists * rows) for mode in modes
    }


def _connections(work: Workload) -> Iterator[Result]:
    for medium in MEDIA:
        yield from _on(medium, "gather", part="connections", **work["gather"]["connections"])


def _apply(work: Workload) -> Iterator[Result]:
    size = work["apply"]
    # Two writers and power durability have names of their own. Power durability measures the disk,
    # with one batch per window.
    two_writers = {"threads": 2}
    power = {"durability": "power", "windows": size["synced_windows"], "window_batches": 1}
    kinds: tuple[tuple[str, int, dict[str, Any]], ...] = (
        *((medium, size["rows"], {}) for medium in MEDIA),
        *((medium, size["rows"], two_writers) for medium in MEDIA),
        ("file", size["synced_rows"], power),
    )
    for medium, rows, options in kinds:
        yield from _on(medium, "apply", rows=rows, rounds=work["rounds"], **options)


def _grow(work: Workload) -> Iterator[Result]:
    size = work["grow"]
    for rows, grow_to in size["rows"]:
        sizes = {"rows": rows, "grow_to": grow_to, "rounds": work["rounds"]}
        yield from _on("file", "grow", **sizes, idle_ms=size["idle_ms"])


def _updates(work: Workload) -> Iterator[Result]:
    size = work["updates"]
    for durability, batches in size["batches"].items():
        suffix = "" if durability == "process" else f".{durability}"
        smallest: dict[str, Result] = {}
        for label, rows in size["rows"].items():
            sizes = {"rows": rows, "batches": batches, "rounds": work["rounds"]}
            for result in _on("file", "updates", durability=durability, **sizes):
                prefix = result["name"] + suffix
                reference = smallest.setdefault(prefix, result)
                has_reference = reference is not result
                yield {
                    **result,
                    "name": f"{prefix}.{label}",
                    "ratio_to": f"the same table with {reference['rows']:,.0f} rows"
                    if has_reference
                    else None,
                    "ratio": result["value"] / reference["value"] if has_reference else None,
                }
                yield {
                    "name": f"{prefix}.dirtied_bytes_per_row.{label}",
                    "medium": "file",
                    "value": result["dirtied_bytes_per_row"],
                    "unit": "bytes",
                }


def _peers(work: Workload) -> Iterator[Result]:
    if not _program_path("peers").exists():
        print(
            "skipped peers: their libraries are not installed; bench/peers/CMakeLists.txt names "
            "the packages",
            file=sys.stderr,
            flush=True,
        )
        return
    for side in ("tcp", "process", "restart"):
        with tempfile.TemporaryDirectory(dir=OUTPUT) as folder:
            yield from _run(
                "peers", side=side, folder=folder, rounds=work["rounds"], **work["peers"]
            )


def _scale(work: Workload) -> Iterator[Result]:
    size = work["scale"]
    power = {"rows": size["synced_rows"], "durability": "power"}
    kinds: tuple[tuple[str, dict[str, Any]], ...] = (
        ("pull", {}), ("apply", {}), ("push", {}), ("push", power),
    )  # fmt: skip
    for what, options in kinds:
        sizes = {"rows": size["rows"], "window_ms": size["window_ms"], "rounds": work["rounds"]}
        yield from _on("file", "scale", what=what, **(sizes | options))
    yield from _here("bench.scale.ingest", "scale_ingest")(work)


def _search(work: Workload) -> Iterator[Result]:
    for medium in MEDIA:
        yield from _on(medium, "index_search", rows=work["search"]["keys"], rounds=work["rounds"])


def _quality(work: Workload) -> Iterator[Result]:
    from bench.quality import bucket_reads, served_bucket_reads

    prefix, unit = "index.bucket_reads_per_hit", "buckets"
    for name, value in bucket_reads(work["quality"]).items():
        yield {"name": f"{prefix}.{name}", "value": value, "unit": unit}
    yield {"name": f"{prefix}.served", "unit": unit, **served_bucket_reads(work["quality"])}


def _memory(work: Workload) -> Iterator[Result]:
    from bench.quality import overhead_bytes_per_row

    figures = overhead_bytes_per_row(work["memory"])
    yield {"name": "memory.overhead_bytes_per_row", "unit": "bytes", **figures}


def _reopen(work: Workload) -> Iterator[Result]:
    size = work["reopen"]
    cases = [
        (label, rows, size["dim"], "f32")
        for label, rows in zip(("100k", "1m", "10m"), size["rows"], strict=True)
    ]
    cases.append(("small_rows", size["small_rows"], 1, "f16"))
    with tempfile.TemporaryDirectory(dir=OUTPUT) as folder:
        ten_million = 0.0
        for label, rows, dim, dtype in cases:
            pool = Path(folder) / f"{label}.pool"
            arguments = [str(pool), str(rows), str(dim), dtype]
            command = [sys.executable, "-m", "bench.recovery.reopen"]
            loader = subprocess.run([*command, "make", *arguments], cwd=ROOT, check=False)
            if loader.returncode != -9:
                raise SystemExit(
                    f"loading {rows} rows ended with {loader.returncode}, not by kill -9"
                )
            replies = []
            starts = []
            for _ in range(work["rounds"]):
                started = time.time()
                opener = subprocess.run(
                    [*command, "open", *arguments],
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    text=True,
                    check=False,
                )
                if not opener.stdout:
                    raise SystemExit(f"reopening {rows} rows failed with {opener.returncode}")
                report = json.loads(opener.stdout)
                replies.append(report["first_reply_ms"])
                starts.append((report["called"] - started) * 1e3)
            median = statistics.median(replies)
            has_reference = label == "small_rows"
            yield {
                "name": f"reopen.ms.{label}",
                "value": median,
                "unit": "ms",
                "ratio_to": "reopen.ms.10m" if has_reference else None,
                "ratio": median / ten_million if has_reference else None,
                "rows": rows,
                "highest": max(replies),
                "process_start_and_imports_ms": statistics.median(starts),
            }
            ten_million = median
            pool.unlink()


def _codec(work: Workload) -> Iterator[Result]:
    from bench.checkpoint.codec import adaptive4, l2

    sizes = work["codec"]
    yield from _run("codec_encode", rows=sizes["encoded_rows"], rounds=work["rounds"])
    yield from adaptive4(sizes | {"rounds": work["rounds"]})
    yield from l2(sizes)


def _checkpoint(work: Workload) -> Iterator[Result]:
    from bench.checkpoint import bytes, merging, policies

    yield from policies.figures(work["checkpoint"])
    yield from bytes.figures(work["checkpoint"])
    yield from merging.figures(work["checkpoint"])


def _sizes(work: Workload, sections: tuple[str, ...]) -> Workload:
    """Return the merged sections of a workload; a later section takes precedence."""
    sizes = {"rounds": work["rounds"]}
    for section in sections:
        sizes |= work[section]
    return sizes


def _here(module: str, *sections: str) -> Part:
    """Return a part that yields the figures() of a module."""

    def part(work: Workload) -> Iterator[Result]:
        yield from importlib.import_module(module).figures(_sizes(work, sections))

    return part


def _with_torch(name: str, module: str, *sections: str) -> Part:
    """Return a part that runs a module in the environment of `make test-train` (bench.lines).

    The part prints a notice and yields nothing if that environment does not exist.
    """

    def part(work: Workload) -> Iterator[Result]:
        if not TRAIN_PYTHON.exists():
            print(
                f"skipped {name}: {TRAIN_PYTHON} does not exist; make test-train installs PyTorch",
                file=sys.stderr,
                flush=True,
            )
            return
        command = [str(TRAIN_PYTHON), "-m", "bench.lines", module]
        command.append(json.dumps(_sizes(work, sections)))
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield json.loads(line)
        if process.returncode != 0:
            raise SystemExit(f"{name} ended with status {process.returncode}")

    return part


def _tracker(work: Workload) -> Iterator[Result]:
    """Yield the figures of distinct ids, compared with torch too if it is installed."""
    module, section = "bench.checkpoint.unique", "jagged_unique"
    in_torch = _with_torch("tracker", module, section)
    yield from (in_torch if TRAIN_PYTHON.exists() else _here(module, section))(work)


Part = Callable[[Workload], Iterator[Result]]
PARTS: Final[tuple[tuple[str, Part], ...]] = (
    ("pull.inprocess", _inprocess),
    ("pull.tcp", _tcp),
    ("tls", _tls),
    ("pull.grpc", _here("bench.pull.grpc", "grpc")),
    ("pull.tcp.connections", _connections),
    ("gather", _gather),
    ("apply", _apply),
    ("apply.zipf", _updates),
    ("capacity.grow", _grow),
    ("capacity.sampling", _here("bench.capacity.sampling", "capacity")),
    ("capacity.hit_rate", _here("bench.capacity.hit_rate", "capacity")),
    ("peers", _peers),
    ("scale", _scale),
    ("cluster", _here("bench.scale.cluster", "cluster")),
    ("cluster.move", _here("bench.scale.moves", "cluster")),
    ("cluster.drain", _here("bench.scale.prediction", "cluster_drain")),
    ("index.search", _search),
    ("index.bucket_reads", _quality),
    ("memory", _memory),
    ("reopen", _reopen),
    ("reopen.first_pull", _here("bench.recovery.first_pull", "first_pull")),
    ("ingest", _here("bench.ingest.kafka", "ingest")),
    ("checkpoint", _checkpoint),
    ("checkpoint.loss", _with_torch("checkpoint.loss", "bench.checkpoint.loss", "loss")),
    ("codec", _codec),
    ("tracker", _tracker),
    ("staging", _here("bench.checkpoint.staging", "staging")),
    ("load", _with_torch("load", "bench.checkpoint.bulk", "load")),
    *(
        (name, _with_torch(name, f"bench.train.{module}", *sections))
        for name, module, *sections in (
            ("torch.embedding_bag", "bags", "embedding_bag"),
            ("train", "steps", "train"),
            ("train.sweep", "sweeps", "train", "train_sweep"),
            ("train.clustering", "clustering", "train", "train_clustering"),
            ("train.shaped", "shaped", "train", "train_shaped"),
            ("train.scale", "scale", "train", "train_scale"),
            ("train.stall", "stall", "train", "train_stall"),
            ("train.torchrec", "beside_torchrec", "train", "train_torchrec"),
        )
    ),
)


def show(results: list[Result], config: dict[str, Any]) -> None:
    """Print the results as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"petps {config['revision']} on {config['cpu']}, {config['processors']} processors"
    )
    longest = max((len(result["name"]) for result in results), default=0)
    table.add_column("name", min_width=longest)
    for column, justify in (("value", "right"), ("unit", "left"), ("ratio", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    table.add_column("target", justify="right")
    table.add_column("to", justify="left")
    for result in results:
        mark = {True: "[red]", False: "[green]", None: ""}[missed(result)]
        ratio = "" if result["ratio"] is None else f"{result['ratio']:.3f}"
        value = "skipped"
        if result["value"] is not None:
            digits = ",.0f" if result["value"] > 1000 else ".4g"
            value = format(result["value"], digits)
        table.add_row(
            result["name"],
            value,
            result["unit"],
            f"{mark}{ratio}",
            f"{mark}{bounds(result)}",
            result["ratio_to"] or "",
        )
    Console().print(table)


def parts_named(only: str) -> set[str]:
    """Return the names of the parts that a list such as ``pull,reopen`` selects; all if empty.

    A word selects the parts whose names begin with it, or else those whose names it begins with.
    """
    names: set[str] = set()
    for word in only.split(","):
        matches = {name for name, _ in PARTS if name.startswith(word)}
        matches = matches or {name for name, _ in PARTS if word.startswith(name)}
        if not matches:
            raise SystemExit(
                f"--only {word}: no such part; parts: {', '.join(name for name, _ in PARTS)}"
            )
        names |= matches
    return names


def _announce(left: list[str], earlier_seconds: dict[str, float], pace: float) -> None:
    """Say which part runs now, how many are left with it, and about how long they will take.

    earlier_seconds: what the parts took in the run before, in this folder. pace: how many times as
    long this run takes. The time is left out if a part that is left has not run before.
    """
    time_left = ""
    if all(part in earlier_seconds for part in left):
        minutes = pace * sum(earlier_seconds[part] for part in left) / 60
        time_left = f", about {max(1, round(minutes))} min"
    parts = "1 part" if len(left) == 1 else f"{len(left)} parts"
    print(f"running {left[0]} ... ({parts} left{time_left})", file=sys.stderr, flush=True)


def main() -> None:
    """Run the parts that --only selects, or all parts without it."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument(
        "--only", default="", help="parts, by comma: the beginnings of names, such as pull,reopen"
    )
    parser.add_argument(
        "--workload", default="full", help="a file of bench/workloads: full or smoke"
    )
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument(
        "--resume", action="store_true", help="continue the run in --output that was interrupted"
    )
    parser.add_argument(
        "--again",
        default="",
        help="parts of the run in --output to measure again, for example because the machine was "
        "busy; config.json counts it",
    )
    options = parser.parse_args()
    work = tomllib.loads((ROOT / "bench" / "workloads" / f"{options.workload}.toml").read_text())
    selected = parts_named(options.only)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    config = configuration(options.workload, work)
    record = Record(options.output, config, resume=options.resume or bool(options.again))
    if options.again:
        record.forget(again := parts_named(options.again))
        selected = again if not options.only else selected
    parts = [part for part in PARTS if part[0] in selected and not record.is_finished(part[0])]
    print(json.dumps(record.config), flush=True)
    earlier = record.config["earlier_seconds"]
    spent = expected = 0.0
    for number, (name, part) in enumerate(parts):
        pace = spent / expected if expected else 1.0
        _announce([part_left for part_left, _ in parts[number:]], earlier, pace)
        began = time.monotonic()
        for result in part(work):
            print(json.dumps(result), flush=True)
            record.add(name, result)
        seconds = time.monotonic() - began
        record.finish(name, seconds)
        if name in earlier:
            spent, expected = spent + seconds, expected + earlier[name]
    show(worst(record.results), record.config)


if __name__ == "__main__":
    main()
