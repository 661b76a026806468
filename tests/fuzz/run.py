"""Runs the fuzz targets one after the other (`make fuzz`), and prints a line for each.

A corpus grows in build/fuzz-corpus; inputs of findings are written to build/fuzz-findings. Run such
an input again with `build/fuzz/fuzz_NAME INPUT` or `python -m tests.fuzz.drive NAME INPUT`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.fuzz.seeds import CXX_TARGETS, PYTHON_TARGETS, ROOT, write

TARGETS: Final = (*CXX_TARGETS, *PYTHON_TARGETS)
CORPUS: Final = ROOT / "build" / "fuzz-corpus"
FINDINGS: Final = ROOT / "build" / "fuzz-findings"
PYTHON: Final = ROOT / ".venv-fuzz/bin/python"
# A slower input is a hang; the slowest takes less than a second.
INPUT_SECONDS_MAX: Final = 60
MEMORY_MIB_MAX: Final = 3072
LENGTH_MAX: Final = {"wire": 70_000, "pool": 2 + 16 * 24, "tls": 4096, "stores": 4096}
# Inputs beside the seeds in a short run: a second or two for each target.
SHORT_RUNS: Final = {
    "wire": 20_000, "codec": 2_000, "pool": 100, "tls": 500, "records": 2_000, "stores": 200,
    "texts": 1_000, "requests": 2_000,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one target. finding: the end of its output, or ""."""

    target: str
    inputs: int
    seconds: float
    finding: str


def command_of(target: str) -> list[str]:
    """Return the command of a target, without options."""
    if target in CXX_TARGETS:
        return [str(ROOT / f"build/fuzz/fuzz_{target}")]
    return [str(PYTHON), "-m", "tests.fuzz.drive", target]


def missing() -> str:
    """Return why the targets cannot run here, or ""."""
    if shutil.which("clang++-16") is None or not PYTHON.is_file():
        return "clang++-16 or .venv-fuzz is missing: deploy/bootstrap.sh fuzz"
    return ""


def fuzz(target: str, *, seconds: int = 0, short: bool = False) -> Result:
    """Run a target for a time, or, if ``short``, on its seeds and a fixed number of inputs."""
    FINDINGS.mkdir(parents=True, exist_ok=True)
    options = [
        f"-timeout={INPUT_SECONDS_MAX}",
        f"-rss_limit_mb={MEMORY_MIB_MAX}",
        f"-max_len={LENGTH_MAX.get(target, 8192)}",
        f"-artifact_prefix={FINDINGS}/{target}-",
        "-print_final_stats=1",
        "-len_control=0",  # inputs with several edits would otherwise come late
    ]
    with tempfile.TemporaryDirectory(prefix="petps-fuzz-") as scratch:
        seeds = write(Path(scratch), target)
        if short:
            options += ["-seed=1", f"-runs={SHORT_RUNS[target] + len(list(seeds.iterdir()))}"]
            folders = [seeds]
        else:
            options += [f"-max_total_time={seconds}"]
            folders = [CORPUS / target, seeds]
            folders[0].mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        process = subprocess.run(
            [*command_of(target), *options, *map(str, folders)],
            cwd=ROOT,
            env={
                "ASAN_SYMBOLIZER_PATH": shutil.which("llvm-symbolizer-16") or "",
                **os.environ,
                "ASAN_OPTIONS": "detect_stack_use_after_return=1:allocator_may_return_null=1",
                "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    output = process.stdout
    count = re.search(r"number_of_executed_units: +(\d+)|Done (\d+) runs", output)
    inputs = int(count[1] or count[2]) if count else 0
    finding = "" if process.returncode == 0 else "\n".join(output.splitlines()[-60:])
    return Result(target, inputs, time.monotonic() - began, finding)


def main() -> int:
    """Run the targets of --only, or all. Return 1 if one has a finding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="targets, separated by commas; default: all")
    parser.add_argument("--seconds", type=int, default=510, help="for each target")
    parser.add_argument("--short", action="store_true", help="seeds and a fixed number of inputs")
    arguments = parser.parse_args()
    targets = arguments.only.split(",") if arguments.only else TARGETS
    if unknown := set(targets) - set(TARGETS):
        parser.error(f"--only: unknown targets {sorted(unknown)}; choose from {', '.join(TARGETS)}")
    if reason := missing():
        print(reason)
        return 1
    status = 0
    for target in targets:
        result = fuzz(target, seconds=arguments.seconds, short=arguments.short)
        verdict = "a finding" if result.finding else "no finding"
        print(f"{target}: {result.inputs} inputs in {result.seconds:.0f} s, {verdict}", flush=True)
        if result.finding:
            print(result.finding, flush=True)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
