"""Fixtures of the lab: the shared folder, and C++ suites that run in a guest."""

from __future__ import annotations

import shutil
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from pathlib import Path

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


class Suite:
    """Runs C++ test programs in a guest, for one test."""

    def __init__(self, test: str) -> None:
        self._test = test.replace("/", "_")

    def __call__(
        self,
        guest: Guest,
        program: str,
        cases: str = "*",
        *,
        seconds_max: float = 300,
        environment: Mapping[str, str] | None = None,
        before: str = "true",
    ) -> None:
        """Fail unless every case of the filter runs and passes there; a skip is a failure.

        `before` is a command that must succeed first in the guest.
        """
        junit = guest.folder / f"{program}.xml"
        junit.unlink(missing_ok=True)
        assert (PROGRAMS / program).exists(), f"build {program} first (make lab does)"
        command = f"{before} && build/release/{program} --gtest_filter='{cases}'"
        command += f" --gtest_output=xml:{junit}"
        settings = {"PETPS_TEST_SCALE": "0.05", **(environment or {})}
        result = guest.run(command, seconds_max, settings)
        print(result.output[-6000:])
        assert junit.exists(), result.output[-3000:]
        RESULTS.mkdir(parents=True, exist_ok=True)
        shutil.copy(junit, RESULTS / f"lab-{self._test}-{program}.xml")
        run_cases = list(ElementTree.parse(junit).getroot().iter("testcase"))
        for case in run_cases:
            name = f"{case.get('classname')}.{case.get('name')}"
            assert case.find("skipped") is None, f"{name} was skipped in the guest"
        assert run_cases, f"the filter {cases} names no case of {program}"
        assert result.status == 0, result.output[-6000:]


@pytest.fixture
def suite(request: pytest.FixtureRequest) -> Suite:
    return Suite(request.node.name)
