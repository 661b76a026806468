"""A run of the chaos suite: start, disturb, mend, wait, compare, and check the histories."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import petps_client

import petps
from petps.cluster.etcd import Etcd
from petps.cluster.records import State as ClusterState
from petps.delta.schema import partition_of
from tests.chaos import check
from tests.chaos.check import Violation
from tests.chaos.clients import read_pushed
from tests.chaos.faults import (
    CLIENTS,
    CONTROLLERS,
    PUSH_SERVERS,
    SERVERS,
    TRAINER,
    make_schedule,
)
from tests.chaos.fleet import REPLICAS, SERVERS_OF, Fleet, PetpsError, wait_until
from tests.chaos.history import now_ns, read_history
from tests.chaos.inject import Injector, Observer, Operator, Stalls
from tests.chaos.rows import (
    ALL,
    MODEL,
    PARTITIONS,
    PUSH_MODEL,
    PUSH_TABLE,
    TABLE,
    Keys,
    Rows,
    instance_of,
    rows_of,
)
from tests.chaos.trainer import State
from tests.chaos.truth import STALL, Observations, Published, Reachability

END_SECONDS: Final = 60.0
MOVES: Final = "moves that were asked for"
PUSH_MOVES: Final = "moves of push-fed partitions"


@dataclass(frozen=True)
class Plan:
    """Holds what a run does. kinds: of faults. move_seconds: between two acts of the operator.

    broken: the folder of a rule to break. settle_seconds: for the cluster to settle at the end.
    only_moves: the operator does nothing else. client_seconds: the life of a client.
    """

    seed: int
    seconds: float
    move_seconds: float
    kinds: tuple[str, ...]
    folder: Path
    broken: Path | None = None
    settle_seconds: float = 120.0
    only_moves: bool = False
    client_seconds: float = 20.0


@dataclass
class Report:
    """Holds what a run has shown."""

    counts: dict[str, int] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)
    start: int = 0

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        lines = [f"{name:34} {count:>9,}" for name, count in self.counts.items()]
        return lines + [f"BROKEN: {v.text(self.start)[:1500]}" for v in self.violations[:40]]


class Run:
    """One run."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._report = Report(start=now_ns())
        self._schedule = make_schedule(plan.seed, plan.seconds, plan.kinds)
        (plan.folder / "schedule.json").write_text(
            json.dumps([fault.as_json() for fault in self._schedule], indent=1)
        )
        self._final: dict[int, int] = {}

    def execute(self) -> Report:
        """Run, and return the report."""
        plan = self._plan
        fleet = Fleet(
            plan.folder, plan.seed, client_seconds=plan.client_seconds, broken=plan.broken
        )
        try:
            fleet.start()
            injector = self._disturb(fleet)
            self._settle(fleet)
            self._compare(fleet)
        finally:
            fleet.close()
        self._check(injector)
        return self._report

    def _broken(self, rule: str, detail: str, servers: Sequence[str] = ()) -> None:
        self._report.violations.append(Violation(rule, detail, servers=tuple(servers)))

    def _disturb(self, fleet: Fleet) -> Injector:
        fleet.start_clients()
        self._report.start = now_ns()
        begin = time.monotonic()
        observer, stalls = Observer(fleet), Stalls()
        plan = self._plan
        operators = {
            model: Operator(fleet, model, plan.seed, plan.move_seconds, only_moves=plan.only_moves)
            for model in SERVERS_OF
        }
        injector = Injector(fleet, self._schedule)
        try:
            injector.run(begin)
            time.sleep(max(0.0, begin + self._plan.seconds - time.monotonic()))
        finally:
            for operator in operators.values():
                operator.close()
            observer.close()
            stalls.close()
        self._report.counts["times without a processor"] = len(stalls.faults)
        injector.faults += stalls.faults
        for error in injector.errors:
            self._broken(check.DIED, error)
        self._report.counts[MOVES] = operators[MODEL].moves
        self._report.counts[PUSH_MOVES] = operators[PUSH_MODEL].moves
        self._report.counts["switches that were asked for"] = operators[MODEL].switches
        return injector

    # ---- the end

    def _settle(self, fleet: Fleet) -> None:
        """Stop the clients and the trainer, and wait until every server has every version."""
        (self._plan.folder / "stop").touch()
        for name in (*CLIENTS, TRAINER):
            try:
                status = fleet.processes[name].wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._broken(check.NOT_SETTLED, f"{name} does not end in {END_SECONDS:g} s", [name])
                continue
            if status != 0:
                log = fleet.processes[name].log.read_text()[-1500:]
                self._broken(check.DIED, f"{name} with status {status}: {log}", [name])
        for name in (*SERVERS, *PUSH_SERVERS, *CONTROLLERS):
            process = fleet.processes[name]
            if process.pid is None:
                log = process.log.read_text()[-1500:]
                self._broken(check.DIED, f"{name}: {log}", [name])
        etcd = fleet.etcd()
        try:
            for model in SERVERS_OF:
                for address in fleet.state(etcd, model).drained:
                    fleet.must("drain", address, "--undo", "--model", model)
            wait_until("the cluster is settled", lambda: not _unsettled(fleet, etcd),
                       self._plan.settle_seconds)  # fmt: skip
        except TimeoutError:
            self._broken(check.NOT_SETTLED, _unsettled(fleet, etcd))
        finally:
            etcd.close()
        self._final = self._read_pushed(fleet)

    def _read_pushed(self, fleet: Fleet) -> dict[int, int]:
        keys = sorted({record["key"] for record in self._pushes()})
        if not keys:
            return {}
        array = np.array(keys, np.uint64)
        with petps_client.connect(fleet.url(PUSH_MODEL), deadline_ms=20_000) as client:
            rows, mask = client.pull(PUSH_TABLE, array, return_mask=True)
        return {key: read_pushed(key, rows[i : i + 1], bool(mask[i])) for i, key in enumerate(keys)}

    def _compare(self, fleet: Fleet) -> None:
        """Compare the rows of each pool with those that the trainer published, or clients pushed.

        Which pushed rows are right, the histories say; here each is where it belongs.
        """
        etcd = fleet.etcd()
        try:
            owned = {
                name: _owned(fleet.state(etcd, model), fleet.address(name))
                for model, servers in SERVERS_OF.items()
                for name in servers
            }
        finally:
            etcd.close()
        for name in owned:
            try:
                status = fleet.processes[name].stop(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._broken(check.DIED, f"{name} does not end after SIGTERM", [name])
                continue
            if status != 0:
                log = fleet.processes[name].log.read_text()[-1500:]
                self._broken(check.DIED, f"{name} with status {status}: {log}", [name])
        published = State.read(self._plan.folder)
        pushed = np.array([key for key, value in self._final.items() if value], np.uint64)
        for name, partitions in owned.items():
            keys, rows = _pool_of(fleet, name)
            every = ALL if name in SERVERS else pushed
            expected = every[np.isin(partition_of(every, PARTITIONS), sorted(partitions))]
            self._compare_keys(name, keys, expected)
            if name in SERVERS:
                own = np.isin(keys, expected)
                self._compare_rows(name, keys[own], rows[own], published)
            self._report.counts[f"rows compared of {name}"] = len(keys)

    def _compare_keys(self, name: str, keys: Keys, expected: Keys) -> None:
        missing = np.setdiff1d(expected, keys)
        foreign = np.setdiff1d(keys, expected)
        if len(missing):
            self._unequal(name, "rows of its partitions are missing", missing)
        if len(foreign):
            self._unequal(name, "it has rows of partitions that it does not own", foreign)

    def _compare_rows(self, name: str, keys: Keys, rows: Rows, published: State) -> None:
        writers = published.writers[keys.astype(np.int64)]
        wrong = (rows != rows_of(keys, writers, published.generation)).any(axis=1)
        if wrong.any():
            text = f"rows are not those published last, such as {rows[wrong][0, :3].tolist()}"
            self._unequal(name, text, keys[wrong])

    def _unequal(self, name: str, text: str, keys: Any) -> None:
        self._report.violations.append(
            Violation(check.UNEQUAL, f"{len(keys)} {text}", keys=tuple(keys.tolist()),
                      servers=(name,))
        )  # fmt: skip

    # ---- the histories

    def _pushes(self) -> list[dict[str, Any]]:
        paths = sorted(self._plan.folder.glob("pushes.*.jsonl"))
        return [record for path in paths for record in read_history(path)]

    def _check(self, injector: Injector) -> None:
        folder, report = self._plan.folder, self._report
        published = Published(read_history(folder / "published.jsonl"), self._plan.seed)
        observations = Observations.of(read_history(folder / "observed.jsonl"))
        reachability = Reachability(injector.faults, observations)
        pulls = [
            record for path in sorted(folder.glob("pulls.*.jsonl")) for record in read_history(path)
        ]
        report.violations += check.check_pulls(pulls, published, reachability)
        pushes = self._pushes()
        report.violations += check.check_torn_pushes(pushes)
        report.violations += check.check_lost_pushes(pushes, self._final)
        end = now_ns()
        last_pulls = [
            {"client": 0, "key": key, "push": False, "value": value, "call": end, "return": end + 1}
            for key, value in self._final.items()
        ]
        operations = check.operations_of([*pushes, *last_pulls])
        report.violations += check.check_linearizable(operations)
        good = [pull for pull in pulls if pull["op"] == "pull" and "error" not in pull]
        report.counts |= {
            "faults": sum(fault.kind != STALL for fault in injector.faults),
            "versions of the map": len(list(read_history(folder / "maps.jsonl"))),
            "versions of the push-fed map": len(list(read_history(folder / "maps.pushed.jsonl"))),
            "versions of rows": published.versions,
            "pulls that were checked": len(good),
            "rows seen before their version": check.count_rows_ahead(pulls),
            "pulls that failed": sum("error" in pull for pull in pulls if pull["op"] == "pull"),
            "operations on push-fed keys": len(operations),
            "pushes that were acknowledged": sum(r["push"] and "return" in r for r in pushes),
            "pushes in doubt": sum(r["push"] and "return" not in r for r in pushes),
        }
        for name, least in self._least().items():
            if report.counts[name] < least:
                self._broken(check.VACUOUS, f"{name}: {report.counts[name]}, expected {least}")
        with (folder / "violations.jsonl").open("w") as lines:
            lines.writelines(v.as_json() + "\n" for v in report.violations)

    def _least(self) -> dict[str, int]:
        """Return how much must happen in a run of this length, on a slow machine too."""
        seconds = self._plan.seconds
        return {
            "faults": max(1, int(seconds / 20)) if self._plan.kinds else 0,
            MOVES: max(1, int(seconds / self._plan.move_seconds / 6)),
            PUSH_MOVES: max(1, int(seconds / self._plan.move_seconds / 6)),
            "versions of the push-fed map": 2 + int(seconds / self._plan.move_seconds / 12),
            "versions of rows": max(5, int(seconds / 10)),
            "pulls that were checked": int(2 * seconds),
            "pushes that were acknowledged": int(seconds),
        }


def _owned(state: ClusterState, address: str) -> set[int]:
    assert state.map is not None
    return {number for number, present in enumerate(state.map.owners) if address in present}


def _pool_of(fleet: Fleet, name: str) -> tuple[Keys, Rows]:
    """Return the rows of a server's pool, which is not served."""
    model, table = (MODEL, TABLE) if name in SERVERS else (PUSH_MODEL, PUSH_TABLE)
    with petps.open(fleet.disks[name].folder / "pool") as pool:
        pages = list(pool.scan(table, model=model))
    keys = np.concatenate([np.empty(0, np.uint64), *(page[0] for page in pages)])
    none = rows_of(keys[:0], keys[:0].astype(np.int64), 0)
    return keys, np.concatenate([none, *(page[1] for page in pages)])


def _unsettled(fleet: Fleet, etcd: Etcd) -> str:
    """Return what is still to be done; '': nothing."""
    try:
        states = {model: fleet.state(etcd, model) for model in SERVERS_OF}
    except PetpsError as error:
        return str(error)
    moving = (_moving(fleet, model, state) for model, state in states.items())
    return next(filter(None, moving), "") or _behind(fleet, states[MODEL])


def _moving(fleet: Fleet, model: str, state: ClusterState) -> str:
    if state.map is None or len(state.members) < len(SERVERS_OF[model]):
        return f"members of {model} are {sorted(map(fleet.name_of, state.members))}"
    if state.moves or state.wishes or state.drops or state.drained or state.is_rebalancing:
        return (
            f"{model}: moves {dict(state.moves)}, wishes {dict(state.wishes)}, "
            f"drops {dict(state.drops)}, drained {sorted(state.drained)}"
        )
    for address in {owner for present in state.map.owners for owner in present}:
        if state.members[address].map_version != state.map.version:
            used = state.members[address].map_version
            return f"{fleet.name_of(address)} uses version {used} of the map"
    wrong = [n for n, present in enumerate(state.map.owners) if len(present) != REPLICAS[model]]
    return f"{model}: partitions {wrong} have not {REPLICAS[model]} owners" if wrong else ""


def _behind(fleet: Fleet, state: ClusterState) -> str:
    version = max(
        int(record["version"])
        for record in read_history(fleet.folder / "published.jsonl")
        if record["event"] in ("committed", "base")
    )
    instance = instance_of(State.read(fleet.folder).generation)
    for address, member in state.members.items():
        if not _owned(state, address):
            continue
        behind = {
            number: report.version
            for number, report in member.partitions.items()
            if report.version < version
        }
        if behind:
            return f"{fleet.name_of(address)} is behind version {version}: {behind}"
        if member.instance != instance:
            return f"{fleet.name_of(address)} serves {member.instance}, not {instance}"
    return ""


__all__ = ["Plan", "Report", "Run"]
