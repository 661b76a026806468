"""petps verify."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from petps.admin.socket import is_admin_port
from petps.cli.options import AdministeredPool, JsonReport
from petps.cli.output import facts, json_out, note, waiting
from petps.cli.target import check_administered, open_pool
from petps.errors import DataLoss, InUse, ResourceExhausted


def verify(
    pool: AdministeredPool,
    accept: Annotated[
        bool,
        typer.Option(
            "--accept",
            help="Allow a clean pool that lost power to be served again. It forgets its progress.",
        ),
    ] = False,
    json_: JsonReport = False,
) -> None:
    """Read everything in a pool and check it: buckets, counters, headers, row checksums.

    A crash may leave stale tags, high counters and unreachable slots. They are no faults: the next
    server heals them. The exit code is 9 if there are faults.

    After a power loss, a pool with durability 'process' may hold rows of any age, and progress that
    is newer than its rows. With --accept a clean pool can be served again. Every partition that
    followed the log then waits for a base, from the checkpoint store or from a publisher. A pool
    with faults is never accepted, and --accept does not change it.

    [bold]Examples[/bold]

        petps verify my.pool

        petps verify my.pool --accept    (durability 'process', after a power loss)
    """
    from petps import _native

    _native.stop_on_lost_pool()
    start = time.perf_counter()
    with waiting(f"verifying {pool}", quiet=json_):
        report, lost_power = _check(pool, accept)
    is_accepted = accept and report["clean"] and lost_power
    waiting_partitions = 0
    fed_by_pushes: list[str] = []
    if is_accepted:
        # Only a clean close after a writable open marks the pool as whole again.
        tables = _native.Tables.open(str(pool), accept_lost_power=True)
        try:
            waiting_partitions = sum(
                progress.state in ("lost_power", "catching_up")
                for progress in tables.all_progress()
            )
            fed_by_pushes = sorted(
                {table.name for table in tables.tables() if table.record.feed == "push"}
            )
        finally:
            tables.close()
    seconds = time.perf_counter() - start
    if json_:
        json_out(
            {
                "pool": str(pool),
                **report,
                "lost_power": lost_power,
                "accepted": is_accepted,
                "partitions_waiting_for_a_base": waiting_partitions,
                "push_fed_tables": fed_by_pushes,
                "seconds": round(seconds, 3),
            }
        )
    else:
        facts(
            [
                ("rows", report["rows"]),
                ("buckets", report["buckets"]),
                ("stale tags", f"{report['stale_tags']:,} (healed when served)"),
                ("high counters", f"{report['high_counters']:,} (harmless)"),
                (
                    "slots without a row",
                    f"{report['unreachable_slots']:,} (free, damaged, or freed when served)",
                ),
                ("faults", report["problem_count"]),
            ]
        )
        for problem in report["problems"]:
            note(f"fault: {problem}")
    if not report["complete"]:
        raise ResourceExhausted(f"{pool} could not be checked: {'; '.join(report['problems'])}")
    if not report["clean"]:
        raise DataLoss(
            f"{pool} has {report['problem_count']:,} faults: rebuild it from a base "
            "(petps create, petps load) or from a copy"
        )
    if json_:
        return
    note(f"{pool}: clean, {report['rows']:,} rows checked in {seconds:.1f} s")
    if is_accepted:
        _note_accepted(waiting_partitions, fed_by_pushes)
    elif lost_power:
        note(
            "it lost power with durability 'process': each row was written for its key, but may be "
            "older than the last acknowledged one; `petps verify --accept` takes it back into "
            "service"
        )


def _check(pool: str, accept: bool) -> tuple[dict[str, Any], bool]:
    """Return the report as a dict, and whether the pool lost power."""
    from petps import _native

    check_administered(pool)
    try:
        if is_admin_port(pool):
            raise InUse
        tables = _native.Tables.open(pool, read_only=True, allow_lost_power=True)
    except InUse:
        if accept:
            raise InUse(
                f"{pool} is in use by another process, so it need not be accepted: leave out "
                "--accept"
            ) from None
        with open_pool(pool, read_only=True) as server:
            report = server.verify()
            return report if isinstance(report, dict) else report.as_dict(), False
    try:
        return tables.verify().as_dict(), tables.info().lost_power
    finally:
        tables.close()


def _note_accepted(waiting_partitions: int, fed_by_pushes: list[str]) -> None:
    note("it lost power and is accepted: it can be served again")
    if waiting_partitions:
        note(
            f"{waiting_partitions:,} partitions have no progress and wait for a base: serve the "
            "pool with the checkpoint store configured, or publish a base; until then `petps "
            "status` shows them as stale, and they serve rows of any age"
        )
    if fed_by_pushes:
        note(
            f"tables fed by pushes: {', '.join(fed_by_pushes)}: pushes since the last clean close "
            "may be missing, and deleted keys may be back; repeat these pushes and deletions"
        )
