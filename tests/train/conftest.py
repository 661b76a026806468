"""Fixtures of the tests that need PyTorch."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """Let PyTorch compute on one thread, because each rank of a test is a thread already."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def ray_environment() -> Iterator[pytest.MonkeyPatch]:
    """Let Ray begin a cluster of its own, in a folder that is removed; yield the environment."""
    folder = tempfile.mkdtemp(prefix="petps-ray-")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")  # no kills on a busy machine
        yield patch
    shutil.rmtree(folder, ignore_errors=True)
