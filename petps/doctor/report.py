"""What a report for support contains. Each part is bounded in size and time, without secrets."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from petps.doctor.checks.pool import missing_rows
from petps.doctor.metrics import read_metrics
from petps.doctor.mounts import mount_of
from petps.doctor.registry import diagnose
from petps.doctor.secrets import Scrubber, known_secrets
from petps.doctor.subject import Subject
from petps.doctor.work import Work, in_time
from petps.errors import InvalidArgument, NotFound, PetpsError

__all__ = ["MEMBER_BYTES_MAX", "REPORT_SECONDS", "Member", "Report", "Sources", "collect"]

MEMBER_BYTES_MAX: Final = 4 << 20
REPORT_SECONDS = 30.0  # for all parts, which are collected at the same time
LOG_LINES: Final = 5000
LOG_BYTES: Final = 1 << 20
# Environment variables of petps whose values are no secret.
SHOWN_VARIABLES: Final = (
    "PETPS_ACCESS_FILE", "PETPS_CPU", "PETPS_TLS_CA", "PETPS_TLS_CERTIFICATE", "PETPS_TLS_KEY",
    "PETPS_TLS_SERVER_NAME", "PETPS_TOKEN_FILE", "PETPS_ZONE", "LANG", "TZ", "PYTHONPATH",
)  # fmt: skip
# Beginnings of the names of variables that are listed; their values are not shown.
LISTED_VARIABLES: Final = ("PETPS_", "AWS_", "GOOGLE_", "AZURE_", "KAFKA_", "FSSPEC_", "RAY_")
# Files of the kernel, of the machine and of the server's process ({process}).
KERNEL_FILES: Final = (
    "/proc/version", "/proc/loadavg", "/proc/meminfo", "/proc/pressure/cpu", "/proc/pressure/io",
    "/proc/pressure/memory", "/proc/swaps", "/proc/sys/vm/max_map_count", "/proc/sys/vm/swappiness",
    "/proc/sys/vm/overcommit_memory", "/proc/sys/vm/dirty_ratio", "/proc/sys/fs/file-nr",
    "/sys/kernel/mm/transparent_hugepage/enabled", "/proc/{process}/limits",
    "/proc/{process}/status", "/proc/{process}/cgroup", "/proc/{process}/io",
    "/proc/{process}/smaps_rollup", "/proc/{process}/schedstat",
)  # fmt: skip
ABOUT: Final = """A report of `petps report` for support. It has no rows, no keys of rows and no
secrets: passwords, tokens, private keys and credentials in URLs are replaced by "(hidden)".
contents.json lists the files, and what is missing with the reason. Read it before you send it.
"""
_COMPILER: Final = re.compile(rb"GCC: \([^\0\n]{1,80}|[\w ]{0,20}clang version [^\0\n]{1,80}")


@dataclass(frozen=True)
class Member:
    """A file of the report."""

    name: str
    about: str
    content: bytes


@dataclass(frozen=True)
class Report:
    """The files, and why others are missing."""

    members: list[Member]
    left_out: dict[str, str]


@dataclass
class Sources:
    """Gives the parts that the subject does not have."""

    status: Callable[[], Mapping[str, Any]] | None = None
    """Of a server that is not on this machine."""
    metrics_url: str | None = None
    log_file: str | None = None
    journal_unit: str | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


_Part = Callable[[], Any]


def collect(subject: Subject, sources: Sources, seconds: float | None = None) -> Report:
    """Return the files of a report. What fails, or takes too long, is left out with the reason.

    seconds: by default REPORT_SECONDS.
    """
    seconds = REPORT_SECONDS if seconds is None else seconds
    config, environment = subject.config, sources.environment
    secrets = in_time(lambda: known_secrets(config, environment), REPORT_SECONDS, "a secret's file")
    scrubber = Scrubber(secrets)
    works = [(name, about, Work(part)) for name, about, part in _parts(subject, sources, scrubber)]
    deadline = time.monotonic() + seconds
    members = [Member("README.txt", "what this is", ABOUT.encode())]
    left_out: dict[str, str] = {}
    for name, about, work in works:
        try:
            content = _encode(work.result(deadline), scrubber)
        except Exception as error:  # whatever it is, the other parts are still of use
            is_ours = isinstance(error, PetpsError)
            text = str(error) if is_ours else f"{type(error).__name__}: {error}"
            left_out[name] = scrubber.text(text)
            continue
        if content is not None:
            members.append(Member(name, about, content))
    contents = {
        "made_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "files": {member.name: member.about for member in members},
        "left_out": left_out,
    }
    members.insert(1, Member("contents.json", "what is here, and what is missing", _json(contents)))
    return Report(members, left_out)


def _encode(value: Any, scrubber: Scrubber) -> bytes | None:
    """Return a part as a file. A text that is too long loses its begin."""
    if value is None:
        return None
    if isinstance(value, str):
        content = scrubber.text(value).encode("utf-8", "replace")
        return content[-MEMBER_BYTES_MAX:]
    content = _json(scrubber.value(value))
    if len(content) > MEMBER_BYTES_MAX:
        raise InvalidArgument(f"it has {len(content):,} bytes, more than {MEMBER_BYTES_MAX:,}")
    return content


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, default=str) + "\n").encode()


def _parts(
    subject: Subject, sources: Sources, scrubber: Scrubber
) -> Iterable[tuple[str, str, _Part]]:
    """Yield (file, what it has, how to collect it). A part that returns None does not exist."""

    def status() -> Any:
        if sources.status is not None:
            return sources.status()
        if subject.pool_path is None:
            return None
        if subject.status is None and subject.holders:
            raise NotFound(f"process {subject.holders[0]} has the pool open and does not answer")
        return subject.status

    def incidents() -> Any:
        value = status()
        return None if value is None else list(value.get("incidents", []))

    def findings() -> Any:
        return [finding.as_json() for finding in diagnose(subject)]

    yield "doctor.json", "findings of petps doctor", findings
    yield "configuration.json", "the effective configuration", lambda: _configuration(subject)
    yield "environment.json", "environment variables", lambda: _environment(sources.environment)
    yield "versions.json", "versions of petps, Python and packages", _versions
    yield "build.json", "how the native code was built, and what it uses", _build
    yield (
        "pool.json",
        "the superblock: tables, formats; no rows and no keys",
        lambda: _pool(subject),
    )
    yield "status.json", "the status of the server", status
    yield "incidents.json", "incidents that the server has noticed", incidents
    yield (
        "metrics.txt",
        "the metrics of the server",
        lambda: read_metrics(
            subject,
            sources.metrics_url,
            sources.environment,
            is_remote=sources.status is not None,
        ),
    )
    yield "machine.txt", "limits, memory and pressure, from the kernel", lambda: _kernel(subject)
    yield "mounts.txt", "mounts of the pool, the log and the stores", lambda: _mounts(subject)
    if sources.log_file is not None:
        log_file = sources.log_file
        yield "log.txt", f"the last lines of {log_file}", lambda: _end_of(log_file)
    if sources.journal_unit is not None:
        unit = sources.journal_unit
        yield "journal.txt", f"the last lines of {unit} in the journal", lambda: _journal(unit)


def _configuration(subject: Subject) -> Any:
    if subject.config is None:
        return None if subject.config_error is None else {"error": subject.config_error}
    # Its secrets are hidden as in every other part, by their names and by what they are.
    return {"file": subject.config_path, "values": subject.config.model_dump(mode="json")}


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    shown = {name: environment[name] for name in SHOWN_VARIABLES if name in environment}
    others = [name for name in environment if name.startswith(LISTED_VARIABLES)]
    return {**dict.fromkeys(sorted(others), "(set, not shown)"), **shown}


def _versions() -> dict[str, Any]:
    from petps import _native

    packages: dict[str, str] = {}
    for name in ("petps", "petps-client"):
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for requirement in [name, *requirements]:
            match = re.match(r"[\w.\-]+", requirement)
            if match is not None:
                try:
                    packages[match[0]] = metadata.version(match[0])
                except metadata.PackageNotFoundError:
                    packages[match[0]] = "not installed"
    return {
        "software": _native.software,
        "formats": _native.formats(),
        "python": sys.version,
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "packages": dict(sorted(packages.items())),
    }


def _build() -> dict[str, Any]:
    from petps import _native

    path = Path(str(_native.__file__))
    content = path.read_bytes()
    compilers = {match.decode("ascii", "replace") for match in _COMPILER.findall(content)}
    maps = Path("/proc/self/maps").read_text()
    libraries = sorted(set(re.findall(r"(/\S+\.so[.\d]*)$", maps, re.MULTILINE)))
    return {
        "software": _native.software,
        "extension": path.name,
        "bytes": len(content),
        "fingerprint": hashlib.sha256(content).hexdigest()[:16],
        "compilers": sorted(compilers),
        "sanitizers": [name for name in (b"__asan_init", b"__tsan_init") if name in content],
        "processor_features": dict(_native.cpu_features()),
        "libraries": [name for name in libraries if "/python3" not in name],
    }


def _pool(subject: Subject) -> Any:
    path = subject.pool_path
    if path is None:
        return None
    values = {"path": path, **subject.facts.superblock(path).as_json()}
    found = subject.facts.file(path)
    values["file"] = None if found is None else vars(found)
    values["held_by"] = subject.holders
    damage = subject.facts.text(f"{path}.damage")
    values["rows_removed_as_damaged"] = 0 if damage is None else missing_rows(damage)[0]
    return values


def _kernel(subject: Subject) -> str:
    process = next((str(holder) for holder in subject.holders if holder), "self")
    texts = []
    for pattern in KERNEL_FILES:
        path = pattern.format(process=process)
        text = subject.facts.text(path)
        texts.append(f"==> {path}\n" + ("(cannot be read)\n" if text is None else text))
    processor = (subject.facts.text("/proc/cpuinfo") or "").split("\n\n")[0]
    return "".join(texts) + f"==> /proc/cpuinfo, the first processor\n{processor}\n"


def _mounts(subject: Subject) -> str:
    from petps.doctor.checks.file_system import other_folders

    folders = [("here", os.getcwd()), *other_folders(subject)]
    if subject.pool_path is not None:
        folders.append(("pool", os.path.dirname(subject.pool_path)))
    lines = []
    for name, folder in folders:
        mount, space = mount_of(subject.facts, folder), subject.facts.space(folder)
        if mount is not None:
            options = ",".join(sorted(mount.options))
            lines.append(f"{name}: {folder} on {mount.at}: {mount.kind} {mount.source} {options}")
        if space is not None:
            lines.append(
                f"    free {space.free:,} of {space.total:,} bytes, {space.free_inodes:,} inodes"
            )
    return "\n".join(lines) + "\n"


def _end_of(path: str) -> str:
    """Return the last lines of a log."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_BYTES))
            lines = deque(file.read(LOG_BYTES).splitlines(keepends=True), maxlen=LOG_LINES)
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}") from None
    if size > LOG_BYTES and lines:
        lines.popleft()  # its begin is missing
    return b"".join(lines).decode("utf-8", "replace")


def _journal(unit: str) -> str:
    """Return the last lines of a unit of systemd."""
    import subprocess

    command = ["journalctl", f"--unit={unit}", f"--lines={LOG_LINES}", "--no-pager", "--quiet"]
    try:
        done = subprocess.run(
            [*command, "--output=short-iso"], capture_output=True, timeout=REPORT_SECONDS / 2
        )
    except FileNotFoundError:
        raise NotFound("there is no journalctl on this machine") from None
    if done.returncode != 0:
        raise InvalidArgument(f"journalctl: {done.stderr.decode('utf-8', 'replace').strip()}")
    return done.stdout[-LOG_BYTES:].decode("utf-8", "replace")
