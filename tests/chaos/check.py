"""The rules of the chaos suite, as functions of histories. Each returns what breaks a rule.

A violation names the rule, the keys, the servers and the time, so that the histories can be read
again there.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from tests.chaos.rows import instance_of
from tests.chaos.tools import program
from tests.chaos.truth import PARTITION_OF, Published, Reachability

TORN: Final = "a row is torn, or of another key"
LOST_ROW: Final = "a row that exists is missing"
BACK: Final = "a client goes back in versions"
OLD_ROW: Final = "a row is older than the answer's version"
UNKNOWN_ROW: Final = "a row has a version that nobody had published"
MIXED: Final = "an answer mixes instances"
INSTANCE_BACK: Final = "a client goes back to an older instance"
FAILED: Final = "a pull fails while replicas that are new enough can be reached"
LOST_PUSH: Final = "an acknowledged push is lost"
NOT_LINEAR: Final = "pushes and pulls of a key are not linearizable"
UNEQUAL: Final = "replicas differ"
NOT_SETTLED: Final = "the cluster does not settle after the last fault"
DIED: Final = "a process ended by itself"
VACUOUS: Final = "too little happened to show anything"
LINEARIZE_SECONDS_MAX: Final = 900


@dataclass(frozen=True)
class Violation:
    """A broken rule. at: the monotonic time in ns of its end; 0: after the run."""

    rule: str
    detail: str
    client: str = ""
    keys: tuple[int, ...] = ()
    servers: tuple[str, ...] = ()
    at: int = 0

    def text(self, start: int) -> str:
        """Return one line for people. start: the time at which the run began."""
        when = "at the end" if self.at == 0 else f"at {(self.at - start) / 1e9:.3f} s"
        parts = [f"{self.rule}: {self.detail}", when]
        parts += [f"client {self.client}"] if self.client else []
        parts += [f"keys {list(self.keys[:8])}"] if self.keys else []
        parts += [f"servers {', '.join(self.servers)}"] if self.servers else []
        return "; ".join(parts)

    def as_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(asdict(self))


def check_rows(pull: Mapping[str, Any], published: Published) -> Iterator[Violation]:
    """Yield what is wrong with the rows of one answer."""

    def violation(rule: str, detail: str, keys: Iterable[int] = ()) -> Violation:
        return Violation(rule, detail, pull["client"], tuple(keys), at=pull["return"])

    wrong = [int(key) for key in pull.get("wrong", {})]
    if wrong:
        yield violation(TORN, f"the rows are {pull['wrong']}", wrong)
    if pull["missing"]:
        yield violation(LOST_ROW, f"at applied version {pull['applied']}", pull["missing"])
    if pull["applied"] < pull["seen"]:
        yield violation(BACK, f"to {pull['applied']}, after it had seen {pull['seen']}")
    generations = pull["generations"]
    names = {instance_of(generation) for generation in generations}
    if not wrong and generations and names != {pull["instance"]}:
        yield violation(MIXED, f"{pull['instance']} has rows of {', '.join(sorted(names))}")
    unusable = {*wrong, *pull["missing"]}
    for key, version in zip(pull["keys"], pull["versions"], strict=True):
        if key in unusable:
            continue
        if not published.is_written(key, version, pull["return"]):
            yield violation(UNKNOWN_ROW, f"version {version}", [key])
        expected = published.writer(key, pull["applied"])
        if version < expected:
            detail = f"version {version}, but at version {pull['applied']} it is {expected}"
            yield violation(OLD_ROW, detail, [key])


def check_pulls(
    pulls: Iterable[Mapping[str, Any]], published: Published, reachability: Reachability
) -> Iterator[Violation]:
    """Yield what is wrong with the pulls of all clients."""
    generation_of: dict[str, int] = {}
    for pull in pulls:
        if pull["op"] != "pull":
            continue
        if "error" in pull:
            yield from check_failure(pull, reachability)
            continue
        yield from check_rows(pull, published)
        newest = max(pull["generations"], default=0)
        before = generation_of.get(pull["client"], 0)
        if newest < before:
            detail = f"{instance_of(newest)} after {instance_of(before)}"
            yield Violation(INSTANCE_BACK, detail, pull["client"], at=pull["return"])
        generation_of[pull["client"]] = max(newest, before)


def count_rows_ahead(pulls: Iterable[Mapping[str, Any]]) -> int:
    """Return how many rows a client saw older than before, above the versions of its answers.

    That breaks no rule: rows of a version may be visible on one replica before the version is
    complete there, and not yet on another.
    """
    newest: dict[tuple[str, int], int] = {}
    count = 0
    for pull in pulls:
        if pull["op"] != "pull" or "error" in pull:
            continue
        for key, version in zip(pull["keys"], pull["versions"], strict=True):
            before = newest.get((pull["client"], key), 0)
            count += version < before
            newest[pull["client"], key] = max(version, before)
    return count


def check_failure(pull: Mapping[str, Any], reachability: Reachability) -> Iterator[Violation]:
    """Yield a violation if each partition of a failed pull had a server that could answer."""
    able: set[str] = set()
    for partition in {PARTITION_OF[key] for key in pull["keys"]}:
        servers = {
            server
            for server in reachability.servers()
            if reachability.could_answer(
                pull["node"], server, partition, pull["seen"], pull["call"], pull["return"]
            )
        }
        if not servers:
            return
        able |= servers
    yield Violation(
        FAILED, f"it had seen version {pull['seen']}: {pull['error']}", pull["client"],
        tuple(pull["keys"]), tuple(sorted(able)), pull["return"],
    )  # fmt: skip


def operations_of(pushes: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the operations for the program linearize.

    A pull that failed says nothing. A push that failed may have been applied, now or later. If no
    pull has seen its value, it is left out: it could always come after everything else.
    """
    operations: list[dict[str, Any]] = []
    seen: set[tuple[int, int]] = set()
    in_doubt: list[dict[str, Any]] = []
    for record in pushes:
        operation = {
            name: record[name] for name in ("client", "key", "push", "value") if name in record
        }
        operation["call"] = record["call"]
        if "return" in record:
            operations.append(operation | {"return": record["return"]})
            if not record["push"]:
                seen.add((record["key"], record["value"]))
        elif record["push"]:
            in_doubt.append(operation)
    operations += [op for op in in_doubt if (op["key"], op["value"]) in seen]
    return operations


def check_torn_pushes(pushes: Iterable[Mapping[str, Any]]) -> Iterator[Violation]:
    """Yield pulls of push-fed keys whose row was torn."""
    for record in pushes:
        if not record["push"] and record.get("value") == -1:
            yield Violation(TORN, "a pushed row", str(record["client"]), (record["key"],),
                            at=record["return"])  # fmt: skip


def check_lost_pushes(
    pushes: Sequence[Mapping[str, Any]], final: Mapping[int, int]
) -> Iterator[Violation]:
    """Yield keys whose value at the end is older than a push that was acknowledged.

    A value is surely older if its push returned before the acknowledged one began.
    """
    by_value = {(r["key"], r["value"]): r for r in pushes if r["push"]}
    last: dict[int, Mapping[str, Any]] = {}  # of each key, the acknowledged push that began last
    for record in pushes:
        if record["push"] and "return" in record:
            before = last.get(record["key"])
            if before is None or record["call"] > before["call"]:
                last[record["key"]] = record
    for key, record in last.items():
        value = final.get(key, 0)
        writer = by_value.get((key, value))
        is_lost = writer is None or writer.get("return", record["call"]) < record["call"]
        if value != record["value"] and is_lost:
            detail = f"the value is {value}, and {record['value']} was acknowledged after it"
            yield Violation(LOST_PUSH, detail, str(record["client"]), (key,), at=record["return"])


def check_linearizable(operations: Sequence[Mapping[str, Any]]) -> Iterator[Violation]:
    """Yield keys whose history Porcupine refuses, or could not decide in its time."""
    process = subprocess.run(
        [str(program("linearize"))],
        input="".join(json.dumps(operation) + "\n" for operation in operations),
        capture_output=True, text=True, check=False, timeout=LINEARIZE_SECONDS_MAX,
    )  # fmt: skip
    if process.returncode != 0:
        raise RuntimeError(f"linearize failed: {process.stderr}")
    *failures, total = map(json.loads, process.stdout.splitlines())
    assert total["operations"] == len(operations), total
    for failure in failures:
        history = failure["history"]
        detail = f"{failure['verdict']}, {len(history)} operations: {json.dumps(history)[:2000]}"
        yield Violation(NOT_LINEAR, detail, keys=(failure["key"],), at=history[-1]["call"])
