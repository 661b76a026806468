"""petps import-hps."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from petps.cli.options import LOG_HELP, JsonReport, KafkaOption, kafka_options
from petps.cli.output import json_out, note
from petps.errors import InvalidArgument

if TYPE_CHECKING:
    from petps.delta import TableSchema


def import_hps(
    brokers: Annotated[
        str, typer.Argument(metavar="BROKERS", help="HPS's brokers: HOST:PORT[,HOST:PORT].")
    ],
    log: Annotated[str, typer.Argument(metavar="LOG", help=f"The delta log to write: {LOG_HELP}.")],
    table: Annotated[
        list[str],
        typer.Option(help="NAME:DIM[:DTYPE] of a table, read from hps_et.MODEL.NAME. Repeatable."),
    ],
    state: Annotated[
        Path,
        typer.Option(help="File that stores the positions in HPS's topics; created if missing."),
    ],
    model: Annotated[str, typer.Option(help="The model, by HPS's and petps's name.")] = "default",
    key_bytes: Annotated[int, typer.Option(help="Bytes of a key: 8, or 4.")] = 8,
    partitions: Annotated[
        int, typer.Option(help="Partitions of a new log: as many as the model has.")
    ] = 8,
    version_seconds: Annotated[
        float, typer.Option(min=0.01, help="Seconds from one version to the next.")
    ] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Publish what HPS's topics hold now, then stop.")
    ] = False,
    kafka_option: KafkaOption = None,
    json_: JsonReport = False,
) -> None:
    """Publish messages from HugeCTR HPS's Kafka topics to a delta log, until Ctrl-C.

    Servers follow the log like any other. The command counts and skips a message that does not fit
    its table exactly. After a restart it continues at the positions in the state file.

    [bold]Examples[/bold]

        petps import-hps kafka-1:9092 kafka://kafka-1:9092/ctr-deltas --model ctr
        --table user:16 --table item:64:int8 --state /var/lib/petps/hps.json
    """
    from petps.delta import open_log
    from petps.publish import Publisher, end_of
    from petps.publish.hps import HpsSource

    schemas = {schema.name: schema for schema in map(_schema, table)}
    options = kafka_options(kafka_option)
    with closing(open_log(log, partitions=partitions, exact=False, options=options)) as delta_log:
        publisher = Publisher(delta_log, model, tables=schemas)
        position = end_of(delta_log, model)
        source = HpsSource(
            brokers, model, schemas, publisher,
            state=state, key_bytes=key_bytes, version_seconds=version_seconds, options=options,
        )  # fmt: skip
        publisher.begin_continue(position)
        with _until_signal() as signals:
            counts = source.run(lambda: bool(signals), once=once)
    report = {"log": log, "model": model, "run": publisher.run, "version": publisher.version}
    if json_:
        json_out({**report, **asdict(counts)})
        return
    refusals = ", ".join(f"{count:,} {fault}" for fault, count in counts.refused.items()) or "none"
    note(
        f"{counts.rows:,} rows of {counts.messages:,} messages in {log}: run {publisher.run}, "
        f"version {publisher.version}; skipped: {refusals}; lost to retention: {counts.lost:,}"
    )


def _schema(text: str) -> TableSchema:
    from petps.delta import TableSchema

    name, *rest = text.split(":")
    if not 1 <= len(rest) <= 2 or not rest[0].isdigit():
        raise InvalidArgument(f"--table {text!r}: write NAME:DIM or NAME:DIM:DTYPE")
    return TableSchema(name, rest[1] if len(rest) == 2 else "f32", int(rest[0]))


@contextlib.contextmanager
def _until_signal() -> Iterator[list[int]]:
    """Collect SIGTERM and Ctrl-C, so that all rows read become a version before the exit."""
    signals: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    old_handlers = {
        number: signal.signal(number, lambda number, _: signals.append(number))
        for number in numbers
    }
    try:
        yield signals
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
