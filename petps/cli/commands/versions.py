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
    opened = open_target(target, model=None, read_only=True)
    try:
        found = opened.status()
    finally:
        opened.close()
    rows = _instances(found)
    if json_:
        json_out({"instances": rows})
        return
    table(
        ("instance", "state", "alias", "tables", "rows", "version", "run"),
        [
            (
                each["name"],
                each["state"],
                ", ".join(each["aliases"]),
                each["tables"],
                each["rows"],
                each["version"],
                each["run"],
            )
            for each in rows
        ],
    )


def _instances(found: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for each in found["instances"]:
        own = [one for one in found["tables"] if one["instance"] == each["name"]]
        rows.append(
            {
                "name": each["name"],
                "model": each["model"],
                "state": each["state"],
                "aliases": each["aliases"],
                "tables": len(own),
                "rows": sum(one["rows"] for one in own),
                "version": each["applied_version"],
                "run": each["run"],
            }
        )
    return rows


def alias(
    target: _TARGET,
    instance: Annotated[
        str | None, typer.Argument(metavar="[INSTANCE]", help="What it shall mean: MODEL@NAME.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The alias; by default the instance's model.")
    ] = None,
    back: Annotated[
        bool, typer.Option("--back", help="To what the alias meant before the last switch.")
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
        raise InvalidArgument("name an instance, MODEL@NAME, or say --back; one of the two")
    opened = open_target(target, model=None, read_only=False)
    try:
        found = opened.status()
        name = name or (instance.partition("@")[0] if instance else _only_model(found))
        wanted = instance or _previous(found, name)
        before = _meaning(found, name)
        opened.switch_alias(name, wanted)
    finally:
        opened.close()
    if json_:
        json_out({"alias": name, "instance": wanted, "before": before})
        return
    note(f"{name} means {wanted} now" + (f", before {before}" if before else ""))


def _only_model(found: dict[str, Any]) -> str:
    models = sorted({each["model"] for each in found["instances"]})
    if len(models) != 1:
        raise InvalidArgument(f"there are several models: {', '.join(models)}; say --name MODEL")
    return str(models[0])


def _previous(found: dict[str, Any], name: str) -> str:
    number = found["previous_of_aliases"].get(name)
    for each in found["instances"]:
        if each["id"] == number:
            return str(each["name"])
    raise FailedPrecondition(
        f"'{name}' has nothing to go back to: it was never switched, or what it meant has been "
        "dropped (petps instances shows what there is)"
    )


def _meaning(found: dict[str, Any], name: str) -> str | None:
    number = found["aliases"].get(name)
    return next((each["name"] for each in found["instances"] if each["id"] == number), None)


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
    opened = open_target(target, model=None, read_only=False)
    try:
        opened.drop_instance(instance)
    finally:
        opened.close()
    if json_:
        json_out({"dropped": instance})
        return
    note(f"{instance} is dropped")
