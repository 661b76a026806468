"""Train with many workers that Ray Train starts, and starts again when one is lost. PIPELINE.md.

Owns:        fit(), Worker.
Never does:  choose machines or watch processes (Ray does); restore (the function it runs does).
Called by:   trainers.
Invariants:  the workers of a try are the ranks of one torch.distributed group; a rank opens its
             pool only when the process that had it is gone.
Threads:     fit() blocks its caller; a worker runs its function in the thread that Ray gives it.
"""

from __future__ import annotations

import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from petps.checkpoint.ray_cluster import RayCluster
from petps.errors import InUse, InvalidArgument, Unavailable, Unimplemented
from petps.train.link import TIMEOUT_SECONDS, Links
from petps.train.optimizer import Optimizer
from petps.train.sharded import ShardedTables, TableSpec

__all__ = ["Worker", "fit"]

_log = logging.getLogger("petps.train")

# How often all workers are started again before training is given up.
MAX_FAILURES: Final = 8
# How often Ray may fail to start the workers, which it tries for a minute each time.
CONTROLLER_FAILURES: Final = 10
# Ranks of a cluster of this machine alone talk over loopback.
LOCAL_WORKERS: Final = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
POOL: Final = "rows.pool"
MEETING: Final = "meeting"
# How long a rank waits for the process of the last try to leave its pool.
LEAVE_SECONDS: Final = 60.0
LOOK_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True)
class Worker:
    """A rank, in a process of its own.

    folder: on the disk of its node, for this rank alone. A rank that is started again on the same
    node has the same folder; on another node the folder is empty. device: for the model and
    PipelineOptions, as PyTorch names it.
    """

    rank: int
    world: int
    links: Links
    folder: Path
    device: str = "cpu"

    def open_tables(
        self, specs: Sequence[TableSpec], optimizer: Optimizer, **options: Any
    ) -> ShardedTables:
        """Open this rank's pool, or create it. options: see ShardedTables, whose errors it raises.

        A process of the last try may still have the pool; wait for it up to 60 s.
        """
        deadline = time.monotonic() + LEAVE_SECONDS
        while True:
            try:
                return ShardedTables(
                    self.folder / POOL, specs, optimizer, rank=self.rank, world=self.world,
                    **options,
                )  # fmt: skip
            except InUse:
                if time.monotonic() > deadline:
                    raise
                time.sleep(LOOK_SECONDS)


def fit(
    train: Callable[[Worker], Any],
    *,
    workers: int,
    folder: str | Path,
    address: str | None = None,
    resources: Mapping[str, float] | None = None,
    gpus: bool = False,
    max_failures: int = MAX_FAILURES,
    storage: str | Path | None = None,
    timeout_s: float = TIMEOUT_SECONDS,
) -> Any:
    """Run train(worker) in each of ``workers`` processes; return what it returns on rank 0.

    If a worker, its node or train() fails, Ray ends all workers and starts all again, on the nodes
    that there are. So train() begins like any resumed training: it opens its tables, calls
    RankedOutput.restore(), which goes back to the newest version, and begins the run of the log.

    Args:
        train: A function that pickle can send; the workers need the same release of petps.
        workers: The number of ranks.
        folder: Where each node keeps its ranks' pools: an absolute path on a disk of the node.
            Ray gives each worker a folder of its own to work in, so all paths must be absolute.
        address: The cluster; see RayCluster. None: the present one, or one of this machine alone.
        resources: What each worker needs of its node, in Ray's names; None: one CPU, or one GPU.
        gpus: Whether each worker gets a GPU, and rows cross over NCCL.
        max_failures: How often the workers are started again; -1: always.
        storage: Where Ray keeps its own record of the run, which all nodes see; None: below the
            home folder.
        timeout_s: How long a rank waits for its peers; see Links.

    Raises:
        InvalidArgument: workers is below 1, or folder is not absolute.
        Unavailable: Training failed once more than max_failures allow; the text has each rank's
            error. Or no cluster answers, or this machine has no room for the workers.
        Unimplemented: Ray is not installed.
        FailedPrecondition: See RayCluster.
    """
    if workers < 1:
        raise InvalidArgument(f"workers must be at least 1, got {workers}")
    if not Path(folder).is_absolute():
        raise InvalidArgument(
            f"folder must be an absolute path, because Ray gives a worker a folder of its own to "
            f"work in, got {folder}"
        )
    with RayCluster(address, purpose="petps.train.ray") as cluster:
        try:
            import ray.train
            from ray.train.torch import TorchConfig, TorchTrainer
        except ImportError as error:
            raise Unimplemented(
                f"petps.train.ray needs Ray Train ({error}): pip install petps[ray]"
            ) from error
        _check_room(cluster, workers, {"GPU" if gpus else "CPU": 1.0} | dict(resources or {}))

        backend = "nccl" if gpus else "gloo"

        def run() -> Any:  # sent to the workers with what it refers to
            return _run(train, str(folder), timeout_s, gpus)

        trainer = TorchTrainer(
            run,
            torch_config=_meet_in(folder, backend, timeout_s)
            if cluster.is_local
            else TorchConfig(backend=backend, timeout_s=math.ceil(timeout_s)),
            scaling_config=ray.train.ScalingConfig(
                num_workers=workers,
                use_gpu=gpus,
                resources_per_worker=None if resources is None else dict(resources),
            ),
            run_config=ray.train.RunConfig(
                storage_path=None if storage is None else str(storage),
                failure_config=ray.train.FailureConfig(
                    max_failures=max_failures, controller_failure_limit=CONTROLLER_FAILURES
                ),
                worker_runtime_env={"env_vars": LOCAL_WORKERS} if cluster.is_local else None,
            ),
        )
        try:
            return trainer.fit().return_value
        except ray.train.WorkerGroupError as error:
            raise Unavailable(
                f"training was given up after {max_failures} new starts: {_describe(error)}"
            ) from error
        except ray.train.TrainingFailedError as error:
            raise Unavailable(f"Ray ended the training: {_describe(error)}") from error


def _meet_in(folder: str | Path, backend: str, timeout_s: float) -> Any:
    """Return a TorchConfig by which the ranks of one machine meet in a file.

    PyTorch's own store, by which Ray lets them meet, listens on all addresses.
    """
    import ray
    from ray.train.backend import Backend
    from ray.train.torch import TorchConfig

    class Meeting(Backend):  # type: ignore[misc]
        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            """Make the process group of a try."""
            Path(folder).mkdir(parents=True, exist_ok=True)
            for old in Path(folder).glob(f"{MEETING}-*"):
                old.unlink()
            path, world = Path(folder) / f"{MEETING}-{uuid.uuid4().hex}", len(worker_group)
            ray.get(
                [
                    worker_group.execute_single_async(
                        rank, _meet, str(path), rank, world, backend, timeout_s
                    )
                    for rank in range(world)
                ]
            )

    class InAFile(TorchConfig):  # type: ignore[misc]
        @property
        def backend_cls(self) -> Any:
            return Meeting

    return InAFile(backend=backend)


def _meet(path: str, rank: int, world: int, backend: str, timeout_s: float) -> None:
    from torch import distributed

    distributed.init_process_group(
        backend, init_method=f"file://{path}", rank=rank, world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )  # fmt: skip


def _check_room(cluster: RayCluster, workers: int, needs: Mapping[str, float]) -> None:
    """Raise Unavailable if a cluster of this machine can never hold the workers; else warn."""
    has = cluster.ray.cluster_resources()
    lacking = [name for name, count in needs.items() if has.get(name, 0.0) < workers * count]
    if not lacking:
        return
    text = "; ".join(
        f"{workers} workers need {workers * needs[name]:g} {name}, it has {has.get(name, 0.0):g}"
        for name in lacking
    )
    if cluster.is_local:
        raise Unavailable(f"this machine has no room: {text}: start fewer workers")
    _log.warning("[train] the cluster has no room yet: %s; waiting for it", text)


def _run(train: Callable[[Worker], Any], folder: str, timeout_s: float, gpus: bool) -> Any:
    """Run one worker, in the process group that Ray has made."""
    import ray.train
    import ray.train.torch

    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    own = Path(folder) / f"rank-{rank}-of-{world}"
    own.mkdir(parents=True, exist_ok=True)
    device = str(ray.train.torch.get_device()) if gpus else "cpu"
    links = Links.of_processes(timeout_s, device=device)
    return train(Worker(rank, world, links, own, device))


def _describe(error: Any) -> str:
    """Return the last line of each rank's error, or of the error itself."""
    failures: Mapping[int, Exception] = getattr(error, "worker_failures", {})
    if not failures:
        return _last_line(error)
    return "; ".join(f"rank {rank}: {_last_line(failures[rank])}" for rank in sorted(failures))


def _last_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__
