"""Runs the code blocks of a Markdown page, in order, as a reader who pastes them one by one.

`python -m tests.docs.pages PAGE` runs one page and exits with the status of its first block that
fails. A page has a folder and a network of its own: every server may use petps' default ports.

The blocks `sh` and `python` run; other blocks (output, configuration) do not. A comment directly
above a block changes that:

    <!-- not run: REASON -->          the block is skipped, and the test shows the reason
    <!-- fails: TEXT -->              the block must fail, and its output must contain TEXT
    <!-- file: NAME -->               a block of any language is written to this file
    <!-- needs: kafka -->             above the first block: a broker listens on 127.0.0.1:9092
    <!-- needs: etcd -->              above the first block: the program etcd is on the PATH
    <!-- needs: ray -->               above the first block: petps runs where Ray is installed

A block inside a comment runs as any other, and readers do not see it. Pages of the runbook make
there the failure that they are about, so that nobody pastes it at night:

    <!-- setup
    ```sh
    petps create my.pool --table items:4:f32:1000
    ```
    -->
"""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE_SECONDS_MAX: Final = 600.0
RUN_LANGUAGES: Final = ("sh", "python")
_BLOCK: Final = re.compile(
    r"(?:^<!-- (?P<mark>[a-z ]+): (?P<value>[^\n]+?) -->\n+)?"
    r"^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_NEEDS: Final = re.compile(r"^<!-- needs: (\w+) -->$", re.MULTILINE)
_PR_SET_CHILD_SUBREAPER: Final = 36


@dataclass(frozen=True)
class Block:
    """One fenced block, with the comment above it."""

    line: int
    language: str
    code: str
    mark: str
    value: str


def documents() -> list[Path]:
    """Return all pages whose blocks must run: README files of the product, and docs/.

    Not the pages that docs/generate.py makes from help texts: each of their examples stands alone.
    """
    readmes = [ROOT / "README.md", ROOT / "client/README.md", ROOT / "client/python/README.md"]
    pages = sorted((ROOT / "docs").rglob("*.md"))
    return [*readmes, *(page for page in pages if page.parent.name != "generated")]


def blocks_of(text: str) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    return [
        Block(
            text.count("\n", 0, match.start("language")) + 1,
            match["language"],
            match["code"],
            match["mark"] or "",
            match["value"] or "",
        )
        for match in _BLOCK.finditer(text)
    ]


def runs(block: Block) -> bool:
    """Return whether the block is run or written, not only shown."""
    return block.mark == "file" or (block.language in RUN_LANGUAGES and block.mark != "not run")


def script_of(page: Path) -> str:
    """Return one shell script that runs the page's blocks in order, with a line before each."""
    lines = ["set -eu"]
    for block in filter(runs, blocks_of(page.read_text())):
        where = f"{page.name}:{block.line}"
        lines.append(f"echo '==== {where}'")
        if block.mark == "file":
            lines.append(f"cat >{shlex.quote(block.value)} <<'PETPS_END'\n{block.code}PETPS_END")
            continue
        code = block.code
        if block.language == "python":
            code = f"python - <<'PETPS_END'\n{code}PETPS_END\n"
        if block.mark == "fails":
            text, name = shlex.quote(block.value), "block_output"
            lines.append(
                f"if (\n{code}) >{name} 2>&1; then echo '{where} did not fail'; exit 1; fi"
            )
            lines.append(f"cat {name}; grep -qF {text} {name}")
        else:
            lines.append(code)
    return "\n".join(lines) + "\n"


def needs_of(page: Path) -> list[str]:
    """Return what the page needs beside petps."""
    return _NEEDS.findall(page.read_text())


@contextmanager
def _broker(folder: Path) -> Iterator[None]:
    from tests.kafka.broker import Broker

    broker = Broker(folder, ports=(9092, 9093, 9094, 9095))
    try:
        yield
    finally:
        broker.kill()


def run_page(page: Path) -> int:
    """Run a page in an empty folder, in this process's network. Return the exit status."""
    # A server that a block started in the background becomes a child of this process, not of init.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    tools = Path(sys.executable).parent
    needs = needs_of(page)
    path = f"{tools}:{os.environ['PATH']}"
    if "etcd" in needs:
        from tests.etcd.server import program

        path += f":{program().parent}"
    environment = {
        "PATH": path,
        "HOME": os.environ.get("HOME", "/"),
        "COLUMNS": "100",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    with tempfile.TemporaryDirectory(prefix="petps-page-") as name:
        folder = Path(name)
        script = folder / ".script"
        script.write_text(script_of(page))
        work = folder / "work"
        work.mkdir()
        if "ray" in needs:
            _write_petps(folder / "bin", environment)
            environment["RAY_TMPDIR"] = str(folder)
        with _broker(folder / "kafka") if "kafka" in needs else nullcontext():
            process = subprocess.Popen(
                ["bash", str(script)], cwd=work, env=environment, start_new_session=True
            )
            try:
                return process.wait(PAGE_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                print(f"{page.name} did not end within {PAGE_SECONDS_MAX:.0f} s")
                return 124
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what the page left running
                _wait_for_group(process.pid)


def _write_petps(folder: Path, environment: dict[str, str]) -> None:
    """Put a command petps of this interpreter on the PATH: its environment has no script of it."""
    folder.mkdir()
    program = folder / "petps"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m petps.cli "$@"\n')
    program.chmod(0o755)
    environment["PATH"] = f"{folder}:{environment['PATH']}"


def _wait_for_group(group: int) -> None:
    while True:
        try:
            os.waitpid(-group, 0)
        except ChildProcessError:
            return


if __name__ == "__main__":
    sys.exit(run_page(Path(sys.argv[1])))
