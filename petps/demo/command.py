"""`petps demo`: its options, its work folder, its exit status."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer

__all__ = ["demo", "main"]

INTERRUPTED: Final = 130  # what typer makes of a KeyboardInterrupt


def main(arguments: list[str]) -> int:
    """Runs `petps demo ARGUMENTS`; the exit status. Usage errors are those of typer."""
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    app.command(context_settings={"help_option_names": ["-h", "--help"]})(demo)
    command = typer.main.get_command(app)
    result: Any = command.main(arguments, prog_name="petps demo", standalone_mode=False)
    if result == INTERRUPTED:
        raise KeyboardInterrupt
    return int(result or 0)


def demo(
    accesses: Annotated[
        int, typer.Option(min=40_000, max=1_000_000, help="How much of the trace to go through.")
    ] = 500_000,
    durability: Annotated[str, typer.Option(help="Of the pool: 'power' or 'process'.")] = "power",
    log: Annotated[
        str | None,
        typer.Option(
            metavar="LOG",
            help="The delta log, for instance kafka://HOST:PORT/TOPIC, a topic of its own; by "
            "default a folder in the work folder.",
        ),
    ] = None,
    kafka_option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An option of Kafka. Repeatable."),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where the work folder is made; by default the system's.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the work folder.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the trainer and of the questions.")] = 1,
    idle_seconds: Annotated[
        float, typer.Option(min=0.1, max=60, help="How long each of two idle measurements takes.")
    ] = 2.0,
    json_: Annotated[
        bool, typer.Option("--json", help="Report as JSON, and nothing else.")
    ] = False,
) -> int:
    """Train, publish, serve, kill -9, restart and compare, on real accesses.

    A trainer learns 64-dimensional rows from a stream of accesses, publishes a base and then a
    delta every 4,000 accesses, while a client pulls what the following accesses ask for. In the
    middle the server is killed while it applies a delta. At the end every served row is compared
    with the trainer's. Exit status 0 only if all are equal, bit by bit.
    """
    from petps.delta import kafka_options
    from petps.demo.interrupt import interrupted_once
    from petps.demo.journey import Journey, Options
    from petps.demo.screen import Screen

    screen = Screen(quiet=json_)
    with interrupted_once(), _work_folder(folder, keep) as work:
        options = Options(
            accesses=accesses,
            durability=durability,
            seed=seed,
            idle_seconds=idle_seconds,
            log=log,
            kafka=kafka_options(kafka_option),
        )
        report = Journey(options, work, screen).run()
        if json_:
            typer.echo(json.dumps(report.as_json(), indent=2))
        else:
            screen.result(report)
        if keep:
            screen.kept(work)
    return 0 if report.passed else 1


@contextmanager
def _work_folder(parent: Path | None, keep: bool) -> Iterator[Path]:
    work = Path(tempfile.mkdtemp(prefix="petps-demo-", dir=parent))
    try:
        yield work
    finally:
        if not keep:
            shutil.rmtree(work, ignore_errors=True)
