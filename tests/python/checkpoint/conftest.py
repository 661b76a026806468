"""Stores of these tests are small: their ended chunks are put by in small files."""

from __future__ import annotations

import pytest

from petps.checkpoint import state

SEALED_CHUNKS = 3


@pytest.fixture(autouse=True)
def sealed_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "SEALED_CHUNKS", SEALED_CHUNKS)
