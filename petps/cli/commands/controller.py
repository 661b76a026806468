"""petps controller."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Annotated

import typer


def controller(
    config: Annotated[
        Path | None,
        typer.Option(help="A configuration file with [cluster]; its keys may be variables too."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="The name of this process in status; by default its host and pid."),
    ] = None,
) -> None:
    """Move partitions between the servers of a cluster, until SIGTERM or Ctrl-C.

    Run two or more on different machines: etcd elects one, and the next one continues what a dead
    one began. A controller keeps nothing itself. It speaks to etcd only, and never to a server.

    [bold]Examples[/bold]

        petps controller --config cluster.toml
    """
    from petps import log as process_log
    from petps.cli.cluster_target import cluster_config
    from petps.cluster.controller import Controller
    from petps.cluster.etcd import Etcd
    from petps.cluster.limits import Limits
    from petps.errors import PetpsError
    from petps.server.cluster import access_of
    from petps.server.notify import Notifier
    from petps.server.process import forbid_core_dumps
    from petps.wake import Wake

    cluster = cluster_config(config)
    process_log.set_up("text", "info")
    if cluster.has_secrets:
        forbid_core_dumps()
    wake, stopped_by = Wake(), set[int]()

    def stop(number: int, frame: object) -> None:
        stopped_by.add(number)
        wake.send()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    etcd = Etcd(access_of(cluster))
    limits = Limits(
        moves=cluster.moves,
        drain_seconds=cluster.drain_seconds,
        replace_after=cluster.replace_after_seconds(),
        pause_seconds=cluster.move_pause_seconds,
        handover_seconds=cluster.handover_seconds,
    )
    own_name = name or f"{socket.gethostname()}:{os.getpid()}"
    running = Controller(
        etcd, cluster.prefix, limits, name=own_name, lease_seconds=cluster.lease_seconds,
        log=process_log.write,
    )  # fmt: skip
    process_log.write(f"controller {own_name} of {', '.join(cluster.endpoints)}")
    notifier = Notifier(os.environ)
    running.tick()
    notifier.ready("running")
    while True:
        wake.wait(running.tick_seconds)
        if stopped_by:
            break
        running.tick()
        notifier.set_status("elected" if running.is_elected else "another controller is elected")
        notifier.alive()
    notifier.stopping()
    try:
        running.close()
    except PetpsError as error:
        process_log.write(f"not resigned, so the next election waits for the lease: {error}")
    etcd.close()
