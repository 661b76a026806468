"""What a command does not import or build, because it would delay the start of a server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from petps.cli.commands import Commands
from tests.python.cli.conftest import Command

SERVE: Final = """
import json, os, sys
from petps import _native
from petps.cli.app import main

def start(tables, **options):  # in place of the native server: the door would open now
    from petps.config import schema
    built = [
        name for name in schema.__all__ if getattr(schema, name).__pydantic_complete__
    ]
    plugins = os.environ["PYDANTIC_DISABLE_PLUGINS"]
    print(json.dumps({"modules": list(sys.modules), "built": built, "plugins": plugins}))
    sys.stdout.flush()
    os._exit(0)

_native.Server.start = start
sys.argv = ["petps", "serve", *sys.argv[1:]]
main()
"""


def run_to_the_door(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run `petps serve` until it would open its first port, or refuses to."""
    return subprocess.run(
        [sys.executable, "-c", SERVE, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def facts_at_the_door(*arguments: object) -> Any:
    """Return what `petps serve` has imported and built when it opens its first port."""
    done = run_to_the_door(*arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_serve_imports_nothing_that_serving_does_not_need(pool: Path) -> None:
    facts = facts_at_the_door(pool)
    commands = {name for name in facts["modules"] if name.startswith("petps.cli.commands.")}
    assert commands == {"petps.cli.commands.serve"}
    late = {
        "google.protobuf",
        "grpc",
        "http.server",
        "numpy",
        "petps.server.grpc",
        "petps.server.http",
        "petps.server.ingest_part",
        "petps.server.metrics",
        "petps.server.shard_map",
        "prometheus_client",
        "pyarrow",
        "rich",
        "tomllib",
    }
    assert late.isdisjoint(facts["modules"])


def test_serve_with_a_log_first_imports_what_takes_longest(pool: Path, tmp_path: Path) -> None:
    # The rest of ingest follows within 0.1 s of the first pull (docs/decisions/0083*).
    modules = set(facts_at_the_door(pool, "--log", tmp_path / "log")["modules"])
    assert {"numpy", "pyarrow", "petps.delta"} <= modules
    assert modules.isdisjoint({"petps.checkpoint", "petps.server.ingest"})


def test_ingest_imports_checkpoints_at_the_first_gap_only() -> None:
    program = "import sys, petps.server.ingest_part; sys.exit('petps.checkpoint' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], timeout=120, check=True)


def test_serve_builds_one_validator_and_searches_no_plugins(pool: Path) -> None:
    facts = facts_at_the_door(pool)
    assert facts["built"] == ["Config"]
    assert facts["plugins"] == "__all__"


@pytest.mark.parametrize(
    ("arguments", "file", "reason"),
    [
        (("--workers", "many"), "", "'--workers'"),
        (("--port", "65536"), "", "[server] port: "),
        (("--config", "FILE"), "[server]\nhots = 1\n", "did you mean 'host'?"),
        (("--config", "FILE"), "[tables.items]\ndim = 0\ncapacity = 1\n", "[tables.items] dim: "),
        (("--shard-map", "FILE"), '{"model": "default"}', "version is missing"),
        (("--ready-file", "no/folder/ready"), "", "there is no folder no/folder"),
    ],
)
def test_nothing_is_served_with_a_wrong_setting(
    arguments: tuple[str, ...], file: str, reason: str, pool: Path, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_text(file)
    done = run_to_the_door(pool, *(path if name == "FILE" else name for name in arguments))
    assert done.returncode == 2
    assert reason in done.stderr
    assert done.stdout == ""  # the native server was not started


def test_every_command_is_built_under_its_own_name(run: Command) -> None:
    help_words = run("--help").split()
    for name, command in Commands().items():
        assert command.name == name
        assert command.rich_help_panel in help_words
        assert name in help_words
