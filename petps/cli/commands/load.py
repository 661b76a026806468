"""petps load."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from petps.cli.commands.load_on_ray import Options, load_on_ray, parse_also
from petps.cli.commands.tend import HERE
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
            "stores may also be URLs that fsspec knows (s3://...). * and [...] are wildcards.",
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
    on: Annotated[
        str,
        typer.Option(
            metavar="here|ray[://HOST:PORT]",
            help="Where rows are read. With ray, a cluster reads Parquet files and writes a base: "
            "TARGET is a new store, a folder or URL, of which servers restore their part.",
        ),
    ] = HERE,
    also: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TABLE=SOURCE",
            help="With --on ray: files of another table, because a base has all tables of a "
            "model. Repeatable.",
        ),
    ] = None,
    partitions: Annotated[
        int | None, typer.Option(help="With --on ray: as many as the model has. By default 8.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="With --on ray: the tables' dtype. By default f32.")
    ] = None,
    dim: Annotated[
        int | None, typer.Option(help="With --on ray: the tables' dim, if files do not state it.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="With --on ray: tasks at a time. By default one for each processor."),
    ] = None,
    json_: JsonReport = False,
) -> None:
    """Load rows from files into a table.

    Files are read in pieces, so memory stays small whatever their size. The last row of a repeated
    key wins. Rows loaded before an error stay loaded; loading them again changes nothing.

    With --on ray, a load that fails or is interrupted leaves no base.

    [bold]Examples[/bold]

        petps load my.pool items rows.npz

        petps load my.pool items keys.npy rows.npy

        petps load my.pool items part-*.parquet --key-column id --row-column embedding

        petps load petps://127.0.0.1:7070 items 0_sparse_2000.model/

        petps load my.pool items checkpoints --version 120

        petps load my.pool items s3://models/ctr/checkpoints

        petps load my.pool items s3://models/ctr/rows.parquet --signed-keys

        petps load s3://models/ctr/base items 's3://models/ctr/*.parquet' --on ray://head:10001
    """
    columns = (key_column, row_column, signed_keys)
    if on != HERE:
        options = Options(partitions, dtype, dim, workers, allow_not_finite)
        sources_by_table = [(table, source), *map(parse_also, also or [])]
        load_on_ray(target, sources_by_table, model, on, columns, version, options, json_=json_)
        return
    for name, value in (
        ("--also", also),
        ("--partitions", partitions),
        ("--dtype", dtype),
        ("--dim", dim),
        ("--workers", workers),
    ):
        if value is not None:
            raise InvalidArgument(f"{name} is of a base that Ray writes: give --on ray too")
    from petps.cli.sources import Columns, open_sources
    from petps.cli.sources.base import check_dim

    sources = open_sources(source, Columns(*columns), table, version)
    with closing(open_target(target, model=model, read_only=False)) as handle:
        dim = handle.dim(table)
        for opened_source in sources:
            check_dim(opened_source, opened_source.dim, table, dim)
        report = _load_all(handle, table, dim, sources, allow_not_finite, quiet=json_)
    if json_:
        json_out(report)
        return
    note(
        f"{report['rows']:,} rows into {table} in {report['seconds']:.1f} s "
        f"({report['rows_per_second']:,.0f} rows/s): {report['inserted']:,} new, "
        f"{report['updated']:,} replaced"
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
    from petps.cli.sources.base import check_dim

    counts = {"inserted": 0, "updated": 0}
    rows_read = 0
    start = time.perf_counter()
    with progress(f"loading {table}", total_rows(sources), quiet=quiet) as advance:
        for source in sources:
            for keys, rows in source.chunks():
                check_dim(source, rows.shape[1], table, dim)
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
