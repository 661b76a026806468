"""Checks of certificates and of the access file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from petps.config.doors import is_loopback
from petps.doctor.finding import Finding, fault, note, ok, warning
from petps.doctor.registry import check
from petps.doctor.subject import Subject

TOPIC: Final = "Certificates and grants"
DAY: Final = 86_400.0
SOON: Final = 14 * DAY
OTHERS_READ: Final = 0o004
GROUP_OR_OTHERS: Final = 0o077
OTHERS_WRITE: Final = 0o022


@check(
    "tls-files",
    TOPIC,
    looks_at="the files of [tls]: whether a server could use them, their names and their ends",
    why="With a certificate that is expired, or whose key is another one, the server does not "
    "start, and clients refuse it.",
)
def tls_files(subject: Subject) -> Iterator[Finding]:
    """Read the files as a server does: a handshake in memory tests them."""
    if subject.config is None or subject.config.tls.certificate is None:
        return
    config = subject.config
    facts = subject.facts.certificates(config.tls)  # a PetpsError is a fault
    now = subject.facts.now()
    names = ", ".join(facts.names) or "no name"
    yield from _end(f"{config.tls.certificate} ({names})", facts.expires_at, now)
    for authority, end in facts.client_authorities:
        yield from _end(f"the CA '{authority}' in {config.tls.client_ca}", end, now)
    host = (config.server.address or "").rpartition(":")[0].strip("[]")
    if host and host not in facts.names and not _has_wildcard(facts.names, host):
        yield warning(
            f"server.address is at {host}, and the certificate has the names {names}",
            f"make a certificate with the name {host}, or clients set PETPS_TLS_SERVER_NAME",
        )
    elif not facts.names:
        yield warning("the certificate has no name", "make one with subjectAltName=DNS:HOST")


def _end(what: str, end: float, now: float) -> Iterator[Finding]:
    at = time.strftime("%Y-%m-%d %H:%M", time.gmtime(end))
    if end <= now:
        yield fault(f"{what} expired at {at} UTC", "replace it: docs/how-to/run-with-tls.md")
    elif end <= now + SOON:
        yield warning(
            f"{what} expires at {at} UTC, in {(end - now) / DAY:.0f} days",
            "replace it: the server uses new files at once (docs/how-to/run-with-tls.md)",
        )
    else:
        yield ok(f"{what} is valid until {at} UTC")


def _has_wildcard(names: object, host: str) -> bool:
    parent = host.partition(".")[2]
    return bool(parent) and f"*.{parent}" in list(names)  # type: ignore[call-overload]


@check(
    "tls-key-mode",
    TOPIC,
    looks_at="who may read the private key of [tls]",
    why="Whoever has the key can pretend to be this server.",
)
def tls_key_mode(subject: Subject) -> Iterator[Finding]:
    """Look at the permissions of the key's file."""
    if subject.config is None or subject.config.tls.key is None:
        return
    yield from _mode(subject, subject.config.tls.key, "the private key")


def _mode(subject: Subject, path: Path, what: str) -> Iterator[Finding]:
    found = subject.facts.file(str(path))
    if found is None:
        yield fault(f"there is no file {path}", "docs/how-to/run-with-tls.md")
    elif found.mode & (OTHERS_READ | OTHERS_WRITE):
        yield fault(f"{path} has mode {found.mode:04o}: others may use {what}", f"chmod 600 {path}")
    elif found.mode & GROUP_OR_OTHERS:
        yield note(f"{path} has mode {found.mode:04o}: its group may read {what}")
    else:
        yield ok(f"{path} has mode {found.mode:04o}")


@check(
    "access-file",
    TOPIC,
    looks_at="the access file: its permissions, its grants and their ends",
    why="Whoever may write it can give himself every right. A caller whose grant has ended is "
    "refused.",
)
def access_file(subject: Subject) -> Iterator[Finding]:
    """Look at the grants, of which no hash is shown."""
    if subject.config is None or subject.config.access.file is None:
        return
    path, server = subject.config.access.file, subject.config.server
    grants = subject.facts.grants(str(path))  # a PetpsError is a fault
    found = subject.facts.file(str(path))
    if found is not None and found.mode & OTHERS_WRITE:
        yield fault(f"{path} has mode {found.mode:04o}: others may write it", f"chmod 600 {path}")
    elif found is not None and found.mode & OTHERS_READ:
        yield warning(f"{path} has mode {found.mode:04o}: others may read it", f"chmod 600 {path}")
    now = subject.facts.now()
    for grant in grants:
        if 0 < grant.expires_at <= now:
            yield warning(
                f"the grant '{grant.name}' has ended",
                f"petps token revoke {grant.name} --file {path}, and give a new one if needed",
            )
        elif 0 < grant.expires_at <= now + SOON:
            yield note(
                f"the grant '{grant.name}' ends in {(grant.expires_at - now) / DAY:.0f} days",
                "give its owner a new token (`petps token new`)",
            )
    live = [grant for grant in grants if not 0 < grant.expires_at <= now]
    if not live:
        yield fault("no grant is valid, so every caller is refused", "`petps token new`")
    elif server.admin_port is not None and not any("admin" in grant.roles for grant in live):
        yield fault(
            "server.admin_port is set, and no grant has the role admin",
            "petps token new --role admin",
        )
    else:
        yield ok(f"{path}: {len(live)} of {len(grants)} grants are valid")


@check(
    "token-on-open-port",
    TOPIC,
    looks_at="whether tokens cross a network without encryption",
    why="Whoever reads the network has the token.",
)
def token_on_open_port(subject: Subject) -> Iterator[Finding]:
    """Look for tokens without TLS beyond loopback."""
    if subject.config is None or subject.config.access.file is None:
        return
    config = subject.config
    if config.tls.certificate is None and not is_loopback(config.server.host):
        yield warning(
            f"the ports of {config.server.host} take tokens without TLS; clients send none",
            "set tls.certificate and tls.key",
        )
    else:
        yield ok("tokens are sent encrypted, or within this machine")
