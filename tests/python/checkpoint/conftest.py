"""Fixtures: test stores are small, so the sizes of pieces and sealed files are small too."""

from __future__ import annotations

import pytest

from petps.checkpoint import staging, state_files

SEALED_CHUNKS = 3


@pytest.fixture(autouse=True)
def sealed_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_files, "SEALED_CHUNKS", SEALED_CHUNKS)


@pytest.fixture(autouse=True)
def staged_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PIECE_BYTES", 3000)
    monkeypatch.setattr(staging, "SLICE_VALUES", 256)
