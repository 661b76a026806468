"""What a command does not import or build, because it would delay the start of a server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

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


def facts_at_the_door(*arguments: str) -> Any:
    """Return what `petps serve` has imported and built when it opens its first port."""
    done = subprocess.run(
        [sys.executable, "-c", SERVE, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(done.stdout)


def test_serve_imports_nothing_that_serving_does_not_need(pool: Path) -> None:
    facts = facts_at_the_door(str(pool))
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
        "prometheus_client",
        "pyarrow",
        "rich",
        "tomllib",
    }
    assert late.isdisjoint(facts["modules"])


def test_serve_with_a_log_first_imports_what_takes_longest(pool: Path, tmp_path: Path) -> None:
    # The rest of ingest follows within 0.1 s of the first pull (docs/decisions/0083*).
    modules = set(facts_at_the_door(str(pool), "--log", str(tmp_path / "log"))["modules"])
    assert {"numpy", "pyarrow", "petps.delta"} <= modules
    assert modules.isdisjoint({"petps.checkpoint", "petps.server.ingest"})


def test_ingest_imports_checkpoints_at_the_first_gap_only() -> None:
    program = "import sys, petps.server.ingest_part; sys.exit('petps.checkpoint' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], timeout=120, check=True)


def test_serve_builds_one_validator_and_searches_no_plugins(pool: Path) -> None:
    facts = facts_at_the_door(str(pool))
    assert facts["built"] == ["Config"]
    assert facts["plugins"] == "__all__"


def test_every_command_is_built_under_its_own_name(run: Command) -> None:
    help_words = run("--help").split()
    for name, command in Commands().items():
        assert command.name == name
        assert command.rich_help_panel in help_words
        assert name in help_words
