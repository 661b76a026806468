"""The pool and the native server of a configuration."""

from __future__ import annotations

import os
import time
from typing import Any, Final, Literal

from petps import _native
from petps.config import Config, TlsConfig
from petps.config.schema import LimitsConfig
from petps.errors import InUse, NotFound

__all__ = ["native_limits", "native_tls", "native_tls_files", "open_tables", "start_server"]

MAX_AUTOMATIC_WORKERS: Final = 8
DYING_SECONDS: Final = 5.0  # for which a killed process may hold a pool, on a busy machine
RETRY_SECONDS: Final = 0.02


def open_tables(config: Config) -> _native.Tables:
    """Open the pool. Raises its errors; NotFound says how to create one.

    A server that was killed a moment ago may still hold the pool, so this waits for it.
    """
    until = time.monotonic() + DYING_SECONDS
    while True:
        try:
            return _native.Tables.open(str(config.pool.path))
        except NotFound:
            raise NotFound(
                f"there is no pool at {config.pool.path}: create it with `petps create`, "
                "for instance `petps create --config FILE`"
            ) from None
        except InUse:
            if time.monotonic() >= until:
                raise
            time.sleep(RETRY_SECONDS)


def native_limits(limits: LimitsConfig) -> dict[str, int]:
    """Return the limits for the native server, with times in milliseconds."""
    values: dict[str, Any] = dict(limits)  # model_dump() would build the section's serializer
    values["idle_ms"] = round(1e3 * values.pop("idle_seconds"))
    return values


def native_tls(config: Config) -> _native.ServerTls | None:
    """Return the TLS of the native port; None without [tls]."""
    tls = config.tls
    if tls.certificate is None:
        return None
    return _native.ServerTls(*native_tls_files(tls))


def native_tls_files(
    tls: TlsConfig,
) -> tuple[str, str, str, Literal["off", "optional", "required"]]:
    """Return the arguments of ServerTls."""
    client_ca = "" if tls.client_ca is None else str(tls.client_ca)
    return str(tls.certificate), str(tls.key), client_ca, tls.client_certificates


def start_server(
    config: Config,
    tables: _native.Tables,
    shard_map: _native.ShardMap | None,
    tls: _native.ServerTls | None,
    gate: _native.Gate,
    pauses: tuple[list[int], list[int]] = ([], []),
) -> _native.Server:
    """Start to answer the callers that ``gate`` admits, with this native_tls().

    pauses: see _native.Server.set_pauses. Raises the errors of the port.
    """
    server = config.server
    return _native.Server.start(
        tables,
        host=server.host,
        port=server.port,
        workers=server.workers or min(os.cpu_count() or 1, MAX_AUTOMATIC_WORKERS),
        gather=server.gather,
        rdma=server.rdma,
        real_time=server.real_time,
        busy_poll_us=server.busy_poll_us,
        hot_set_seconds=server.hot_set_seconds,
        drain_ms=round(1e3 * server.drain_seconds),
        limits=native_limits(server.limits),
        shard_map=shard_map,
        address=server.address or "",
        call_workers=server.grpc_workers if server.grpc else 0,
        gate=gate,
        tls=tls,
        trace_sample=None if config.otel.endpoint is None else config.otel.sample,
        paused_pushes=pauses[0],
        paused_pulls=pauses[1],
    )
