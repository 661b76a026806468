"""petps verify."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from petps.cli.output import facts, json_out, note, waiting
from petps.errors import DataLoss


def verify(
    pool: Annotated[
        Path, typer.Argument(metavar="POOL", help="The pool; no server may have it open.")
    ],
    accept: Annotated[
        bool,
        typer.Option(
            "--accept",
            help="If it is clean, take a pool that lost power back into service.",
        ),
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Read everything in a pool and check it: buckets, counters, headers, row checksums.

    Stale tags, high counters and unreachable slots are what a crash may leave; the next server
    heals them, and they are no faults. Exits with 9 when there are faults.

    [bold]Examples[/bold]

        petps verify my.pool

        petps verify my.pool --accept    (durability 'process', after a power loss)
    """
    from petps import _native

    _native.stop_on_lost_pool()
    begun = time.perf_counter()
    with waiting(f"verifying {pool}", quiet=json_):
        tables = _native.Tables.open(str(pool), read_only=True, allow_lost_power=True)
        try:
            lost_power = tables.info().lost_power
            report = tables.verify()
        finally:
            tables.close()
    accepted = accept and report.clean and lost_power
    if accepted:
        # The writer's clean close is what says that the pool is whole again.
        _native.Tables.open(str(pool), allow_lost_power=True).close()
    seconds = time.perf_counter() - begun
    if json_:
        json_out(
            {
                "pool": str(pool),
                **report.as_dict(),
                "lost_power": lost_power,
                "accepted": accepted,
                "seconds": round(seconds, 3),
            }
        )
    else:
        facts(
            [
                ("rows", report.rows),
                ("buckets", report.buckets),
                ("stale tags", f"{report.stale_tags:,} (healed when served)"),
                ("high counters", f"{report.high_counters:,} (harmless)"),
                (
                    "slots without a row",
                    f"{report.unreachable_slots:,} (free, or freed when served)",
                ),
                ("faults", report.problem_count),
            ]
        )
        for problem in report.problems:
            note(f"fault: {problem}")
    if not report.clean:
        raise DataLoss(
            f"{pool} has {report.problem_count:,} faults: rebuild it from a base "
            "(petps create, petps load) or from a copy"
        )
    if json_:
        return
    note(f"{pool}: clean, {report.rows:,} rows checked in {seconds:.1f} s")
    if lost_power:
        note(
            "it lost power and is accepted: it can be served again"
            if accepted
            else "it lost power; `petps verify --accept` takes it back into service as it is: "
            "pushes of its last seconds may be missing"
        )
