"""The checks of tests/architecture. Each takes a path and a text, and returns its complaints.

They take text instead of files, so that tests can prove that each check can fail.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CODE_SUFFIXES = (".cc", ".h", ".py", ".pyi")
TEXT_SUFFIXES = (*CODE_SUFFIXES, ".md", ".toml", ".txt", ".json", ".cmake", ".sh", ".proto", "")
# Folders without files of the project: build output, environments, caches, version control.
LEFT_OUT = {
    "generated",
    ".venv-docs",
    ".venv-fuzz",
    ".venv-page",
    "build",
    ".venv",
    ".venv-train",
    ".git",
    "shared",
    "dist",
    "__pycache__",
    ".hypothesis",
}


@cache
def rooms() -> dict[str, Any]:
    """Return the table of rooms.toml."""
    return tomllib.loads((ROOT / "tests/architecture/rooms.toml").read_text())


def project_files(suffixes: tuple[str, ...]) -> Iterator[tuple[PurePosixPath, str]]:
    """Yield (path relative to the root, text) of every project file with one of `suffixes`."""
    for path in sorted(ROOT.rglob("*")):
        relative = path.relative_to(ROOT)
        if LEFT_OUT & set(relative.parts) or any("cache" in part for part in relative.parts):
            continue
        if relative.parts[0].endswith(".egg-info"):
            continue
        if path.suffix in suffixes and path.is_file() and not path.is_symlink():
            try:
                yield PurePosixPath(relative), path.read_text()
            except UnicodeDecodeError:  # binary data
                continue


def without_comments(text: str) -> str:
    """Return C++ `text` with comments and string literals blanked; line numbers are kept."""
    pattern = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"'
    return re.sub(pattern, lambda match: "\n" * match.group().count("\n"), text, flags=re.DOTALL)


def native_room(path: str) -> str:
    """Return the room of a path relative to native/, such as "trainer/route" of its route.h."""
    parts = path.split("/")[:-1]
    inner = "/".join(parts[:2])
    return inner if inner in rooms()["native"] else "".join(parts[:1])


def cxx_room(path: PurePosixPath) -> tuple[str, set[str]] | None:
    """Return (the C++ file's room, the rooms it may include); None if it may include all."""
    if path.parts[0] == "native" and len(path.parts) > 2:
        room = native_room("/".join(path.parts[1:]))
        return (room, set(rooms()["native"].get(room, [])))
    if path.parts[0] == "client" and len(path.parts) > 2:
        return (f"client/{path.parts[1]}", set(rooms()["client"][path.parts[1]]))
    return None


def include_complaints(path: PurePosixPath, text: str) -> list[str]:
    """Return the includes of other rooms that the file's room must not have."""
    room = cxx_room(path)
    if room is None:
        return []
    name, allowed = room
    complaints = []
    for line, included in re.findall(r'^([ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)[>"])', text, re.M):
        other = native_room(included)
        is_room = other in rooms()["native"] or other == "client"
        if is_room and other not in {*allowed, name} and not name.startswith(f"{other}/"):
            complaints.append(f"{path}: room {name} may not include {included}")
        elif is_room and "<" in line:
            complaints.append(f'{path}: write "{included}", not <{included}>')
        elif '"' in line and not is_room and ".." in included:
            complaints.append(f"{path}: {included} leaves its room; include from native/")
    return complaints


def imported_modules(text: str, package: str) -> Iterator[str]:
    """Yield the full name of each module that a Python file of `package` imports anywhere.

    `from petps import errors` counts as petps.errors.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            if base in ("petps", "petps.server", "petps.train"):
                for alias in node.names:
                    yield f"{base}.{alias.name}"
            else:
                yield base


def import_complaints(path: PurePosixPath, text: str) -> list[str]:
    """Return the imports of petps/ and petps_client that break the order of rooms.toml."""
    parts = path.with_suffix("").parts
    if parts[0] == "petps":
        return petps_complaints(path, text)
    if parts[:3] == ("client", "python", "petps_client"):
        return client_complaints(path, text)
    return []


def python_room(names: tuple[str, ...], level: dict[str, int]) -> str:
    """Return the room of a module of petps, such as "server/ingest"; names: without "petps"."""
    inner = "/".join(names[:2])
    return inner if inner in level else "".join(names[:1])


def petps_complaints(path: PurePosixPath, text: str) -> list[str]:
    """Return the imports of a file of petps/ that break the order."""
    parts = path.with_suffix("").parts
    order: list[list[str]] = rooms()["python"]["order"]
    level = {package: number for number, packages in enumerate(order) for package in packages}
    own = python_room(parts[1:], level)
    if own == "__init__":
        return []
    if own not in level:
        return [f"{path}: package petps.{own} has no place in rooms.toml [python] order"]
    complaints = []
    package = ".".join(parts[:-1])
    for module in imported_modules(text, package):
        names = module.split(".")
        if names[0] == "petps_client" and own not in rooms()["python"]["client_users"]:
            complaints.append(f"{path}: petps.{own} may not import petps_client")
        if names[0] in ("examples", "bench", "tests"):
            complaints.append(f"{path}: petps.{own} may not import {names[0]}")
        if names[0] != "petps":
            continue
        other = python_room(tuple(names[1:]), level)
        if other == own:
            continue
        if other not in level:
            complaints.append(f"{path}: {module} is no package of petps in rooms.toml")
        elif level[other] <= level[own]:
            complaints.append(f"{path}: petps.{own} may not import petps.{other}")
    return complaints


def client_complaints(path: PurePosixPath, text: str) -> list[str]:
    """Return imports of petps_client other than the standard library, numpy and itself."""
    python = rooms()["python"]
    allowed = {"petps_client", *python["client_third_party"], *sys.stdlib_module_names}
    allowed |= set(python["client_adapters"].get(path.stem, []))
    package = ".".join(path.with_suffix("").parts[2:-1])
    return [
        f"{path}: petps_client may not import {module}"
        for module in imported_modules(text, package)
        if module.split(".")[0] not in allowed
    ]


def length_complaints(path: PurePosixPath, text: str) -> list[str]:
    """Return a complaint if the file has more lines than rooms.toml allows."""
    limit: int = rooms()["limits"]["file_lines_max"]
    lines = text.count("\n")
    return [f"{path}: {lines} lines; at most {limit}"] if lines > limit else []


# A docstring that begins with one of these has no verb.
HEADLESS = re.compile(
    r"(Of|Who|Whom|Whose|What|Whatever|Whoever|That|Those|As|By|Beside|Behind|None|Nobody|Nothing|"
    r"All that|Where|Which)\b"
)
# A participle says what has happened; the name of a function says what it does.
PARTICIPLE = re.compile(
    r"_?(made|said|told|asked|trained|computed|summed|gathered|checked|given|wanted|found|kept|"
    r"named|known|meant)$"
)


# A comment that a tool reads must be on the line that it is about.
PRAGMA = re.compile(r"# (type: ignore|noqa)|// NOLINT")


def column_complaints(path: PurePosixPath, text: str) -> list[str]:
    """Return the lines of code and prose that are longer than 100 columns."""
    limit: int = rooms()["limits"]["columns_max"]
    complaints = []
    is_code_block = False
    for number, line in enumerate(text.splitlines(), 1):
        if path.suffix == ".md":
            # A table row cannot be wrapped, and a code block shows what a program prints.
            is_code_block ^= line.lstrip().startswith("```")
            if is_code_block or line.startswith(("|", "    ")):
                continue
        if len(line) > limit and "http" not in line and not PRAGMA.search(line):
            complaints.append(f"{path}:{number}: {len(line)} columns; at most {limit}")
    return complaints


def prose_complaints(path: PurePosixPath, text: str) -> list[str]:
    """Return functions that a participle names, and docstrings of functions without a verb."""
    complaints = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if PARTICIPLE.match(node.name):
            complaints.append(f"{path}:{node.lineno}: name the function {node.name} by a verb")
        if HEADLESS.match(ast.get_docstring(node) or ""):
            complaints.append(f"{path}:{node.lineno}: the docstring of {node.name} has no verb")
    return complaints


def local_complaints(path: PurePosixPath, text: str) -> list[str]:
    """Return locals and parameters that do not name the thing that they hold.

    In C++ each such identifier counts, because no other kind of name uses these words.
    """
    words = rooms()["locals"]
    refused, loops = set(words["not_used"]), set(words["not_in_loops"])
    names: list[tuple[int, str]] = []
    if path.suffix in (".py", ".pyi"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.arg) and node.arg in refused:
                names.append((node.lineno, node.arg))
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names += [(node.lineno, node.id)] * (node.id in refused)
            elif isinstance(node, ast.For | ast.comprehension):
                loop = node.target
                if isinstance(loop, ast.Name) and loop.id in loops:
                    names.append((loop.lineno, loop.id))
    else:
        loop_pattern = rf"for \([^;:]*\b({'|'.join(loops)}) :"
        for number, line in enumerate(without_comments(text).splitlines(), 1):
            tokens = re.findall(rf"\b({'|'.join(refused)})\b", line)
            names += [(number, name) for name in tokens + re.findall(loop_pattern, line)]
    return [f"{path}:{line}: name {name} by the thing that it holds" for line, name in names]


# A path of this project, or the name of one of its documents.
CITATION = re.compile(
    r"(?<![\w./>}-])(?:(?:native|petps|client|tests|bench|examples|deploy|cmake|docs)/[\w./-]+"
    r"\.(?:md|py|cc|h|toml|json|sh|cmake|proto)|[A-Z]+\.md)\b"
)


@cache
def document_names() -> frozenset[str]:
    """Return the names of the project's documents, without folders."""
    return frozenset(path.name for path, _ in project_files((".md",)))


def citation_complaints(path: PurePosixPath, text: str) -> list[str]:
    """Return the files that the text cites and that do not exist."""
    if path.name == "test_architecture.py":  # its examples are invented
        return []
    return [
        f"{path}: cites {cited}, which does not exist"
        for cited in CITATION.findall(text)
        if cited not in document_names() and not (ROOT / cited).exists()
    ]


def words_of(identifier: str) -> list[str]:
    """Return the words of an identifier: fetch_rows, FetchRows and kFetchRows contain fetch."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", identifier)
    return [word.lower() for word in spaced.split("_") if word]


def word_complaints(path: PurePosixPath, text: str) -> list[str]:
    """Return identifiers with unused words in headers of native/ and client/cpp."""
    if path.suffix != ".h" or path.parts[0] not in ("native", "client"):
        return []
    # No room includes these headers, and they use Python's words.
    if path.parts[1] in ("bindings", "python"):
        return []
    not_used = set(rooms()["words"]["not_used"])
    complaints = []
    code = re.sub(r"^[ \t]*#[ \t]*include[^\n]*", "", without_comments(text), flags=re.M)
    # std::get, a pointer's .get() and an atomic's .fetch_add() are the standard library's words.
    code = re.sub(r"(std::|\.|->)(get|fetch_(add|sub|or|and))\b", "", code)
    for identifier in sorted(set(re.findall(r"\b[A-Za-z_]\w*", code))):
        for word in not_used & set(words_of(identifier)):
            complaints.append(f"{path}: {identifier}: use another word than {word}")
    return complaints


def is_front_door(path: PurePosixPath) -> bool:
    """Return whether the path is native/<room>/<name>.h, where name ends the room's name."""
    room = native_room("/".join(path.parts[1:]))
    return path == PurePosixPath(f"native/{room}/{path.parent.name}.h")


def sign_complaints(path: PurePosixPath, text: str) -> list[str]:
    """Return the labels of the sign that a front door's opening comment lacks."""
    if not is_front_door(path):
        return []
    opening = text.split("#pragma once")[0]
    return [
        f"{path}: the sign on the door lacks '{entry}:'"
        for entry in rooms()["door"]["sign"]
        if not re.search(rf"^// {entry}:", opening, re.M)
    ]


# Names of typing that the lowest Python of the packages, 3.10, does not have.
NEW_TYPING = {"LiteralString", "Never", "NotRequired", "Required", "Self", "Unpack", "assert_never",
              "assert_type", "override", "reveal_type"}  # fmt: skip


def typing_complaints(path: PurePosixPath, text: str) -> list[str]:
    """Return imports by installed files, while the program runs, of names that Python 3.10 lacks.

    Below ``if TYPE_CHECKING`` they are read by mypy only.
    """
    if path.parts[0] not in ("petps", "client"):
        return []
    return [
        f"{path}:{node.lineno}: import {alias.name} below `if TYPE_CHECKING`"
        for node in ast.parse(text).body
        if isinstance(node, ast.ImportFrom) and node.module == "typing"
        for alias in node.names
        if alias.name in NEW_TYPING
    ]


# What Python has had since 3.11 only, by module; pyproject.toml allows 3.10.
NEWER_NAMES = {
    "asyncio": {"Barrier", "Runner", "TaskGroup", "timeout", "timeout_at"},
    "contextlib": {"chdir"},
    "datetime": {"UTC"},
    "enum": {"ReprEnum", "StrEnum", "nonmember", "verify"},
    "hashlib": {"file_digest"},
    "operator": {"call"},
    "tomllib": {"load", "loads"},
}


def newer_python_complaints(path: PurePosixPath, text: str) -> list[str]:
    """Return what the oldest Python that users may have does not have."""
    if path.parts[0] not in ("petps", "client") or "import tomli as tomllib" in text:
        return []
    complaints = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            module, names = node.module or "", {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module, names = node.value.id, {node.attr}
        elif isinstance(node, ast.TryStar):
            complaints.append(f"{path}:{node.lineno}: except* needs Python 3.11")
            continue
        else:
            continue
        complaints += [
            f"{path}:{node.lineno}: {module}.{name} needs Python 3.11"
            for name in sorted(names & NEWER_NAMES.get(module, set()))
        ]
    return complaints


# Bytes that these modules read can name any function, which they then call.
CALLING_MODULES = {"cloudpickle", "dill", "joblib", "marshal", "multiprocessing", "pickle",
                   "_pickle", "shelve", "yaml"}  # fmt: skip
# Functions that unpickle: of torch.distributed between ranks, of Python between processes.
UNPICKLING = re.compile(
    r"(all_gather|gather)_object|(broadcast|scatter|send|recv)_object_list|read_pickle|"
    r"ProcessPoolExecutor"
)


def unpickling_complaints(path: PurePosixPath, text: str) -> list[str]:
    """Return what lets bytes of another process, a file or a network choose code to run.

    Ray has its own transport: a Ray cluster is one trust domain.
    """
    if path.parts[0] not in ("petps", "client", "examples", "bench"):
        return []
    complaints = []
    for node in ast.walk(ast.parse(text)):
        reason = ""
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
            )
            names = {part for module in modules for part in module.split(".")}
            names |= {alias.name for alias in node.names}
            refused = sorted(names & CALLING_MODULES) + sorted(filter(UNPICKLING.fullmatch, names))
            reason = f"may not import {refused[0]}" if refused else ""
            if "torch" in names and "load" in names:
                reason = "write torch.load, not load"
        elif isinstance(node, ast.Attribute) and UNPICKLING.fullmatch(node.attr):
            reason = f"{node.attr} unpickles"
        elif isinstance(node, ast.Call):
            reason = _unpickling_call(node)
        if reason:
            line = getattr(node, "lineno", 0)
            complaints.append(f"{path}:{line}: {reason}: encode values (JSON, arrays)")
    return complaints


def _unpickling_call(call: ast.Call) -> str:
    """Return why a call may run code that its input chooses, or ""."""
    options = {option.arg: ast.unparse(option.value) for option in call.keywords}
    if isinstance(call.func, ast.Name) and call.func.id in ("eval", "exec", "__import__"):
        return f"{call.func.id} runs text"
    if options.get("allow_pickle", "False") != "False":
        return "allow_pickle must be False"
    if isinstance(call.func, ast.Attribute) and call.func.attr == "load":
        module = ast.unparse(call.func.value)
        if "torch" in module and options.get("weights_only") != "True":
            return f"{module}.load needs weights_only=True"
    return ""


def machine_path_complaints(path: PurePosixPath, text: str) -> list[str]:
    """Return paths that exist on one machine only."""
    homes = "|".join(("home", "root", "work", "Users", "mnt"))
    return [
        f"{path}:{number}: machine path {match.group()}"
        for number, line in enumerate(text.splitlines(), 1)
        if (match := re.search(rf"(?<![\w.~/}}>)*-])/(?:{homes})/[\w.-]+", line))
    ]


def cmake_complaints(room: str, text: str) -> list[str]:
    """Return the DEPS of a room's CMakeLists.txt if they differ from rooms.toml."""
    match = re.search(r"petps_room\(\s*(\w+)(?:\s+DEPS\s+([a-z \n]+))?", text)
    if match is None:
        return [f"native/{room}/CMakeLists.txt does not call petps_room"]
    linked = set((match.group(2) or "").split())
    allowed = {name.split("/")[-1] for name in rooms()["native"][room]}
    if linked != allowed:
        return [f"native/{room}/CMakeLists.txt links {sorted(linked)}, not {sorted(allowed)}"]
    return []
