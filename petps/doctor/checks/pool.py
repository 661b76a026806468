"""Checks of the pool: its file, its superblock, its lock, its damaged rows."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Final

from petps.admin.socket import MAX_SOCKET_BYTES, socket_of
from petps.doctor.finding import Finding, fault, note, ok, warning
from petps.doctor.registry import check
from petps.doctor.subject import Subject

TOPIC: Final = "The pool"
OTHERS_WRITE: Final = 0o022


@check(
    "pool-file",
    TOPIC,
    looks_at="the pool's file or device, its folder and who may write them",
    why="The server's user must write the pool and its folder, which gets the admin socket, the "
    "audit log and the list of damaged rows. Whoever else writes the pool can change any row.",
)
def pool_file(subject: Subject) -> Iterator[Finding]:
    """Look at the permissions of the pool and of its folder."""
    path = subject.pool_path
    if path is None:
        return
    found = subject.facts.file(path)
    folder = path.rpartition("/")[0] or "/"
    if found is None:
        yield fault(f"there is no pool at {path}", "create it with `petps create`")
        return
    if found.kind not in ("file", "device"):
        yield fault(f"{path} is no file and no device", "name the pool's file in pool.path")
        return
    findings = []
    if not subject.facts.may(path, "rw"):
        findings.append(
            fault(
                f"this user may not write {path}", "run this, and the server, as the pool's owner"
            )
        )
    if subject.facts.user() == 0 and found.owner != 0:
        findings.append(
            note(
                f"you are root, and {path} belongs to uid {found.owner}, whose server may have "
                "fewer rights than these checks",
                f"run this as that user: `sudo -u '#{found.owner}' petps doctor ...`",
            )
        )
    if found.mode & OTHERS_WRITE:
        findings.append(
            warning(f"{path} has mode {found.mode:04o}: others may write it", f"chmod go-w {path}")
        )
    if found.kind == "file":
        if not subject.facts.may(folder, "wx"):
            findings.append(
                fault(
                    f"this user may not write the folder {folder}",
                    "let the server's user own the folder of the pool",
                )
            )
        about = subject.facts.file(folder)
        if about is not None and about.mode & OTHERS_WRITE:
            findings.append(
                warning(
                    f"the folder {folder} has mode {about.mode:04o}: others may replace the pool",
                    f"chmod go-w {folder}",
                )
            )
        socket = str(socket_of(path))
        if len(socket.encode()) > MAX_SOCKET_BYTES:
            findings.append(
                note(
                    f"the path {socket} is longer than a socket's may be: commands cannot "
                    "administer the server by the pool's path",
                    "move the pool to a shorter path, or set server.admin_port",
                )
            )
    yield from findings or [ok(f"{path}, mode {found.mode:04o}")]


@check(
    "pool-format",
    TOPIC,
    looks_at="the superblock: its copies, its format, and how the pool was closed",
    why="A pool of a newer format needs a newer petps. A pool with durability 'process' that lost "
    "power is not served until it is verified.",
)
def pool_format(subject: Subject) -> Iterator[Finding]:
    """Read the superblock, without opening the pool."""
    facts, path = subject.facts, subject.pool_path
    if path is None or facts.file(path) is None:
        return
    superblock = facts.superblock(path)  # a PetpsError is a fault
    known = facts.pool_format()
    if superblock.format > known:
        yield fault(
            f"{path} has format {superblock.format}, and this petps knows formats up to {known}",
            "run the petps that wrote it, or a newer one",
        )
        return
    if superblock.broken_copies and not subject.holders:
        yield note(
            "one copy of the superblock is not whole, as after a crash; the other one counts"
        )
    if subject.holders:
        yield ok(f"format {superblock.format}, in use")
    elif superblock.is_clean:
        yield ok(f"format {superblock.format}, closed cleanly")
    elif superblock.durability == "process" and superblock.boot_id != _boot_id(subject):
        yield fault(
            "the machine went down while the pool was open, and its durability is 'process'",
            f"petps verify {path}, then petps verify --accept {path} (docs/how-to/operate.md)",
        )
    else:
        yield note(
            "the last server did not close the pool; the next one recovers it and serves at once"
        )


def _boot_id(subject: Subject) -> bytes:
    text = (subject.facts.text("/proc/sys/kernel/random/boot_id") or "").strip()
    try:
        return uuid.UUID(text).bytes
    except ValueError:
        return b""  # equals no boot


@check(
    "pool-lock",
    TOPIC,
    looks_at="the processes that have the pool open",
    why="One process writes a pool. A second server does not start while another one has it.",
)
def pool_lock(subject: Subject) -> Iterator[Finding]:
    """Name the processes that hold the pool's lock."""
    if subject.pool_path is None or subject.facts.file(subject.pool_path) is None:
        return
    if not subject.holders:
        yield ok("no process has the pool open")
        return
    for holder in subject.holders:
        command = (subject.facts.text(f"/proc/{holder}/comm") or "").strip()
        name = f"process {holder} ({command})" if command else f"process {holder}"
        if holder == 0:
            name = "a process of another namespace"
        if subject.status is not None:
            yield ok(f"{name} serves the pool")
        else:
            yield warning(
                f"{name} has the pool open and does not answer on {socket_of(subject.pool_path)}",
                "wait until it serves, or see what the process is; another server cannot start "
                "until it ends",
            )


@check(
    "server-state",
    TOPIC,
    looks_at="what the running server says of itself",
    why="A server that is not ready still answers pulls, with rows that may be old.",
)
def server_state(subject: Subject) -> Iterator[Finding]:
    """Report what the status of the server has."""
    status = subject.status
    if status is None:
        return
    findings = []
    if status["pool"]["failed"]:
        findings.append(
            fault(
                "a write-back failed, and the pool is read-only until the server is restarted",
                "check the disk first (dmesg, smartctl), then restart the server",
            )
        )
    if status.get("unready"):
        findings.append(
            warning(f"the server is not ready: {status['unready']}", "docs/runbook/not-ready.md")
        )
    for incident in status.get("incidents", []):
        findings.append(warning(f"incident: {incident}", "see the server's log"))
    for table in status.get("tables", []):
        if table["rows"] > 0.85 * table["capacity"]:
            findings.append(
                warning(
                    f"table '{table['name']}' of {table['instance']} is "
                    f"{100 * table['rows'] / table['capacity']:.0f} % full",
                    "docs/how-to/table-full.md",
                )
            )
    if status.get("insecure"):
        findings.append(warning("the ports lack TLS or credentials", "docs/how-to/run-with-tls.md"))
    yield from findings or [ok(f"the server is ready ({status['software']})")]


@check(
    "damaged-rows",
    TOPIC,
    looks_at="POOL.damage, the list of rows that were damaged and removed",
    why="Pulls of these keys get the default row. Damage seldom comes alone: look for its cause.",
)
def damaged_rows(subject: Subject) -> Iterator[Finding]:
    """Count the listed keys, of which none is shown."""
    if subject.pool_path is None or subject.superblock is None:
        return
    path = _damage_list(subject)
    text = None if path is None else subject.facts.text(path)
    if text is None:
        yield ok("no damaged row is listed")
        return
    count, pool_uuid = missing_rows(text)
    if pool_uuid is None:
        yield fault(
            f"{path} does not begin with the uuid of its pool, so it cannot be used",
            "put the right list back, or move this one away: its rows then count as never written",
        )
    elif pool_uuid != subject.superblock.uuid:
        yield note(f"{path} is of another pool, and the next damaged row replaces it")
    elif count:
        yield warning(
            f"{count:,} rows were damaged and removed",
            "look for the cause (dmesg, smartctl); docs/how-to/operate.md says how rows come back",
        )
    else:
        yield ok("no damaged row is listed")


def _damage_list(subject: Subject) -> str | None:
    path, config = subject.pool_path, subject.config
    if path is None or not subject.is_device:
        return f"{path}.damage"
    folder = None if config is None else config.pool.folder
    return None if folder is None else str(folder / f"{path.rpartition('/')[2]}.damage")


def missing_rows(text: str) -> tuple[int, str | None]:
    """Return how many keys a list of damaged rows has, and the uuid of its pool.

    The uuid is None if the list does not begin with it.
    """
    pool_uuid: str | None = None
    missing: set[tuple[int, int]] = set()
    for number, line in enumerate(text.split("\n")[:-1]):
        try:
            values = json.loads(line)
            if number == 0:
                pool_uuid = str(values["pool"])
            elif "ended" in values:
                missing.discard((values["table"], values["key"]))
            elif "key" in values:
                missing.add((values["table"], values["key"]))
        except (ValueError, KeyError, TypeError):
            if number == 0:
                return 0, None
    return len(missing), pool_uuid
