"""petps router."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer


def router(
    servers: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Any servers of the cluster: petps://h1:7070,h2:7070, or petps+tls://.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A configuration file with [router]; its keys may be variables too."),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address of all ports; by default 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="Port of the native protocol, by default 7080; 0: any free one."),
    ] = None,
    http_port: Annotated[
        int | None, typer.Option(help="Port of health and /metrics, by default 7082.")
    ] = None,
    no_http: Annotated[bool, typer.Option("--no-http", help="Do not serve HTTP.")] = False,
    grpc_port: Annotated[
        int | None, typer.Option(help="Port of gRPC, by default 7081; 0: any free one.")
    ] = None,
    no_grpc: Annotated[bool, typer.Option("--no-grpc", help="Do not serve gRPC.")] = False,
    ca: Annotated[
        Path | None,
        typer.Option(help="TLS to the servers: the CA of their certificates, in PEM."),
    ] = None,
    tls_certificate: Annotated[
        Path | None,
        typer.Option(help="TLS to callers: the certificate. --host beyond loopback needs it."),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="TLS to callers: the private key of the certificate.")
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Accept ports without TLS, or of servers without tokens."),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(help="Worker threads; 0, the default: one for each processor, at most 8."),
    ] = None,
    calls: Annotated[
        int | None,
        typer.Option(help="Requests that may be at the servers at the same time, by default 64."),
    ] = None,
    log_format: Annotated[
        str | None, typer.Option(help="How the router's own log is written: text, or json.")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="The lowest level of its lines: debug, info, warning, error.")
    ] = None,
    ready_file: Annotated[
        Path | None,
        typer.Option(help="Write this file (JSON: pid, port, ...) once the router serves."),
    ] = None,
) -> None:
    """Take requests for all servers of a cluster at one address, until SIGTERM or Ctrl-C.

    Clients that know one address, or no shard maps, reach every partition. The router keeps no rows
    and has no rights: it asks the servers with the token of its caller, or with none. Run as many
    as you like. An option overrides the environment (PETPS_ROUTER_PORT, ...), which overrides
    --config.

    [bold]Examples[/bold]

        petps router --servers petps://h1:7070,h2:7070

        petps router --config router.toml --ready-file /run/petps/router
    """
    from petps import log as process_log
    from petps.config import read_settings
    from petps.router import serve

    overrides: dict[str, dict[str, Any]] = {
        "pool": {"path": Path("unused")},  # a router has none, so its file needs none
        "router": {
            "servers": servers,
            "host": host,
            "port": port,
            "http_port": http_port,
            "http": False if no_http else None,
            "grpc_port": grpc_port,
            "grpc": False if no_grpc else None,
            "ca": ca,
            "insecure": True if insecure else None,
            "workers": workers,
            "calls": calls,
        },
        "tls": {"certificate": tls_certificate, "key": tls_key},
        "log": {"format": log_format, "level": log_level},
    }
    settings = read_settings(config, os.environ, overrides).config
    process_log.set_up(settings.log.format, settings.log.level)
    serve(settings.router, settings.tls, ready_file=ready_file, log=process_log.write)
