"""petps scrub: compare the rows of a pool with their checksums, and remove damaged ones."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated, Any

import typer

from petps.cli.options import AdministeredPool, JsonReport, ModelOption
from petps.cli.output import advancing, json_out, note, progress
from petps.cli.target import check_administered, open_pool
from petps.errors import DataLoss


def scrub(
    pool: AdministeredPool,
    table: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this table; by default all tables.")
    ] = None,
    model: ModelOption = None,
    unpaced: Annotated[
        bool,
        typer.Option(
            "--unpaced", help="Let a server read as fast as it can, at the cost of its pulls."
        ),
    ] = False,
    json_: JsonReport = False,
) -> None:
    """Compare all rows with their checksums now, and remove those that are damaged.

    A server does this by itself (\\[scrub] in its configuration). A removed row is never served
    again: its key is missing, and pulls get the default row. A server that follows a log restores
    it from a base or a checkpoint version, once one has the row; `petps status` shows what is
    missing. The keys are listed in POOL.damage, beside the pool. Rows of tables that pushes feed
    are to be pushed again.

    Without a server, this only removes and lists rows; the next server restores them. The exit code
    is 9 if rows were damaged. `petps verify` checks more, and changes nothing.

    [bold]Examples[/bold]

        petps scrub my.pool

        petps scrub my.pool --table items --model ranking@7 --unpaced
    """
    check_administered(pool)
    with closing(open_pool(pool)) as target, progress("scrubbing", None, quiet=json_) as advance:
        bars: dict[str, Any] = {}

        def show(name: str, done: int, buckets: int) -> bool:
            if name not in bars:
                bars[name] = advancing(advance)
            return bool(bars[name](done, buckets))

        reports = target.scrub(table or "", model=model, paced=not unpaced, progress=show, log=note)
    if json_:
        json_out({"pool": pool, "tables": reports})
    else:
        for report in reports:
            note(_text_of(report))
    damaged = sum(report["damaged"] + report["default_row_damaged"] for report in reports)
    if damaged:
        raise DataLoss(
            f"{pool} had {damaged:,} damaged rows: check the disk and the memory (dmesg), and see "
            "`petps status` for what is missing"
        )


def _text_of(report: dict[str, Any]) -> str:
    text = (
        f"{report['table']} of {report['instance']}: {report['rows']:,} rows read, "
        f"{report['damaged']:,} damaged, {report['removed']:,} removed, "
        f"{report['missing']:,} missing now"
    )
    return text + ("; its default row is damaged" if report["default_row_damaged"] else "")
