"""A share whose quantisation is chosen while its rows are copied."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from petps.checkpoint import Quantising, Store, Table
from petps.errors import DeadlineExceeded, InvalidArgument
from tests.python.checkpoint.replay import Replay
from tests.python.checkpoint.test_staging import staged


@pytest.mark.parametrize("fails", [False, True])
def test_a_share_waits_until_its_tables_are_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """The rows are copied; they are quantised once the choice is known, or its error is raised."""
    replay = Replay({"users": Table.of("users", 32)}, [{"users": np.arange(700, dtype="<u8")}])
    replay.now = 1
    store = Store.create(tmp_path / "store", "m", list(replay.tables.values()), Quantising(1))
    chosen: Future[Mapping[str, Table]] = Future()
    with staged(store, replay, tmp_path / "ssd") as writer:
        decision = writer.next(later=True)
        assert decision.tables == {}
        assert decision.choose is not None
        writer.share(1, decision, 0, 1, {"dense": b"1"}, chosen=chosen)
        tables = decision.choose()
        assert writer.quantised == []
        if fails:
            chosen.set_exception(InvalidArgument("a row is not finite"))
            with pytest.raises(InvalidArgument, match="a row is not finite"):
                writer.wait()
            monkeypatch.setattr("petps.checkpoint.staging.CHOICE_SECONDS", 0.05)

            def share() -> None:
                writer.share(1, decision, 0, 1, {"dense": b"1"}, chosen=Future())
                writer.wait()

            with pytest.raises(DeadlineExceeded, match=r"version 1: .* so a rank hangs"):
                share()
            return
        chosen.set_result(tables)
        writer.wait()
        writer.commit(1)
        writer.wait()
    assert store.tables_of(1) == tables
    assert tables["users"].columns[0].dtype == "adaptive2"
