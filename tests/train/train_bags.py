"""petps_client.torch with a server, against torch's embedding_bag and TorchRec's collection.

Run by `make test-train`, in an environment that has PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import petps_client
import pytest
import torch
from petps_client.torch import EmbeddingBag, EmbeddingBagCollection

from petps import _native
from tests.python.petps_client.served import Served, add_table, serve
from tests.seed import SEED
from tests.system.servers import WAIT_MS

TABLES, ROWS, DEFAULT = 26, 400, 0.125
CACHED = {"cache_bytes": 1 << 20, "staleness_ms": 60_000}


def dim_of(table: int) -> int:
    return (4, 16, 33)[table % 3]


@pytest.fixture(scope="module")
def rows() -> dict[str, torch.Tensor]:
    """Return {table: float32[ROWS, dim]}, the rows of the tables."""
    torch.manual_seed(SEED)
    return {f"t{table}": torch.randn(ROWS, dim_of(table)) for table in range(TABLES)}


@pytest.fixture(scope="module")
def served(rows: dict[str, torch.Tensor]) -> Iterator[Served]:
    tables = _native.Tables.create("")
    instance = tables.create_instance("ranking", "ranking@1", TABLES).id
    for name, values in rows.items():
        add_table(tables, instance, name, "f32", values.numpy(), DEFAULT)
    with serve(tables) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[petps_client.Client]:
    with petps_client.connect(served.url, deadline_ms=WAIT_MS) as connected:
        yield connected


def expected(rows: torch.Tensor, ids: torch.Tensor, *arguments: Any, **options: Any) -> Any:
    """Return torch's own embedding_bag over the rows. An id without a row has the default row."""
    default = torch.full((1, rows.shape[1]), DEFAULT)
    table = torch.cat([rows, default])
    return torch.nn.functional.embedding_bag(ids.clamp(max=ROWS), table, *arguments, **options)


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether both are equal bit by bit."""
    has_same_bits: bool = torch.equal(first.view(torch.int32), second.view(torch.int32))
    return first.dtype == second.dtype and has_same_bits


def jagged(random: np.random.Generator, bags: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids, some of them repeated or without a row, and the offsets of bags, some empty."""
    lengths = random.integers(0, 6, bags)
    ids = random.zipf(1.2, int(lengths.sum())) % (ROWS + 20)
    offsets = np.r_[0, np.cumsum(lengths)]
    return torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(offsets)


@pytest.mark.parametrize("options", [{}, CACHED], ids=["plain", "cached"])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_bag_equals_torchs_bag_bit_by_bit(
    client: petps_client.Client, rows: dict[str, torch.Tensor], mode: str, options: dict[str, Any]
) -> None:
    random = np.random.default_rng((SEED, 1))
    for table in ("t0", "t1", "t2"):
        bag = EmbeddingBag(client, table, mode=mode, **options)
        bag_with_end = EmbeddingBag(client, table, mode=mode, include_last_offset=True, **options)
        assert list(bag.parameters()) == []
        assert bag.state_dict() == {}
        for bags in (0, 1, 7, 300):
            ids, offsets = jagged(random, bags)
            for dtype in (torch.int64, torch.int32):
                pooled = bag(ids.to(dtype), offsets[:-1].to(dtype))
                assert same(pooled, expected(rows[table], ids, offsets[:-1], mode=mode)), SEED
            pooled = bag_with_end(ids.view(torch.uint64), offsets)
            reference = expected(rows[table], ids, offsets, mode=mode, include_last_offset=True)
            assert same(pooled, reference), SEED
            square = torch.from_numpy(random.integers(0, ROWS + 20, (bags, 5)))
            assert same(bag(square), expected(rows[table], square, mode=mode)), SEED
            if mode == "sum":
                weights = torch.randn(len(ids), requires_grad=True)
                pooled = bag(ids, offsets[:-1], weights)
                reference = expected(
                    rows[table], ids, offsets[:-1], mode=mode, per_sample_weights=weights
                )
                assert same(pooled, reference), SEED
                pooled = bag(square, None, torch.ones(square.shape))
                assert same(pooled, expected(rows[table], square, mode=mode)), SEED


def test_a_missing_key_has_the_default_row(client: petps_client.Client) -> None:
    bag = EmbeddingBag(client, "t0", mode="sum")
    pooled = bag(torch.tensor([[ROWS + 1, (1 << 63) - 1]]))
    assert same(pooled, torch.full((1, 4), 2 * DEFAULT))
    assert bag(torch.empty((3, 0), dtype=torch.int64)).tolist() == [[0.0] * 4] * 3
    assert bag(torch.empty(0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)).shape == (2, 4)


def test_signed_ids_are_keys_with_the_same_bits(served: Served) -> None:
    table = served.tables.find("ranking@1", "t0")
    keys = np.array([-7], np.int64).view(np.uint64)
    table.apply(keys, np.full((1, 4), 2, np.float32).view(np.uint8))
    with petps_client.connect(served.url, signed_keys=True, deadline_ms=WAIT_MS) as signed:
        bag = EmbeddingBag(signed, "t0", mode="sum")
        ids = torch.tensor([[-7], [-8]])
        bag.prefetch(ids)
        assert bag(ids)[:, 0].tolist() == [2.0, DEFAULT]
        collection = EmbeddingBagCollection(signed, ["t0"])
        assert collection({"t0": ids})["t0"][:, 0].tolist() == [2.0, DEFAULT]
    table.apply(keys, None)


@pytest.mark.parametrize("options", [{}, CACHED], ids=["plain", "cached"])
def test_a_collection_pulls_26_tables_in_one_frame(
    served: Served, rows: dict[str, torch.Tensor], options: dict[str, Any]
) -> None:
    random = np.random.default_rng((SEED, 2))
    modes = {name: ("sum", "mean")[number % 2] for number, name in enumerate(rows)}
    with petps_client.connect(served.url, hot_sample_every=0, deadline_ms=WAIT_MS) as client:
        bags = EmbeddingBagCollection(client, list(rows), mode=modes, **options)
        for _ in range(3):
            batch: dict[str, Any] = {}
            for name in rows:
                ids, offsets = jagged(random, 4)
                batch[name] = (ids, offsets[:-1])
            before = served.stats()
            pooled = bags(batch)
            after = served.stats()
            assert after["pulls"] - before["pulls"] == 1
            if not options:
                distinct = sum(len(ids.unique()) for ids, _ in batch.values())
                assert after["keys"] - before["keys"] == distinct
            assert list(pooled) == list(rows)
            for name, (ids, offsets) in batch.items():
                reference = expected(rows[name], ids, offsets, mode=modes[name])
                assert same(pooled[name], reference), SEED
        if options:  # all rows are cached by now
            again = bags(batch)
            assert served.stats()["pulls"] == after["pulls"]
            assert all(same(again[name], pooled[name]) for name in rows)


def test_features_may_share_a_table(
    served: Served, client: petps_client.Client, rows: dict[str, torch.Tensor]
) -> None:
    bags = EmbeddingBagCollection(client, {"clicked": "t1", "user": "t0", "bought": "t1"})
    batch = {
        "bought": torch.tensor([[1, 2], [3, 1]]),
        "clicked": (torch.tensor([2, 1, 9]), torch.tensor([0, 3]), torch.tensor([0.5, 1.0, 2.0])),
        "user": torch.tensor([[7], [8]]),
        "unused": torch.tensor([[1]]),
    }
    before = served.stats()["keys"]
    pooled = bags(batch)
    assert served.stats()["keys"] - before == 4 + 2
    assert same(pooled["bought"], expected(rows["t1"], batch["bought"], mode="sum"))
    ids, offsets, weights = batch["clicked"]
    reference = expected(rows["t1"], ids, offsets, mode="sum", per_sample_weights=weights)
    assert same(pooled["clicked"], reference)
    assert same(pooled["user"], rows["t0"][[7, 8]])


def test_prefetched_rows_are_not_pulled_again(
    served: Served, client: petps_client.Client, rows: dict[str, torch.Tensor]
) -> None:
    bag = EmbeddingBag(client, "t0", mode="sum")
    bags = EmbeddingBagCollection(client, ["t0", "t1"])
    ids = torch.tensor([[1, 2], [2, 3]])
    batch = {"t0": ids, "t1": ids}
    bag(ids), bags(batch)
    before = served.stats()["pulls"]
    bag.prefetch(ids)
    bags.prefetch(batch)
    ids_now = ids.clone()
    assert same(bag(ids_now), expected(rows["t0"], ids_now, mode="sum"))
    assert same(bags(batch)["t1"], expected(rows["t1"], ids, mode="sum"))
    assert served.stats()["pulls"] == before + 2
    bag.prefetch(ids)
    ids += 1  # a loader may put its next batch into the same memory
    assert same(bag(ids), expected(rows["t0"], ids, mode="sum"))


@pytest.mark.parametrize("weighted", [False, True])
def test_a_collection_equals_torchrecs_collection(
    client: petps_client.Client, rows: dict[str, torch.Tensor], weighted: bool
) -> None:
    torchrec = pytest.importorskip("torchrec")
    random = np.random.default_rng((SEED, 3))
    features = {"clicked": "t1", "bought": "t1", "user": "t0", "word": "t2"}
    pooling = {"t0": "sum", "t1": "sum", "t2": "sum" if weighted else "mean"}
    theirs = torchrec.EmbeddingBagCollection(
        tables=[
            torchrec.EmbeddingBagConfig(
                name=table,
                embedding_dim=rows[table].shape[1],
                num_embeddings=ROWS,
                feature_names=[name for name, owner in features.items() if owner == table],
                pooling=getattr(torchrec.PoolingType, pooling[table].upper()),
            )
            for table in ("t1", "t0", "t2")
        ],
        is_weighted=weighted,
    )
    for table in pooling:
        theirs.embedding_bags[table].weight.data.copy_(rows[table])
    ours = EmbeddingBagCollection(
        client, features, mode={name: pooling[table] for name, table in features.items()}
    )
    names = ["user", "other", "bought", "word", "clicked"]
    lengths = random.integers(0, 5, len(names) * 6)
    count = int(lengths.sum())
    batch = torchrec.KeyedJaggedTensor(
        names,
        torch.from_numpy(random.integers(0, ROWS, count)),
        torch.randn(count) if weighted else None,
        torch.from_numpy(lengths.astype(np.int32)),
    )
    ours.prefetch(batch)
    pooled, reference = ours(batch), theirs(batch)
    assert isinstance(pooled, torchrec.KeyedTensor)
    assert pooled.keys() == reference.keys()
    assert pooled.length_per_key() == reference.length_per_key()
    assert same(pooled.values(), reference.values().detach()), SEED
    assert set(pooled.to_dict()) == set(features)
    with pytest.raises(petps_client.InvalidArgument, match=r"lacks features \['age'\]"):
        EmbeddingBagCollection(client, {"age": "t0"})(batch)


def test_a_model_with_served_rows_equals_the_trained_model(
    client: petps_client.Client, rows: dict[str, torch.Tensor]
) -> None:
    """The model has an EmbeddingBag of petps_client in the place of torch's EmbeddingBag."""

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, bag: Any) -> None:
            super().__init__()
            self.bag = bag
            self.dense = torch.nn.Linear(16, 1)

        def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = torch.sigmoid(self.dense(self.bag(ids, offsets)))
            return scores

    trained = Model(torch.nn.EmbeddingBag.from_pretrained(rows["t1"], mode="mean"))
    serving = Model(EmbeddingBag(client, "t1"))
    dense = {name: value for name, value in trained.state_dict().items() if "bag" not in name}
    serving.load_state_dict(dense)
    ids, offsets = torch.randint(0, ROWS, (50,)), torch.arange(0, 50, 5)
    assert same(serving(ids, offsets).detach(), trained(ids, offsets).detach())
    assert "'t1', dim=16, mode='mean'" in repr(serving)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2),), "ids are torch.float32, expected int64, int32 or uint64"),
        (([1, 2],), "ids are a list, expected a tensor"),
        ((torch.tensor([[1, -2]]),), r"id -2 is below 0.*ids.view\(torch.uint64\)"),
        ((torch.tensor([1, 2]),), "ids are 1-D: give offsets"),
        ((torch.tensor([[1]]), torch.tensor([0])), "ids are 2-D, one bag per row: offsets"),
        ((torch.zeros((1, 1, 1), dtype=torch.int64),), r"ids have shape \(1, 1, 1\)"),
        ((torch.tensor([1, 2]), torch.tensor([0, 2, 1])), r"offsets\[2\] is 1, less than offsets"),
        ((torch.tensor([1, 2]), torch.tensor([1])), r"offsets\[0\] is 1, expected 0"),
        ((torch.tensor([1, 2]), torch.tensor([0, 3])), "is 3, expected at most the number of ids"),
        ((torch.tensor([1, 2]), torch.tensor([[0]])), r"offsets have shape \(1, 1\)"),
        ((torch.tensor([1, 2]), torch.tensor([0.0])), "offsets are torch.float32"),
        ((torch.tensor([1, 2]), [0]), "offsets are list"),
        ((torch.tensor([1]), torch.empty(0, dtype=torch.int64)), "offsets are empty, but there"),
        ((torch.tensor([[1, 2]]), None, torch.ones(2)), r"weights have shape \(2,\), expected"),
        ((torch.tensor([[1]]), None, torch.ones(1, 1).double()), "weights are torch.float64"),
    ],
)
def test_wrong_input_is_named(
    client: petps_client.Client, arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(petps_client.InvalidArgument, match=f"t0: .*{message}"):
        EmbeddingBag(client, "t0", mode="sum")(*arguments)


def test_wrong_options_and_batches_are_named(client: petps_client.Client) -> None:
    ids = torch.tensor([[1]])
    invalid = petps_client.InvalidArgument
    with pytest.raises(petps_client.NotFound, match=r"t99.*t0"):
        EmbeddingBag(client, "t99")
    with pytest.raises(invalid, match="t0: mode is 'max', expected 'sum' or 'mean'"):
        EmbeddingBag(client, "t0", mode="max")
    with pytest.raises(invalid, match="t0: weights need mode 'sum', but the mode is 'mean'"):
        EmbeddingBag(client, "t0")(ids, None, torch.ones(1, 1))
    with pytest.raises(invalid, match="expected the number of ids, 1"):
        EmbeddingBag(client, "t0", include_last_offset=True)(ids[0], torch.tensor([0]))
    with pytest.raises(invalid, match="offsets are empty, expected the number of ids, 1"):
        EmbeddingBag(client, "t0", include_last_offset=True)(ids[0], ids[0][:0])
    with pytest.raises(invalid, match=r"features is 't0', expected a list: \['t0'\]"):
        EmbeddingBagCollection(client, "t0")
    with pytest.raises(invalid, match=r"mode has features \['x'\], but there are \['t0'\]"):
        EmbeddingBagCollection(client, ["t0"], mode={"x": "sum"})
    bags = EmbeddingBagCollection(client, ["t0"])
    with pytest.raises(invalid, match="the batch is a Tensor"):
        bags(ids)
    with pytest.raises(invalid, match=r"lacks features \['t0'\]; it has \['t1'\]"):
        bags({"t1": ids})
    with pytest.raises(invalid, match="t0: a tuple of 4"):
        bags({"t0": (ids, None, None, None)})


def test_bags_can_require_a_version_or_an_instance(
    served: Served, client: petps_client.Client
) -> None:
    """A table that receives pushes has no version, so min_version=1 is STALE there."""
    with pytest.raises(petps_client.Stale):
        EmbeddingBag(client, "t0", min_version=1)(torch.tensor([[1]]))
    with petps_client.connect(f"petps://{served.address}/ranking@1") as pinned:
        EmbeddingBag(pinned, "t0")(torch.tensor([[1]]))
    with pytest.raises(petps_client.NotFound, match="ranking@7"):
        petps_client.connect(f"petps://{served.address}/ranking@7")
