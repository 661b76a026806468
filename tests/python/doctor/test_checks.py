"""Every finding, in both directions: it is there when a fact is bad, and else it is not."""

from __future__ import annotations

import pytest

from petps.doctor import Level, Subject, all_checks, diagnose
from petps.doctor.facts import (
    CertificateFacts,
    FileFacts,
    SpaceFacts,
)
from tests.python.doctor.case import (
    ACCESS,
    DAY,
    FAULT,
    GRANTS,
    KAFKA,
    NOTE,
    TLS,
    WARNING,
    Case,
    listener,
)
from tests.python.doctor.deployment_cases import DEPLOYMENT_CASES
from tests.python.doctor.fake import (
    BOOT,
    GIB,
    NOW,
    POOL,
    UUID,
    FakeFacts,
    find,
    levels,
    serve,
    settings,
    shard_map,
    superblock,
)
from tests.python.doctor.machine_cases import MACHINE_CASES

CASES = [*MACHINE_CASES, *DEPLOYMENT_CASES]


def _healthy() -> FakeFacts:
    """Return a machine with all files that the configurations of this module name."""
    facts = FakeFacts()
    facts.files["/logs"] = FileFacts("folder", 0o755)
    facts.files["/bases"] = FileFacts("folder", 0o755)
    facts.folders["/bases"] = ["monday"]
    facts.files["/tls/k.pem"] = FileFacts("file", 0o600)
    facts.files["/etc/access.json"] = FileFacts("file", 0o600)
    facts.certificate = CertificateFacts(["h"], NOW + 99 * DAY, [("ca", NOW + 99 * DAY)])
    facts.grant_list = GRANTS
    facts.map = shard_map()
    return facts


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_bad_fact_is_found_and_a_good_one_is_not(case: Case) -> None:
    facts = _healthy()
    config = None if case.config is None else settings(**case.config)
    before = find(case.name, facts, config)
    assert not [finding for finding in before if case.seen in finding.seen], before
    facts = _healthy()
    case.change(facts)
    if case.config is not None:
        config = settings(**case.config, **case.changed)
    after = find(case.name, facts, config)
    found = [finding for finding in after if case.seen in finding.seen]
    assert levels(found) == [case.level], after
    assert found[0].name == case.name
    assert found[0].why
    if case.level in (FAULT, WARNING):
        assert found[0].remedy, "whoever reads this must know what to do"


def test_a_healthy_deployment_has_no_fault_and_no_warning() -> None:
    facts = _healthy()
    serve(facts)
    config = settings(
        ingest=KAFKA, tls=TLS, access=ACCESS, backup={"store": "/b"}, server={"rdma": "off"}
    )
    subject = Subject(facts, config=config, config_path="/etc/petps.toml", pool=POOL)
    bad = [finding for finding in diagnose(subject) if finding.level in (FAULT, WARNING)]
    assert bad == []


def test_every_check_has_a_case_in_which_something_is_bad() -> None:
    assert {known.name for known in all_checks()} == {case.name for case in CASES}


def test_the_machine_alone_has_no_finding_of_a_pool_or_a_configuration() -> None:
    findings = diagnose(Subject(FakeFacts()))
    assert {finding.name for finding in findings} == {
        "kernel-version", "cpu-features", "processors", "numa", "huge-pages", "memory", "swap",
        "open-files", "memory-maps", "core-dumps", "clock-synchronised",
    }  # fmt: skip
    assert set(levels(findings)) == {Level.OK}


def test_the_own_server_may_hold_the_ports() -> None:
    facts = FakeFacts()
    serve(facts)
    facts.texts["/proc/net/tcp"] = listener(7070)
    facts.socket_owners = {99: 4711}
    assert levels(find("ports", facts, settings())) == [Level.OK]


def test_the_files_of_the_own_server_may_be_hidden() -> None:
    facts = FakeFacts()
    serve(facts)
    facts.texts["/proc/net/tcp"] = listener(7070).replace("0 0 0 99", "0 1000 0 99")
    assert levels(find("ports", facts, settings())) == [FAULT, Level.OK]
    facts.texts["/proc/4711/status"] = "Name:\tpetps\nUid:\t1000\t1000\t1000\t1000\n"
    assert levels(find("ports", facts, settings())) == [Level.OK]


def test_a_socket_of_ipv6_may_listen_on_ipv4() -> None:
    facts = FakeFacts()
    facts.texts["/proc/net/tcp6"] = listener(7071, "0000000000000000FFFF00000100007F")
    found = find("ports", facts, settings())
    assert levels(found) == [FAULT, Level.OK]
    assert "server.grpc_port 7071 is in use" in found[0].seen


def test_a_listener_on_another_address_is_no_conflict() -> None:
    facts = FakeFacts()
    facts.texts["/proc/net/tcp"] = listener(7070, "0200007F")  # 127.0.0.2
    assert levels(find("ports", facts, settings())) == [Level.OK]


def test_a_table_of_the_configuration_that_does_not_exist_yet_needs_space_too() -> None:
    facts = FakeFacts()
    facts.spaces["/data"] = SpaceFacts(GIB, 4 * GIB, 9, 9)
    config = settings(tables={"big": {"dim": 64, "capacity": 100_000_000}})
    assert levels(find("disk-space", facts, config)) == [WARNING]
    small = settings(tables={"big": {"dim": 64, "capacity": 1000}})
    assert levels(find("disk-space", facts, small)) == [Level.OK]
    growing = {"dim": 4, "capacity": 1000, "grow": "auto", "capacity_max": 1_000_000_000}
    assert levels(find("disk-space", facts, settings(tables={"items": growing}))) == [WARNING]


def test_a_pool_of_this_boot_has_not_lost_power() -> None:
    facts = FakeFacts()
    boot = bytes.fromhex(BOOT.replace("-", ""))
    facts.pool = superblock(is_clean=False, durability="process", boot_id=boot)
    assert levels(find("pool-format", facts)) == [NOTE]


def test_a_row_that_is_back_is_not_counted_as_damaged() -> None:
    facts = FakeFacts()
    lines = (
        f'{{"pool": "{UUID}"}}\n{{"table": 1, "key": 5}}\n{{"table": 1, "key": 5, "ended": "x"}}\n'
    )
    facts.texts[f"{POOL}.damage"] = lines + '{"table": 1, "ke'  # torn
    assert levels(find("damaged-rows", facts)) == [Level.OK]


def test_a_container_is_no_process_without_a_unit() -> None:
    facts = FakeFacts()
    serve(facts)
    facts.texts["/proc/4711/cgroup"] = "0::/kubepods.slice/pod1/cri-1\n"
    assert levels(find("service", facts)) == [Level.OK]


def test_limits_of_control_groups_of_version_1_count() -> None:
    facts = FakeFacts()
    facts.texts["/proc/self/cgroup"] = "4:memory:/a/b\n1:cpu,cpuacct:/a\n0::/\n"
    facts.texts["/sys/fs/cgroup/memory/a/memory.limit_in_bytes"] = f"{256 << 20}\n"
    facts.texts["/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us"] = "100000\n"
    facts.texts["/sys/fs/cgroup/cpu/a/cpu.cfs_period_us"] = "100000\n"
    assert levels(find("memory", facts)) == [WARNING]
    assert "allows 1 of 8" in find("processors", facts)[0].seen
