"""petps export."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from petps.cli.options import AdministeredPool, JsonReport, ModelOption
from petps.cli.output import bytes_text, json_out, note, progress
from petps.cli.target import check_administered, open_pool


def export(
    pool: AdministeredPool,
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="A new folder for the base, on the server's machine if it writes it.",
        ),
    ],
    model: ModelOption = None,
    json_: JsonReport = False,
) -> None:
    """Write all rows of a model as a base: a checkpoint store with one version.

    A base loads into another pool (`petps load`), begins a trainer's run, and lets servers catch up
    after a gap. An interrupted export leaves no base.

    [bold]Examples[/bold]

        petps export my.pool bases/monday

        petps load other.pool items bases/monday
    """
    check_administered(pool)
    start = time.perf_counter()
    with open_pool(pool, read_only=True) as pool_handle:
        report = pool_handle.export(
            folder,
            model=model,
            bar=lambda table, rows: progress(f"exporting {table}", rows, quiet=json_),
        )
    report["seconds"] = round(time.perf_counter() - start, 3)
    if json_:
        json_out(report)
        return
    rows = sum(table["rows"] for table in report["tables"])
    note(
        f"{folder}: {rows:,} rows of {len(report['tables'])} tables of {report['instance']}, "
        f"version {report['version']}, {bytes_text(report['bytes'])} in {report['seconds']:.1f} s"
    )
