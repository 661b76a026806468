"""Output of commands: JSON for programs, tables and bars for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import typer

from petps.log import printable

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "advancing",
    "bytes_text",
    "facts",
    "json_out",
    "note",
    "progress",
    "table",
    "waiting",
]

PIPE_COLUMNS: Final = 140


def json_out(value: Any) -> None:
    """Write one JSON document to standard output."""
    typer.echo(json.dumps(value, indent=2, allow_nan=True))


def note(text: str) -> None:
    """Write a line for people to standard error; standard output has only the report."""
    typer.echo(printable(text), err=True)


def table(
    columns: Sequence[str], rows: Sequence[Sequence[object]], title: str | None = None
) -> None:
    """Print a table, with the first column left-aligned and the others right-aligned."""
    from rich.table import Table
    from rich.text import Text

    rich_table = Table(title=title, title_justify="left", header_style="bold")
    for number, column in enumerate(columns):
        rich_table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        rich_table.add_row(*(Text(_text(value)) for value in row))
    _console().print(rich_table)


def facts(pairs: Sequence[tuple[str, object]], title: str | None = None) -> None:
    """Print names and values, one pair per line."""
    from rich.table import Table
    from rich.text import Text

    rich_table = Table(
        title=title, title_justify="left", show_header=False, box=None, pad_edge=False
    )
    rich_table.add_column(style="dim")
    rich_table.add_column(overflow="fold")
    for name, value in pairs:
        rich_table.add_row(Text(printable(name)), Text(_text(value)))
    _console().print(rich_table)


def _console() -> Console:
    """Return a console for standard output. A pipe has no width, so it gets PIPE_COLUMNS."""
    from rich.console import Console

    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return printable(str(value))


def bytes_text(n: float) -> str:
    """Return n bytes as text: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def advancing(advance: Callable[..., None]) -> Callable[[int, int], bool]:
    """Return a function of (items done, items in all) that advances a bar of progress().

    It returns True: the work goes on.
    """
    seen = 0

    def show(done: int, total: int) -> bool:
        nonlocal seen
        advance(done - seen, total)
        seen = done
        return True

    return show


@contextmanager
def progress(text: str, total: int | None, *, quiet: bool) -> Iterator[Callable[..., None]]:
    """Show a bar on standard error. Yield advance(n), which advances it by n items.

    advance(n, total) also gives the number of items in all, if it was not known before.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda n, total=None: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(text, total=total)
        yield lambda n, total=None: bar.update(task, advance=n, total=total)


@contextmanager
def waiting(text: str, *, quiet: bool) -> Iterator[None]:
    """Show a spinner on standard error during work that cannot report its progress."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield
