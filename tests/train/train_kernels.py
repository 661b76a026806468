"""The Triton kernels against the CPU path of the same contract, and both against plain models.

Without a GPU they run in Triton's interpreter, block after block; only the timing is skipped.
"""

from __future__ import annotations

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
from petps.train.kernels import intersection
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
            lambda: intersection(torch.zeros(2), torch.tensor([0, 2])),
            r"first must be .* got torch.float32\[2",
        ),
        (lambda: intersection(torch.tensor([1]), [1]), "second must be .* got list"),
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
    assert done.stdout.count(" bytes") == 4


def test_timing() -> None:
    """Print the time of the kernels on a GPU, and of torch.isin."""
    if not GPU:
        pytest.skip("no GPU: the kernels ran in Triton's interpreter, and are not timed")
    random = np.random.default_rng(SEED)
    for n in (100_000, 5_000_000):
        first, second = (tensor(np.unique(random.integers(0, 2 * n, n))) for _ in range(2))
        print(f"{n} keys:", end=" ")
        for name, call in (
            ("intersection", lambda one=first, two=second: intersection(one, two)),
            ("torch.isin", lambda one=first, two=second: torch.isin(one, two)),
        ):
            call()
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(5):
                call()
            torch.cuda.synchronize()
            print(f"{name} {(time.perf_counter() - begun) / 5 * 1e3:.2f} ms", end=" ")
        print()
