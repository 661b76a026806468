"""Programs of the tests that Go builds once, from a go.mod that pins their sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

__all__ = ["NotAvailable", "go_program"]

GO_FOLDER: Final = "/usr/local/go/bin"  # where its archive is usually unpacked


class NotAvailable(Exception):
    """This machine lacks something. Its message names the thing and the remedy."""


def go_program(
    name: str,
    cache: Path,
    sources: Sequence[Path],
    package: str,
    *,
    seconds_max: float,
    flags: Sequence[str] = (),
) -> Path:
    """Return the path of a program, which is built once for these sources. Raise NotAvailable.

    cache: the folder that keeps it. sources: go.mod, in whose folder Go runs, and others.
    """
    content = b"".join(path.read_bytes() for path in sources)
    path = cache / hashlib.sha256(content).hexdigest()[:16] / name
    if path.exists():
        return path
    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _build(path, sources[0].parent, [*flags, package], seconds_max)
    return path


def _build(path: Path, folder: Path, arguments: list[str], seconds_max: float) -> None:
    go = shutil.which("go", path=f"{os.environ.get('PATH', '')}:{GO_FOLDER}")
    if go is None:
        raise NotAvailable(f"{path.name} is not built and Go is missing: install Go")
    path.parent.mkdir(exist_ok=True)
    temporary = path.with_suffix(".tmp")
    command = [go, "build", "-trimpath", "-o", str(temporary), *arguments]
    # local: an older Go is an error, not the reason to download another one.
    environment = os.environ | {"GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly"}
    try:
        process = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False,
            timeout=seconds_max,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NotAvailable(f"Go did not build {path.name} in {seconds_max:g} s") from None
    if "checksum mismatch" in process.stderr:  # fail, do not skip: the download has other bytes
        raise RuntimeError(f"the sources of {path.name} differ from go.sum: {process.stderr}")
    if process.returncode != 0:
        raise NotAvailable(f"Go could not build {path.name}: {process.stderr[-500:].strip()}")
    temporary.rename(path)
