"""The files of a run: config.json, all.json and results.json, written after each result.

config.json has the machine, the revision, the sizes, the seconds that each finished part took, here
and in the run before, and how often a part was measured again.
all.json has every result, each with its part; results.json has the worst one of each name.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from bench.targets import Result, worst

__all__ = ["ROOT", "Record", "configuration", "read_results", "write_run"]

ROOT: Final = Path(__file__).resolve().parent.parent
# A run is resumed only where these are the same: figures of two builds or machines do not mix.
SAME: Final = ("revision", "cpu", "processors", "kernel", "python", "workload", "sizes")


class Record:
    """The results of a run. Each change is in the folder before the method returns."""

    def __init__(self, folder: Path, config: dict[str, Any], *, resume: bool = False) -> None:
        """Begin a run, or with ``resume`` continue the one in ``folder``.

        A part that was interrupted is measured again. Raises SystemExit if there is no such run, or
        if it measured another revision, machine or workload.
        """
        self._folder = folder
        self.config = config | {"part_seconds": {}, "earlier_seconds": {}, "measured_again": {}}
        self.results: list[Result] = []
        if resume:
            self._resume(config)
        else:
            self._read_earlier_seconds()
        folder.mkdir(parents=True, exist_ok=True)
        self._write()

    def _resume(self, config: dict[str, Any]) -> None:
        try:
            earlier = json.loads((self._folder / "config.json").read_text())
            results = json.loads((self._folder / "all.json").read_text())
            part_seconds = earlier["part_seconds"]
        except (OSError, ValueError, KeyError) as error:
            raise SystemExit(
                f"--resume: {self._folder} has no run that can be continued ({error}); "
                "begin one without --resume"
            ) from None
        for name in SAME:
            if earlier[name] != config[name]:
                raise SystemExit(
                    f"--resume: the run in {self._folder} has {name} {earlier[name]}, this one has "
                    f"{config[name]}; begin a new one without --resume"
                )
        self.config = {"measured_again": {}} | earlier
        self.results = [result for result in results if result["part"] in part_seconds]

    def _read_earlier_seconds(self) -> None:
        """Keep what each part took in the run that this one replaces, to tell the time left."""
        try:
            earlier = json.loads((self._folder / "config.json").read_text())
            if earlier["workload"] == self.config["workload"]:
                seconds = earlier["earlier_seconds"] | earlier["part_seconds"]
                self.config["earlier_seconds"] = seconds
        except (OSError, ValueError, KeyError):
            pass  # there was none

    def is_finished(self, part: str) -> bool:
        """Return whether all results of this part are here."""
        return part in self.config["part_seconds"]

    def forget(self, parts: Collection[str]) -> None:
        """Drop the results of finished parts, which are then measured again, and count that."""
        for part in parts:
            if not self.is_finished(part):
                raise SystemExit(f"--again: the run in {self._folder} has not finished part {part}")
        counts = self.config["measured_again"]
        for part in parts:
            del self.config["part_seconds"][part]
            counts[part] = counts.get(part, 0) + 1
        self.results = [result for result in self.results if result["part"] not in parts]
        self._write()

    def add(self, part: str, result: Result) -> None:
        """Append a result."""
        self.results.append({"part": part} | result)
        self._write()

    def finish(self, part: str, seconds: float) -> None:
        """Note that a part has no further results."""
        self.config["part_seconds"][part] = round(seconds, 1)
        self._write()

    def _write(self) -> None:
        write_run(self._folder, self.results, self.config)


def write_run(folder: Path, results: list[Result], config: dict[str, Any]) -> None:
    """Write the files of a run; config.json last: what it names is complete in the others."""
    contents = (("all", results), ("results", worst(results)), ("config", config))
    for name, content in contents:
        path = folder / f"{name}.json"
        temporary = path.with_suffix(".part")
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        temporary.replace(path)


def read_results(folder: Path) -> tuple[list[Result], dict[str, Any]]:
    """Return results.json and config.json of a run. Raises SystemExit if they are not there."""
    contents = []
    for name in ("results", "config"):
        path = folder / f"{name}.json"
        try:
            contents.append(json.loads(path.read_text()))
        except (OSError, ValueError) as error:
            raise SystemExit(
                f"{folder} is not the output of a run of `make bench`: {path.name}: {error}"
            ) from None
    return contents[0], contents[1]


def configuration(workload: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the machine, the revision and the sizes, without which figures mean nothing."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "unknown",
    )
    return {
        "revision": _command("git", "describe", "--always", "--dirty"),
        "cpu": cpu,
        "processors": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_at_start": os.getloadavg()[0],
        "workload": workload,
        "sizes": sizes,
    }


def _command(*words: str) -> str:
    process = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return process.stdout.strip()
