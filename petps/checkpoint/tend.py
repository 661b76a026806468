"""A store kept in order beside the training, by a process that is no trainer. STORE.md.

Owns:        Tending: one round of splitting, merging, base resets, verifying and purging.
Never does:  add a version; drop the newest whole version.
Called by:   `petps checkpoint tend`.
Invariants:  no version that is kept changes; a round that another writer disturbs is made again.
Threads:     one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from petps.checkpoint.policy import Policy
from petps.checkpoint.retention import Retention
from petps.checkpoint.state import Chunk, State, Version
from petps.checkpoint.store import Store
from petps.checkpoint.verify import check_chunk, check_parts
from petps.errors import FailedPrecondition, IoError, NotFound, PetpsError

__all__ = ["Round", "Tending", "find_whole"]

_log = logging.getLogger("petps.checkpoint")
# If a trainer commits during a change of this process, the change fails, and is made again.
TRIES: Final = 8


@dataclass(slots=True)
class Round:
    """The result of a round. damaged: versions that cannot be restored, with each one's problem.

    whole: the newest version of which all was read and nothing is damaged; None: there is none yet.
    checked: the number of chunks that were read. unread: of chunks, and of versions' parts, that
    are left.
    """

    arranged: bool = False
    """Whether chunks were split or merged."""
    base: int | None = None
    """The version that was written again as a base."""
    dropped: list[int] = field(default_factory=list)
    checked: int = 0
    damaged: dict[int, str] = field(default_factory=dict)
    whole: int | None = None
    unread: int = 0
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)
    """When it arranged, wrote a base, verified and purged: Unix seconds and duration in seconds."""
    error: PetpsError | None = None
    """What arranging or reading raised; the rest of the round was done all the same."""


class Tending:
    """Rounds over a store. policy: how chunks are split and merged; retention: None keeps all.

    resets: whether a version becomes a base where the policy asks for one.
    verify_bytes: how much is read in a round to find damage; each chunk is read once.
    unreadable_is_damage: whether what the disk or the network refuses counts as damaged.
    """

    def __init__(
        self,
        store: Store,
        policy: Policy,
        retention: Retention | None,
        *,
        verify_bytes: int,
        resets: bool = True,
        now_ns: Callable[[], int] = time.time_ns,
        unreadable_is_damage: bool = False,
    ) -> None:
        self._store, self._policy, self._retention = store, policy, retention
        self._verify_bytes = verify_bytes
        self._resets = resets
        self._now_ns = now_ns
        self._unreadable_is_damage = unreadable_is_damage
        self._arranged_version = 0
        self._problems: dict[Chunk, str] = {}  # of the chunks that were read; "": none
        self._part_problems: dict[tuple[int, int], str] = {}

    def find_damage(self) -> Round:
        """Read what no round has read yet, up to verify_bytes, and return what is damaged."""
        done = Round()
        self._verify(done)
        return done

    def round(self) -> Round:
        """Do what is due, and return what it was. Raise the errors of a store's files."""
        done = Round()
        state = self._store.refresh()
        if not state.versions():
            return done
        newest = state.newest_version
        try:
            with _timed(done, "arrange", lambda: done.arranged):
                if newest != self._arranged_version and self._try(lambda: self._arrange(done)):
                    self._arranged_version = newest
            if self._resets:
                with _timed(done, "base", lambda: done.base is not None):
                    self._try(lambda: self._reset(done))
        except PetpsError as error:  # for example a damaged chunk, which _verify() reports
            done.error = error
        with _timed(done, "verify", lambda: done.checked > 0):
            self._verify(done)
        if self._retention is not None:
            with _timed(done, "purge", lambda: bool(done.dropped)):
                self._try(lambda: self._purge(done))
        return done

    def _try(self, change: Callable[[], None]) -> bool:
        """Make a change; return whether it was made. Repeat it if a trainer committed during it."""
        for _ in range(TRIES):
            number = self._store.refresh().number
            try:
                change()
                return True
            except (FailedPrecondition, NotFound):  # NotFound: a file that it has replaced
                if self._store.refresh().number == number:
                    raise
        _log.warning("[checkpoint] %s changes too often; trying again later", self._store.name)
        return False

    def _arrange(self, done: Round) -> None:
        number = self._store.state.number
        self._policy.arrange_all(self._store)
        done.arranged = done.arranged or self._store.state.number > number
        self._store.tidy()

    def _reset(self, done: Round) -> None:
        if self._policy.is_reset_due(self._store):
            done.base = self._store.reset().version

    def _purge(self, done: Round) -> None:
        assert self._retention is not None
        kept = self._retention.choose(self._store.state.versions(), self._now_ns())
        if done.whole is not None:
            kept.add(done.whole)
        elif done.unread:
            return  # any version may be the only whole one
        done.dropped = self._store.drop_all_but(kept)

    # ---- finding damage

    def _verify(self, done: Round) -> None:
        state = self._store.refresh()
        left = self._verify_bytes
        for lineage in reversed(state.lineages):
            for chunk in sorted(lineage.chunks, key=lambda chunk: -chunk.first):
                if chunk not in self._problems and left > 0:
                    left -= chunk.length
                    done.checked += 1
                    self._note(
                        done,
                        self._problems,
                        chunk,
                        partial(check_chunk, self._store, lineage, chunk),
                    )
            for entry in reversed(lineage.versions):
                key = _key_of(entry)
                if key not in self._part_problems and left > 0:
                    left -= sum(part.bytes for part in entry.parts.values())
                    check = partial(check_parts, self._store, entry)
                    self._note(done, self._part_problems, key, check)
        # What another writer replaced or dropped in this time is no damage, although its files may
        # be gone.
        self._judge(self._store.refresh(), done)

    def _note(
        self, done: Round, problems: dict[Any, str], key: Any, check: Callable[[], list[str]]
    ) -> None:
        """Note what a check finds. What cannot be read now is left unread."""
        try:
            problems[key] = "; ".join(check())
        except IoError as error:
            if not self._unreadable_is_damage:
                done.error = done.error or error
                return
            problems[key] = str(error)

    def _judge(self, state: State, done: Round) -> None:
        chunks = {chunk for lineage in state.lineages for chunk in lineage.chunks}
        self._problems = {chunk: text for chunk, text in self._problems.items() if chunk in chunks}
        keys = {_key_of(entry) for entry in state.versions()}
        self._part_problems = {
            key: text for key, text in self._part_problems.items() if key in keys
        }
        done.unread = len(chunks - set(self._problems)) + len(keys - set(self._part_problems))
        for lineage in state.lineages:
            for entry in lineage.versions:
                needed = lineage.chunks_of(entry.version)
                problems = [self._problems.get(chunk) for chunk in needed]
                problems.append(self._part_problems.get(_key_of(entry)))
                problem = next(filter(None, problems), "")
                if problem:
                    done.damaged[entry.version] = problem
                elif None not in problems:
                    done.whole = entry.version


@contextmanager
def _timed(done: Round, work: str, has_worked: Callable[[], bool]) -> Iterator[None]:
    """Note in ``done`` how long the block took, if it did anything."""
    at, begin = time.time(), time.monotonic()
    yield
    if has_worked():
        done.spans[work] = (at, time.monotonic() - begin)


def _key_of(entry: Version) -> tuple[int, int]:
    """Return what identifies a version: its number is used again after a rollback."""
    return entry.version, entry.created_ns


def find_whole(store: Store) -> int:
    """Return the newest version that can be restored; read the whole store for it.

    Raise FailedPrecondition if there is none.
    """
    tending = Tending(store, Policy(), None, verify_bytes=1 << 62, unreadable_is_damage=True)
    while (done := tending.find_damage()).unread:  # another writer replaced what was not read yet
        pass
    whole = done.whole
    if whole is None:
        raise FailedPrecondition(f"{store.name} has no whole version to roll back to")
    return whole
