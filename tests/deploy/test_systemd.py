"""The units of deploy/systemd, as systemd-analyze reads them. deploy_systemd.py runs them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from petps import _native
from petps.cli.app import EXIT_CODES
from tests.deploy.tools import ROOT, NotAvailable, program

SYSTEMD = ROOT / "deploy/systemd"
DROP_INS = sorted((SYSTEMD / "drop-ins").glob("*.conf"))
UNITS = Path("/lib/systemd/system")
INSTANCE = "petps@ctr.service"
RUNS = ("petps-run@router.service", "petps-run@controller.service")
EXPOSURE_MAX = 3.0


def install(root: Path, drop_ins: list[Path]) -> None:
    """Make a root in which an operator has followed the documents."""
    if not UNITS.is_dir():
        raise NotAvailable("systemd is not installed: make deploy-check installs it")
    shutil.copytree(UNITS, root / "usr/lib/systemd/system", symlinks=True)
    (root / "lib").symlink_to("usr/lib")
    own = root / "etc/systemd/system"
    (own / f"{INSTANCE}.d").mkdir(parents=True)
    for unit in SYSTEMD.glob("*.service"):
        shutil.copy(unit, own)
    for path in drop_ins:
        shutil.copy(path, own / f"{INSTANCE}.d")
    for command in ("opt/petps/bin/petps", "bin/kill"):
        path = root / command
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)


def analyze(root: Path, unit: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program("systemd-analyze"), f"--root={root}", *arguments, unit],
        capture_output=True, text=True, check=False, env=os.environ | {"SYSTEMD_COLORS": "0"},
    )  # fmt: skip


def remarks(root: Path, unit: str = INSTANCE) -> str:
    """Return what `systemd-analyze verify` says. It exits with 0 after most of it."""
    done = analyze(root, unit, "verify", "--man=no")
    text = done.stdout + done.stderr
    return text or ("" if done.returncode == 0 else f"status {done.returncode}")


def exposure(root: Path, unit: str = INSTANCE) -> float:
    done = analyze(root, unit, "security", "--offline=true", "--threshold=100", "--no-pager")
    found = re.search(r"exposure level for \S+: ([\d.]+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    return float(found[1])


def test_the_unit_has_no_fault_with_all_drop_ins(tmp_path: Path) -> None:
    install(tmp_path, DROP_INS)
    assert remarks(tmp_path) == ""


def test_a_fault_is_found(tmp_path: Path) -> None:
    install(tmp_path, [])
    unit = tmp_path / "etc/systemd/system/petps@.service"
    unit.write_text(unit.read_text().replace("ProtectHome=", "ProtectHomes="))
    assert "Unknown key 'ProtectHomes'" in remarks(tmp_path)


@pytest.mark.parametrize(
    "drop_in", [None, *DROP_INS], ids=lambda path: getattr(path, "stem", "none")
)
def test_the_exposure_is_low(tmp_path: Path, drop_in: Path | None) -> None:
    install(tmp_path, [] if drop_in is None else [drop_in])
    assert exposure(tmp_path) <= EXPOSURE_MAX


def test_the_exposure_with_all_drop_ins_is_low(tmp_path: Path) -> None:
    install(tmp_path, DROP_INS)
    assert exposure(tmp_path) <= EXPOSURE_MAX


@pytest.mark.parametrize("unit", RUNS)
def test_the_unit_of_a_router_or_a_controller_is_as_good(tmp_path: Path, unit: str) -> None:
    install(tmp_path, [])
    assert remarks(tmp_path, unit) == ""
    assert exposure(tmp_path, unit) <= EXPOSURE_MAX


def test_systemd_does_not_restart_a_server_in_vain() -> None:
    unit = (SYSTEMD / "petps@.service").read_text()
    wrong, lost = EXIT_CODES["INVALID_ARGUMENT"], _native.LOST_POOL_EXIT_STATUS
    assert f"\nRestartPreventExitStatus={wrong} {lost}\n" in unit
    unit = (SYSTEMD / "petps-run@.service").read_text()
    assert f"\nRestartPreventExitStatus={wrong}\n" in unit
