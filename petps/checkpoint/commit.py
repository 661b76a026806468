"""The change of a store from one state to the next. STORE.md.

Owns:        commit(), list_obsolete().
Never does:  read or write rows; decide what changes.
Called by:   store.py.
Invariants:  a change makes a new state, wholly or not at all; a state of another writer is never
             removed.
Threads:     any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import replace
from typing import Final

from petps.checkpoint.files import Files
from petps.checkpoint.state import State, encode_state, newest_state, state_path, write_lineage
from petps.errors import AlreadyExists, FailedPrecondition, IoError, NotFound, PetpsError

__all__ = ["commit", "list_obsolete"]

STATES_KEPT: Final = 8


def commit(files: Files, before: State, after: State, doubtful: set[bytes]) -> State:
    """Write ``after`` as the state that follows ``before``, and return it as written.

    The first state of a store follows state 0, which has no file.

    Args:
        files: The files of the store.
        before: The state from which the caller derived ``after``.
        after: The state to write.
        doubtful: The bodies of this writer's states that may exist although their commit failed,
            because the store did not answer any more. If one of them is in the way, remove it. A
            commit that succeeds empties the set.

    Raise FailedPrecondition if another writer committed since ``before``; raise IoError. After an
    error no state names the files written for ``after``, unless the new state is doubtful.
    """
    number = before.number + 1
    lineages_before = {lineage.file: lineage for lineage in before.lineages}
    lineages = []
    for lineage in after.lineages:
        if lineages_before.get(lineage.file) is not lineage:
            lineage = write_lineage(files, lineage)
        lineages.append(lineage)
    after = replace(after, number=number, lineages=tuple(lineages))
    after = replace(after, trash=tuple(sorted(before.files() - after.files())))
    body = encode_state(after)
    path = state_path(number)
    try:
        _create_state(files, number, body, doubtful)
        # If newer states exist, other writers had committed this number and removed it long ago. So
        # create() could succeed a second time.
        is_overtaken = newest_state(files) > number
    except IoError:
        _retract(files, path, body, doubtful)
        raise
    if is_overtaken:
        with contextlib.suppress(PetpsError):
            files.remove(path)
        raise _overtaken_error(files, number)
    doubtful.clear()
    return after


def _create_state(files: Files, number: int, body: bytes, doubtful: Collection[bytes]) -> None:
    """Create the file of a state. Raise FailedPrecondition if another writer created it; IoError.

    If the file has a doubtful body, replace it.
    """
    path = state_path(number)
    try:
        files.create(path, body)
        return
    except AlreadyExists:
        try:
            found = files.read(path)
        except NotFound:  # newer states followed, and the writer of one removed this state
            raise _overtaken_error(files, number) from None
    if found in doubtful and found != body:
        files.remove(path)
        try:
            files.create(path, body)
        except AlreadyExists:
            raise _overtaken_error(files, number) from None
    elif found != body:  # equal: the filesystem retried after the first try had created the file
        raise _overtaken_error(files, number)


def _retract(files: Files, path: str, body: bytes, doubtful: set[bytes]) -> None:
    """Remove a state whose commit failed, if it exists, because the caller learns of the failure.

    A state of another writer stays. If the store does not answer, add the body to ``doubtful``.
    """
    try:
        if files.read(path) == body:
            files.remove(path)
    except NotFound:
        pass
    except PetpsError:
        doubtful.add(body)


def _overtaken_error(files: Files, number: int) -> FailedPrecondition:
    return FailedPrecondition(
        f"{files.name}: another writer made state {number} first: open the store again, and "
        "make sure that only one process writes it"
    )


def list_obsolete(before: State) -> list[str]:
    """Return the files that no reader needs once the state after ``before`` is durable.

    The newest state may still be lost, so the files of ``before`` stay.
    """
    oldest = before.number - STATES_KEPT + 1
    return [*before.trash, *([state_path(oldest)] if oldest > 0 else [])]
