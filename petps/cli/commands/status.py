"""petps status."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import closing
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, Final

import typer

from petps.cli.options import JsonReport, TargetName
from petps.cli.output import bytes_text, facts, json_out, table
from petps.cli.target import open_target, reading_answer
from petps.config.duration import NEVER, duration_text
from petps.errors import DeadlineExceeded, InUse, Unavailable
from petps.log import printable

POLL_SECONDS: Final = 0.05  # between two looks at a server that is not ready
# A server answers on its native port a moment before it knows whether it is ready.
NOT_SAID_YET: Final = "starting: it has not said yet whether it is ready"


def status(
    target: TargetName,
    wait: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0, help="Wait until the server is ready, at most this long."
        ),
    ] = 0.0,
    json_: JsonReport = False,
) -> None:
    """Show a pool or a running server: tables, rows, bytes, versions, ingest.

    [bold]Examples[/bold]

        petps status my.pool

        petps status petps://127.0.0.1:7070 --json

        petps status petps://127.0.0.1:7070 --wait 30
    """
    report = _wait_until_ready(target, wait) if wait else _read(target)
    if json_:
        json_out(report)
        return
    with reading_answer(target):
        _show(report)


def _show(report: dict[str, Any]) -> None:
    if report.get("kind") == "router":
        _show_router(report)
        return
    _show_problems(report)
    _show_pool(report)
    _show_tables(report)
    if report.get("ingest"):
        _show_ingest(report["ingest"])
    if report.get("backup"):
        _show_backup(report["backup"])
    if report.get("shard_map_error"):
        typer.echo(printable(f"shard map not used: {report['shard_map_error']}"))
    if (report.get("cluster") or {}).get("error"):
        typer.echo(printable(f"etcd: {report['cluster']['error']}"))
    for fault in report.get("expiry_faults", {}).values():
        typer.echo(printable(f"not expiring: {fault}"))
    _show_scrub(report)
    for incident in report.get("incidents", []):
        typer.echo(f"incident: {printable(incident)}")


def _show_router(report: dict[str, Any]) -> None:
    stats = report["stats"]
    silent = [server["address"] for server in report["servers"] if not server["is_live"]]
    pairs: list[tuple[str, object]] = [
        ("router", f"{report['host']}:{report['port']}, {report['workers']} workers"),
        ("software", report["software"]),
        ("up", f"{report['uptime_s']:,.0f} s"),
        ("callers", f"{report['callers']:,} tokens, {stats['connections']:,} connections"),
        ("at the servers", f"{report['calls_in_flight']} of {report['calls']} requests"),
        ("servers", ", ".join(server["address"] for server in report["servers"])),
        ("pulls", f"{stats['pulls']:,} ({stats['keys']:,} keys, {stats['misses']:,} missing)"),
        ("pushes", f"{stats['pushes']:,} ({stats['rows_pushed']:,} rows)"),
        ("errors", f"{stats['errors']:,}"),
    ]
    if silent:
        pairs.append(("not answering", ", ".join(silent)))
    facts(pairs)


def _read(target: str) -> dict[str, Any]:
    with closing(open_target(target, model=None, read_only=True)) as handle:
        return handle.status()


def _wait_until_ready(target: str, seconds: float) -> dict[str, Any]:
    """Return the status once the server is ready. Raise DeadlineExceeded with the reason."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            report = _read(target)
            # Without a server, the target is a closed pool.
            reason = _unready(report) if "uptime_s" in report else "no server has it open"
        except (InUse, Unavailable) as error:  # InUse: it has no socket yet
            reason = str(error)
        if not reason:
            return report
        if time.monotonic() >= deadline:
            raise DeadlineExceeded(f"{target} is not ready after {seconds:g} s: {reason}")
        time.sleep(POLL_SECONDS)


def _unready(report: dict[str, Any]) -> str | None:
    """Return why the server of ``report`` is not ready, or None."""
    reason: str | None = report.get("unready", NOT_SAID_YET)
    return reason


def _show_problems(report: dict[str, Any]) -> None:
    """Show what is wrong, in the sentence of the status page, and the remedies."""
    from petps.server.problems import find_problems, headline

    problems = find_problems(report)
    typer.echo(printable(headline(problems, report.get("well_since"))))
    since = {problem["key"]: problem["since"] for problem in report.get("problems", [])}
    for problem in problems:
        text = f"{problem.text} " if len(problems) > 1 else ""
        at = since.get(problem.key)
        age = "" if at is None else f" for {_about(max(0.0, time.time() - at))}"
        line = f"  {problem.severity}{age}: {text}{problem.remedy} See docs/{problem.page}"
        typer.echo(printable(line))


def _show_pool(report: dict[str, Any]) -> None:
    pool = report["pool"]
    durability = "volatile (lost when the process ends)" if pool["volatile"] else pool["durability"]
    state = "read-only after a failed write-back; restart" if pool["failed"] else "good"
    if pool.get("lost_power"):
        state = "lost power; run `petps verify`"
    pairs: list[tuple[str, object]] = [
        ("pool", pool["path"] or "in memory"),
        ("medium", f"{pool['medium']}, durability {durability}"),
        ("size", _size_text(pool)),
        *_pages(pool),
        ("state", state),
        ("last stop", "clean" if pool["was_clean"] else "a crash; recovered"),
    ]
    if pool["path"] and not pool["read_only"] and pool["readers_refused"]:
        pairs.append(("other readers", f"refused: {pool['readers_refused']}"))
    if "uptime_s" in report:
        stats = report["stats"]
        pairs += [
            ("server", f"{report['host']}:{report['port']}, {report['workers']} workers"),
            ("software", report["software"]),
            ("up", f"{report['uptime_s']:,.0f} s"),
            ("ready", _unready(report) or "yes"),
            ("pulls", f"{stats['pulls']:,} ({stats['keys']:,} keys, {stats['misses']:,} missing)"),
            ("pushes", f"{stats['pushes']:,} ({stats['rows_pushed']:,} rows)"),
            ("error replies", stats["errors"]),
            ("owns", _shard_text(report["shard"])),
            ("connections", stats["connections"]),
            ("gather", _gather_text(report["gather"])),
            ("rdma", _rdma_text(report)),
            *_security(report),
        ]
        for name, latency in report.get("latency", {}).items():
            quantiles = f"p50 {latency['p50_us']:.0f} us, p99 {latency['p99_us']:.0f} us"
            pairs.append((f"{name} latency", quantiles))
    for instance in report["instances"]:
        alias = f", alias {', '.join(instance['aliases'])}" if instance["aliases"] else ""
        text = f"{instance['state']}, {instance['partitions']} partitions, run {instance['run']}, "
        text += f"version {instance['applied_version']}{alias}"
        pairs.append((f"instance {instance['name']}", text))
    facts(pairs)


def _size_text(pool: dict[str, Any]) -> str:
    size, allocated = pool["bytes"], pool.get("allocated_bytes")  # servers before 0.2: None
    text = str(bytes_text(size))
    if allocated is not None and allocated < size:
        text += f", {bytes_text(allocated)} of them on the disk"
    if pool.get("free_bytes"):
        text += f"; {bytes_text(pool['free_bytes'])} are free space"
    return text


def _pages(pool: dict[str, Any]) -> list[tuple[str, object]]:
    """Return which pages map the pool, if it is known: a sample of what this server has read."""
    pages = pool.get("sampled_pages")
    if not pages or not pages["mapped_bytes"]:
        return []
    share = pages["huge_bytes"] / pages["mapped_bytes"]
    return [("pages", f"{100 * share:.0f} % of what is mapped is on huge pages (2 MiB)")]


def _security(report: dict[str, Any]) -> list[tuple[str, object]]:
    """Return the state of TLS, and whether the server is insecure."""
    pairs: list[tuple[str, object]] = []
    if report.get("insecure"):
        pairs.append(("INSECURE", "its ports lack TLS or credentials (server.insecure)"))
    if tls := report.get("tls"):
        at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(tls["expires_at"]))
        verb = "EXPIRED at" if tls["is_expired"] else "expires at"
        pairs.append(("tls", f"{', '.join(tls['names'])}, {verb} {at}"))
        if tls["error"]:
            pairs.append(("tls files not used", tls["error"]))
    access = report.get("access")  # servers before 0.2 do not report it
    if access is not None and access["mode"] != "open":
        pairs.append(("access", _access_text(access)))
        if access["error"]:
            pairs.append(("access file not used", access["error"]))
    return pairs


def _access_text(access: dict[str, Any]) -> str:
    if access["mode"] == "certificates":
        text = "every client certificate of client_ca"
    else:
        text = f"{access['grants']} grants"
    for key, verb in (("expired", "EXPIRED"), ("expire_soon", "expire within a week")):
        if access[key]:
            text += f"; {verb}: {', '.join(access[key])}"
    refused = ("logins_failed", "requests_denied", "requests_limited")
    return f"{text}; " + ", ".join(f"{access[key]} {key.replace('_', ' ')}" for key in refused)


def _rdma_text(report: dict[str, Any]) -> str:
    unavailable = report.get("rdma_unavailable")  # servers before 0.2 do not report it
    return f"{report['rdma']} ({unavailable})" if unavailable else str(report["rdma"])


def _shard_text(shard: dict[str, Any]) -> str:
    if shard["map_version"] == 0:
        return "everything (no shard map)"
    return (
        f"partitions {shard['owned']} of {shard['partitions']}, as {shard['address']} in shard map "
        f"version {shard['map_version']}"
    )


def _gather_text(gather: dict[str, Any]) -> str:
    """Return the gather mode: 'copy (set)', or the measured mode for each range of row sizes."""
    if gather["mode"] != "auto":
        return f"{gather['mode']} (set)"
    if not gather["measured"]:
        return "auto (not measured yet: copy up to 1 KiB a row, sendmsg above)"
    parts = []
    for rows in sorted({choice["rows"] for choice in gather["choices"]}):
        cells = [choice for choice in gather["choices"] if choice["rows"] == rows]
        ranges = []
        for mode, group in groupby(cells, key=itemgetter("mode")):
            sizes = [cell["row_bytes"] for cell in group]
            ranges.append(f"{mode} {sizes[0]}..{sizes[-1]}")
        parts.append(f"{rows} rows: {', '.join(ranges)} B")
    return f"auto, measured in {gather['measuring_ms']:.0f} ms; " + "; ".join(parts)


def _show_tables(report: dict[str, Any]) -> None:
    frozen = {entry["name"] for entry in report["instances"] if entry["state"] == "frozen"}
    rows = [
        (
            record["name"],
            record["instance"],
            f"{record['dim']} x {record['dtype']}",
            record["feed"],
            record["rows"],
            f"{100 * record['rows'] / record['capacity']:.1f} %",
            _expiry_text(record, frozen),
            bytes_text(record["slots"] * record["row_bytes"]),
            bytes_text(record["index_bytes"] + record["header_bytes"] + record["allocator_bytes"]),
        )
        for record in report["tables"]
    ]
    table(
        (
            "table", "instance", "row", "fed by", "rows", "full", "expires", "row slots",
            "index, headers",
        ),
        rows,
    )  # fmt: skip


def _show_scrub(report: dict[str, Any]) -> None:
    """Show what is missing, and why tables cannot be scrubbed."""
    scrub = report.get("scrub")  # servers before 0.2: none
    if not scrub:
        return
    tables = {str(record["id"]): record for record in report["tables"]}
    states = [
        (tables[number], state) for number, state in scrub["tables"].items() if number in tables
    ]
    pairs: list[tuple[str, object]] = []
    if "every_seconds" in scrub:  # of a server
        every = duration_text(scrub["every_seconds"])
        limit = scrub["bytes_per_second"]
        pace = f", at most {bytes_text(limit)}/s" if limit else ""
        pairs.append(("scrub", f"every {every}{pace}" if every != NEVER else every))
    passes = [state["last_pass"] for _, state in states]
    if passes:
        oldest = None if None in passes else min(passes)
        text = "not every table yet" if oldest is None else f"{_about(time.time() - oldest)} ago"
        pairs.append(("scrubbed", text))
    if pairs:
        facts(pairs)
    for record, state in states:
        if state["missing"]:
            line = (
                f"missing: {state['missing']:,} rows of table '{record['name']}' of "
                f"{record['instance']} were damaged and removed (POOL.damage lists them)"
            )
            typer.echo(printable(line))
    for fault in scrub["faults"].values():
        typer.echo(printable(f"scrub: {fault}"))


def _expiry_text(record: dict[str, Any], frozen: set[str]) -> str:
    """Return the age at which rows expire, and by how much they may be older.

    frozen: the instances that keep their rows.
    """
    seconds = record.get("expire_after", 0)  # servers before 0.2: none
    if seconds == 0 or record["instance"] in frozen:
        return NEVER
    if record["event_time_ns"] == 0:
        return f"{duration_text(seconds)}, nothing counted yet"
    delay = record["expiry_delay"]
    return f"{duration_text(seconds)}, late by {'unknown' if delay < 0 else _about(delay)}"


def _about(seconds: float) -> str:
    """Return a duration in its largest unit of which there are at least two."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} s"


def _show_backup(backup: dict[str, Any]) -> None:
    last = backup["last"]
    if last is None and backup["store"] is None and not backup["error"]:
        return
    pairs: list[tuple[str, object]] = []
    if backup["store"] is not None:
        every = duration_text(backup["every_seconds"])
        pairs.append(("backups", f"every {every} to {backup['store']}"))
    if last is None:
        pairs.append(("last backup", "none by this server"))
    else:
        age = _about(max(0.0, time.time() - last["finished_at"]))
        kind = f"{last['kind']}, log version {last['log_version']}, {bytes_text(last['bytes'])}"
        pairs.append(("last backup", f"{last['version']} ({kind}), {age} ago, to {last['store']}"))
    if backup["error"]:
        pairs.append(("backup failed", backup["error"]))
    for warning in backup["warnings"]:
        pairs.append(("backup", warning))
    facts(pairs)


def _state_text(ingest: dict[str, Any]) -> str:
    """Return the error, or the number of partitions in each state."""
    if ingest["error"]:
        return str(ingest["error"])
    if ingest["paused"]:
        return "paused"
    states = Counter(partition["state"] for partition in ingest["partitions"])
    if len(states) == 1:
        return str(next(iter(states)))
    return ", ".join(f"{count:,} {state}" for state, count in states.most_common())


def _lag_text(lag_seconds: float | None) -> str:
    return "unknown" if lag_seconds is None else f"{lag_seconds:.1f} s"


def _reasons(partitions: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return what is wrong with which partitions: a broker that is away is one fact, not 64."""
    from petps.server.shard_map import ranges

    numbers: dict[str, list[int]] = {}
    for partition in partitions:
        if partition["reason"]:
            text = f"{partition['state']}: {partition['reason']}"
            numbers.setdefault(text, []).append(partition["partition"])
    return [
        (f"partition {', '.join(map(str, ranges(of_reason)))}", text)
        for text, of_reason in numbers.items()
    ]


def _show_ingest(ingest: dict[str, Any]) -> None:
    percentiles = ingest["freshness"]
    freshness = (
        "no message yet"
        if percentiles["p50_ms"] is None
        else f"p50 {percentiles['p50_ms']} ms, p99 {percentiles['p99_ms']} ms"
    )
    facts(
        [
            ("ingest", f"model {ingest['model']} from {ingest['log']}"),
            ("state", _state_text(ingest)),
            ("version", ingest["version"]),
            ("dense weights", ingest["dense"] or "none named by this version"),
            ("rows", ingest["rows"]),
            ("freshness", freshness),
            *_reasons(ingest["partitions"]),
        ]
    )
    lines = [
        (
            str(partition["partition"]),
            partition["instance"],
            partition["state"],
            str(partition["run"]),
            partition["seq"],
            partition["version"],
            "unknown" if partition["lag_records"] is None else partition["lag_records"],
            _lag_text(partition["lag_seconds"]),
            partition["gaps"],
            partition["duplicates"],
            partition["zombies"],
            partition["dead_letters"],
        )
        for partition in ingest["partitions"]
    ]
    columns = ("partition", "feeds", "state", "run", "seq", "version", "lag", "behind")
    table((*columns, "gaps", "duplicates", "older runs", "dead letters"), lines)
