"""The next step of a cluster: one change of its map and of a move's phase, as one transaction.

A pure function of the state that was read. CONTROLLER.md beside this has the order of the steps,
and the reason why none of them costs a row or a pull.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from petps.cluster.etcd import Compare
from petps.cluster.limits import Limits, Step, Times
from petps.cluster.maps import ClusterMap
from petps.cluster.model import Member as Planned
from petps.cluster.model import Model
from petps.cluster.model import Move as PlannedMove
from petps.cluster.obstacles import fault_of, find_obstacle, find_restored, refusal_of_move
from petps.cluster.plan import make_plan
from petps.cluster.records import (
    FOLLOW,
    HANDOVER,
    OPEN,
    SWITCH,
    Choice,
    Drop,
    Keys,
    Move,
    State,
    dump,
)
from petps.cluster.runs import has_other_runs
from petps.cluster.switch import is_due, lacking, refusal_of_switch

__all__ = ["find_step"]

OUTWAIT_SECONDS: Final = 300.0  # for which a switch of the model waits for a move
FAULT_SECONDS: Final = 60.0  # for which a move waits for a server that is present and not able
UNSERVED_SECONDS: Final = 5.0  # without an owner that is present, before the source is one again
FENCE_SECONDS: Final = 1.0  # that a controller waits for longer than the source answers pulls


def find_step(state: State, keys: Keys, limits: Limits, times: Times) -> Step | None:
    """Return the next step, or None if there is nothing to do, or something to wait for.

    First the moves that have begun go on; then new ones begin. Raises the planner's errors.
    """
    if state.map is None or find_restored(state):
        return None
    work = _Work(state, state.map, keys, limits, times)
    return next(work.steps(), None)


class _Work:
    """The search for the next step of one model."""

    def __init__(
        self, state: State, cluster_map: ClusterMap, keys: Keys, limits: Limits, times: Times
    ) -> None:
        self._state, self._map, self._keys = state, cluster_map, keys
        self._limits, self._times = limits, times

    def steps(self) -> Iterator[Step]:
        """Yield the steps that are possible now, the most urgent first."""
        for move in sorted(self._state.moves.values(), key=lambda move: move.partition):
            yield from self._continue(move)
        yield from self._forget()
        if self._state.switch:
            yield from self._switch_model(self._state.switch)
        if is_due(self._state):
            return  # no move begins before the model is switched
        if find_obstacle(self._state):
            return
        free = self._limits.moves - len(self._state.moves)
        if free > 0 and self._times.may_begin():
            yield from self._wishes()
            yield from self._planned()

    # ---- the model's instance

    def _switch_model(self, instance: str) -> Iterator[Step]:
        """Switch when no partition moves and every owner has the instance whole."""
        key, choice = self._keys.switch, self._state.choice
        compare = Compare(key, self._state.revisions[key])
        if choice is not None and choice.instance == instance:
            text = f"the model's name refers to {instance} already"
            yield Step(text, "switch_ended", (compare,), {}, (key,))
            return
        if refusal := refusal_of_switch(self._state):
            text = f"the model is not switched to {instance}: {refusal}"
            yield Step(text, "switch_refused", (compare,), {}, (key,))
        elif not self._state.moves and not lacking(self._state, instance):
            new_map = self._map.again()
            members = self._state.members
            owners = (owner for present in self._map.owners for owner in present)
            named = next(members[owner].instance for owner in owners if owner in members)
            before = named if choice is None else choice.instance  # an owner may be late
            choice = Choice(instance, new_map.version, before)
            step = self._step(
                f"every server lets the model's name refer to {instance} now", "model_switched",
                new_map, None, {self._keys.choice: dump(choice)}, (key,),
            )  # fmt: skip
            yield replace(step, compares=(*step.compares, compare))

    # ---- moves that have begun

    def _continue(self, move: Move) -> Iterator[Step]:
        if move.is_copied:
            yield from self._continue_copied(move)
            return
        if move.phase == FOLLOW:
            assert move.target is not None
            if not self._is_present(move.target):
                yield self._abandon(move, move.target)
            elif self._state.is_pushed:  # a table was created during the move: nothing copies it
                yield self._abandon(move, move.target, because="pushes feed a table now")
            elif self._has_caught_up(move.target, move):
                yield self._switch(move)
            elif self._is_outwaited(move):
                yield self._abandon(move, move.target, because="the model is switched first")
            elif fault := self._lasting_fault(move):
                yield self._abandon(move, move.target, because=f"{move.target} reports: {fault}")
            return
        source, target = move.source, move.target
        is_away = target is not None and not self._is_present(target)
        if source is None and is_away:
            yield self._end(move)  # nothing waits for it, and the planner replaces it
            return
        if source is not None and not self._state.is_pushed:  # only an owner has what was pushed
            is_needed = self._is_whole(source, move.partition) and (
                not self._has_whole_owner(move.partition)
            )
            is_there = any(map(self._is_present, self._map.owners[move.partition]))
            patience = FAULT_SECONDS if is_there else UNSERVED_SECONDS
            is_unserved = self._has_held(move, "unserved", is_needed, patience)
            if is_unserved or (is_away and self._is_given_up(move, source)):
                yield self._give_back(move, source)
                return
        if is_away:
            return
        is_switched = all(
            self._uses(address, move.map_version)
            for address in (move.target, move.source)
            if address is not None and self._is_present(address)
        )
        has_drained = self._has_held(move, "switched", is_switched, self._limits.drain_seconds)
        if has_drained and self._has_whole_owner(move.partition):
            yield self._end(move)

    def _continue_copied(self, move: Move) -> Iterator[Step]:
        """Yield the next step of a move whose rows are copied, because pushes feed a table."""
        source, target = move.source, move.target
        assert source is not None
        assert target is not None
        is_here, is_there = self._is_present(source), self._is_present(target)
        if move.phase in (FOLLOW, HANDOVER) and not self._is_released(move):
            if not is_there:
                yield self._abandon(move, target)
            elif obstacle := find_obstacle(self._state):
                yield self._abandon(move, target, because=obstacle)
            elif not is_here:
                yield self._abandon(move, target, because=f"{source} is away, and stays the owner")
            elif move.phase == FOLLOW and self._is_close(move):
                yield self._hand_over(move)
            elif move.phase == FOLLOW and (fault := self._lasting_fault(move)):
                yield self._abandon(move, target, because=f"{target} reports: {fault}")
        elif move.phase == HANDOVER:
            if is_there and self._has_all(move) and self._has_caught_up(target, move):
                yield self._switch(move)
            elif is_here and not is_there:
                yield self._abandon(move, target)
            elif self._has_held(move, "released", is_here, self._limits.handover_seconds):
                yield self._take_back(move)
        elif move.phase == SWITCH:
            fence = move.pause_ms / 1e3 + FENCE_SECONDS
            if is_here:
                if self._uses(source, move.map_version):
                    yield self._open(move)
            elif self._has_held(move, "fenced", True, fence):
                yield self._open(move)
        elif is_there and self._uses(target, move.map_version):
            is_switched = not is_here or self._uses(source, move.map_version)
            has_drained = self._has_held(move, "switched", is_switched, self._limits.drain_seconds)
            if has_drained and self._has_whole_owner(move.partition):
                yield self._end(move)

    def _is_given_up(self, move: Move, source: str) -> bool:
        assert move.target is not None
        return self._is_lost(move.target) and self._is_whole(source, move.partition)

    def _has_held(self, move: Move, condition: str, holds: bool, seconds: float) -> bool:
        held = self._times.held_seconds(move, condition, holds=holds)
        return holds and held >= seconds

    def _is_outwaited(self, move: Move) -> bool:
        """Return whether a switch waits for the move for long, which may itself wait for that."""
        return self._has_held(move, "outwaited", is_due(self._state), OUTWAIT_SECONDS)

    def _lasting_fault(self, move: Move) -> str:
        """Return what keeps the target from owning the partition, if it has done so for long."""
        assert move.target is not None
        fault = fault_of(self._state, move.target)
        if not fault and has_other_runs(self._state, move.partition, move.target):
            fault = "its pool has applied runs of another log, which the owners' pools have not"
        return fault if self._has_held(move, "faulty", bool(fault), FAULT_SECONDS) else ""

    def _is_close(self, move: Move) -> bool:
        """Return whether the source has sent almost all, and the target has almost all of that."""
        assert move.target is not None
        sent = self._state.sent.get(move.partition)
        received = self._state.received.get(move.partition)
        return (
            sent is not None
            and received is not None
            and sent.is_close
            and sent.copy == received.copy
            and received.parts + 1 >= sent.parts
            and self._has_caught_up(move.target, move)
        )

    def _is_released(self, move: Move) -> bool:
        sent = self._state.sent.get(move.partition)
        return (
            move.phase == HANDOVER
            and sent is not None
            and sent.is_released
            and sent.attempt == move.attempt
        )

    def _has_all(self, move: Move) -> bool:
        """Return whether the target has every part of a copy that is released."""
        sent = self._state.sent[move.partition]
        received = self._state.received.get(move.partition)
        return received is not None and (received.copy, received.parts) == (sent.copy, sent.parts)

    def _hand_over(self, move: Move) -> Step:
        pause_ms = round(1e3 * self._limits.handover_seconds)
        then = replace(move, phase=HANDOVER, pause_ms=pause_ms)
        return self._step(
            f"partition {move.partition}: {move.source} shall take no more pushes, and send "
            f"{move.target} the last rows",
            "handover_begun", None, move, {self._keys.move(move.partition): dump(then)},
        )  # fmt: skip

    def _take_back(self, move: Move) -> Step:
        then = replace(move, phase=FOLLOW, attempt=move.attempt + 1)
        return self._step(
            f"partition {move.partition}: {move.target} has not got the last rows in time, so "
            f"{move.source} takes pushes again",
            "handover_taken_back", None, move, {self._keys.move(move.partition): dump(then)},
            (self._keys.sent(move.partition),),
        )  # fmt: skip

    def _open(self, move: Move) -> Step:
        return self._step(
            f"partition {move.partition}: {move.target} takes pushes now", "pushes_opened",
            None, move, {self._keys.move(move.partition): dump(replace(move, phase=OPEN))},
        )  # fmt: skip

    def _copies_of(self, partition: int) -> tuple[str, ...]:
        """Return the keys of what source and target of a move report about their copy."""
        return self._keys.sent(partition), self._keys.received(partition)

    def _switch(self, move: Move) -> Step:
        new_map = self._map.with_owner(move.partition, move.source, move.target)
        if move.target is not None:
            new_map = self._described(new_map, move.target)
        then = replace(move, phase=SWITCH, map_version=new_map.version)
        return self._step(
            f"partition {move.partition}: {move.target} owns it now in place of "
            f"{move.source or 'nobody'}",
            "partition_switched", new_map, move, {self._keys.move(move.partition): dump(then)},
            self._copies_of(move.partition) if move.is_copied else (), reads_copies=move.is_copied,
        )  # fmt: skip

    def _end(self, move: Move) -> Step:
        if move.source is None:
            return self._step(
                f"partition {move.partition}: {move.target} is one more owner", "move_ended",
                None, move, {}, (self._keys.move(move.partition),),
            )  # fmt: skip
        new_map = self._map.without_follower(move.partition, move.source)
        return self._dropping(
            f"partition {move.partition}: the move has ended, and {move.source} removes its rows",
            "move_ended", new_map, move, move.source,
        )  # fmt: skip

    def _abandon(self, move: Move, target: str, *, because: str = "") -> Step:
        new_map = self._map.without_follower(move.partition, target)
        because = because or f"{target} is away before it was the owner"
        is_foreign = not move.has_kept and has_other_runs(self._state, move.partition, target)
        return self._dropping(
            f"partition {move.partition}: {because}, so the move is abandoned",
            "move_abandoned", new_map, move, target, is_foreign=is_foreign,
        )  # fmt: skip

    def _give_back(self, move: Move, source: str) -> Step:
        target = move.target
        new_map = self._map.with_owner(move.partition, target, source)
        text = (
            f"partition {move.partition}: {target or 'its owner'} is away or behind, and {source} "
            "has every row, so it owns the partition again"
        )
        if target is None:
            key = self._keys.move(move.partition)
            return self._step(text, "move_undone", new_map, move, {}, (key,))
        new_map = replace(
            new_map.without_follower(move.partition, target), version=self._map.version + 1
        )
        return self._dropping(text, "move_undone", new_map, move, target)

    def _dropping(
        self,
        text: str,
        event: str,
        new_map: ClusterMap,
        move: Move,
        address: str,
        *,
        is_foreign: bool = False,
    ) -> Step:
        drop = Drop(address, move.partition, new_map.version, move.is_copied, is_foreign)
        puts = {self._keys.drop(address, move.partition): dump(drop)}
        deletes: tuple[str, ...] = (self._keys.move(move.partition),)
        if move.is_copied:
            deletes += self._copies_of(move.partition)
        return self._step(text, event, new_map, move, puts, deletes)

    # ---- new moves

    def _wishes(self) -> Iterator[Step]:
        for partition, wish in sorted(self._state.wishes.items()):
            if partition in self._state.moves or (wish.target, partition) in self._state.drops:
                continue
            key = self._keys.wish(partition)
            if wish.target in self._state.members and fault_of(self._state, wish.target):
                continue  # it may end
            refusal = refusal_of_move(self._state, partition, wish.source, wish.target)
            if refusal:
                text = f"partition {partition} is not moved to {wish.target}: {refusal}"
                compare = Compare(key, self._state.revisions[key])
                yield Step(text, "move_refused", (compare,), {}, (key,))
                continue
            step = self._begin(partition, wish.source, wish.target, "wish")
            compare = Compare(key, self._state.revisions[key])
            yield replace(step, compares=(*step.compares, compare), deletes=(*step.deletes, key))

    def _planned(self) -> Iterator[Step]:
        planned = self._plan()
        wanted = [move for move in planned if self._is_wanted(move)]
        is_sound = not any(fault_of(self._state, address) for address in self._state.members)
        if self._state.is_rebalancing and is_sound and not planned and not self._state.moves:
            key = self._keys.rebalance
            compare = Compare(key, self._state.revisions[key])
            yield Step("partitions are balanced", "balanced", (compare,), {}, (key,))
            return
        for move in wanted:
            if move.partition in self._state.moves:
                continue
            if move.target is None:
                assert move.source is not None
                if self._has_whole_owner(move.partition, besides=move.source):
                    yield self._lose(move.partition, move.source, move.reason)
                continue
            target = self._target_of(move, planned)
            if not self._is_present(target):
                continue
            if (target, move.partition) not in self._state.drops:
                yield self._begin(move.partition, move.source, target, move.reason)
            elif self._may_follow_again(target, move.partition):
                # Perhaps only the target has the newest rows, and it keeps them until others have.
                key = self._keys.drop(target, move.partition)
                step = self._begin(move.partition, move.source, target, move.reason, has_kept=True)
                compare = Compare(key, self._state.revisions[key])
                compares, deletes = (*step.compares, compare), (*step.deletes, key)
                yield replace(step, compares=compares, deletes=deletes)

    def _may_follow_again(self, target: str, partition: int) -> bool:
        is_foreign = self._state.drops[target, partition].is_foreign
        return not is_foreign and not self._has_whole_owner(partition)

    def _target_of(self, move: PlannedMove, planned: Sequence[PlannedMove]) -> str:
        """Return the target of a move: of those that the plan has for its partition, one in a zone
        without another owner. Moves for balance, which may not follow, are part of the plan.
        """
        assert move.target is not None
        targets = [
            other.target
            for other in planned
            if other.partition == move.partition and other.target is not None
        ]
        owners = set(self._map.owners[move.partition]) - {move.source}
        zones = {self._zone_of(owner) for owner in owners}
        fresh = [target for target in targets if self._zone_of(target) not in zones]
        return fresh[0] if fresh and move.target not in fresh else move.target

    def _zone_of(self, address: str) -> str:
        registration = self._state.registrations.get(address)
        return "" if registration is None else registration.zone

    def _is_wanted(self, move: PlannedMove) -> bool:
        return self._state.is_rebalancing or move.reason in ("lost", "drain", "replicas")

    def _plan(self) -> list[PlannedMove]:
        owners = self._map.owners
        owning = {address for present in owners for address in present}
        sound = {name for name in self._state.members if not fault_of(self._state, name)}
        names = sorted(owning | sound)
        members = [self._planned_member(name) for name in names]
        if not any(member.state == "in" for member in members):
            return []
        pushed = self._state.is_pushed
        replicas = 1 if pushed else self._state.settings.replicas
        model = Model(self._map.model, len(owners), replicas, is_pushed=pushed)
        plan = make_plan(
            members,
            [model],
            {model.name: owners},
            replace_after=self._limits.replace_after,
        )
        return plan.moves

    def _planned_member(self, address: str) -> Planned:
        registration = self._state.registrations.get(address)
        zone = self._zone_of(address)
        weight = 1.0 if registration is None else registration.weight
        if not self._is_present(address):
            is_lost = self._is_given_up_on(address)
            away = math.inf if is_lost else self._times.away_seconds(address)
            return Planned(address, zone, weight, "away", away)
        if address in self._state.drained:
            return Planned(address, zone, weight, "draining")
        if fault_of(self._state, address):  # it keeps what it owns, and gets nothing
            return Planned(address, zone, weight, "away", 0.0)
        return Planned(address, zone, weight, "in")

    def _begin(
        self,
        partition: int,
        source: str | None,
        target: str,
        reason: str,
        *,
        has_kept: bool = False,
    ) -> Step:
        new_map = self._described(self._map.with_follower(partition, target), target)
        reports = [
            self._state.members[owner].partitions[partition]
            for owner in self._map.owners[partition]
            if owner in self._state.members and partition in self._state.members[owner].partitions
        ]
        version = max((report.version for report in reports), default=0)
        run = max((report.run for report in reports), default=0)
        is_copied = self._state.is_pushed
        move = Move(
            partition, source, target, FOLLOW, reason, new_map.version, version, is_copied,
            has_kept=has_kept, run=run,
        )  # fmt: skip
        return self._step(
            f"partition {partition}: {target} follows it, to own it in place of "
            f"{source or 'nobody'} ({reason})",
            "move_begun", new_map, None, {self._keys.move(partition): dump(move)},
            self._copies_of(partition) if is_copied else (), absent=self._keys.move(partition),
        )  # fmt: skip

    def _lose(self, partition: int, source: str, reason: str) -> Step:
        new_map = self._map.with_owner(partition, source, None)
        move = Move(partition, source, None, SWITCH, reason, new_map.version)
        return self._step(
            f"partition {partition}: {source} owns it no longer ({reason})",
            "partition_switched", new_map, None, {self._keys.move(partition): dump(move)},
            absent=self._keys.move(partition),
        )  # fmt: skip

    def _forget(self) -> Iterator[Step]:
        """Forget a server that owns nothing and does not come back."""
        owning = {address for present in self._map.owners for address in present}
        moving = {
            address for move in self._state.moves.values() for address in (move.source, move.target)
        }
        for address in sorted(set(self._state.registrations) - owning - moving):
            if self._is_present(address) or not self._is_lost(address):
                continue
            key = self._keys.registration(address)
            member = Compare(self._keys.member(address), 0)
            compare = Compare(key, self._state.revisions[key])
            deletes = (key, self._keys.drained(address))
            yield Step(f"{address} is forgotten", "forgotten", (member, compare), {}, deletes)

    # ---- questions about members

    def _is_present(self, address: str) -> bool:
        return address in self._state.members

    def _is_lost(self, address: str) -> bool:
        return self._times.away_seconds(address) >= self._limits.replace_after

    def _is_given_up_on(self, address: str) -> bool:
        """Return whether nobody waits for a server: it is away for long, or drained and away."""
        is_drained = address in self._state.drained
        away = self._times.away_seconds(address)
        return self._is_lost(address) or (is_drained and away >= FAULT_SECONDS)

    def _uses(self, address: str, map_version: int) -> bool:
        return self._state.members[address].map_version >= map_version

    def _is_fed(self) -> bool:
        """Return whether the model has tables that a log feeds."""
        return any(registration.is_fed for registration in self._state.registrations.values())

    def _is_whole(self, address: str, partition: int) -> bool:
        member = self._state.members.get(address)
        if member is not None and not self._is_fed():
            return True  # an owner of push-fed rows has them, because they are nowhere else
        report = None if member is None else member.partitions.get(partition)
        return report is not None and report.is_caught_up

    def _has_caught_up(self, target: str, move: Move) -> bool:
        member = self._state.members[target]
        if not self._uses(target, move.map_version):
            return False
        report = member.partitions.get(move.partition)
        if report is None and not self._is_fed():
            return True
        is_at_end = report is not None and report.is_caught_up
        # An owner that starts its ingest again says soon whether the runs are its own.
        owners = self._map.owners[move.partition]
        is_open = (
            is_at_end
            and any(map(self._is_present, owners))
            and not self._has_whole_owner(move.partition)
        )
        has_waited = self._has_held(move, "runs are open", is_open, FAULT_SECONDS)
        if report is None or not is_at_end:
            return False
        # A handover begins only after that, and does not last as long.
        if is_open and report.run and not has_waited and move.phase == FOLLOW:
            return False
        if move.phase == FOLLOW and self._is_unknown(report.run, move):
            return False
        for owner in owners:  # of the same instance, if one is present
            other = self._state.members.get(owner)
            if other is not None and other.instance != member.instance:
                return False
        if has_other_runs(self._state, move.partition, target):
            return False
        return report.version >= move.version

    def _is_unknown(self, run: int, move: Move) -> bool:
        """Return whether a run may be of another log, and an owner that can tell may be back."""
        owners = self._map.owners[move.partition]
        if any(map(self._is_present, owners)) or all(map(self._is_given_up_on, owners)):
            return False
        return 0 not in (run, move.run) and run != move.run

    def _has_whole_owner(self, partition: int, besides: str | None = None) -> bool:
        owners = [owner for owner in self._map.owners[partition] if owner != besides]
        return any(self._is_whole(owner, partition) for owner in owners)

    def _described(self, new_map: ClusterMap, address: str) -> ClusterMap:
        registration = self._state.registrations.get(address)
        if registration is None:
            return new_map
        return new_map.described(address, registration.grpc_address, registration.zone)

    # ---- transactions

    def _step(
        self,
        text: str,
        event: str,
        new_map: ClusterMap | None,
        move: Move | None,
        puts: Mapping[str, str],
        deletes: tuple[str, ...] = (),
        *,
        absent: str | None = None,
        reads_copies: bool = False,
    ) -> Step:
        """Return a step that changes the map and a move's phase; ``move``: as it is now.

        absent: a key that must not exist. reads_copies: what source and target report about their
        copy must be as it was read.
        """
        revisions = self._state.revisions
        compares = [Compare(self._keys.map, revisions[self._keys.map])]
        if reads_copies and move is not None:
            for key in self._copies_of(move.partition):
                compares.append(Compare(key, revisions.get(key, 0)))
        if move is not None:
            key = self._keys.move(move.partition)
            compares.append(Compare(key, revisions[key]))
        if absent is not None:
            compares.append(Compare(absent, 0))
        if new_map is not None:
            puts = {**puts, self._keys.map: new_map.dump()}
        return Step(text, event, tuple(compares), puts, deletes)
