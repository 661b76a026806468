"""The commands of petps cluster that speak to etcd: init, status, drain, move, and the like."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from petps.cli.cluster_target import ClusterTarget, ConfigFile, ModelName, open_target
from petps.cli.commands.cluster_switch import switch
from petps.cli.options import JsonReport
from petps.cli.output import facts, json_out, note, table
from petps.errors import AlreadyExists, DeadlineExceeded, FailedPrecondition, InvalidArgument

if TYPE_CHECKING:
    from petps.cluster.maps import ClusterMap
    from petps.cluster.records import State

__all__ = [
    "COMMANDS", "Address", "ConfigFile", "ModelName", "check_moves", "ranges_text", "unsettled",
]  # fmt: skip

Address = Annotated[str, typer.Argument(metavar="ADDRESS", help="A server: HOST:PORT.")]


def init(
    map_file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[MAP]", help="A shard map's file; by default a plan for the servers present."
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1, help="Servers that own each partition; by default as in the map, or 1."
        ),
    ] = None,
    restored: Annotated[
        bool,
        typer.Option(
            "--restored",
            help="etcd was restored from a backup: MAP is the POOL.map.json with the highest "
            "version of all servers. It takes the place of etcd's map, and of all moves.",
        ),
    ] = False,
    config: ConfigFile = None,
    model: ModelName = None,
    json_: JsonReport = False,
) -> None:
    """Write the first map of a model to etcd. From then on, the controller changes it.

    Start the servers first: they register themselves. With a file, each server of the map must be
    registered.

    [bold]Examples[/bold]

        petps cluster init --config cluster.toml

        petps cluster init shards.json --config cluster.toml

        petps cluster init /data/my.pool.map.json --restored --config cluster.toml
    """
    from petps.cluster.etcd import Compare
    from petps.cluster.records import Settings, dump

    with open_target(config, model) as target:
        state = target.state()
        if restored:
            from petps.cli.commands.cluster_restored import put_back

            put_back(target, state, map_file)
            return
        if state.map is not None:
            raise AlreadyExists(
                f"model '{target.keys.model}' has a map already, version {state.map.version}: "
                "petps cluster status"
            )
        if map_file is not None:
            first = _map_of_file(map_file, state)
        else:
            first = _planned_map(target.state_when_present(), replicas or 1)
        owners = min(len(present) for present in first.owners)
        settings = Settings(replicas or owners)
        puts = {target.keys.map: first.dump(), target.keys.settings: dump(settings)}
        # A try whose answer was lost may have written it already.
        if not target.put_if((Compare(target.keys.map, 0),), puts) and target.state().map != first:
            raise AlreadyExists("somebody else wrote a map just now: petps cluster status")
        if json_:
            json_out(json.loads(first.dump()))
        else:
            note(
                f"version {first.version} of the map of '{first.model}' is in etcd: "
                f"{len(first.owners)} partitions"
            )


def status(
    wait: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Wait until no move is left, at most this long."),
    ] = None,
    config: ConfigFile = None,
    model: ModelName = None,
    json_: JsonReport = False,
) -> None:
    """Show the members, what each owns and follows, and the moves.

    [bold]Examples[/bold]

        petps cluster status --config cluster.toml

        petps cluster status --config cluster.toml --wait 60
    """
    with open_target(config, model) as target:
        state = target.state() if wait is None else _settled(target, wait)
        controller = target.controller()
    if json_:
        json_out(_report(state, controller))
    else:
        _print(state, controller)


def drain(
    address: Address,
    undo: Annotated[
        bool, typer.Option("--undo", help="Let the server own partitions again.")
    ] = False,
    wait: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Wait until it owns nothing, at most this long."),
    ] = None,
    config: ConfigFile = None,
    model: ModelName = None,
    json_: JsonReport = False,
) -> None:
    """Let a server give all its partitions away; it serves each until another one has it.

    [bold]Examples[/bold]

        petps cluster drain 127.0.0.1:7070 --config cluster.toml

        petps cluster drain 127.0.0.1:7070 --wait 600 --config cluster.toml
    """
    if undo and wait is not None:
        raise InvalidArgument("--wait is of a drain, and --undo ends one: leave one of them out")
    with open_target(config, model) as target:
        state = target.state()
        _check_known(state, address)
        key = target.keys.drained(address)
        if undo:
            target.put({}, (key,))
        else:
            check_moves(state)
            present = set(state.members) - state.drained - {address}
            if not present:
                raise FailedPrecondition(
                    f"no other server is present that may take the partitions of {address}: add one"
                )
            target.put({key: "{}"})
        if wait is not None:
            _wait_until_drained(target, address, wait)
        if wait is not None and not json_:
            note(f"{address} owns no partition")
        else:
            _say(json_, {"address": address, "drained": not undo})


def move(
    partition: Annotated[int, typer.Argument(metavar="PARTITION", help="Its number.")],
    target_: Annotated[str, typer.Option("--to", metavar="ADDRESS", help="The new owner.")],
    source: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="ADDRESS", help="The owner that ends, if there are several."
        ),
    ] = None,
    config: ConfigFile = None,
    model: ModelName = None,
    json_: JsonReport = False,
) -> None:
    """Move a partition to another server. The controller begins as soon as it may.

    [bold]Examples[/bold]

        petps cluster move 3 --to 127.0.0.1:8070 --config cluster.toml
    """
    from petps.cluster.obstacles import refusal_of_move
    from petps.cluster.records import Wish, dump

    with open_target(config, model) as target:
        state = target.state()
        owners: tuple[str, ...] = ()
        if state.map is not None and 0 <= partition < len(state.map.owners):
            owners = state.map.owners[partition]
        if source is None and len(owners) > 1:
            raise InvalidArgument(
                f"partition {partition} has the owners {', '.join(owners)}: which of them ends? "
                "--from ADDRESS"
            )
        source = source or (owners[0] if owners else "")
        if refusal := refusal_of_move(state, partition, source, target_):
            raise FailedPrecondition(refusal)
        wish = Wish(partition, source, target_)
        target.put({target.keys.wish(partition): dump(wish)})
        _say(json_, {"partition": partition, "from": source, "to": target_})


def rebalance(
    undo: Annotated[bool, typer.Option("--undo", help="Begin no more such moves.")] = False,
    config: ConfigFile = None,
    model: ModelName = None,
    json_: JsonReport = False,
) -> None:
    """Divide the partitions by the servers' weights and zones, with the fewest moves.

    Without it, the controller moves partitions only from drained and lost servers, and to have as
    many replicas as wanted.

    [bold]Examples[/bold]

        petps cluster rebalance --config cluster.toml
    """
    with open_target(config, model) as target:
        if undo:
            target.put({}, (target.keys.rebalance,))
        else:
            check_moves(target.state())
            target.put({target.keys.rebalance: "{}"})
        _say(json_, {"rebalancing": not undo})


def replicas(
    count: Annotated[int, typer.Argument(metavar="N", min=1, help="Owners of each partition.")],
    config: ConfigFile = None,
    model: ModelName = None,
    json_: JsonReport = False,
) -> None:
    """Change how many servers own each partition.

    [bold]Examples[/bold]

        petps cluster replicas 2 --config cluster.toml
    """
    from petps.cluster.records import Settings, dump

    with open_target(config, model) as target:
        state = target.state()
        check_moves(state)
        if count > 1 and state.is_pushed:
            raise FailedPrecondition(
                "the model has tables that pushes feed, so each partition has one owner"
            )
        present = set(state.members) - state.drained
        if count > len(present):
            raise FailedPrecondition(
                f"{count} replicas need as many servers, but {len(present)} are present that are "
                "not drained"
            )
        target.put({target.keys.settings: dump(Settings(count))})
        _say(json_, {"replicas": count})


def watch(
    seconds: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="End after this time.")
    ] = None,
    config: ConfigFile = None,
    model: ModelName = None,
    json_: Annotated[bool, typer.Option("--json", help="A JSON object for each change.")] = False,
) -> None:
    """Show each change of members, map and moves as it happens, until Ctrl-C.

    [bold]Examples[/bold]

        petps cluster watch --config cluster.toml
    """
    with open_target(config, model) as target:
        before: dict[str, str] = {}
        for state in target.watch(seconds):
            after = _lines(state)
            for key in sorted({*before, *after}):
                if before.get(key) == after.get(key):
                    continue
                text = after.get(key, "no more")
                typer.echo(json.dumps({"key": key, "text": text}) if json_ else f"{key}: {text}")
            before = after


COMMANDS: Final[dict[str, Callable[..., None]]] = {
    "init": init,
    "status": status,
    "drain": drain,
    "move": move,
    "rebalance": rebalance,
    "replicas": replicas,
    "switch": switch,
    "watch": watch,
}


def _say(is_json: bool, report: dict[str, Any]) -> None:
    if is_json:
        json_out(report)
    else:
        note("written to etcd; the elected controller does it: petps cluster status --wait 60")


def _check_known(state: State, address: str) -> None:
    if address not in state.registrations:
        known = ", ".join(sorted(state.registrations)) or "none"
        raise InvalidArgument(f"{address} has never registered; known are {known}")


def check_moves(state: State) -> None:
    """Raise FailedPrecondition if no partition of the model can move."""
    from petps.cluster.obstacles import find_obstacle

    if state.map is None:
        raise FailedPrecondition(f"model '{state.model}' has no map yet: petps cluster init")
    if reason := find_obstacle(state):
        raise FailedPrecondition(reason)


def _first_version(state: State) -> int:
    """Return a version above those that servers use: a server starts with version 1."""
    return max([1, *(member.map_version for member in state.members.values())]) + 1


def _map_of_file(path: Path, state: State) -> ClusterMap:
    from petps.cli.commands.cluster_restored import document_of
    from petps.cluster.maps import ClusterMap

    document = document_of(path, state)
    missing = [
        server["address"]
        for server in document["servers"]
        if server["address"] not in state.members
    ]
    if missing:
        raise FailedPrecondition(
            f"{', '.join(missing)} of {path} are not registered: start them with [cluster] first, "
            "each with its address of the map"
        )
    document["version"] = max(document["version"], _first_version(state))
    return ClusterMap.of(document)


def _planned_map(state: State, count: int) -> ClusterMap:
    from petps.cluster import Member, Model, make_plan
    from petps.cluster.maps import ClusterMap

    present = sorted(set(state.members) - state.drained)
    if len(present) < count:
        raise FailedPrecondition(
            f"{count} replicas need as many servers, but {len(present)} are registered: start the "
            "servers with [cluster] first"
        )
    pushed = any(state.registrations[address].is_pushed for address in present)
    if pushed and count > 1:
        raise FailedPrecondition(
            "the model has tables that pushes feed, so each partition has one owner: --replicas 1"
        )
    counts = {state.registrations[address].partitions for address in present}
    if len(counts) > 1:
        raise FailedPrecondition(
            f"the pools have different numbers of partitions ({', '.join(map(str, counts))}): "
            "all servers of a model need the same"
        )
    partitions = counts.pop()
    members = [
        Member(address, state.registrations[address].zone, state.registrations[address].weight)
        for address in present
    ]
    plan = make_plan(members, [Model(state.model, partitions, count)], {})
    first = ClusterMap(state.model, _first_version(state), tuple(plan.owners[state.model]))
    for address in present:
        registration = state.registrations[address]
        first = first.described(address, registration.grpc_address, registration.zone)
    return first


def _settled(target: ClusterTarget, seconds: float) -> State:
    """Return the first state in which nothing moves. Raises DeadlineExceeded."""
    state = None
    for state in target.watch(seconds):
        if not unsettled(state):
            return state
    reason = "etcd does not answer" if state is None else unsettled(state)
    raise DeadlineExceeded(
        f"after {seconds:g} s: {reason}; is a controller running? petps cluster status shows it"
    )


def _wait_until_drained(target: ClusterTarget, address: str, seconds: float) -> None:
    """Wait until a server owns and moves nothing. Raises DeadlineExceeded."""
    owned: list[int] = []
    for state in target.watch(seconds):
        owners = () if state.map is None else state.map.owners
        owned = [number for number, present in enumerate(owners) if address in present]
        if not owned and not any(move.source == address for move in state.moves.values()):
            return
    still = f"owns partitions {ranges_text(owned)}" if owned else "has the rows of a move"
    raise DeadlineExceeded(
        f"after {seconds:g} s {address} still {still}; the drain goes on: petps cluster status"
    )


def unsettled(state: State) -> str:
    """Return what is still to be done; '': nothing."""
    from petps.cluster.obstacles import find_restored
    from petps.cluster.switch import late

    if state.map is None:
        return f"model '{state.model}' has no map"
    if restored := find_restored(state):
        return restored
    if state.moves or state.wishes:
        numbers = sorted({*state.moves, *state.wishes})
        return f"partitions {', '.join(map(str, numbers))} move"
    if state.switch:
        from petps.cluster.switch import lacking

        reason = lacking(state, state.switch)
        return f"the model is not switched to {state.switch} yet" + (f": {reason}" * bool(reason))
    if state.is_rebalancing:
        return "partitions are being balanced"
    owning = {address for present in state.map.owners for address in present}
    if left := sorted(state.drained & owning):
        return f"{', '.join(left)} still own partitions"
    wanted = state.settings.replicas
    uneven = [number for number, present in enumerate(state.map.owners) if len(present) != wanted]
    if uneven:
        return f"partitions {ranges_text(uneven)} have not {wanted} owners"
    if removing := sorted({owner for owner, _ in state.drops} & set(state.members)):
        return f"{', '.join(removing)} still remove rows"
    behind = [
        member.address
        for member in state.members.values()
        if member.map_version < state.map.version
    ]
    if behind:
        return f"{', '.join(sorted(behind))} do not use the map yet"
    return late(state)


def ranges_text(partitions: list[int]) -> str:
    """Return "0-3, 7", or "none"."""
    from petps.server.shard_map import ranges

    return ", ".join(map(str, ranges(partitions))) or "none"


def _member_reports(state: State) -> list[dict[str, Any]]:
    owners = () if state.map is None else state.map.owners
    follows = {} if state.map is None else state.map.follows
    named = {*state.registrations, *state.members, *follows}
    named |= {address for present in owners for address in present}
    reports = []
    for address in sorted(named):
        member, registration = state.members.get(address), state.registrations.get(address)
        owned = [number for number, present in enumerate(owners) if address in present]
        lagging = [
            number
            for number, report in sorted((member.partitions if member else {}).items())
            if not report.is_caught_up
        ]
        reports.append(
            {
                "address": address,
                "present": member is not None,
                "drained": address in state.drained,
                "zone": "" if registration is None else registration.zone,
                "weight": 1.0 if registration is None else registration.weight,
                "release": "" if registration is None else registration.release,
                "map_version": None if member is None else member.map_version,
                "instance": None if member is None else member.instance,
                "whole_instances": [] if member is None else list(member.whole),
                "owned": owned,
                "follows": sorted(follows.get(address, ())),
                "not_caught_up": lagging,
                "removing": sorted(number for owner, number in state.drops if owner == address),
                "error": "" if member is None else member.error,
            }
        )
    return reports


def _report(state: State, controller: str) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "model": state.model,
        "map_version": None if state.map is None else state.map.version,
        "replicas": state.settings.replicas,
        "rebalancing": state.is_rebalancing,
        "instance": None if state.choice is None else state.choice.instance,
        "switch": state.switch or None,
        "controller": controller or None,
        "members": _member_reports(state),
        "moves": [asdict(move) for _, move in sorted(state.moves.items())],
        "sent": [asdict(sent) for _, sent in sorted(state.sent.items())],
        "received": [asdict(received) for _, received in sorted(state.received.items())],
        "wishes": [asdict(wish) for _, wish in sorted(state.wishes.items())],
        "settled": not unsettled(state),
    }


def _print(state: State, controller: str) -> None:
    version = "none: petps cluster init" if state.map is None else state.map.version
    facts(
        [
            ("model", state.model),
            ("map version", str(version)),
            ("replicas", state.settings.replicas),
            ("controller", controller or "none is elected: start petps controller"),
            ("to do", unsettled(state) or "nothing"),
        ]
    )
    columns = ("server", "state", "zone", "weight", "map", "owns", "follows", "removes")
    table(
        columns,
        [
            (
                report["address"],
                ("drained" if report["drained"] else "in") if report["present"] else "away",
                report["zone"] or "-",
                f"{report['weight']:g}",
                str(report["map_version"] or "-"),
                ranges_text(report["owned"]),
                ranges_text(report["follows"]),
                ranges_text(report["removing"]),
            )
            for report in _member_reports(state)
        ],
    )
    for number, move in sorted(state.moves.items()):
        typer.echo(
            f"partition {number}: {move.source or 'nobody'} -> {move.target or 'nobody'}, "
            f"{move.phase} ({move.reason})"
        )
        for copy in (state.sent.get(number), state.received.get(number)):
            if copy is not None and copy.error:
                typer.echo(f"partition {number} waits: {copy.address}: {copy.error}")
    for report in _member_reports(state):
        if report["error"]:
            typer.echo(f"{report['address']} reports: {report['error']}")


def _lines(state: State) -> dict[str, str]:
    """Return what watch shows, by thing."""
    lines = {"map": "none" if state.map is None else f"version {state.map.version}"}
    for report in _member_reports(state):
        if not report["present"]:
            text = "away"
        else:
            text = f"{'drained' if report['drained'] else 'in'}, uses map {report['map_version']}"
            text += f", owns {ranges_text(report['owned'])}"
            if report["follows"]:
                text += f", follows {ranges_text(report['follows'])}"
            if report["removing"]:
                text += f", removes {ranges_text(report['removing'])}"
        lines[f"server {report['address']}"] = text
    for number, move in state.moves.items():
        lines[f"partition {number}"] = (
            f"{move.source or 'nobody'} -> {move.target or 'nobody'}, {move.phase}"
        )
    return lines
