"""petps serve."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from petps.cli.options import LOG_HELP, KafkaOption, kafka_options
from petps.errors import InvalidArgument, PetpsError

if TYPE_CHECKING:
    from petps.config import Config


def serve(
    pool: Annotated[
        Path | None, typer.Argument(metavar="[POOL]", help="The pool; by default that of --config.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help="A configuration file. `petps config` lists its keys, and their variables."
        ),
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
    log_format: Annotated[
        str | None,
        typer.Option(
            help="How the server's own log is written: text (the default), or json, one object a "
            "line."
        ),
    ] = None,
    log_level: Annotated[
        str | None,
        typer.Option(
            help="The lowest level of the lines of that log: debug, info (the default), warning or "
            "error."
        ),
    ] = None,
    ready_file: Annotated[
        Path | None,
        typer.Option(help="Write this file (JSON: pid, port, ...) once the server serves."),
    ] = None,
) -> None:
    """Serve a pool over the network until SIGTERM or Ctrl-C.

    It serves at once, whatever the pool's size, also after a crash. An option overrides the
    environment (PETPS_SERVER_PORT, ...), which overrides --config. SIGHUP reads --config and the
    shard map again, applies the settings that can change while serving, and lists those that need a
    restart. A second Ctrl-C exits without draining.

    [bold]Examples[/bold]

        petps serve my.pool

        petps serve --config deploy/config/petps.toml --ready-file /run/petps/ready

        petps serve my.pool --log deltas/ --port 0

        petps serve my.pool --shard-map shards.json --address h1:7070

        petps serve my.pool --tls-certificate server.pem --tls-key server.key

        petps serve my.pool --log kafka://kafka-1:9092,kafka-2:9092/ranking-deltas
    """
    from petps import _native
    from petps import log as process_log
    from petps.server import serve as run

    _native.stop_on_lost_pool()

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
        "log": {"format": log_format, "level": log_level},
        "kafka": dict(kafka_options(kafka_option)),
    }
    # Of an error in the settings too; a format that only the file names is not known before.
    is_json = (log_format or os.environ.get("PETPS_LOG_FORMAT")) == "json"
    try:
        settings = _settings(config, overrides)
        process_log.set_up(settings.log.format, settings.log.level)
        is_json = settings.log.format == "json"
        run(
            settings,
            ready_file=ready_file,
            log=process_log.write,
            reread=lambda: _settings(config, overrides),
        )
    except (PetpsError, OSError) as error:
        if not is_json:
            raise
        process_log.set_up("json", "info")
        _log_end(error)


def _log_end(error: PetpsError | OSError) -> NoReturn:
    """Write the error that ends the process as a line of the log, and exit."""
    from petps import log as process_log
    from petps.cli.app import exit_code, text_of

    if isinstance(error, PetpsError):
        text, code, status = str(error), error.code, exit_code(error)
    else:
        text, code, status = text_of(error), "IO_ERROR", 1
    process_log.write(process_log.Line(text, "failed", process_log.ERROR, code=code))
    raise typer.Exit(status)


def _settings(file: Path | None, overrides: dict[str, dict[str, Any]]) -> Config:
    """Return the settings of ``file``, the environment and the command line."""
    from petps.config import read_settings

    if file is None and overrides["pool"]["path"] is None and "PETPS_POOL_PATH" not in os.environ:
        raise InvalidArgument(
            "name the pool: `petps serve PATH`, --config FILE, or PETPS_POOL_PATH"
        )
    return read_settings(file, os.environ, overrides).config
