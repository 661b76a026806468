"""The threads that disturb a fleet, move its partitions, and observe it, while clients go on."""

from __future__ import annotations

import random
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from tests.chaos.faults import NODES, SERVERS, Planned, links_of
from tests.chaos.fleet import SERVERS_OF, Fleet, PetpsError, applied_of
from tests.chaos.history import History, now_ns
from tests.chaos.network import Link
from tests.chaos.rows import MODEL, PARTITIONS, PUSH_MODEL, instance_of
from tests.chaos.truth import SECOND, STALL, Fault

OBSERVE_SECONDS: Final = 0.5
LOOK_SECONDS: Final = 0.5
STALL_LOOK_SECONDS: Final = 0.05
STALL_SECONDS: Final = 1.0
SWITCH_EVERY: Final = 5  # every fifth thing that the operator does, from the second on
STOP_SECONDS: Final = 60.0  # for a server to end after SIGTERM
SERVERS_OF_PETPS: Final = ("s", "u")  # how the names of servers begin


class Injector:
    """Executes a schedule, each fault in a thread of its own. faults: what happened, and when."""

    def __init__(self, fleet: Fleet, schedule: Sequence[Planned]) -> None:
        self._fleet, self._schedule = fleet, schedule
        self._history = History(fleet.folder / "faults.jsonl")
        self._lock = threading.Lock()
        self._links: dict[int, Planned] = {}
        self._busy: set[str] = set()  # nodes with a fault now
        self._threads: list[threading.Thread] = []
        self.faults: list[Fault] = []
        self.errors: list[str] = []

    def run(self, start: float) -> None:
        """Execute the schedule, which began at ``start`` of time.monotonic()."""
        for number, fault in enumerate(self._schedule):
            time.sleep(max(0.0, start + fault.begin - time.monotonic()))
            thread = threading.Thread(target=self._execute, args=(number, fault))
            self._threads.append(thread)
            thread.start()
        for thread in self._threads:
            thread.join()

    def _execute(self, number: int, fault: Planned) -> None:
        with self._lock:
            is_busy = fault.node in self._busy  # on a slow machine a process is not ready in time
            self._busy.add(fault.node)
        if is_busy:
            self._history.write(number=number, event="left out", at=now_ns())
            return
        try:
            self._execute_on_node(number, fault)
        finally:
            with self._lock:
                self._busy.discard(fault.node)

    def _execute_on_node(self, number: int, fault: Planned) -> None:
        begin = now_ns()
        self._history.write(number=number, event="begin", at=begin, **fault.as_json())
        try:
            self._break(number, fault)
            time.sleep(fault.length)
            self._mend(number, fault)
        except Exception as error:  # reported at the end of the run, which then fails
            self.errors.append(f"fault {number} ({fault.kind} of {fault.node}): {error}")
        end = now_ns()
        self._history.write(number=number, event="end", at=end)
        links = links_of(fault) if fault.peers else frozenset()
        with self._lock:
            self.faults.append(Fault(fault.kind, (fault.node,), begin, end, links))

    def _break(self, number: int, fault: Planned) -> None:
        process = self._fleet.processes[fault.node]
        if fault.kind == "kill":
            process.kill()
        elif fault.kind == "pause":
            process.pause()
        elif fault.kind == "restart":
            try:
                process.stop(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                text = f"{fault.node} has not ended {STOP_SECONDS} s after SIGTERM"
                raise TimeoutError(text) from None
        elif fault.kind == "clock":
            self._fleet.set_clock(fault.node, fault.amount)
        elif fault.kind == "disk":
            self._fleet.disks[fault.node].fill()
        else:
            self._use_links(number, fault)

    def _mend(self, number: int, fault: Planned) -> None:
        process = self._fleet.processes[fault.node]
        if fault.kind in ("kill", "restart"):
            process.start()
            if fault.node[0] in SERVERS_OF_PETPS:
                self._fleet.wait_ready(fault.node)
        elif fault.kind == "pause":
            process.resume()
        elif fault.kind == "clock":
            self._fleet.set_clock(fault.node, 0)
        elif fault.kind == "disk":
            self._fleet.disks[fault.node].free()
        else:
            self._use_links(number, None)

    def _use_links(self, number: int, fault: Planned | None) -> None:
        """Add a fault of links, or remove it, and apply all that are left."""
        with self._lock:
            if fault is None:
                self._links.pop(number, None)
            else:
                self._links[number] = fault
            self._fleet.network.use(
                Link(source, target, planned.loss, planned.amount)
                for planned in self._links.values()
                for source, target in sorted(links_of(planned))
            )


class Loop(threading.Thread):
    """A thread that calls a function again and again, with a pause, until close()."""

    def __init__(self, call: Callable[[], None], pause: float) -> None:
        super().__init__(daemon=True)
        self._call, self._pause = call, pause
        self._done = threading.Event()
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        """Call it."""
        try:
            while not self._done.wait(self._pause):
                self._call()
        except Exception as error:
            self.error = error

    def close(self) -> None:
        """End after the running call. Raise what it raised."""
        self._done.set()
        self.join()
        if self.error is not None:
            raise self.error


class Stalls:
    """Notes when this process, which sleeps most of the time, does not run when it should.

    Then the machine is too busy, and calls may end late without a fault of petps.
    """

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self._before = now_ns()
        self._loop = Loop(self._look, STALL_LOOK_SECONDS)

    def close(self) -> None:
        """Stop."""
        self._loop.close()

    def _look(self) -> None:
        before, self._before = self._before, now_ns()
        if self._before - before > STALL_SECONDS * SECOND:
            self.faults.append(Fault(STALL, NODES, before, self._before))


class Observer:
    """Writes what servers and etcd say about themselves."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._history = History(fleet.folder / "observed.jsonl")
        self._maps = {
            model: History(fleet.folder / name)
            for model, name in ((MODEL, "maps.jsonl"), (PUSH_MODEL, "maps.pushed.jsonl"))
        }
        self._versions = dict.fromkeys(self._maps, 0)
        self._etcd = fleet.etcd()
        self._loops = [
            Loop(lambda name=name: self._look(name), OBSERVE_SECONDS)  # type: ignore[misc]
            for name in SERVERS
        ]
        self._loops.append(Loop(self._look_at_map, LOOK_SECONDS))

    def close(self) -> None:
        """Stop."""
        for loop in self._loops:
            loop.close()
        self._etcd.close()

    def _look(self, name: str) -> None:
        begin = now_ns()
        try:
            status = self._fleet.status(name)
            instance, applied = applied_of(status)
            owned = numbers_of(status["shard"]["owned"])
        except (OSError, ValueError, KeyError):
            return  # it is down, or begins
        self._history.write(
            server=name, **{"from": begin, "until": now_ns()}, applied=applied, instance=instance,
            owned=owned, map_version=status["shard"]["map_version"],
        )  # fmt: skip

    def _look_at_map(self) -> None:
        for model, history in self._maps.items():
            try:
                state = self._fleet.state(self._etcd, model)
            except PetpsError:
                return
            if state.map is None or state.map.version == self._versions[model]:
                continue
            self._versions[model] = state.map.version
            owners = [[self._fleet.name_of(a) for a in present] for present in state.map.owners]
            moves = {number: move.phase for number, move in state.moves.items()}
            history.write(at=now_ns(), version=state.map.version, owners=owners, moves=moves)


class Operator:
    """Moves partitions of a model as an operator does, one wish after the other, drains, switches.

    A switch is a new instance, which the trainer begins: the push-fed model has none. The instance
    before the last is dropped.
    """

    def __init__(
        self, fleet: Fleet, model: str, seed: int, seconds: float, *, only_moves: bool = False
    ) -> None:
        self._fleet, self._model, self._only_moves = fleet, model, only_moves
        self._servers = SERVERS_OF[model]
        self._chance = random.Random(f"operator of {model} {seed}")
        self._history = History(fleet.folder / f"operator.{model}.jsonl")
        self._etcd = fleet.etcd()
        self._drained = ""
        self._acts = 0
        self.moves = 0
        self.switches = 0
        self._loop = Loop(self._act, seconds)

    def close(self) -> None:
        """Stop."""
        self._loop.close()
        self._etcd.close()

    def _act(self) -> None:
        self._acts += 1
        may_switch = self._model == MODEL and not self._only_moves
        if may_switch and self._acts % SWITCH_EVERY == 2:
            self._switch()
            return
        try:
            arguments = self._choose()
        except PetpsError as error:
            self._history.write(at=now_ns(), error=str(error))
            return
        process = self._fleet.petps(*arguments, "--model", self._model)
        self._history.write(
            at=now_ns(), command=list(map(str, arguments)), status=process.returncode,
            output=(process.stdout + process.stderr)[-300:],
        )  # fmt: skip
        if process.returncode != 0:
            return
        if arguments[0] == "drain":
            self._drained = "" if "--undo" in arguments else self._fleet.name_of(str(arguments[1]))
        self.moves += 1  # a drain and a rebalance move partitions too

    def _switch(self) -> None:
        self.switches += 1
        path = self._fleet.folder / "switch"
        temporary = path.with_suffix(".new")
        temporary.write_text(str(self.switches))
        temporary.replace(path)
        self._history.write(at=now_ns(), switch=self.switches)
        for name in SERVERS if self.switches > 1 else ():
            text = self._fleet.drop(name, instance_of(self.switches - 2))
            self._history.write(at=now_ns(), dropped=self.switches - 2, server=name, output=text)

    def _choose(self) -> tuple[Any, ...]:
        weights = (1, 0, 0) if self._only_moves else (5, 2, 1)
        kind = self._chance.choices(("move", "drain", "rebalance"), weights)[0]
        if self._drained and self._chance.random() < 0.5:
            return ("drain", self._fleet.address(self._drained), "--undo")
        if kind == "rebalance":
            return ("rebalance",)
        if kind == "drain" and not self._drained:
            return ("drain", self._fleet.address(self._chance.choice(self._servers)))
        state = self._fleet.state(self._etcd, self._model)
        assert state.map is not None
        partition = self._chance.randrange(PARTITIONS)
        owners = state.map.owners[partition]
        others = [self._fleet.address(name) for name in self._servers if name != self._drained]
        others = [address for address in others if address not in owners]
        if not others:  # the only other server is drained
            return ("rebalance",)
        source, target = self._chance.choice(owners), self._chance.choice(others)
        return ("move", partition, "--from", source, "--to", target)


def numbers_of(text: str) -> list[int]:
    """Return the partitions in the text of a status, such as '0-3, 5'."""
    if text == "none":
        return []
    numbers: list[int] = []
    for part in text.replace(" ", "").split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers
