"""petps cluster switch: one instance of the model for all servers of a cluster."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from petps.cli.cluster_target import ConfigFile, ModelName, open_target
from petps.cli.options import JsonReport, Yes, confirm
from petps.cli.output import json_out, note
from petps.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, NotFound

if TYPE_CHECKING:
    from petps.cli.cluster_target import ClusterTarget
    from petps.cluster.records import State

__all__ = ["switch"]


def switch(
    instance: Annotated[
        str | None,
        typer.Argument(metavar="[INSTANCE]", help="The instance: MODEL@NAME."),
    ] = None,
    back: Annotated[
        bool, typer.Option("--back", help="Switch back to the instance before the last switch.")
    ] = False,
    undo: Annotated[
        bool, typer.Option("--undo", help="Wait no longer for a switch that is not done yet.")
    ] = False,
    wait: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Wait until it is done, at most this long."),
    ] = None,
    yes: Yes = False,
    config: ConfigFile = None,
    model: ModelName = None,
    json_: JsonReport = False,
) -> None:
    """Let the model's name refer to another instance, on all servers, or switch it back.

    It happens once every owner has loaded the instance, by one version of the map. No answer mixes
    two instances, and no client that has seen the new one gets the old one again. Servers need
    [bold]ingest.switch = "manual"[/bold].

    [bold]Examples[/bold]

        petps cluster switch ranking@8 --wait 60 --config cluster.toml

        petps cluster switch --back --yes --config cluster.toml
    """
    if (instance is not None) + back + undo != 1:
        raise InvalidArgument("write either an instance, MODEL@NAME, or --back, or --undo")
    with open_target(config, model) as target:
        if undo:
            target.put({}, (target.keys.switch,))
            note("the cluster waits for no switch any more")
            return
        state = target.state()
        wanted = instance or _before(state)
        _check(state, wanted)
        confirm(f"let {state.model} refer to {wanted} on all servers", yes)
        target.put({target.keys.switch: json.dumps({"format": 1, "instance": wanted})})
        if wait is not None:
            _wait(target, wanted, wait)
        if json_:
            json_out({"instance": wanted, "done": wait is not None})
        elif wait is None:
            note("written to etcd; it happens once every owner has it: petps cluster status")
        else:
            note(f"{state.model} refers to {wanted} on all servers that are present")


def _before(state: State) -> str:
    if state.choice is None:
        raise FailedPrecondition(f"model '{state.model}' was never switched by its cluster")
    return state.choice.before


def _check(state: State, instance: str) -> None:
    from petps.cluster.switch import refusal_of_switch, refusal_of_way_back

    if refusal := refusal_of_switch(state) or refusal_of_way_back(state, instance):
        raise FailedPrecondition(refusal)
    known = sorted({name for member in state.members.values() for name in member.instances})
    if instance not in known:
        raise NotFound(
            f"no server has an instance {instance}; known are {', '.join(known) or 'none'}"
        )


def _wait(target: ClusterTarget, instance: str, seconds: float) -> None:
    from petps.cluster.switch import lacking, late, refusal_of_switch

    reason = "etcd does not answer"
    for state in target.watch(seconds):
        if state.choice is None or state.choice.instance != instance or state.switch:
            reason = refusal_of_switch(state) or lacking(state, instance)
            if not reason and state.moves:
                reason = f"partitions {', '.join(map(str, sorted(state.moves)))} move"
            reason = reason or "no controller has switched it yet"
            if state.switch:
                reason += "; petps cluster switch --undo ends that"
        elif reason := late(state):
            pass
        else:
            return
    raise DeadlineExceeded(f"after {seconds:g} s: {reason}")
