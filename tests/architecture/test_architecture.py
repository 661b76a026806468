"""Rules about the source. For each rule, a test proves that its check can fail."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import PurePosixPath

import pytest

from tests.architecture import checks

Check = Callable[[PurePosixPath, str], list[str]]


def complaints_of(check: Check, suffixes: tuple[str, ...]) -> list[str]:
    return [
        complaint
        for path, text in checks.project_files(suffixes)
        for complaint in check(path, text)
    ]


@pytest.mark.parametrize(
    ("check", "suffixes"),
    [
        (checks.include_complaints, (".cc", ".h")),
        (checks.import_complaints, (".py", ".pyi")),
        (checks.length_complaints, checks.CODE_SUFFIXES),
        (checks.column_complaints, (*checks.CODE_SUFFIXES, ".md", ".proto")),
        (checks.prose_complaints, (".py", ".pyi")),
        (checks.local_complaints, checks.CODE_SUFFIXES),
        (checks.citation_complaints, (*checks.CODE_SUFFIXES, ".md", ".proto")),
        (checks.word_complaints, (".h",)),
        (checks.sign_complaints, (".h",)),
        (checks.typing_complaints, (".py",)),
        (checks.machine_path_complaints, checks.TEXT_SUFFIXES),
        (checks.unpickling_complaints, (".py",)),
        (checks.newer_python_complaints, (".py",)),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_project_keeps(check: Check, suffixes: tuple[str, ...]) -> None:
    assert complaints_of(check, suffixes) == []


def test_every_room_has_a_front_door() -> None:
    doors = {
        str(path.parent.relative_to("native"))
        for path, _ in checks.project_files((".h",))
        if checks.is_front_door(path)
    }
    assert doors == set(checks.rooms()["native"])


def test_architecture_md_shows_the_rooms_of_rooms_toml() -> None:
    text = (checks.ROOT / "ARCHITECTURE.md").read_text()
    shown = re.findall(r"^ {2,4}(\w+) .*\[([a-z/ ]*)\]$", text, re.MULTILINE)
    expected = {room.split("/")[-1]: set(deps) for room, deps in checks.rooms()["native"].items()}
    expected["bindings"] = {"all"}
    assert {room: set(deps.split()) for room, deps in shown} == expected


@pytest.mark.parametrize("room", sorted(set(checks.rooms()["native"]) - {"bindings"}))
def test_cmake_links_the_rooms_of_rooms_toml(room: str) -> None:
    text = (checks.ROOT / "native" / room / "CMakeLists.txt").read_text()
    assert checks.cmake_complaints(room, text) == []


def test_one_version_number() -> None:
    project = tomllib.loads((checks.ROOT / "pyproject.toml").read_text())["project"]
    cmake = (checks.ROOT / "CMakeLists.txt").read_text()
    match = re.search(r"project\(petps VERSION (\S+)", cmake)
    assert match is not None
    assert match.group(1) == project["version"]


BAD_CODE: list[tuple[Check, str, str, str]] = [
    (checks.include_complaints, "native/wire/pull.cc", '#include "table/table.h"', "may not"),
    (checks.include_complaints, "native/wire/a.h", '#include "trainer/route/route.h"', "may not"),
    (checks.include_complaints, "native/trainer/unique/a.h", '#include "wire/wire.h"', "may not"),
    (checks.include_complaints, "native/base/a.h", "#  include <media/media.h>", "may not"),
    (checks.include_complaints, "native/pool/a.cc", "#include <media/media.h>", "not <"),
    (checks.include_complaints, "native/pool/a.cc", '#include "../index/index.h"', "leaves"),
    (checks.include_complaints, "client/cpp/a.cc", '#include "table/table.h"', "may not"),
    (checks.import_complaints, "petps/delta/a.py", "import petps.server.ingest", "may not import"),
    (checks.import_complaints, "petps/delta/a.py", "from petps import server", "may not import"),
    (checks.import_complaints, "petps/delta/a.py", "from ..cli import main", "may not import"),
    (
        checks.import_complaints,
        "petps/train/tracker/a.py",
        "def f():\n import petps.pool",
        "may not",
    ),
    (checks.import_complaints, "petps/server/ingest/a.py", "from petps.server import http", "may"),
    (checks.import_complaints, "petps/train/tracker/a.py", "import petps.train.output", "may not"),
    (checks.import_complaints, "petps/server/ingest/a.py", "import petps_client", "petps_client"),
    (checks.import_complaints, "petps/cli/a.py", "import examples.demo", "may not import examples"),
    (checks.import_complaints, "petps/util/a.py", "", "no place"),
    (checks.import_complaints, "petps/server/ingest/a.py", "import petps", "is no package"),
    (checks.import_complaints, "client/python/petps_client/a.py", "import petps", "may not"),
    (checks.import_complaints, "client/python/petps_client/a.py", "import pyarrow", "may not"),
    (checks.import_complaints, "client/python/petps_client/a.py", "import torch", "may not"),
    (checks.import_complaints, "client/python/petps_client/torch.py", "import torchrec", "may not"),
    (checks.length_complaints, "native/base/a.cc", "\n" * 601, "601 lines"),
    (checks.column_complaints, "native/base/a.h", "// " + "a" * 98, "101 columns"),
    (checks.column_complaints, "README.md", "a " * 51, "102 columns"),
    (checks.prose_complaints, "petps/a.py", "def _told(): pass", "by a verb"),
    (checks.prose_complaints, "petps/a.py", 'def f():\n    """What it is."""', "has no verb"),
    (checks.local_complaints, "docs/a.py", "for each in []: pass", "a.py:1: name each by"),
    (checks.local_complaints, "docs/a.py", "def f(*, said): pass", "name said by"),
    (checks.local_complaints, "docs/a.py", "[found for found in []]", "name found by"),
    (checks.local_complaints, "docs/a.cc", "auto made = f();", "name made by"),
    (checks.local_complaints, "docs/a.cc", "for (auto& found : rows) {}", "name found by"),
    (checks.citation_complaints, "README.md", "see `native/base/none.h`", "base/none.h"),
    (checks.citation_complaints, "petps/a.py", "# NONE.md explains it", "NONE.md"),
    (checks.word_complaints, "native/base/a.h", "int fetch_rows();", "fetch"),
    (checks.word_complaints, "native/base/a.h", "class PoolManager {};", "manager"),
    (checks.word_complaints, "client/cpp/a.h", "const int kMagic = 1;", "magic"),
    (checks.sign_complaints, "native/base/base.h", "// Owns: x\n#pragma once", "Never does"),
    (checks.typing_complaints, "petps/a.py", "from typing import Any, Self", "import Self below"),
    (checks.machine_path_complaints, "Makefile", "ROOT := /ho" + "me/someone", "machine path"),
    (checks.machine_path_complaints, "README.md", "see /wo" + "rk/shared", "machine path"),
    (checks.unpickling_complaints, "petps/a.py", "import pickle", "may not import pickle"),
    (checks.unpickling_complaints, "petps/a.py", "from ray import cloudpickle", "cloudpickle"),
    (checks.unpickling_complaints, "client/a.py", "def f():\n import marshal as m", "a.py:2: may"),
    (checks.unpickling_complaints, "bench/a.py", "from multiprocessing import Queue", "may not"),
    (checks.unpickling_complaints, "bench/a.py", "d.all_gather_object(a, b)", "unpickles"),
    (
        checks.unpickling_complaints,
        "petps/a.py",
        "from torch.distributed import broadcast_object_list",
        "may not import broadcast_object_list",
    ),
    (checks.unpickling_complaints, "petps/a.py", "torch.load(file)", "needs weights_only=True"),
    (
        checks.unpickling_complaints,
        "petps/a.py",
        "torch_module().load(file, weights_only=False)",
        "needs weights_only=True",
    ),
    (checks.unpickling_complaints, "petps/a.py", "from torch import load", "write torch.load"),
    (checks.unpickling_complaints, "petps/a.py", "np.load(f, allow_pickle=True)", "must be False"),
    (checks.unpickling_complaints, "examples/a.py", "eval(text)", "eval runs text"),
    (
        checks.newer_python_complaints,
        "petps/a.py",
        "from datetime import UTC",
        "datetime.UTC needs",
    ),
    (checks.newer_python_complaints, "client/a.py", "async with asyncio.timeout(1): pass", "3.11"),
]


@pytest.mark.parametrize(("check", "path", "text", "expected"), BAD_CODE)
def test_check_refuses(check: Check, path: str, text: str, expected: str) -> None:
    complaints = check(PurePosixPath(path), text)
    assert expected in "".join(complaints)


GOOD_CODE: list[tuple[Check, str, str]] = [
    (checks.include_complaints, "native/pool/a.cc", '#include "media/media.h"\n#include <vector>'),
    (checks.include_complaints, "tests/native/wire/a.cc", '#include "table/table.h"'),
    (checks.import_complaints, "petps/server/ingest/a.py", "import petps.delta\nfrom . import b"),
    (checks.import_complaints, "petps/cli/a.py", "import petps_client\nfrom petps import server"),
    (checks.import_complaints, "client/python/petps_client/a.py", "import numpy\nimport os"),
    (checks.import_complaints, "client/python/petps_client/torch.py", "import numpy, torch"),
    (checks.column_complaints, "README.md", "```\n" + "a" * 200 + "\n```\n|" + "a" * 200),
    (checks.column_complaints, "tests/a.py", "a" * 90 + "  # type: ignore[arg-type]"),
    (checks.prose_complaints, "petps/a.py", 'def find():\n    """Return what was found."""'),
    (checks.local_complaints, "docs/a.py", "rows, found = pull()\nx.said = 'told'"),
    (
        checks.local_complaints,
        "docs/a.cc",
        '// each\nauto found = f("made"); for_each(); a ? found : b',
    ),
    (checks.citation_complaints, "README.md", "`native/base/base.h`, build/x.json, [a](README.md)"),
    (checks.word_complaints, "native/base/a.h", "// we fetch\nauto x = pointer.get();"),
    (checks.word_complaints, "native/base/a.h", "int target, budget, output, gather;"),
    (checks.word_complaints, "native/base/a.cc", "int fetch;"),
    (checks.typing_complaints, "petps/a.py", "if TYPE_CHECKING:\n    from typing import Self"),
    (checks.typing_complaints, "tests/a.py", "from typing import Self"),
    (
        checks.machine_path_complaints,
        "README.md",
        "https://example.org/ho" + "me/page and a/wo" + "rk/b",
    ),
    (
        checks.unpickling_complaints,
        "petps/a.py",
        "torch.load(f, weights_only=True)\nm.eval()\nnp.load(f, allow_pickle=False)\njson.load(f)",
    ),
    (checks.unpickling_complaints, "tests/a.py", "import pickle"),
]


@pytest.mark.parametrize(("check", "path", "text"), GOOD_CODE)
def test_check_accepts(check: Check, path: str, text: str) -> None:
    assert check(PurePosixPath(path), text) == []


def test_cmake_check_refuses_other_links() -> None:
    assert checks.cmake_complaints("wire", "petps_room(wire DEPS base table)")
    assert checks.cmake_complaints("wire", "add_library(petps_wire a.cc)")
    assert not checks.cmake_complaints("wire", "petps_room(wire DEPS base)")
