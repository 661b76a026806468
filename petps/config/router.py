"""The section [router]: the process that takes requests for all servers of a cluster."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import Field, field_validator, model_validator

from petps.config.doors import (
    MAX_WORKERS,
    LimitsConfig,
    ServerConfig,
    TlsConfig,
    is_loopback,
)
from petps.config.section import Port, Section, section
from petps.errors import InvalidArgument

__all__ = ["RouterConfig", "accepted_risks", "check_router_doors"]

MAX_CALLS = 1024  # native/router/calls.h kMaxCalls
MAX_CALLERS = 4096  # native/router/router.h kMaxCallers
_SERVERS = re.compile(r"petps(\+tls)?://[^/?\s]+/?")


class RouterConfig(Section):
    """Addresses, threads and servers of `petps router`. Servers do not read this section."""

    servers: str | None = Field(
        default=None,
        description="Any servers of the cluster: 'petps://h1:7070,h2:7070', with TLS "
        "'petps+tls://h1:7070'. They tell the router the shard map.",
    )
    host: str = Field(
        default="127.0.0.1",
        description="Numeric address of all ports. Beyond loopback the router needs [tls], and "
        "serves nobody if the servers ask nobody for credentials, unless `insecure` accepts both.",
    )
    port: Port = Field(default=7080, description="Port of the native protocol; 0: any free one.")
    grpc_port: Port = Field(default=7081, description="Port of gRPC; 0: any free one.")
    grpc: bool = Field(default=True, description="Whether to serve gRPC.")
    http_port: Port = Field(default=7082, description="Port of HTTP; 0: any free one.")
    http: bool = Field(default=True, description="Whether to serve HTTP.")
    insecure: bool = Field(
        default=False,
        description="Accept ports beyond loopback without TLS, or for servers that ask nobody for "
        "credentials. The router's first line and a metric say so.",
    )
    workers: int = Field(
        default=0,
        ge=0,
        le=MAX_WORKERS,
        description="Threads that receive requests, pull from servers, and send replies; 0: one "
        "for each processor, at most 8.",
    )
    calls: int = Field(
        default=64,
        ge=1,
        le=MAX_CALLS,
        description="Requests that may be at the servers at the same time, and threads for those "
        "that wait for more than replies. Further requests wait. One token, or without one a host, "
        "has at most half of them.",
    )
    callers: int = Field(
        default=256,
        ge=1,
        le=MAX_CALLERS,
        description="Tokens that the router serves at the same time, each with connections of its "
        "own to the servers. A further one gets RESOURCE_EXHAUSTED.",
    )
    caller_idle_seconds: float = Field(
        default=300.0,
        gt=0,
        description="A token without requests and connections for this time is forgotten, and its "
        "connections to the servers are closed.",
    )
    deadline_seconds: float = Field(
        default=1.5,
        ge=0.001,
        le=3600,
        description="How long a request may take, without the time that a pull may wait for its "
        "version. Less than the 2 s that clients allow, so that they receive the reason.",
    )
    drain_seconds: float = Field(
        default=5.0,
        ge=0,
        le=600,
        description="Seconds for which a stopping router waits for requests in flight.",
    )
    zone: str = Field(
        default="",
        max_length=255,
        description="Where the router is: it prefers servers of this zone of the shard map.",
    )
    ca: Path | None = Field(
        default=None,
        strict=False,
        description="File of the CA, in PEM, that the servers' certificates are checked with; by "
        "default those of the system.",
    )
    server_name: str | None = Field(
        default=None,
        min_length=1,
        description="The name that the servers' certificates must have; by default the host in "
        "each server's address.",
    )
    limits: LimitsConfig = section("See [router.limits].")

    @field_validator("host")
    @classmethod
    def _is_numeric(cls, value: str) -> str:
        return ServerConfig._is_numeric(value)

    @field_validator("servers")
    @classmethod
    def _is_a_url(cls, value: str | None) -> str | None:
        if value is not None and _SERVERS.fullmatch(value) is None:
            raise ValueError(
                "must be petps://HOST:PORT[,HOST:PORT], or petps+tls:// with TLS, without a model"
            )
        return value

    @model_validator(mode="after")
    def _has_tls_for_its_ca(self) -> RouterConfig:
        has_tls = (self.servers or "petps+tls:").startswith("petps+tls:")
        if not has_tls and (self.ca is not None or self.server_name is not None):
            raise ValueError(
                "ca and server_name are for servers with TLS: write petps+tls:// in servers, or "
                "leave them out"
            )
        return self


def router_risks(router: RouterConfig, tls: TlsConfig) -> list[str]:
    """Return what makes the router's ports insecure, as sentences; nothing if they are safe."""
    if is_loopback(router.host) or tls.certificate is not None:
        return []
    return [f"router.host {router.host} is beyond loopback, and nothing is encrypted"]


def accepted_risks(router: RouterConfig, tls: TlsConfig) -> list[str]:
    """Return what `router.insecure` accepts, as sentences; nothing without it, or on loopback."""
    if not router.insecure or is_loopback(router.host):
        return []
    open_servers = (
        f"router.host {router.host} is beyond loopback, and servers that ask nobody for "
        "credentials are open to everybody there"
    )
    return [*router_risks(router, tls), open_servers]


def check_router_doors(router: RouterConfig, tls: TlsConfig) -> None:
    """Raise InvalidArgument unless the ports are safe, or `router.insecure` accepts the risks."""
    if tls.client_certificates != "off":
        raise InvalidArgument(
            f"tls.client_certificates = '{tls.client_certificates}' does not fit a router: it "
            "cannot pass a certificate on to the servers. Leave it out, and give callers tokens"
        )
    risks = router_risks(router, tls)
    if risks and not router.insecure:
        raise InvalidArgument(
            f"{'; '.join(risks)}: set tls.certificate and tls.key (--tls-certificate, --tls-key), "
            "or accept it with router.insecure (--insecure)"
        )
