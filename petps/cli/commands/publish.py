"""petps publish."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from petps.cli.options import (
    LOG_HELP,
    AllowNotFinite,
    JsonReport,
    KafkaOption,
    KeyColumn,
    RowColumn,
    SignedKeys,
    TableName,
    kafka_options,
    parse_key,
)
from petps.cli.output import json_out, note, progress
from petps.cli.traced import traced
from petps.errors import InvalidArgument

DEFAULT_PARTITIONS: Final = 8  # as `petps create` gives a model

if TYPE_CHECKING:
    from petps.cli.sources import Source
    from petps.delta import DeltaLog, TableSchema
    from petps.publish import Publisher


def publish(
    log: Annotated[
        str,
        typer.Argument(metavar="LOG", help=f"The delta log: {LOG_HELP}. A new log is created."),
    ],
    table: TableName,
    source: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SOURCE...]", help="Files or folders of rows, as for `petps load`."
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="The model.")] = "default",
    dtype: Annotated[str, typer.Option(help="The table's dtype.")] = "f32",
    dim: Annotated[
        int | None, typer.Option(help="The table's dim; by default that of the files.")
    ] = None,
    delete: Annotated[list[str] | None, typer.Option(help="A key to delete. Repeatable.")] = None,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|URL",
            help="Begin with this base (`petps export`, `petps load --on ray`) instead of "
            "continuing the log. Servers read a URL only if it is their [ingest] store.",
        ),
    ] = None,
    instance: Annotated[
        str | None,
        typer.Option(
            help="With --base: servers load the base as the new instance MODEL@NAME and then "
            "switch to it. Without it they replace the rows of the instance that they serve."
        ),
    ] = None,
    partitions: Annotated[
        int | None,
        typer.Option(help="Partitions of a new log: as many as the model has. By default 8."),
    ] = None,
    kafka_option: KafkaOption = None,
    key_column: KeyColumn = None,
    row_column: RowColumn = None,
    allow_not_finite: AllowNotFinite = False,
    signed_keys: SignedKeys = False,
    json_: JsonReport = False,
) -> None:
    """Publish rows to a delta log as one version. Servers that follow the log apply them.

    The rows become a new run, which continues at the log's end. When the command returns, the rows
    are durable in the log, and servers can read them. The command does not know the servers'
    tables: if TABLE or its dim or dtype is not theirs, each server stops the partitions that have
    such rows.

    [bold]Examples[/bold]

        petps publish deltas/ items changed.npz

        petps publish deltas/ items --dim 64 --delete 17 --delete 18

        petps publish deltas/ items --dim 64 --base bases/monday

        petps publish deltas/ items --dim 64 --base bases/monday --instance default@monday

        petps publish kafka://127.0.0.1:9092/deltas items changed.npz --partitions 8
    """
    from petps.cli.sources import Columns, open_sources
    from petps.cli.sources.schema import schema_of
    from petps.delta import open_log

    if not source and not delete and base is None:
        raise InvalidArgument("nothing to publish: name files of rows, --delete KEY or --base")
    if instance is not None and base is None:
        raise InvalidArgument(
            "a new instance begins with a base: give --instance together with --base"
        )
    deleted_keys = [parse_key(text, signed=signed_keys) for text in delete or []]
    sources = open_sources(source or [], Columns(key_column, row_column, signed_keys), table)
    schema = schema_of(table, dtype, dim, sources)
    options = kafka_options(kafka_option)
    start = time.perf_counter()
    new_log = DEFAULT_PARTITIONS if partitions is None else partitions
    with closing(open_log(log, partitions=new_log, exact=False, options=options)) as delta_log:
        if partitions not in (None, delta_log.partitions):
            raise InvalidArgument(
                f"{delta_log.name} has {delta_log.partitions} partitions, not {partitions}; omit "
                "--partitions for a log that exists"
            )
        with traced("petps publish"):
            report = _publish(
                delta_log,
                model,
                schema,
                sources,
                deleted_keys,
                base,
                instance,
                allow_not_finite,
                json_,
            )
    report["log"] = log
    report["seconds"] = round(time.perf_counter() - start, 3)
    if json_:
        json_out(report)
        return
    note(
        f"{report['rows']:,} rows and {report['deletions']:,} deletions of {table} in {log}: "
        f"run {report['run']}, version {report['version']}"
    )


def _publish(
    log: DeltaLog,
    model: str,
    schema: TableSchema,
    sources: list[Source],
    deleted_keys: list[int],
    base: str | None,
    instance: str | None,
    allow_not_finite: bool,
    quiet: bool,
) -> dict[str, Any]:
    import numpy as np

    from petps.cli.sources import total_rows
    from petps.publish import Publisher, end_of

    position = end_of(log, model)
    publisher = Publisher(log, model, tables=[schema], allow_not_finite=allow_not_finite)
    if base is None:
        publisher.begin_continue(position)
    else:
        _begin_base(publisher, base, model, instance)
    rows = 0
    with progress(f"publishing {schema.name}", total_rows(sources), quiet=quiet) as advance:
        for source in sources:
            for keys, values in source.chunks():
                publisher.publish(schema.name, keys, values)
                rows += len(keys)
                advance(len(keys))
    if deleted_keys:
        deletions = np.array(deleted_keys, np.uint64)
        publisher.publish(schema.name, deletions, None, np.ones(len(deletions), np.bool_))
    version = publisher.commit() if rows or deleted_keys else publisher.version
    return {
        "model": model,
        "table": schema.name,
        "rows": rows,
        "deletions": len(deleted_keys),
        "run": publisher.run,
        "version": version,
    }


def _begin_base(publisher: Publisher, place: str, model: str, instance: str | None) -> None:
    from petps.checkpoint import Base, BaseFolder
    from petps.checkpoint.base import is_url

    is_remote = is_url(place)
    base = Base.open(place) if is_remote else BaseFolder(".").open(place)
    if base.model != model:
        raise InvalidArgument(f"{place} is a base of model '{base.model}', not '{model}'")
    version = base.version if base.version > publisher.version else publisher.version + 1
    location = place if is_remote else str(Path(place.removeprefix("file://")).resolve())
    publisher.begin_base(location, version=version, instance=instance)
