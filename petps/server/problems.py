"""What is wrong with a server, judged from its status: for the page, `petps status` and its log.

Owns:        the rules of find_problems(), their order, and the sentence of headline().
Never does:  measure, keep anything, or look at anything else than the status.
Called by:   watch (for the page), cli status.
Invariants:  Whatever makes /readyz, a metric of docs/how-to/operate.md or a fault in the status say
             that something is wrong, is a problem here too. Texts have names of users in them, so a
             page must show them as text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from petps.config.duration import duration_text

__all__ = ["INCIDENT_KEY", "SEVERITIES", "Problem", "find_problems", "headline"]

SEVERITIES: Final = ("critical", "warning", "notice")  # worst first

FULL_SHARE: Final = 0.85  # of a table's capacity, as in the alerts of docs/how-to/operate.md
LATE_SHARE: Final = 0.2  # of expire_after, for which rows may stay longer
EXPIRES_SOON_SECONDS: Final = 7 * 86_400
FAILED_LOGINS: Final = 6  # within the last minute
# A table that found none of fewer keys may be asked for keys that nobody has trained yet.
MISSED_KEYS_MIN: Final = 100
FEW_FOUND_SHARE: Final = 0.5  # of the keys of a table in the last minute
SLOW_PULL_US: Final = 50_000  # the 99th percentile of the last minute
SLOW_PULLS_MIN: Final = 100  # within the last minute: of fewer, one slow pull is the percentile
FREE_SHARE: Final = 0.1  # of the file system of the pool
NO_VERSION_SECONDS: Final = 3600.0  # for which no partition should be without a commit
CLOCK_SECONDS: Final = 900.0  # for which a jump of the clock is a problem
GRPC_SECONDS: Final = 900.0  # for which the end of the gRPC server is a problem
ERRORS_SHARE: Final = 0.01  # of the requests of the last minute
FIRST_WALK_SECONDS: Final = 3600.0  # in which the first walk over a table should have ended
ETCD_SILENT_SECONDS: Final = 30.0  # an election of etcd's leader takes less
INCIDENT_SECONDS: Final = 300.0  # after which an incident is history

# Pages of docs/ with the remedies of several problems. The server has the pages (docs_folder.py).
OPERATE: Final = "how-to/operate.md"
SHARDS: Final = "how-to/shards.md"
BACK_UP: Final = "how-to/back-up.md"
STOPPED: Final = "runbook/partition-stopped.md"
FULL: Final = "runbook/table-full.md"
NOT_READY: Final = "runbook/not-ready.md"

INCIDENT_KEY: Final = "incident:"  # begins the keys of what the native server reports

Status = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    ``key`` names it for as long as it lasts. ``severity``: critical (clients should use another
    server, or rows are lost or refused), warning (it becomes critical, or a part is failing) or
    notice (a person accepted it, or should know it). ``page``: the remedy, in docs/.
    """

    key: str
    severity: str
    text: str
    remedy: str
    page: str


def find_problems(status: Status) -> list[Problem]:
    """Return all problems of a normalised status, worst first.

    The status is that of a server, with or without the members that its watch adds, or of a pool.
    """
    problems = [problem for rule in _RULES for problem in rule(status)]
    problems.sort(key=lambda problem: SEVERITIES.index(problem.severity))  # stable
    return problems


def headline(problems: list[Problem], well_since: float | None = None) -> str:
    """Return one sentence: the worst problem, or that nothing is wrong. well_since: Unix time."""
    if not problems:
        if well_since is None:
            return "Nothing is wrong."
        at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(well_since))
        return f"Nothing is wrong since {at}."
    rest = len(problems) - 1
    if rest == 0:
        return problems[0].text
    also = "one more problem" if rest == 1 else f"{rest} more problems"
    return f"{problems[0].text.rstrip('.')}, and there {'is' if rest == 1 else 'are'} {also}."


# ---- rules: each yields the problems of one part


def _pool(status: Status) -> Iterator[Problem]:
    pool = status.get("pool") or {}
    if pool.get("failed"):
        yield Problem(
            "pool-failed", "critical",
            "A write-back of the pool failed, so the pool is read-only until a restart.",
            "Check the disk first (dmesg, smartctl), then restart the server.",
            "runbook/pool-failed.md",
        )  # fmt: skip
    if pool.get("lost_power"):
        yield Problem(
            "pool-lost-power", "critical",
            "The machine went down while the pool was open, so rows may be lost.",
            "Run `petps verify POOL`, then `petps verify POOL --accept`.", "runbook/power-lost.md",
        )  # fmt: skip


def _machine(status: Status) -> Iterator[Problem]:
    """Yield what is wrong with the disk and the clock, if the server looks at them."""
    disk, clock = status.get("disk") or {}, status.get("clock") or {}
    if disk and disk["free_bytes"] < FREE_SHARE * disk["bytes"]:
        share = 100 * disk["free_bytes"] / disk["bytes"]
        yield Problem(
            "disk-nearly-full", "warning",
            f"The file system of the pool has {share:.1f} % free.",
            "Make room, or move the pool: a full disk stops tables from growing.",
            "runbook/disk-nearly-full.md",
        )  # fmt: skip
    at = clock.get("last_jump_at")
    if at is not None and time.time() - at <= CLOCK_SECONDS:
        yield Problem(
            "clock-jumped", "warning",
            f"The system's clock jumped by {clock['last_jump_seconds']:+.1f} s.",
            "Check the time service; until then do not trust expiry, certificates and times.",
            "runbook/clock-jumped.md",
        )  # fmt: skip


def _grpc(status: Status) -> Iterator[Problem]:
    grpc = status.get("grpc") or {}
    if grpc.get("error"):
        yield Problem(
            "grpc-failed", "critical", f"The gRPC port is closed: {_ended(grpc['error'])}",
            "Free the port; the server retries.", "runbook/grpc-failed.md",
        )  # fmt: skip
        return
    at = grpc.get("last_restart_at")
    if at is not None and time.time() - at <= GRPC_SECONDS:
        yield Problem(
            "grpc-restarted", "warning",
            f"The gRPC server had ended, and was started again ({grpc['restarts']:,} times since "
            "the start): its connections were closed.",
            "Keep strangers from the gRPC port.", "runbook/grpc-restarted.md",
        )  # fmt: skip


def _readiness(status: Status) -> Iterator[Problem]:
    reason = status.get("unready")
    if not reason or (status.get("pool") or {}).get("failed"):  # _pool() says that
        return
    stopped = [number for group in _stopped(status).values() for number in group]
    if any(reason.startswith(f"partition {number} is ") for number in stopped):
        return  # _partitions() says that, for all partitions together
    if reason == "draining":
        text, remedy = "The server is stopping (draining).", "Start it again if nobody stopped it."
    elif reason.startswith("starting"):
        text, remedy = f"The server is {reason}.", "Wait; if it lasts, read the server's log."
    else:
        text = f"The server is not ready: {reason}."
        remedy = "Clients should use another server until /readyz answers ok."
    yield Problem("unready", "critical", text, remedy, NOT_READY)


def _stopped(status: Status) -> dict[tuple[str, str], list[int]]:
    """Return the partitions that are not followed, by (state, reason), if clients need them."""
    ingest = status.get("ingest") or {}
    serving = {
        entry["name"] for entry in status.get("instances", []) if entry.get("state") == "serving"
    }
    groups: dict[tuple[str, str], list[int]] = {}
    for partition in ingest.get("partitions", []):
        state = partition["state"]
        if state in ("following", "passing", "unreachable"):
            continue
        if state == "catching_up" and partition.get("instance") not in serving:
            continue  # _partitions() says that it loads
        groups.setdefault((state, partition["reason"]), []).append(partition["partition"])
    return groups


def _partitions(status: Status) -> Iterator[Problem]:
    ingest = status.get("ingest") or {}
    for (state, reason), numbers in _stopped(status).items():
        detail = f": {reason}" if reason else ""
        yield Problem(
            f"partition-{state}:{numbers[0]}", "critical",
            f"{_numbers_text(numbers)} {state.replace('_', ' ')}{detail}.",
            "Pulls continue with the rows that are there; give the partition what it waits for.",
            FULL if state == "full" else STOPPED,
        )  # fmt: skip
    of_state: dict[str, list[int]] = {}
    reasons = {}
    for partition in ingest.get("partitions", []):
        of_state.setdefault(partition["state"], []).append(partition["partition"])
        reasons[partition["state"]] = partition["reason"]
    away = of_state.get("unreachable", [])
    if not away and not ingest.get("log_reachable", True):
        away = [partition["partition"] for partition in ingest["partitions"]]
    if away:
        # What the library says follows in brackets. The table of partitions has it whole.
        reason = reasons.get("unreachable", "").partition(" (")[0]
        detail = f": {reason}" if reason else ""
        yield Problem(
            "log-unreachable", "warning",
            f"The log does not answer for {_numbers_text(away, verb=False).lower()}{detail}.",
            "Repair the network or the brokers; the server retries.",
            "runbook/broker-unreachable.md",
        )  # fmt: skip
    stopped = {number for group in _stopped(status).values() for number in group}
    if loading := [n for n in of_state.get("catching_up", []) if n not in stopped]:
        yield Problem(
            "instance-loading", "notice",
            f"{_numbers_text(loading)} loading an instance that no client is served from yet.",
            "Wait until it is loaded.", "runbook/partition-stopped.md",
        )  # fmt: skip


def _versions(status: Status) -> Iterator[Problem]:
    partitions = (status.get("ingest") or {}).get("partitions", [])
    times = [partition.get("version_time") for partition in partitions]
    ages = [time.time() - at for at in times if at is not None]
    if ages and max(ages) > NO_VERSION_SECONDS:
        yield Problem(
            "no-version", "warning",
            f"A partition has had no new version for more than {NO_VERSION_SECONDS / 60:.0f} "
            "minutes, so its rows may be old.",
            "See whether the trainer still commits versions.", "runbook/stale-rows.md",
        )  # fmt: skip


def _numbers_text(numbers: list[int], *, verb: bool = True) -> str:
    """Return "Partition 3 is", "Partitions 0 to 7 are" or "Partitions 0, 2 and 3 more are"."""
    if len(numbers) == 1:
        return f"Partition {numbers[0]}" + (" is" if verb else "")
    ordered = sorted(numbers)
    if ordered == list(range(ordered[0], ordered[-1] + 1)):
        text = f"Partitions {ordered[0]} to {ordered[-1]}"
    else:
        text = f"Partitions {', '.join(map(str, ordered[:3]))}"
        text += f" and {len(ordered) - 3} more" if len(ordered) > 3 else ""
    return text + (" are" if verb else "")


def _ingest(status: Status) -> Iterator[Problem]:
    if error := status.get("report_error"):
        yield Problem(
            "report-error", "critical", f"The state of ingest is not known: {_ended(error)}",
            "Read the server's log, and restart the server.", OPERATE,
        )  # fmt: skip
    ingest = status.get("ingest") or {}
    if not ingest:
        return
    if not ingest.get("running", True):
        yield Problem(
            "ingest-ended", "critical", "Ingest has ended, so rows grow older.",
            "Read the server's log, and restart the server.", "runbook/partition-stopped.md",
        )  # fmt: skip
    if ingest.get("paused"):
        yield Problem(
            "ingest-paused", "warning", "An operator paused ingest, so rows grow older.",
            "Run `petps ingest resume POOL`.", "runbook/ingest-paused.md",
        )  # fmt: skip
    reasons = " ".join(partition["reason"] for partition in ingest.get("partitions", []))
    if (error := ingest.get("error")) and error not in reasons:
        yield Problem(
            "ingest-error", "warning", f"Ingest reports an error: {_ended(error)}",
            "Repair what it names; the server retries.", "runbook/partition-stopped.md",
        )  # fmt: skip


def _shard_map(status: Status) -> Iterator[Problem]:
    if error := status.get("shard_map_error"):
        remedy = "Correct etcd's map" if status.get("cluster") else "Correct the file"
        yield Problem(
            "shard-map", "critical", f"A changed shard map is not used: {_ended(error)}",
            f"{remedy}; the server reads it again.", "runbook/shard-map-failed.md",
        )  # fmt: skip
    cluster = status.get("cluster") or {}
    if cluster.get("silent_seconds", 0.0) > ETCD_SILENT_SECONDS:
        text = _ended(cluster["error"] or "no answer")
        yield Problem(
            "etcd", "warning",
            f"The server takes no part in its cluster, so no partition of it moves: {text}",
            "Repair what this names; the server goes on with its map.", "runbook/etcd-silent.md",
        )  # fmt: skip
    if kept := cluster.get("kept"):
        more = f"; likewise {len(kept) - 1} more" if len(kept) > 1 else ""
        yield Problem(
            "rows-kept", "warning", f"{kept[0]}{more}.",
            "Publish the newest rows again, or write a base of them.", "how-to/cluster.md",
        )  # fmt: skip
    shard, ingest = status.get("shard") or {}, status.get("ingest") or {}
    if shard.get("map_version") and not shard.get("owned") and not ingest.get("partitions"):
        is_member = bool(cluster)
        yield Problem(
            "shard-empty", "notice" if is_member else "warning",
            f"The shard map gives {shard['address']} no partition, so this server serves nothing.",
            "Let a controller give it some: petps cluster init, move or rebalance." if is_member
            else "Set --address to an address of the map, or add the server to the map.",
            "how-to/cluster.md" if is_member else SHARDS,
        )  # fmt: skip
    for member in status.get("members") or []:
        if member["answers"] is False:
            address = member["address"]
            yield Problem(
                f"member:{address}", "critical",
                f"The server {address} of the shard map does not answer: {_ended(member['fault'])}",
                "Start that server, or take it out of the map.", "runbook/shard-unreachable.md",
            )  # fmt: skip


def _tables(status: Status) -> Iterator[Problem]:
    frozen = {
        entry["name"] for entry in status.get("instances", []) if entry.get("state") == "frozen"
    }
    recent = status.get("recent") or {}
    for table in status.get("tables", []):
        name = f"'{table['name']}' of {table['instance']}"
        number = table["id"]
        yield from _misses_of(recent, number, name)
        if missing := _missing_rows(status, table):
            yield Problem(
                f"table-damaged:{number}", "critical",
                f"{missing:,} rows of table {name} were damaged and removed.",
                "Look for the cause (dmesg, smartctl); `POOL.damage` lists the keys.",
                "runbook/damaged-rows.md",
            )  # fmt: skip
        share = table["rows"] / table["capacity"] if table["capacity"] else 0.0
        if share > FULL_SHARE:
            evicts = bool(table.get("evicted"))
            is_minor = evicts or table["instance"] in frozen
            state = "full" if share >= 1 else f"{100 * share:.0f} % full"
            yield Problem(
                f"table-full:{number}", "notice" if is_minor else "warning",
                f"Table {name} is {state} ({table['rows']:,} of {table['capacity']:,} rows)"
                f"{', and evicts rows' if evicts else ''}.",
                f"Run `petps table grow POOL {table['name']} --capacity ROWS`.",
                "runbook/table-nearly-full.md",
            )  # fmt: skip
        if table["instance"] not in frozen:  # those keep their rows
            yield from _expiry_of(status, table, name)
    refused = recent.get("counts", {}).get("rows_refused", 0)
    if refused:
        yield Problem(
            "rows-refused", "critical",
            f"Full tables refused {refused:,} new keys of pushes within the last minute.",
            "Give the table more capacity: `petps table grow`.", "runbook/table-full.md",
        )  # fmt: skip


def _misses_of(recent: Status, number: int, name: str) -> Iterator[Problem]:
    latest = (recent.get("latest") or {}).get("tables", {}).get(str(number), {"keys": 0})
    minute = recent.get("tables", {}).get(str(number), {"keys": 0})
    remedy = (
        "Compare the keys of the clients with those of the trainer; see whether the table is "
        "loaded."
    )
    if latest["keys"] >= MISSED_KEYS_MIN and latest["misses"] >= latest["keys"]:
        yield Problem(
            f"table-misses:{number}", "critical",
            f"Pulls find nothing in table {name}: all of the last {latest['keys']:,} keys are "
            "missing.", remedy, "runbook/misses-high.md",
        )  # fmt: skip
    elif minute["keys"] >= MISSED_KEYS_MIN and minute["hit_rate"] < FEW_FOUND_SHARE:
        yield Problem(
            f"table-few-found:{number}", "warning",
            f"Pulls find {100 * minute['hit_rate']:.1f} % of the keys of table {name} "
            f"({minute['keys']:,} in the last minute).", remedy, "runbook/misses-high.md",
        )  # fmt: skip


def _missing_rows(status: Status, table: dict[str, Any]) -> int:
    scrub = (status.get("scrub") or {}).get("tables", {})
    number: int = scrub.get(str(table["id"]), {}).get("missing") or 0
    return max(int(table.get("missing_rows", 0)), number)


def _expiry_of(status: Status, table: dict[str, Any], name: str) -> Iterator[Problem]:
    after = table.get("expire_after", 0)
    delay = table.get("expiry_delay", 0)
    if not after or "uptime_s" not in status:  # a closed pool expires nothing
        return
    is_unwalked = delay < 0 and status["uptime_s"] > FIRST_WALK_SECONDS
    if delay > LATE_SHARE * after or is_unwalked:
        late = "no walk has ended yet" if delay < 0 else f"{duration_text(round(delay))} too late"
        yield Problem(
            f"expiry-late:{table['id']}", "warning",
            f"Rows of table {name} expire late: {late}.",
            "Wait for the walk after a start; if it lasts, the disk or processor is busy.",
            "runbook/expiry-behind.md",
        )  # fmt: skip


def _upkeep(status: Status) -> Iterator[Problem]:
    for number, fault in (status.get("expiry_faults") or {}).items():
        yield Problem(
            f"expiry:{number}",
            "warning",
            _ended(fault),
            "Repair what it names.",
            "runbook/expiry-behind.md",
        )
    scrub = status.get("scrub") or {}
    for number, fault in (scrub.get("faults") or {}).items():
        yield Problem(
            f"scrub:{number}", "warning", f"Rows cannot be checked or restored: {_ended(fault)}",
            "Repair what it names.", "runbook/scrub-failed.md",
        )  # fmt: skip
    every = scrub.get("every_seconds", 0)
    if every and status.get("uptime_s", 0) > 2 * every:
        passes = [state["last_pass"] or 0 for state in scrub["tables"].values()]
        if passes and time.time() - min(passes) > 2 * every:
            yield Problem(
                "scrub-late", "warning",
                "Checking all rows takes more than twice the time of scrub.every.",
                "Raise scrub.bytes_per_second, or scrub.every.", "runbook/scrub-overdue.md",
            )  # fmt: skip


def _backups(status: Status) -> Iterator[Problem]:
    backup = status.get("backup") or {}
    if error := backup.get("error"):
        yield Problem(
            "backup-failed", "warning", f"The newest backup failed: {_ended(error)}",
            "Repair what it names; the server tries again.", "runbook/backup-failed.md",
        )  # fmt: skip
    for number, warning in enumerate(backup.get("warnings") or []):
        yield Problem(
            f"backup-warning:{number}", "notice", f"The last backup: {_ended(warning)}",
            "Read the page about backups.", BACK_UP,
        )  # fmt: skip
    every, last = backup.get("every_seconds", 0), backup.get("last")
    if every and not error and not backup.get("running"):
        at = backup.get("newest_at") or (last["finished_at"] if last else None)
        age = time.time() - at if at else status.get("uptime_s", 0)
        if age > 2 * every:
            yield Problem(
                "backup-late", "warning",
                "No backup was made for more than twice the time of [backup] every.",
                "Look at the server's log for the reason.", "runbook/backup-overdue.md",
            )  # fmt: skip


def _doors(status: Status) -> Iterator[Problem]:
    tls, access = status.get("tls") or {}, status.get("access") or {}
    if tls.get("is_expired"):
        yield Problem(
            "tls-expired", "critical", "The server's certificate has expired.",
            "Replace the files of [tls]; the server reads them again.",
            "runbook/certificate-expires.md",
        )  # fmt: skip
    elif tls and tls["expires_at"] - time.time() < EXPIRES_SOON_SECONDS:
        at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(tls["expires_at"]))
        yield Problem(
            "tls-expires", "critical", f"The server's certificate expires at {at}.",
            "Replace the files of [tls]; the server reads them again.",
            "runbook/certificate-expires.md",
        )  # fmt: skip
    if tls.get("error"):
        yield Problem(
            "tls-files", "warning", f"Changed files of [tls] are not used: {_ended(tls['error'])}",
            "Correct the files; the server reads them again.",
            "runbook/certificate-reload-failed.md",
        )  # fmt: skip
    if access.get("error"):
        yield Problem(
            "access-file", "warning",
            f"A changed access file is not used: {_ended(access['error'])}",
            "Correct the file; the server reads it again.", "runbook/access-reload-failed.md",
        )  # fmt: skip
    for key, severity, verb in (
        ("expired", "warning", "has ended"),
        ("expire_soon", "notice", "ends within a week"),
    ):
        for name in access.get(key) or []:
            yield Problem(
                f"grant-{key}:{name}", severity, f"The grant '{name}' {verb}.",
                "Make another token, or remove the grant.", "runbook/grants-expired.md",
            )  # fmt: skip
    if status.get("insecure"):
        yield Problem(
            "insecure", "notice",
            "The ports lack TLS or credentials, and server.insecure accepts that.",
            "Set up TLS and an access file.", "runbook/insecure.md",
        )  # fmt: skip


def _requests(status: Status) -> Iterator[Problem]:
    counts = (status.get("recent") or {}).get("counts", {})
    errors = counts.get("errors", 0)
    requests = errors + counts.get("pulls", 0) + counts.get("pushes", 0)
    if errors and errors >= ERRORS_SHARE * requests:
        yield Problem(
            "errors", "warning",
            f"{errors:,} of {requests:,} requests of the last minute got an error.",
            "Read the errors in the clients, and the incidents below.", "runbook/errors-high.md",
        )  # fmt: skip
    refusals = (
        ("refused_for_memory", "requests or replies were refused because memory_bytes was reached",
         "memory-short"),
        ("connections_refused", "connections were refused", "connections-refused"),
        ("handshakes_refused", "TLS handshakes were refused", "connections-refused"),
    )  # fmt: skip
    for name, text, page in refusals:
        if number := counts.get(name, 0):
            yield Problem(
                name.replace("_", "-"), "warning", f"{number:,} {text} within the last minute.",
                "Find who sends so much, or raise the limit in [server.limits].",
                f"runbook/{page}.md",
            )  # fmt: skip
    pull = ((status.get("recent") or {}).get("latency") or {}).get("pull") or {"count": 0}
    if pull["count"] >= SLOW_PULLS_MIN and pull["p99_us"] > SLOW_PULL_US:
        yield Problem(
            "pulls-slow", "warning",
            f"1 % of the pulls of the last minute took {pull['p99_us'] / 1e3:,.0f} ms or more.",
            "See which table is slow, and whether the disk or the processors are busy.",
            "runbook/latency-high.md",
        )  # fmt: skip
    failed = counts.get("logins_failed", 0)
    if failed >= FAILED_LOGINS:
        yield Problem(
            "logins-failed", "warning",
            f"{failed:,} callers showed no valid credential within the last minute.",
            "A program has a wrong token, or someone guesses: see the incidents.",
            "runbook/logins-failing.md",
        )  # fmt: skip


def _incidents(status: Status) -> Iterator[Problem]:
    for event in status.get("events") or []:
        is_incident = event["key"].startswith(INCIDENT_KEY)
        if is_incident and time.time() - event["last_at"] <= INCIDENT_SECONDS:
            yield Problem(
                event["key"], "notice", f"A peer or a part broke a rule: {_ended(event['text'])}",
                "Read the incidents below.", "runbook/errors-high.md",
            )  # fmt: skip


def _ended(text: str) -> str:
    """Return the text with a full stop at its end."""
    return text if text.endswith(".") else f"{text}."


_RULES: Final[tuple[Callable[[Status], Iterator[Problem]], ...]] = (
    _pool,
    _readiness,
    _machine,
    _grpc,
    _partitions,
    _versions,
    _ingest,
    _tables,
    _doors,
    _shard_map,
    _upkeep,
    _backups,
    _requests,
    _incidents,
)
