"""The change of a store from one state to the next. STORE.md, "The answer may be lost".

Owns:        prepare(), create_state(), pause(), list_obsolete().
Never does:  read or write rows; decide what changes.
Called by:   store.py.
Invariants:  a change makes a new state, wholly or not at all; a state that another process may have
             read is removed only once STATES_KEPT newer ones exist.
Threads:     any.
"""

from __future__ import annotations

import contextlib
import random
import time
from dataclasses import replace
from typing import Final

from petps.checkpoint.files import Files
from petps.checkpoint.state import State
from petps.checkpoint.state_files import encode_state, newest_state, state_path, write_lineage
from petps.errors import (
    AlreadyExists,
    FailedPrecondition,
    IoError,
    NotFound,
    PetpsError,
    Unavailable,
)

__all__ = ["CHANGE_TRIES", "create_state", "list_obsolete", "pause", "prepare"]

STATES_KEPT: Final = 8
# How often a change is made again because another writer was faster.
CHANGE_TRIES: Final = 16
# The longest first pause before it is made again, and the longest of all; they double.
PAUSE_SECONDS: Final = 0.01
PAUSE_SECONDS_MAX: Final = 2.0


def prepare(files: Files, before: State, after: State) -> State:
    """Write the lineages of ``after`` that ``before`` lacks; return it as the state that follows.

    The first state of a store follows state 0, which has no file. Raise IoError.
    """
    lineages_before = {lineage.file: lineage for lineage in before.lineages}
    lineages = []
    for lineage in after.lineages:
        if lineages_before.get(lineage.file) is not lineage:
            lineage = write_lineage(files, lineage)
        lineages.append(lineage)
    after = replace(after, number=before.number + 1, lineages=tuple(lineages))
    return replace(after, trash=tuple(sorted(before.files() - after.files())))


def create_state(files: Files, state: State) -> None:
    """Create the file of a state that prepare() returned: from then on it is the newest.

    Raise FailedPrecondition if another writer made the state with this number. Raise IoError if the
    store does not answer: then the state may exist, or appear later.
    """
    path, body = state_path(state.number), encode_state(state)
    try:
        _create(files, state.number, path, body)
    except IoError:  # the file may exist, but not durably, or the store may be back: ask again
        _create(files, state.number, path, body)
    # With STATES_KEPT newer states, other writers may have made this number and removed it, so that
    # it could be created a second time.
    if newest_state(files) >= state.number + STATES_KEPT:
        with contextlib.suppress(PetpsError):
            files.remove(path)
        raise _overtaken_error(files, state.number)


def _create(files: Files, number: int, path: str, body: bytes) -> None:
    try:
        files.create(path, body)
    except AlreadyExists:
        try:
            is_own = files.read(path) == body  # an earlier request had created it
        except NotFound:  # newer states followed, and the writer of one removed this state
            is_own = False
        if not is_own:
            raise _overtaken_error(files, number) from None


def _overtaken_error(files: Files, number: int) -> FailedPrecondition:
    return FailedPrecondition(
        f"{files.name}: another writer made state {number} first: open the store again, and "
        "make sure that only one process writes it"
    )


def pause(attempt: int, error: FailedPrecondition) -> None:
    """Wait a random time before a change is made again; raise Unavailable after the last try."""
    if attempt + 1 == CHANGE_TRIES:
        raise Unavailable(
            f"{error}; {CHANGE_TRIES} tries were too slow: try again, or let the other process "
            "change the store less often"
        ) from error
    time.sleep(random.uniform(0, min(PAUSE_SECONDS * 2**attempt, PAUSE_SECONDS_MAX)))


def list_obsolete(before: State) -> list[str]:
    """Return the files that no reader needs once the state after ``before`` is durable.

    The newest state may still be lost, so the files of ``before`` stay.
    """
    oldest = before.number - STATES_KEPT + 1
    return [*before.trash, *([state_path(oldest)] if oldest > 0 else [])]
