"""The schema of the configuration file. Its descriptions become the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from petps.config.cluster import ClusterConfig
from petps.config.doors import (
    AccessConfig,
    LimitsConfig,
    ServerConfig,
    TlsConfig,
    asks_for_credentials,
    door_risks,
    is_loopback,
)
from petps.config.duration import NEVER, parse_duration
from petps.config.place import check_store
from petps.config.router import RouterConfig
from petps.config.secret import is_secret
from petps.config.section import Name, Section, section
from petps.errors import InvalidArgument

__all__ = [
    "AccessConfig",
    "BackupConfig",
    "ClusterConfig",
    "Config",
    "IngestConfig",
    "LimitsConfig",
    "LogConfig",
    "ModelConfig",
    "OtelConfig",
    "PoolConfig",
    "RouterConfig",
    "ScrubConfig",
    "ServerConfig",
    "TableConfig",
    "TlsConfig",
]

MAX_DIM = 4096  # native/pool/pool.h kMaxDim
MAX_PARTITIONS = 1024  # native/pool/pool.h kMaxPartitions
MAX_APPLY_THREADS = 4  # native/table/range_locks.h kRanges
ADDRESS = "{address}"  # in backup.store
LEAVE_OUT = "leave admin_port out and use the socket beside the pool"


def _store(value: object) -> object:
    """Return the place of a store as text. Raise ValueError for one that check_store() refuses."""
    if value is None:
        return None
    try:
        check_store(str(value))
    except InvalidArgument as error:
        raise ValueError(str(error)) from None
    return str(value) if isinstance(value, Path) else value


def _duration(value: str, *, or_never: bool = False) -> str:
    """Return a duration as given. Raise ValueError if it is none."""
    try:
        if parse_duration(value, "it") == 0 and not or_never:
            raise ValueError("it must be above 0, such as 90s, 6h or 1d")
    except InvalidArgument as error:
        raise ValueError(str(error).partition("; got")[0]) from None
    return value


class PoolConfig(Section):
    """Place and durability of the rows."""

    path: Path = Field(
        strict=False,
        description="The pool: a file on a disk or on persistent memory (fsdax), or a device-DAX "
        "device (`/dev/dax0.0`).",
    )
    folder: Path | None = Field(
        default=None,
        strict=False,
        description="Folder for the files beside the pool (dead letters, bases of a log in Kafka, "
        "locations of dense weights). By default the pool's folder; for a device, the log's.",
    )
    durability: Literal["power", "process"] = Field(
        default="power",
        description="What an acknowledged write survives: with 'process' a kill of the server, "
        "with 'power' a power loss too. Used when the pool is created.",
    )


class ModelConfig(Section):
    """The model that the tables belong to."""

    name: Name = Field(default="default", description="The model's name, which clients use.")
    partitions: int = Field(
        default=8,
        ge=1,
        le=MAX_PARTITIONS,
        description="Number of partitions of its keys, and of its delta log. A partition is the "
        "unit of order and of ownership. The number can never change.",
    )


class IngestConfig(Section):
    """Source of deltas. Without a log, nothing is ingested."""

    log: str | None = Field(
        default=None,
        description="The delta log to follow: a folder, or kafka://host:port[,host:port]/topic.",
    )
    model: Name | None = Field(
        default=None, description="The model to follow; by default the one of [model]."
    )
    bases: Path | None = Field(
        default=None,
        strict=False,
        description="Folder of the bases to catch up from; by default 'bases' beside the log's "
        "folder, or beside the pool if the log is in Kafka.",
    )
    store: str | None = Field(
        default=None,
        description="A checkpoint store: after a gap, the server catches up to one of its versions "
        "or to a base. A folder, or any URL that fsspec knows (s3://...).",
    )
    switch: Literal["auto", "manual"] = Field(
        default="auto",
        description="When the model's plain name switches to a new instance (model@name) that a "
        "base began. 'auto': once all its partitions are loaded. 'manual': by `petps alias`, in a "
        "cluster by `petps cluster switch`.",
    )
    rows_per_second: int = Field(
        default=0,
        ge=0,
        description="Largest number of rows to apply per second; 0: no limit. SIGHUP reloads it.",
    )
    apply_threads: int = Field(
        default=0,
        ge=0,
        le=MAX_APPLY_THREADS,
        description="Threads that apply a large batch together; 0: one for every four processors.",
    )
    dead_letters: str | None = Field(
        default=None,
        description="Where the server writes messages that it cannot read: a folder or a topic. By "
        "default the folder 'dead-letters' beside the pool, or with Kafka the log's topic with "
        "'.dead-letters' appended.",
    )

    @field_validator("log", "dead_letters", mode="before")
    @classmethod
    def _text(cls, value: object) -> object:
        return str(value) if isinstance(value, Path) else value

    @field_validator("store", mode="before")
    @classmethod
    def _is_a_store(cls, value: object) -> object:
        return _store(value)


class BackupConfig(Section):
    """Backups by schedule. Without a store, none is made."""

    store: str | None = Field(
        default=None,
        description="The checkpoint store of the backups: a folder, or any URL that fsspec knows "
        "(s3://...). It holds the backups of one model and nothing else. With a shard map it must "
        "have '{address}', for which the server's address is put.",
    )
    every: str = Field(
        default="6h",
        description="Time from one backup to the next, such as '90s', '6h' or '1d'.",
    )
    keep: str | None = Field(
        default=None,
        description="How long backups are kept, such as 'all=2d,daily=30d,weekly=52w': all, and "
        "the newest of each hour, day and week (hourly, daily, weekly). Without it none is "
        "deleted. The newest is always kept.",
    )
    model: Name | None = Field(
        default=None, description="The model to back up; by default the one of [model]."
    )

    @field_validator("every")
    @classmethod
    def _is_a_duration(cls, value: str) -> str:
        return _duration(value)

    @field_validator("store", mode="before")
    @classmethod
    def _text(cls, value: object) -> object:
        return _store(value)

    @field_validator("keep")
    @classmethod
    def _is_a_retention(cls, value: str | None) -> str | None:
        rule = "(all|hourly|daily|weekly)=[0-9]+[smhdw]"  # petps/checkpoint/retention.py
        names = [] if value is None else [part.partition("=")[0] for part in value.split(",")]
        if value is not None and (
            re.fullmatch(f"{rule}(,{rule})*", value) is None or len(set(names)) < len(names)
        ):
            raise ValueError(
                "must have rules such as all=2d,daily=30d: all, hourly, daily or weekly, each at "
                "most once, with a number and s, m, h, d or w"
            )
        return value

    def every_seconds(self) -> int:
        """Return the time from one backup to the next, in seconds."""
        return parse_duration(self.every, "every")


class ScrubConfig(Section):
    """The check of all rows while they are served (native/table/SCRUB.md)."""

    every: str = Field(
        default="7d",
        description="How often each table's rows are compared with their checksums, such as '12h' "
        "or '7d'; damaged rows are removed, and restored from a base if there is one. 'never': "
        "only `petps scrub` does it. SIGHUP reloads it.",
    )
    bytes_per_second: int = Field(
        default=64 << 20,
        ge=0,
        description="Largest number of bytes to read per second for that; 0: no limit. SIGHUP "
        "reloads it.",
    )

    @field_validator("every")
    @classmethod
    def _is_a_duration(cls, value: str) -> str:
        return _duration(value, or_never=True)

    def every_seconds(self) -> int:
        """Return every in seconds; 0: never."""
        return parse_duration(self.every, "every")


class LogConfig(Section):
    """Format and level of the server's own log. The log of deltas is `ingest.log`."""

    format: Literal["text", "json"] = Field(
        default="text",
        description="'text': lines for people. 'json': one JSON object a line, on standard output, "
        "with time, level, event, message and fields (docs/reference/log.md). SIGHUP reloads it.",
    )
    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info",
        description="The lowest level of a line; 'debug' has a line for each request over HTTP and "
        "gRPC. `petps log-level` changes it in a running server. SIGHUP reloads it.",
    )


class OtelConfig(Section):
    """Traces by OpenTelemetry. Without an endpoint, the server records none."""

    endpoint: str | None = Field(
        default=None,
        description="The collector that receives the spans: `http://HOST:4318` (OTLP over HTTP) or "
        "`grpc://HOST:4317`; with TLS `https://` or `grpcs://`. Headers and certificates come from "
        "the standard variables OTEL_EXPORTER_OTLP_*. Needs `pip install 'petps[otel]'`.",
    )
    sample: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="The share of pulls that begin a trace in the server because their caller sent "
        "none. 0: only pulls that their caller sampled have spans.",
    )
    service_name: str = Field(
        default="petps", min_length=1, description="The name of this service in the traces."
    )

    @field_validator("endpoint")
    @classmethod
    def _is_an_endpoint(cls, value: str | None) -> str | None:
        if value is None:
            return None
        form = r"(https?://[^/@?#\s]+(/[^@?#\s]*)?|grpcs?://[^/@?#\s]+/?)"
        if re.fullmatch(form, value) is None:
            raise ValueError(
                "must be http://HOST:4318, https://HOST:4318, grpc://HOST:4317 or "
                "grpcs://HOST:4317, without a password: OTEL_EXPORTER_OTLP_HEADERS takes secrets"
            )
        return value.rstrip("/")


class TableConfig(Section):
    """One table."""

    dim: int = Field(ge=1, le=MAX_DIM, description="Values of a row.")
    dtype: Literal["f32", "f16", "bf16", "int8"] = Field(
        default="f32", description="How a value is stored; int8 is row-wise quantised."
    )
    capacity: int = Field(
        ge=1,
        description="Rows that the table can hold. A full table refuses new keys and updates the "
        "keys that it has.",
    )
    grow: Literal["manual", "auto"] = Field(
        default="manual",
        description="With 'auto', a serving table doubles its capacity when it is 85 % full, up to "
        "`capacity_max`. `petps table grow` works in either case.",
    )
    capacity_max: int | None = Field(
        default=None,
        ge=1,
        description="The capacity beyond which the table does not grow automatically.",
    )
    when_full: Literal["refuse", "evict_oldest", "evict_coldest"] = Field(
        default="refuse",
        description="What a full table that pushes feed does with a new key: refuse it, or evict "
        "the rows that were written, or pulled, longest ago or least. Counts at each start, only "
        "in a server without a shard map.",
    )
    expire_after: str = Field(
        default=NEVER,
        description="The age at which a row is deleted that was not written again, such as '90s', "
        "'6h' or '30d'. Counts when the table is created; `petps table expire` changes it.",
    )
    default: float | list[float] = Field(
        default=0.0,
        description="The row that a missing key gets: one number for all its values, or dim "
        "numbers.",
    )
    feed: Literal["push", "delta"] = Field(
        default="push",
        description="What writes the table: 'push' (pushes and `petps load`) or 'delta' (the log).",
    )

    @field_validator("expire_after")
    @classmethod
    def _is_a_duration(cls, value: str) -> str:
        return _duration(value, or_never=True)

    @field_validator("default")
    @classmethod
    def _finite(cls, value: float | list[float]) -> float | list[float]:
        numbers = value if isinstance(value, list) else [value]
        if any(number != number or number in (float("inf"), float("-inf")) for number in numbers):
            raise ValueError("must be finite numbers")
        return value

    @model_validator(mode="after")
    def _ceiling_is_known(self) -> TableConfig:
        if (self.grow == "auto") != (self.capacity_max is not None):
            raise ValueError("grow = 'auto' and capacity_max belong together: give both, or none")
        if self.capacity_max is not None and self.capacity_max < self.capacity:
            raise ValueError(
                f"capacity_max is {self.capacity_max}, below the capacity of {self.capacity}"
            )
        return self

    @model_validator(mode="after")
    def _only_pushes_evict(self) -> TableConfig:
        if self.when_full != "refuse" and self.feed == "delta":
            raise ValueError(
                f"when_full = '{self.when_full}' is for tables that pushes feed: the rows of one "
                "with feed = 'delta' leave through the log, or by expire_after"
            )
        return self

    @model_validator(mode="after")
    def _default_has_dim(self) -> TableConfig:
        if isinstance(self.default, list) and len(self.default) != self.dim:
            raise ValueError(f"default has {len(self.default)} numbers, but dim is {self.dim}")
        return self

    def expire_after_seconds(self) -> int:
        """Return expire_after in seconds; 0: never."""
        return parse_duration(self.expire_after, "expire_after")

    def default_row(self) -> list[float]:
        """Return the default row as ``dim`` numbers."""
        return self.default if isinstance(self.default, list) else [self.default] * self.dim


class Config(Section):
    """A whole file."""

    pool: PoolConfig = Field(description="Place and durability of the rows.")
    model: ModelConfig = section("The model of the tables.")
    server: ServerConfig = section("Addresses and threads.")
    tls: TlsConfig = section("Encryption of all ports.")
    access: AccessConfig = section("Who may do what.")
    cluster: ClusterConfig = section("Agreement of servers by etcd.")
    router: RouterConfig = section("The process that takes requests for all servers.")
    ingest: IngestConfig = section("Source of deltas.")
    backup: BackupConfig = section("Backups by schedule.")
    scrub: ScrubConfig = section("The check of all rows while they are served.")
    log: LogConfig = section("What the server writes about itself.")
    otel: OtelConfig = section("Traces by OpenTelemetry.")
    kafka: dict[str, str | int | float | bool] = Field(
        default_factory=dict,
        description="Options of Kafka by librdkafka's names (TLS, SASL, ...), and "
        "'topic.SETTING' for a topic that petps creates: petps/delta/kafka/FORMAT.md.",
    )
    tables: dict[Name, TableConfig] = Field(
        default_factory=dict, description="The tables that `petps create` creates, by name."
    )

    @field_validator("kafka", mode="before")
    @classmethod
    def _flat(cls, value: object) -> object:
        """Join nested tables to dotted names: TOML reads security.protocol = "SSL" as a table."""
        return dict(flattened(value)) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _servers_have_stores_of_their_own(self) -> Config:
        store = self.backup.store
        if store is not None and self._has_map() and ADDRESS not in store:
            raise ValueError(
                "with server.shard_map or [cluster] each server needs a store of its own: write "
                f"{ADDRESS} in backup.store, for which the server's address is put; it is '{store}'"
            )
        return self

    @model_validator(mode="after")
    def _has_one_map(self) -> Config:
        if self.cluster.endpoints and self.server.shard_map is not None:
            raise ValueError(
                "server.shard_map and cluster.endpoints both give a shard map: leave one of them "
                "out; `petps cluster init MAP` writes a file's map to etcd"
            )
        return self

    @model_validator(mode="after")
    def _one_server_evicts(self) -> Config:
        evicting = [name for name, table in self.tables.items() if table.when_full != "refuse"]
        if evicting and self._has_map():
            raise ValueError(
                f"tables.{evicting[0]}.when_full is for a server without a shard map: servers that "
                "share a partition would evict different rows"
            )
        return self

    def _has_map(self) -> bool:
        return self.server.shard_map is not None or bool(self.cluster.endpoints)

    def risks(self) -> list[str]:
        """Return what makes the doors insecure, which `server.insecure` accepts; often nothing."""
        return door_risks(self.server, self.tls, self.access)

    def has_secrets(self) -> bool:
        """Return whether the process holds a key, a password, or who has which token."""
        return (
            self.tls.key is not None
            or self.access.file is not None
            or self.cluster.has_secrets
            or any(map(is_secret, self.kafka))
        )

    def check_doors(self) -> None:
        """Raise InvalidArgument unless the doors are safe, or `server.insecure` accepts the risks.

        It is no check of the schema, because the command line may add what a file lacks.
        """
        server = self.server
        asks = asks_for_credentials(self.tls, self.access)
        if (
            server.admin_port is not None
            and self.access.file is None
            and (asks or not is_loopback(server.host))
        ):
            raise InvalidArgument(
                f"server.admin_port on {server.host} needs access.file, with a grant that has the "
                f"role admin, also with server.insecure: {LEAVE_OUT}"
            )
        risks = self.risks()
        if risks and not server.insecure:
            raise InvalidArgument(f"{'; '.join(risks)}: {_remedy(server)}")

    def ingest_model(self) -> str:
        """Return the model whose log is followed."""
        return self.ingest.model or self.model.name

    def backup_store(self) -> str | None:
        """Return the store of the backups by schedule; None: there are none."""
        if self.backup.store is None:
            return None
        server = self.server
        address = server.address or f"{server.host}:{server.port}"
        return self.backup.store.replace(ADDRESS, address.replace(":", "-"))

    def bases(self) -> Path | None:
        """Return the folder to search for bases; None without a log."""
        if self.ingest.log is None:
            return None
        if self.ingest.bases is not None:
            return self.ingest.bases
        in_kafka = "://" in self.ingest.log
        return (self.folder() if in_kafka else Path(self.ingest.log).parent) / "bases"

    def folder(self) -> Path:
        """Return the folder for files beside the pool. Raises InvalidArgument if none is known."""
        if self.pool.folder is not None:
            return self.pool.folder
        if not self.pool.path.is_char_device():
            return self.pool.path.parent
        if self.ingest.log is not None and "://" not in self.ingest.log:
            return Path(self.ingest.log).parent
        raise InvalidArgument(
            f"the pool {self.pool.path} is a device, which has no folder of its own: set "
            "pool.folder to a folder for dead letters and bases"
        )

    def dead_letters(self) -> str:
        """Return the destination of unreadable messages: a folder or a topic."""
        if self.ingest.dead_letters is not None:
            return self.ingest.dead_letters
        if self.ingest.log is not None and "://" in self.ingest.log:
            return f"{self.ingest.log}.dead-letters"
        return str(self.folder() / "dead-letters")


def _remedy(server: ServerConfig) -> str:
    if is_loopback(server.host):
        return f"{LEAVE_OUT}, or set access.file, or accept it with server.insecure (--insecure)"
    return (
        "set tls.certificate and tls.key (--tls-certificate, --tls-key), and access.file or "
        "tls.client_certificates = 'required'; or accept it with server.insecure (--insecure)"
    )


def flattened(table: dict[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted name, value) of each value in nested tables."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
