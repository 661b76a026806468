"""When the model's name may refer to another instance on all servers of a cluster.

One version of the map switches them all. It is written when every owner has the instance whole, so
from then on any owner answers for it: a client that asks for the instance by name does not care
which of them have switched already.
"""

from __future__ import annotations

from petps.cluster.records import State

__all__ = ["is_due", "lacking", "late", "refusal_of_switch", "refusal_of_way_back"]


def refusal_of_switch(state: State) -> str:
    """Return why the cluster cannot switch its model; '' if nothing speaks against it."""
    if state.map is None:
        return f"model '{state.model}' has no map yet: petps cluster init"
    own_will = sorted(
        address
        for address, registration in state.registrations.items()
        if not registration.is_manual
    )
    if own_will:
        return (
            f'{", ".join(own_will)} switch on their own: set ingest.switch = "manual" on every '
            "server, and restart it"
        )
    return ""


def refusal_of_way_back(state: State, instance: str) -> str:
    """Return why the model cannot be switched back to an instance; '' if it can, or is not back.

    Rows of an instance that nothing feeds any more do not move. A log's progress shows where they
    are missing; pushes have none.
    """
    choice = state.choice
    if choice is None or state.map is None or instance != choice.before:
        return ""
    if not state.is_pushed or state.map.version <= choice.map_version:
        return ""
    return (
        f"partitions have moved since the switch to {choice.instance} (map {choice.map_version}; "
        f"now {state.map.version}), and the rows of {instance} that were pushed have not: load "
        "them into a new instance, and switch to that"
    )


def lacking(state: State, instance: str) -> str:
    """Return what is missing before the model can be switched to an instance; '': nothing."""
    if state.map is None:
        return "there is no map"
    if refusal := refusal_of_way_back(state, instance):
        return refusal
    present = _present_owners(state)
    without = sorted(owner for owner in present if instance not in state.members[owner].whole)
    if without:
        return f"{', '.join(without)} have not loaded {instance}"
    silent = [
        str(number)
        for number, of_partition in enumerate(state.map.owners)
        if present.isdisjoint(of_partition)
    ]
    return f"no owner of partitions {', '.join(silent)} is present" if silent else ""


def is_due(state: State) -> bool:
    """Return whether the model is to be switched, and every owner has the instance whole."""
    return bool(state.switch) and not lacking(state, state.switch)


def late(state: State) -> str:
    """Return which owners have not obeyed the last switch yet; '': none.

    Those that switch on their own by now obey none.
    """
    if state.map is None or state.choice is None:
        return ""
    behind = sorted(
        owner
        for owner in _present_owners(state) & set(state.registrations)
        if state.registrations[owner].is_manual
        and state.members[owner].instance != state.choice.instance
    )
    return f"{', '.join(behind)} have not switched to {state.choice.instance} yet" if behind else ""


def _present_owners(state: State) -> set[str]:
    """Return the owners of all partitions that are members now."""
    owners = () if state.map is None else state.map.owners
    return {owner for present in owners for owner in present} & set(state.members)
