"""TorchRec's own delta trackers, of both generations, as a source of ids.

TorchRec records lookups itself. This module moves them into a petps tracker, and works around
known faults of TorchRec's trackers:

- They record evaluation too.
- A table that was not looked up in an interval breaks the read of all tables.
- They confuse tables, or features, of the same name.
- Their ids are row numbers of the rank's own shard.
- A lookup that follows a read within the same step counts as read already.

Owns:        TorchRecIds.
Never does:  import torchrec; gather (TorchTable does).
Called by:   trainers.
Threads:     the trainer's thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from petps.errors import FailedPrecondition, InvalidArgument, PetpsError
from petps.train.pytorch import TorchTable
from petps.train.tracker import Tracker

__all__ = ["CONSUMER", "TorchRecIds"]

CONSUMER: Final = "petps"


class TorchRecIds:
    """The rows of a sharded model that TorchRec's tracker saw looked up in training.

    model: DistributedModelParallel with its tracker turned on, in mode ID_ONLY and with a
    consumer for petps: ``DeltaTrackerConfig(consumers=["petps"])`` from TorchRec 1.5 on, before
    that ``ModelTrackerConfig(tracking_mode=TrackingMode.ID_ONLY, consumers=["petps"])``. columns:
    state of the fused optimizer that is kept per row ("momentum1"). ``tables`` has this rank's
    rows by full name; keys are row numbers of the whole table.

    Raises InvalidArgument or FailedPrecondition, which name the obstacle.
    """

    def __init__(
        self, tracker: Tracker, model: Any, *, consumer: str = CONSUMER, columns: Sequence[str] = ()
    ) -> None:
        self._tracker = tracker
        self._theirs = _find_tracker(model)
        self._consumer = consumer
        known = self._theirs.per_consumer_batch_idx
        if consumer not in known:
            raise InvalidArgument(
                f"TorchRec's tracker has no consumer {consumer!r}; it has: {', '.join(known)}: add "
                f"{consumer!r} to the configuration's consumers"
            )
        mode = self._theirs._mode.name
        if mode != "ID_ONLY":
            raise InvalidArgument(
                f"TorchRec's tracker is in mode {mode}, which keeps rows as they were before the "
                "optimizer's step: configure TrackingMode.ID_ONLY"
            )
        _check_names(self._theirs.tracked_modules)
        state = model.state_dict()
        fused = _Fused(model)
        self.tables: dict[str, TorchTable] = {}
        for name in self._theirs.fqn_to_feature_names():
            weight, first_key = _local_rows(name, state.get(f"{name}.weight"))
            fused.add(name, weight)
            self.tables[name] = TorchTable(
                tracker, name, weight, optimizer=fused, columns=columns, first_key=first_key
            )
        for module in self._theirs.tracked_modules.values():
            module.post_lookup_tracker_fn = self._guard(module, module.post_lookup_tracker_fn)

    def drain(self) -> int:
        """Move the ids looked up since the last call to the tracker, and compact it.

        Returns the number of ids. Call it after each optimizer step, or at the latest before a
        tenant reads.
        """
        count = 0
        failed: PetpsError | None = None
        for name, ids in self._read().items():
            count += len(ids)
            try:
                self._tracker.track(name, ids.detach().cpu().numpy())
            except PetpsError as error:  # TorchRec has already forgotten the other tables' ids
                failed = error
        if failed is not None:
            raise failed
        self._tracker.compact()
        return count

    def _read(self) -> Mapping[str, Any]:
        """Read TorchRec's ids of the tables that were looked up; it fails for the others."""
        store = self._theirs.store
        since = self._theirs.per_consumer_batch_idx[self._consumer]
        quiet = {
            name: lookups
            for name, lookups in store.per_fqn_lookups.items()
            if not any(lookup.batch_idx >= since for lookup in lookups)
        }
        for name in quiet:
            del store.per_fqn_lookups[name]
        try:
            read = getattr(self._theirs, "get_unique_ids", None) or self._theirs.get_delta_ids
            ids: Mapping[str, Any] = read(self._consumer)
            return ids
        finally:
            for name, lookups in quiet.items():  # other consumers may not have read them yet
                store.per_fqn_lookups.setdefault(name, lookups)

    def _guard(self, module: Any, record: Any) -> Any:
        def record_training(*arguments: Any) -> None:
            if not module.training:
                return
            theirs = self._theirs
            if theirs.curr_batch_idx < max(theirs.per_consumer_batch_idx.values()):
                theirs.step()
            record(*arguments)

        return record_training


class _Fused:
    """TorchRec's fused optimizer in the form that TorchTable reads: state[weight][column]."""

    def __init__(self, model: Any) -> None:
        optimizer = getattr(model, "fused_optimizer", None)
        self._states = {} if optimizer is None else optimizer.state_dict().get("state", {})
        self.state: dict[Any, dict[str, Any]] = {}

    def add(self, name: str, weight: Any) -> None:
        """Add the state of one table's local rows, which TorchRec names by table and column."""
        columns = self._states.get(f"{name}.weight", {})
        self.state[weight] = {
            column.rpartition(".")[2]: _local_rows(f"{name} {column}", value)[0]
            for column, value in columns.items()
            if hasattr(value, "local_shards") or getattr(value, "ndim", 0) > 0
        }


def _find_tracker(model: Any) -> Any:
    """Return the model's tracker. Raise InvalidArgument or FailedPrecondition if there is none."""
    if hasattr(model, "get_delta_tracker"):
        tracker = model.get_delta_tracker()
        remedy = 'init_torchrec_delta_tracker(DeltaTrackerConfig(consumers=["petps"]))'
    elif hasattr(model, "get_model_tracker"):
        tracker = getattr(model, "model_delta_tracker", None)
        remedy = 'model_tracker_config=ModelTrackerConfig(..., consumers=["petps"])'
    else:
        raise InvalidArgument(
            f"{type(model).__name__} is no DistributedModelParallel with a tracker, which needs "
            "TorchRec 1.3 or later"
        )
    if tracker is None:
        raise FailedPrecondition(f"TorchRec's tracker is not turned on: use {remedy}")
    return tracker


def _check_names(modules: Mapping[str, Any]) -> None:
    """Refuse names that occur twice: TorchRec finds a table or a feature by its bare name."""
    for kind, named in (("table", list(_tables(modules))), ("feature", list(_features(modules)))):
        owners: dict[str, str] = {}
        for owner, name in named:
            if name in owners:
                raise InvalidArgument(
                    f"{kind} {name} is in {owners[name]} and in {owner}: TorchRec's tracker "
                    "confuses the two; give each a name of its own"
                )
            owners[name] = owner


def _tables(modules: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for path, module in modules.items():
        for table in module._table_name_to_config:
            yield path or "the model", table


def _features(modules: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for path, module in modules.items():
        for table, config in module._table_name_to_config.items():
            for feature in config.feature_names:
                yield f"{path}.{table}".lstrip("."), feature


def _local_rows(name: str, tensor: Any) -> tuple[Any, int]:
    """Return (this rank's rows, the number of the first in the table) of a state dict's entry."""
    if tensor is None:
        raise InvalidArgument(f"table {name} is not in the model's state: is it sharded here?")
    if not hasattr(tensor, "local_shards"):
        return tensor, 0  # data parallel: every rank has the whole table
    shards = tensor.local_shards()
    if len(shards) != 1:
        raise InvalidArgument(f"table {name} must have one shard on this rank, got {len(shards)}")
    (shard,) = shards
    offsets = list(shard.metadata.shard_offsets)
    whole = list(tensor.size())
    if len(offsets) > 1 and list(shard.metadata.shard_sizes)[1:] != whole[1:]:
        raise InvalidArgument(
            f"table {name} is sharded by columns ({shard.metadata.shard_sizes} of {whole}): a rank "
            "has no whole row; shard it by rows, or by tables"
        )
    return shard.tensor, int(offsets[0])
