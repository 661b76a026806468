"""petps restore."""

from __future__ import annotations

from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from petps.cli.options import LOG_HELP, JsonReport, KafkaOption, kafka_options
from petps.cli.output import bytes_text, json_out, note, progress, table
from petps.errors import InvalidArgument

if TYPE_CHECKING:
    from petps.delta import DeltaLog


def restore(
    store: Annotated[
        str, typer.Argument(metavar="STORE", help="A folder, or any URL that fsspec knows.")
    ],
    pool: Annotated[
        Path | None, typer.Argument(metavar="POOL", help="The new pool. Not with --list.")
    ] = None,
    version: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="The backup; by default the newest.")
    ] = None,
    log: Annotated[
        str | None,
        typer.Option(
            metavar="LOG",
            help=f"Check that this log still has everything after the backup: {LOG_HELP}.",
        ),
    ] = None,
    kafka_option: KafkaOption = None,
    durability: Annotated[
        str | None,
        typer.Option(
            metavar="power|process", help="Of the new pool; by default that of the backed up one."
        ),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the backups of the store.")] = False,
    json_: JsonReport = False,
) -> None:
    """Make a pool from a backup. A server of it follows the log from the backup on.

    [bold]Examples[/bold]

        petps restore backups --list

        petps restore backups new.pool

        petps restore s3://models/ctr-backups new.pool --version 7 --log kafka://broker:9092/ctr
    """
    from petps.pool.restore import list_backups

    if list_:
        if pool is not None or version is not None:
            raise InvalidArgument("--list takes neither POOL nor --version")
        if log is None:
            _show(list_backups(store), json_=json_)
            return
        with closing(_open_log(store, log, kafka_option)) as delta_log:
            _show(list_backups(store, delta_log), json_=json_)
        return
    if pool is None:
        raise InvalidArgument("name the new pool: petps restore STORE POOL")
    _restore(store, pool, version, log, kafka_option, durability, json_=json_)


def _restore(
    store: str,
    pool: Path,
    version: int | None,
    log: str | None,
    kafka: list[str] | None,
    durability: str | None,
    *,
    json_: bool,
) -> None:
    from petps.pool.restore import LogCheck, progress_of, restore

    check = None
    if log is not None:  # before the work: a log that cannot be reached is a mistake
        with closing(_open_log(store, log, kafka, version)) as delta_log:
            check = LogCheck.of(delta_log, progress_of(store, version))
    report = restore(
        store,
        pool,
        version=version,
        durability=durability,
        bar=lambda name, rows: progress(f"restoring {name}", rows, quiet=json_),
    )
    if check is not None:
        report["log"] = {"name": check.log, "gone": check.gone, "ahead": check.ahead}
    if json_:
        json_out(report)
    else:
        rows = sum(entry["rows"] for entry in report["tables"])
        note(
            f"{pool}: {rows:,} rows of {len(report['tables'])} tables of {report['instance']} from "
            f"backup {report['version']} of {report['store']} (log version "
            f"{report['log_version']}) in {report['seconds']:.1f} s"
        )
    for warning in report["warnings"]:
        note(f"warning: {warning}")
    if check is not None and check.warning is not None:
        note(f"warning: {check.warning}")
    elif check is not None and not json_:
        note(f"{check.log} has everything after the backup: serve the pool with --log {log}")


def _open_log(
    store: str, log: str, kafka: list[str] | None, version: int | None = None
) -> DeltaLog:
    from petps.delta import open_log
    from petps.pool.restore import progress_of

    partitions = len(progress_of(store, version))
    if partitions == 0:
        raise InvalidArgument(f"{store}: the backup has no position in a log; leave out --log")
    return open_log(log, partitions=None, create=False, options=kafka_options(kafka))


def _show(backups: list[dict[str, Any]], *, json_: bool) -> None:
    if json_:
        json_out(backups)
        return
    checked = any("follows_log" in entry for entry in backups)
    columns = ["backup", "made (UTC)", "kind", "instance", "log version", "bytes"]
    rows = []
    for entry in backups:
        created = datetime.fromtimestamp(entry["created_ns"] / 1e9, timezone.utc)
        row: list[object] = [
            str(entry["version"]),
            f"{created:%Y-%m-%d %H:%M:%S}",
            entry["kind"],
            entry["instance"],
            entry["log_version"],
            bytes_text(entry["bytes"]),
        ]
        rows.append([*row, entry["follows_log"]] if checked else row)
    table([*columns, "log follows"] if checked else columns, rows)
