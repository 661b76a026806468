"""What a server of a configuration would find, without opening its pool (`petps config check`)."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from petps.config import Config
from petps.errors import NotFound, PetpsError

__all__ = ["Finding", "check_places"]

EXPIRES_SOON_SECONDS: Final = 7 * 86_400


@dataclass(frozen=True)
class Finding:
    """A fault of the place that a key names, or a remark about it."""

    key: str
    text: str
    is_fault: bool


def check_places(config: Config) -> list[Finding]:
    """Return what is wrong with the doors and the files, folders and stores of a configuration.

    Reads them with the permissions of this process.
    """
    checks: tuple[tuple[str, Callable[[Config], Iterator[str]]], ...] = (
        ("server.host", _check_doors),
        ("pool.path", _check_pool),
        ("tls", _check_tls),
        ("access.file", _check_access),
        ("server.shard_map", _check_shard_map),
        ("ingest.log", _check_log),
        ("ingest.store", lambda config: _check_store(config.ingest.store)),
        ("backup.store", lambda config: _check_store(config.backup_store())),
        ("otel.endpoint", _check_otel),
        ("cluster", _check_cluster),
    )
    findings = []
    for key, check in checks:
        try:
            findings += [Finding(key, note, is_fault=False) for note in check(config)]
        except PetpsError as error:
            findings.append(Finding(key, str(error), is_fault=True))
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            findings.append(Finding(key, f"{place}{error.strerror or error}", is_fault=True))
        except Exception as error:  # of a store's own library
            findings.append(Finding(key, f"{type(error).__name__}: {error}", is_fault=True))
    return findings


# Each check yields notes, and raises the fault that it finds.


def _check_doors(config: Config) -> Iterator[str]:
    config.check_doors()
    for risk in config.risks():
        yield f"insecure: {risk}"


def _check_pool(config: Config) -> Iterator[str]:
    path = config.pool.path
    try:
        kind = path.stat().st_mode
    except FileNotFoundError:
        _check_folder(path.absolute().parent)
        yield f"there is no pool at {path} yet: `petps create` makes it"
        return
    if not (stat.S_ISREG(kind) or stat.S_ISCHR(kind)):
        raise IsADirectoryError(0, "is neither a file nor a device: name the pool", str(path))
    if not os.access(path, os.R_OK | os.W_OK):
        raise PermissionError(0, "this user may not read and write it", str(path))
    if config.pool.folder is not None:
        _check_folder(config.pool.folder)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise NotADirectoryError(0, "there is no such folder: create it", str(folder))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(0, "this user may not create files in it", str(folder))


def _check_tls(config: Config) -> Iterator[str]:
    if config.tls.certificate is None:
        return
    from petps.server.native_server import native_tls
    from petps.server.tls import TlsFiles

    native_tls(config)
    files = TlsFiles(config.tls, reload_native=lambda: None, log=lambda _: None)
    seconds = files.current.expires_at - time.time()
    if seconds < EXPIRES_SOON_SECONDS:
        yield f"{config.tls.certificate} expires in {seconds / 3600:.0f} hours: replace it"


def _check_access(config: Config) -> Iterator[str]:
    if config.access.file is None:
        return
    from petps.server.access_file import read_access_file

    entries = read_access_file(config.access.file)
    for entry in entries:
        if entry.is_expired():
            yield f"the grant '{entry.name}' of {config.access.file} has expired: make another one"
    is_administered = any("admin" in entry.roles for entry in entries)
    if config.server.admin_port is not None and not is_administered:
        yield f"no grant of {config.access.file} has the role admin, so nobody may use admin_port"


def _check_shard_map(config: Config) -> Iterator[str]:
    if config.server.shard_map is None:
        return
    from petps.server.shard_map import MapFile

    shard_map = MapFile(config.server.shard_map).read()
    address = config.server.address or f"{config.server.host}:{config.server.port}"
    if not shard_map.names(address):
        yield f"the shard map does not name {address}, so this server would own nothing"


def _check_log(config: Config) -> Iterator[str]:
    location = config.ingest.log
    if location is None:
        return
    from petps.delta import is_kafka, open_log

    if is_kafka(location) or Path(location).exists():
        # Checks the options of Kafka, and asks no broker.
        open_log(location, create=False, options=config.kafka).close()
    else:
        _check_folder(Path(location).absolute().parent)
        yield f"there is no log at {location} yet: the server makes it"
    bases = config.bases()
    if bases is not None and bases.exists() and not os.access(bases, os.R_OK | os.X_OK):
        raise PermissionError(0, "this user may not read it", str(bases))


def _check_otel(config: Config) -> Iterator[str]:
    from petps.server.traces import check_packages

    check_packages(config.otel)
    return iter(())


def _check_cluster(config: Config) -> Iterator[str]:
    if not config.cluster.endpoints:
        return iter(())
    from petps.cluster.etcd import check_package

    check_package()
    config.cluster.read_password()
    for path in (config.cluster.ca, config.cluster.certificate, config.cluster.key):
        if path is not None:
            path.read_bytes()
    return iter(())


def _check_store(place: str | None) -> Iterator[str]:
    if place is None:
        return
    from petps.checkpoint import Store

    try:
        Store.open(place)
    except NotFound:
        yield f"{place} holds no checkpoint store yet: the first version makes it"
