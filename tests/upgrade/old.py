"""Builds the other side of an upgrade: petps as it was at OLD_COMMIT.

`python -m tests.upgrade.old` builds it, and prints where it is. The sources lie in a git worktree
while they are built. What is built is kept in build/upgrade.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
OLD_COMMIT: Final = "31be41ff57ff2981a7ef4f88cf056b15d5f05a09"
"""The last commit before the release that upgrades from it."""
FOLDER: Final = ROOT / "build" / "upgrade" / OLD_COMMIT
SITE: Final = FOLDER / "site"
"""The folder with the packages petps and petps_client."""


@dataclass(frozen=True)
class Side:
    """A petps that can be started: the commands of its Python, and its environment."""

    name: str
    python: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def petps(self) -> tuple[str, ...]:
        """Return the beginning of a `petps` command."""
        return (*self.python, "-m", "petps.cli")

    def run(self, *arguments: object, seconds_max: float = 120) -> str:
        """Return the standard output of this Python with arguments, which must succeed."""
        process = subprocess.run(
            [*self.python, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=seconds_max,
            check=False,
            env={**os.environ, **self.environment},
            cwd=FOLDER.parent,  # not the repository, whose packages would be found first
        )
        assert process.returncode == 0, f"{self.name}: {process.stdout}{process.stderr}"
        return process.stdout


NEW: Final = Side("new", (sys.executable,))


def old_side() -> Side:
    """Return the side of OLD_COMMIT, which build() has built.

    It runs in the interpreter without .venv, whose packages are found behind those of SITE. So
    .venv's own petps, which is installed by a hook, is not found at all.
    """
    packages = [path for path in sys.path if path.endswith("site-packages")]
    interpreter = getattr(sys, "_base_executable", sys.executable)
    paths = os.pathsep.join([str(SITE), *packages])
    return Side("old", (interpreter, "-s"), {"PYTHONPATH": paths})


def is_built() -> bool:
    """Return whether the old side is complete."""
    return (FOLDER / "complete").exists()


def build() -> Path:
    """Build the old side unless it is built. Return the folder of its packages."""
    if is_built():
        return SITE
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    tree = FOLDER / "tree"
    _run("git", "-C", ROOT, "worktree", "add", "--detach", "--force", tree, OLD_COMMIT)
    try:
        for folder in (tree / "client/python", tree):
            _install(folder)
    finally:
        _run("git", "-C", ROOT, "worktree", "remove", "--force", tree)
    (FOLDER / "complete").touch()
    return SITE


def _install(folder: Path) -> None:
    command: list[object] = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    command += ["--no-index", "--no-deps", "--no-build-isolation", "--target", SITE, folder]
    environment = {
        "CMAKE_GENERATOR": "Ninja",
        "CMAKE_BUILD_PARALLEL_LEVEL": os.environ.get("JOBS", "2"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    _run(*command, environment=environment)


def _run(*command: object, environment: dict[str, str] | None = None) -> None:
    environment = {**os.environ, **(environment or {})}
    process = subprocess.run(
        [str(argument) for argument in command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\n{process.stdout}")


if __name__ == "__main__":
    print(build())
