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

from petps.checkpoint.merge import Executed, MergePlan, run_plan
from petps.checkpoint.ray_tasks import RETRIES, RayTasks
from petps.errors import PetpsError

__all__ = ["OnRay"]


class OnRay(RayTasks):
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
        super().__init__(
            address,
            purpose="merging on other machines",
            remedy="the chunks stay unmerged, merge again or in place",
            retries=retries,
            processors=processors,
        )

    def run(self, plans: Sequence[MergePlan]) -> Iterator[Executed]:
        """See Executor."""
        with contextlib.closing(self.run_all(run_plan, plans)) as results:
            for plan, result in results:
                yield Executed(plan, (), result, 0.0) if isinstance(result, PetpsError) else result
