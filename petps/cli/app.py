"""The `petps` command: its groups, and the mapping of errors to text and exit codes.

Commands import what they need when they run, so that `petps --help` is quick.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final, cast

import typer
from typer.core import TyperGroup

from petps.cli.commands import Commands
from petps.errors import PetpsError
from petps.log import printable

__all__ = ["EXIT_CODES", "app", "main", "report_errors"]

# Exit code by the code of the error (petps.errors); every other error exits with 1.
EXIT_CODES: Final = {
    "INVALID_ARGUMENT": 2,
    "NOT_FOUND": 3,
    "ALREADY_EXISTS": 4,
    "RESOURCE_EXHAUSTED": 5,
    "FAILED_PRECONDITION": 6,
    "UNAVAILABLE": 7,
    "DEADLINE_EXCEEDED": 8,
    "DATA_LOSS": 9,
    "IN_USE": 6,
}
FAULTS_FOUND: Final = 10  # by petps doctor
# The same as in native/media/bus_error.h; importing it here would slow `petps --help`.
LOST_POOL: Final = 74
INTERRUPTED: Final = 130
COLLECTION_THRESHOLD: Final = 50_000  # new objects between two collections; Python's default is 700

_EXIT_TEXT = "Exit codes: 0 done; 1 error; " + "; ".join(
    f"{number} {code.lower().replace('_', ' ')}"
    for code, number in sorted(EXIT_CODES.items(), key=lambda item: item[1])
)
_EXIT_TEXT += f"; {FAULTS_FOUND} petps doctor found a fault"
_EXIT_TEXT += f"; {LOST_POOL} a page of the pool was lost (disk, file or memory)"
_HELP = """Serve huge embedding tables from a persistent pool.

Create a pool, load rows, serve them, and pull them over the network:

    petps create my.pool --table items:64:f32:1m

    petps load my.pool items rows.npz

    petps serve my.pool &

    petps pull petps://127.0.0.1:7070 items 1 2 3

In all commands, TARGET is a pool's path, also if a server on this machine has it open, or a running
server, petps://HOST:PORT or petps://HOST:PORT/MODEL."""


def exit_code(error: PetpsError) -> int:
    """Return the exit code of an error."""
    return EXIT_CODES.get(error.code, 1)


@contextmanager
def report_errors() -> Iterator[None]:
    """Report an error as one red sentence and an exit code, not as a traceback."""
    try:
        yield
    except PetpsError as error:
        _print_error(f"{error} [{error.code}]")
        raise typer.Exit(exit_code(error)) from None
    except KeyboardInterrupt:
        _print_error("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # `petps pull ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except OSError as error:
        _print_error(text_of(error))
        raise typer.Exit(1) from None


class _Commands(TyperGroup):
    """Group of commands that are built when they are used, and report errors in one sentence."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = cast(Any, Commands())

    def invoke(self, ctx: Any) -> Any:
        with report_errors():
            return super().invoke(ctx)


def text_of(error: OSError) -> str:
    """Return one sentence: the file, and the operating system's error."""
    text = error.strerror or str(error)
    return f"{error.filename}: {text}" if error.filename else text


def _print_error(message: str) -> None:
    prefix = typer.style("error:", fg=typer.colors.RED, bold=True)
    typer.echo(f"{prefix} {printable(message)}", err=True)


app = typer.Typer(
    cls=_Commands,
    help=_HELP,
    epilog=_EXIT_TEXT,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _show_version(is_requested: bool) -> None:
    if is_requested:
        from petps import _native

        typer.echo(_native.software)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Show the version and the revision.",
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the `petps` script."""
    # Imports create many objects and no garbage: collections would take a tenth of a start.
    gc.set_threshold(COLLECTION_THRESHOLD)
    # pydantic would search every installed package for plugins, which petps does not use.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    app()
