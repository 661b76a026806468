"""The training loop at odd moments: closed early, late and twice, after errors, and restarted.

Run by `make test-train`. Ranks are threads (rank_threads.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from petps.errors import FailedPrecondition, InvalidArgument, IoError
from petps.train.batch import Batch, Ragged
from petps.train.buffer import Buffer
from petps.train.optimizer import Sgd
from petps.train.options import MODES, Mode, PipelineOptions
from petps.train.pipeline import Pipeline
from petps.train.sharded import ShardedTables, TableSpec
from petps.train.streams import Lane

WAIT_SECONDS = 60.0


class Sum(torch.nn.Module):  # type: ignore[misc]
    """A model without dense parameters: the loss is a sum of rows."""

    def forward(self, lookups: Any, batch: Batch) -> Any:
        return lookups["t"].pooled().sum() / batch.samples


def batches(count: int, *, failing: int | None = None, same: bool = False) -> Iterator[Batch]:
    """Yield batch n with the key n twice (``same``: the key 1); reading ``failing`` raises."""
    for number in range(1, count + 1):
        if number == failing:
            raise IoError(f"batch {number} cannot be read")
        key = 1 if same else number
        yield Batch({"t": Ragged.single(np.full(2, key, np.uint64))}, {}, b"%d" % number)


def opened(threshold: int = 1) -> ShardedTables:
    return ShardedTables(None, [TableSpec("t", 4, 100, threshold=threshold)], Sgd(0.1))


def check_no_threads(before: set[threading.Thread]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while left := [thread.name for thread in threading.enumerate() if thread not in before]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


@pytest.mark.parametrize("failing", [2, 3])
def test_close_raises_the_error_of_a_batch_read_ahead(failing: int) -> None:
    """The first step is trained; a later batch, which no step has requested, cannot be read."""
    before = set(threading.enumerate())
    with opened() as tables:
        pipeline = Pipeline(Sum(), tables, batches(9, failing=failing))
        assert pipeline.step() is not None
        with pytest.raises(IoError, match="cannot be read"):
            pipeline.close()
        again = threading.Thread(target=pipeline.close, daemon=True)
        again.start()
        again.join(WAIT_SECONDS)
        assert not again.is_alive(), "a second close hangs"
        with pytest.raises(FailedPrecondition, match="the pipeline has ended"):
            pipeline.step()
        assert tables["t"].keys().tolist() == [1]
    check_no_threads(before)


@pytest.mark.parametrize("mode", MODES)
def test_a_closed_pipeline_refuses_steps(mode: Mode) -> None:
    before = set(threading.enumerate())
    with opened() as tables:
        for steps in (0, 1):
            options = PipelineOptions(mode=mode, steps=4)
            pipeline = Pipeline(Sum(), tables, batches(9), options=options)
            for _ in range(steps):
                assert pipeline.step() is not None
            pipeline.close()
            pipeline.close()
            with pytest.raises(FailedPrecondition, match="the pipeline has ended: it was closed"):
                pipeline.step()
    check_no_threads(before)


def test_rows_trained_before_an_error_reach_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of step 2 is being written back while step 3 fails: close() waits for it."""
    go = threading.Event()
    write_back = Buffer.write_back

    def slow(self: Buffer, tables: ShardedTables, lane: Lane) -> None:
        if self.batch == 2:
            assert go.wait(WAIT_SECONDS)
        write_back(self, tables, lane)

    monkeypatch.setattr(Buffer, "write_back", slow)

    class Failing(Sum):
        def forward(self, lookups: Any, batch: Batch) -> Any:
            if batch.reader == b"3":
                raise IoError("no")
            return super().forward(lookups, batch)

    with opened() as tables:
        options = PipelineOptions(mode="dual")
        pipeline = Pipeline(Failing(), tables, batches(9), options=options)
        with pytest.raises(IoError, match="no"):
            pipeline.run()
        threading.Timer(0.2, go.set).start()
        pipeline.close()
        assert tables["t"].keys().tolist() == [1, 2]


def test_a_second_pipeline_continues_after_the_first() -> None:
    """Batches that the first loop only read ahead are not counted twice, and do not disturb."""
    kept = {}
    for parts in (1, 2):
        with opened(threshold=7) as tables:
            for part in range(parts):
                reading = iter(list(batches(6, same=True))[3 * part :])
                options = PipelineOptions(first_step=3 * part + 1)
                with Pipeline(Sum(), tables, reading, options=options) as pipeline:
                    for step in pipeline:
                        if parts == 2 and step.number == 3 * part + 3:
                            break
            kept[parts] = tables["t"].gather(tables["t"].keys()).columns["row"]
    assert len(kept[1]) == 1
    assert np.array_equal(kept[1], kept[2])


@pytest.mark.parametrize(
    ("gives", "message"),
    [
        (lambda rows: 1.0, "the model returned a float for micro-batch 0 of step 1"),
        (lambda rows: rows, r"a tensor of shape \[1, 4\] for"),
        (lambda rows: rows.sum().detach(), r"a tensor of shape \[\] without a gradient"),
    ],
)
def test_a_model_that_returns_no_loss_is_refused(gives: Any, message: str) -> None:
    class Wrong(torch.nn.Module):  # type: ignore[misc]
        def forward(self, lookups: Any, batch: Batch) -> Any:
            del batch
            return gives(lookups["t"].rows)

    with opened() as tables:
        pipeline = Pipeline(Wrong(), tables, batches(2))
        with pytest.raises(InvalidArgument, match=message):
            pipeline.run()
        pipeline.close()
        assert len(tables["t"].keys()) == 0


@pytest.mark.parametrize("dtypes", [[torch.float64], [torch.bfloat16, torch.float32]])
def test_dense_parameters_of_any_floating_type(dtypes: list[Any]) -> None:
    class Dense(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.scales = torch.nn.ParameterList(
                torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in dtypes
            )

        def forward(self, lookups: Any, batch: Batch) -> Any:
            return lookups["t"].pooled().sum() * sum(scale.float().sum() for scale in self.scales)

    model = Dense()
    with (
        opened() as tables,
        Pipeline(
            model, tables, batches(3), optimizer=torch.optim.SGD(model.parameters(), 0.1)
        ) as pipeline,
    ):
        assert len(pipeline.run()) == 3
    assert all(scale.dtype == dtype for scale, dtype in zip(model.scales, dtypes, strict=True))
    assert all(bool((scale != 1).all()) for scale in model.scales)
