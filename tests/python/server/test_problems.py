"""The function that decides what is wrong: each case, and never "fine" when a report says else."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import petps_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

import petps
from petps.server import Serving
from petps.server.docs_folder import read_page
from petps.server.metrics import Metrics
from petps.server.problems import SEVERITIES, Problem, find_problems, headline
from tests.python.server.conftest import settings

Status = dict[str, Any]
Change = Callable[[Status], object]
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Status, dict[str, Any]]]:
    """Return the status and the counters of a healthy server that follows a log."""
    folder = tmp_path_factory.mktemp("healthy")
    with petps.create(folder / "pool", durability="process") as pool:
        pool.create_table("items", dim=4, capacity=1000)
        pool.create_table("fed", dim=4, capacity=1000, feed="delta")
        pool.push("items", np.arange(100, dtype=np.uint64), np.ones((100, 4), np.float32))
    with Serving(settings(folder / "pool", ingest={"log": folder / "log"})) as serving:
        with petps_client.connect(f"petps://127.0.0.1:{serving.port}") as client:
            client.pull("items", np.arange(100, dtype=np.uint64))
        deadline = time.monotonic() + 60
        while serving.unready() is not None:
            assert time.monotonic() < deadline, serving.unready()
            time.sleep(0.02)
        yield serving.status(), serving._server.stats()


@pytest.fixture
def status(reports: tuple[Status, dict[str, Any]]) -> Status:
    """Return a copy of the healthy status, to be changed."""
    return copy.deepcopy(reports[0])


def partitions(state: str, reason: str = "", numbers: range = range(8), **extra: Any) -> Change:
    def change(status: Status) -> None:
        for number in numbers:
            status["ingest"]["partitions"][number] |= {"state": state, "reason": reason, **extra}

    return change


def put(path: str, value: Any) -> Change:
    """Return a function that sets a member: "tls.error", "tables.0.rows"."""

    def change(status: Status) -> None:
        *parents, last = path.split(".")
        place: Any = status
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
        place[last] = value

    return change


def tls(**values: Any) -> Change:
    whole = {"expires_at": time.time() + 1e8, "is_expired": False, "error": "", "names": []}
    return put("tls", whole | values)


def backup(**values: Any) -> Change:
    whole: Status = {
        "error": None, "warnings": [], "every_seconds": 0, "last": None, "running": False,
        "store": None, "failures": 0, "written": 0, "newest_at": None,
    }  # fmt: skip
    return put("backup", whole | values)


def latest(keys: int, misses: int) -> Change:
    def change(status: Status) -> None:
        number = status["tables"][0]["id"]
        status["recent"]["latest"]["tables"] = {str(number): {"keys": keys, "misses": misses}}

    return change


def minute(keys: int, hit_rate: float) -> Change:
    def change(status: Status) -> None:
        counts = {"keys": keys, "hit_rate": hit_rate, "misses": round(keys * (1 - hit_rate))}
        status["recent"]["tables"] = {str(status["tables"][0]["id"]): counts}

    return change


def both(*changes: Change) -> Change:
    return lambda status: [change(status) for change in changes]


MEMBER = {"address": "10.0.0.2:7070", "partitions": "0", "answers": False, "fault": "Refused"}
FULL = "table 'fed' is full (capacity 1,000)"

# name: (what is changed in a healthy status, severity, text in the sentence, page)
CASES: dict[str, tuple[Change, str, str, str]] = {
    "failed pool": (put("pool.failed", True), "critical", "read-only", "pool-failed"),
    "power": (put("pool.lost_power", True), "critical", "went down", "power-lost"),
    "draining": (put("unready", "draining"), "critical", "is stopping", "not-ready"),
    "starting": (put("unready", "starting: not every port is open yet"), "critical", "not every",
                 "not-ready"),
    "lag": (put("unready", "partition 3 is 75.0 s behind (ready_lag_seconds = 60)"), "critical",
            "not ready: partition 3 is 75.0 s behind", "not-ready"),
    "full": (both(partitions("full", FULL), put("unready", f"partition 0 is full: {FULL}")),
             "critical", f"Partitions 0 to 7 are full: {FULL}.", "table-full"),
    "gap": (partitions("stale", "messages 3 to 5 are missing", range(2, 3)), "critical",
            "Partition 2 is stale: messages 3 to 5 are missing.", "partition-stopped"),
    "conflict": (partitions("conflict", "two publishers"), "critical", "conflict", "partition-st"),
    "blocked": (partitions("blocked", "Input/output error"), "critical", "blocked", "partition-st"),
    "starting partition": (partitions("starting"), "critical", "starting", "partition-stopped"),
    "catching up": (partitions("catching_up"), "critical", "catching up", "partition-stopped"),
    "loading": (partitions("catching_up", instance="default@9"), "notice", "loading an instance",
                "partition-stopped"),
    "log away": (partitions("unreachable", "no broker answers (a long text)"), "warning",
                 "does not answer for partitions 0 to 7: no broker answers", "broker-unreachable"),
    "ingest error": (put("ingest.error", "the base is damaged"), "warning", "base is damaged",
                     "partition-stopped"),
    "ingest ended": (put("ingest.running", False), "critical", "has ended", "partition-stopped"),
    "paused": (put("ingest.paused", True), "warning", "paused", "ingest-paused"),
    "no report": (put("report_error", "KeyError: 'x'"), "critical", "not known", "operate"),
    "shard map": (put("shard_map_error", "not valid JSON"), "critical", "not valid JSON",
                 "shard-map-failed"),
    "etcd": (put("cluster", {"silent_seconds": 40.0, "error": "etcd does not answer"}), "warning",
             "no part in its cluster, so no partition of it moves: etcd does", "etcd-silent"),
    "rows kept": (put("cluster", {"kept": ["The rows of partition 1 are not removed: x", "y"]}),
                  "warning", "are not removed: x; likewise 1 more.", "cluster"),
    "no partition": (both(put("shard", {"address": "h:1", "map_version": 3, "owned": ""}),
                          put("ingest", None)), "warning", "gives h:1 no partition", "shards"),
    "dead member": (put("members", [MEMBER]), "critical", "10.0.0.2:7070", "shard-unreachable"),
    "log not reachable": (put("ingest.log_reachable", False), "warning",
                          "does not answer for partitions 0 to 7", "broker-unreachable"),
    "no version": (put("ingest.partitions.3.version_time", 1.0), "warning",
                   "no new version for more than 60 minutes", "stale-rows"),
    "misses": (latest(500, 500), "critical", "all of the last 500 keys are missing", "misses-high"),
    "damaged rows": (put("tables.0.missing_rows", 7), "critical", "7 rows", "damaged-rows"),
    "almost full": (put("tables.0.rows", 900), "warning", "is 90 % full (900 of 1,000",
                 "table-nearly-full"),
    "evicting": (both(put("tables.0.rows", 1000), put("tables.0.evicted", 5)), "notice",
                 "is full (1,000 of 1,000 rows), and evicts rows", "table-nearly-full"),
    "refused keys": (put("recent.counts.rows_refused", 12), "critical", "refused 12 new", "table-"),
    "late expiry": (both(put("tables.0.expire_after", 3600), put("tables.0.expiry_delay", 1000)),
                    "warning", "expire late", "expiry-behind"),
    "no walk": (both(put("tables.0.expire_after", 3600), put("tables.0.expiry_delay", -1),
                     put("uptime_s", 7200)), "warning", "no walk has ended yet", "expiry-behind"),
    "expiry": (put("expiry_faults", {"1": "rows of table 'items' cannot expire: it is closed"}),
               "warning", "cannot expire", "expiry-behind"),
    "scrub": (put("scrub.faults", {"1": "no folder"}), "warning", "no folder", "scrub-failed"),
    "late scrub": (both(put("scrub.every_seconds", 60), put("uptime_s", 1000)), "warning",
                   "twice the time", "scrub-overdue"),
    "backup": (backup(error="IoError: no space"), "warning", "no space", "backup-failed"),
    "backup warning": (backup(warnings=["the log has lost it"]), "notice", "lost it", "back-up"),
    "old backup": (backup(every_seconds=60, store="s", last={"finished_at": 1.0}), "warning",
                   "No backup was made", "backup-overdue"),
    "no backup": (both(backup(every_seconds=60, store="s"), put("uptime_s", 130)), "warning",
                  "No backup was made", "backup-overdue"),
    "few found": (minute(1000, 0.4), "warning", "find 40.0 % of the keys of table 'items'",
                 "misses-high"),
    "slow pulls": (put("recent.latency.pull", {"count": 100, "p99_us": 90_000.0}), "warning",
                   "took 90 ms or more", "latency-high"),
    "disk": (put("disk", {"bytes": 1000, "free_bytes": 99}), "warning", "9.9 % free",
                 "disk-nearly-full"),
    "clock": (put("clock", {"last_jump_at": time.time() + 1e6, "last_jump_seconds": -3600.0}),
              "warning", "jumped by -3600.0 s", "clock-jumped"),
    "grpc": (put("grpc", {"error": "the port is taken", "restarts": 2, "last_restart_at": None}),
             "critical", "port is closed: the port is taken.", "grpc-failed"),
    "grpc again": (put("grpc", {"error": "", "restarts": 3, "last_restart_at": time.time() + 1e6}),
                   "warning", "started again (3 times", "grpc-restarted"),
    "expired": (tls(is_expired=True), "critical", "certificate has expired", "certificate-expires"),
    "expires": (tls(expires_at=time.time() + 86_400), "critical", "expires at",
                 "certificate-expires"),
    "tls files": (tls(error="the key does not match"), "warning", "does not match",
                 "certificate-reload-failed"),
    "access file": (put("access.error", "no such role"), "warning", "no such role",
                 "access-reload-failed"),
    "expired grant": (put("access.expired", ["trainer"]), "warning", "'trainer' has ended", "run"),
    "grant ends": (put("access.expire_soon", ["web"]), "notice", "'web' ends within",
                 "grants-expired"),
    "insecure": (put("insecure", True), "notice", "server.insecure", "insecure"),
    "errors": (both(put("recent.counts.errors", 30), put("recent.counts.pulls", 70)), "warning",
               "30 of 100 requests", "errors-high"),
    "memory": (put("recent.counts.refused_for_memory", 1), "warning", "memory_bytes",
                 "memory-short"),
    "connections": (put("recent.counts.connections_refused", 1), "warning", "connections were",
                    "connections-refused"),
    "handshakes": (put("recent.counts.handshakes_refused", 1), "warning", "handshakes",
                 "connections-refused"),
    "logins": (put("recent.counts.logins_failed", 6), "warning", "6 callers", "logins-failing"),
    "incident": (put("events", [{"key": "incident:x", "text": "peer 1: bad frame", "at": 0.0,
                                 "last_at": time.time() + 1e6}]), "notice", "bad frame", "errors"),
}  # fmt: skip


def only(problems: list[Problem]) -> Problem:
    assert len(problems) == 1, problems
    return problems[0]


def test_a_healthy_server_has_no_problem(status: Status) -> None:
    assert find_problems(status) == []
    assert status["problems"] == []
    assert headline([]) == "Nothing is wrong."
    assert headline([], 0.0) == "Nothing is wrong since 1970-01-01 00:00 UTC."
    assert status["headline"] == headline([], status["well_since"])


@pytest.mark.parametrize("name", CASES)
def test_case(status: Status, name: str) -> None:
    change, severity, text, page = CASES[name]
    change(status)
    problem = only(find_problems(status))
    assert problem.severity == severity
    assert text in problem.text
    assert page in problem.page
    assert problem.text.endswith(".")
    assert problem.remedy.endswith(".")
    assert headline([problem]) == problem.text
    assert read_page(problem.page).startswith(b"# ")


@pytest.mark.parametrize(
    "change",
    [
        latest(99, 99),  # too few to judge
        latest(500, 499),
        put("recent.counts.logins_failed", 5),
        minute(99, 0.1),
        minute(1000, 0.5),
        put("recent.latency.pull", {"count": 99, "p99_us": 90_000.0}),
        put("disk", {"bytes": 1000, "free_bytes": 100}),
        put("clock", {"last_jump_at": 1.0, "last_jump_seconds": 5.0}),
        put("grpc", {"error": "", "restarts": 3, "last_restart_at": 1.0}),
        backup(every_seconds=60, store="s", running=True, last={"finished_at": 1.0}),
        backup(every_seconds=60, store="s", newest_at=time.time() + 1e6),  # by another process
        both(put("recent.counts.errors", 1), put("recent.counts.pulls", 10_000)),
        put("tables.0.rows", 850),
        partitions("passing"),
        put("members", [MEMBER | {"answers": None}, MEMBER | {"answers": True}]),
        put("events", [{"key": "incident:x", "text": "old", "at": 0.0, "last_at": 0.0}]),
        put("scrub.every_seconds", 3600),  # the first pass has time
    ],
)
def test_what_is_no_problem(status: Status, change: Change) -> None:
    change(status)
    assert find_problems(status) == []


def test_the_worst_comes_first_and_the_sentence_counts_the_others(status: Status) -> None:
    for name in ("insecure", "almost full", "misses"):
        CASES[name][0](status)
    problems = find_problems(status)
    assert [problem.severity for problem in problems] == list(SEVERITIES)
    sentence = headline(problems)
    assert sentence.startswith("Pulls find nothing in table 'items'")
    assert sentence.endswith("and there are 2 more problems.")
    assert "one more problem" in headline(problems[:2])
    assert len({problem.key for problem in problems}) == 3


def test_a_table_of_a_frozen_instance_may_be_full(status: Status) -> None:
    status["tables"][0]["rows"] = 1000
    status["instances"][0]["state"] = "following"
    assert only(find_problems(status)).severity == "warning"  # it will stop its partition
    status["instances"][0]["state"] = "frozen"
    assert only(find_problems(status)).severity == "notice"


def test_a_table_of_a_frozen_instance_expires_nothing(status: Status) -> None:
    CASES["no walk"][0](status)
    assert only(find_problems(status)).key.startswith("expiry-late")
    status["instances"][0]["state"] = "frozen"
    assert find_problems(status) == []


def test_problems_of_one_severity_keep_the_order_of_their_rules(status: Status) -> None:
    for name in ("dead member", "damaged rows", "failed pool", "few found"):
        CASES[name][0](status)
    keys = [problem.key.partition(":")[0] for problem in find_problems(status)]
    assert keys == ["pool-failed", "table-damaged", "member", "table-few-found"]


def test_any_reason_of_readyz_is_a_problem(status: Status) -> None:
    status["unready"] = "a reason that nobody has thought of"
    assert "nobody has thought of" in only(find_problems(status)).text
    # A partition that is stopped explains only its own reason.
    status["unready"] = "the log is not followed yet"
    partitions("full", FULL, range(1))(status)
    assert [problem.key for problem in find_problems(status)] == ["unready", "partition-full:0"]


def test_the_status_of_a_closed_pool_can_be_judged(tmp_path: Path) -> None:
    from petps.server.status import normalise_status

    with petps.create(tmp_path / "pool", durability="process") as pool:
        pool.create_table("items", dim=4, capacity=10, expire_after=3600)
        pool.push("items", np.arange(9, dtype=np.uint64), np.ones((9, 4), np.float32))
        problem = only(find_problems(normalise_status(pool.status())))
    assert problem.key.startswith("table-full:")


def test_names_of_users_stay_as_they_are(status: Status) -> None:
    status["tables"][0] |= {"name": HOSTILE, "rows": 1000}
    assert HOSTILE in only(find_problems(status)).text  # the page escapes it


# By metric: what makes it alarming (docs/how-to/operate.md), and whether a sample alarms.
ALARMS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "petps_server_ready": ("lag", lambda value: value == 0),
    "petps_server_insecure": ("insecure", lambda value: value == 1),
    "petps_tls_reload_failed": ("tls files", lambda value: value == 1),
    "petps_tls_certificate_expiry_timestamp_seconds": (
        "expires", lambda value: value - time.time() < 7 * 86_400,
    ),
    "petps_access_reload_failed": ("access file", lambda value: value == 1),
    "petps_access_expired_grants": ("expired grant", lambda value: value > 0),
    "petps_pool_failed": ("failed pool", lambda value: value == 1),
    "petps_ingest_partitions_not_following": ("gap", lambda value: value > 0),
    "petps_ingest_paused": ("paused", lambda value: value == 1),
    "petps_backup_failed": ("backup", lambda value: value == 1),
    "petps_table_expiry_failed": ("expiry", lambda value: value == 1),
    "petps_table_missing_rows": ("damaged rows", lambda value: value > 0),
    "petps_scrub_failed": ("scrub", lambda value: value == 1),
    "petps_shard_member_reachable": ("dead member", lambda value: value == 0),
    "petps_ingest_log_reachable": ("log not reachable", lambda value: value == 0),
    "petps_shard_map_failed": ("shard map", lambda value: value == 1),
    "petps_table_rows": ("almost full", lambda value: value > 850),
}  # fmt: skip


@pytest.mark.parametrize("metric", ALARMS)
def test_no_metric_alarms_while_nothing_is_wrong(
    reports: tuple[Status, dict[str, Any]], status: Status, metric: str
) -> None:
    case, alarms = ALARMS[metric]
    before = values_of(status, reports[1], metric)
    assert not any(alarms(value) for value in before)
    CASES[case][0](status)
    if case == "expiry":
        status["tables"][0]["expire_after"] = 3600
    if case == "damaged rows":
        status["scrub"]["tables"][str(status["tables"][0]["id"])]["missing"] = 7
    assert any(alarms(value) for value in values_of(status, reports[1], metric))
    assert find_problems(status)


def values_of(status: Status, stats: dict[str, Any], name: str) -> list[float]:
    text = Metrics(lambda: status, lambda: stats, lambda: status["unready"]).text("")[0].decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    return [sample.value for sample in families[name].samples] if name in families else []
