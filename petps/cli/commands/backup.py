"""petps backup."""

from __future__ import annotations

from typing import Annotated

import typer

from petps.cli.options import AdministeredPool, JsonReport, ModelOption
from petps.cli.output import bytes_text, json_out, note, progress
from petps.cli.target import check_administered, open_pool


def backup(
    pool: AdministeredPool,
    store: Annotated[
        str,
        typer.Argument(
            metavar="STORE",
            help="Where the backups are kept: a folder, or any URL that fsspec knows (s3://...). "
            "A server that has the pool open writes it, as its own user.",
        ),
    ],
    model: ModelOption = None,
    full: Annotated[
        bool, typer.Option("--full", help="Write all rows, even if an increment would do.")
    ] = False,
    json_: JsonReport = False,
) -> None:
    """Write a backup of a model, while pulls, pushes and deltas go on.

    The first backup of a store has all rows. The next ones have the rows that changed since. With
    deltas, a backup has each row exactly as of its positions in the log, and a pool restored from
    it (`petps restore`) follows the log from there. An interrupted backup leaves those before it.
    A server makes backups by itself with `[backup] store` and `every`.

    [bold]Examples[/bold]

        petps backup my.pool backups

        petps backup my.pool s3://models/ctr-backups
    """
    check_administered(pool)
    with open_pool(pool, read_only=True) as pool_handle:
        report = pool_handle.back_up(
            store,
            model=model,
            full=full,
            bar=lambda table, rows: progress(f"backing up {table}", rows, quiet=json_),
        )
    if json_:
        json_out(report)
        return
    why = f" because {report['why_full']}" if report["why_full"] else ""
    note(
        f"{report['store']}: backup {report['version']} of {report['instance']} "
        f"({report['kind']}{why}): {report['rows_written']:,} rows written, "
        f"{report['rows_deleted']:,} deleted, {bytes_text(report['bytes'])} in "
        f"{report['seconds']:.1f} s"
    )
    for warning in report["warnings"]:
        note(f"warning: {warning}")
