"""The facts of the real machine: what the checks see of pools, files, sockets and stores."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest

import petps
from petps import _native, config
from petps.checkpoint import Store, Table
from petps.delta import open_log
from petps.delta.kafka import client as kafka_client
from petps.doctor import Machine, Subject
from petps.doctor.checks.configuration import listeners
from petps.doctor.facts import StoreFacts
from petps.doctor.machine import EXTENT, FIEMAP, FIEMAP_EXTENT_SHARED
from petps.doctor.superblock import COPY_BYTES, parse, read_superblock
from petps.errors import DataLoss, InvalidArgument, NotFound, Unavailable
from petps.server import Serving
from petps.server.access_file import AccessFile, Entry, hash_of
from tests.certificates import Authority
from tests.kafka.broker import Broker
from tests.python.native.superblock import forge
from tests.s3.server import BUCKET, Server

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "pool"


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    path = tmp_path / "my.pool"
    with petps.create(path, durability="process") as opened:
        opened.create_table("items", dim=4, capacity=1000)
        opened.create_table("fed", dim=8, dtype="int8", capacity=50, feed="delta", expire_after=60)
        opened.push("items", [1, 2, 3], [[0.0] * 4] * 3)
    return path


def test_the_superblock_says_what_native_code_says(pool: Path) -> None:
    block = read_superblock(str(pool))
    tables = _native.Tables.open(str(pool), read_only=True)
    try:
        info, native_tables = tables.info(), tables.tables()
        instances = {record.id: record for record in tables.instances()}
    finally:
        tables.close()
    assert (block.uuid, block.generation, block.durability) == (
        info.uuid, info.generation, info.durability,
    )  # fmt: skip
    assert block.is_clean
    assert block.boot_id == UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    assert block.format == _native.formats()["pool"]  # its rows expire
    assert block.unit == info.unit_bytes
    assert block.partitions == {record.name: record.partitions for record in instances.values()}
    for ours, theirs in zip(block.tables, native_tables, strict=True):
        record = theirs.record
        assert (ours.name, ours.instance, ours.dtype, ours.dim) == (
            record.name, instances[record.instance].name, record.dtype, record.dim,
        )  # fmt: skip
        assert (ours.row_bytes, ours.capacity, ours.feed, ours.expire_after) == (
            record.row_bytes, record.capacity, record.feed, record.expire_after,
        )  # fmt: skip
    assert [table.rows for table in block.tables] == [3, 0]


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.lines")), ids=lambda path: path.stem)
def test_the_superblock_of_every_earlier_format_is_read(path: Path) -> None:
    length, *lines = path.read_text().splitlines()
    content = bytearray(int(length))
    for line in lines:
        at, text = line.split()
        content[int(at, 16) : int(at, 16) + len(text) // 2] = bytes.fromhex(text)
    block = parse(bytes(content), path.name)
    assert block.format == int(path.stem[-1])
    assert block.is_clean == path.stem.startswith("clean")
    assert "items" in [table.name for table in block.tables]
    assert block.partitions


def test_an_open_pool_is_held_by_this_process_and_not_closed_cleanly(pool: Path) -> None:
    subject = Subject(Machine(), pool=str(pool))
    assert subject.holders == []
    with petps.open(pool) as opened:
        opened.push("items", [4], [[0.0] * 4])
        subject = Subject(Machine(), pool=str(pool))
        assert subject.holders == [os.getpid()]
        assert not read_superblock(str(pool)).is_clean


def test_a_newer_format_and_damaged_copies(pool: Path) -> None:
    content = bytearray(pool.read_bytes()[: 2 << 20])
    forge(pool, version=9)
    block = read_superblock(str(pool))
    assert (block.format, block.tables) == (9, ())
    pool.write_bytes(content)
    newest = read_superblock(str(pool)).sequence
    at = 0 if content[24:32] == newest.to_bytes(8, "little") else COPY_BYTES
    content[at + 40] ^= 1
    pool.write_bytes(content)
    block = read_superblock(str(pool))
    assert (block.sequence, block.broken_copies) == (newest - 1, 1)
    content[COPY_BYTES - at + 40] ^= 1
    pool.write_bytes(content)
    with pytest.raises(DataLoss, match="no copy of the superblock fits"):
        read_superblock(str(pool))
    pool.write_bytes(b"x" * 100)
    with pytest.raises(DataLoss, match="it is no pool"):
        read_superblock(str(pool))
    with pytest.raises(NotFound, match="petps create"):
        read_superblock(str(pool) + "2")
    with pytest.raises(InvalidArgument, match="no file and no device"):
        read_superblock(str(pool.parent))


def test_files_of_the_kernel_are_read() -> None:
    machine = Machine()
    release = machine.text("/proc/sys/kernel/osrelease")
    assert release is not None  # /proc/sys refuses a read of many bytes
    assert release.strip() == os.uname().release
    assert machine.text("/proc/no-such-file") is None
    assert "self" in machine.names("/proc")
    assert machine.names("/no-such-folder") == []
    assert machine.processors() == len(os.sched_getaffinity(0))
    soft, hard = machine.limit("NOFILE")
    assert soft <= hard


def test_facts_of_files(tmp_path: Path) -> None:
    machine, path = Machine(), tmp_path / "file"
    path.write_bytes(b"x" * 5000)
    path.chmod(0o640)
    found = machine.file(str(path))
    assert found is not None
    assert (found.kind, found.mode, found.size) == ("file", 0o640, 5000)
    assert machine.file(str(tmp_path / "none")) is None
    space = machine.space(str(tmp_path))
    assert space is not None
    assert 0 < space.free <= space.total
    null = machine.file("/dev/null")
    assert null is not None
    assert null.kind == "device"
    assert machine.is_copied_on_write(str(path)) in (False, None)
    assert machine.has_shared_blocks(str(path)) in (False, None)


def test_shared_extents_are_found_in_the_answer_of_fiemap(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    flags = [0] * 300
    calls = []

    def answer(self: Machine, path: str, number: int, request: bytes) -> bytes:
        (start,) = struct.unpack_from("=Q", request)
        calls.append(start)
        part = flags[start : start + 256]
        extents = b"".join(
            EXTENT.pack(start + at, 0, 1, 0, 0, flag, 0, 0, 0) for at, flag in enumerate(part)
        )
        return FIEMAP.pack(start, 0, 0, len(part), 256, 0) + extents

    monkeypatch.setattr(Machine, "_ioctl", answer)
    assert Machine().has_shared_blocks("pool") is False
    assert calls == [0, 256]
    flags[299] = FIEMAP_EXTENT_SHARED
    assert Machine().has_shared_blocks("pool") is True


def test_who_listens_and_where_one_may() -> None:
    machine = Machine()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        inode = os.fstat(listening.fileno()).st_ino
        assert machine.socket_owner(inode) == os.getpid()
    assert machine.socket_owner(1) is None
    assert machine.has_address("127.0.0.1")
    assert not machine.has_address("192.0.2.1")  # of documentation, RFC 5737


def test_the_clock_answers_or_says_that_it_may_not() -> None:
    clock = Machine().clock()
    if clock is None:
        pytest.skip("adjtimex is not allowed here")
    assert clock.error_seconds >= 0


def test_the_status_of_a_server_comes_by_its_socket(pool: Path) -> None:
    settings = config.merge(
        None, {"pool": {"path": pool}, "server": {"port": 0, "http": False, "grpc": False}}, "test"
    )
    with Serving(settings, log=lambda line: None):
        subject = Subject(Machine(), pool=str(pool))
        assert subject.status is not None
        assert subject.status["tables"]
    subject = Subject(Machine(), pool=str(pool))
    assert subject.status is None


def test_certificates_and_what_a_server_would_refuse(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    pair, other = authority.issue("server"), authority.issue("other")
    tls = config.TlsConfig(
        certificate=pair.certificate,
        key=pair.key,
        client_ca=authority.certificate,
        client_certificates="required",
    )
    facts = Machine().certificates(tls)
    assert "localhost" in facts.names
    assert [name for name, _ in facts.client_authorities] == ["ca"]
    assert facts.expires_at > Machine().now()
    with pytest.raises(InvalidArgument, match="does not belong"):
        Machine().certificates(config.TlsConfig(certificate=pair.certificate, key=other.key))


def test_grants_have_no_hash(tmp_path: Path) -> None:
    path = tmp_path / "access.json"
    entry = Entry(
        name="fleet", token_sha256=hash_of("t"), roles=["read"], models="*",
        expires="2030-01-01T00:00:00Z",
    )  # fmt: skip
    AccessFile(path).add(entry)
    (grant,) = Machine().grants(str(path))
    assert (grant.name, list(grant.roles), grant.expires_at) == ("fleet", ["read"], 1_893_456_000)


def test_a_log_in_a_folder(tmp_path: Path) -> None:
    open_log(tmp_path / "log", partitions=3).close()
    assert Machine().log_partitions(str(tmp_path / "log")) == 3
    with pytest.raises(NotFound):
        Machine().log_partitions(str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_a_store_in_a_folder(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    assert Machine().store(store) == StoreFacts(None, True)
    assert not (tmp_path / "store").exists()
    Store.create(store, "default", [Table.of("items", 4)])
    assert Machine().store(store) == StoreFacts(0, True)
    assert Machine().store(f"file://{store}") == StoreFacts(0, True)


def test_a_store_by_s3_is_written_only_on_request(s3: Server) -> None:
    url = f"s3://{BUCKET}/doctor"
    assert Machine().store(url) == StoreFacts(None, None)
    assert Machine(probes_writes=True).store(url) == StoreFacts(None, True)
    from petps.checkpoint.files import open_files

    assert open_files(url).list("") == {}
    with pytest.raises(NotFound, match="no bucket or folder no-such-bucket"):
        Machine().store("s3://no-such-bucket/doctor")


def test_a_topic(kafka: Broker, topic: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"kafka://{kafka.address}/{topic()}"
    with pytest.raises(NotFound):
        Machine().topic(url, {})
    log = open_log(url, partitions=3, options={"topic.retention.ms": "3600000"})
    log.start_offsets([0])  # creates it
    log.close()
    facts = Machine().topic(url, {})
    assert (facts.partitions, facts.replicas, facts.in_sync) == (3, 1, 1)
    assert facts.settings["retention.ms"] == "3600000"
    assert facts.settings["cleanup.policy"] == "delete"
    monkeypatch.setattr(kafka_client, "REQUEST_SECONDS", 0.5)
    with pytest.raises(Unavailable):
        Machine().topic("kafka://127.0.0.1:9/t", {})


def test_a_copy_of_a_pool_is_read_as_it_is(pool: Path, tmp_path: Path) -> None:
    shutil.copy(pool, tmp_path / "copy")
    assert read_superblock(str(tmp_path / "copy")) == read_superblock(str(pool))


@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_listeners_are_read_from_the_kernel(family: int, host: str) -> None:
    with socket.socket(family) as listening:
        try:
            listening.bind((host, 0))
        except OSError:
            pytest.skip(f"this machine has no {host}")
        listening.listen()
        port, inode = listening.getsockname()[1], os.fstat(listening.fileno()).st_ino
        (found,) = (item for item in listeners(Subject(Machine())) if item.inode == inode)
        assert (found.address, found.port, found.user) == (host, port, os.geteuid())
        assert inode in Machine().sockets(os.getpid())


def test_a_shard_map_is_read(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    servers = [{"address": "h1:7070", "partitions": [0, 1]}]
    content = {"model": "m", "version": 3, "partitions": 2, "servers": servers}
    path.write_text(json.dumps(content))
    found = Machine().shard_map(str(path))
    assert (found.owners.partitions, found.owned_by("h1:7070")) == (2, [0, 1])
    with pytest.raises(NotFound):
        Machine().shard_map(str(tmp_path / "none"))
