"""The sections of the doors: [server], [server.limits], [tls] and [access]."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from petps.config.section import Port, Section, section

__all__ = [
    "AccessConfig",
    "LimitsConfig",
    "ServerConfig",
    "TlsConfig",
    "asks_for_credentials",
    "door_risks",
    "is_loopback",
]

MAX_WORKERS = 256  # native/server/server.h kMaxWorkers
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = re.compile(rf"{_OCTET}(\.{_OCTET}){{3}}")


class LimitsConfig(Section):
    """Limits of one server. A connection that breaks one gets an error; others are unaffected."""

    keys_per_pull: int = Field(default=65_536, ge=1, le=65_536, description="Keys of one pull.")
    keys_per_push: int = Field(default=65_536, ge=1, le=65_536, description="Rows of one push.")
    body_bytes: int = Field(
        default=16 << 20, ge=4096, le=16 << 20, description="Bytes of one request or reply."
    )
    in_flight: int = Field(
        default=64, ge=1, le=64, description="Unanswered requests of one connection."
    )
    connections: int = Field(
        default=4096,
        ge=1,
        le=4096,
        description="Open connections. At the limit, a new connection replaces the one that has "
        "been idle longest, if that was idle for at least a second.",
    )
    connections_per_peer: int = Field(
        default=1024,
        ge=0,
        le=4096,
        description="Open connections of the native port from one address, so that no peer takes "
        "the places of all others; of IPv6, from one network of 64 bits. Raise it if a proxy or a "
        "translating router hides many clients. 0: no limit.",
    )
    memory_bytes: int = Field(
        default=0,
        ge=0,
        description="Bytes that requests and replies of all connections may hold; 0: an eighth of "
        "the machine's memory, at most 2 GiB. At the limit, the server refuses long requests "
        "(RESOURCE_EXHAUSTED), delays pushes, and does not read from clients that leave replies "
        "unread. The limit is at least four times `body_bytes`.",
    )
    idle_seconds: float = Field(
        default=300.0,
        ge=0,
        description="The server closes a connection that sends no whole request for this time and "
        "waits for no reply; 0: never. Clients reconnect automatically. A connection that has "
        "never sent a byte is closed after `frame_ms`.",
    )
    frame_ms: int = Field(
        default=30_000,
        ge=10,
        description="Milliseconds within which a request must arrive, from its first byte to its "
        "last.",
    )
    output_stall_ms: int = Field(
        default=10_000,
        ge=10,
        description="Milliseconds after which the server closes a connection whose client reads "
        "no reply.",
    )
    pin_ms: int = Field(
        default=5_000,
        ge=10,
        description="Milliseconds for which one reply may keep the slots of its rows from reuse.",
    )


class ServerConfig(Section):
    """Addresses and threads of the server."""

    host: str = Field(
        default="127.0.0.1",
        description="Numeric address of all ports. Beyond loopback (127.0.0.0/8 and ::1) the "
        "server does not start without TLS and either `access.file` or "
        "`tls.client_certificates = 'required'`, unless `insecure` accepts that.",
    )
    port: Port = Field(default=7070, description="Port of the native protocol; 0: any free one.")
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
        "for a processor that ingest or another program uses; 0: none, but short time slices. "
        "Needs CAP_SYS_NICE or RLIMIT_RTPRIO (systemd: LimitRTPRIO). Configure fewer workers than "
        "processors: all other threads share the remaining processors.",
    )
    busy_poll_us: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="Microseconds after a request over TCP in which a worker looks for the next "
        "one without sleeping. Saves the time that the kernel takes to wake a thread, for a whole "
        "processor per worker while requests come. Only for more processors than busy threads; 0: "
        "sleep at once.",
    )
    gather: Literal["auto", "copy", "sendmsg", "zerocopy"] = Field(
        default="auto",
        description="How a reply's rows are collected: copied into one buffer (copy), gathered by "
        "the kernel (sendmsg), or gathered by the network card (zerocopy: for large rows over a "
        "real network; over loopback the kernel copies anyway). auto: the mode that a measurement "
        "of 0.1 s at start-up finds cheapest for each row size and number of rows; `petps status` "
        "shows the result.",
    )
    rdma: str = Field(
        default="off",
        min_length=1,
        max_length=63,
        description="Whether clients may ask for RDMA over the native port: 'off', 'auto' (the "
        "first device with an active port) or a device's name. The pool must be in memory (a file "
        "on tmpfs too) or on device-DAX, because a network card cannot pin the pages of other "
        "files. RDMA gets as many worker threads of its own as `workers`.",
    )
    http_port: Port = Field(default=7072, description="Port of HTTP; 0: any free one.")
    http: bool = Field(default=True, description="Whether to serve HTTP.")
    grpc_port: Port = Field(default=7071, description="Port of gRPC; 0: any free one.")
    grpc: bool = Field(default=True, description="Whether to serve gRPC.")
    admin_port: Port | None = Field(
        default=None,
        description="TCP port of administration (petps/admin/admin.proto), in addition to the "
        "socket beside the pool; usually 7073, 0: any free one. Without it there is no such port. "
        "It needs `access.file`, with a grant that has the role admin; on loopback, and without "
        "required client certificates, `insecure` replaces it.",
    )
    insecure: bool = Field(
        default=False,
        description="Accept doors that are not safe: beyond loopback without TLS or without "
        "credentials, and on loopback an `admin_port` through which every user of this machine may "
        "change everything. The server's first line, its status and a metric say so.",
    )
    grpc_workers: int = Field(
        default=1,
        ge=1,
        le=MAX_WORKERS,
        description="Threads that look up rows for gRPC, in addition to `workers`.",
    )
    ready_lag_seconds: float = Field(
        default=60.0,
        ge=0,
        description="Largest lag, in seconds, of a ready server. /readyz and gRPC health report "
        "not ready while a partition of the log is not followed or lags more than this. The time "
        "in which the log does not answer counts. 0: no limit. SIGHUP reloads it.",
    )
    shard_map: Path | None = Field(
        default=None,
        strict=False,
        description="The shard map (petps/server/FORMAT.md): this server owns the partitions that "
        "the map assigns to `address`, and reads the map again when it changes. Without a map it "
        "owns all partitions.",
    )
    address: str | None = Field(
        default=None,
        min_length=1,
        max_length=255,
        description="This server's name in the shard map, at which clients reach it: 'host:port'. "
        "By default `host` and `port`.",
    )
    hot_set_seconds: int = Field(
        default=10, ge=1, description="Seconds between two requests to clients for their hot keys."
    )
    drain_seconds: float = Field(
        default=5.0,
        ge=0,
        le=600,
        description="Seconds for which a stopping server waits for requests in flight before it "
        "cuts them. SIGHUP reloads it.",
    )
    limits: LimitsConfig = section("See [server.limits].")

    @field_validator("host")
    @classmethod
    def _is_numeric(cls, value: str) -> str:
        # Without the module socket, whose import delays the start. The native server also checks.
        if ":" not in value and _IPV4.fullmatch(value) is None:
            raise ValueError("must be a numeric IPv4 or IPv6 address, such as 127.0.0.1 or ::1")
        return value


class TlsConfig(Section):
    """Encryption of the native port, HTTP, gRPC and the admin port. Without a certificate, none."""

    certificate: Path | None = Field(
        default=None,
        strict=False,
        description="File of the server's certificate in PEM, followed by those between it and its "
        "CA. The server looks at the files of this section four times a second, and uses changed "
        "ones for new connections.",
    )
    key: Path | None = Field(
        default=None,
        strict=False,
        description="File of the certificate's private key in PEM, without a passphrase.",
    )
    client_ca: Path | None = Field(
        default=None,
        strict=False,
        description="File of the CAs, in PEM, whose certificates clients may show.",
    )
    client_certificates: Literal["off", "optional", "required"] = Field(
        default="off",
        description="Whether clients are asked for a certificate of `client_ca`. 'optional': a "
        "client may show one or none; gRPC and the admin port then ask for none, because grpcio "
        "cannot.",
    )

    @model_validator(mode="after")
    def _files_are_complete(self) -> TlsConfig:
        if (self.certificate is None) != (self.key is None):
            given, missing = (
                ("key", "certificate") if self.certificate is None else ("certificate", "key")
            )
            raise ValueError(f"{given} is given without {missing}: give both, or none")
        asks = self.client_certificates != "off"
        if asks and self.certificate is None:
            raise ValueError(
                f"client_certificates = '{self.client_certificates}' needs TLS: give certificate "
                "and key"
            )
        if asks and self.client_ca is None:
            raise ValueError(
                f"client_certificates = '{self.client_certificates}' needs client_ca, the CA of "
                "the clients' certificates"
            )
        if self.client_ca is not None and not asks:
            raise ValueError(
                "client_ca is given, but client_certificates = 'off' asks no client for a "
                "certificate: set it to 'optional' or 'required', or leave client_ca out"
            )
        return self


class AccessConfig(Section):
    """Permissions of callers."""

    file: Path | None = Field(
        default=None,
        strict=False,
        description="The access file: tokens and certificate names, with their roles and models. "
        "Without it no door asks for a token.",
    )


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a numeric address: 127.0.0.0/8 or ::1.

    Other spellings of ::1 count as beyond loopback.
    """
    return host == "::1" or (host.startswith("127.") and _IPV4.fullmatch(host) is not None)


def asks_for_credentials(tls: TlsConfig, access: AccessConfig) -> bool:
    """Return whether every caller must show a token or a certificate."""
    return access.file is not None or tls.client_certificates == "required"


def door_risks(server: ServerConfig, tls: TlsConfig, access: AccessConfig) -> list[str]:
    """Return what makes the doors insecure, as sentences; nothing if they are safe."""
    asks = asks_for_credentials(tls, access)
    if is_loopback(server.host):
        if server.admin_port is None or asks:
            return []
        return ["admin_port asks nobody for credentials, and every user of this machine reaches it"]
    risks = []
    if tls.certificate is None:
        risks.append(f"server.host {server.host} is beyond loopback, and nothing is encrypted")
    if not asks:
        risks.append(
            f"server.host {server.host} is beyond loopback, and nobody is asked for credentials"
        )
    return risks
