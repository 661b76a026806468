"""petps load."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from petps.cli.output import json_out, note, progress
from petps.cli.target import TARGET_HELP, Target, TargetTable, open_target
from petps.errors import InvalidArgument, ResourceExhausted

if TYPE_CHECKING:
    from petps.cli.sources import Source


def load(
    target: Annotated[str, typer.Argument(metavar="TARGET", help=TARGET_HELP)],
    table: Annotated[str, typer.Argument(metavar="TABLE", help="The table to fill.")],
    source: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE...",
            help="Files: .npz, a pair of .npy, .parquet, .arrow; folders: HPS's (key, "
            "emb_vector), a base of `petps export`, or a checkpoint store.",
        ),
    ],
    key_column: Annotated[str | None, typer.Option(help="Name of the keys in the file.")] = None,
    row_column: Annotated[str | None, typer.Option(help="Name of the rows in the file.")] = None,
    model: Annotated[str | None, typer.Option(help="Model, instance or alias.")] = None,
    version: Annotated[
        int | None, typer.Option(help="Of a checkpoint store; the newest, if left out.")
    ] = None,
    allow_not_finite: Annotated[
        bool, typer.Option("--allow-not-finite", help="Take rows with NaN or infinity.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Load rows from files into a table.

    Files are read in pieces, so memory stays small whatever their size. The last row of a repeated
    key wins. Rows loaded before an error stay loaded; loading them again changes nothing.

    [bold]Examples[/bold]

        petps load my.pool items rows.npz

        petps load my.pool items keys.npy rows.npy

        petps load my.pool items part-*.parquet --key-column id --row-column embedding

        petps load petps://127.0.0.1:7070 items 0_sparse_2000.model/

        petps load my.pool items checkpoints --version 120
    """
    from petps.cli.sources import Columns, open_sources

    sources = open_sources(source, Columns(key_column, row_column), table, version)
    opened = open_target(target, model=model, read_only=False)
    try:
        shape = opened.describe(table)
        for each in sources:
            _check_dim(each, shape)
        report = _load_all(opened, shape, sources, allow_not_finite, quiet=json_)
    finally:
        opened.close()
    if json_:
        json_out(report)
        return
    note(
        f"{report['rows']:,} rows into {table} in {report['seconds']:.1f} s "
        f"({report['rows_per_second']:,.0f} rows/s): {report['inserted']:,} new, "
        f"{report['updated']:,} replaced"
    )


def _check_dim(source: Source, table: TargetTable) -> None:
    if source.dim is not None and source.dim != table.dim:
        raise InvalidArgument(
            f"table '{table.name}' has dim {table.dim}, but {source.name} has rows of "
            f"dim {source.dim}"
        )


def _load_all(
    target: Target,
    table: TargetTable,
    sources: list[Source],
    allow_not_finite: bool,
    *,
    quiet: bool,
) -> dict[str, Any]:
    sizes = [source.rows for source in sources]
    total = None if None in sizes else sum(size for size in sizes if size is not None)
    counts = {"inserted": 0, "updated": 0}
    rows_read = 0
    begun = time.perf_counter()
    with progress(f"loading {table.name}", total, quiet=quiet) as advance:
        for source in sources:
            for keys, rows in source.chunks():
                if rows.shape[1] != table.dim:
                    raise InvalidArgument(
                        f"table '{table.name}' has dim {table.dim}, but {source.name} has rows of "
                        f"dim {rows.shape[1]}"
                    )
                try:
                    report = target.load(table.name, keys, rows, allow_not_finite)
                except ResourceExhausted as error:
                    raise ResourceExhausted(f"after {rows_read:,} rows: {error}") from None
                except InvalidArgument as error:
                    raise InvalidArgument(
                        f"{source.name}, rows from {rows_read:,} on: {error}"
                    ) from None
                for name in counts:
                    counts[name] += report[name]
                rows_read += len(keys)
                advance(len(keys))
    seconds = time.perf_counter() - begun
    return {
        "table": table.name,
        "sources": [source.name for source in sources],
        "rows": rows_read,
        **counts,
        "seconds": round(seconds, 3),
        "rows_per_second": round(rows_read / max(seconds, 1e-9), 1),
    }
