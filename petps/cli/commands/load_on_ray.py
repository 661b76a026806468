"""petps load --on ray: the workers of a Ray cluster write a base."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from petps.admin.socket import is_admin_port
from petps.cli.commands.tend import ray_address
from petps.cli.output import bytes_text, json_out, note, progress, table
from petps.cli.target import SCHEMES
from petps.errors import InvalidArgument

if TYPE_CHECKING:
    from petps.cli.bulk import Input, Report

__all__ = ["Options", "load_on_ray", "parse_also"]

DEFAULT_MODEL: Final = "default"
DEFAULT_PARTITIONS: Final = 8  # as `petps create` gives a model
DEFAULT_DTYPE: Final = "f32"


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a base; None selects the default."""

    partitions: int | None
    dtype: str | None
    dim: int | None
    workers: int | None
    allow_not_finite: bool


def parse_also(text: str) -> tuple[str, list[str]]:
    """Return the table and the source of TABLE=SOURCE. Raises InvalidArgument."""
    name, equals, source = text.partition("=")
    if not name or not equals or not source:
        raise InvalidArgument(f"--also must be TABLE=SOURCE, got {text!r}")
    return name, [source]


def load_on_ray(
    target: str,
    sources_by_table: Sequence[tuple[str, list[str]]],
    model: str | None,
    on: str,
    columns: tuple[str | None, str | None, bool],
    version: int | None,
    options: Options,
    *,
    json_: bool,
) -> None:
    """Load files into a new base at ``target``, and report it."""
    from petps.checkpoint.bulk import NewBase
    from petps.checkpoint.ray_tasks import RayTasks
    from petps.cli.bulk import load_base

    address = ray_address(on)
    partitions = DEFAULT_PARTITIONS if options.partitions is None else options.partitions
    _check_options(target, partitions, options.workers)
    inputs = _open_inputs(sources_by_table, columns, version, options)
    base = NewBase(target, model or DEFAULT_MODEL, [given.table for given in inputs], partitions)
    with (
        contextlib.redirect_stdout(sys.stderr),  # Ray prints there that a worker died
        RayTasks(
            address,
            purpose="loading with --on ray",
            remedy="no base was written; give the workers more memory, or let fewer run: --workers",
            processors=options.workers,
        ) as tasks,
    ):
        report = load_base(
            tasks,
            base,
            inputs,
            workers=options.workers,
            allow_not_finite=options.allow_not_finite,
            bar=lambda text, rows: _bar(text, rows, quiet=json_),
        )
    if json_:
        json_out(report.as_json())
    else:
        _show(report)


def _check_options(target: str, partitions: int, workers: int | None) -> None:
    from petps.delta.schema import MAX_PARTITIONS

    if target.startswith(SCHEMES) or is_admin_port(target) or Path(target).is_file():
        raise InvalidArgument(
            f"{target}: with --on ray TARGET is a new store, a folder or a URL (s3://...); servers "
            "and pools restore from it"
        )
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise InvalidArgument(f"--partitions must be from 1 to {MAX_PARTITIONS}, got {partitions}")
    if workers is not None and workers < 1:
        raise InvalidArgument(f"--workers must be at least 1, got {workers}")


def _open_inputs(
    sources_by_table: Sequence[tuple[str, list[str]]],
    columns: tuple[str | None, str | None, bool],
    version: int | None,
    options: Options,
) -> list[Input]:
    from petps.checkpoint import Table
    from petps.cli.bulk import Input, open_parquet
    from petps.cli.sources import Columns
    from petps.cli.sources.schema import schema_of

    names: dict[str, list[str]] = {}
    for name, files in sources_by_table:
        names.setdefault(name, []).extend(files)
    inputs = []
    for name, files in names.items():
        sources = open_parquet(files, Columns(*columns), name, version)
        schema = schema_of(name, options.dtype or DEFAULT_DTYPE, options.dim, sources)
        inputs.append(Input(Table.of(name, schema.dim, schema.dtype), sources))
    return inputs


@contextlib.contextmanager
def _bar(text: str, rows: int, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    with progress(text, rows, quiet=quiet) as advance:
        yield advance


def _show(report: Report) -> None:
    table(
        ("table", "files", "rows", "keys", "bytes"),
        [
            (entry.table, entry.files, entry.rows, entry.keys, bytes_text(entry.bytes))
            for entry in report.tables
        ],
    )
    if report.left:
        note(
            f"{report.left:,} files that the base does not need could not be removed from "
            f"{report.store}: petps checkpoint purge removes them two days later"
        )
    note(f"{report.store} is a base of model {report.model} in {report.partitions} partitions")
    note(
        f"{report.rows:,} rows in {report.seconds:.1f} s ({report.rows_per_second:,.0f} rows/s): "
        f"read in {report.read_seconds:.1f} s, written in {report.write_seconds:.1f} s"
    )
