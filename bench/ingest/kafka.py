"""Ingest from a real broker: how fast it is, how it affects pulls, how fresh rows are.

One broker on 127.0.0.1 shares the processors with everything else. A topic holds versions of full
512-byte rows, for keys that the table has, in random order. In each round, ingest is compared with
reading the same topic with the same consumer settings and discarding it, and with applying such
rows from memory.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import petps_client
from confluent_kafka import Consumer, TopicPartition

from bench import DEADLINE_MS
from bench.ingest.deltas import (
    MODEL,
    SCHEMA,
    TABLE,
    WAIT_SECONDS,
    Keys,
    draw_keys,
    ingest_rate,
    publish,
    tables_of,
)
from petps import _native
from petps.delta import open_log
from petps.delta.kafka.options import KafkaOptions, parse_address
from petps.server.ingest.ingest import ROWS_MAX
from petps.server.ingest.native_tables import NativeInstanceTables
from tests.kafka.broker import Broker, NotAvailable

ROOT: Final = Path(__file__).resolve().parents[2]
PARTITIONS: Final = 8
KEYS_PER_PULL: Final = 500
PULLER_PRIORITY: Final = 10  # real-time priority, above that of real-time workers
LOOP: Final = (
    "from petps import _native; _native.lower_priority(); print(flush=True)\nwhile True: pass"
)
Result = dict[str, Any]


def figures(work: dict[str, Any]) -> Iterator[Result]:
    """Yield the results. If no broker can run, print the reason and yield nothing."""
    try:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            broker = Broker(Path(folder) / "broker")
            stack.callback(broker.stop)
            yield from _figures(work, broker, Path(folder))
    except NotAvailable as reason:
        print(f"skipped ingest: {reason}", file=sys.stderr, flush=True)


def _figures(work: dict[str, Any], broker: Broker, folder: Path) -> Iterator[Result]:
    keys = draw_keys(int(work["keys"]))
    place = f"kafka://{broker.address}/rows"
    versions = int(work["versions"])
    total = publish(place, PARTITIONS, keys, int(work["version_rows"]), versions)
    with closing(open_log(place, partitions=PARTITIONS)) as log:
        ends = log.end_offsets(range(PARTITIONS))
    consume_rates, ingest_rates, apply_rates = [], [], []
    for number in range(int(work["rounds"])):
        consume_rates.append(_consume(place, ends, total))
        pool = folder / f"round-{number}.pool"
        with tables_of(pool, keys, PARTITIONS) as tables:
            apply_rates.append(_apply(tables, keys, total))
        pool.unlink()
        with tables_of(pool, keys, PARTITIONS) as tables:
            rate = ingest_rate(place, PARTITIONS, tables, total, versions, threads=1)
            ingest_rates.append(rate)
        pool.unlink()
    ratios = [
        ingesting / consuming
        for ingesting, consuming in zip(ingest_rates, consume_rates, strict=True)
    ]
    bounds = [
        1 / (1 / consume_rate + 1 / apply_rate)
        for consume_rate, apply_rate in zip(consume_rates, apply_rates, strict=True)
    ]
    rate = statistics.median(ingest_rates)
    sizes = {"rows": total, "row_bytes": SCHEMA.row_bytes, "rounds": len(ingest_rates)}
    yield {
        "name": "ingest.kafka",
        "value": rate,
        "unit": "rows/s",
        "ratio_to": "reading the same topic and throwing it away",
        "ratio": statistics.median(ratios),
        "limit": statistics.median(consume_rates),
        "bytes_per_second": rate * (SCHEMA.row_bytes + 8),
        **sizes,
    }
    yield {
        "name": "ingest.kafka_vs_apply",
        "value": rate,
        "unit": "rows/s",
        "ratio_to": "1 / (1 / reading + 1 / applying from memory)",
        "ratio": statistics.median(
            ingesting / bound for ingesting, bound in zip(ingest_rates, bounds, strict=True)
        ),
        "applying": statistics.median(apply_rates),
        **sizes,
    }
    yield from _pulls_during(place, folder, keys, rate, work)
    yield from _freshness(f"kafka://{broker.address}/live", folder, keys, rate, work)


def _apply(tables: _native.Tables, keys: Keys, total: int) -> float:
    """Return the rows a second applied from memory, in batches of ingest's size."""
    table = NativeInstanceTables(tables, MODEL).tables()[TABLE]
    rng = np.random.default_rng(3)
    size = min(ROWS_MAX, len(keys))
    rows = rng.integers(0, 255, (size, SCHEMA.row_bytes), dtype=np.uint8)
    batches = [rng.choice(keys, size, replace=False) for _ in range(8)]
    began = time.monotonic()
    applied_rows = 0
    while applied_rows < total:
        table.apply(batches[applied_rows // size % len(batches)], rows, None, 1)
        applied_rows += size
    return applied_rows / (time.monotonic() - began)


def _consume(place: str, ends: dict[int, int], total: int) -> float:
    """Return the rows a second of a consumer with ingest's settings that discards what it reads.

    The time is from the first message to the last, so it does not include the connection.
    """
    address = parse_address(place)
    consumer = Consumer(KafkaOptions(None).consumer(address))
    consumer.assign([TopicPartition(address.topic, partition, 0) for partition in ends])
    expected = sum(ends.values())
    began = time.monotonic()
    messages = 0
    while messages < expected:
        message = consumer.poll(1.0)
        if message is None:
            continue
        messages += 1
        if messages == 1:
            began = time.monotonic()
    seconds = time.monotonic() - began
    consumer.close()
    return total * (1 - 1 / expected) / seconds


@contextmanager
def _server(
    place: str, pool: Path, rows_per_second: int, *, real_time: int = 0
) -> Iterator[dict[str, Any]]:
    """Run a `petps serve` that follows ``place``; yield the facts of its ready file."""
    config, ready = pool.with_suffix(".toml"), pool.with_suffix(".json")
    config.write_text(
        f'[pool]\npath = "{pool}"\n[model]\nname = "{MODEL}"\n'
        f"[server]\nport = 0\nhttp_port = 0\ngrpc = false\nreal_time = {real_time}\n"
        f'[ingest]\nlog = "{place}"\nrows_per_second = {rows_per_second}\n'
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "petps.cli", "serve", "--config", str(config),
         "--ready-file", str(ready)],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        _wait(ready.exists)
        yield json.loads(ready.read_text())
    finally:
        process.terminate()
        process.wait()


def _wait(until: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not until():
        if time.monotonic() > deadline:
            raise SystemExit(f"the benchmark's server was not ready after {WAIT_SECONDS:g} s")
        time.sleep(0.01)


def _status(facts: dict[str, Any]) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{facts['http_port']}/status.json") as reply:
        status: dict[str, dict[str, Any]] = json.loads(reply.read())
    # Before ingest has begun, the status has no such part.
    return status.get("ingest", {"rows": 0, "version": 0})


def _pulls(client: petps_client.Client, keys: Keys, rate: float, seconds: float) -> list[float]:
    """Return the seconds from intended to answered, of ``rate`` pulls a second; 0: no pause."""
    rng = np.random.default_rng(4)
    requests = [rng.choice(keys, KEYS_PER_PULL) for _ in range(64)]
    out = np.empty((KEYS_PER_PULL, SCHEMA.dim), np.float32)
    begin = time.perf_counter()
    latencies = []
    for number in range(1 << 30):
        due = begin + number / rate if rate else time.perf_counter()
        if due > begin + seconds:
            break
        while (remaining := due - time.perf_counter()) > 0:
            time.sleep(remaining)  # spinning would take a processor from the measured processes
        client.pull(TABLE, requests[number % len(requests)], out=out)
        latencies.append(time.perf_counter() - due)
    return latencies


@contextmanager
def _run_in_real_time() -> Iterator[bool]:
    """Run this thread with real-time priority. Yield False if that is not permitted."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PULLER_PRIORITY))
    except PermissionError:
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _p99(client: petps_client.Client, keys: Keys, work: dict[str, Any]) -> float:
    """Return the p99 in microseconds of pulls at the given rate."""
    with _run_in_real_time():
        latencies = _pulls(
            client, keys, float(work["pulls_per_second"]), float(work["pull_seconds"])
        )
    return 1e6 * float(np.percentile(latencies, 99))


@contextmanager
def _run_beside(commands: list[list[str]]) -> Iterator[None]:
    """Run programs beside the block, from the first line that each prints."""
    with ExitStack() as stack:
        for command in commands:
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert process.stdout is not None
            process.stdout.readline()
            stack.callback(process.stdout.close)
        yield


def _pulls_round(
    place: str, folder: Path, keys: Keys, rate: int, work: dict[str, Any], *, real_time: int = 0
) -> dict[str, float]:
    """Return p99s in microseconds: during ingest of a backlog, idle, and for two floors.

    The floors ingest nothing: pulls beside a consumer of the same topic at the same rate, and
    pulls beside one endless loop for each processor, as nice as ingest. In real time the floors
    are left out.
    """
    pool = folder / "served.pool"
    with tables_of(pool, keys, PARTITIONS):
        pass
    values: dict[str, float] = {}
    with (
        _server(place, pool, rate, real_time=real_time) as facts,
        petps_client.connect(
            f"petps://127.0.0.1:{facts['port']}/{MODEL}", deadline_ms=DEADLINE_MS
        ) as client,
    ):
        _wait(lambda: _status(facts)["rows"] > 0)
        before, began = _status(facts)["rows"], time.monotonic()
        values["busy"] = _p99(client, keys, work)
        values["rows"] = (_status(facts)["rows"] - before) / (time.monotonic() - began)
        _wait(lambda: all(not p["lag_records"] for p in _status(facts)["partitions"]))
        values["idle"] = _p99(client, keys, work)
        if not real_time:
            with _run_beside([[sys.executable, "-m", "bench.ingest.consumer", place, str(rate)]]):
                values["consumer"] = _p99(client, keys, work)
            with _run_beside([[sys.executable, "-c", LOOP]] * (os.cpu_count() or 1)):
                values["loops"] = _p99(client, keys, work)
            closed_loop = _pulls(client, keys, 0, 1.0)
            values["peak"] = len(closed_loop) / sum(closed_loop)
    pool.unlink()
    return values


def _pulls_during(
    place: str, folder: Path, keys: Keys, peak: float, work: dict[str, Any]
) -> Iterator[Result]:
    """Compare the p99 of open-loop pulls during ingest at half the peak.

    It is compared with that beside a consumer that discards the same topic at the same rate, and
    with that of an idle machine.
    """
    rate = int(peak / 2)
    with _run_in_real_time() as permitted:
        pass
    rounds, in_real_time = [], []
    for _ in range(int(work["pull_rounds"])):
        rounds.append(_pulls_round(place, folder, keys, rate, work))
        if permitted:
            in_real_time.append(
                _pulls_round(place, folder, keys, rate, work, real_time=PULLER_PRIORITY - 1)
            )

    def median(name: str) -> float:
        return statistics.median(values[name] for values in rounds)

    def ratio(name: str, selected_rounds: list[dict[str, float]], to: str = "idle") -> float | None:
        return (
            statistics.median(values[name] / values[to] for values in selected_rounds)
            if selected_rounds
            else None
        )

    yield {
        "name": "pull.p99_during_ingest.vs_consumer",
        "value": median("busy"),
        "unit": "us",
        "ratio_to": "the same pulls beside a consumer that discards the topic at the same rate",
        "ratio": ratio("busy", rounds, "consumer"),
        "limit": median("consumer"),
        "rounds": [values["busy"] / values["consumer"] for values in rounds],
    }
    yield {
        "name": "pull.p99_during_ingest",
        "value": median("busy"),
        "unit": "us",
        "ratio_to": "the same pulls with nothing to ingest",
        "ratio": ratio("busy", rounds),
        "limit": median("idle"),
        "ratio_real_time": ratio("busy", in_real_time),
        "ratio_beside_consumer": ratio("consumer", rounds),
        "ratio_beside_loops": ratio("loops", rounds),
        "puller": "SCHED_FIFO" if permitted else "SCHED_OTHER",
        "rounds": [values["busy"] / values["idle"] for values in rounds],
        "rows_per_second_ingested": median("rows"),
        "pulls_per_second": float(work["pulls_per_second"]),
        "peak_pulls_per_second": median("peak"),
    }


def _freshness(
    place: str, folder: Path, keys: Keys, peak: float, work: dict[str, Any]
) -> Iterator[Result]:
    """Measure from a version's commit to its being servable, published live at half the peak."""
    pool = folder / "fresh.pool"
    with tables_of(pool, keys, PARTITIONS):
        pass
    np.save(folder / "keys.npy", keys)
    target_rate = peak / 2
    arguments = [place, str(folder / "keys.npy"), str(target_rate), str(work["fresh_seconds"])]
    with closing(open_log(place, partitions=PARTITIONS)) as log:
        log.end_offsets(range(PARTITIONS))  # creates the topic
    with _server(place, pool, 0) as facts:
        process = subprocess.run(
            [sys.executable, "-m", "bench.ingest.publisher", *arguments],
            cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        published = json.loads(process.stdout)
        _wait(lambda: _status(facts)["version"] == published["version"])
        freshness = _status(facts)["freshness"]
    pool.unlink()
    for percentile in ("p50", "p99"):
        yield {
            "name": f"freshness.ms.{percentile}",
            "value": freshness[f"{percentile}_ms"],
            "unit": "ms",
            "ratio_to": None,
            "ratio": None,
            "rows_per_second": published["rows_per_second"],
            "rows_per_second_wanted": target_rate,
            "versions": published["version"],
        }
