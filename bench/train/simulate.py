"""A discrete-event simulation of the training loop, from measured stage times.

Every rank does the same at the same time, so the simulation has one: its threads (caller, link,
route, exchange, retrieve, write-back), each serial, and the processors that they share with the
other ranks of the machine. A task waits for the tasks before it and then takes its seconds:
either of a processor's time (shared when more tasks need a processor than there are), or of the
clock (the dense wait, the link's own time).

It does not model ranks that drift apart, memory bandwidth, the page cache, or keys that wait for
rows on the link.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Stages", "Task", "simulate", "step_seconds"]

WARM_UP: Final = 8
STEPS: Final = 16  # the steps that are counted
AHEAD: Final = 6  # steps after them, whose lookups run at the same time, as in a long run


@dataclass(frozen=True, slots=True)
class Stages:
    """The seconds of a step on one rank.

    cpu: by stage, processor time. wait: by stage, clock time (for peers). The rows and the
    gradients of a micro-batch each take ``transfer_cpu`` of a processor, then ``transfer`` on the
    link. ``dense``: the wait in all. samples, rows: those of each micro-batch over the mean;
    empty if all are equal.
    """

    cpu: Mapping[str, float]
    transfer_cpu: float
    transfer: float
    dense: float
    wait: Mapping[str, float] = field(default_factory=dict)
    samples: Sequence[float] = ()
    rows: Sequence[float] = ()


@dataclass(eq=False, slots=True)
class Task:
    """A task. Tasks of one thread run in the order of their creation, and after ``after``."""

    thread: str
    seconds: float
    on_processor: bool
    after: Sequence[Task]
    end: float = -1.0
    left: float = field(init=False, default=0.0)


# Makes a task: its thread, its seconds, the tasks before it; cpu=False: on the clock.
MakeTask = Callable[..., Task]


def simulate(tasks: Sequence[Task], processors: float) -> None:
    """Set each task's end. processors: how many this rank has, a fraction if it shares them."""
    threads: dict[str, list[Task]] = {}
    for task in reversed(tasks):
        threads.setdefault(task.thread, []).append(task)
    now = 0.0
    running: list[Task] = []
    sleeping: list[tuple[float, int, Task]] = []
    busy: set[str] = set()
    left = len(tasks)
    while left:
        has_begun = True
        while has_begun:
            has_begun = False
            for name, queue in threads.items():
                if name in busy or not queue:
                    continue
                task = queue[-1]
                if all(0 <= before.end <= now for before in task.after):
                    queue.pop()
                    busy.add(name)
                    has_begun = True
                    if task.on_processor:
                        task.left = task.seconds
                        running.append(task)
                    else:
                        heapq.heappush(sleeping, (now + task.seconds, id(task), task))
        rate = min(1.0, processors / len(running)) if running else 1.0
        soonest = min((task.left / rate for task in running), default=float("inf"))
        wakes = sleeping[0][0] - now if sleeping else float("inf")
        passed = min(soonest, wakes)
        if passed == float("inf"):
            raise AssertionError("tasks wait for each other")
        now += passed
        for task in running:
            task.left -= passed * rate
        ended = [task for task in running if task.left <= 1e-12]
        running = [task for task in running if task.left > 1e-12]
        while sleeping and sleeping[0][0] <= now + 1e-12:
            ended.append(heapq.heappop(sleeping)[2])
        for task in ended:
            task.end = now
            busy.discard(task.thread)
            left -= 1


def step_seconds(mode: str, stages: Stages, micro_batches: int, processors: float) -> float:
    """Return the duration of a step once the pipeline is full."""
    tasks: list[Task] = []
    ends: list[Task] = []

    def task(thread: str, seconds: float, *after: Task, cpu: bool = True) -> Task:
        tasks.append(Task(thread, seconds, cpu, after))
        return tasks[-1]

    ahead, overlaps = mode in ("dual", "nested"), mode in ("frozen", "nested")
    written: list[Task] = []
    for step in range(WARM_UP + STEPS + AHEAD):
        rows = _lookup(task, stages, ahead, written, ends, step)
        ready = task("caller", stages.cpu.get("freshen", 0.0) if ahead else 0.0, *rows)
        sent = _window(task, stages, micro_batches, overlaps, ready)
        summed = task("caller", stages.wait.get("reduce", 0.0), *sent, cpu=False)
        done = task("caller", stages.cpu["reduce"] + stages.cpu["update"], summed)
        thread = "write-back" if ahead else "caller"
        written.append(task(thread, stages.cpu["write-back"], done))
        ends.append(done if ahead else written[-1])
    simulate(tasks, processors)
    return (ends[WARM_UP + STEPS - 1].end - ends[WARM_UP - 1].end) / STEPS


def _lookup(
    make: MakeTask, stages: Stages, ahead: bool, written: list[Task], ends: list[Task], step: int
) -> list[Task]:
    route, exchange, retrieve = ("route", "exchange", "retrieve") if ahead else ["caller"] * 3
    # The keys of at most two batches ahead are exchanged; rows wait for the write-back of the batch
    # before the last.
    earlier = [ends[step - 3]] if ahead and step >= 3 else []
    if not ahead and ends:
        earlier = [ends[-1]]
    routed = make(route, stages.cpu["prefetch"] + stages.cpu["route"], *earlier)
    peers = make(exchange, stages.wait.get("exchange", 0.0), routed, cpu=False)
    keys = make(exchange, stages.cpu["exchange"], peers)
    behind = [written[step - 2]] if ahead and step >= 2 else []
    rows = make(retrieve, stages.cpu["retrieve"], keys, *behind)
    return [make(retrieve, stages.cpu.get("intersect", 0.0), rows)] if ahead else [rows]


def _window(
    make: MakeTask, stages: Stages, micro_batches: int, overlaps: bool, ready: Task
) -> list[Task]:
    thread = "link" if overlaps else "caller"

    equal = [1.0] * micro_batches
    sizes, samples = stages.rows or equal, stages.samples or equal

    def cross(micro: int, *after: Task) -> Task:
        gathered = make(thread, stages.transfer_cpu * sizes[micro], *after)
        return make(thread, stages.transfer * sizes[micro], gathered, cpu=False)

    micros = range(micro_batches)
    rows = [cross(micro, ready) for micro in micros] if overlaps else []
    sent: list[Task] = []
    for micro in micros:
        received = rows[micro] if overlaps else cross(micro, ready)
        share = samples[micro] / micro_batches
        computed = make("caller", stages.cpu["dense"] * share, received)
        waited = make("caller", stages.dense * share, computed, cpu=False)
        sent.append(cross(micro, waited))
    return sent
