"""How a server joins its cluster: from its configuration and its parts to a ClusterPart."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from petps import _native
from petps.cluster.etcd import Etcd
from petps.cluster.records import PartitionReport, Registration
from petps.config import Config
from petps.log import Line
from petps.pool.audited import AuditedPool
from petps.server.cluster.handover import Handovers
from petps.server.cluster.map import MapCopy
from petps.server.cluster.membership import CAUGHT_UP_SECONDS, ClusterPart, Facts, access_of
from petps.server.cluster.pauses import Pauses, PushControl
from petps.server.cluster.removal import Removal
from petps.server.cluster.sender import Place
from petps.server.cluster.unread import Unread

if TYPE_CHECKING:
    from petps.server.ingest.status import PartitionHealth
    from petps.server.shard_map import ShardMap

__all__ = ["join", "may_remove", "open_cluster"]


def open_cluster(config: Config, tables: _native.Tables, log: Callable[[str], None]) -> ClusterPart:
    """Return a server's part of its cluster, which does not speak to etcd yet.

    Raises FailedPrecondition without the extra, NotFound if the pool lacks the model, and
    InvalidArgument if the file of the pauses is damaged.
    """
    record = tables.resolve(config.ingest_model())
    name = config.pool.path.name
    copy = MapCopy(config.folder() / f"{name}.map.json", record.model, record.partitions)
    pauses = Pauses(config.folder() / f"{name}.pauses.json")
    access = access_of(config.cluster)
    cluster = ClusterPart(
        Etcd(access), Etcd(access), config.cluster, record.model, copy, pauses, log
    )
    if config.ingest.log is not None:
        cluster.unread = Unread(tables, record.model)
    return cluster


def join(
    cluster: ClusterPart,
    config: Config,
    tables: _native.Tables,
    server: _native.Server,
    *,
    grpc_port: int | None,
    held: Callable[[], AbstractContextManager[None]],
    now: Callable[[], tuple[ShardMap | None, Any, Collection[int] | None]],
    wake: Callable[[], None],
    log: Callable[[str], None],
) -> None:
    """Begin to take part.

    now: returns the map in use, the IngestPart that runs, or None, and the partitions of which
    ingest may still apply rows (None: all), because it follows a new map after requests do.
    """
    address = server.address

    def may_remove_now(partition: int, version: int) -> bool:
        shard_map, _, ingested = now()
        return may_remove(shard_map, address, partition, version, ingested)

    host = address.rpartition(":")[0]
    record = tables.resolve(config.ingest_model())
    model = record.model
    removal = Removal(
        tables,
        model,
        held=held,
        may_remove=may_remove_now,
        log=log,
    )
    pool = tables.info().uuid

    def registration() -> Registration:
        return Registration(
            address=address,
            grpc_address=None if grpc_port is None else f"{host}:{grpc_port}",
            zone=config.cluster.zone,
            weight=config.cluster.weight,
            pool=pool,
            release=_native.software,
            is_pushed=any(table.record.feed == "push" for table in tables.tables()),
            partitions=record.partitions,
            is_manual=config.ingest.log is None or config.ingest.switch == "manual",
            is_fed=config.ingest.log is not None,
            has_store=config.cluster.store is not None,
        )

    place = _place(config, tables, record, server, cluster.pauses, held, log)
    cluster.pauses.start(server)
    handovers = Handovers(
        cluster.etcd, cluster.keys, address, cluster.pauses, place,
        used_version=lambda: cluster.used_version,
        owns=lambda partition: _owns(now()[0], address, partition), log=log,
    )  # fmt: skip

    def switch(instance: str) -> None:
        AuditedPool(tables, "the cluster", is_borrowed=True).switch_alias(model, instance)
        text = f"[cluster] {model} names {instance} now, as on every server of the cluster"
        log(Line(text, "model_switched", model=model, instance=instance))

    def instances() -> tuple[tuple[str, ...], tuple[str, ...]]:
        shard_map, ingest, _ = now()
        follows = shard_map is None or bool(shard_map.ingested_by(address))
        is_fed = follows and config.ingest.log is not None
        return _instances(tables, model, ingest, is_fed=is_fed)

    def applied(partition: int, instance: str) -> PartitionReport:
        for record in tables.instances():
            if record.name == instance and (own := tables.progress(record.id, partition)):
                return PartitionReport(int(own.version), False, int(own.run))
        return PartitionReport(0, False)

    facts = Facts(
        registration=registration,
        instance=lambda: str(tables.resolve(model).name),
        partitions=lambda: _reports(tables, model, now()[1]),
        read=lambda served: _read(tables, now()[1], served),
        applied=applied,
        instances=instances,
        switch=switch,
    )
    cluster.start(facts, removal, handovers, wake)


def _place(
    config: Config,
    tables: _native.Tables,
    record: _native.InstanceRecord,
    control: PushControl,
    pauses: Pauses,
    held: Callable[[], AbstractContextManager[None]],
    log: Callable[[str], None],
) -> Place | None:
    store = config.cluster.store
    if store is None:
        return None
    from petps.checkpoint.files import open_files

    files = open_files(store)
    return Place(
        tables, record.model, record.partitions, files, control, pauses, held, log
    )  # fmt: skip


def _owns(shard_map: ShardMap | None, address: str, partition: int) -> bool:
    return shard_map is not None and partition in shard_map.owners.owned_by(address)


def may_remove(
    shard_map: ShardMap | None,
    address: str,
    partition: int,
    version: int,
    ingested: Collection[int] | None,
) -> bool:
    """Return whether the map in use is new enough, and does not name ``address`` for it.

    Nor may ingest apply its rows any more: it would write rows, and progress that claims the
    removed ones. ingested: see join().
    """
    return (
        shard_map is not None
        and ingested is not None
        and partition not in ingested
        and shard_map.owners.version >= version
        and partition not in shard_map.ingested_by(address)
    )


def _instances(
    tables: _native.Tables, model: str, ingest: Any, *, is_fed: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return all instances of the model, and those that are whole here (records.Member).

    is_fed: the server follows partitions of a log; then none is whole while no ingest runs.
    """
    records = [record for record in tables.instances() if record.model == model]
    health: list[PartitionHealth] = [] if ingest is None else ingest.health()

    def is_whole(record: _native.InstanceRecord) -> bool:
        if is_fed and ingest is None:
            return False
        recorded = [tables.progress(record.id, part.partition) for part in health]
        if record.frozen:  # the state of one version, of the partitions that it had then
            return all(map(_has_rows, recorded))
        return all(
            _is_caught_up(part, record.name, progress)
            for part, progress in zip(health, recorded, strict=True)
        )

    return (
        tuple(sorted(record.name for record in records)),
        tuple(sorted(record.name for record in records if is_whole(record))),
    )


def _has_rows(progress: _native.Progress | None) -> bool:
    """Return whether the pool has rows of the partition, all of one version."""
    if progress is None or progress.state in ("catching_up", "lost_power"):
        return False
    return progress.run > 0 or progress.version > 0


def _is_caught_up(
    partition: PartitionHealth, instance: str, progress: _native.Progress | None
) -> bool:
    """Return whether the log feeds the instance, up to its end. ``progress``: of the instance.

    A partition that only passes over the log has no rows. One that follows it may have none, if the
    log has never held any.
    """
    states = ("following", "passing") if _has_rows(progress) else ("following",)
    return (
        partition.state in states
        and partition.instance == instance
        and partition.lag_seconds is not None
        and partition.lag_seconds <= CAUGHT_UP_SECONDS
    )


def _reports(tables: _native.Tables, model: str, ingest: Any) -> Mapping[int, PartitionReport]:
    """Return the state of each partition that is followed now."""
    if ingest is None:
        return {}
    served = tables.resolve(model)
    health: list[PartitionHealth] = ingest.health()
    reports = {}
    for partition in health:
        progress = tables.progress(served.id, partition.partition)
        fed = _fed(partition, str(served.name), progress)
        is_caught_up = _is_caught_up(partition, fed, progress)
        reports[partition.partition] = _report_of(progress, is_caught_up=is_caught_up)
    return reports


def _read(tables: _native.Tables, ingest: Any, served: str) -> set[int]:
    """Return the partitions whose log was read to its end, into the instance that is served."""
    ids = [record.id for record in tables.instances() if record.name == served]
    if ingest is None or not ids:
        return set()
    health: list[PartitionHealth] = ingest.health()
    return {
        part.partition
        for part in health
        if part.state in ("following", "passing")
        and part.lag_seconds is not None
        and part.instance in (served, _fed(part, served, tables.progress(ids[0], part.partition)))
    }


def _fed(partition: PartitionHealth, served: str, progress: _native.Progress | None) -> str:
    """Return the instance whose end is that of the served one: the log may feed a newer one."""
    is_stopped = progress is not None and progress.state in ("incomplete", "conflict")
    return partition.instance if _has_rows(progress) and not is_stopped else served


def _report_of(progress: _native.Progress | None, *, is_caught_up: bool) -> PartitionReport:
    if progress is None:
        return PartitionReport(0, is_caught_up)
    run = int(progress.run)
    if progress.state == "following":  # of a blank one: see removal.py
        run = max(run, int(progress.target))
    return PartitionReport(int(progress.version), is_caught_up, run)
