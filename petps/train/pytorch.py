"""PyTorch's embeddings as trained tables: nn.Embedding and nn.EmbeddingBag.

Owns:        TorchTable, track_module(), torch_module().
Never does:  import torch before it is needed (pip install petps[torch]).
Called by:   trainers, torchrec.py; torch_module() by all of petps.train.
Invariants:  an id is tracked after the step that changed its row, so a read of the tracker
             between any two calls of the trainer loses nothing.
Threads:     the trainer's thread.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from petps.errors import FailedPrecondition, InvalidArgument, NotFound
from petps.train.table import ROW, Floats, Gathered, Keys, check_columns
from petps.train.tracker import Tracker

__all__ = ["TorchTable", "torch_module", "track_module"]


def torch_module() -> ModuleType:
    """Return the package torch. Raise FailedPrecondition if it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise FailedPrecondition(
            f"PyTorch is not installed ({error}): pip install petps[torch]"
        ) from error
    return torch  # type: ignore[no-any-return, unused-ignore]


class TorchTable:
    """A tensor [n, dim] as a TrainedTable. Ids are its row numbers; keys begin at ``first_key``.

    columns: optimizer state that is kept per row, by the optimizer's names ("sum", "exp_avg"), of
    the weight's shape or [n]. Before the first step these columns are zeros. Rows are gathered as
    float32, whatever the tensor's dtype and device. The constructor adds the table to the
    tracker. An unknown column is an InvalidArgument as soon as the optimizer has any state.
    """

    def __init__(
        self,
        tracker: Tracker,
        name: str,
        weight: Any,
        *,
        optimizer: Any = None,
        columns: Sequence[str] = (),
        first_key: int = 0,
    ) -> None:
        self._torch = torch_module()
        if weight.dim() != 2 or not weight.is_floating_point():
            raise InvalidArgument(
                f"table {name}: the weight must be of floats [n, dim], got "
                f"{weight.dtype}{list(weight.shape)}"
            )
        if columns and optimizer is None:
            raise InvalidArgument(f"table {name}: columns {list(columns)} need an optimizer")
        if ROW in columns or len(set(columns)) != len(columns):
            raise InvalidArgument(
                f"table {name}: columns must be distinct and not 'row', got {list(columns)}"
            )
        if first_key < 0:
            raise InvalidArgument(f"table {name}: first_key must be at least 0, got {first_key}")
        self._name = name
        self._weight = weight
        self._optimizer = optimizer
        self._names = tuple(columns)
        self._first = np.uint64(first_key)
        self._check_state()
        tracker.add_table(name, weight.shape[0])

    @property
    def name(self) -> str:
        """See TrainedTable."""
        return self._name

    def keys(self) -> Keys:
        """See TrainedTable."""
        return self.keys_of(np.arange(self._weight.shape[0], dtype=np.uint64))

    def keys_of(self, ids: npt.NDArray[np.uint64]) -> Keys:
        """See TrainedTable."""
        return ids + self._first

    def ids_of(self, keys: Keys) -> npt.NDArray[np.uint64]:
        """See TrainedTable."""
        ids = keys - self._first
        known = (keys >= self._first) & (ids < np.uint64(self._weight.shape[0]))
        if not known.all():
            raise NotFound(f"table {self._name} has no place for key {keys[~known][0]}")
        return ids

    def gather(self, keys: Keys) -> Gathered:
        """See TrainedTable."""
        self._check_state()
        ids = self._make_index(keys)
        columns = {ROW: self._take_rows(self._weight, ids)}
        for name in self._names:
            state = self._find_state(name)
            columns[name] = (
                np.zeros((len(keys), self._weight.shape[1]), np.float32)
                if state is None
                else self._take_rows(state, ids)
            )
        return Gathered(columns)

    def load_pieces(self, pieces: Iterable[tuple[Keys, Mapping[str, Floats]]]) -> None:
        """See TrainedTable. Creates missing optimizer state as zeros first.

        SparseAdam's count of steps is not kept per row: it begins at 0 again.
        """
        count = 0
        for keys, columns in pieces:
            self._load_piece(keys, columns)
            count += len(keys)
        if count != self._weight.shape[0]:
            raise InvalidArgument(
                f"table {self._name}: all {self._weight.shape[0]} rows must be loaded, got {count}"
            )

    def _load_piece(self, keys: Keys, columns: Mapping[str, Floats]) -> None:
        check_columns(self._name, [ROW, *self._names], columns)
        ids = self._make_index(keys)
        targets = {ROW: self._weight}
        self._create_state()
        self._check_state()
        for name in self._names:
            targets[name] = self._find_state(name)
        with self._torch.no_grad():
            for name, target in targets.items():
                values = self._torch.from_numpy(np.array(columns[name], np.float32))
                shape = (len(keys), *target.shape[1:])
                target[ids] = values.reshape(shape).to(target.device, target.dtype)

    def _make_index(self, keys: Keys) -> Any:
        ids = self.ids_of(keys).astype(np.int64)
        return self._torch.from_numpy(ids).to(self._weight.device)

    def _create_state(self) -> None:
        """Create the state that the optimizer would create in its first step, with zeros."""
        if not self._names or self._optimizer.state.get(self._weight):
            return
        names, state = self._names, {}
        if isinstance(self._optimizer, self._torch.optim.SparseAdam):
            # It adds nothing to a state that is not empty, so create all of it.
            names, state = ("exp_avg", "exp_avg_sq"), {"step": 0}
        for name in names:
            state[name] = self._torch.zeros_like(self._weight)
        self._optimizer.state[self._weight] = state

    def _check_state(self) -> None:
        """Raise InvalidArgument if the optimizer has state for the weight, but lacks a column."""
        if not self._names:
            return
        state = self._optimizer.state.get(self._weight, {})
        for name in self._names:
            if state and name not in state:
                raise InvalidArgument(
                    f"table {self._name}: the optimizer keeps no {name!r} for its weight, but "
                    f"{', '.join(map(repr, state))}; name one of them in columns"
                )

    def _find_state(self, name: str) -> Any:
        state = self._optimizer.state.get(self._weight, {}).get(name)
        if state is not None and state.shape[:1] != self._weight.shape[:1]:
            raise InvalidArgument(
                f"table {self._name}: optimizer state {name!r} is not kept per row"
            )
        return state

    def _take_rows(self, tensor: Any, ids: Any) -> Floats:
        width = math.prod(tensor.shape[1:])  # not -1, because there may be no ids
        rows = tensor.detach().index_select(0, ids).reshape(len(ids), width)
        values: Floats = rows.to("cpu", self._torch.float32, copy=True).numpy()
        return values


class _Lookups:
    """The current step's ids by table, which the hooks of one module share."""

    def __init__(self, tracker: Tracker, deferred: bool) -> None:
        self._tracker = tracker
        self._deferred = deferred
        self._pending: list[tuple[str, npt.NDArray[np.int64]]] = []
        self._mutex = threading.Lock()

    def record(self, name: str, ids: Any) -> None:
        flat = ids.detach().reshape(-1)
        flat = flat.unique() if flat.is_cuda else flat  # fewer bytes to copy from the device
        ids = flat.cpu().numpy().astype(np.int64)
        if not self._deferred:
            self._tracker.track(name, ids)
            return
        with self._mutex:
            self._pending.append((name, ids))

    def track_all(self, *_: Any) -> None:
        with self._mutex:
            pending, self._pending = self._pending, []
        for name, ids in pending:
            self._tracker.track(name, ids)
        self._tracker.compact()


def track_module(
    tracker: Tracker,
    module: Any,
    *,
    optimizer: Any = None,
    columns: Sequence[str] = (),
    prefix: str = "",
) -> list[TorchTable]:
    """Track every trained nn.Embedding and nn.EmbeddingBag below ``module``, by its full name.

    With an optimizer, the ids that a step looked up in training are tracked and compacted once
    the step is done, and the ``columns`` of the optimizer's state are gathered with the rows.
    Without one, ids are tracked when they are looked up; then read the tracker only between two
    steps. Evaluation and frozen weights are not tracked. A weight that two modules share is one
    table.

    Raises InvalidArgument if there is no trained embedding, and for an optimizer that changes
    rows that were not looked up. SGD without momentum, Adagrad and SparseAdam, all without weight
    decay, change no other rows; track_module() refuses any other optimizer.
    """
    torch = torch_module()
    modules: list[tuple[str, Any]] = []
    lookups = _Lookups(tracker, optimizer is not None)
    for path, part in module.named_modules():
        if not isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag):
            continue
        if not part.weight.requires_grad:
            continue
        name = ".".join(filter(None, (prefix, path))) or "embedding"
        if optimizer is not None:
            _check_optimizer(name, part, optimizer, torch)
        modules.append((name, part))
    if not modules:
        raise InvalidArgument(
            f"{type(module).__name__} has no nn.Embedding or nn.EmbeddingBag that is trained"
        )
    by_weight: dict[int, TorchTable] = {}
    for name, part in modules:
        table = by_weight.get(id(part.weight))
        if table is None:
            table = by_weight[id(part.weight)] = TorchTable(
                tracker, name, part.weight, optimizer=optimizer, columns=columns
            )
        part.register_forward_pre_hook(_make_hook(table.name, lookups), with_kwargs=True)
    if optimizer is not None:
        optimizer.register_step_post_hook(lookups.track_all)
    return list(by_weight.values())


def _make_hook(name: str, lookups: _Lookups) -> Callable[[Any, Any, Any], None]:
    def record(module: Any, arguments: Any, named: Any) -> None:
        # max_norm rescales the rows that are looked up, in evaluation too.
        if module.training or module.max_norm is not None:
            lookups.record(name, arguments[0] if arguments else named["input"])

    return record


def _check_optimizer(name: str, module: Any, optimizer: Any, torch: ModuleType) -> None:
    groups = [
        group
        for group in optimizer.param_groups
        if any(weight is module.weight for weight in group["params"])
    ]
    if not groups:
        raise InvalidArgument(f"table {name}: the optimizer does not train its weight")
    (group,) = groups
    is_lazy = isinstance(optimizer, torch.optim.SGD | torch.optim.Adagrad | torch.optim.SparseAdam)
    if not is_lazy or group.get("momentum") or group.get("weight_decay"):
        raise InvalidArgument(
            f"table {name}: {type(optimizer).__name__} with momentum {group.get('momentum', 0)} "
            f"and weight decay {group.get('weight_decay', 0)} changes rows that nobody looked up, "
            "so they cannot be tracked: use SGD, Adagrad or SparseAdam without either"
        )
