"""`python -m examples.demo`: its options, its work folder, its exit status."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from examples.demo.training import RATINGS_MIN, Data
from petps.cli.app import report_errors

__all__ = ["demo", "main"]


class _Command(TyperCommand):
    """A command that reports errors in one line, as the commands of `petps` do."""

    def invoke(self, ctx: Any) -> Any:
        with report_errors():
            raise typer.Exit(super().invoke(ctx))


def main(arguments: list[str] | None = None) -> int:
    """Run a demo with ``arguments``; None: those of the process. Return the exit status."""
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    app.command(cls=_Command, context_settings={"help_option_names": ["-h", "--help"]})(demo)
    try:
        app(arguments, prog_name="python -m examples.demo")
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def demo(
    context: typer.Context,
    train: Annotated[
        bool,
        typer.Option(
            "--train",
            help="Run the demo of training: two processes train a DLRM with petps.train, and a "
            "server serves its rows meanwhile (needs PyTorch: pip install petps\\[torch]).",
        ),
    ] = False,
    accesses: Annotated[
        int, typer.Option(min=40_000, max=1_000_000, help="The number of accesses of the trace.")
    ] = 500_000,
    ratings: Annotated[
        int | None,
        typer.Option(
            min=RATINGS_MIN,
            help="With --train: the number of samples, by default all 433,671. Fewer take less "
            "time.",
        ),
    ] = None,
    data: Annotated[
        Data,
        typer.Option(
            help="With --train: ratings (Book-Crossing, 27 MB, downloaded once with pip), or "
            "clicks, which are random and need no download."
        ),
    ] = Data.RATINGS,
    plots: Annotated[
        Path, typer.Option(metavar="FOLDER", help="With --train: the folder for the plots.")
    ] = Path("petps-demo-train"),
    durability: Annotated[
        str, typer.Option(help="The durability of the pool: 'power' or 'process'.")
    ] = "power",
    log: Annotated[
        str | None,
        typer.Option(
            metavar="LOG",
            help="The delta log, which must be empty, for example kafka://HOST:PORT/TOPIC; by "
            "default a folder in the work folder.",
        ),
    ] = None,
    kafka_option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An option of Kafka. Repeatable."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            help="The parent of the work folder; by default the system's temporary folder."
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the work folder.")] = False,
    seed: Annotated[
        int, typer.Option(min=0, help="The seed of the trainer and of the predicted accesses.")
    ] = 1,
    idle_seconds: Annotated[
        float, typer.Option(min=0.1, max=60, help="The duration of each of two idle measurements.")
    ] = 2.0,
    json_: Annotated[bool, typer.Option("--json", help="Print only the report, as JSON.")] = False,
) -> int:
    """Train, publish, serve, kill -9, restart and compare, on real accesses.

    A trainer learns 64-dimensional rows from a stream of accesses. It publishes a base, and then
    a delta every 4,000 accesses, while a client pulls the rows that the following accesses need.
    Halfway, the demo kills the server while it applies a delta. At the end it compares every
    served row with the trainer's. Exit status 0 only if all are equal, bit by bit.

    [bold]--train[/bold] shows the whole loop instead. Two processes train a DLRM on
    ratings, each with its rows in a pool of its own. Deltas go to a log and versions to a
    checkpoint store. A server follows the log, and the rows that it serves score held-out ratings
    during training. The demo first kills the trainer's processes, which continue from the last
    version as a new run that the server follows. Then it kills the server, which opens its pool
    again. The demo prints loss, AUC, freshness, step time by stage and the duration of the
    restarts, and draws them (./petps-demo-train/index.html). Another process merges and purges the
    store during training; the store is quantised. Exit status 0 only if every served row of the
    last version is the trainer's, bit by bit, the rows of both score all held-out samples the same,
    and every version that the store has kept restores to the trainer's rows, rounded. It takes
    about two minutes on two processors, and half of that with --ratings 40000.
    """
    _check_options(context, train)
    from examples.demo.interrupt import interrupt_once
    from petps.cli.options import kafka_options

    shared = {"seed": seed, "log": log, "kafka": kafka_options(kafka_option)}
    with interrupt_once(), _work_folder(folder, keep) as work:
        if train:
            settings = {"data": data.value, "ratings": ratings, **shared}
            report, screen = _run_course(settings, work, durability, plots, json_)
        else:
            options = {"accesses": accesses, "idle_seconds": idle_seconds, **shared}
            report, screen = _run_journey(options, work, durability, json_)
        if json_:
            typer.echo(json.dumps(report.as_json(), indent=2))
        else:
            screen.print_result(report)
        if keep:
            screen.show_kept(work)
    return 0 if report.passed else 1


def _run_journey(
    options: dict[str, Any], work: Path, durability: str, quiet: bool
) -> tuple[Any, Any]:
    """Return the report and the screen."""
    from examples.demo.journey import Journey, Options
    from examples.demo.screen import Screen

    screen = Screen(quiet=quiet)
    return Journey(Options(durability=durability, **options), work, screen).run(), screen


def _run_course(
    settings: dict[str, Any], work: Path, durability: str, plots: Path, quiet: bool
) -> tuple[Any, Any]:
    """Return the report and the screen."""
    from examples.demo.training.plots import make_folder
    from examples.demo.training.screen import TrainingScreen
    from examples.demo.training.task import Settings
    from petps.train.pytorch import torch_module
    from petps.train.timeline import new_figure

    screen = TrainingScreen(quiet=quiet)
    # Both calls raise an error with the remedy if the package is missing.
    with screen.show_spinner("importing PyTorch"):
        torch_module()
    new_figure(1)
    make_folder(plots)
    from examples.demo.training.course import Course, Options

    settings["log"] = settings["log"] or str(work / "log")
    options = Options(Settings(folder=str(work), **settings), durability, plots)
    return Course(options, screen).run(), screen


def _check_options(context: typer.Context, train: bool) -> None:
    """Raise BadParameter for an option that the chosen demo does not have."""
    others = ("accesses", "idle_seconds") if train else ("ratings", "data", "plots")
    for parameter in context.command.params:
        if parameter.name not in others:
            continue
        source = context.get_parameter_source(parameter.name)
        if source is not None and source.name != "DEFAULT":
            reason = "cannot be used with --train" if train else "needs --train"
            raise typer.BadParameter(f"{parameter.opts[0]} {reason}")


@contextmanager
def _work_folder(parent: Path | None, keep: bool) -> Iterator[Path]:
    work = Path(tempfile.mkdtemp(prefix="petps-demo-", dir=parent)).absolute()
    try:
        yield work
    finally:
        if not keep:
            shutil.rmtree(work, ignore_errors=True)
