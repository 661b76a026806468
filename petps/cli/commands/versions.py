"""petps instances, alias and drop: the versions of a model that are served side by side."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from petps.cli.output import json_out, note, table
from petps.cli.target import TARGET_HELP, open_target
from petps.errors import FailedPrecondition, InvalidArgument

_TARGET = Annotated[str, typer.Argument(metavar="TARGET", help=TARGET_HELP)]
_JSON = Annotated[bool, typer.Option("--json", help="Report as JSON.")]


def instances(target: _TARGET, json_: _JSON = False) -> None:
    """List the instances of every model, and whether each is serving, following or frozen.

    [bold]Examples[/bold]

        petps instances my.pool

        petps instances petps://127.0.0.1:7070
    """
    handle = open_target(target, model=None, read_only=True)
    try:
        status = handle.status()
    finally:
        handle.close()
    rows = _instances(status)
    if json_:
        json_out({"instances": rows})
        return
    table(
        ("instance", "state", "alias", "tables", "rows", "version", "run"),
        [
            (
                row["name"],
                row["state"],
                ", ".join(row["aliases"]),
                row["tables"],
                row["rows"],
                row["version"],
                row["run"],
            )
            for row in rows
        ],
    )


def _instances(status: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for instance in status["instances"]:
        instance_tables = [
            record for record in status["tables"] if record["instance"] == instance["name"]
        ]
        rows.append(
            {
                "name": instance["name"],
                "model": instance["model"],
                "state": instance["state"],
                "aliases": instance["aliases"],
                "tables": len(instance_tables),
                "rows": sum(record["rows"] for record in instance_tables),
                "version": instance["applied_version"],
                "run": instance["run"],
            }
        )
    return rows


def alias(
    target: _TARGET,
    instance: Annotated[
        str | None,
        typer.Argument(
            metavar="[INSTANCE]", help="The instance that the alias will name: MODEL@NAME."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The alias; by default the instance's model.")
    ] = None,
    back: Annotated[
        bool, typer.Option("--back", help="Switch back to the instance before the last switch.")
    ] = False,
    json_: _JSON = False,
) -> None:
    """Switch the name of a model to another instance, for all tables at once, or switch it back.

    The previous instance is frozen: pulls by its own name continue, deltas no longer reach it.
    Clients that pull by the model's name follow within seconds. No answer mixes two instances.

    [bold]Examples[/bold]

        petps alias petps://127.0.0.1:7070 ranking@7

        petps alias petps://127.0.0.1:7070 --back

        petps alias my.pool ranking@7 --name canary
    """
    if (instance is None) != back:
        raise InvalidArgument("write either an instance, MODEL@NAME, or --back")
    handle = open_target(target, model=None, read_only=False)
    try:
        status = handle.status()
        name = name or (instance.partition("@")[0] if instance else _only_model(status))
        new_instance = instance or _previous_instance(status, name)
        old_instance = _current_instance(status, name)
        handle.switch_alias(name, new_instance)
    finally:
        handle.close()
    if json_:
        json_out({"alias": name, "instance": new_instance, "before": old_instance})
        return
    note(f"{name} means {new_instance} now" + (f", before {old_instance}" if old_instance else ""))


def _only_model(status: dict[str, Any]) -> str:
    models = sorted({record["model"] for record in status["instances"]})
    if len(models) != 1:
        raise InvalidArgument(f"there are several models: {', '.join(models)}; say --name MODEL")
    return str(models[0])


def _previous_instance(status: dict[str, Any], name: str) -> str:
    instance_id = status["previous_of_aliases"].get(name)
    for record in status["instances"]:
        if record["id"] == instance_id:
            return str(record["name"])
    raise FailedPrecondition(
        f"alias '{name}' has no previous instance: it was never switched, or that instance has "
        "been dropped; `petps instances` lists the instances"
    )


def _current_instance(status: dict[str, Any], name: str) -> str | None:
    instance_id = status["aliases"].get(name)
    return next(
        (record["name"] for record in status["instances"] if record["id"] == instance_id), None
    )


def drop(
    target: _TARGET,
    instance: Annotated[str, typer.Argument(metavar="INSTANCE", help="MODEL@NAME.")],
    json_: _JSON = False,
) -> None:
    """Remove an instance and its tables. Their space is reused once no pull reads them.

    An instance that an alias (or the plain model name) refers to is not dropped: switch that first.

    [bold]Examples[/bold]

        petps drop petps://127.0.0.1:7070 ranking@6
    """
    if "@" not in instance:
        raise InvalidArgument(
            f"'{instance}' names a model: name one instance of it, {instance}@NAME"
        )
    handle = open_target(target, model=None, read_only=False)
    try:
        handle.drop_instance(instance)
    finally:
        handle.close()
    if json_:
        json_out({"dropped": instance})
        return
    note(f"{instance} is dropped")
