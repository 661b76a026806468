"""petps push."""

from __future__ import annotations

from typing import Annotated

import typer

from petps.cli.output import json_out, note
from petps.cli.target import TARGET_HELP, open_target
from petps.errors import InvalidArgument


def push(
    target: Annotated[str, typer.Argument(metavar="TARGET", help=TARGET_HELP)],
    table: Annotated[str, typer.Argument(metavar="TABLE", help="The table.")],
    rows: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ROW...]", help="Rows as KEY=NUMBER,NUMBER,...: dim numbers each."),
    ] = None,
    delete: Annotated[list[str] | None, typer.Option(help="A key to delete. Repeatable.")] = None,
    model: Annotated[str | None, typer.Option(help="Model, instance or alias.")] = None,
    allow_not_finite: Annotated[
        bool, typer.Option("--allow-not-finite", help="Take rows with NaN or infinity.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Write a few rows, or delete keys. For files, see `petps load`.

    The changes are durable when the command returns.

    [bold]Examples[/bold]

        petps push my.pool items 42=0.1,0.2,0.3,0.4

        petps push petps://127.0.0.1:7070 items 42=0.1,0.2,0.3,0.4 --delete 41
    """
    import numpy as np

    if not rows and not delete:
        raise InvalidArgument("nothing to push: write KEY=NUMBER,NUMBER,... or --delete KEY")
    updates = [_row(text) for text in rows or []]
    deleted_keys = [_key(text, text) for text in delete or []]
    conflicts = {key for key, _ in updates} & set(deleted_keys)
    if conflicts:
        raise InvalidArgument(f"key {min(conflicts)} is both written and deleted; do one")
    handle = open_target(target, model=model, read_only=False)
    try:
        dim = handle.describe(table).dim
        for key, values in updates:
            if len(values) != dim:
                raise InvalidArgument(
                    f"table '{table}' has dim {dim}, but key {key} has {len(values)} numbers"
                )
        counts = {"inserted": 0, "updated": 0, "deleted": 0, "absent": 0}
        reports = []
        if updates:
            keys = np.array([key for key, _ in updates], np.uint64)
            block = np.array([values for _, values in updates], np.float32)
            reports.append(handle.push(table, keys, block, allow_not_finite))
        if deleted_keys:
            reports.append(handle.erase(table, np.array(deleted_keys, np.uint64)))
        for report in reports:
            for name in counts:
                counts[name] += report[name]
    finally:
        handle.close()
    if json_:
        json_out({"table": table, **counts})
        return
    labels = {"inserted": "new", "updated": "replaced", "deleted": "deleted", "absent": "not there"}
    note(f"{table}: " + ", ".join(f"{counts[name]:,} {labels[name]}" for name in counts))


def _key(text: str, argument: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 64:
        raise InvalidArgument(f"{argument}: key '{text}' is no number from 0 to 2^64-1")
    return int(text)


def _row(text: str) -> tuple[int, list[float]]:
    key, separator, values = text.partition("=")
    if not separator:
        raise InvalidArgument(f"'{text}': write KEY=NUMBER,NUMBER,..., for instance 42=0.1,0.2")
    try:
        return _key(key, text), [float(value) for value in values.split(",")]
    except ValueError as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(f"'{text}': '{values}' is not a list of numbers") from None
