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
from petps.train.kernels import intersection, jagged_unique
from tests.seed import SEED

GPU = torch.cuda.is_available()
if not GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before the first call, which imports triton

DEVICE = "cuda" if GPU else "cpu"
PATHS = ["cpu", "triton"]


def tensor(array: Any) -> torch.Tensor:
    """Return int64 values with the same bits, on the device of the kernels."""
    return torch.from_numpy(np.ascontiguousarray(array)).view(torch.int64).to(DEVICE)


def unsigned(actual: torch.Tensor) -> Any:
    return actual.cpu().numpy().view(np.uint64)


def on(path: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.cpu() if path == "cpu" else tensor for tensor in tensors]


def test_kernels_are_interpreted_without_a_gpu() -> None:
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
        actual = jagged_unique(
            *on(path, tensor(values), tensor(offsets)), variant=variant, path=path
        )
        keys, ends, inverse = slow_unique(values, offsets, variant)
        assert unsigned(actual.keys).tolist() == keys, SEED
        assert actual.offsets.tolist() == ends, SEED
        assert actual.inverse.tolist() == inverse, SEED


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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: jagged_unique(torch.zeros(2), torch.tensor([0, 2])),
            r"values must be .* got torch.float32\[2",
        ),
        (lambda: jagged_unique([1], torch.tensor([0, 1])), "values must be .* got list"),
        (
            lambda: jagged_unique(torch.tensor([1]), torch.tensor([0, 2])),
            "offsets must begin at 0 and end at 1",
        ),
        (lambda: jagged_unique(torch.tensor([1]), torch.tensor([0, 1, 0, 1])), r"offsets\[2\]"),
        (
            lambda: jagged_unique(torch.tensor([1]), torch.tensor([0, 1]), variant="x"),  # type: ignore[arg-type]
            "variant must be .* got 'x'",
        ),
        (
            lambda: intersection(torch.tensor([[1]]), torch.tensor([1])),
            r"first must be .* got torch.int64\[1, 1\]",
        ),
    ],
)
def test_wrong_input_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        call()


def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
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
    assert done.stdout.count(" bytes") == 14


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
