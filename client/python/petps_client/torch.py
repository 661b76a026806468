"""PyTorch modules without parameters that pull their rows from petps servers.

Owns:        EmbeddingBag and EmbeddingBagCollection: those of torch and TorchRec, for serving.
Never does:  train (the rows take no gradient); pool rows itself (torch's embedding_bag does).
Called by:   programs that serve a model. No other module of petps_client imports torch.
Invariants:  Results equal those of torch.nn.functional.embedding_bag over the pulled rows, bit by
             bit. All rows of a result are of one instance (petps_client.puller).
Threads:     one: the caller makes all calls of a module from one thread.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from petps_client.client import Client
from petps_client.errors import InvalidArgument
from petps_client.puller import Pulled, Puller

try:
    import torch
except ModuleNotFoundError as error:
    raise ImportError(
        f"petps_client.torch needs PyTorch, which is not installed ({error}): "
        "pip install petps[torch]"
    ) from error

__all__ = ["EmbeddingBag", "EmbeddingBagCollection"]

MODES: Final = ("sum", "mean")
_KEY_DTYPES: Final = (torch.int64, torch.int32, torch.uint64)


@dataclass(frozen=True)
class _Bags:
    """One feature's checked ids of a batch: bag b has ids[offsets[b]:offsets[b + 1]]."""

    ids: Any  # [n], on the caller's device
    offsets: Any  # int64[bags], or with has_end [bags + 1]
    has_end: bool
    weights: Any  # float32[n] or None

    def keys(self) -> Any:
        """Return the ids as uint64[n] or integers[n] in host memory."""
        return self.ids.detach().cpu().numpy()


class EmbeddingBag(torch.nn.Module):  # type: ignore[misc]
    """torch.nn.EmbeddingBag over a server's table: integers -> float32[bags, dim].

    A missing id has the table's default row.

    Args:
        client: The client that pulls.
        table: The table's name.
        mode: "sum" or "mean".
        include_last_offset: Whether offsets end with the number of ids, as in PyTorch.
        options: Those of :class:`petps_client.Puller`: min_version, wait_ms, deadline_ms,
            on_unavailable, cache_bytes, staleness_ms.

    Attributes:
        unavailable: How many of the distinct ids of the last forward no server answered for. They
            were pooled with the table's default row. Always 0 unless ``on_unavailable`` is
            "default".

    Raises:
        NotFound: The table is unknown; lists the tables.
        InvalidArgument: An argument is wrong.
    """

    def __init__(
        self,
        client: Client,
        table: str,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.table = table
        self.mode = _check_mode(table, mode)
        self.include_last_offset = include_last_offset
        self.puller = Puller(client, [table], **options)
        self.unavailable = 0

    @property
    def embedding_dim(self) -> int:
        """The table's dim."""
        return self.puller.dims[self.table]

    def forward(self, input: Any, offsets: Any = None, per_sample_weights: Any = None) -> Any:
        """Pool input into float32[bags, dim], on the input's device.

        Args:
            input: integers[n] with ``offsets``, or integers[bags, n].
            offsets: integers[bags].
            per_sample_weights: float32 of input's shape, for mode "sum".

        Raises:
            InvalidArgument: An argument is wrong. Also what :meth:`petps_client.Client.pull`
                raises.
        """
        bags = self._bags(input, offsets, per_sample_weights)
        pulled = self.puller.pull({self.table: bags.keys()})
        self.unavailable = _count_unavailable(pulled)
        return _reduce(bags, pulled.rows[self.table], pulled.places[self.table], self.mode)

    def prefetch(self, input: Any) -> None:
        """Begin to pull a batch's rows. The next forward of exactly the same ids takes them."""
        ids = _ids_of(self.table, input, self.puller.signed_keys)
        self.puller.prefetch({self.table: ids.reshape(-1).cpu().numpy()})

    def _bags(self, input: Any, offsets: Any, weights: Any) -> _Bags:
        ids = _ids_of(self.table, input, self.puller.signed_keys)
        return _bags_of(self.table, ids, offsets, weights, self.mode, self.include_last_offset)

    def extra_repr(self) -> str:
        """Return the text for print(module)."""
        return f"{self.table!r}, dim={self.embedding_dim}, mode={self.mode!r}"


class EmbeddingBagCollection(torch.nn.Module):  # type: ignore[misc]
    """TorchRec's EmbeddingBagCollection over tables of a server, pulled in one call.

    A call of at most the client's keys_per_request distinct keys is one frame.

    Args:
        client: The client that pulls.
        features: {feature: table}, or names of tables that are their own features.
        mode: "sum" or "mean" for all features, or {feature: mode}.
        options: Those of :class:`petps_client.Puller`.

    Attributes:
        unavailable: As in :class:`EmbeddingBag`.

    Raises:
        NotFound: A table is unknown; lists the tables.
        InvalidArgument: An argument is wrong.
    """

    def __init__(
        self,
        client: Client,
        features: Mapping[str, str] | Sequence[str],
        *,
        mode: str | Mapping[str, str] = "sum",
        **options: Any,
    ) -> None:
        super().__init__()
        if isinstance(features, str):
            raise InvalidArgument(f"features is {features!r}, expected a list: [{features!r}]")
        tables_by_feature = (
            features if isinstance(features, Mapping) else {name: name for name in features}
        )
        self.features = dict(tables_by_feature)
        modes = dict.fromkeys(self.features, mode) if isinstance(mode, str) else dict(mode)
        if modes.keys() != self.features.keys():
            raise InvalidArgument(
                f"mode has features {sorted(modes)}, but there are {sorted(self.features)}"
            )
        self.modes = {name: _check_mode(name, feature_mode) for name, feature_mode in modes.items()}
        self.puller = Puller(client, sorted(set(self.features.values())), **options)
        self.unavailable = 0

    def forward(self, batch: Any) -> Any:
        """Pool {feature: bags} into {feature: float32[bags, dim]}.

        A KeyedJaggedTensor gives a KeyedTensor. ``bags`` are integers[bags, n], or
        (integers[n], integers[bags] offsets), either with float32 weights as a third element.
        Features that the collection does not have are ignored. Raises what
        :meth:`EmbeddingBag.forward` raises.
        """
        bags = self._bags(batch)
        pulled = self.puller.pull(self._keys(bags))
        self.unavailable = _count_unavailable(pulled)
        begins = dict.fromkeys(self.puller.dims, 0)
        outputs = {}
        for name, table in self.features.items():
            end = begins[table] + len(bags[name].ids)
            places = pulled.places[table][begins[table] : end]
            outputs[name] = _reduce(bags[name], pulled.rows[table], places, self.modes[name])
            begins[table] = end
        torchrec = _torchrec_of(batch)
        if torchrec is None:
            return outputs
        values = list(outputs.values())
        return torchrec.KeyedTensor(
            list(outputs),
            [feature_rows.shape[1] for feature_rows in values],
            torch.cat(values, dim=1),
        )

    def prefetch(self, batch: Any) -> None:
        """Begin to pull a batch's rows. The next forward of exactly the same ids takes them."""
        self.puller.prefetch(self._keys(self._bags(batch)))

    def _keys(self, bags: Mapping[str, _Bags]) -> dict[str, Any]:
        """Return each table's keys: the ids of its features, concatenated."""
        import numpy as np

        keys: dict[str, list[Any]] = {}
        for name, table in self.features.items():
            keys.setdefault(table, []).append(bags[name].keys())
        return {
            table: feature_keys[0] if len(feature_keys) == 1 else np.concatenate(feature_keys)
            for table, feature_keys in keys.items()
        }

    def _bags(self, batch: Any) -> dict[str, _Bags]:
        if _torchrec_of(batch) is not None:
            if batch.variable_stride_per_key():
                raise InvalidArgument("the KeyedJaggedTensor has features of different batch sizes")
            jagged_tensors = batch.to_dict()
            inputs: Any = {
                name: (feature.values(), feature.offsets(), feature.weights_or_none())
                for name, feature in jagged_tensors.items()
            }
        elif isinstance(batch, Mapping):
            inputs = batch
        else:
            raise InvalidArgument(
                f"the batch is a {type(batch).__name__}, expected {{feature: ids}} or a "
                "KeyedJaggedTensor"
            )
        missing = [name for name in self.features if name not in inputs]
        if missing:
            raise InvalidArgument(f"the batch lacks features {missing}; it has {list(inputs)}")
        has_end = inputs is not batch
        return {name: self._feature_bags(name, inputs[name], has_end) for name in self.features}

    def _feature_bags(self, name: str, feature: Any, has_end: bool) -> _Bags:
        parts = feature if isinstance(feature, tuple) else (feature,)
        if not 1 <= len(parts) <= 3:
            raise InvalidArgument(
                f"{name}: a tuple of {len(parts)}, expected (ids, offsets, weights)"
            )
        ids, offsets, weights = (*parts, None, None)[:3]
        ids = _ids_of(name, ids, self.puller.signed_keys)
        return _bags_of(name, ids, offsets, weights, self.modes[name], has_end)

    def extra_repr(self) -> str:
        """Return the text for print(module)."""
        return ", ".join(
            f"{name!r}: {table!r} ({self.modes[name]})" for name, table in self.features.items()
        )


def _count_unavailable(pulled: Pulled) -> int:
    return sum(int(mask.sum()) for mask in pulled.unavailable.values())


def _torchrec_of(batch: Any) -> Any:
    """Return TorchRec's module if the batch is a KeyedJaggedTensor, else None. Never imports it."""
    module = sys.modules.get("torchrec.sparse.jagged_tensor")
    if module is None or not isinstance(batch, module.KeyedJaggedTensor):
        return None
    return module


def _check_mode(name: str, mode: str) -> str:
    if mode not in MODES:
        raise InvalidArgument(f"{name}: mode is {mode!r}, expected 'sum' or 'mean'")
    return mode


def _ids_of(name: str, ids: Any, signed: bool) -> Any:
    if not isinstance(ids, torch.Tensor):
        raise InvalidArgument(f"{name}: ids are a {type(ids).__name__}, expected a tensor")
    if ids.dtype not in _KEY_DTYPES:
        raise InvalidArgument(
            f"{name}: ids are {ids.dtype}, expected int64, int32 or uint64: other types cannot "
            "hold every id exactly"
        )
    if not signed and ids.dtype != torch.uint64 and ids.numel() > 0 and ids.min() < 0:
        raise InvalidArgument(
            f"{name}: id {int(ids.min())} is below 0, but keys are unsigned 64-bit numbers; "
            "connect with signed_keys=True, or ids.view(torch.uint64), takes the same bits of int64"
        )
    return ids.detach()


def _bags_of(name: str, ids: Any, offsets: Any, weights: Any, mode: str, has_end: bool) -> _Bags:
    if weights is not None:
        _check_weights(name, ids, weights, mode)
        weights = weights.reshape(-1)
    if ids.ndim == 2:
        if offsets is not None:
            raise InvalidArgument(
                f"{name}: ids are 2-D, one bag per row: offsets must not be given for them"
            )
        count, width = ids.shape
        offsets = torch.arange(count, dtype=torch.int64, device=ids.device) * width
        return _Bags(ids.reshape(-1), offsets, False, weights)
    if ids.ndim != 1:
        raise InvalidArgument(f"{name}: ids have shape {tuple(ids.shape)}, expected 1-D or 2-D")
    if offsets is None:
        raise InvalidArgument(
            f"{name}: ids are 1-D: give offsets, the position of each bag's begin"
        )
    return _Bags(ids, _check_offsets(name, ids, offsets, has_end), has_end, weights)


def _check_weights(name: str, ids: Any, weights: Any, mode: str) -> None:
    if mode != "sum":
        raise InvalidArgument(f"{name}: weights need mode 'sum', but the mode is {mode!r}")
    if not isinstance(weights, torch.Tensor) or weights.dtype != torch.float32:
        kind = weights.dtype if isinstance(weights, torch.Tensor) else type(weights).__name__
        raise InvalidArgument(f"{name}: weights are {kind}, expected a tensor of float32")
    if weights.shape != ids.shape:
        raise InvalidArgument(
            f"{name}: weights have shape {tuple(weights.shape)}, expected the ids' "
            f"{tuple(ids.shape)}"
        )


def _check_offsets(name: str, ids: Any, offsets: Any, has_end: bool) -> Any:
    if not isinstance(offsets, torch.Tensor) or offsets.dtype not in (torch.int64, torch.int32):
        kind = offsets.dtype if isinstance(offsets, torch.Tensor) else type(offsets).__name__
        raise InvalidArgument(f"{name}: offsets are {kind}, expected a tensor of int64 or int32")
    if offsets.ndim != 1:
        raise InvalidArgument(f"{name}: offsets have shape {tuple(offsets.shape)}, expected 1-D")
    host_offsets = offsets.detach().cpu().to(torch.int64)
    count = len(ids)
    if has_end and len(host_offsets) == 0:
        raise InvalidArgument(f"{name}: offsets are empty, expected the number of ids, {count}")
    if len(host_offsets) == 0:
        if count > 0:
            raise InvalidArgument(f"{name}: offsets are empty, but there are {count} ids")
        return host_offsets.to(ids.device)
    if host_offsets[0] != 0:
        raise InvalidArgument(f"{name}: offsets[0] is {int(host_offsets[0])}, expected 0")
    decreases = torch.nonzero(host_offsets[1:] < host_offsets[:-1])
    if len(decreases) > 0:
        position = int(decreases[0]) + 1
        raise InvalidArgument(
            f"{name}: offsets[{position}] is {int(host_offsets[position])}, less than "
            f"offsets[{position - 1}] ({int(host_offsets[position - 1])}): they must not decrease"
        )
    if host_offsets[-1] > count or (has_end and host_offsets[-1] != count):
        raise InvalidArgument(
            f"{name}: the last of the offsets is {int(host_offsets[-1])}, expected "
            f"{'' if has_end else 'at most '}the number of ids, {count}"
        )
    return host_offsets.to(ids.device)


def _reduce(bags: _Bags, rows: Any, places: Any, mode: str) -> Any:
    """Return float32[bags, dim], by torch's own embedding_bag over the pulled rows."""
    device = bags.ids.device
    return torch.nn.functional.embedding_bag(
        torch.from_numpy(places).to(device),
        torch.from_numpy(rows).to(device),
        bags.offsets,
        mode=mode,
        per_sample_weights=bags.weights,
        include_last_offset=bags.has_end,
    )
