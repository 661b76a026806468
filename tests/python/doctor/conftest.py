"""A busy machine must not fail a test: what is bounded for a user has time here."""

from __future__ import annotations

import pytest

from petps.doctor import metrics, registry, report


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in (
        (registry, "CHECK_SECONDS"), (report, "REPORT_SECONDS"), (metrics, "REQUEST_SECONDS"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, 200.0)
