"""The controller: one of several processes is elected, and executes the next step again and again.

Owns:        the election, its lease, and the times that it has measured (Clocks).
Never does:  act before etcd has the step; keep state that its successor needs; speak to a server.
Called by:   `petps controller`.
Invariants:  Each transaction compares the election's key, so one that was elected earlier and
             paused changes nothing. CONTROLLER.md beside this has the order of the steps.
Threads:     one, which calls tick().
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from petps.cluster.etcd import LEASE_SHARE, Compare, Read
from petps.cluster.limits import Limits, Step
from petps.cluster.obstacles import find_obstacle, find_restored
from petps.cluster.records import FORMAT, HANDOVER, SWITCH, Keys, Move, State, read_state
from petps.cluster.steps import find_step
from petps.errors import PetpsError
from petps.log import INFO, WARNING, Line

__all__ = ["Clocks", "Controller", "Store", "read_models"]

TICK_SECONDS: Final = 0.25  # between two looks at the state
HANDOVER_SECONDS: Final = 0.05  # likewise, while a partition is handed over: its pushes wait
STEPS_OF_A_TICK: Final = 64  # of one model, so that no model makes the others wait


class Store(Protocol):
    """The calls of etcd that a controller uses (petps.cluster.etcd.Etcd)."""

    def read(self, prefix: str, *, since: int = 0) -> Read:
        """See Etcd."""

    def commit(
        self,
        compares: tuple[Compare, ...],
        puts: Mapping[str, str],
        deletes: tuple[str, ...] = (),
        *,
        lease: int = 0,
    ) -> int | None:
        """See Etcd."""

    def grant(self, seconds: int) -> int:
        """See Etcd."""

    def keep_alive(self, lease: int) -> bool:
        """See Etcd."""

    def revoke(self, lease: int) -> None:
        """See Etcd."""


def read_models(prefix: str, read: Read) -> dict[str, State]:
    """Return the state of each model, in the keys below Keys.models(prefix). See read_state."""
    root = Keys.models(prefix)
    values: dict[str, dict[str, str]] = {}
    revisions: dict[str, dict[str, int]] = {}
    for key, value in read.values.items():
        if not key.startswith(root):
            continue
        model = key.removeprefix(root).partition("/")[0]
        values.setdefault(model, {})[key] = value.text
        revisions.setdefault(model, {})[key] = value.changed
    return {
        model: read_state(Keys(prefix, model), values[model], revisions[model]) for model in values
    }


class Clocks:
    """Times (petps.cluster.limits) of one model, measured by this process since its election."""

    def __init__(self, clock: Callable[[], float], pause_seconds: float) -> None:
        self._clock, self._pause_seconds = clock, pause_seconds
        self._away: dict[str, float] = {}
        # Since when each condition on a move has held, by the phase of the move.
        self._held: dict[tuple[int, int, int, str, str], float] = {}
        self._begun: float | None = None

    def look(self, state: State) -> None:
        """Note which servers are away in this state. Call it before find_step()."""
        known = set(state.registrations)
        if state.map is not None:
            known |= {owner for present in state.map.owners for owner in present}
            known |= set(state.map.follows)
        now = self._clock()
        away = known - set(state.members)
        self._away = {address: self._away.get(address, now) for address in away}
        current = {_phase_of(move) for move in state.moves.values()}
        self._held = {key: at for key, at in self._held.items() if key[:4] in current}

    def note_begun(self) -> None:
        """Note that a move began now."""
        self._begun = self._clock()

    def away_seconds(self, address: str) -> float:
        """See Times."""
        since = self._away.get(address)
        return 0.0 if since is None else self._clock() - since

    def held_seconds(self, move: Move, condition: str, *, holds: bool) -> float:
        """See Times."""
        key = (*_phase_of(move), condition)
        if not holds:
            self._held.pop(key, None)
            return 0.0
        return self._clock() - self._held.setdefault(key, self._clock())

    def may_begin(self) -> bool:
        """See Times."""
        return self._begun is None or self._clock() - self._begun >= self._pause_seconds


def _phase_of(move: Move) -> tuple[int, int, int, str]:
    return move.partition, move.map_version, move.attempt, move.phase


class Controller:
    """One of the controllers of a prefix. tick() does what is due; call it until close().

    name: of this process, for people. log: takes a line for each step and each change of state.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        limits: Limits,
        *,
        name: str,
        lease_seconds: int,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._prefix, self._limits = store, prefix, limits
        self._name, self._lease_seconds = name, lease_seconds
        self._log, self._clock = log, clock
        self._lease = 0
        self._elected: Compare | None = None  # the fence; None: another one is elected
        self._term = 0  # the revision of the last election that this process won
        self._keep_at = 0.0
        self._clocks: dict[str, Clocks] = {}
        self._said: dict[str, str] = {}
        self._handing_over: set[str] = set()  # models with a partition whose pushes wait

    @property
    def tick_seconds(self) -> float:
        """Return the pause until the next tick()."""
        return HANDOVER_SECONDS if self._handing_over else TICK_SECONDS

    @property
    def is_elected(self) -> bool:
        """Return whether this process was the elected one when it looked last."""
        return self._elected is not None

    def tick(self) -> bool:
        """Stand for election, or take the next steps. Return whether anything was done.

        An etcd that does not answer is logged once, and tried again by the next call.
        """
        try:
            is_done = self._tick()
        except PetpsError as error:
            self._say("etcd", f"{error}; no move starts until that ends", "etcd_failed", WARNING)
            return False
        self._say("etcd", "", "etcd_failed")
        return is_done

    def close(self) -> None:
        """Resign, so that another controller is elected at once."""
        lease, self._lease, self._elected = self._lease, 0, None
        if lease:
            self._store.revoke(lease)

    def _tick(self) -> bool:
        if not self._keep_lease() or not self._stand():
            return False
        read = self._store.read(Keys.models(self._prefix))
        is_done = False
        for model in sorted(self._models_of(read)):
            for _ in range(STEPS_OF_A_TICK):
                if self._elected is None or not self._take_step(model):
                    break
                is_done = True
        return is_done

    def _models_of(self, read: Read) -> set[str]:
        root = Keys.models(self._prefix)
        return {key.removeprefix(root).partition("/")[0] for key in read.values}

    def _take_step(self, model: str) -> bool:
        """Read a model, and execute its next step. Return whether there was one."""
        step = self.plan_step(model)
        return step is not None and self.execute(model, step)

    def plan_step(self, model: str) -> Step | None:
        """Read a model, and return its next step, which execute() takes."""
        keys = Keys(self._prefix, model)
        read = self._store.read(keys.root)
        clocks = self._clocks.setdefault(model, Clocks(self._clock, self._limits.pause_seconds))
        try:
            states = read_models(self._prefix, read)
            if model not in states:
                return None
            state = states[model]
            clocks.look(state)
            self._note_handovers(state)
            obstacle = find_obstacle(state) if state.map else ""
            self._say(f"{model} has no store", obstacle, "no_store")
            self._say(f"{model} is older", find_restored(state), "etcd_restored", WARNING)
            step = find_step(state, keys, self._limits, clocks)
        except Exception as error:  # the other models go on
            is_ours = isinstance(error, PetpsError)
            reason = str(error) if is_ours else f"{type(error).__name__}: {error}"
            self._say(model, f"model '{model}' is left as it is: {reason}", "plan_failed", WARNING)
            return None
        self._say(model, "", "plan_failed")
        return step

    def _note_handovers(self, state: State) -> None:
        phases = {move.phase for move in state.moves.values() if move.is_copied}
        if phases & {HANDOVER, SWITCH}:
            self._handing_over.add(state.model)
        else:
            self._handing_over.discard(state.model)

    def execute(self, model: str, step: Step) -> bool:
        """Commit a step. Return False if the state has changed since, or another one is elected."""
        if self._elected is None:
            return False
        compares = (*step.compares, self._elected)
        if self._store.commit(compares, step.puts, step.deletes) is None:
            self._elected = None  # perhaps: the next tick looks
            return False
        if step.event == "move_begun":
            self._clocks[model].note_begun()
        self._log(Line(f"model '{model}': {step.text}", step.event, model=model))
        return True

    def _keep_lease(self) -> bool:
        """Keep the lease alive, or get a new one. Return whether this process has one."""
        now = self._clock()
        if self._lease and now < self._keep_at:
            return True
        if not self._lease or not self._store.keep_alive(self._lease):
            if self._elected is not None:
                self._say("election", "another controller may be elected now", "not_elected")
            self._elected, self._lease = None, 0
            self._lease = self._store.grant(self._lease_seconds)
        self._keep_at = now + self._lease_seconds / LEASE_SHARE
        return True

    def _stand(self) -> bool:
        """Return whether this process is elected, after it tried to be."""
        if self._elected is not None:
            return True
        key = Keys.election(self._prefix)
        value = json.dumps({"format": FORMAT, "name": self._name})
        revision = self._store.commit((Compare(key, 0),), {key: value}, lease=self._lease)
        if revision is None:
            present = self._store.read(key).values.get(key)
            if present is None or present.lease != self._lease:
                self._say("election", "another controller is elected; waiting", "not_elected")
                return False
            revision = present.created
        self._elected = Compare(key, revision, is_created=True)
        if revision != self._term:
            self._term = revision
            self._clocks.clear()
        self._say("election", f"{self._name} is elected, and plans from now on", "elected")
        return True

    def _say(self, about: str, text: str, event: str, level: int = INFO) -> None:
        """Log a text about a thing when it changes; '': there is nothing to say any more."""
        if self._said.get(about, "") != text:
            self._said[about] = text
            if text:
                self._log(Line(text, event, level))
