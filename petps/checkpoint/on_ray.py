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
import os
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Final

from petps.checkpoint.merge import Executed, MergePlan, run_plan
from petps.errors import FailedPrecondition, PetpsError, Unavailable, Unimplemented

__all__ = ["OnRay"]

RETRIES: Final = 3  # of a merge whose worker died
# A cluster started here has no dashboard, and its object store is small, because rows go directly
# between a worker and the store. It sends no usage statistics. It listens on loopback only: Ray
# does so on platforms without cluster support, and the first variable makes it treat this machine
# as one. Ray reads the variable when it is imported.
LOCAL_OPTIONS: Final = {"include_dashboard": False, "object_store_memory": 100 << 20}
LOCAL_ENVIRONMENT: Final = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
LOOPBACK: Final = "127.0.0.1"


class OnRay:
    """An executor that runs plans as Ray tasks of one processor each, in parallel.

    address: ``ray://host:port`` (Ray Client), or a cluster's ``host:port``. None: the cluster that
    this process is connected to, else the one that RAY_ADDRESS names, else a new one on this
    machine, which no other machine can reach. Workers open the store by its address, with the
    options that it was opened with; they see the same local folder only where it is mounted.
    retries: how often a merge whose worker died is retried before it is given up. processors: those
    of a cluster started here; None: all of this machine.
    Raises Unimplemented if Ray is not installed, Unavailable if no cluster answers, and
    FailedPrecondition if an address is given although the process is connected to a cluster, or if
    a cluster started here would be reachable from other machines.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        retries: int = RETRIES,
        processors: int | None = None,
    ) -> None:
        argument, address = address, address or os.environ.get("RAY_ADDRESS")
        if address is None:
            for name, value in LOCAL_ENVIRONMENT.items():
                os.environ.setdefault(name, value)
        self._ray = _import_ray()
        self._retries = retries
        self._connected = not self._ray.is_initialized()
        if self._connected:
            self._connect(address, processors)
        elif argument is not None:
            raise FailedPrecondition(
                f"this process is connected to a Ray cluster already: leave out {argument}, or "
                "call ray.shutdown() first"
            )
        self._task = self._ray.remote(num_cpus=1, max_retries=retries)(run_plan)

    def _connect(self, address: str | None, processors: int | None) -> None:
        options: dict[str, Any] = {"logging_level": "error", "log_to_driver": False}
        if address is None:
            options |= {**LOCAL_OPTIONS, "num_cpus": processors}
        try:
            self._ray.init(address=address or "local", **options)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            where = "on this machine could be started" if address is None else f"at {address}"
            raise Unavailable(
                f"no Ray cluster {where}: {error}; check that it runs and that RAY_AUTH_TOKEN is "
                "its token"
            ) from error
        if address is None and self._ray.util.get_node_ip_address() != LOOPBACK:
            self.close()
            raise FailedPrecondition(
                "other machines could reach a cluster started here, because Ray was imported "
                "before this call: connect to a cluster yourself (ray.init), or import Ray later"
            )

    def run(self, plans: Sequence[MergePlan]) -> Iterator[Executed]:
        """See Executor."""
        pending = {self._task.remote(plan): plan for plan in plans}
        try:
            while pending:
                (ready, *_), _ = self._ray.wait(list(pending), num_returns=1)
                plan = pending.pop(ready)
                yield self._outcome(plan, ready)
        finally:
            for task in pending:  # the caller stopped reading, so cancel the merges in flight
                with contextlib.suppress(Exception):
                    self._ray.cancel(task, force=True)

    def _outcome(self, plan: MergePlan, ready: Any) -> Executed:
        exceptions = self._ray.exceptions
        try:
            done: Executed = self._ray.get(ready)
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

    def close(self) -> None:
        """Disconnect from the cluster; stop it if it was started here."""
        if self._connected:
            self._connected = False
            self._ray.shutdown()

    def __enter__(self) -> OnRay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _import_ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise Unimplemented(
            "merging on other machines needs Ray: pip install petps[ray]"
        ) from error
    return ray
