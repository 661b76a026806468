"""petps push."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from petps.cli.arguments import CommandWithKeys
from petps.cli.options import (
    AllowNotFinite,
    JsonReport,
    ModelOption,
    SignedKeys,
    TableName,
    TargetName,
    parse_key,
)
from petps.cli.output import json_out, note
from petps.cli.target import open_target
from petps.errors import InvalidArgument

COMMAND = CommandWithKeys


def push(
    target: TargetName,
    table: TableName,
    rows: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ROW...]", help="Rows as KEY=NUMBER,NUMBER,..., with dim numbers."),
    ] = None,
    delete: Annotated[list[str] | None, typer.Option(help="A key to delete. Repeatable.")] = None,
    model: ModelOption = None,
    allow_not_finite: AllowNotFinite = False,
    signed_keys: SignedKeys = False,
    json_: JsonReport = False,
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
    updates = [_row(text, signed_keys) for text in rows or []]
    deleted_keys = [parse_key(text, signed=signed_keys) for text in delete or []]
    conflicts = {key for key, _ in updates} & set(deleted_keys)
    if conflicts:
        raise InvalidArgument(f"key {min(conflicts)} is both written and deleted; give it once")
    counts = {"inserted": 0, "updated": 0, "deleted": 0, "absent": 0}
    with closing(open_target(target, model=model, read_only=False)) as handle:
        dim = handle.dim(table)
        for key, values in updates:
            if len(values) != dim:
                raise InvalidArgument(
                    f"table '{table}' has dim {dim}, but key {key} has {len(values)} numbers"
                )
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
    if json_:
        json_out({"table": table, **counts})
        return
    labels = {"inserted": "new", "updated": "replaced", "deleted": "deleted", "absent": "missing"}
    note(f"{table}: " + ", ".join(f"{counts[name]:,} {labels[name]}" for name in counts))


def _row(text: str, signed: bool) -> tuple[int, list[float]]:
    key_text, separator, values = text.partition("=")
    if not separator:
        raise InvalidArgument(f"'{text}': write KEY=NUMBER,NUMBER,..., for instance 42=0.1,0.2")
    key = parse_key(key_text, signed=signed)
    try:
        return key, [float(value) for value in values.split(",")]
    except ValueError:
        raise InvalidArgument(f"'{text}': '{values}' is not a list of numbers") from None
