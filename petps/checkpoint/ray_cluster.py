"""A connection to a Ray cluster, or a cluster of this machine alone.

Owns:        RayCluster.
Never does:  run tasks.
Called by:   on_ray.py; petps.train.ray.
Invariants:  a cluster that is started here listens on loopback only.
Threads:     one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from petps.errors import FailedPrecondition, Unavailable, Unimplemented

if TYPE_CHECKING:
    from typing import Self  # Python 3.11

__all__ = ["RayCluster"]

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


class RayCluster:
    """A connection to a cluster, which close() ends.

    address: ``ray://host:port`` (Ray Client), or a cluster's ``host:port``. None: the cluster that
    this process is connected to, else the one that RAY_ADDRESS names, else a new one on this
    machine, which no other machine can reach. processors: those of a cluster started here; None:
    all of this machine. purpose: what needs Ray, for the error if it is missing. ray: the module.

    Raises Unimplemented if Ray is not installed, Unavailable if no cluster answers, and
    FailedPrecondition if an address is given although the process is connected to a cluster, or if
    a cluster started here would be reachable from other machines.
    """

    def __init__(
        self, address: str | None = None, *, processors: int | None = None, purpose: str
    ) -> None:
        argument, address = address, address or os.environ.get("RAY_ADDRESS")
        if address is None:
            for name, value in LOCAL_ENVIRONMENT.items():
                os.environ.setdefault(name, value)
        self.ray = _import_ray(purpose)
        self._connected = not self.ray.is_initialized()
        if self._connected:
            self._connect(address, {} if processors is None else {"num_cpus": processors})
        elif argument is not None:
            raise FailedPrecondition(
                f"this process is connected to a Ray cluster already: leave out {argument}, or "
                "call ray.shutdown() first"
            )

    def _connect(self, address: str | None, local: Mapping[str, Any]) -> None:
        options: dict[str, Any] = {"logging_level": "error", "log_to_driver": False}
        if address is None:
            options |= {**LOCAL_OPTIONS, **local}
        try:
            self.ray.init(address=address or "local", **options)
        except Exception as error:  # Ray raises it itself if its processes do not start in time
            where = "on this machine could be started" if address is None else f"at {address}"
            raise Unavailable(
                f"no Ray cluster {where}: {error}; check that it runs and that RAY_AUTH_TOKEN is "
                "its token"
            ) from error
        if address is None and not self.is_local:
            self.close()
            raise FailedPrecondition(
                "other machines could reach a cluster started here, because Ray was imported "
                "before this call: connect to a cluster yourself (ray.init), or import Ray later"
            )

    @property
    def is_local(self) -> bool:
        """Return whether the cluster is of this machine alone."""
        return all(node["NodeManagerAddress"] == LOOPBACK for node in self.ray.nodes())

    def close(self) -> None:
        """Disconnect from the cluster; stop it if it was started here."""
        if self._connected:
            self._connected = False
            self.ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _import_ray(purpose: str) -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise Unimplemented(f"{purpose} needs Ray: pip install petps[ray]") from error
    return ray
