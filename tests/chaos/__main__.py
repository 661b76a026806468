"""`python -m tests.chaos`: break a cluster for a while, and check what its clients saw."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from tests.chaos import check
from tests.chaos.faults import KINDS
from tests.chaos.fleet import check_programs
from tests.chaos.network import check_machine
from tests.chaos.run import Plan, Report, Run
from tests.chaos.tools import ROOT, NotAvailable
from tests.seed import SEED

QUICK_SECONDS: Final = 180.0
SECONDS: Final = 3600.0
QUICK_MOVE_SECONDS: Final = 15.0
MOVE_SECONDS: Final = 60.0
BROKEN: Final = ROOT / "tests" / "chaos" / "broken"
BROKEN_SECONDS: Final = 90.0
BROKEN_MOVE_SECONDS: Final = 1.0
BROKEN_SETTLE_SECONDS: Final = 5.0  # a cluster with a broken rule may never settle
# Replicas must be of different ages for a client to go back; the other rules need only moves.
KINDS_OF_BROKEN: Final = {"version_check": ("pause", "cut", "one-way", "kill")}
# A client that has seen the rows' version refuses a server that is older, so new ones must come.
CLIENT_SECONDS_OF_BROKEN: Final = {"early_switch": 0.2}
# The rules that the histories must show broken. Others may be broken too.
EXPECTED: Final = {
    "early_drop": {check.LOST_ROW},
    "early_switch": {check.LOST_ROW},
    "late_push": {check.NOT_LINEAR, check.LOST_PUSH},
    "lost_push": {check.NOT_LINEAR},
    "old_map": {check.LOST_ROW, check.OLD_ROW, check.FAILED},
    "version_check": {check.BACK},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print the report, and return 0 if no rule is broken; 2: this machine cannot run it."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three minutes, and many moves")
    parser.add_argument("--seconds", type=float, help="how long, in place of an hour")
    parser.add_argument("--kinds", default=",".join(KINDS), help="faults, separated by commas")
    parser.add_argument("--broken", help="break this rule of petps, or all: the run must find it")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "chaos")
    options = parser.parse_args(arguments)
    kinds = tuple(kind for kind in options.kinds.split(",") if kind)
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"--kinds: {sorted(unknown)} are unknown; choose from {', '.join(KINDS)}")
    known = sorted(path.parent.name for path in BROKEN.glob("*/sitecustomize.py"))
    rules = known if options.broken == "all" else [options.broken] if options.broken else []
    if unknown := set(rules) - set(known):
        parser.error(f"--broken: {sorted(unknown)} is unknown; choose from all, {', '.join(known)}")
    seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    plan = Plan(
        seed=SEED,
        seconds=seconds,
        move_seconds=QUICK_MOVE_SECONDS if options.quick else MOVE_SECONDS,
        kinds=kinds,
        folder=options.out.resolve(),
    )
    try:
        check_machine()
        check_programs()
        if not rules:
            return 1 if execute(plan).violations else 0
        results = [is_caught(plan, rule, options.seconds) for rule in rules]
    except NotAvailable as reason:
        print(f"chaos cannot run here: {reason}", file=sys.stderr)
        return 2
    return 0 if all(results) else 1


def execute(plan: Plan) -> Report:
    """Run a plan, and print its report."""
    shutil.rmtree(plan.folder, ignore_errors=True)
    plan.folder.mkdir(parents=True)
    where = os.path.relpath(plan.folder)
    print(f"PETPS_SEED={plan.seed}: {plan.seconds:g} s; histories are in {where}", flush=True)
    report = Run(plan).execute()
    print("\n".join(report.lines()))
    rules = sorted({violation.rule for violation in report.violations})
    print(f"{len(report.violations)} violations" + (f" of: {'; '.join(rules)}" if rules else ""))
    print(f"PETPS_SEED={plan.seed} repeats the schedule; {where}/violations.jsonl has all of them")
    return report


def is_caught(plan: Plan, rule: str, seconds: float | None) -> bool:
    """Run with a broken rule, and return whether the checks of histories found it."""
    broken = replace(
        plan,
        seconds=seconds or BROKEN_SECONDS,
        move_seconds=BROKEN_MOVE_SECONDS,
        folder=plan.folder / rule,
        kinds=KINDS_OF_BROKEN.get(rule, ()),
        broken=BROKEN / rule,
        only_moves=True,
        client_seconds=CLIENT_SECONDS_OF_BROKEN.get(rule, plan.client_seconds),
        settle_seconds=BROKEN_SETTLE_SECONDS,
    )
    print(f"---- with the rule {rule} broken", flush=True)
    rules = {violation.rule for violation in execute(broken).violations}
    expected = EXPECTED[rule]
    print(f"{rule}: {'caught' if rules & expected else 'NOT CAUGHT'}", flush=True)
    return bool(rules & expected)


def end(number: int, _: object) -> None:
    """End the run early: no processes, namespaces or disks are left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, end)  # what a shell starts in the background ignores it
    signal.signal(signal.SIGTERM, end)
    sys.exit(main())
