"""Fixtures of the lab: the shared folder, and C++ suites that run in a guest."""

from __future__ import annotations

import shutil
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import pytest

from tests.lab.guest import ROOT, Guest

# tests/run.py reads the results here, so that the summary counts each case in a guest.
RESULTS = ROOT / "build" / "tests"
PROGRAMS = ROOT / "build" / "release"


@pytest.fixture
def share() -> Iterator[Path]:
    """Yield a folder that host and guest write to; delete it and the NVDIMM's image at the end."""
    folder = Path(tempfile.mkdtemp(prefix="petps-lab."))
    yield folder
    shutil.rmtree(folder)


class Suite(Protocol):
    """A function that runs a C++ test program in a guest.

    It fails unless every case of the filter runs and passes there; a skip is a failure.
    """

    def __call__(
        self,
        guest: Guest,
        program: str,
        cases: str = "*",
        *,
        seconds_max: float = 300,
        environment: Mapping[str, str] | None = None,
        before: str = "true",
    ) -> None: ...


@pytest.fixture
def suite(request: pytest.FixtureRequest) -> Suite:
    def run(
        guest: Guest,
        program: str,
        cases: str = "*",
        *,
        seconds_max: float = 300,
        environment: Mapping[str, str] | None = None,
        before: str = "true",
    ) -> None:
        junit = guest.folder / f"{program}.xml"
        junit.unlink(missing_ok=True)
        assert (PROGRAMS / program).exists(), f"build {program} first (make lab does)"
        command = f"{before} && build/release/{program} --gtest_filter='{cases}'"
        command += f" --gtest_output=xml:{junit}"
        result = guest.run(
            command, seconds_max, {"PETPS_TEST_SCALE": "0.05", **(environment or {})}
        )
        print(result.output[-6000:])
        assert junit.exists(), result.output[-3000:]
        RESULTS.mkdir(parents=True, exist_ok=True)
        name = request.node.name.replace("/", "_")
        shutil.copy(junit, RESULTS / f"lab-{name}-{program}.xml")
        cases_run = 0
        for case in ElementTree.parse(junit).getroot().iter("testcase"):
            name = f"{case.get('classname')}.{case.get('name')}"
            assert case.find("skipped") is None, f"{name} was skipped in the guest"
            cases_run += 1
        assert cases_run > 0, "the filter names no case"
        assert result.status == 0, result.output[-6000:]

    return run
