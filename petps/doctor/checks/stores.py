"""Checks of a log in a folder, of checkpoint stores, bases and dead letters."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from petps.config import hide_password
from petps.delta import is_kafka
from petps.doctor.checks.file_system import nearest_folder
from petps.doctor.finding import Finding, fault, note, ok, warning
from petps.doctor.registry import check
from petps.doctor.subject import Subject
from petps.errors import PetpsError

TOPIC: Final = "Logs and stores"


@check(
    "log-folder",
    TOPIC,
    looks_at="the folder of ingest.log: whether there is a log, and its number of partitions",
    why="A server waits for a log that does not exist yet, and refuses one with another number of "
    "partitions.",
)
def log_folder(subject: Subject) -> Iterator[Finding]:
    """Read the partitions of a log in a folder."""
    config = subject.config
    log = None if config is None else config.ingest.log
    if config is None or log is None or is_kafka(log):
        return
    if subject.facts.file(log) is None:
        yield warning(f"there is no log at {log} yet", "start the publisher, or correct ingest.log")
        return
    if not subject.facts.may(log, "rx"):
        yield fault(f"this user may not read {log}", "let the server's user read the log's folder")
        return
    partitions = subject.facts.log_partitions(log)  # a PetpsError is a fault
    if partitions != config.model.partitions:
        yield fault(
            f"the log {log} has {partitions} partitions, and the model has "
            f"{config.model.partitions}",
            "use a log with as many partitions as the model has: that number never changes",
        )
    else:
        yield ok(f"{log} has {partitions} partitions")


@check(
    "checkpoint-store",
    TOPIC,
    looks_at="ingest.store: whether it answers and has versions",
    why="After a gap in the log, a partition stays stopped until the server has caught up to a "
    "version of the store, or to a base.",
)
def checkpoint_store(subject: Subject) -> Iterator[Finding]:
    """List the store."""
    config = subject.config
    url = None if config is None else config.ingest.store
    if url is None:
        if config is not None and config.ingest.log is not None:
            bases = config.bases()
            if bases is None or not subject.facts.names(str(bases)):
                yield note(
                    "there is no ingest.store, and no base in ingest.bases: after a gap in the "
                    "log, a partition waits for the next base",
                    "set ingest.store to the trainer's checkpoint store",
                )
        return
    shown = hide_password(url)
    try:
        store = subject.facts.store(url)
    except PetpsError as error:
        yield fault(f"ingest.store {shown}: {error}", _CREDENTIALS)
        return
    if not store.versions:
        yield warning(
            f"ingest.store {shown} has no version", "let the trainer write a checkpoint there"
        )
    else:
        yield ok(f"{shown} has {store.versions} versions")


_CREDENTIALS: Final = "check the URL, and the credentials in the environment of the server's user"


@check(
    "backup-store",
    TOPIC,
    looks_at="backup.store: whether it answers, and whether it can be written",
    why="Without backups, a lost disk loses every row that pushes wrote.",
)
def backup_store(subject: Subject) -> Iterator[Finding]:
    """List the store, and look whether it can be written."""
    config = subject.config
    if config is None:
        return
    url = config.backup_store()
    if url is None:
        yield note("there is no backup.store, so no backups are made", "docs/how-to/back-up.md")
        return
    shown = hide_password(url)
    try:
        store = subject.facts.store(url)
    except PetpsError as error:
        yield fault(f"backup.store {shown}: {error}", _CREDENTIALS)
        return
    if store.is_writable is False:
        yield fault(
            f"backup.store {shown} cannot be written",
            "let the server's user write it: " + str(store.details.get("error", "permissions")),
        )
    elif store.is_writable is None:
        yield ok(f"{shown} answers; `petps doctor --probe-writes` also tries to write it")
    else:
        yield ok(f"{shown} answers and can be written")
    backup = (subject.status or {}).get("backup") or {}
    if backup.get("error"):
        yield fault(f"the newest backup failed: {backup['error']}", "docs/how-to/back-up.md")


@check(
    "folders",
    TOPIC,
    looks_at="the folders of dead letters and bases",
    why="A message that cannot be read is kept as a dead letter; without a place for it, its "
    "partition stops.",
)
def folders(subject: Subject) -> Iterator[Finding]:
    """Look whether the folders can be written, or made."""
    config = subject.config
    if config is None or config.ingest.log is None:
        return
    places = [config.dead_letters()]  # a PetpsError (a device without pool.folder) is a fault
    findings = []
    for place in places:
        if "://" in place or is_kafka(place):
            continue
        folder = nearest_folder(subject, os.path.abspath(place))
        if not subject.facts.may(folder, "wx"):
            findings.append(
                fault(f"this user may not write {folder}", f"let the server's user write {place}")
            )
    bases = config.bases()
    exists = bases is not None and subject.facts.file(str(bases)) is not None
    if exists and not subject.facts.may(str(bases), "rx"):
        findings.append(
            fault(f"this user may not read {bases}", "let the server's user read the bases")
        )
    yield from findings or [ok("the folders of dead letters and bases can be used")]
