"""Checks of the configuration: is it valid, and are its ports free?"""

from __future__ import annotations

import ipaddress
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from petps.doctor.finding import Finding, fault, note, ok, warning
from petps.doctor.registry import check
from petps.doctor.subject import Subject
from petps.errors import PetpsError

TOPIC: Final = "The configuration"
ETCD_MEMBERS: Final = 3  # the fewest of which one may die
LISTEN: Final = "0A"  # state of a socket in /proc/net/tcp
OTHERS_READ: Final = 0o044


@check(
    "configuration",
    TOPIC,
    looks_at="the configuration file: its keys, its doors, its tables",
    why="With a wrong key or an unsafe door the server does not start. Keys of tables that exist "
    "already have no effect.",
)
def configuration(subject: Subject) -> Iterator[Finding]:
    """Check the file as a server does, and compare its tables with those of the pool."""
    if subject.config_error is not None:
        yield fault(subject.config_error, "`petps config` lists every key")
        return
    config = subject.config
    if config is None:
        return
    findings = []
    try:
        config.check_doors()
    except PetpsError as error:
        findings.append(fault(str(error), "docs/how-to/run-with-tls.md"))
    for risk in config.risks():
        if config.server.insecure:
            findings.append(
                warning(f"server.insecure accepts that {risk}", "docs/how-to/run-with-tls.md")
            )
    if config.kafka.get("sasl.password") is not None:
        path = subject.config_path
        found = None if path is None else subject.facts.file(path)
        if found is not None and found.mode & OTHERS_READ:
            findings.append(
                warning(
                    f"{path} has mode {found.mode:04o} and a password: others may read it",
                    f"chmod go-r {path}, or write sasl.password.file",
                )
            )
    findings += _different_tables(subject)
    yield from findings or [ok(f"{subject.config_path or 'the configuration'} is valid")]


def _different_tables(subject: Subject) -> Iterator[Finding]:
    """Yield what the pool's tables have and the configuration says otherwise."""
    config, superblock = subject.config, subject.superblock
    if config is None or superblock is None or not superblock.tables:
        return
    for name, table in config.tables.items():
        records = [record for record in superblock.tables if record.name == name]
        if not records:
            yield note(
                f"table '{name}' is in the configuration and not in the pool",
                f"petps create --config {subject.config_path} --add",
            )
        for record in records:
            wanted = (table.dim, table.dtype, table.feed)
            if wanted != (record.dim, record.dtype, record.feed):
                yield warning(
                    f"table '{name}' of {record.instance} is {record.dim} x {record.dtype}, fed by "
                    f"{record.feed}, and the configuration says {table.dim} x {table.dtype}, "
                    f"{table.feed}: that has no effect",
                    "change the configuration, or export the pool and load it into a new one",
                )
    partitions = {superblock.partitions.get(record.instance) for record in superblock.tables}
    partitions &= {count for name, count in superblock.partitions.items()
                   if name.partition("@")[0] == config.model.name}  # fmt: skip
    for count in partitions - {config.model.partitions}:
        yield warning(
            f"the model has {count} partitions, and model.partitions is {config.model.partitions}: "
            "that has no effect",
            f"set model.partitions to {count}",
        )


@check(
    "shard-map",
    TOPIC,
    looks_at="the file of server.shard_map: whether it can be used, and names this server",
    why="A server that the map does not name owns no partition and serves nothing. With another "
    "number of partitions than the model's it does not start.",
)
def shard_map(subject: Subject) -> Iterator[Finding]:
    """Read the map as a server does."""
    config = subject.config
    if config is None or config.server.shard_map is None:
        return
    path, server = config.server.shard_map, config.server
    found = subject.facts.shard_map(str(path))  # a PetpsError is a fault
    address = server.address or f"{server.host}:{server.port}"
    if found.owners.partitions != config.model.partitions:
        yield fault(
            f"{path} has {found.owners.partitions} partitions, and the model has "
            f"{config.model.partitions}",
            "make the map for the model's number of partitions",
        )
    elif not found.names(address):
        yield fault(
            f"{path} does not name {address}, so this server owns nothing",
            "set server.address to an address of the map, or add the server to the map",
        )
    else:
        owned = len(found.owned_by(address))
        yield ok(f"{path} gives {address} {owned} of {found.owners.partitions} partitions")


@check(
    "etcd",
    TOPIC,
    looks_at="the endpoints of [cluster]: how many there are, and whether they are encrypted",
    why="While etcd is away nothing that is served changes, but no partition moves and no lost "
    "server is replaced. Who can write in etcd decides which server answers for which key.",
)
def etcd(subject: Subject) -> Iterator[Finding]:
    """Look at the endpoints, and ask none of them."""
    config = subject.config
    if config is None or not config.cluster.endpoints:
        return
    cluster = config.cluster
    findings = []
    if len(cluster.endpoints) < ETCD_MEMBERS:
        findings.append(
            note(
                f"cluster.endpoints names {len(cluster.endpoints)} of etcd's members: while these "
                "are down, no partition moves",
                "run three members on machines of their own, and name all of them",
            )
        )
    plain = [
        url
        for url in cluster.endpoints
        if url.startswith("http://") and not url.startswith(("http://127.", "http://[::1]"))
    ]
    if plain:
        findings.append(
            warning(
                f"{', '.join(dict.fromkeys(plain))} is not encrypted: who is between can change "
                "which server answers for which key",
                "give etcd a certificate, and write https:// in cluster.endpoints",
            )
        )
    yield from findings or [ok(f"[cluster] names {len(cluster.endpoints)} members of etcd")]


@check(
    "host-address",
    TOPIC,
    looks_at="server.host: whether it is an address of this machine",
    why="A server can listen on no other address.",
)
def host_address(subject: Subject) -> Iterator[Finding]:
    """Ask whether a socket may have the address."""
    if subject.config is None:
        return
    host = subject.config.server.host
    if subject.facts.has_address(host):
        yield ok(f"{host} is an address of this machine")
    else:
        yield fault(
            f"server.host {host} is no address of this machine",
            "`ip address` lists them; 0.0.0.0 and :: are all of them",
        )


@dataclass(frozen=True)
class Listener:
    """A socket of TCP that listens."""

    address: str
    port: int
    inode: int
    user: int


@check(
    "ports",
    TOPIC,
    looks_at="the ports of the server: free, or held by whom",
    why="The server does not start if another program listens on one of its ports.",
)
def ports(subject: Subject) -> Iterator[Finding]:
    """Compare the ports of the configuration with what listens."""
    if subject.config is None:
        return
    server = subject.config.server
    wanted: dict[str, int] = {"server.port": server.port}
    if server.grpc:
        wanted["server.grpc_port"] = server.grpc_port
    if server.http:
        wanted["server.http_port"] = server.http_port
    if server.admin_port is not None:
        wanted["server.admin_port"] = server.admin_port
    listening = list(listeners(subject))
    # A server that has secrets shows its files to root only (petps/server/process.py).
    users_of_server = {_user_of(subject, holder) for holder in subject.holders}
    free: list[str] = []
    users: dict[int, str] = {}
    for name, port in wanted.items():
        if port == 0:
            free.append(f"{name} any")
            continue
        if port in users:
            yield fault(f"{name} and {users[port]} are both {port}", "give each its own port")
            continue
        users[port] = name
        taken = [
            listener
            for listener in listening
            if listener.port == port and _meet(listener.address, server.host)
        ]
        if not taken:
            free.append(f"{name} {port}")
            continue
        owner = subject.facts.socket_owner(taken[0].inode)
        if owner in subject.holders or (owner is None and taken[0].user in users_of_server):
            free.append(f"{name} {port} (this pool's server has it)")
        elif owner is None:
            yield fault(
                f"{name} {port} is in use by a process that this user may not see",
                f"`ss -ltnp 'sport = :{port}'` as root names it; stop it, or choose another port",
            )
        else:
            command = (subject.facts.text(f"/proc/{owner}/comm") or "").strip()
            yield fault(
                f"{name} {port} is in use by process {owner} ({command})",
                "stop that process, or choose another port",
            )
    if free:
        yield ok("ports that the server can use: " + ", ".join(free))


def _user_of(subject: Subject, process: int) -> int | None:
    status = subject.facts.text(f"/proc/{process}/status") or ""
    match = re.search(r"^Uid:\s+(\d+)", status, re.MULTILINE)
    return None if match is None else int(match[1])


def listeners(subject: Subject) -> Iterator[Listener]:
    """Yield the sockets of TCP that listen on this machine."""
    for name in ("tcp", "tcp6"):
        for line in (subject.facts.text(f"/proc/net/{name}") or "").splitlines()[1:]:
            words = line.split()
            if len(words) > 9 and words[3] == LISTEN:
                address, _, port = words[1].partition(":")
                yield Listener(_address_of(address), int(port, 16), int(words[9]), int(words[7]))


def _address_of(text: str) -> str:
    """Return an address as of /proc/net/tcp: words of 32 bits, each in the machine's order."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    content = struct.pack(f"={len(words)}I", *words)
    address = ipaddress.ip_address(content)
    mapped = getattr(address, "ipv4_mapped", None)  # gRPC listens on IPv4 with sockets of IPv6
    return str(mapped or address)


def _meet(listening: str, host: str) -> bool:
    """Return whether two listeners with these addresses exclude each other."""
    anywhere = ("0.0.0.0", "::")
    return listening == host or listening in anywhere or host in anywhere
