"""petps serve."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from petps.cli.options import LOG_HELP, KafkaOption, kafka_options
from petps.cli.output import printable
from petps.errors import InvalidArgument

if TYPE_CHECKING:
    from petps.config import Config


def serve(
    pool: Annotated[
        Path | None, typer.Argument(metavar="[POOL]", help="The pool; by default that of --config.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A configuration file (`petps config` lists its keys).")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address of all ports; by default 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="Port of the native protocol, by default 7070; 0: any free one."),
    ] = None,
    http_port: Annotated[
        int | None,
        typer.Option(help="Port of health, /metrics and the status page, by default 7072."),
    ] = None,
    no_http: Annotated[bool, typer.Option("--no-http", help="Do not serve HTTP.")] = False,
    grpc_port: Annotated[
        int | None, typer.Option(help="Port of gRPC, by default 7071; 0: any free one.")
    ] = None,
    no_grpc: Annotated[bool, typer.Option("--no-grpc", help="Do not serve gRPC.")] = False,
    tls_certificate: Annotated[
        Path | None,
        typer.Option(help="TLS: the certificate, in PEM. --host beyond loopback needs TLS."),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="TLS: the private key of the certificate, in PEM.")
    ] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="TLS: the CA of the clients' certificates, in PEM.")
    ] = None,
    client_certificates: Annotated[
        str | None,
        typer.Option(help="TLS: ask clients for one: off (the default), optional or required."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Accept ports without TLS or without credentials.")
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(help="Worker threads; 0, the default: one for each processor, at most 8."),
    ] = None,
    gather: Annotated[
        str | None,
        typer.Option(
            help="How replies collect their rows: auto (the default), copy, sendmsg or zerocopy."
        ),
    ] = None,
    log: Annotated[
        str | None, typer.Option(metavar="LOG", help=f"Follow this delta log: {LOG_HELP}.")
    ] = None,
    kafka_option: KafkaOption = None,
    model: Annotated[str | None, typer.Option(help="The model of the log's deltas.")] = None,
    shard_map: Annotated[
        Path | None,
        typer.Option(help="The shard map: serve only the partitions that it assigns to --address."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="This server's address in the shard map; by default HOST:PORT."),
    ] = None,
    ready_file: Annotated[
        Path | None,
        typer.Option(help="Write this file (JSON: pid, port, ...) once the server serves."),
    ] = None,
) -> None:
    """Serve a pool over the network until SIGTERM or Ctrl-C.

    It serves at once, whatever the pool's size, also after a crash. Options override --config.
    SIGHUP reads --config and the shard map again, applies the settings that can change while
    serving, and lists those that need a restart. A second Ctrl-C exits without draining.

    [bold]Examples[/bold]

        petps serve my.pool

        petps serve --config deploy/config/petps.toml --ready-file /run/petps/ready

        petps serve my.pool --log deltas/ --port 0

        petps serve my.pool --shard-map shards.json --address h1:7070

        petps serve my.pool --tls-certificate server.pem --tls-key server.key

        petps serve my.pool --log kafka://kafka-1:9092,kafka-2:9092/ranking-deltas
    """
    import logging

    from petps import _native
    from petps.server import serve as run

    _native.stop_on_lost_pool()

    # The rooms log ([ingest] ...); the operator needs their warnings and errors.
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")

    overrides: dict[str, dict[str, Any]] = {
        "pool": {"path": pool},
        "server": {
            "host": host,
            "port": port,
            "http_port": http_port,
            "http": False if no_http else None,
            "grpc_port": grpc_port,
            "grpc": False if no_grpc else None,
            "workers": workers,
            "gather": gather,
            "shard_map": shard_map,
            "address": address,
            "insecure": True if insecure else None,
        },
        "tls": {
            "certificate": tls_certificate,
            "key": tls_key,
            "client_ca": tls_client_ca,
            "client_certificates": client_certificates,
        },
        "ingest": {"log": log, "model": model},
        "kafka": dict(kafka_options(kafka_option)),
    }
    run(
        _settings(config, overrides),
        ready_file=ready_file,
        log=_print_line,
        reread=lambda: _settings(config, overrides),
    )


def _print_line(text: str) -> None:
    # typer.echo flushes, so a reader of the pipe gets each line at once. A reader that has closed
    # the pipe must not stop the server.
    with contextlib.suppress(OSError):
        typer.echo(printable(text))


def _settings(file: Path | None, overrides: dict[str, dict[str, Any]]) -> Config:
    """Return the configuration of ``file``, overridden by the command line."""
    from petps.config import load, merge

    base = None if file is None else load(file)
    if base is None and overrides["pool"]["path"] is None:
        raise InvalidArgument("name the pool: `petps serve PATH`, or --config FILE")
    return merge(base, overrides, "command line")
