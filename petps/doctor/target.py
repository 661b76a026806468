"""Finding out what an argument names: a configuration file, or a pool."""

from __future__ import annotations

import os
import stat
from typing import Final

from petps.config import load
from petps.config.load import MAX_CONFIG_BYTES
from petps.doctor.facts import Facts
from petps.doctor.subject import Subject
from petps.doctor.superblock import SIGNATURE
from petps.errors import InvalidArgument, NotFound, PetpsError

__all__ = ["is_config", "subject_of"]

CONFIG_SUFFIX: Final = ".toml"


def is_config(path: str) -> bool:
    """Return whether a path names a configuration file and no pool.

    Raises NotFound, InvalidArgument.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        kind = (
            "configuration file" if path.endswith(CONFIG_SUFFIX) else "pool or configuration file"
        )
        raise NotFound(f"{path}: no such {kind}") from None
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}") from None
    if stat.S_ISDIR(found.st_mode):
        raise InvalidArgument(f"{path} is a folder: name a pool or a configuration file in it")
    if stat.S_ISCHR(found.st_mode):
        return False
    if path.endswith(CONFIG_SUFFIX):
        return True
    if found.st_size > MAX_CONFIG_BYTES:
        return False
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_CONFIG_BYTES)
        content.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return not content.startswith(SIGNATURE)


def subject_of(target: str | None, facts: Facts) -> Subject:
    """Return the subject that an argument names; None: this machine alone.

    A configuration that cannot be used becomes a finding. Raises NotFound, and InvalidArgument for
    a URL.
    """
    if target is None:
        return Subject(facts)
    if "://" in target:
        raise InvalidArgument(
            f"{target}: name a pool or a configuration file of this machine; run `petps doctor` on "
            "the machine of the server"
        )
    path = os.path.abspath(target)
    if not is_config(path):
        return Subject(facts, pool=path)
    try:
        config = load(path)
    except PetpsError as error:
        return Subject(facts, config_path=path, config_error=str(error))
    return Subject(facts, config=config, config_path=path, pool=str(config.pool.path))
