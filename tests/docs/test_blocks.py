"""Every code block of README and docs runs as pasted, page by page (tests/docs/pages.py)."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import pages
from tests.etcd import server as etcd_server
from tests.seed import SEED

# A page of the runbook makes a failure on a real server, which takes 5 to 10 s of a processor. So
# `make test` runs two of them, other ones with each seed, and `make runbook` runs all.
RUNBOOK_PAGES = 2


def pages_to_run() -> list[Path]:
    """Return the pages with blocks that run."""
    chosen = [
        page
        for page in pages.documents()
        if any(map(pages.runs, pages.blocks_of(page.read_text())))
    ]
    if os.environ.get("PETPS_RUNBOOK") == "all":
        return chosen
    runbook = [page for page in chosen if page.parent.name == "runbook"]
    left_out = set(runbook) - set(random.Random(SEED).sample(runbook, RUNBOOK_PAGES))
    return [page for page in chosen if page not in left_out]


PAGES = pages_to_run()
NETWORK = ["unshare", "--net"]
RAY_PYTHON = pages.ROOT / ".venv-train/bin/python"


def run(page: Path) -> subprocess.CompletedProcess[str]:
    if subprocess.run([*NETWORK, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no network namespaces here (unshare --net): run as root")
    python = RAY_PYTHON if "ray" in pages.needs_of(page) else sys.executable
    return subprocess.run(
        [*NETWORK, python, "-m", "tests.docs.pages", str(page)],
        cwd=pages.ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )


@pytest.mark.timeout(pages.PAGE_SECONDS_MAX + 60)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(pages.ROOT).as_posix())
def test_page_runs_as_pasted(page: Path) -> None:
    if "etcd" in pages.needs_of(page):
        try:
            etcd_server.program()
        except etcd_server.NotAvailable as reason:
            pytest.skip(f"no etcd: {reason}")
    if "ray" in pages.needs_of(page) and not RAY_PYTHON.exists():
        pytest.skip("no Ray: make test-train installs it")
    done = run(page)
    assert done.returncode == 0, done.stdout[-6000:]


def test_every_skipped_block_says_why() -> None:
    skipped = [
        (page, block)
        for page in pages.documents()
        for block in pages.blocks_of(page.read_text())
        if block.language in pages.RUN_LANGUAGES and block.mark == "not run"
    ]
    for page, block in skipped:
        assert len(block.value) > 10, f"{page}:{block.line}: say why the block is not run"


def page(folder: Path, text: str) -> Path:
    path = folder / "page.md"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "status", "output"),
    [
        ("```sh\nfalse\n```\n", 1, ""),
        ("```python\nraise SystemExit(3)\n```\n", 3, ""),
        ("```sh\nX=1\n```\ntext\n```sh\necho $X\n```\n", 0, "1"),
        ("<!-- not run: it would never end -->\n```sh\nfalse\n```\n", 0, ""),
        ("<!-- fails: no such -->\n```sh\necho no such thing; false\n```\n", 0, "no such"),
        ("<!-- fails: other -->\n```sh\necho no such thing; false\n```\n", 1, ""),
        ("<!-- fails: thing -->\n```sh\necho thing\n```\n", 1, "did not fail"),
        ("<!-- file: a.toml -->\n```toml\nx = 1\n```\n```sh\ncat a.toml\n```\n", 0, "x = 1"),
        ("```sh\nsleep 600 &\n```\n", 0, ""),
        ("<!-- setup\n```sh\nX=2\n```\n-->\n```sh\necho $X\n```\n", 0, "2"),
    ],
)
def test_the_runner_notices(tmp_path: Path, text: str, status: int, output: str) -> None:
    done = run(page(tmp_path, text))
    assert done.returncode == status, done.stdout
    assert output in done.stdout
