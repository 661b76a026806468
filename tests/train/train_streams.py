"""Streams on a simulated device: each point at which one stream waits for another is needed.

Run by `make test-train`. fake_gpu.py says what is checked. train_gpu.py runs on a real GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.train.unfreshened import BaselineMode
from petps.train import buffer, dense_sums, kernels, streams
from petps.train.link import Link, Links
from petps.train.options import MODES, Mode
from petps.train.removal import Removal
from tests.train.fake_gpu import DEVICE, FakeGpu, OnDevice
from tests.train.rank_threads import LocalLink, OnHost, same, specs_with, train

STEPS = 8
pytestmark = pytest.mark.usefixtures("one_torch_thread")
# The points in PIPELINE.md's table, by name, and the modes that use them.
AHEAD = ("samples", "keys", "retrieved", "updated")
LINK = ("fresh", "rows", "gradients", "sums")
HOST = ("written", "totals")


@pytest.fixture(name="gpu")
def _gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = FakeGpu()
    monkeypatch.setattr(streams, "device_of", lambda device: gpu if device.type == DEVICE else None)
    monkeypatch.setattr(
        buffer, "intersection", lambda *keys: gpu.kernel("intersect", kernels.intersection, *keys)
        if isinstance(keys[0], OnDevice) else kernels.intersection(*keys),
    )  # fmt: skip
    return gpu


def test_the_fake_gpu_detects_each_fault(gpu: FakeGpu) -> None:
    one, other = gpu.stream(), gpu.stream()

    def faults() -> list[str]:
        result, gpu.faults = gpu.faults, []
        return result

    with gpu.use(one):
        tensor = torch.zeros(4, device=DEVICE)
    with gpu.use(other):
        tensor.sum()
        assert len(faults()) == 1, "read while it is written"
        gpu.wait(other, gpu.record(one))
        tensor.sum()
        assert faults() == []
    with gpu.use(one):
        tensor[:2].add_(1)
        assert len(faults()) == 1, "written while it is read"
        gpu.wait(one, gpu.record(other))
        tensor[2:].add_(1)
        assert faults() == []
        host = gpu.allocate_pinned((4,), tensor.dtype)
        host.copy_(tensor, non_blocking=True)
        host.numpy()
        assert len(faults()) == 1, "read by the host before it is there"
        gpu.wait_on_host(gpu.record(one))
        assert host.numpy().tolist() == [1, 1, 1, 1]
        assert tensor.cpu().tolist() == [1, 1, 1, 1]
        assert faults() == []
        torch.ones(2).to(DEVICE)
        assert len(faults()) == 1, "not pinned"
    with gpu.use(other):
        gpu.wait(other, gpu.record(one))
        tensor.sum()
    del tensor
    assert len(faults()) == 1, "freed while it is used"
    with gpu.use(one):
        tensor = torch.zeros(4, device=DEVICE)
        allocated = gpu.record(one)
    with gpu.use(other):
        gpu.wait(other, allocated)
        gpu.keep(tensor, other)
        tensor.sum()
    del tensor
    assert faults() == []


class DeviceLink:
    """A collective of device tensors, on each rank's current stream and after all the others."""

    def __init__(self, link: Link, gpu: FakeGpu) -> None:
        self._link = link
        self._gpu = gpu
        self.rank = link.rank
        self.world = link.world

    def all_to_all(self, send: Any, sends: Any, receives: Any) -> Any:
        return self._order(send, lambda: self._link.all_to_all(send, sends, receives))

    def all_gather(self, values: Any) -> Any:
        return self._order(values, lambda: self._link.all_gather(values))

    def all_reduce(self, values: Any) -> Any:
        return torch.stack(self.all_gather(values)).sum(dim=0)

    def _order(self, tensor: Any, collective: Callable[[], Any]) -> Any:
        if self.world == 1 or not isinstance(tensor, OnDevice):
            return collective()
        self._join()
        result = collective()
        self._join()  # no rank may overwrite what it sent before all have read it
        return result

    def _join(self) -> None:
        stream = self._gpu.current()
        assert isinstance(self._link, LocalLink)
        for event in list(self._link.exchange(self._gpu.record(stream))):
            self._gpu.wait(stream, event)
        self._link._meeting.barrier.wait(60)


class OnFake(OnHost):
    device = DEVICE

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def use(self) -> AbstractContextManager[Any]:
        return self._gpu.use(self._gpu.current())

    def model(self, model: Any) -> Any:
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                there = torch.zeros(parameter.shape, device=DEVICE)
                there.inner.copy_(parameter.detach())
                module._parameters[name] = torch.nn.Parameter(there)
        return model

    def links(self, links: Links) -> Links:
        return replace(
            links,
            rows=DeviceLink(links.rows, self._gpu),
            dense=DeviceLink(links.dense, self._gpu),
        )

    def host(self, tensor: Any) -> Any:
        return tensor.detach().inner.clone()


@pytest.mark.parametrize("mode", [*MODES, "stale"])
@pytest.mark.parametrize(("world", "micro_batches", "threshold"), [(1, 3, 1), (2, 2, 2)])
def test_events_order_all_shared_memory(
    gpu: FakeGpu, mode: BaselineMode, world: int, micro_batches: int, threshold: int
) -> None:
    specs = specs_with(threshold)
    if world > 1:  # rows are removed, and their uses are counted on the device
        rules = Removal(keep_rows=30, score="uses", every=3)
        specs = [replace(spec, removal=rules) for spec in specs]
    run: dict[str, Any] = {"steps": STEPS, "micro_batches": micro_batches, "specs": specs}
    result = train(mode, world, on=OnFake(gpu), **run)
    print(f"{mode}: {gpu.operations} operations, {dict(gpu.waits)}")
    assert gpu.faults == []
    # The host waits for what it reads: rows, totals, and the number of common keys.
    assert gpu.waits.pop("event") <= 2 * STEPS * world
    assert set(gpu.waits) <= {"intersect", "aten::index"}
    assert gpu.operations > 100 * STEPS
    if mode != "stale":  # stale rows may or may not be older than the last write-back
        assert same(result, train(mode, world, **run), specs), "not what it is on the host"


def _points() -> list[tuple[BaselineMode, str]]:
    where: dict[BaselineMode, tuple[str, ...]] = {
        "nested": AHEAD + LINK + HOST,
        "stale": AHEAD + LINK + HOST,
        "dual": AHEAD + HOST,
        "frozen": LINK + HOST,
        "synchronous": HOST,
    }
    return [(mode, point) for mode, points in where.items() for point in points]


@pytest.mark.parametrize(("mode", "point"), _points())
def test_leaving_out_any_point_is_a_fault(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, mode: BaselineMode, point: str
) -> None:
    _leave_out(gpu, monkeypatch, point, "no wait")
    train(mode, 1, steps=STEPS, micro_batches=3, on=OnFake(gpu))
    print(len(gpu.faults), *dict.fromkeys(gpu.faults), sep="\n")
    assert gpu.faults


@pytest.mark.parametrize("mode", MODES)
def test_events_order_buckets_of_dense_gradients(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    run: dict[str, Any] = {"steps": STEPS, "micro_batches": 2}
    reference = train(mode, 2, **run)
    monkeypatch.setattr(dense_sums, "BUCKET_BYTES", 60)
    result = train(mode, 2, on=OnFake(gpu), **run)
    assert gpu.faults == []
    assert same(result, reference)


@pytest.mark.parametrize(("point", "what"), [("bucket", "no wait"), ("bucket_sums", "no keep")])
def test_leaving_out_a_point_of_buckets_is_a_fault(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, point: str, what: str
) -> None:
    """The compute lane needs no wait: the sums of rows, which it waits for, follow the buckets."""
    monkeypatch.setattr(dense_sums, "BUCKET_BYTES", 60)
    _leave_out(gpu, monkeypatch, point, what)
    train("nested", 2, steps=STEPS, micro_batches=2, on=OnFake(gpu))
    assert gpu.faults


@pytest.mark.parametrize("point", AHEAD)
def test_memory_is_freed_too_early_without_keep(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    _leave_out(gpu, monkeypatch, point, "no keep")
    train("nested", 1, steps=STEPS, micro_batches=3, on=OnFake(gpu))
    print(len(gpu.faults), *dict.fromkeys(gpu.faults), sep="\n")
    assert any(fault.startswith("freed by") for fault in gpu.faults)


def _leave_out(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, point: str, what: str) -> None:
    take, arrays = streams._StreamLane.take, streams._StreamLane.copy_out

    def taken(lane: Any, handoff: Any) -> None:
        with gpu.leave_out(what if handoff is not None and handoff.name == point else ""):
            take(lane, handoff)

    def read(lane: Any, name: str, tensors: Any) -> Any:
        with gpu.leave_out(what if name == point else ""):
            return arrays(lane, name, tensors)

    monkeypatch.setattr(streams._StreamLane, "take", taken)
    monkeypatch.setattr(streams._StreamLane, "copy_out", read)
