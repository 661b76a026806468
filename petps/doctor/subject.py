"""The subject of a diagnosis: a machine, and the pool or the configuration on it."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from petps.config import Config
from petps.delta import is_kafka
from petps.doctor.facts import Facts
from petps.doctor.mounts import Mount, mount_of
from petps.doctor.superblock import Superblock
from petps.errors import PetpsError

if TYPE_CHECKING:
    from petps.delta.kafka.topic import TopicFacts

__all__ = ["Subject"]


@dataclass
class Subject:
    """What the checks look at. Its properties ask at their first use."""

    facts: Facts
    config: Config | None = None
    config_path: str | None = None
    config_error: str | None = None
    """Why the configuration cannot be used; then ``config`` is None."""
    pool: str | None = None
    """The pool's path: that of the configuration, if there is one."""

    @functools.cached_property
    def pool_path(self) -> str | None:
        """Return the pool's path without links; None if there is no pool to look at."""
        return None if self.pool is None else (self.facts.link(self.pool) or self.pool)

    @functools.cached_property
    def is_device(self) -> bool:
        """Return whether the pool is a device of characters (device-DAX)."""
        found = None if self.pool_path is None else self.facts.file(self.pool_path)
        return found is not None and found.kind == "device"

    @functools.cached_property
    def superblock(self) -> Superblock | None:
        """Return the pool's superblock; None if there is none that can be read."""
        if self.pool_path is None:
            return None
        try:
            return self.facts.superblock(self.pool_path)
        except PetpsError:
            return None

    @functools.cached_property
    def mount(self) -> Mount | None:
        """Return the mount that the pool's folder is on; None for a device, or if it is unknown."""
        if self.pool_path is None or self.is_device:
            return None
        return mount_of(self.facts, os.path.dirname(self.pool_path))

    @functools.cached_property
    def holders(self) -> list[int]:
        """Return the processes that have the pool locked. 0: one of another namespace."""
        found = None if self.pool_path is None else self.facts.file(self.pool_path)
        if found is None:
            return []
        name = f"{found.device[0]:02x}:{found.device[1]:02x}:{found.inode}"
        holders = []
        for line in (self.facts.text("/proc/locks") or "").splitlines():
            words = line.split()
            if len(words) >= 6 and words[1] == "FLOCK" and words[4].lstrip("-").isdecimal():
                # The device of an overlay or of btrfs is another one here than in stat().
                is_same = words[5] == name or (
                    self.mount is not None
                    and self.mount.kind in ("overlay", "btrfs")
                    and words[5].rpartition(":")[2] == str(found.inode)
                )
                if is_same:
                    holders.append(max(0, int(words[4])))
        return holders

    @functools.cached_property
    def status(self) -> Mapping[str, Any] | None:
        """Return the status of the server that has the pool open; None if none answers."""
        if self.pool_path is None or not self.holders:
            return None
        try:
            return self.facts.server_status(self.pool_path)
        except PetpsError:
            return None

    @functools.cached_property
    def topic(self) -> TopicFacts | PetpsError | None:
        """Return what the brokers say of the log, or their error; None if it is not in Kafka."""
        config = self.config
        if config is None or config.ingest.log is None or not is_kafka(config.ingest.log):
            return None
        try:
            return self.facts.topic(config.ingest.log, config.kafka)
        except PetpsError as error:
            return error

    def limit(self, name: str, line: str) -> tuple[int, int, str]:
        """Return the (soft, hard) limit, and whose: the server's, or this process's.

        Args:
            name: As facts.limit() takes it.
            line: The name in /proc/PID/limits.
        """
        for holder in self.holders:
            text = self.facts.text(f"/proc/{holder}/limits") or ""
            for row in text.splitlines():
                if row.startswith(line):
                    soft, hard = row[len(line) :].split()[:2]
                    return _number(soft), _number(hard), f"the server (process {holder})"
        soft_limit, hard_limit = self.facts.limit(name)
        return soft_limit, hard_limit, "this shell (a service has limits of its own)"


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else -1
