"""petps instances, alias and drop: the versions of a model that are served side by side."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated, Any

import typer

from petps.cli.options import AdministeredPool, JsonReport, TargetName, Yes, confirm
from petps.cli.output import json_out, note, table
from petps.cli.target import check_administered, open_target
from petps.errors import FailedPrecondition, InvalidArgument


def instances(target: TargetName, json_: JsonReport = False) -> None:
    """List the instances of every model, and whether each is serving, following or frozen.

    [bold]Examples[/bold]

        petps instances my.pool

        petps instances petps://127.0.0.1:7070
    """
    with closing(open_target(target, model=None, read_only=True)) as handle:
        rows = _instances(handle.status())
    if json_:
        json_out({"instances": rows})
        return
    columns = ("name", "state", "aliases", "tables", "rows", "version", "run")
    # A version and a run are numbers to search for, so without separators.
    shown = [
        row
        | {"aliases": ", ".join(row["aliases"])}
        | {name: str(row[name]) for name in ("version", "run")}
        for row in rows
    ]
    lines = [[row[name] for name in columns] for row in shown]
    table(("instance", "state", "alias", *columns[3:]), lines)


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
    target: AdministeredPool,
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
    yes: Yes = False,
    json_: JsonReport = False,
) -> None:
    """Switch the name of a model to another instance, for all tables at once, or switch it back.

    The previous instance is frozen: it gets no more deltas, but can still be pulled by its own
    name. Clients that pull by the model's name follow within seconds. No answer mixes two
    instances.

    [bold]Examples[/bold]

        petps alias my.pool ranking@7

        petps alias my.pool --back --yes

        petps alias my.pool ranking@7 --name canary
    """
    if (instance is None) != back:
        raise InvalidArgument("write either an instance, MODEL@NAME, or --back")
    check_administered(target)
    with closing(open_target(target, model=None, read_only=True)) as handle:
        status = handle.status()
    name = name or (instance.partition("@")[0] if instance else _only_model(status))
    new_instance = instance or _previous_instance(status, name)
    old_instance = _current_instance(status, name)
    before = f" instead of {old_instance}" if old_instance else ""
    confirm(f"let {name} name {new_instance}{before}", yes)
    with closing(open_target(target, model=None, read_only=False)) as handle:
        if _current_instance(handle.status(), name) != old_instance:
            raise FailedPrecondition(f"{name} was switched meanwhile: see `petps instances`")
        handle.switch_alias(name, new_instance)
    if json_:
        json_out({"alias": name, "instance": new_instance, "before": old_instance})
        return
    note(f"{name} names {new_instance} now" + (f", before {old_instance}" if old_instance else ""))


def _only_model(status: dict[str, Any]) -> str:
    models = sorted({record["model"] for record in status["instances"]})
    if len(models) != 1:
        raise InvalidArgument(
            f"there are several models: {', '.join(models)}; choose one with --name MODEL"
        )
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
    target: AdministeredPool,
    instance: Annotated[
        str, typer.Argument(metavar="INSTANCE", help="The instance to remove: MODEL@NAME.")
    ],
    yes: Yes = False,
    json_: JsonReport = False,
) -> None:
    """Remove an instance and its tables. Their space is reused once no pull reads them.

    The command refuses an instance that an alias (or the plain model name) names: switch the alias
    first.

    [bold]Examples[/bold]

        petps drop my.pool ranking@6
    """
    if "@" not in instance:
        raise InvalidArgument(f"'{instance}' is a model; name an instance of it: {instance}@NAME")
    check_administered(target)
    confirm(f"remove {instance} and all its rows", yes)
    with closing(open_target(target, model=None, read_only=False)) as handle:
        handle.drop_instance(instance)
    if json_:
        json_out({"dropped": instance})
        return
    note(f"{instance} is dropped")
