"""The schema of the configuration file. Its descriptions become the documentation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from petps.errors import InvalidArgument

__all__ = [
    "Config",
    "IngestConfig",
    "LimitsConfig",
    "ModelConfig",
    "PoolConfig",
    "ServerConfig",
    "TableConfig",
]

MAX_DIM = 4096  # native/pool/pool.h kMaxDim
MAX_PARTITIONS = 1024  # native/pool/pool.h kMaxPartitions
MAX_WORKERS = 256  # native/server/server.h kMaxWorkers
MAX_APPLY_THREADS = 4  # native/table/turns.h kRanges
MAX_PORT = 65535

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.\-]{1,63}$")]
Port = Annotated[int, Field(ge=0, le=MAX_PORT)]


class Section(BaseModel):
    """One TOML table of the file. Unknown keys are refused; load.py names the nearest known key."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class PoolConfig(Section):
    """Place of the rows."""

    path: Path = Field(
        strict=False,
        description="The pool: a file on a disk or on persistent memory (fsdax), or a device-DAX "
        "device (`/dev/dax0.0`).",
    )
    folder: Path | None = Field(
        default=None,
        strict=False,
        description="Folder for what lies beside the pool (dead letters, bases of a log in Kafka, "
        "names of dense weights). By default the pool's own; of a device, the log's.",
    )
    durability: Literal["power", "process"] = Field(
        default="power",
        description="What an acknowledged write survives: 'power' loss, or only the end of the "
        "'process' (the kernel writes back when it likes). Used when the pool is created.",
    )


class ModelConfig(Section):
    """The model that the tables belong to."""

    name: Name = Field(default="default", description="The model's name, as clients ask for it.")
    partitions: int = Field(
        default=8,
        ge=1,
        le=MAX_PARTITIONS,
        description="Partitions of its keys: the unit of ordering and of ownership, and the "
        "partitions of its delta log. Fixed for ever when the model is created.",
    )


class LimitsConfig(Section):
    """Limits of one server. A connection that breaks one gets an error; others are unaffected."""

    keys_per_pull: int = Field(default=65_536, ge=1, le=65_536, description="Keys of one pull.")
    keys_per_push: int = Field(default=65_536, ge=1, le=65_536, description="Rows of one push.")
    body_bytes: int = Field(
        default=16 << 20, ge=4096, le=16 << 20, description="Bytes of one frame, both ways."
    )
    in_flight: int = Field(
        default=64, ge=1, le=64, description="Unanswered requests of one connection."
    )
    connections: int = Field(
        default=4096,
        ge=1,
        le=4096,
        description="Connections at once. When all are taken, a new one gets the place of the one "
        "that has been idle longest, at least a second.",
    )
    memory_bytes: int = Field(
        default=0,
        ge=0,
        description="Bytes that requests and replies of all connections may hold; 0: an eighth of "
        "the machine's memory, at most 2 GiB. Beyond it long requests are refused "
        "(RESOURCE_EXHAUSTED), pushes wait, and clients that leave replies unread are not read. At "
        "least four frames of `body_bytes`.",
    )
    idle_seconds: float = Field(
        default=300.0,
        ge=0,
        description="A connection that brings no whole request for this time, while nothing is "
        "owed to it, is closed; 0: never. Clients reconnect automatically.",
    )
    frame_ms: int = Field(
        default=30_000,
        ge=10,
        description="Milliseconds from a request's first byte to its last (slow-loris clients).",
    )
    output_stall_ms: int = Field(
        default=10_000,
        ge=10,
        description="Milliseconds after which a client that takes no reply is closed.",
    )
    pin_ms: int = Field(
        default=5_000,
        ge=10,
        description="Milliseconds that one reply may hold rows from being reused.",
    )


class ServerConfig(Section):
    """Endpoints and threads of the server."""

    host: str = Field(
        default="127.0.0.1",
        description="Numeric address to listen on. All but 127.0.0.1 are open to the network.",
    )
    port: Port = Field(default=7070, description="Native port; 0: any free one.")
    workers: int = Field(
        default=0,
        ge=0,
        le=MAX_WORKERS,
        description="Worker threads; 0: one for each processor, at most 8.",
    )
    real_time: int = Field(
        default=0,
        ge=0,
        le=99,
        description="Real-time priority (SCHED_FIFO) of worker threads, so that a pull never waits "
        "for a processor behind ingest or anything else on the machine; 0: none, their turns are "
        "short instead. Needs CAP_SYS_NICE or RLIMIT_RTPRIO (systemd: LimitRTPRIO). Have fewer "
        "workers than processors then: what is left is for everything else.",
    )
    gather: Literal["auto", "copy", "sendmsg", "zerocopy"] = Field(
        default="auto",
        description="How a reply's rows are collected: copied into one buffer, gathered by the "
        "kernel (sendmsg), or gathered by the network card (zerocopy: for large rows over a real "
        "network; over loopback the kernel copies anyway). auto: whichever a measurement of 0.1 s "
        "at start-up found cheapest, by row bytes and rows; `petps status` shows it.",
    )
    rdma: str = Field(
        default="off",
        min_length=1,
        max_length=63,
        description="Whether clients may ask for RDMA over the native port: 'off', 'auto' (the "
        "first device with an active port) or a device's name. The pool must be in memory (a file "
        "on tmpfs will do) or on device-DAX: a network card cannot keep the pages of another file. "
        "As many worker threads again serve it.",
    )
    http_host: str = Field(
        default="127.0.0.1", description="Address of health, /metrics and the status page."
    )
    http_port: Port = Field(default=7072, description="Port of those; 0: any free one.")
    http: bool = Field(default=True, description="Whether to serve HTTP at all.")
    grpc_host: str = Field(
        default="127.0.0.1", description="Numeric address of gRPC (petps/v1/petps.proto)."
    )
    grpc_port: Port = Field(default=7071, description="Port of gRPC; 0: any free one.")
    grpc: bool = Field(default=True, description="Whether to serve gRPC at all.")
    grpc_workers: int = Field(
        default=1,
        ge=1,
        le=MAX_WORKERS,
        description="Threads that look rows up for gRPC, beside `workers`.",
    )
    ready_lag_seconds: float = Field(
        default=60.0,
        ge=0,
        description="Seconds. Not ready (/readyz, and gRPC health) while a partition of the log is "
        "not followed, or is longer behind the log than this; the time in which the log does not "
        "answer counts. 0: however far behind. SIGHUP reloads it.",
    )
    shard_map: Path | None = Field(
        default=None,
        strict=False,
        description="The shard map (petps/server/FORMAT.md): this server owns the partitions that "
        "it gives to `address`, and reads it again when it changes. Without one it owns all.",
    )
    address: str | None = Field(
        default=None,
        min_length=1,
        max_length=255,
        description="How the shard map calls this server, and clients reach it: 'host:port'. By "
        "default `host` and `port`.",
    )
    hot_set_seconds: int = Field(
        default=10, ge=1, description="How often clients are asked to send their hot keys."
    )
    drain_seconds: float = Field(
        default=5.0,
        ge=0,
        le=600,
        description="How long a stop waits for what is in flight before it cuts it. SIGHUP "
        "reloads it.",
    )
    limits: LimitsConfig = Field(default_factory=LimitsConfig, description="See [server.limits].")


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
        "folder, with Kafka beside the pool.",
    )
    store: str | None = Field(
        default=None,
        description="A checkpoint store whose versions a server catches up to after a gap, beside "
        "the bases: a folder, or any URL that fsspec knows (s3://...).",
    )
    switch: Literal["auto", "manual"] = Field(
        default="auto",
        description="When the model's plain name comes to mean a new instance (model@name) that a "
        "base began: 'auto' once all its partitions are loaded, or by 'petps alias'.",
    )
    rows_per_second: int = Field(
        default=0,
        ge=0,
        description="Most rows to apply per second; 0: as fast as they come. SIGHUP reloads it.",
    )
    apply_threads: int = Field(
        default=0,
        ge=0,
        le=MAX_APPLY_THREADS,
        description="Threads that apply a large batch, each its share of the index; 0: one for "
        "every four processors.",
    )
    dead_letters: str | None = Field(
        default=None,
        description="Where chunks go that could not be read: a folder, by default 'dead-letters' "
        "beside the pool; or a topic, with Kafka by default the log's with '.dead-letters'.",
    )

    @field_validator("log", "store", "dead_letters", mode="before")
    @classmethod
    def _text(cls, value: object) -> object:
        return str(value) if isinstance(value, Path) else value


class TableConfig(Section):
    """One table."""

    dim: int = Field(ge=1, le=MAX_DIM, description="Numbers in a row.")
    dtype: Literal["f32", "f16", "bf16", "int8"] = Field(
        default="f32", description="How a number is stored; int8 is row-wise quantised."
    )
    capacity: int = Field(
        ge=1, description="Rows the table can hold. A full table keeps updating what it has."
    )
    default: float | list[float] = Field(
        default=0.0,
        description="What a missing key shows: one number for all, or dim numbers.",
    )
    feed: Literal["push", "delta"] = Field(
        default="push", description="Who writes it: pushes (and load), or the delta log."
    )

    @field_validator("default")
    @classmethod
    def _finite(cls, value: float | list[float]) -> float | list[float]:
        numbers = value if isinstance(value, list) else [value]
        if any(number != number or number in (float("inf"), float("-inf")) for number in numbers):
            raise ValueError("must be finite numbers")
        return value

    @model_validator(mode="after")
    def _default_has_dim(self) -> TableConfig:
        if isinstance(self.default, list) and len(self.default) != self.dim:
            raise ValueError(f"default has {len(self.default)} numbers, but dim is {self.dim}")
        return self

    def default_row(self) -> list[float]:
        """Return the default row as ``dim`` numbers."""
        return self.default if isinstance(self.default, list) else [self.default] * self.dim


class Config(Section):
    """A whole file."""

    pool: PoolConfig = Field(description="Where the rows live.")
    model: ModelConfig = Field(default_factory=ModelConfig, description="The model of the tables.")
    server: ServerConfig = Field(default_factory=ServerConfig, description="Doors and threads.")
    ingest: IngestConfig = Field(
        default_factory=IngestConfig, description="Where deltas come from."
    )
    kafka: dict[str, str | int | float | bool] = Field(
        default_factory=dict,
        description="Options of Kafka by librdkafka's names (TLS, SASL, ...), and "
        "'topic.<setting>' for a topic to be made: petps/delta/kafka/FORMAT.md.",
    )
    tables: dict[Name, TableConfig] = Field(
        default_factory=dict, description="The tables that `petps create` makes, by name."
    )

    @field_validator("kafka", mode="before")
    @classmethod
    def _flat(cls, value: object) -> object:
        """Join nested tables to dotted names: TOML reads security.protocol = "SSL" as a table."""
        return dict(_flattened(value, "")) if isinstance(value, dict) else value

    def ingest_model(self) -> str:
        """Return the model whose log is followed."""
        return self.ingest.model or self.model.name

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
            "pool.folder to where dead letters and bases may lie"
        )

    def dead_letters(self) -> str:
        """Return the place for unreadable chunks: a folder or a topic."""
        if self.ingest.dead_letters is not None:
            return self.ingest.dead_letters
        if self.ingest.log is not None and "://" in self.ingest.log:
            return f"{self.ingest.log}.dead-letters"
        return str(self.folder() / "dead-letters")


def _flattened(table: dict[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
