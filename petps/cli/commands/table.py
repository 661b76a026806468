"""petps table: changes of one table of a pool, also while a server has it open."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from petps.cli.options import (
    AdministeredPool,
    JsonReport,
    ModelOption,
    TableName,
    Yes,
    confirm,
    parse_rows,
)
from petps.cli.output import advancing, json_out, note, progress
from petps.cli.target import check_administered, open_pool
from petps.config.duration import duration_text, parse_duration

app = typer.Typer(
    no_args_is_help=True, help="Change a table: more capacity, rows that expire, or remove it."
)


@app.callback()
def _group() -> None:
    """Change a table of a pool, also while a server has it open."""


@app.command()
def grow(
    pool: AdministeredPool,
    table: TableName,
    capacity: Annotated[
        str,
        typer.Option(metavar="ROWS", help="The new capacity in rows, such as 20000000 or 20m."),
    ],
    model: ModelOption = None,
    unpaced: Annotated[
        bool,
        typer.Option("--unpaced", help="As fast as possible, at the cost of pulls and writes."),
    ] = False,
    json_: JsonReport = False,
) -> None:
    """Give a table more capacity. Pulls, pushes and deltas go on.

    The rows stay where they are; the index is copied into a larger one, so both exist for a while.
    Ctrl-C, a full disk or a crash leave the table as it was. A partition that has stopped because
    the table was full continues. Capacity cannot be taken away again.

    [bold]Examples[/bold]

        petps table grow my.pool items --capacity 20m

        petps table grow my.pool items --capacity 20m --model ranking@7 --unpaced
    """
    check_administered(pool)
    rows = parse_rows(capacity, "--capacity")
    with (
        closing(open_pool(pool)) as target,
        progress(f"growing {table}", None, quiet=json_) as advance,
    ):
        target.grow(table, rows, model=model, paced=not unpaced, progress=advancing(advance))
    if json_:
        json_out({"table": table, "capacity": rows})
        return
    note(f"{table} has capacity for {rows:,} rows now")


@app.command()
def expire(
    pool: AdministeredPool,
    table: TableName,
    after: Annotated[
        str,
        typer.Option(
            metavar="AGE",
            help="The age at which a row is deleted that was not written again, such as 90s, 6h or "
            "30d; 'never' keeps all rows.",
        ),
    ],
    model: ModelOption = None,
    json_: JsonReport = False,
) -> None:
    """Let the rows of a table expire, or keep them. Pulls, pushes and deltas go on.

    A server deletes expired rows a little later, by at most 1/16 of the age and the time of a walk
    over the table; `petps status` shows by how much. A pull does not make a row younger, a write
    does. Rows that are there before the first such command count as written now. A lower age
    deletes at once what is older.

    In a table that a log feeds, the age counts the time of the log's commits, so all servers of the
    log delete the same rows: give them all the same age. In a table that pushes feed, it counts the
    server's clock. A pause of the log or the server counts as a quarter of the age at most; so a
    log needs several commits in that time. From the first such command on, older releases do not
    open the pool.

    [bold]Examples[/bold]

        petps table expire my.pool items --after 30d

        petps table expire my.pool items --after never --model ranking@7
    """
    check_administered(pool)
    seconds = parse_duration(after, "--after")
    with closing(open_pool(pool)) as target:
        target.set_expiry(table, seconds, model=model)
    if json_:
        json_out({"table": table, "expire_after": seconds})
        return
    text = f"expire {duration_text(seconds)} after they were written" if seconds else "never expire"
    note(f"rows of {table} {text}")


@app.command()
def drop(
    pool: AdministeredPool,
    table: TableName,
    model: ModelOption = None,
    yes: Yes = False,
    json_: JsonReport = False,
) -> None:
    """Remove a table that pushes feed. Its space is reused once no pull reads it.

    A table that a log feeds is refused, because the log goes on with its rows: publish a base
    without it as a new instance, and drop the present one.

    [bold]Examples[/bold]

        petps table drop my.pool items

        petps table drop my.pool items --model ranking@6 --yes
    """
    check_administered(pool)
    confirm(f"remove table {table} and all its rows", yes)
    with closing(open_pool(pool)) as target:
        target.drop_table(table, model=model)
    if json_:
        json_out({"dropped": table})
        return
    note(f"table {table} is dropped")
