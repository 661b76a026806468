"""What stands against moves: of a model, of one move, and of a member as a target."""

from __future__ import annotations

from petps.cluster.records import State

__all__ = ["NO_STORE", "fault_of", "find_obstacle", "find_restored", "refusal_of_move"]

NO_STORE = (
    "model '{model}' has tables that pushes feed, and their rows move through a store, which "
    "{address} does not have: set cluster.store of all its servers to one folder or URL that all "
    "of them reach, and restart them"
)


def find_obstacle(state: State) -> str:
    """Return why no partition of the model can move; '' if they can."""
    if state.is_pushed:
        for address, registration in sorted(state.registrations.items()):
            if not registration.has_store:
                return NO_STORE.format(model=state.model, address=address)
    return ""


def find_restored(state: State) -> str:
    """Return what says that etcd is older than what servers have seen of it; '': nothing does."""
    newest = max(state.members.values(), key=lambda member: member.map_version, default=None)
    if state.map is None or newest is None or newest.map_version <= state.map.version:
        return ""
    return (
        f"etcd has version {state.map.version} of the map of model '{state.model}', and "
        f"{newest.address} uses version {newest.map_version}: etcd was restored from a backup. "
        "Nothing is done until it has the newest map again: petps cluster init POOL.map.json "
        "--restored, with the file of the highest version of all servers. If that server's file is "
        "another cluster's: stop the server, remove the file, and start it again"
    )


def refusal_of_move(state: State, partition: int, source: str, target: str) -> str:
    """Return why an operator cannot move a partition; '' if nothing speaks against it."""
    if state.map is None:
        return f"model '{state.model}' has no map yet: petps cluster init"
    if reason := find_obstacle(state):
        return reason
    if not 0 <= partition < len(state.map.owners):
        return f"partition {partition} is none of 0 to {len(state.map.owners) - 1}"
    owners = state.map.owners[partition]
    if source not in owners:
        return f"{source} does not own partition {partition}; its owners are {', '.join(owners)}"
    if target in owners:
        return f"{target} owns partition {partition} already"
    if target not in state.members:
        known = ", ".join(sorted(state.members)) or "none"
        return f"{target} is no member that is present; present are {known}"
    if fault := fault_of(state, target):
        return f"{target} can own nothing now: {fault}"
    if target in state.drained:
        return f"{target} is drained; petps cluster drain --undo {target} ends that"
    if partition in state.moves:
        return f"partition {partition} moves already ({state.moves[partition].phase})"
    if (target, partition) in state.drops:
        return f"{target} still removes its old rows of partition {partition}: try again later"
    return ""


def fault_of(state: State, address: str) -> str:
    """Return why a member that is present may not be given a partition; '' if it may."""
    registration = state.registrations.get(address)
    if registration is not None and state.map is not None:
        count = len(state.map.owners)
        if registration.partitions != count:
            return f"its pool has {registration.partitions} partitions, and the map has {count}"
    return state.members[address].error
