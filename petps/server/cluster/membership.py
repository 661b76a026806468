"""A server's membership: the thread that speaks to etcd for it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from petps import _native
from petps.cluster.etcd import Access, Compare, Etcd, Read, Value
from petps.cluster.maps import ClusterMap
from petps.cluster.records import (
    Choice,
    Drop,
    Keys,
    Member,
    PartitionReport,
    Registration,
    State,
    dump,
    read_state,
)
from petps.config import ClusterConfig
from petps.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    PetpsError,
    Unavailable,
)
from petps.log import INFO, WARNING, Line
from petps.server.cluster.handover import Handovers
from petps.server.cluster.lease import Lease
from petps.server.cluster.map import MapCopy
from petps.server.cluster.newest import find_newer
from petps.server.cluster.pauses import Pauses
from petps.server.cluster.unread import Unread
from petps.server.shard_map import ShardMap, parse

__all__ = ["ClusterPart", "Facts", "access_of"]

LOOK_SECONDS: Final = 0.25  # between two looks at etcd
HANDOVER_SECONDS: Final = 0.05  # likewise, while pushes wait for the end of a move, or soon will
REPORT_SECONDS: Final = 1.0  # between two reports in which only versions differ
STUCK_SECONDS: Final = 60.0  # without a round that succeeds; then its last report goes
SWITCH_RETRY_SECONDS: Final = 10.0  # between two tries to obey an order to switch the model
WHOLE_SECONDS: Final = 60.0  # between two reads of all keys, whatever their revisions are
# Errors of etcd or of what it has, which all servers get. They cost nobody the lease.
OF_ETCD: Final = (InvalidArgument, FailedPrecondition, Unavailable, PermissionDenied)
KEPT_SECONDS: Final = 10.0  # for which an order may wait before the status says why
CLOSE_SECONDS: Final = 3.0
CAUGHT_UP_SECONDS: Final = 2.0  # the largest lag of a partition that may get an owner


def access_of(config: ClusterConfig) -> Access:
    """Return how to reach the etcd of a configuration."""
    return Access(
        tuple(config.endpoints),
        ca=config.ca,
        certificate=config.certificate,
        key=config.key,
        user=config.user,
        password=config.read_password,
    )


@dataclass(frozen=True)
class Facts:
    """Functions that return what the server reports about itself. None of them waits."""

    registration: Callable[[], Registration]
    instance: Callable[[], str]
    partitions: Callable[[], Mapping[int, PartitionReport]]
    read: Callable[[str], Collection[int]]
    """Returns the partitions whose log was read to its end, into an instance."""
    applied: Callable[[int, str], PartitionReport]
    """Returns what an instance has of a partition, which may be followed no more."""
    instances: Callable[[], tuple[tuple[str, ...], tuple[str, ...]]]
    """Returns all instances of the model, and those that are whole (records.Member)."""
    switch: Callable[[str], None]
    """Lets the model's name refer to an instance. Raises PetpsError."""


class Remover(Protocol):
    """The thread that removes rows of partitions (petps.server.cluster.removal.Removal)."""

    def set_orders(self, orders: Mapping[int, Drop]) -> None:
        """Remove these partitions, each once its order holds."""

    def take_done(self) -> list[int]:
        """Return the partitions that were removed since the last call."""

    def waiting(self) -> list[int]:
        """Return the partitions that are not removed yet."""

    def close(self) -> None:
        """Stop."""


class ClusterPart:
    """The map of a server in a cluster, in the place of MapFile, and its membership.

    read() and follow() belong to the main thread. start() begins to speak to etcd; until then, and
    while etcd is away, the map is the copy beside the pool. wake: called when a new map is here.
    """

    def __init__(
        self,
        etcd: Etcd,
        etcd_of_lease: Etcd,
        config: ClusterConfig,
        model: str,
        copy: MapCopy,
        pauses: Pauses,
        log: Callable[[str], None],
    ) -> None:
        self.pauses = pauses
        self._lease_keeper = Lease(etcd_of_lease, config.lease_seconds, self._is_working)
        self._etcd, self._config, self._copy, self._log = etcd, config, copy, log
        self._keys = Keys(config.prefix, model)
        self._lock = threading.Lock()  # over the next two, which two threads use
        self._newest: tuple[int, str] | None = None  # (revision, text) of the map in etcd
        self._tried = 0  # the revision of the map that was tried last
        self._used_version = 0
        self._map_error = ""
        self._good_at = time.monotonic()  # when the last round with etcd succeeded; first: now
        self._able_at = self._good_at  # likewise, or when it failed for a reason that all share
        self._error = ""
        self._round_at = time.monotonic()  # when the last round with etcd began
        self._lease = 0  # of the reports in etcd
        self._sent: tuple[str, float] = ("", 0.0)
        self._registered = ""
        self._since = 0  # keys that changed before this revision are known
        self._whole_at = 0.0
        self._drops: dict[int, tuple[Drop, int]] = {}
        # The orders that were checked last: why each one waits ('': it does not), and since when.
        self._checked: dict[int, tuple[str, float]] = {}
        self._map: ClusterMap | None = None  # of etcd, when it was read last
        self._asked_at = 0.0  # when the reports of all servers were read
        self._choice: Choice | None = None
        self._switch_error, self._switch_at = "", 0.0  # the last one, and when to try again
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.unread: Unread | None = None
        """None: the server follows no log."""
        self._wake: Callable[[], None] = lambda: None

    def read(self) -> ShardMap:
        """Return the map to start with. Raises InvalidArgument if its file is damaged."""
        shard_map = self._copy.read()
        self._used_version = shard_map.owners.version
        return shard_map

    def follow(self, use: Callable[[ShardMap], None]) -> None:
        """Pass the map of etcd to ``use`` if it has changed since it was last used.

        Raises the errors of reading and of ``use``; the next call tries again.
        """
        with self._lock:
            newest = self._newest
        if newest is None or newest[0] == self._tried:
            return
        revision, text = newest
        try:
            shard_map = parse(text.encode(), f"of etcd's key {self._keys.map}")
            use(shard_map)  # it refuses another map of the same version
            self._copy.write(text)
            self._used_version = shard_map.owners.version
        except PetpsError as error:
            self._map_error = str(error)
            raise
        self._map_error = ""
        self._tried = revision

    @property
    def used_version(self) -> int:
        """Return the version of the map in use."""
        return self._used_version

    @property
    def etcd(self) -> Etcd:
        """Return the client of etcd."""
        return self._etcd

    @property
    def keys(self) -> Keys:
        """Return the keys of the model."""
        return self._keys

    def check_load(self, table: str, feed: str) -> None:
        """Raise an error if rows that are loaded into a table would be left behind by a move.

        FailedPrecondition: deltas feed the table. Unavailable: a push-fed partition moves now.
        """
        if feed == "delta":
            raise FailedPrecondition(
                f"table '{table}' of this cluster follows the log, and rows that are not in it are "
                "missing after a move: publish them (petps publish), or write a base that all "
                "servers restore (petps load --on ray)"
            )
        if self._thread is not None and self._handovers.is_busy:
            raise Unavailable(
                "a partition of a table that pushes feed moves from or to this server: load rows "
                "when petps cluster status shows no move, or push them"
            )

    def start(
        self, facts: Facts, remover: Remover, handovers: Handovers, wake: Callable[[], None]
    ) -> None:
        """Begin to speak to etcd."""
        self._facts, self._remover, self._wake = facts, remover, wake
        self._handovers = handovers
        self._thread = threading.Thread(target=self._run, name="petps-cluster", daemon=True)
        self._lease_keeper.start()
        self._thread.start()

    def status(self) -> dict[str, Any]:
        """Return the member ``cluster`` of the status. Never waits for etcd."""
        return {
            "endpoints": self._config.endpoints,
            "prefix": self._config.prefix,
            "zone": self._config.zone,
            "silent_seconds": round(time.monotonic() - self._good_at, 3),
            "has_answered": self._etcd.answered_at is not None,
            "is_registered": bool(self._sent[0]),
            "error": self._error,
            "removing": [] if self._thread is None else self._removing(),
            "kept": self._long_kept(),
            **(self._handovers.status() if self._thread is not None else {}),
        }

    def _removing(self) -> list[int]:
        return sorted({*self._remover.waiting(), *self._waiting_orders()})

    def _waiting_orders(self) -> dict[int, tuple[str, float]]:
        return {p: (text, since) for p, (text, since) in self._checked.items() if text}

    def _long_kept(self) -> list[str]:
        """Return why orders have waited for longer than an owner's report may need."""
        until = time.monotonic() - KEPT_SECONDS
        return [text for text, since in self._waiting_orders().values() if since <= until]

    def close(self) -> None:
        """Stop, and leave the cluster at once if etcd answers."""
        self._stopping.set()
        if self._thread is None:
            return
        self._remover.close()
        self._thread.join(CLOSE_SECONDS)  # a daemon: an etcd that is silent keeps nobody
        self._lease_keeper.close()
        self._handovers.close()

    # ---- the thread

    def _run(self) -> None:
        _native.lower_priority()
        while True:
            error, self._round_at = "", time.monotonic()
            try:
                self._note_read()  # also while etcd is away
                self._look()
            except PetpsError as failure:
                error = str(failure)
                if isinstance(failure, OF_ETCD):
                    self._able_at = time.monotonic()
            except Exception as failure:  # report any error, but continue to serve
                error = f"{type(failure).__name__}: {failure}"
            if not error:
                self._good_at = self._able_at = time.monotonic()
                self._lease_keeper.keep()
            else:  # perhaps it was restored from a backup, so everything is read and written again
                self._since = 0
                self._forget_reports()
                if time.monotonic() - self._able_at >= STUCK_SECONDS:
                    self._able_at = time.monotonic()
                    self._lease_keeper.replace()  # for what it has reported may be wrong by now
            self._note(error)
            if self._stopping.wait(HANDOVER_SECONDS if self._handovers.is_urgent else LOOK_SECONDS):
                break
        self._etcd.close()

    def _note_read(self) -> None:
        if self.unread is not None:
            self.unread.note(self._facts.instance(), self._facts.read)

    def _is_working(self) -> bool:
        return time.monotonic() - self._round_at < STUCK_SECONDS

    def _look(self) -> None:
        if (lease := self._lease_keeper.number()) != self._lease:
            self._forget_reports()
            self._lease = lease
        own = self._facts.registration()
        if not self._sent[0]:
            self._refuse_another(own)
        self._read_orders(own.address)
        self._keep_newest(own.address)
        self._set_orders()
        for partition in self._remover.take_done():
            self._end_drop(partition)
        self._obey_choice(own)
        self._report(own)

    def _forget_reports(self) -> None:
        """Write the report and the registration again, whatever etcd had of them."""
        self._sent, self._registered = ("", 0.0), ""

    def _read_orders(self, own: str) -> None:
        now = time.monotonic()
        is_whole = (
            self._since == 0 or self._handovers.is_busy or now - self._whole_at >= WHOLE_SECONDS
        )
        read = self._etcd.read(self._keys.orders, since=0 if is_whole else self._since)
        state = self._state_of(read)
        is_older = read.revision + 1 < self._since  # an etcd that was restored from a backup
        if is_older:
            self._forget_reports()
        if not is_whole and (is_older or self._handovers.concerns(state)):
            now, is_whole = time.monotonic(), True
            read = self._etcd.read(self._keys.orders)
            state = self._state_of(read)
        if is_whole:
            self._whole_at = now
            self._handovers.look(state, now)  # before the map is used, and before rows are removed
        self._take(read, state, own, is_whole=is_whole)
        self._since = read.revision + 1

    def _state_of(self, read: Read) -> State:
        texts = {key: value.text for key, value in read.values.items()}
        revisions = {key: value.changed for key, value in read.values.items()}
        try:
            return read_state(self._keys, texts, revisions)
        except InvalidArgument:  # perhaps the map, whose fault follow() reports
            texts.pop(self._keys.map, None)
            return read_state(self._keys, texts, revisions)

    def _take(self, read: Read, state: State, own: str, *, is_whole: bool) -> None:
        if is_whole:
            self._drops.clear()
        for (address, partition), drop in state.drops.items():
            if address == own:
                key = self._keys.drop(address, partition)
                self._drops[partition] = (drop, read.values[key].changed)
        if (value := read.values.get(self._keys.map)) is not None:
            self._take_map(value)
        if state.map is not None:
            self._map = state.map
        if state.choice is not None or is_whole:
            self._choice = state.choice

    def _set_orders(self) -> None:
        waiting = self._waiting_orders()
        orders = {p: drop for p, (drop, _) in self._drops.items() if p not in waiting}
        self._remover.set_orders(orders)

    def _keep_newest(self, address: str) -> None:
        """Find the orders that wait, because no owner has the rows in their newest state."""
        if not self._drops:
            self._checked = {}
            return
        now = time.monotonic()
        if self._drops.keys() == self._checked.keys() and now - self._asked_at < REPORT_SECONDS:
            return
        self._asked_at = now
        try:
            state = self._state_of(self._etcd.read(self._keys.members))
        except PetpsError:  # perhaps a report of a newer release: then nothing is removed
            state = State(self._keys.model)
        checked: dict[int, tuple[str, float]] = {}
        for partition, (drop, _) in self._drops.items():
            text = ""
            if self.unread is not None and not drop.is_foreign:  # it follows a log
                owners = () if self._map is None else self._map.owners_of(partition)
                others = [owner for owner in owners if owner != address]
                applied = partial(self._facts.applied, partition)
                text = find_newer(applied, self._facts.instance(), partition, others, state)
            waited, since = self._checked.get(partition, ("", now))
            checked[partition] = (text, since if waited else now)
        self._checked = checked  # at once: status() reads it

    def _take_map(self, value: Value) -> None:
        with self._lock:
            is_new = self._newest is None or self._newest[0] != value.changed
            self._newest = (value.changed, value.text)
        if is_new:
            self._wake()

    def _obey_choice(self, own: Registration) -> None:
        """Switch the model, as ordered, once the map in use says so and the instance is whole."""
        choice, now = self._choice, time.monotonic()
        if (
            choice is None
            or self._used_version < choice.map_version
            or not own.is_manual
            or self._facts.instance() == choice.instance
        ):
            self._switch_error, self._switch_at = "", 0.0
        elif choice.instance in self._facts.instances()[1] and now >= self._switch_at:
            self._switch_at = now + SWITCH_RETRY_SECONDS
            # An etcd with an older map was restored from a backup, and its order with it.
            state = self._state_of(self._etcd.read(self._keys.orders))
            self._choice = state.choice
            version = 0 if state.map is None else state.map.version
            if state.choice != choice or version > self._used_version:
                self._switch_at = 0.0  # as soon as the newer one is in use
            elif version == self._used_version:
                self._switch(choice.instance)

    def _switch(self, instance: str) -> None:
        try:
            self._facts.switch(instance)
        except PetpsError as error:  # the cluster shall know, and the rest goes on
            self._switch_error = f"the model is not switched to {instance}: {error}"

    def _end_drop(self, partition: int) -> None:
        """Delete the order to remove a partition, unless another one has replaced it."""
        drop, revision = self._drops.pop(partition, (None, 0))
        if drop is None:
            return
        key = self._keys.drop(drop.address, partition)
        self._etcd.commit((Compare(key, revision),), {}, (key,))
        text = f"the rows of partition {partition}, which this server does not have, are removed"
        self._log(Line(text, "partition_removed", partition=partition))
        if self.unread is not None:
            self.unread.add(self._facts.instance(), [partition])
        self._set_orders()

    def _report(self, registration: Registration) -> None:
        text = dump(registration)
        if text != self._registered:
            self._etcd.commit((), {self._keys.registration(registration.address): text})
            self._registered = text
        partitions = self._facts.partitions()
        self._note_read()  # before the controller may read that they are caught up
        member = Member(
            registration.address,
            registration.pool,
            self._used_version,
            self._facts.instance(),
            partitions,
            self._map_error or self._switch_error,
            *self._facts.instances(),
        )
        text, now = dump(member), time.monotonic()
        before, sent_at = self._sent
        if text == before or (
            now - sent_at < REPORT_SECONDS and _without_versions(text) == _without_versions(before)
        ):
            return
        key = self._keys.member(registration.address)
        self._etcd.commit((), {key: text}, lease=self._lease)
        self._sent = (text, now)

    def _refuse_another(self, own: Registration) -> None:
        """Raise an error if the orders of this address are for a server with another pool.

        AlreadyExists: that one is present. FailedPrecondition: it was here before, and pushes fed
        it, so its rows are in its pool only.
        """
        key = self._keys.member(own.address)
        value = self._etcd.read(key).values.get(key)
        if value is not None and value.lease != self._lease:
            member = read_state(self._keys, {key: value.text}, {}).members[own.address]
            if member.pool != own.pool:
                raise AlreadyExists(
                    f"another server is registered as {own.address}, with pool {member.pool}: "
                    "give each server an address of its own (server.address)"
                )
        key = self._keys.registration(own.address)
        value = self._etcd.read(key).values.get(key)
        if value is None:
            return
        before = read_state(self._keys, {key: value.text}, {}).registrations[own.address]
        if before.pool != own.pool and before.is_pushed:
            raise FailedPrecondition(
                f"{own.address} had pool {before.pool}, with rows that were pushed, and this is "
                f"pool {own.pool}: serve that pool here again, or this one at another address. If "
                f"that pool and its rows are lost for ever, delete etcd's key {key}"
            )

    def _note(self, error: str) -> None:
        """Log that etcd begins to fail, or that it works again; not each failure."""
        before, self._error = self._error, error
        if error and not before:
            text = f"this server takes no part in its cluster, and keeps its last map: {error}"
            self._log(Line(text, "etcd_failed", WARNING, reason=error))
        elif before and not error:
            self._log(Line("this server takes part in its cluster again", "etcd_answers", INFO))


def _without_versions(text: str) -> str:
    """Return a report without what changes with each version: its numbers after "version"."""
    return re.sub(r'"version": \d+', "", text)
