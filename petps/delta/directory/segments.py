"""Names in a directory log: log.json, a folder for each partition, a file for each segment."""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from petps.delta.files import publish_file, sync_folder
from petps.delta.schema import MAX_PARTITIONS
from petps.errors import DataLoss, InvalidArgument, NotFound, Unimplemented

__all__ = ["LogFile", "list_segments", "partition_folder", "read_log_file", "write_log_file"]

LOG_FILE: Final = "log.json"
FORMAT_NAME: Final = "petps-directory-log"
FORMAT: Final = 1
_SEGMENT_NAME: Final = re.compile(r"(\d{20})\.log")


@dataclass(frozen=True, slots=True)
class LogFile:
    """Content of log.json: P, and an id that distinguishes two logs at the same path."""

    partitions: int
    uuid: str


def partition_folder(root: Path, partition: int) -> Path:
    """Return the folder that holds a partition's segments."""
    return root / f"p{partition:04d}"


def segment_path(folder: Path, first_offset: int) -> Path:
    """Return the path of the segment that begins with this offset."""
    return folder / f"{first_offset:020d}.log"


def list_segments(folder: Path) -> list[int]:
    """Return the first offsets of a partition's segments, ascending."""
    try:
        names = [entry.name for entry in folder.iterdir()]
    except FileNotFoundError:
        return []
    matches = (_SEGMENT_NAME.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in matches if match)


def write_log_file(root: Path, partitions: int) -> None:
    """Create an empty log, unless another process creates it first."""
    if not 1 <= partitions <= MAX_PARTITIONS:
        raise InvalidArgument(f"{partitions} partitions are outside 1..{MAX_PARTITIONS}")
    root.mkdir(parents=True, exist_ok=True)
    for partition in range(partitions):
        partition_folder(root, partition).mkdir(exist_ok=True)
    text = json.dumps(
        {"format": f"{FORMAT_NAME}-{FORMAT}", "partitions": partitions, "uuid": str(uuid.uuid4())}
    )
    try:
        publish_file(root / LOG_FILE, text.encode() + b"\n", exclusive=True)
    except FileExistsError:
        return
    sync_folder(root.absolute().parent)


def read_log_file(root: Path) -> LogFile:
    """Read log.json. Raises NotFound, DataLoss or Unimplemented, each naming the folder."""
    path = root / LOG_FILE
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise NotFound(f"{root} is no directory log: it has no {LOG_FILE}") from None
    try:
        values = json.loads(text)
        name, _, number = str(values["format"]).rpartition("-")
        if name == FORMAT_NAME and int(number) > FORMAT:
            raise Unimplemented(f"{path} has format {number}, this release reads {FORMAT}: upgrade")
        if name != FORMAT_NAME:
            raise ValueError("format")
        log_file = LogFile(int(values["partitions"]), str(values["uuid"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataLoss(f"{path} is not the description of a petps directory log") from None
    if not 1 <= log_file.partitions <= MAX_PARTITIONS:
        raise DataLoss(f"{path}: {log_file.partitions} partitions are outside 1..{MAX_PARTITIONS}")
    return log_file
