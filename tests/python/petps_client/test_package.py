"""The C++ client as other projects use it: installed, and linked into a program."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
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


def install(folder: Path) -> Path:
    """Return the prefix in ``folder`` that `cmake --install` has written."""
    prefix = folder / "prefix"
    run("cmake", "--install", BUILD, "--component", "cpp", "--prefix", prefix)
    return prefix


def pack(folder: Path, pattern: str) -> Path:
    """Return the file of ``folder`` that `make cpp-package` writes and ``pattern`` matches."""
    run("cpack", "--config", BUILD / "CPackConfig.cmake", "-B", folder / "packed")
    (file,) = (folder / "packed").glob(pattern)
    return file


def unpack_archive(folder: Path) -> Path:
    """Return the prefix in ``folder`` after the archive was unpacked there."""
    run("tar", "-C", folder, "-xf", pack(folder, "libpetps-client-dev_*.tar.gz"))
    return folder / "usr"


def unpack_deb(folder: Path) -> Path:
    """Return the prefix in ``folder`` after the Debian package was unpacked there."""
    run("dpkg-deb", "--extract", pack(folder, "libpetps-client-dev_*.deb"), folder / "root")
    return folder / "root" / "usr"


@pytest.mark.timeout(600)
@pytest.mark.xdist_group("cpp-package")
@pytest.mark.parametrize("install_into", [install, unpack_archive, unpack_deb])
def test_a_program_with_the_installed_client_pulls(
    served: Served, tmp_path: Path, install_into: Callable[[Path], Path]
) -> None:
    if not (BUILD / "CMakeCache.txt").exists():
        pytest.skip("there is no build/release: run make build first")
    run("cmake", "--build", BUILD, "--target", "petps_client_package")
    prefix = install_into(tmp_path)
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
