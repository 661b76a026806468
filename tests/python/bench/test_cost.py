"""The cost model: each resource can be the one that decides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.scale.cost import Load, Machine, Measured, servers

MEASURED = Measured(1.5e-7, 1.3, 3e6, 512)
LOAD = Load(10**9, 128, "f32", 1000, 500, 1000, 2, 0.05)
MACHINE = Machine(64, 512 << 30, 15 << 40, 100e9)


@pytest.mark.parametrize(
    ("load", "machine", "resource"),
    [
        (replace(LOAD, rows=10**12, hot=0.01), MACHINE, "disk of the pools"),
        (replace(LOAD, rows=10**11, hot=1.0), MACHINE, "memory for the hot rows"),
        (replace(LOAD, pulls=10**6, dim=4), replace(MACHINE, cores=2), "processors"),
        (replace(LOAD, pulls=10**6), MACHINE, "network"),
        (LOAD, MACHINE, "replicas"),
    ],
)
def test_the_scarcest_resource_decides(load: Load, machine: Machine, resource: str) -> None:
    needed = servers(load, machine, MEASURED)
    assert max(needed, key=lambda name: needed[name]) == resource
    assert needed["replicas"] == 2


def test_twice_the_pulls_need_twice_the_network() -> None:
    once = servers(replace(LOAD, pulls=10**6), MACHINE, MEASURED)["network"]
    twice = servers(replace(LOAD, pulls=2 * 10**6), MACHINE, MEASURED)["network"]
    assert abs(twice - 2 * once) <= 1
    # 1e6 x 500 rows of 512 bytes and 5 %, and their keys, are 2.18e12 of 6e10 bits a second.
    assert once == 37
