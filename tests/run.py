"""The test runner. It runs every check and suite, continues after a failure, and prints a summary.

`make test` calls it after `make build`. Each suite writes JUnit XML below build/tests. The summary
counts those files, never the output of a suite.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz import run as targets

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "tests"
SOURCES = ("native", "client", "bench", "tests")
PYTHON_FOLDERS = ("petps", "client", "docs", "examples", "bench", "tests")
# The limit of a suite. Each test has its own, much shorter limit (ctest, pytest-timeout).
SUITE_SECONDS_MAX = 7200
# Suites that `make test` leaves to targets of their own.
OWN_TARGETS = ("lab", "deploy", "train", "page", "upgrade", "chaos")
LAB_SECONDS_MAX = 7200  # the processors are emulated
# The limit of a test that trains: some start a dozen processes that import PyTorch, 10 s of a
# processor each, on machines of which some are three times as slow as others.
TRAIN_TEST_SECONDS_MAX = 900
CHAOS_CANNOT_RUN = 2  # exit status of tests.chaos on a machine that lacks what it needs
PYTEST_CLOSING = r"\d+ \w+.* in [\d.]+s"
# The suites that ThreadSanitizer runs: those with more than one thread.
TSAN_SUITES = (
    *("base", "epoch", "media", "index", "table"),
    *("transport", "server", "client", "contract", "stress"),
)
# Under the sanitizers, suites that count states or seconds are short, so that the suite fits into
# its time limit (see PETPS_TEST_SCALE in the tests that read it).
ASAN_SCALE = "0.02"
# In release the crash suite builds this part of its states, others with each seed: above 50,000 a
# run. `make crash` builds all.
CRASH_SCALE = "0.1"
# These tests check that the crash suite detects injected faults. Release runs them.
ASAN_WITHOUT = r"^crash\.Sites/"


@dataclass
class Outcome:
    """The result of one suite: counts, its own closing line, and the reasons of its skips."""

    name: str
    passed: int = 0
    failed: int = 0
    closing: str = ""
    seconds: float = 0.0
    skips: list[tuple[str, str]] = field(default_factory=list)  # reason, test
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Finished:
    """The exit status and the output lines of a command, and whether its time was over."""

    status: int
    lines: list[str]
    is_late: bool = False


def run(
    command: Sequence[str],
    environment: dict[str, str] | None = None,
    seconds_max: float = SUITE_SECONDS_MAX,
) -> Finished:
    """Run a command in the repository's root and print its output as it arrives.

    After `seconds_max` the command is killed with its process group: a descendant that keeps the
    output open would otherwise block this function.
    """
    print(f"$ {' '.join(command)}", flush=True)
    lines: list[str] = []
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            signal_group(process, signal.SIGKILL)

        alarm = threading.Timer(seconds_max, end)
        alarm.start()
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
                lines.append(line.rstrip())
            status = process.wait()
        except BaseException:  # Ctrl-C, which does not reach another session
            signal_group(process, signal.SIGINT)
            raise
        finally:
            alarm.cancel()
    return Finished(status, lines, is_late.is_set())


def signal_group(process: subprocess.Popen[str], number: signal.Signals) -> None:
    """Signal the process group that `process` leads, unless `process` has been waited for."""
    if process.returncode is None:  # until then its id cannot belong to another group
        os.killpg(process.pid, number)


def cxx_sources() -> list[str]:
    """Return the paths of all C++ files of the project, relative to its root."""
    return sorted(
        str(path.relative_to(ROOT))
        for folder in SOURCES
        for suffix in ("*.cc", "*.h")
        for path in (ROOT / folder).rglob(suffix)
    )


def lint() -> Outcome:
    """Run clang-format, ruff (check and format) and mypy; each counts as one test."""
    outcome = Outcome("lint")
    tools = Path(sys.executable).parent
    checks: dict[str, list[str]] = {
        "clang-format": ["clang-format-14", "--dry-run", "--Werror", *cxx_sources()],
        "ruff check": [str(tools / "ruff"), "check", *PYTHON_FOLDERS],
        "ruff format": [str(tools / "ruff"), "format", "--check", *PYTHON_FOLDERS],
        "mypy": [str(tools / "mypy")],
    }
    for name, command in checks.items():
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if process.returncode == 0:
            outcome.passed += 1
            print(f"{name}: ok", flush=True)
        else:
            outcome.failed += 1
            outcome.failures.append(name)
            print(f"{name}: failed\n{process.stdout[-8000:]}{process.stderr[-8000:]}", flush=True)
    outcome.closing = f"{outcome.passed} of {len(checks)} checks passed"
    return outcome


def read_junit(outcome: Outcome, path: Path) -> None:
    """Add the counts of a JUnit file to `outcome`. Do nothing if the file does not exist."""
    if not path.is_file():
        return
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        # ctest writes the same name into both fields, with GTest's dump of the parameter.
        own, group = (case.get(key, "").partition("  # ")[0] for key in ("name", "classname"))
        name = own if own == group else f"{group}::{own}"
        skipped = case.find("skipped")
        failure = case.find("failure")
        failure = case.find("error") if failure is None else failure
        if failure is not None:
            outcome.failed += 1
            outcome.failures.append(f"{name}: {failure_text(case, failure)}")
        elif skipped is not None or case.get("status") in ("notrun", "disabled"):
            reason = "" if skipped is None else (skipped.get("message") or "")
            outcome.skips.append((skip_reason(case, reason), name))
        else:
            outcome.passed += 1


def failure_text(case: ElementTree.Element, failure: ElementTree.Element) -> str:
    """Return the place and the reason of a failure in a few lines.

    pytest has them at the end of its text, GTest after the line "Failure".
    """
    text = failure.text or ""
    if text:
        excerpt = [line for line in text.splitlines() if line.startswith("E ")] or [text.strip()]
        excerpt.append(text.strip().splitlines()[-1])
    else:
        lines = (case.findtext("system-out") or "").splitlines()
        start = next(
            (n for n, line in enumerate(lines) if "Failure" in line), max(0, len(lines) - 8)
        )
        excerpt = lines[start : start + 8]
    return "\n    ".join([failure.get("message", "")[:500], *(line[:500] for line in excerpt[:8])])


def skip_reason(case: ElementTree.Element, message: str) -> str:
    """Return the reason of a skip: pytest has it in the message, GTest in its output."""
    output = case.findtext("system-out") or ""
    lines = output.splitlines()
    for number, line in enumerate(lines):
        if line.rstrip().endswith(": Skipped") and number + 1 < len(lines):
            return lines[number + 1].strip()
    return message.strip() or "no reason given"


def can_fix_addresses() -> bool:
    """Return whether setarch -R works here; some containers refuse it."""
    if shutil.which("setarch") is None:
        return False
    process = subprocess.run(["setarch", "-R", "true"], capture_output=True, check=False)
    return process.returncode == 0


def ctest(
    preset: str, jobs: int, suites: Sequence[str] = (), scale: str = "1", without: str = ""
) -> Outcome:
    """Build one preset's test programs and run them under ctest.

    Args:
        preset: the CMake preset.
        jobs: tests that run at the same time.
        suites: the suites to build and run; all if empty.
        scale: the PETPS_TEST_SCALE of the tests, unless the environment sets it. With "1", the
            crash suite has CRASH_SCALE.
        without: a pattern of the tests to leave out.
    """
    outcome = Outcome(f"ctest {preset}")
    configure = run(["cmake", "--preset", preset, "--log-level=WARNING"])
    compilers = min(jobs, os.cpu_count() or jobs)
    targets = [f"test_{suite}" for suite in suites] or ["petps_tests"]
    command = ["cmake", "--build", f"build/{preset}", "-j", str(compilers), "--target", *targets]
    build = run(command) if configure.status == 0 else configure
    if build.status != 0:
        outcome.failed = 1
        outcome.failures.append(f"build of preset {preset}")
        outcome.closing = "did not build"
        return outcome
    junit = RESULTS / f"ctest-{preset}.xml"
    command = ["ctest", "--test-dir", f"build/{preset}", "-j", str(jobs), "--output-on-failure"]
    command += ["--no-tests=error", "--output-junit", str(junit)]
    if suites:
        command += ["-L", f"^({'|'.join(suites)})$"]
    if without:
        command += ["-E", without]
    settings = {
        "ASAN_OPTIONS": "detect_stack_use_after_return=1:strict_string_checks=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
        "PETPS_SOAK_SECONDS": str(soak_seconds(preset)),
    }
    if "PETPS_TEST_SCALE" not in os.environ:
        settings |= {"PETPS_CRASH_SCALE": CRASH_SCALE}
        settings |= {"PETPS_TEST_SCALE": scale} if scale != "1" else {}
    # The sanitizers of gcc 12 cannot place their shadow memory if mappings are fully randomised.
    if preset in ("asan", "tsan") and can_fix_addresses():
        command = ["setarch", "-R", *command]
    finished = run(command, settings)
    read_junit(outcome, junit)
    close(outcome, finished, "tests passed")
    return outcome


def soak_seconds(preset: str) -> float:
    """Return the seconds of soak per gather mode, times PETPS_TEST_SCALE.

    ASan's run is longer, because it poisons freed slots.
    """
    seconds = 8.0 if preset == "asan" else 2.0
    return seconds * float(os.environ.get("PETPS_TEST_SCALE", "1"))


def run_pytest(
    name: str,
    arguments: Sequence[str],
    *,
    python: str = sys.executable,
    environment: dict[str, str] | None = None,
    seconds_max: float = SUITE_SECONDS_MAX,
) -> Outcome:
    """Run pytest, and count also the C++ suites that it ran in guests (tests/lab/conftest.py)."""
    outcome = Outcome(name)
    junit = RESULTS / f"{name}.xml"
    command = [python, "-m", "pytest", *arguments, f"--junitxml={junit}"]
    finished = run(command, environment, seconds_max)
    read_junit(outcome, junit)
    for guest_junit in sorted(RESULTS.glob("lab-*.xml")):
        read_junit(outcome, guest_junit)
        guest_junit.unlink()
    close(outcome, finished, PYTEST_CLOSING)
    return outcome


def files_of(folder: str, pattern: str) -> list[str]:
    """Return the matching test files of a folder, relative to the repository's root."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / folder).glob(pattern))


def in_parallel(jobs: int) -> list[str]:
    """Return pytest's arguments for test processes that run beside each other.

    A process that is killed at a test's timeout is not replaced: the others finish and the run
    fails. pytest-xdist would replace it and then, with groups, wait for ever.
    """
    return ["-n", str(jobs), "--dist", "loadgroup", "--max-worker-restart=0"]


def pytest(jobs: int) -> Outcome:
    """Run the Python suites."""
    return run_pytest("pytest", in_parallel(jobs))


def lab(jobs: int) -> Outcome:
    """Run the suites in guests with persistent memory and RDMA; not part of `make test`."""
    arguments = ["-n", str(jobs), "-v", *files_of("tests/lab", "lab_*.py")]
    return run_pytest("lab", arguments, seconds_max=LAB_SECONDS_MAX)


def deploy() -> Outcome:
    """Check deploy/ with all its tools: also build and run the image; not part of `make test`."""
    arguments = ["-v", *files_of("tests/deploy", "*_*.py")]
    arguments += ["--timeout=1800", "-o", "faulthandler_timeout=1790"]  # building the image
    return run_pytest("deploy", arguments, seconds_max=LAB_SECONDS_MAX)


def train(jobs: int) -> Outcome:
    """Run the suites that need PyTorch or Ray; not part of `make test`."""
    installed = run([str(ROOT / "deploy/bootstrap.sh"), "train"])
    if installed.status != 0:  # as for a missing broker, a skip that the summary shows
        closing = "PyTorch and Ray could not be installed"
        reason = installed.lines[-1] if installed.lines else closing
        return Outcome("train", closing=f"not run: {closing}", skips=[(reason, "all of it")])
    # These tests wait little, and their demos must keep up with a trainer: at most one test process
    # per processor.
    arguments = in_parallel(min(jobs, os.cpu_count() or jobs))
    # PyTorch and TorchRec warn when they are imported, which we cannot fix: hence -W ignore.
    arguments += ["-W", "ignore", f"--timeout={TRAIN_TEST_SECONDS_MAX}"]
    arguments += ["-o", f"faulthandler_timeout={TRAIN_TEST_SECONDS_MAX - 10}"]
    arguments += files_of("tests/train", "train_*.py")
    # PyTorch's own threads would only slow the other test process down.
    return run_pytest(
        "train",
        arguments,
        python=str(ROOT / ".venv-train/bin/python"),
        environment={"OMP_NUM_THREADS": "1", "PETPS_EQUAL_STEPS": "20"},
    )


def page(jobs: int) -> Outcome:
    """Run the suite of the status page in a browser; not part of `make test`."""
    installed = run([str(ROOT / "deploy/bootstrap.sh"), "page"])
    if installed.status != 0:
        closing = "Chromium, Playwright or axe-core could not be installed"
        reason = installed.lines[-1] if installed.lines else closing
        return Outcome("page", closing=f"not run: {closing}", skips=[(reason, "all of it")])
    arguments = files_of("tests/page", "page_*.py")
    return run_pytest("page", arguments, python=str(ROOT / ".venv-page/bin/python"))


def upgrade() -> Outcome:
    """Run this release together with the one before; not part of `make test`."""
    arguments = ["-v", *files_of("tests/upgrade", "upgrade_*.py")]
    arguments += ["--timeout=600", "-o", "faulthandler_timeout=590"]
    return run_pytest("upgrade", arguments)


def chaos() -> Outcome:
    """Break a cluster for three minutes (tests/chaos); not part of `make test`."""
    outcome = Outcome("chaos")
    finished = run([sys.executable, "-m", "tests.chaos", "--quick"])
    outcome.closing = finished.lines[-1] if finished.lines else "no output"
    if finished.status == CHAOS_CANNOT_RUN:
        outcome.skips = [(outcome.closing, "all of it")]
    elif finished.status == 0:
        outcome.passed = 1
    else:
        outcome.failed = 1
        outcome.failures = [line for line in finished.lines if line.startswith("BROKEN")]
    return outcome


def fuzz(jobs: int) -> Outcome:
    """Run each fuzz target on its seeds and on a fixed number of inputs."""
    outcome = Outcome("fuzz")
    if reason := targets.missing():
        outcome.skips = [(reason, target) for target in targets.TARGETS]
        outcome.closing = "not run: what it needs is not installed"
        return outcome
    for command in (
        ["cmake", "--preset", "fuzz", "--log-level=WARNING"],
        ["cmake", "--build", "build/fuzz", "-j", str(min(jobs, 2)), "--target", "petps_fuzz"],
    ):
        if run(command).status != 0:
            outcome.failed, outcome.closing = 1, "did not build"
            outcome.failures.append("build of preset fuzz")
            return outcome
    with ThreadPoolExecutor(min(jobs, 2)) as pool:
        results = list(pool.map(lambda target: targets.fuzz(target, short=True), targets.TARGETS))
    for result in results:
        print(f"{result.target}: {result.inputs} inputs in {result.seconds:.0f} s", flush=True)
        if result.finding:
            print(result.finding, flush=True)
            outcome.failed += 1
            outcome.failures.append(result.target)
        else:
            outcome.passed += 1
    outcome.closing = f"{outcome.passed} of {len(results)} targets without a finding"
    return outcome


def close(outcome: Outcome, finished: Finished, mark: str) -> None:
    """Set the suite's own closing line. Count an exit status that no failed test explains."""
    closing = [line for line in finished.lines if re.search(mark, line)]
    end = "killed: it ran too long" if finished.is_late else f"exit status {finished.status}"
    outcome.closing = closing[-1].strip(" =") if closing else end
    if finished.status != 0 and outcome.failed == 0:
        outcome.failed = 1
        outcome.failures.append(f"{outcome.name}: {end}")


def summarise(outcomes: Sequence[Outcome]) -> int:
    """Print skips, failures and closing lines, and the sum on the last line. Return the status."""
    print("\n---- summary ----")
    tests_of: dict[str, list[str]] = {}
    for outcome in outcomes:
        for reason, name in outcome.skips:
            tests_of.setdefault(reason, []).append(f"{outcome.name} {name}")
    skips = [
        f"{reason}: {len(names)}, {names[0]}{' ...' if names[1:] else ''}"
        for reason, names in tests_of.items()
    ]
    failures = [f"{outcome.name}: {name}" for outcome in outcomes for name in outcome.failures]
    for title, entries in (("skipped", skips), ("failed", failures)):
        if entries:
            print(f"{title}:")
            for entry in entries:
                print(f"  {entry}")
    for outcome in outcomes:
        print(f"{outcome.name}: {outcome.closing} ({outcome.seconds:.0f} s)")
    failed = sum(outcome.failed for outcome in outcomes)
    passed = sum(outcome.passed for outcome in outcomes)
    skipped = sum(len(outcome.skips) for outcome in outcomes)
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    return 1 if failed else 0


def main() -> int:
    """Run the suites of --only, or all except OWN_TARGETS."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="tests that run at the same time")
    parser.add_argument(
        "--only",
        default="",
        help=f"suites, separated by commas; default: all except {', '.join(OWN_TARGETS)}",
    )
    parser.add_argument("--rounds", type=int, default=1, help="how often to run the suites")
    arguments = parser.parse_args()
    jobs: int = arguments.jobs
    # Many rounds are for races. Suites that count states find none; `make test` runs them in full.
    release_scale = "1" if arguments.rounds == 1 else ASAN_SCALE
    suites: dict[str, Callable[[], Outcome]] = {
        "lint": lint,
        "release": lambda: ctest("release", jobs, scale=release_scale),
        "asan": lambda: ctest("asan", jobs, scale=ASAN_SCALE, without=ASAN_WITHOUT),
        "tsan": lambda: ctest("tsan", jobs, TSAN_SUITES, ASAN_SCALE),
        "pytest": lambda: pytest(jobs),
        "fuzz": lambda: fuzz(jobs),
        "lab": lambda: lab(jobs),
        "deploy": deploy,
        "train": lambda: train(jobs),
        "page": lambda: page(jobs),
        "upgrade": upgrade,
        "chaos": chaos,
    }
    ordinary = [name for name in suites if name not in OWN_TARGETS]
    names = arguments.only.split(",") if arguments.only else ordinary
    unknown = set(names) - set(suites)
    if unknown:
        parser.error(f"--only: unknown suites {sorted(unknown)}; choose from {', '.join(suites)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # run() then interrupts its command
    RESULTS.mkdir(parents=True, exist_ok=True)
    for earlier_result in RESULTS.glob("*.xml"):
        earlier_result.unlink()
    outcomes = []
    for number, name in itertools.product(range(1, arguments.rounds + 1), names):
        title = name if arguments.rounds == 1 else f"{name}, round {number}"
        print(f"\n==== {title} ====", flush=True)
        start = time.monotonic()
        outcome = suites[name]()
        outcome.name = title
        outcome.seconds = time.monotonic() - start
        outcomes.append(outcome)
    return summarise(outcomes)


if __name__ == "__main__":
    sys.exit(main())
