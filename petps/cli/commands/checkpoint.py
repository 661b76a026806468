"""petps checkpoint: the versions of a checkpoint store."""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from petps.cli.commands.tend import HERE, executor_of, tend
from petps.cli.output import bytes_text, facts, json_out, note, progress, table, waiting
from petps.errors import DataLoss, FailedPrecondition, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from petps.checkpoint import Rows, Store
    from petps.checkpoint.chunk import Bytes, Keys
    from petps.checkpoint.state import Lineage
    from petps.delta import TableSchema

app = typer.Typer(
    no_args_is_help=True,
    help="Show, restore, merge and delete the versions of a checkpoint store.",
    rich_markup_mode="rich",
)

_STORE = Annotated[
    str, typer.Argument(metavar="STORE", help="A folder, or any URL that fsspec knows (s3://...).")
]
_VERSION = Annotated[
    int, typer.Argument(metavar="VERSION", help="A version that `petps checkpoint list` shows.")
]
_JSON = Annotated[bool, typer.Option("--json", help="Report as JSON.")]
app.command()(tend)


def _open(url: str) -> Store:
    from petps.checkpoint import Store

    return Store.open(url)


@app.command("list")
def list_(store: _STORE, json_: _JSON = False) -> None:
    """List the versions, with their kind, time and size.

    [bold]Examples[/bold]

        petps checkpoint list checkpoints
    """
    from petps.checkpoint.shares import list_pending_shares

    checkpoint_store = _open(store)
    entries: list[dict[str, Any]] = [
        {
            "version": record.version,
            "kind": record.kind,
            "line": lineage.base_version,
            "created": _time_text(record.created_ns),
            "rows": record.rows,
            "bytes": record.bytes,
            "kept": record.kept,
            "parts": sorted(record.parts),
        }
        for lineage in checkpoint_store.state.lineages
        for record in lineage.versions
    ]
    pending = list_pending_shares(checkpoint_store)
    if json_:
        unfinished = [
            {"version": version, "written": ranks, "ranks": count}
            for version, (ranks, count) in pending.items()
        ]
        json_out(
            {"model": checkpoint_store.state.model, "versions": entries, "unfinished": unfinished}
        )
        return
    table(
        ("version", "written as", "from base", "created", "rows", "bytes", "kept", "parts"),
        [
            (
                entry["version"],
                entry["kind"],
                entry["line"],
                entry["created"],
                entry["rows"],
                bytes_text(entry["bytes"]),
                entry["kept"],
                ", ".join(entry["parts"]),
            )
            for entry in entries
        ],
        title=f"model {checkpoint_store.state.model}",
    )
    for version, (ranks, count) in pending.items():
        note(f"version {version} is incomplete: {len(ranks)} of {count} ranks have written")


def _time_text(ns: int) -> str:
    return datetime.datetime.fromtimestamp(ns / 1e9, datetime.timezone.utc).strftime(
        "%Y-%m-%d %H:%M:%S"
    )


@app.command()
def show(
    store: _STORE,
    version: Annotated[
        int | None, typer.Argument(metavar="[VERSION]", help="Show only this version.")
    ] = None,
    graph: Annotated[
        bool, typer.Option("--graph", help="Draw which versions each chunk belongs to.")
    ] = False,
    json_: _JSON = False,
) -> None:
    """Show the content of a store, or what the restore of one version reads.

    "quantised" lists, for each column, the method and bits, and the bins and ratio that sampling
    rows with that seed chose. "restores" counts how often a training has resumed (restore
    --resume).

    With --graph the command draws each lineage. A chunk has a row, a version has a column, and a
    bar covers the versions that the chunk belongs to. A version consists of the chunks whose bars
    cross its column. A k above a column marks a version that `keep` protects from `purge`.

    [bold]Examples[/bold]

        petps checkpoint show checkpoints

        petps checkpoint show checkpoints 120

        petps checkpoint show checkpoints --graph
    """
    checkpoint_store = _open(store)
    report = _facts(checkpoint_store, version)
    if json_:
        json_out(report)
        return
    facts([(name, value) for name, value in report.items() if not isinstance(value, dict)])
    if graph:
        lineages = (
            checkpoint_store.state.lineages
            if version is None
            else [checkpoint_store.state.lineage_of(version)]
        )
        for lineage in lineages:
            typer.echo("")
            for text in _graph(lineage, active=lineage is checkpoint_store.state.lineage):
                typer.echo(text)


def _facts(store: Store, version: int | None) -> dict[str, Any]:
    from petps.checkpoint.quantise import describe

    state = store.state
    if version is None:
        return {
            "model": state.model,
            "tables": ", ".join(state.tables),
            "state": state.number,
            "lines": len(state.lineages),
            "versions": len(state.versions()),
            "chunks": sum(len(lineage.chunks) for lineage in state.lineages),
            "bytes": bytes_text(store.stored_bytes()),
            "expected restores": (
                "rows are kept whole"
                if state.quantising is None
                else f"{state.quantising.expected_restores:g}, seed {state.quantising.seed}"
            ),
            "restores": state.restores,
            "quantised": "; ".join(describe(state.lineage.tables)) if state.lineages else "",
        }
    lineage = state.lineage_of(version)
    chunks = lineage.chunks_of(version)
    delta_chunks = [chunk for chunk in chunks if chunk.layer > 0]
    return {
        "version": version,
        "base": lineage.base_version,
        "chunks": len(chunks),
        "files": len({chunk.file for chunk in chunks}),
        "bytes": bytes_text(sum(chunk.length for chunk in chunks)),
        "rows above the base": sum(chunk.rows for chunk in delta_chunks),
        "bytes above the base": bytes_text(sum(chunk.length for chunk in delta_chunks)),
        "quantised": "; ".join(describe(lineage.tables)),
    }


def _graph(lineage: Lineage, *, active: bool) -> list[str]:
    """Draw one row for each chunk: # under the versions of its span; kept versions have a k."""
    versions = [record.version for record in lineage.versions]
    heading = f"lineage of base {lineage.base_version}, versions {versions[0]} to {versions[-1]}"
    drawing = [f"{heading}: active, the next version continues it" if active else heading]
    if any(record.kept for record in lineage.versions):
        marks = "".join("k" if record.kept else " " for record in lineage.versions)
        drawing.append(f"{marks}  kept: purge does not delete them")
    for chunk in sorted(
        lineage.chunks, key=lambda chunk: (chunk.table, chunk.layer > 0, chunk.first, chunk.end)
    ):
        bar = "".join("#" if chunk.holds(version) else "." for version in versions)
        kind = "base" if chunk.layer == 0 else f"layer {chunk.layer}"
        drawing.append(
            f"{bar}  {chunk.table} {kind}, written at {chunk.first}: {chunk.rows:,} rows"
        )
    return drawing


@app.command()
def verify(store: _STORE, json_: _JSON = False) -> None:
    """Read a whole store and check it against its checksums.

    [bold]Examples[/bold]

        petps checkpoint verify checkpoints
    """
    checkpoint_store = _open(store)
    with waiting("reading every chunk", quiet=json_):
        problems = checkpoint_store.verify()
    versions = len(checkpoint_store.state.versions())
    if json_:
        json_out({"clean": not problems, "problems": problems, "versions": versions})
    else:
        for problem in problems:
            note(problem)
        note(f"{versions} versions, {len(problems)} problems")
    if problems:
        raise DataLoss(f"{store} is damaged: {len(problems)} problems")


@app.command()
def restore(
    store: _STORE,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder for the base.")],
    version: Annotated[int | None, typer.Option(help="The newest, if left out.")] = None,
    partitions: Annotated[int, typer.Option(help="Of the model that will load it.")] = 8,
    resume: Annotated[
        bool, typer.Option("--resume", help="Count the restore: a training continues from it.")
    ] = False,
    json_: _JSON = False,
) -> None:
    """Write a version's rows as a base, for `petps load` and a server's catch-up.

    A training that continues from quantised rows inherits their error. With --resume the restore is
    counted. Once the training has resumed more often than `write --expected-restores` said, the
    next version is a base of 8 bits. A restore only to inspect or serve rows needs no --resume.

    [bold]Examples[/bold]

        petps checkpoint restore checkpoints bases/v120 --version 120

        petps load my.pool items bases/v120
    """
    from petps.checkpoint import BaseInfo, write_base
    from petps.checkpoint.base import check_is_new, served_column
    from petps.delta import TableSchema

    checkpoint_store = _open(store)
    state = checkpoint_store.state
    chosen_version = state.newest_version if version is None else version
    state.lineage_of(chosen_version)
    check_is_new(folder)
    if resume:
        checkpoint_store.count_restore()
    tables = {}
    for name, description in state.tables.items():
        # A table serves no quantised rows: convert them to the trainer's dtype.
        column = served_column(description.columns[0])
        schema = TableSchema(name, column.dtype, column.dim)
        tables[schema] = _read(checkpoint_store, chosen_version, schema, partitions, quiet=json_)
    info = BaseInfo(instance=state.model, version=chosen_version, partitions=partitions)
    counts = write_base(folder, state.model, info, tables)
    if json_:
        json_out({"version": chosen_version, "folder": str(folder), "rows": counts})
        return
    note(
        f"{folder}: version {chosen_version}, "
        + ", ".join(f"{count:,} rows of {name}" for name, count in counts.items())
    )


def _read(
    store: Store, version: int, schema: TableSchema, partitions: int, *, quiet: bool
) -> Generator[Rows]:
    """Yield the rows of a table as write_base() takes them."""
    from petps.checkpoint.base import convert, served_column, split_by_partition

    stored = store.tables_of(version)[schema.name].columns[0]
    column = served_column(stored, schema.dtype)
    rows = store.restore(version, [schema.name])[schema.name]

    def rows_of(keys: Keys) -> tuple[Bytes, None]:
        return convert(
            stored, rows.columns[stored.name][rows.keys.searchsorted(keys)], column
        ), None

    with progress(f"restoring {schema.name}", len(rows), quiet=quiet) as advance:
        yield from split_by_partition(schema, rows.keys, rows_of, partitions, progress=advance)


@app.command()
def write(
    store: _STORE,
    base: Annotated[Path, typer.Argument(metavar="BASE", help="A folder of `petps export`.")],
    version: Annotated[
        int | None,
        typer.Option(
            help="By default the base's own, or the store's next one if its pool followed no log."
        ),
    ] = None,
    expected_restores: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            help="Quantise for a training that resumes N times: up to 1, 3 and 20 have 2, 3 and 4 "
            "bits, more has 8. Rows are not quantised if no write gave it.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Which rows are sampled to choose parameters.")] = 0,
    json_: _JSON = False,
) -> None:
    """Write a base as a version; create the store if it does not exist.

    Trainers write versions through petps.checkpoint.Checkpointer; this command begins a store
    without a trainer.

    With --expected-restores rows are quantised from this version on. Rows of 4 bits or fewer use an
    adaptive search whose bins and ratio are chosen by sampling the rows; rows of 8 bits are
    asymmetric. A training that resumes more often than expected (`restore --resume`) continues with
    8 bits. `petps checkpoint show` shows what was chosen, and how often the training resumed.

    [bold]Examples[/bold]

        petps export my.pool bases/monday

        petps checkpoint write checkpoints bases/monday

        petps checkpoint write checkpoints bases/monday --expected-restores 3
    """
    from petps.checkpoint import POLICIES, Base, Checkpointer, Quantising, Rows, Store, Table
    from petps.checkpoint.chunk import lay_over
    from petps.checkpoint.quantise import describe
    from petps.errors import NotFound

    quantising = None if expected_restores is None else Quantising(expected_restores, seed)

    source = Base.open(base)
    tables = {
        schema.name: Table.of(schema.name, schema.dim, schema.dtype)
        for schema in source.schemas().values()
    }
    try:
        checkpoint_store = Store.open(store)
    except NotFound:
        checkpoint_store = Store.create(store, source.model, list(tables.values()), quantising)
    if (
        dict(checkpoint_store.state.tables) != tables
        or checkpoint_store.state.model != source.model
    ):
        raise InvalidArgument(f"{base} has other tables than {store}")
    rows = {}
    for name, description in tables.items():
        pieces = [
            Rows.of(description, keys, {"row": values}) for keys, values in source.chunks(name)
        ]
        rows[name] = lay_over(description, pieces, keep_deleted=True)
    if quantising is not None and checkpoint_store.state.quantising != quantising:
        checkpoint_store.expect(quantising)
    writer = Checkpointer(checkpoint_store, POLICIES["full"](), _BaseRows(rows))
    if version is None:
        versions = checkpoint_store.state.versions()
        version = source.version or (versions[-1].version if versions else 0) + 1
    record = writer.write(version)
    descriptions = describe(checkpoint_store.tables_of(record.version))
    if json_:
        report = {"version": record.version, "rows": record.rows, "bytes": record.bytes}
        json_out({**report, "quantised": descriptions})
        return
    note(f"{store}: version {record.version}, {record.rows:,} rows, {bytes_text(record.bytes)}")
    for text in descriptions:
        note(text)


class _BaseRows:
    """Rows by table, in the form that a Checkpointer requests."""

    def __init__(self, rows: Mapping[str, Rows]) -> None:
        self._rows = rows

    def keys(self, table: str, since: int | None) -> Keys:
        del since  # each version is a base
        return self._rows[table].keys

    def rows(self, table: str, keys: Keys) -> tuple[Mapping[str, Bytes], None]:
        table_rows = self._rows[table]
        positions = table_rows.keys.searchsorted(keys)
        return {name: values[positions] for name, values in table_rows.columns.items()}, None


@app.command()
def merge(
    store: _STORE,
    stride: Annotated[int, typer.Option(help="How many deltas become one.")] = 2,
    on: Annotated[
        str,
        typer.Option(
            metavar="here|ray[://HOST:PORT]",
            help="Where to merge. here: in this process. ray: on the Ray cluster that RAY_ADDRESS "
            "names, or else on this machine's processors. ray://HOST:PORT: on that Ray cluster.",
        ),
    ] = HERE,
    json_: _JSON = False,
) -> None:
    """Merge deltas of the newest lineage in layers, so a restore reads less. No version changes.

    A trainer may write the store at the same time: the slower of two writers makes its change
    again, or is refused. With --on ray (pip install petps[ray], here and on the cluster) several
    merges run at once, in Ray tasks that read and write the store directly. If a merge fails, its
    deltas stay unmerged and the other merges continue.

    [bold]Examples[/bold]

        petps checkpoint merge checkpoints --stride 4

        petps checkpoint merge s3://models/ctr --on ray://head:10001
    """
    from petps.checkpoint.merge import count_merges
    from petps.checkpoint.policy import Merged

    if stride < 2:
        raise InvalidArgument(f"--stride must be at least 2, got {stride}")
    checkpoint_store = _open(store)
    deltas_before = len(checkpoint_store.state.lineage.open_delta_chunks())
    merge_count = count_merges(checkpoint_store.state.lineage, stride)
    with executor_of(on) as executor, progress("merging", merge_count, quiet=json_) as advance:
        Merged(stride=stride, executor=executor).arrange_all(checkpoint_store, lambda: advance(1))
    deltas_after = len(checkpoint_store.state.lineage.open_delta_chunks())
    if json_:
        json_out(
            {"deltas_before": deltas_before, "deltas_after": deltas_after, "merges": merge_count}
        )
        return
    note(f"{store}: {deltas_before} deltas are now {deltas_after}")


@app.command()
def purge(
    store: _STORE,
    newest: Annotated[
        int | None, typer.Option(help="How many of the newest versions to keep.")
    ] = None,
    keep_rules: Annotated[
        str | None,
        typer.Option(
            "--keep",
            metavar="RULE=TIME,...",
            help="How long versions are kept (`petps checkpoint tend`).",
        ),
    ] = None,
    json_: _JSON = False,
) -> None:
    """Delete versions, except the newest and those marked by `keep`.

    The remaining versions lose nothing that they need. The command also deletes files that crashes
    left.

    [bold]Examples[/bold]

        petps checkpoint purge checkpoints --newest 24

        petps checkpoint purge checkpoints --keep all=1h,hourly=1d,daily=30d
    """
    from petps.checkpoint.retention import Retention

    checkpoint_store = _open(store)
    if (newest is None) == (keep_rules is None):
        raise InvalidArgument("give either --newest or --keep")
    if keep_rules is not None:
        retention = Retention.parse(keep_rules)
        versions = retention.choose(checkpoint_store.state.versions(), time.time_ns())
        dropped_versions = checkpoint_store.drop_all_but(versions)
    else:
        dropped_versions = checkpoint_store.purge(newest or 0)
    if json_:
        json_out({"dropped": dropped_versions})
        return
    remaining = len(checkpoint_store.state.versions())
    note(f"{store}: {len(dropped_versions)} versions deleted, {remaining} remain")


@app.command()
def keep(
    store: _STORE,
    version: _VERSION,
    off: Annotated[bool, typer.Option("--off", help="Remove the mark.")] = False,
) -> None:
    """Mark a version so that purge keeps it, for a rollback after corruption is noticed late.

    [bold]Examples[/bold]

        petps checkpoint keep checkpoints 120
    """
    _open(store).keep(version, not off)
    note(f"{store}: version {version} is {'dropped by the next purge' if off else 'kept'}")


@app.command()
def rollback(
    store: _STORE,
    version: Annotated[
        int | None,
        typer.Argument(metavar="[VERSION]", help="A version that `petps checkpoint list` shows."),
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="The newest version that is not damaged.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Confirm that the newer versions are lost.")
    ] = False,
    json_: _JSON = False,
) -> None:
    """Delete the versions that are newer than VERSION, so that training continues from it.

    [bold]Examples[/bold]

        petps checkpoint rollback checkpoints 120 --yes

        petps checkpoint rollback checkpoints --whole --yes
    """
    from petps.checkpoint.tend import find_whole

    if (version is None) == (not whole):
        raise InvalidArgument("give either a VERSION or --whole")
    checkpoint_store = _open(store)
    if version is None:
        with waiting("reading every chunk", quiet=json_):
            version = find_whole(checkpoint_store)
    checkpoint_store.state.lineage_of(version)
    newer_versions = [
        record.version for record in checkpoint_store.state.versions() if record.version > version
    ]
    if newer_versions and not yes:
        raise FailedPrecondition(
            f"{len(newer_versions)} versions, {newer_versions[0]} to {newer_versions[-1]}, "
            "would be lost: confirm with --yes"
        )
    dropped_versions = checkpoint_store.rollback(version)
    if json_:
        json_out({"dropped": dropped_versions, "newest": version})
        return
    note(f"{store}: {len(dropped_versions)} versions deleted, {version} is the newest")


@app.command()
def diff(store: _STORE, first: _VERSION, second: _VERSION, json_: _JSON = False) -> None:
    """Count the keys that one of two versions lacks, or that have different rows in them.

    [bold]Examples[/bold]

        petps checkpoint diff checkpoints 119 120
    """
    import numpy as np

    checkpoint_store = _open(store)
    rows = []
    old_tables, new_tables = checkpoint_store.restore(first), checkpoint_store.restore(second)
    old_schemas, new_schemas = checkpoint_store.tables_of(first), checkpoint_store.tables_of(second)
    for name in checkpoint_store.state.tables:
        old_rows, new_rows = old_tables[name], new_tables[name]
        _, old_positions, new_positions = np.intersect1d(
            old_rows.keys, new_rows.keys, assume_unique=True, return_indices=True
        )
        is_same = np.ones(len(old_positions), np.bool_)
        for old_column, new_column in zip(
            old_schemas[name].columns, new_schemas[name].columns, strict=True
        ):
            old_values: Any = old_rows.columns[old_column.name][old_positions]
            new_values: Any = new_rows.columns[new_column.name][new_positions]
            if old_column != new_column:  # stored in two ways: compare the decoded values
                old_values, new_values = (
                    old_column.values(old_values),
                    new_column.values(new_values),
                )
            is_same &= (old_values == new_values).all(axis=1)
        rows.append(
            {
                "table": name,
                "added": len(new_rows) - len(new_positions),
                "removed": len(old_rows) - len(old_positions),
                "changed": int(np.count_nonzero(~is_same)),
                "same": int(np.count_nonzero(is_same)),
            }
        )
    if json_:
        json_out({"from": first, "to": second, "tables": rows})
        return
    columns = ("table", "added", "removed", "changed", "same")
    table(columns, [tuple(row[column] for column in columns) for row in rows])
