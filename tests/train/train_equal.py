"""petps trains as plain PyTorch does: rows, optimizer state and dense weights.

Where both add in the same order, they are equal bit by bit. Otherwise their distance is compared
with the one that the order of sums makes: of the reference from itself.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petps.train import rows, totals, window
from petps.train.dense_sums import sum_over
from petps.train.link import Link, Links
from petps.train.optimizer import Adam, RowwiseAdagrad, Sgd, SparseAdam
from tests.train.equal import DENSE_LR, OPTIMIZERS, Arrays, run_petps, run_reference
from tests.train.rank_threads import in_threads

ROOT = Path(__file__).resolve().parents[2]
WAIT_SECONDS = 600.0
# FBGEMM multiplies by lr / (sqrt(sum) + eps); petps divides first, so a last bit may differ.
SAME_ORDER = ("sgd", "adam", "sparse_adam")
# Processes of 200 steps for each kind and optimizer; on a busy machine that takes minutes.
pytestmark = [pytest.mark.usefixtures("one_torch_thread"), pytest.mark.timeout(1800)]

# The result of each kind, by optimizer and kind.
Trained = dict[tuple[str, str], Arrays]


def run_processes(
    kinds: Sequence[str], optimizers: Sequence[str], micro_batches: int, world: int, out: Path
) -> Trained:
    """Run a process for each rank, which trains each kind in turn; return the rows of all ranks."""
    names = (",".join(kinds), ",".join(optimizers))
    command = [sys.executable, "-m", "tests.train.equal_process", *names]
    ranks = [
        subprocess.Popen([*command, *map(str, (micro_batches, rank, world)), str(out)], cwd=ROOT)
        for rank in range(world)
    ]
    try:
        assert [process.wait(WAIT_SECONDS) for process in ranks] == [0] * world
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()
    return {
        (optimizer, kind): merge(
            [dict(np.load(out / f"{optimizer}-{kind}-{rank}.npz")) for rank in range(world)], kind
        )
        for optimizer in optimizers
        for kind in kinds
    }


def merge(ranks: list[Arrays], kind: str = "synchronous") -> Arrays:
    """Return the arrays of all ranks in one, with ascending keys."""
    first = ranks[0]
    for other in ranks[1:]:
        # The ranks' dense weights are the same bits, in whatever order sums were made.
        assert all(np.array_equal(first[n], other[n]) for n in first if n.startswith("dense"))
    if kind == "ddp":  # each process has all rows
        return first
    whole = {name: values for name, values in first.items() if name.startswith("dense")}
    for table in ("item", "user", "shop"):
        keys = np.concatenate([arrays[f"{table}.keys"] for arrays in ranks])
        order = np.argsort(keys)
        whole[f"{table}.keys"] = keys[order]
        whole[table] = np.concatenate([arrays[table] for arrays in ranks])[order]
    return whole


def is_same(left: Arrays, right: Arrays) -> bool:
    assert left.keys() == right.keys()
    return all(np.array_equal(left[name], right[name]) for name in left)


def distance(left: Arrays, right: Arrays) -> float:
    """Return the greatest relative distance of a table with its state, or of a dense weight.

    The rows of a table and their optimizer state are one array, so they have one distance.
    """
    assert left.keys() == right.keys()
    worst = 0.0
    for name, values in left.items():
        other = right[name]
        assert values.shape == other.shape, name
        if name.endswith(".keys"):
            assert np.array_equal(values, other), name
            continue
        a, b = values.astype(np.float64), other.astype(np.float64)
        worst = max(worst, float(np.linalg.norm(a - b) / np.linalg.norm(a)))
    return worst


@functools.cache
def reference_of(optimizer: str, micro_batches: int, world: int) -> tuple[Arrays, Arrays]:
    """Return what the reference trains, and what it trains with sums in another order."""
    return (
        run_reference(optimizer, micro_batches, world),
        run_reference(optimizer, micro_batches, world, reordered=True),
    )


def check(
    optimizer: str, micro_batches: int, world: int, trained: Arrays, *, is_fixed: bool = True
) -> None:
    """is_fixed: whether petps adds in the order of the reference, if the optimizer does."""
    exact, reordered = reference_of(optimizer, micro_batches, world)
    by_order = distance(exact, reordered)
    print(f"{by_order=:.3g} {distance(exact, trained)=:.3g}")
    assert by_order > 0, "the reference has only one order of sums"
    if is_fixed and optimizer in SAME_ORDER:
        assert is_same(exact, trained)
    else:
        assert distance(exact, trained) <= 2 * by_order


WORLDS = [
    pytest.param((world, micro_batches), marks=pytest.mark.xdist_group(f"equal-{world}"))
    for world, micro_batches in ((1, 3), (2, 3), (4, 2))
]


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: "-".join(map(str, world)))
def in_processes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, int, Trained]:
    """Return (world, micro_batches, what its processes have trained): they start once for all."""
    world, micro_batches = request.param
    kinds = ["synchronous", "nested", *["defaults"] * (world > 1)]
    out = tmp_path_factory.mktemp("equal")
    return world, micro_batches, run_processes(kinds, list(OPTIMIZERS), micro_batches, world, out)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_and_weights_are_those_of_pytorch(
    optimizer: str, in_processes: tuple[int, int, Trained]
) -> None:
    """`synchronous` and `nested` train alike, bit by bit.

    The default options do not fix the order of sums, and may cluster batches.
    """
    world, micro_batches, trained = in_processes
    check(optimizer, micro_batches, world, trained[optimizer, "synchronous"])
    assert is_same(trained[optimizer, "synchronous"], trained[optimizer, "nested"])
    if world > 1:
        check(optimizer, micro_batches, world, trained[optimizer, "defaults"], is_fixed=False)


@pytest.mark.parametrize("world", [2, 4])
def test_they_are_those_of_distributed_data_parallel(world: int, tmp_path: Path) -> None:
    trained = run_processes(["synchronous", "ddp"], ["adam"], 2, world, tmp_path)
    by_order = distance(*reference_of("adam", 2, world))
    between = distance(trained["adam", "ddp"], trained["adam", "synchronous"])
    print(f"{by_order=:.3g} {between=:.3g}")
    assert between <= 2 * by_order


def in_two_threads(kind: str, **changed: Any) -> Arrays:
    def work(rank: int, links: Links) -> Arrays:
        return run_petps(kind, 2, rank, links, **changed)

    return merge(in_threads(2, work))


class OneStepAhead(SparseAdam):
    def apply(self, slots: Any, gradients: Any, step: int) -> None:
        SparseAdam.apply(self, slots, gradients, step + 1)


MUTATIONS = {
    "learning rate": ("sgd", Sgd(0.1 * (1 + 1e-4))),
    "learning rate of Adagrad": ("rowwise_adagrad", RowwiseAdagrad(0.1 * (1 + 1e-4))),
    "sum of squares": ("rowwise_adagrad", RowwiseAdagrad(0.1, initial_sum=1e-6)),
    "first moment": ("adam", Adam(0.02, beta1=0.9001)),
    "second moment": ("adam", Adam(0.02, beta2=0.9991)),
    "count of steps": ("sparse_adam", OneStepAhead(0.02)),
    "moment of SparseAdam": ("sparse_adam", SparseAdam(0.02, beta2=0.9991)),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wrong_optimizer_is_found(mutation: str) -> None:
    optimizer, changed = MUTATIONS[mutation]
    trained = in_two_threads(optimizer, optimizer=changed)
    with pytest.raises(AssertionError):
        check(optimizer, 2, 2, trained)


def lose_a_row(into: Any, at: Any, values: Any) -> None:
    rows.add(into, at[1:], values[1:])


def add_twice(into: Any, at: Any, values: Any) -> None:
    rows.add(into, at, values)
    rows.add(into, at[:1], values[:1])


@pytest.mark.parametrize("add", [lose_a_row, add_twice])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_a_wrong_gradient_sum_is_found(
    add: Any, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(window, "add", add)
        trained = in_two_threads(optimizer)
    with pytest.raises(AssertionError):
        check(optimizer, 2, 2, trained)


def lose_a_rank(link: Link, values: Any, *, deterministic: bool) -> Any:
    return link.all_gather(values)[0].clone()


def add_the_first_twice(link: Link, values: Any, *, deterministic: bool) -> Any:
    total = sum_over(link, values, deterministic=deterministic)
    total[0] += 1e-3 * values[0]
    return link.all_gather(total)[0].clone()


@pytest.mark.parametrize("mutated", [lose_a_rank, add_the_first_twice])
def test_a_wrong_dense_sum_is_found(mutated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(totals, "sum_over", mutated)
        trained = in_two_threads("sgd")
    with pytest.raises(AssertionError):
        check("sgd", 2, 2, trained)


def test_a_wrong_dense_learning_rate_is_found() -> None:
    trained = in_two_threads("sgd", dense_lr=DENSE_LR * (1 + 1e-4))
    with pytest.raises(AssertionError):
        check("sgd", 2, 2, trained)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_without_a_mutation_nothing_is_found(optimizer: str) -> None:
    check(optimizer, 2, 2, in_two_threads(optimizer))
