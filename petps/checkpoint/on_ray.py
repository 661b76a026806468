"""Merging on the machines of a Ray cluster, which all need `pip install petps[ray]`. STORE.md.

Owns:        OnRay.
Never does:  read or write a store (merge.py does, in Ray's workers); decide what is merged.
Called by:   trainers that pass it to Merged, the CLI.
Invariants:  a worker that dies loses at most its merge; an error of the store is reported as in
             place, and is not retried.
Threads:     one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

from petps.checkpoint.merge import Executed, MergePlan, run_plan
from petps.checkpoint.ray_cluster import RayCluster
from petps.errors import PetpsError, Unavailable

__all__ = ["OnRay"]

RETRIES: Final = 3  # of a merge whose worker died


class OnRay(RayCluster):
    """An executor that runs plans as Ray tasks of one processor each, in parallel.

    address, processors: see RayCluster, whose errors it raises. Workers open the store by its
    address, with the options that it was opened with; they see the same local folder only where it
    is mounted. retries: how often a merge whose worker died is retried before it is given up.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        retries: int = RETRIES,
        processors: int | None = None,
    ) -> None:
        super().__init__(address, processors=processors, purpose="merging on other machines")
        self._retries = retries
        self._task = self.ray.remote(num_cpus=1, max_retries=retries)(run_plan)

    def run(self, plans: Sequence[MergePlan]) -> Iterator[Executed]:
        """See Executor."""
        pending = {self._task.remote(plan): plan for plan in plans}
        try:
            while pending:
                (ready, *_), _ = self.ray.wait(list(pending), num_returns=1)
                plan = pending.pop(ready)
                yield self._outcome(plan, ready)
        finally:
            for task in pending:  # the caller stopped reading, so cancel the merges in flight
                with contextlib.suppress(Exception):
                    self.ray.cancel(task, force=True)

    def _outcome(self, plan: MergePlan, ready: Any) -> Executed:
        exceptions = self.ray.exceptions
        try:
            done: Executed = self.ray.get(ready)
            return done
        except exceptions.RayTaskError as error:
            text = str(error).strip().rsplit("\n", 1)[-1]
            problem = (
                f"{plan} failed in a Ray worker: {text}; check that the workers have the same "
                "release of petps"
            )
        except exceptions.RayError as error:
            problem = (
                f"{plan} is given up: its Ray worker died {self._retries + 1} times "
                f"({type(error).__name__}); the chunks stay unmerged, merge again or in place"
            )
        failure: PetpsError = Unavailable(problem)
        return Executed(plan, (), failure, 0.0)
