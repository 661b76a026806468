"""petps cluster add: a server that has registered gets its part of the partitions."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Annotated, Final

import typer

from petps.cli.cluster_target import ClusterTarget, open_target
from petps.cli.commands.cluster_etcd import (
    Address,
    ConfigFile,
    ModelName,
    check_moves,
    ranges_text,
    unsettled,
)
from petps.cli.options import JsonReport
from petps.cli.output import json_out, note
from petps.errors import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
)

if TYPE_CHECKING:
    from petps.cluster.records import State

__all__ = ["add"]

ANSWER_SECONDS: Final = 2.0  # for a server to accept a connection
WAIT_SECONDS: Final = 3600.0


def add(
    address: Address,
    wait: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0, help="Wait for the end, at most this long; 0: no."),
    ] = WAIT_SECONDS,
    config: ConfigFile = None,
    model: ModelName = None,
    json_: JsonReport = False,
) -> None:
    """Give a new server its fair part of the partitions, with the fewest moves.

    Start the server first, with the same \\[cluster] section: it registers itself, and owns nothing
    yet. The controller moves partitions to it, and this command shows how far that is. Ctrl-C ends
    the command, and not the moves.

    [bold]Examples[/bold]

        petps cluster add h4:7070 --config cluster.toml
    """
    with open_target(config, model) as target:
        state = target.state_when_present(address)
        _check(target, state, address)
        if wait and not target.controller():
            raise FailedPrecondition(
                "no controller is elected, so nothing would move: start petps controller first"
            )
        target.put({target.keys.rebalance: "{}"}, (target.keys.drained(address),))
        if not wait:
            note("written to etcd; the elected controller does it: petps cluster status --wait 60")
            owned = _owned(state, address)
        else:
            owned = _follow(target, address, wait, shows=not json_)
    if json_:
        json_out({"address": address, "owned": owned})


def _check(target: ClusterTarget, state: State, address: str) -> None:
    """Raise an error if the server cannot be added to the model."""
    check_moves(state)
    assert state.map is not None
    registration = state.registrations.get(address)
    if registration is None:
        if other := _model_of(target, address):
            raise InvalidArgument(
                f"{address} serves model '{other}', and not '{state.model}': a server of a cluster "
                "serves one model"
            )
        known = ", ".join(sorted(state.registrations)) or "none"
        raise NotFound(
            f"{address} has not registered; known are {known}. Start it with the same [cluster] "
            "section, and with server.address if clients reach it by another name"
        )
    partitions = len(state.map.owners)
    if registration.partitions != partitions:
        raise FailedPrecondition(
            f"the pool of {address} has {registration.partitions} partitions, and model "
            f"'{state.model}' has {partitions}: create its pool with --partitions {partitions}"
        )
    if (owned := _owned(state, address)) and address not in state.drained:
        raise AlreadyExists(
            f"{address} is in the cluster already, and owns partitions {ranges_text(owned)}; "
            "petps cluster rebalance divides them again"
        )
    member = state.members.get(address)
    if member is None:
        raise Unavailable(f"{address} is away: etcd has not heard of it. Is its server running?")
    if member.error:
        raise FailedPrecondition(f"{address} reports: {member.error}")
    if fault := _fault_of(address):
        raise Unavailable(
            f"{address} does not answer: {fault}. Clients and servers use this address "
            "(server.address)"
        )


def _model_of(target: ClusterTarget, address: str) -> str:
    """Return another model for which an address has registered; '': there is none."""
    from petps.cluster.records import Keys

    root = Keys.models(target.keys.prefix)
    for key in target.etcd.read(root).values:
        model, _, rest = key.removeprefix(root).partition("/")
        if rest == f"servers/{address}":
            return model
    return ""


def _fault_of(address: str) -> str:
    """Return why no connection to an address is possible; '': it is."""
    host, _, port = address.rpartition(":")
    try:
        with contextlib.closing(
            socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS)
        ):
            return ""
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)


def _owned(state: State, address: str) -> list[int]:
    owners = () if state.map is None else state.map.owners
    return [number for number, present in enumerate(owners) if address in present]


def _follow(target: ClusterTarget, address: str, wait: float, *, shows: bool) -> list[int]:
    """Show how far the moves are, until the end. Return what the server owns then."""
    line, reason = "", "etcd does not answer"
    for state in target.watch(wait):
        owned, reason = _owned(state, address), unsettled(state)
        moving = ", ".join(
            f"{number} ({move.phase})" for number, move in sorted(state.moves.items())
        )
        before, line = line, f"{address} owns {ranges_text(owned)}; moving: {moving or 'none'}"
        if shows and line != before:
            note(line)
        if not reason:
            if shows:
                note(f"{address} is in the cluster, and owns {len(owned)} partitions")
            return owned
    raise DeadlineExceeded(
        f"after {wait:g} s: {reason}. The moves go on: petps cluster status shows them"
    )
