"""petps status, verify, config, and the command as a whole."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import petps
from petps.cli.app import EXIT_CODES
from petps.errors import BY_CODE
from tests.python.cli.conftest import Command
from tests.python.native.superblock import forge

COMMANDS = (
    "create", "load", "serve", "pull", "push", "status", "verify", "export", "publish", "config",
)  # fmt: skip


def run_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the real command in a new process."""
    return subprocess.run(
        [sys.executable, "-m", "petps.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def leave_unclean(path: Path, *, push: str) -> None:
    """Push in a process that dies without closing the pool."""
    program = (
        "import os, sys, petps\n"
        "pool = petps.open(sys.argv[1])\n"
        f"pool.push('items', [{push}], [[1.0, 2.0, 3.0, 4.0]])\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], check=False, timeout=60)
    assert done.returncode == -9


# ---- status


def test_status_of_a_pool(run: Command, pool: Path) -> None:
    run("push", pool, "items", "7=1,2,3,4")
    report = run.json("status", pool)
    assert report["pool"]["path"] == str(pool)
    assert report["pool"]["was_clean"]
    table = report["tables"][0]
    assert (table["name"], table["rows"], table["dim"], table["dtype"]) == ("items", 1, 4, "f32")
    assert table["instance"] == "default@0"
    output = run("status", pool)
    for text in (str(pool), "durability process", "default@0", "8 partitions", "items", "4 x f32"):
        assert text in output


def test_status_and_verify_change_no_byte(run: Command, pool: Path) -> None:
    before = pool.read_bytes()
    run("status", pool)
    run("verify", pool)
    assert pool.read_bytes() == before


def test_status_refuses_what_is_no_pool(run: Command, pool: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello" * 1000)
    message = run.fails(2, "status", tmp_path / "text")
    assert "text" in message
    assert "pool" in message
    message = run.fails(7, "status", "petps://127.0.0.1:1")
    assert "127.0.0.1:1" in message
    forge(pool, version=5)
    message = run.fails(1, "status", pool)
    assert "format version 5, this build reads versions 1 to 4" in message


def test_a_pool_that_was_copied_in_part_is_refused(run: Command, pool: Path) -> None:
    with pool.open("r+b") as file:
        file.truncate(pool.stat().st_size // 2)
    for command in ("status", "verify"):
        message = run.fails(9, command, pool)
        assert "is cut short" in message
        assert "copy it again" in message


# ---- verify


def test_verify_of_a_whole_pool(run: Command, pool: Path) -> None:
    run("push", pool, "items", "7=1,2,3,4")
    report = run.json("verify", pool)
    assert (report["clean"], report["rows"], report["lost_power"]) == (True, 1, False)
    assert "clean, 1 rows checked" in run("verify", pool)


def test_verify_names_the_damaged_row(run: Command, pool: Path) -> None:
    run("push", pool, "items", "7=1.5,2.5,3.5,4.5")
    content = bytearray(pool.read_bytes())
    row = bytes.fromhex("0000c03f00002040")
    assert content.count(row) == 1
    content[content.index(row)] ^= 1
    pool.write_bytes(content)
    message = run.fails(9, "verify", pool)
    assert "fault: " in message
    assert "'items'" in message
    assert "7" in message
    assert "has 1 faults: rebuild it from a base" in message


def test_accept_returns_a_pool_that_lost_power_to_service(run: Command, pool: Path) -> None:
    leave_unclean(pool, push="7")
    forge(pool, boot_id=b"another boot id!")
    for command in (("serve", pool, "--port", 0), ("pull", pool, "items", 7)):
        message = run.fails(6, *command)
        assert "the machine went down while it was open" in message
        assert "petps verify --accept" in message
    report = run.json("verify", pool)
    assert (report["clean"], report["lost_power"], report["accepted"]) == (True, True, False)
    assert "takes it back into service" in run("verify", pool)
    run.fails(6, "pull", pool, "items", 7)
    accepted = run.json("verify", pool, "--accept")
    assert accepted["accepted"]
    assert accepted["push_fed_tables"] == ["items"]
    assert run.json("pull", pool, "items", 7)["found"] == 1
    again = run.json("verify", pool, "--accept")
    assert (again["lost_power"], again["accepted"]) == (False, False)


def test_a_damaged_pool_is_never_accepted(run: Command, pool: Path) -> None:
    leave_unclean(pool, push="7")
    content = bytearray(pool.read_bytes())
    row = bytes.fromhex("0000803f000000400000404000008040")
    assert content.count(row) == 1
    content[content.index(row)] ^= 1
    pool.write_bytes(content)
    forge(pool, boot_id=b"another boot id!")
    run.fails(9, "verify", pool, "--accept")
    run.fails(6, "pull", pool, "items", 7)


# ---- config


def test_config_lists_keys_and_checks_a_file(run: Command, tmp_path: Path) -> None:
    output = run("config")
    assert "[server] port" in output
    assert "Port of the native protocol;" in output  # the rest may be on the next line
    keys = run.json("config")
    assert {"section": "server", "name": "port"}.items() <= next(
        key for key in keys if key["name"] == "port"
    ).items()
    assert run("config", "--markdown").startswith("# Configuration keys")
    file = tmp_path / "c.toml"
    file.write_text('[pool]\npath = "x"\n')
    assert run.json("config", "check", file)["faults"] == []
    assert "valid" in run("config", "check", file)
    file.write_text('[pool]\npath = "x"\n[server]\nprot = 1\n')
    assert "did you mean 'port'?" in run.reports(2, "config", "check", file)


# ---- the command


def test_every_help_text_has_examples() -> None:
    done = run_process("--help")
    assert done.returncode == 0
    for command in (*COMMANDS, "demo"):
        assert f" {command} " in done.stdout
    assert "petps create my.pool --table items:64:f32:1m" in done.stdout
    for command in COMMANDS:
        done = run_process(command, "--help")
        assert done.returncode == 0
        assert "Examples" in done.stdout, command
        assert f"petps {command}" in done.stdout, command


def test_demo_says_where_the_demos_are() -> None:
    done = run_process("demo")
    assert done.returncode == 0
    assert "make demo-train" in done.stdout


def test_help_loads_no_large_library() -> None:
    """The imports are what makes `--help` slow: numpy, pyarrow and pydantic take seconds cold."""
    assert run_process("--help").returncode == 0
    program = "import sys, petps.cli; print({'numpy', 'pyarrow', 'pydantic'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "set()\n"


def test_version_and_usage() -> None:
    done = run_process("--version")
    assert done.returncode == 0
    revision = r"( \([0-9a-f]{12}(-dirty)?\))?"  # none if the sources have no git
    assert re.fullmatch(rf"petps {re.escape(petps.__version__)}{revision}\n", done.stdout)
    for arguments in (["nonsense"], ["pull"], ["load", "--nonsense"]):
        done = run_process(*arguments)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


def test_every_exit_code_belongs_to_an_error_code() -> None:
    assert set(EXIT_CODES) < set(BY_CODE)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_shows_a_traceback(command: str, tmp_path: Path) -> None:
    arguments = {"pull": ["t", "1"], "push": ["t", "1=1"], "load": ["t", "x.npz"]}
    done = run_process(command, str(tmp_path / "none/x"), *arguments.get(command, []))
    assert "Traceback" not in done.stderr
    assert done.returncode != 0
