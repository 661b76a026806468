"""The unit of deploy/systemd runs a real server under a real systemd, as the documents say.

    make deploy-check

The server is the one of this tree, under /opt/petps, as the user petps.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from petps import _native
from tests.deploy.machine import UNITS, Machine, wait_until
from tests.deploy.tools import ROOT, NotAvailable

SYSTEMD = ROOT / "deploy/systemd"
PETPS = "/opt/petps/bin/petps"
PYTHON = "/opt/petps/python"  # in the machine: the interpreter, which may lie in a home folder here
POOL = "/var/lib/petps/ctr/petps.pool"
LOG = "/run/petps.log"
UNIT = "petps@ctr.service"
RUN = "petps-run@{}.service"
URL = "petps://127.0.0.1:7070"
ROUTER_URL = "petps://127.0.0.1:7080"
# As an installed `petps`, which finds its packages and libraries without the environment.
COMMAND = f"""#!/bin/sh
export LD_LIBRARY_PATH={PYTHON}/lib
exec {PYTHON}/bin/python3 {PETPS}.py "$@"
"""
MAIN = f"""
import site, sys
site.addsitedir({sysconfig.get_path("purelib")!r})
from petps.cli import main
sys.exit(main())
"""
CONFIGURATION = f"""
[pool]
path = "{POOL}"
[server]
admin_port = 7073
insecure = true
[tables.items]
dim = 4
capacity = 1000
"""
# There is no journal in the machine. A watchdog of seconds would end a server on a busy machine.
DROP_IN = f"[Service]\nStandardOutput=append:{LOG}\nStandardError=append:{LOG}\nWatchdogSec=15\n"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    for hidden in ("/root", "/home", "/tmp", "/var/tmp"):
        if ROOT.is_relative_to(hidden):
            raise NotAvailable(
                f"{ROOT} is hidden from the service (ProtectHome, PrivateTmp): move it"
            )
    if importlib.util.find_spec("petps.server.notify") is None:
        raise NotAvailable("the server of this tree does not tell systemd that it is ready")
    files = {f"{UNITS}/{path.name}": path.read_text() for path in SYSTEMD.glob("*.service")}
    files |= {
        f"{UNITS}/{UNIT}.d/test.conf": DROP_IN,
        f"{UNITS}/{RUN.format('')}.d/test.conf": DROP_IN,
        "/etc/sysusers.d/petps.conf": (SYSTEMD / "petps.sysusers.conf").read_text(),
        "/etc/petps/ctr.toml": CONFIGURATION,
        "/etc/petps/router.toml": f'[router]\nservers = "{URL}"\n',
        # No etcd answers there.
        "/etc/petps/controller.toml": '[cluster]\nendpoints = ["http://127.0.0.1:1"]\n',
        PETPS: COMMAND,
        f"{PETPS}.py": MAIN,
    }
    folder = tmp_path_factory.mktemp("machine")
    with Machine(folder, files, {Path(sys.base_prefix): PYTHON}) as machine:
        machine.run("systemd-sysusers", "/etc/sysusers.d/petps.conf")
        machine.run(
            "install", "-d", "-o", "petps", "-g", "petps", "-m", "0750", "/var/lib/petps/ctr"
        )
        as_petps = ("runuser", "-u", "petps", "--")
        machine.run(*as_petps, PETPS, "create", "--config", "/etc/petps/ctr.toml")
        yield machine


@pytest.fixture
def running(machine: Machine) -> Machine:
    machine.run("systemctl", "reset-failed", UNIT, check=False)
    started = machine.run("systemctl", "start", UNIT, check=False)
    log = machine.path(LOG).read_text() if machine.exists(LOG) else ""
    assert started.returncode == 0, machine.log + log
    return machine


def process_of(machine: Machine) -> int:
    return int(machine.show(UNIT, "MainPID"))


def status(machine: Machine) -> dict[str, object]:
    report: dict[str, object] = json.loads(machine.run(PETPS, "status", URL, "--json").stdout)
    return report


def is_another(machine: Machine, before: int) -> bool:
    """Return whether another process than ``before`` serves."""
    return process_of(machine) not in (0, before) and machine.show(UNIT, "ActiveState") == "active"


def push(machine: Machine, key: int) -> None:
    """Push a row whose four values are the key."""
    machine.run(PETPS, "push", URL, "items", f"{key}={key},{key},{key},{key}")


def has(machine: Machine, key: int) -> bool:
    """Return whether the server has the row of push()."""
    report = json.loads(machine.run(PETPS, "pull", URL, "items", key, "--json").stdout)
    (entry,) = report["rows"]
    return bool(entry["found"] and entry["row"] == [float(key)] * 4)


def test_it_serves_when_start_returns(running: Machine) -> None:
    push(running, 1)
    assert has(running, 1)
    assert running.show(UNIT, "ActiveState") == "active"
    assert status(running)["unready"] is None


def test_the_server_has_no_rights(running: Machine) -> None:
    facts = running.run("cat", f"/proc/{process_of(running)}/status").stdout
    lines = dict(line.split(":\t", 1) for line in facts.splitlines() if ":\t" in line)
    assert {lines[name] for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (lines["NoNewPrivs"], lines["Seccomp"]) == ("1", "2")
    assert int(lines["Uid"].split()[0]) != 0


def test_a_reload_keeps_the_process(running: Machine) -> None:
    before = process_of(running)
    changed = CONFIGURATION.replace("insecure", "drain_seconds = 1.5\ninsecure")
    running.write("/etc/petps/ctr.toml", changed)
    running.run("systemctl", "reload", UNIT)
    wait_until(
        "the server says what it reloaded",
        lambda: "server.drain_seconds = 1.5 (was 5.0)" in running.path(LOG).read_text(),
    )
    assert process_of(running) == before


def test_administration_works_through_the_socket(running: Machine) -> None:
    table = "more:2:f32:10"
    running.run("runuser", "-u", "petps", "--", PETPS, "create", POOL, "--add", "--table", table)
    assert "more" in running.run(PETPS, "status", POOL).stdout


def test_a_killed_server_starts_again(running: Machine) -> None:
    push(running, 7)
    before = process_of(running)
    running.run("kill", "-KILL", before)
    wait_until(
        "systemd has started another server",
        lambda: is_another(running, before),
    )
    assert has(running, 7)


def test_a_server_that_hangs_is_started_again(running: Machine) -> None:
    before = process_of(running)
    running.run("kill", "-STOP", before)
    wait_until(
        "the watchdog has ended it, and there is another one",
        lambda: is_another(running, before),
    )
    assert "Watchdog timeout" in running.log


def test_a_router_passes_on_pulls_and_has_no_rights(running: Machine) -> None:
    push(running, 3)
    running.run("systemctl", "start", RUN.format("router"))
    report = json.loads(running.run(PETPS, "pull", ROUTER_URL, "items", 3, "--json").stdout)
    assert report["rows"][0]["row"] == [3.0] * 4
    process = running.show(RUN.format("router"), "MainPID")
    facts = running.run("cat", f"/proc/{process}/status").stdout
    assert "CapEff:\t" + "0" * 16 in facts
    running.run("systemctl", "stop", RUN.format("router"))
    assert running.show(RUN.format("router"), "Result") == "success"


def test_a_controller_runs_while_etcd_is_away_and_is_started_again_if_it_hangs(
    machine: Machine,
) -> None:
    unit = RUN.format("controller")
    machine.run("systemctl", "start", unit)
    before = machine.show(unit, "MainPID")
    machine.run("kill", "-STOP", before)
    wait_until(
        "the watchdog has started another one",
        lambda: (
            machine.show(unit, "MainPID") not in ("0", before)
            and machine.show(unit, "ActiveState") == "active"
        ),
    )
    machine.run("systemctl", "stop", unit)
    assert machine.show(unit, "Result") == "success"


def test_it_stops_cleanly(running: Machine) -> None:
    running.run("systemctl", "stop", UNIT)
    assert (running.show(UNIT, "ActiveState"), running.show(UNIT, "Result")) == (
        "inactive",
        "success",
    )
    assert running.path(LOG).read_text().rstrip().endswith("closed cleanly")


def test_a_lost_pool_is_not_served_again(running: Machine) -> None:
    """The file shrinks below a running server: SIGBUS, status 74, and no restart."""
    size = running.path(POOL).stat().st_size
    running.run("truncate", "--size=0", POOL)
    running.run(PETPS, "pull", URL, "items", "1", check=False)
    wait_until("the unit has failed", lambda: running.show(UNIT, "ActiveState") == "failed")
    assert running.show(UNIT, "ExecMainStatus") == str(_native.LOST_POOL_EXIT_STATUS)
    running.run("truncate", f"--size={size}", POOL)


def test_a_wrong_configuration_is_not_tried_again(machine: Machine) -> None:
    machine.run("systemctl", "stop", UNIT, check=False)
    machine.run("systemctl", "reset-failed", UNIT, check=False)
    machine.write("/etc/petps/ctr.toml", CONFIGURATION.replace("insecure", "insekure"))
    machine.run("systemctl", "start", UNIT, check=False)
    wait_until("systemd gives up", lambda: machine.show(UNIT, "ActiveState") == "failed")
    assert machine.show(UNIT, "NRestarts") == "0"
    assert "did you mean 'insecure'?" in machine.path(LOG).read_text()
