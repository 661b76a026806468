"""A server's part in moves of push-fed partitions. CONTROLLER.md of petps/cluster has the order.

Owns:        the senders and receivers of this server, their records in etcd, and its pauses.
Never does:  take pushes to a partition that it has promised not to take, before etcd has shown that
             nobody relies on the promise; write rows of a partition that it owns.
Called by:   membership.py, in the thread that speaks to etcd.
Invariants:  A record in etcd is written only if the move is still the one that was read. A copy
             begins with a record that nothing is sent, or received, so that no record that an
             earlier process of this server has sent can still arrive.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from petps.cluster.etcd import Compare, Etcd
from petps.cluster.records import (
    FOLLOW,
    HANDOVER,
    SWITCH,
    Keys,
    Move,
    Received,
    Sent,
    State,
    dump,
)
from petps.log import Line
from petps.server.cluster.pauses import Pauses
from petps.server.cluster.receiver import Receiver
from petps.server.cluster.sender import Place, Sender

__all__ = ["Handovers"]

COPYING = (FOLLOW, HANDOVER)


class Handovers:
    """Takes part in the moves of push-fed partitions from and to one server.

    place: None without a [cluster] store; then no rows move. used_version: of the map in use.
    owns: whether that map gives this server a partition.
    """

    def __init__(
        self,
        etcd: Etcd,
        keys: Keys,
        address: str,
        pauses: Pauses,
        place: Place | None,
        *,
        used_version: Callable[[], int],
        owns: Callable[[int], bool],
        log: Callable[[str], None],
    ) -> None:
        self._etcd, self._keys, self._address = etcd, keys, address
        self._pauses, self._place = pauses, place
        self._used_version, self._owns, self._log = used_version, owns, log
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}
        self._is_moving = self._is_closing = False
        self._revisions: dict[str, int] = {}  # of the keys, as far as this look knows them

    @property
    def is_busy(self) -> bool:
        """Return whether all orders must be read, because a partition moves."""
        return bool(self._is_moving or self._senders or self._receivers or self._pauses.partitions)

    @property
    def is_urgent(self) -> bool:
        """Return whether orders must be read often, because pushes wait for them, or soon will."""
        return bool(self._is_closing or self._pauses.partitions)

    def status(self) -> dict[str, Any]:
        """Return plain values: the partitions that are sent and received, and those paused."""
        return {
            "sending": sorted(self._senders),
            "receiving": sorted(self._receivers),
            "paused": sorted(self._pauses.paused),
        }

    def concerns(self, state: State) -> bool:
        """Return whether a move in this state is one of this server's."""
        return bool(self._own(state))

    def look(self, state: State, read_at: float) -> None:
        """Do what is due by the orders of etcd, all of them, read at ``read_at`` or later.

        Call it before the map of the same state is used. Raises the errors of etcd and IoError.
        """
        moves = self._own(state)
        self._is_moving = bool(moves)
        self._is_closing = any(
            move.phase != FOLLOW or (partition in state.sent and state.sent[partition].is_close)
            for partition, move in moves.items()
        )
        self._revisions = dict(state.revisions)
        self._keep_pulls(moves, state, read_at)
        self._end_copies(moves)
        for partition, move in moves.items():
            if self._place is None or move.phase not in COPYING:
                continue
            if move.source == self._address:
                self._send(partition, move, state.sent.get(partition))
            else:
                self._receive(partition, move, state)
        self._settle(moves, state)

    def close(self) -> None:
        """Stop sending and receiving. The moves go on after a restart."""
        for sender in self._senders.values():
            sender.close(is_removed=False)
        for receiver in self._receivers.values():
            receiver.close()
        for sender in self._senders.values():
            sender.join()

    def _own(self, state: State) -> Mapping[int, Move]:
        return {
            partition: move
            for partition, move in sorted(state.moves.items())
            if move.is_copied and self._address in (move.source, move.target)
        }

    # ---- pauses

    def _keep_pulls(self, moves: Mapping[int, Move], state: State, read_at: float) -> None:
        """Go on to answer pulls of partitions that are handed over, as long as that is safe.

        The target takes no pushes before the time given here is over, or this server uses a map
        that does not name it. Without news of etcd, this ends: rows could be old. By an older map
        than etcd's, this server may have a pause of a partition that is open elsewhere already.
        """
        if state.map is None or self._used_version() < state.map.version:
            return
        handed = [
            move.pause_ms
            for move in moves.values()
            if move.source == self._address and move.phase == HANDOVER
        ]
        if handed:
            self._pauses.keep_pulls(round(1e9 * read_at) + 1_000_000 * min(handed))

    def _settle(self, moves: Mapping[int, Move], state: State) -> None:
        """Pause pushes to a partition that comes here, and end the pauses that nobody needs."""
        for partition, move in moves.items():
            if move.target == self._address and move.phase == SWITCH:
                self._pauses.keep(partition, pulls=False)
        if state.map is None or self._used_version() != state.map.version:
            # By an older map, this server may own what it has given away. An older map in etcd
            # (restored from a backup) knows nothing of the promise.
            return
        for partition in self._pauses.partitions:
            if self._is_free(moves.get(partition), partition):
                self._pauses.resume(partition)
                text = f"partition {partition}: pushes are not paused here any more"
                self._log(Line(text, "pushes_resumed", partition=partition))

    def _is_free(self, move: Move | None, partition: int) -> bool:
        if move is None:
            return True
        if move.target == self._address:
            return move.phase != SWITCH
        sender = self._senders.get(partition)
        return move.phase in COPYING and sender is not None and not sender.is_holding

    # ---- copies

    def _end_copies(self, moves: Mapping[int, Move]) -> None:
        for partition, sender in list(self._senders.items()):
            move = moves.get(partition)
            is_wanted = move is not None and move.source == self._address and move.phase in COPYING
            if not is_wanted:
                sender.close(is_removed=True)
            if sender.is_over:
                del self._senders[partition]
        for partition, receiver in list(self._receivers.items()):
            move = moves.get(partition)
            if move is None or move.target != self._address or move.phase not in COPYING:
                receiver.close()
                del self._receivers[partition]

    def _send(self, partition: int, move: Move, record: Sent | None) -> None:
        key = self._keys.sent(partition)
        sender = self._senders.get(partition)
        if sender is None:
            if move.phase == HANDOVER and _has_promised(record, move):
                return  # before a restart: everything is in the store
            record = Sent(partition, self._address, self._new_name(), move.attempt)
            if self._commit(move, key, record):
                self._senders[partition] = self._new_sender(partition, record.copy)
            return
        progress = sender.progress()
        if move.phase == FOLLOW and progress.released:
            sender.take_back()
            progress = sender.progress()
        if move.phase == HANDOVER:
            sender.finish(move.attempt, move.pause_ms / 1e3)
            sender.limit_pause()
        changed = Sent(
            partition, self._address, sender.copy, move.attempt, progress.parts, progress.rows,
            progress.is_close, progress.released == move.attempt, progress.error,
        )  # fmt: skip
        if changed != record:
            self._commit(move, key, changed)

    def _receive(self, partition: int, move: Move, state: State) -> None:
        key, sent = self._keys.received(partition), state.sent.get(partition)
        if sent is None:
            return
        receiver = self._receivers.get(partition)
        if receiver is not None and receiver.copy != sent.copy:
            receiver.close()
            del self._receivers[partition]
            receiver = None
        if receiver is None:
            if self._commit(move, key, Received(partition, self._address, sent.copy)):
                self._receivers[partition] = self._new_receiver(partition, sent.copy)
            return
        receiver.offer(sent.parts)
        changed = Received(
            partition, self._address, receiver.copy, receiver.parts, receiver.error
        )  # fmt: skip
        if changed != state.received.get(partition):
            self._commit(move, key, changed)

    def _new_name(self) -> str:
        return uuid.uuid4().hex

    def _new_sender(self, partition: int, copy: str) -> Sender:
        assert self._place is not None
        return Sender(self._place, partition, copy)

    def _new_receiver(self, partition: int, copy: str) -> Receiver:
        assert self._place is not None
        return Receiver(self._place, partition, copy, lambda: self._owns(partition))

    def _commit(self, move: Move, key: str, record: Sent | Received) -> bool:
        """Write a record if the move and the record are those that were read."""
        known = self._revisions
        move_key = self._keys.move(move.partition)
        compares = (Compare(move_key, known[move_key]), Compare(key, known.get(key, 0)))
        revision = self._etcd.commit(compares, {key: dump(record)})
        if revision is None:
            return False
        known[key] = revision
        return True


def _has_promised(record: Sent | None, move: Move) -> bool:
    return record is not None and record.is_released and record.attempt == move.attempt
