"""Functions that run as tasks of a Ray cluster, whose machines all need `pip install petps[ray]`.

Owns:        RayTasks.
Never does:  know what a function does.
Called by:   on_ray.py; petps.cli.bulk.
Invariants:  a worker that dies loses at most its task, which Ray repeats on another one; an error
             that a function raises is reported, and is not retried.
Threads:     one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable
from typing import Any, Final, TypeVar

from petps.checkpoint.ray_cluster import RayCluster
from petps.errors import PetpsError, Unavailable

__all__ = ["RETRIES", "RayTasks"]

RETRIES: Final = 3  # of a task whose worker died
IN_FLIGHT_MAX: Final = 10_000  # tasks that wait in the cluster
LOOK_SECONDS: Final = 1.0  # between two moments in which Python handles signals
CANCEL_SECONDS: Final = 30.0  # the longest wait until cancelled tasks have ended
Argument = TypeVar("Argument")


class RayTasks(RayCluster):
    """Runs functions as Ray tasks of one processor each, in parallel.

    address, processors, purpose: see RayCluster, whose errors it raises. retries: how often a task
    whose worker died is retried before it is given up. remedy: what to do about a task that is
    given up, for its error.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        purpose: str,
        remedy: str,
        retries: int = RETRIES,
        processors: int | None = None,
    ) -> None:
        super().__init__(address, processors=processors, purpose=purpose)
        self._retries = retries
        self._remedy = remedy

    def run_all(
        self,
        function: Callable[[Argument], Any],
        arguments: Iterable[Argument],
        *,
        in_flight_max: int = IN_FLIGHT_MAX,
    ) -> Generator[tuple[Argument, Any]]:
        """Yield each argument with the result, or a PetpsError, when it is done, in any order.

        in_flight_max: tasks in flight at a time. An argument names its task in errors. If the
        caller stops reading, the tasks in flight are cancelled.
        """
        task = self.ray.remote(num_cpus=1, max_retries=self._retries)(function)
        waiting = iter(arguments)
        pending: dict[Any, Argument] = {}
        is_left = True
        try:
            while is_left or pending:
                while is_left and len(pending) < in_flight_max:
                    try:
                        argument = next(waiting)
                    except StopIteration:
                        is_left = False
                        break
                    pending[task.remote(argument)] = argument
                if pending:
                    ready = self._first_of(list(pending))
                    argument = pending.pop(ready)
                    yield argument, self._result_of(argument, ready)
        finally:
            self._cancel(list(pending))

    def _first_of(self, tasks: list[Any]) -> Any:
        """Wait for one of the tasks, in short pieces, between which Ctrl-C counts."""
        ready: list[Any] = []
        while not ready:
            ready, _ = self.ray.wait(tasks, num_returns=1, timeout=LOOK_SECONDS)
        return ready[0]

    def _cancel(self, tasks: list[Any]) -> None:
        """Cancel tasks, and wait until they have ended."""
        for task in tasks:
            with contextlib.suppress(Exception):
                self.ray.cancel(task, force=True)
        if tasks:
            with contextlib.suppress(Exception):
                self.ray.wait(tasks, num_returns=len(tasks), timeout=CANCEL_SECONDS)

    def _result_of(self, argument: object, ready: Any) -> Any:
        exceptions = self.ray.exceptions
        try:
            return self.ray.get(ready)
        except exceptions.RayTaskError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, PetpsError):
                return cause
            text = str(error).strip().rsplit("\n", 1)[-1]
            problem = (
                f"{argument} failed in a Ray worker: {text}; check that the workers have the same "
                "release of petps"
            )
        except exceptions.RayError as error:
            problem = (
                f"{argument} is given up: its Ray worker died {self._retries + 1} times "
                f"({type(error).__name__}); {self._remedy}"
            )
        return Unavailable(problem)
