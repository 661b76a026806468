"""petps ingest: pause, continue or limit the ingest of a running server."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from petps.cli.options import AdministeredPool, parse_rows
from petps.cli.output import note
from petps.cli.target import open_server

app = typer.Typer(no_args_is_help=True, help="Pause, continue or limit a server's ingest.")


@app.callback()
def _group() -> None:
    """Pause, continue or limit the ingest of a running server.

    This holds until the server ends; a limit also until it reads its configuration again (SIGHUP).
    """


@app.command()
def pause(pool: AdministeredPool) -> None:
    """Stop reading the log. Pulls go on, and rows become stale; `petps status` shows it.

    [bold]Examples[/bold]

        petps ingest pause my.pool
    """
    with closing(open_server(pool, "ingest")) as server:
        server.set_ingest(paused=True)
    note(
        "ingest reads no more, once it has applied what it has read (`petps status`); continue it "
        f"with `petps ingest resume {pool}`"
    )


@app.command()
def resume(pool: AdministeredPool) -> None:
    """Read the log again, from where it was paused.

    [bold]Examples[/bold]

        petps ingest resume my.pool
    """
    with closing(open_server(pool, "ingest")) as server:
        server.set_ingest(paused=False)
    note("ingest continues")


@app.command()
def limit(
    pool: AdministeredPool,
    rows: Annotated[
        str, typer.Argument(metavar="ROWS", help="Rows a second, such as 50k; 'none': no limit.")
    ],
) -> None:
    """Limit the rows that are applied a second, so that pulls stay fast.

    [bold]Examples[/bold]

        petps ingest limit my.pool 50k

        petps ingest limit my.pool none
    """
    rate = 0 if rows == "none" else parse_rows(rows, "ROWS")
    with closing(open_server(pool, "ingest")) as server:
        server.set_ingest(rows_per_second=rate)
    note(f"ingest is limited to {rate:,} rows/s" if rate else "ingest is not limited")
