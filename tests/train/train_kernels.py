"""The Triton kernels against the CPU path of the same contract, and both against plain models.

Without a GPU they run in Triton's interpreter, block after block; only the timing is skipped.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from petps.errors import InvalidArgument
from petps.train.kernels import intersection, jagged_unique, pooled_lookup
from tests.seed import SEED

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before the first call, which imports triton

DEVICE = "cuda" if GPU else "cpu"
PATHS = ["cpu", "triton"]


def tensor(array: Any) -> torch.Tensor:
    """Return int64 values with the same bits, on the device of the kernels."""
    return torch.from_numpy(np.ascontiguousarray(array)).view(torch.int64).to(DEVICE)


def unsigned(found: torch.Tensor) -> Any:
    return found.cpu().numpy().view(np.uint64)


def on(path: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [each.cpu() if path == "cpu" else each for each in tensors]


def test_it_is_the_interpreter_that_runs_here() -> None:
    from triton.runtime.interpreter import InterpretedFunction

    from petps.train.kernels import rank

    assert isinstance(rank._count, InterpretedFunction) == (not GPU)


def slow_unique(values: Any, offsets: Any, variant: str) -> tuple[list[int], list[int], list[int]]:
    keys: list[int] = []
    ends, inverse = [0], []
    for begin, end in itertools.pairwise(offsets):
        own = values[begin:end].tolist()
        distinct = list(dict.fromkeys(own))
        if variant == "radix":
            distinct.sort()
        number = {key: place for place, key in enumerate(distinct)}
        inverse += [number[key] for key in own]
        keys += distinct
        ends.append(len(keys))
    return keys, ends, inverse


CASES: dict[str, Callable[[Any], Any]] = {
    "few keys": lambda random: random.integers(0, 50, 3000),
    "all distinct": lambda random: random.permutation(3000),
    "one hot key": lambda random: np.where(random.random(3000) < 0.9, 7, random.integers(0, 1000)),
    "whole range": lambda random: random.integers(0, 2**64 - 1, 1500, dtype=np.uint64)[
        random.integers(0, 1500, 3000)
    ],
    "the ends": lambda random: random.choice(
        np.array([0, 1, 2**63 - 1, 2**63, 2**64 - 1], np.uint64), 100
    ),
    "zeros": lambda random: np.zeros(1025, np.uint64),
    "one": lambda random: np.array([5]),
    "none": lambda random: np.zeros(0, np.uint64),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("variant", ["hash", "radix"])
@pytest.mark.parametrize("case", CASES)
def test_distinct_keys(case: str, variant: Any, path: Any, monkeypatch: Any) -> None:
    if path == "triton":
        from petps.train.kernels import unique

        monkeypatch.setattr(unique, "PARTITION_KEYS", 500)  # makes several partitions
    random = np.random.default_rng((SEED, len(case)))
    values = CASES[case](random).astype(np.uint64)
    for tables in (1, 5, 40):
        cuts = np.sort(random.integers(0, len(values) + 1, tables - 1))
        offsets = np.r_[0, cuts, len(values)].astype(np.int64)
        found = jagged_unique(
            *on(path, tensor(values), tensor(offsets)), variant=variant, path=path
        )
        keys, ends, inverse = slow_unique(values, offsets, variant)
        assert unsigned(found.keys).tolist() == keys, SEED
        assert found.offsets.tolist() == ends, SEED
        assert found.inverse.tolist() == inverse, SEED


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_common_keys(path: Any, share: float) -> None:
    random = np.random.default_rng((SEED, int(share * 10)))
    for n, m in ((1, 1), (0, 5), (5, 0), (1300, 2500), (2500, 1300), (1024, 1)):
        pool = np.unique(random.integers(0, 2**64 - 1, 2 * (n + m) + 2, dtype=np.uint64))
        random.shuffle(pool)
        common = int(share * min(n, m))
        one = np.sort(pool[:n])
        other = np.sort(np.r_[pool[:n][:common], pool[n : n + m - common]])
        left, right = intersection(*on(path, tensor(one), tensor(other)), path=path)
        wanted, first, second = np.intersect1d(one, other, return_indices=True)
        assert len(wanted) == common
        assert left.tolist() == first.tolist(), SEED
        assert right.tolist() == second.tolist(), SEED


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", ["sum", "mean", "weighted"])
@pytest.mark.parametrize("dim", [1, 16, 33, 300])
def test_pooled_rows(path: Any, mode: str, dim: int) -> None:
    random = np.random.default_rng((SEED, dim))
    rows = torch.from_numpy(random.standard_normal((50, dim)).astype(np.float32))
    lengths = random.integers(0, 6, 20)
    offsets = np.r_[0, np.cumsum(lengths)]
    places = random.integers(0, 50, offsets[-1])
    weights = torch.from_numpy(random.standard_normal(len(places)).astype(np.float32))
    given = weights if mode == "weighted" else None
    how: Any = "mean" if mode == "mean" else "sum"
    found = pooled_lookup(
        *on(path, rows.to(DEVICE), tensor(places), tensor(offsets)),
        mode=how,
        weights=None if given is None else on(path, given.to(DEVICE))[0],
        path=path,
    ).cpu()
    narrow = pooled_lookup(
        *on(path, rows.to(DEVICE), tensor(places).int(), tensor(offsets)),
        mode=how,
        weights=None if given is None else on(path, given.to(DEVICE))[0],
        path=path,
    ).cpu()
    assert torch.equal(narrow, found), SEED
    wanted = np.zeros((20, dim))
    for bag in range(20):
        for at in range(offsets[bag], offsets[bag + 1]):
            weight = 1.0 if given is None else float(given[at])
            wanted[bag] += weight * rows[places[at]].double().numpy()
        if mode == "mean" and lengths[bag] > 0:
            wanted[bag] /= lengths[bag]
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5, atol=1e-5, err_msg=f"seed {SEED}")
    assert found[lengths == 0].eq(0).all()
    if mode == "sum" and path == "triton":  # both paths add in the same order
        again = pooled_lookup(rows, *on("cpu", tensor(places), tensor(offsets)), path="cpu")
        assert torch.equal(found, again), SEED


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jagged_unique(torch.zeros(2), torch.tensor([0, 2])), r"values: torch.float32\[2"),
        (lambda: jagged_unique([1], torch.tensor([0, 1])), "values: list"),
        (lambda: jagged_unique(torch.tensor([1]), torch.tensor([0, 2])), "offsets go from 0 to"),
        (lambda: jagged_unique(torch.tensor([1]), torch.tensor([0, 1, 0, 1])), r"offsets\[2\]"),
        (
            lambda: jagged_unique(torch.tensor([1]), torch.tensor([0, 1]), variant="x"),  # type: ignore[arg-type]
            "variant 'x'",
        ),
        (lambda: intersection(torch.tensor([[1]]), torch.tensor([1])), r"one: torch.int64\[1, 1\]"),
        (
            lambda: pooled_lookup(torch.zeros(2), torch.tensor([0]), torch.tensor([0, 1])),
            "rows are",
        ),
        (
            lambda: pooled_lookup(torch.zeros(2, 2), torch.tensor([2]), torch.tensor([0, 1])),
            "places go from 2 to 2, but there are 2 rows",
        ),
    ],
)
def test_wrong_input_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        call()


def test_they_compile_for_a_gpu(tmp_path: Path) -> None:
    """Compile to Hopper's machine code; a GPU accepts less than the interpreter does."""
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.compile_kernels"],
        cwd=Path(__file__).resolve().parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" bytes") == 15


def test_timing() -> None:
    """Print the time of the kernels on a GPU, and of torch.unique of each table."""
    if not GPU:
        pytest.skip("no GPU: the kernels ran in Triton's interpreter, and are not timed")
    random = np.random.default_rng(SEED)
    for n, tables in ((5_000_000, 10), (5_000_000, 1000), (40_000_000, 100)):
        values = tensor(random.integers(0, n // 2, n).astype(np.uint64))
        offsets = tensor(np.linspace(0, n, tables + 1).astype(np.int64))
        ends = offsets.tolist()

        def loop(values: Any = values, ends: Any = ends) -> None:
            for begin, end in itertools.pairwise(ends):
                torch.unique(values[begin:end], return_inverse=True)

        print(f"{n} keys of {tables} tables:", end=" ")
        for name, call in (
            ("hash", lambda v=values, o=offsets: jagged_unique(v, o)),
            ("radix", lambda v=values, o=offsets: jagged_unique(v, o, variant="radix")),
            ("loop of torch.unique", loop),
        ):
            call()
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(5):
                call()
            torch.cuda.synchronize()
            print(f"{name} {(time.perf_counter() - begun) / 5 * 1e3:.2f} ms", end=" ")
        print()
