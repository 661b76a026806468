"""The C++ client as other projects use it: installed, and linked into a program."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.python.petps_client.served import Served

ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / "build" / "release"


def run(*command: object) -> str:
    process = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.returncode == 0, process.stdout
    return process.stdout


@pytest.mark.timeout(600)
def test_a_program_with_the_installed_client_pulls(served: Served, tmp_path: Path) -> None:
    if not (BUILD / "CMakeCache.txt").exists():
        pytest.skip("there is no build/release: run make build first")
    prefix = tmp_path / "prefix"
    run("cmake", "--build", BUILD, "--target", "petps_client_package")
    run("cmake", "--install", BUILD, "--component", "cpp", "--prefix", prefix)
    installed = {path.relative_to(prefix).as_posix() for path in prefix.rglob("*.h")}
    assert installed == {
        "include/petps/petps_client/client.h",
        "include/petps/base/status.h",
        "include/petps/codec/codec.h",
    }
    example = tmp_path / "example"
    run("cmake", "-S", "client/cpp/example", "-B", example, f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", example)
    # Key 17 exists, 4711 does not. The first value of row 17 is (17 * 31) % 97 / 4 - 3.
    assert run(example / "example", served.url, "f32") == "1 found, row 0 begins with 7.5\n"
