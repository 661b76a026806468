"""A server that shows every metric: tables, log, TLS, access, backups, scrubbing, traces, a map."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import petps_client

import petps
from petps.delta import TableSchema, open_log
from petps.publish import Publisher
from petps.server import Serving
from petps.server.access_file import AccessFile, Entry, hash_of
from tests.certificates import Authority
from tests.ports import stable_port
from tests.python.server.conftest import settings
from tests.python.waiting import wait_until

PARTITIONS: Final = 8
TOKEN: Final = "petps_the-token-of-the-scraper"
KEYS: Final = np.arange(100, dtype=np.uint64)


class Watched:
    """The server, its log, and a scraper with a token. ``settings`` is for Prometheus."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority(folder)
        pair = self.authority.issue("server")
        access = folder / "access.json"
        AccessFile(access).add(
            Entry(name="scraper", token_sha256=hash_of(TOKEN), roles=["read", "write"], models="*")
        )
        self.token_file = folder / "token"
        self.token_file.write_text(TOKEN)
        self.pool = folder / "pool"
        with petps.create(self.pool, durability="process") as opened:
            opened.create_table("items", dim=4, capacity=1000, expire_after=3600)
            opened.create_table("fed", dim=4, capacity=1000, feed="delta")
            opened.push("items", KEYS, np.ones((100, 4), np.float32))
        self.port = stable_port()
        self.other = f"127.0.0.1:{stable_port()}"
        self.map = folder / "map.json"
        self.write_map(1)
        self.config = settings(
            self.pool,
            server={
                "port": self.port,
                "shard_map": self.map,
                "address": f"127.0.0.1:{self.port}",
            },
            tls={"certificate": pair.certificate, "key": pair.key},
            access={"file": access},
            ingest={"log": folder / "log"},
            backup={"store": f"{folder}/store-{{address}}", "every": "1h"},
            scrub={"every": "10s"},
            otel={"endpoint": "http://127.0.0.1:9"},  # nothing is sampled, so nobody is called
        )

    def write_map(self, version: int) -> None:
        """Write a shard map: this server owns everything, another one nothing."""
        servers = [
            {"address": f"127.0.0.1:{self.port}", "partitions": [f"0-{PARTITIONS - 1}"]},
            {"address": self.other, "partitions": [], "follows": [0]},
        ]
        content = {
            "model": "default", "version": version, "partitions": PARTITIONS, "servers": servers,
        }  # fmt: skip
        temporary = self.map.with_suffix(".new")
        temporary.write_text(json.dumps(content))
        temporary.replace(self.map)

    def scrape(self, serving: Serving, **headers: str) -> tuple[bytes, dict[str, str]]:
        """Return the body and the headers of /metrics."""
        request = urllib.request.Request(
            f"https://127.0.0.1:{serving.http_port}/metrics",
            headers={"Authorization": f"Bearer {TOKEN}", **headers},
        )
        context = self.authority.client_context()
        with urllib.request.urlopen(request, timeout=60, context=context) as answer:
            return answer.read(), dict(answer.headers)

    def connect(self) -> petps_client.Client:
        """Return a client of the server."""
        tls = petps_client.Tls(ca=str(self.authority.certificate))
        url = f"petps+tls://127.0.0.1:{self.port}"
        return petps_client.connect(url, tls=tls, token=TOKEN, deadline_ms=120_000)

    def job(self, serving: Serving) -> dict[str, Any]:
        """Return the job of Prometheus' configuration, as docs/how-to/monitor.md shows it."""
        return {
            "job_name": "petps",
            "scrape_interval": "5s",  # and so the longest time of a scrape, on a busy machine
            "scheme": "https",
            "tls_config": {"ca_file": str(self.authority.certificate)},
            "authorization": {"credentials_file": str(self.token_file)},
            "static_configs": [{"targets": [f"127.0.0.1:{serving.http_port}"]}],
        }


@contextlib.contextmanager
def watched_server(folder: Path) -> Iterator[tuple[Watched, Serving]]:
    """Serve, with a version of the log applied, some pulls, a push, an error and a backup."""
    watched = Watched(folder)
    with (
        contextlib.closing(
            open_log(str(folder / "log"), partitions=PARTITIONS, create=True)
        ) as log,
        Serving(watched.config, log=lambda line: None) as serving,
        watched.connect() as client,
    ):
        publisher = Publisher(log, "default", tables=[TableSchema("fed", "f32", 4)])
        publisher.begin_continue(None)
        publisher.publish("fed", KEYS, np.ones((100, 4), np.float32))
        version = publisher.commit()
        client.pull("fed", KEYS, min_version=version, wait_ms=30_000, deadline_ms=60_000)
        client.pull("items", np.arange(150, dtype=np.uint64))
        client.push("items", KEYS, np.full((100, 4), 2, np.float32))
        wait_until(lambda: serving.status()["backup"]["written"] > 0)
        wait_until(lambda: serving.status()["ingest"]["log_reachable"])
        wait_until(lambda: any(entry["asked_at"] for entry in serving.status()["members"]))
        yield watched, serving
