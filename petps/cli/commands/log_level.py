"""petps log-level."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from petps.cli.options import AdministeredPool
from petps.cli.output import note
from petps.cli.target import open_server


def log_level(
    pool: AdministeredPool,
    level: Annotated[str, typer.Argument(metavar="LEVEL", help="debug, info, warning or error.")],
) -> None:
    """Set which lines the log of a running server has, until the server ends.

    It begins with the level of [log] level (info); 'debug' adds a line for each request over HTTP
    and gRPC.

    [bold]Examples[/bold]

        petps log-level my.pool debug
    """
    with closing(open_server(pool, "log")) as server:
        server.set_log_level(level)
    note(f"the server's log has lines from level {level} on")
