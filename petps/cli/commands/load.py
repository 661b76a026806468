"""petps load."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from petps.cli.options import (
    AllowNotFinite,
    JsonReport,
    KeyColumn,
    ModelOption,
    RowColumn,
    SignedKeys,
    TableName,
    TargetName,
)
from petps.cli.output import json_out, note, progress
from petps.cli.target import Target, open_target
from petps.errors import InvalidArgument, ResourceExhausted

if TYPE_CHECKING:
    from petps.cli.sources import Source


def load(
    target: TargetName,
    table: TableName,
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Files: .npz, a pair of .npy, .parquet, .arrow; folders: HPS's (key, "
            "emb_vector), a base of `petps export`, or a checkpoint store. Files, bases and "
            "stores may also be URLs that fsspec knows (s3://...).",
        ),
    ],
    key_column: KeyColumn = None,
    row_column: RowColumn = None,
    model: ModelOption = None,
    version: Annotated[
        int | None, typer.Option(help="The version of a checkpoint store; by default the newest.")
    ] = None,
    allow_not_finite: AllowNotFinite = False,
    signed_keys: SignedKeys = False,
    json_: JsonReport = False,
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

        petps load my.pool items s3://models/ctr/checkpoints

        petps load my.pool items s3://models/ctr/rows.parquet --signed-keys
    """
    from petps.cli.sources import Columns, open_sources

    sources = open_sources(source, Columns(key_column, row_column, signed_keys), table, version)
    with closing(open_target(target, model=model, read_only=False)) as handle:
        dim = handle.dim(table)
        for opened_source in sources:
            _check_dim(opened_source, opened_source.dim, table, dim)
        report = _load_all(handle, table, dim, sources, allow_not_finite, quiet=json_)
    if json_:
        json_out(report)
        return
    note(
        f"{report['rows']:,} rows into {table} in {report['seconds']:.1f} s "
        f"({report['rows_per_second']:,.0f} rows/s): {report['inserted']:,} new, "
        f"{report['updated']:,} replaced"
    )


def _check_dim(source: Source, source_dim: int | None, table: str, dim: int) -> None:
    if source_dim not in (None, dim):
        raise InvalidArgument(
            f"table '{table}' has dim {dim}, but {source.name} has rows of dim {source_dim}"
        )


def _load_all(
    target: Target,
    table: str,
    dim: int,
    sources: list[Source],
    allow_not_finite: bool,
    *,
    quiet: bool,
) -> dict[str, Any]:
    from petps.cli.sources import total_rows

    counts = {"inserted": 0, "updated": 0}
    rows_read = 0
    start = time.perf_counter()
    with progress(f"loading {table}", total_rows(sources), quiet=quiet) as advance:
        for source in sources:
            for keys, rows in source.chunks():
                _check_dim(source, rows.shape[1], table, dim)
                try:
                    report = target.load(table, keys, rows, allow_not_finite)
                except ResourceExhausted as error:
                    raise ResourceExhausted(f"after {rows_read:,} rows: {error}") from None
                except InvalidArgument as error:
                    raise InvalidArgument(
                        f"{source.name}, after {rows_read:,} rows: {error}"
                    ) from None
                for name in counts:
                    counts[name] += report[name]
                rows_read += len(keys)
                advance(len(keys))
    seconds = time.perf_counter() - start
    return {
        "table": table,
        "sources": [source.name for source in sources],
        "rows": rows_read,
        **counts,
        "seconds": round(seconds, 3),
        "rows_per_second": round(rows_read / max(seconds, 1e-9), 1),
    }
