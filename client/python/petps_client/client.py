"""The client: arrays in, arrays out. The work is done by ``petps_client._native``."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, TypeVar, overload

import numpy as np
import numpy.typing as npt

from petps_client import _native
from petps_client.arrays import as_keys, as_rows
from petps_client.errors import FailedPrecondition, InvalidArgument, ResourceExhausted

__all__ = ["Answer", "Client", "ManyAnswer", "PushReport", "Table", "connect"]

Rows = npt.NDArray[Any]
"""float32[n, dim], or uint8[n, row_bytes] of stored rows."""
Mask = npt.NDArray[np.bool_]
Form = Literal["f32", "stored"]
T = TypeVar("T")
_Wanted = tuple[str, npt.NDArray[np.uint64], Any, Mask | None]
"""(table, keys, rows, mask) of a pull; rows are None where the caller gave none."""


@dataclass(frozen=True)
class Table:
    """A table as its server describes it."""

    name: str
    model: str
    instance: str
    dtype: str
    """'f32', 'f16', 'bf16' or 'int8'."""
    dim: int
    row_bytes: int
    """Of one row as stored."""
    takes_pushes: bool
    """False: the table is fed by deltas."""
    capacity: int
    rows: int


@dataclass(frozen=True)
class PushReport:
    """What a push did, in rows."""

    inserted: int
    updated: int
    deleted: int
    absent: int
    """Deletions of keys that were not there."""
    refused: int
    """New keys that a full table did not take."""


class Answer(NamedTuple):
    """Everything that an answer says."""

    rows: Rows
    mask: Mask
    """bool[n]: which keys were found; the others have the table's default row."""
    found: int
    applied_version: int
    """Every row is at least that new (of the shards asked the lowest); 0: no key was asked for."""
    instance: str
    """That all rows are of ("ranking@7"); may be empty when no key was asked for."""


class ManyAnswer(NamedTuple):
    """Everything that an answer over several tables says."""

    rows: dict[str, Rows]
    masks: dict[str, Mask]
    """{table: bool[n]}: which keys were found; the others have the table's default row."""
    found: int
    applied_version: int
    """Every row is at least that new (of the shards asked the lowest); 0: no key was asked for."""
    instance: str
    """That all rows are of ("ranking@7"); may be empty when no key was asked for."""


def connect(
    url: str,
    *,
    name: str = "",
    deadline_ms: int = 2000,
    keys_per_request: int = 500,
    requests_in_flight: int = 8,
    connections: int = 16,
    hot_sample_every: int = 16,
    hot_keys: int = 4096,
    hot_set_ms: int = 0,
    catalogue_ms: int = 5000,
) -> Client:
    """Connects to the servers of ``petps://h1:7070,h2:7070/model``.

    The addresses are any servers of the model. If the servers have a shard map, it says who is
    asked for which keys and who is a replica of whom, and a changed map is followed; without one
    the addresses are replicas. A call that one replica fails goes to another, within its deadline.
    The model (an alias or an instance will do) may be left out when a server has only one.

    name: shown in the servers' reports. deadline_ms: of calls that name none. keys_per_request: a
    longer pull is split. requests_in_flight: per connection. connections: at most, per server; so
    many calls run at once. hot_sample_every: 1 of so many pulls is sampled for the hot set that is
    sent to the servers (0: none is); hot_keys: its longest; hot_set_ms: how often (0: as the
    servers ask). catalogue_ms: how often tables and aliases are read again (0: only when needed).

    Errors: InvalidArgument (the URL, an option), Unavailable (each server with its reason),
    NotFound (the model; lists the known ones).
    """
    options = {
        "deadline_ms": deadline_ms,
        "keys_per_request": keys_per_request,
        "requests_in_flight": requests_in_flight,
        "connections": connections,
        "hot_sample_every": hot_sample_every,
        "hot_keys": hot_keys,
        "hot_set_ms": hot_set_ms,
        "catalogue_ms": catalogue_ms,
    }
    for option, value in options.items():
        _check_u32(option, value)
    return Client(_native.Client(url, name=name, **options), threads=connections)


class Client:
    """Pulls and pushes from any number of threads. Made by :func:`connect`.

    A ``with`` statement, or :meth:`close`, ends it. After fork() a child must connect itself.
    """

    def __init__(self, native: _native.Client, *, threads: int) -> None:
        self._native = native
        self._threads = min(threads, 32)
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the client; calls under way in other threads finish first. Twice does nothing."""
        with self._lock:
            self._closed = True
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()
        self._native.close()

    # ---- pull

    @overload
    def pull(
        self,
        table: str,
        keys: npt.ArrayLike,
        out: Rows | None = ...,
        return_mask: Literal[False] = ...,
        dtype: Form = ...,
        *,
        mask: Mask | None = ...,
        deadline_ms: int | None = ...,
        min_version: int = ...,
        wait_ms: int = ...,
        dedup: bool | None = ...,
    ) -> Rows: ...
    @overload
    def pull(
        self,
        table: str,
        keys: npt.ArrayLike,
        out: Rows | None = ...,
        *,
        return_mask: Literal[True],
        dtype: Form = ...,
        mask: Mask | None = ...,
        deadline_ms: int | None = ...,
        min_version: int = ...,
        wait_ms: int = ...,
        dedup: bool | None = ...,
    ) -> tuple[Rows, Mask]: ...
    def pull(
        self,
        table: str,
        keys: npt.ArrayLike,
        out: Rows | None = None,
        return_mask: bool = False,
        dtype: Form = "f32",
        *,
        mask: Mask | None = None,
        deadline_ms: int | None = None,
        min_version: int = 0,
        wait_ms: int = 0,
        dedup: bool | None = None,
    ) -> Rows | tuple[Rows, Mask]:
        """keys: integers[n] -> float32[n, dim]; a missing key has the table's default row.

        out: a C-contiguous float32[n, dim] to receive the rows, without a copy; it is returned.
        return_mask: return (rows, mask), mask bool[n] says which keys were found. mask: a bool[n]
        to receive it. dtype: "f32", or "stored" for uint8[n, row_bytes] as the server stores them.
        min_version: rows at least that new, of every shard asked; Stale if they are not, after
        servers have waited for it for at most wait_ms and within the deadline. dedup: ask once for
        a repeated key (None: when it pays).

        Errors: NotFound (lists the tables), InvalidArgument (names the array), Stale,
        DeadlineExceeded and Unavailable (name the server). After an error ``out`` may hold
        anything.
        """
        if return_mask and mask is None:
            answer = self.pull_answer(
                table,
                keys,
                out,
                dtype,
                deadline_ms=deadline_ms,
                min_version=min_version,
                wait_ms=wait_ms,
                dedup=dedup,
            )
            return answer.rows, answer.mask
        wanted = [(table, as_keys(keys), out, mask)]
        if out is None:
            (out,), *_ = self._pull(wanted, dtype, deadline_ms, min_version, wait_ms, dedup)
        else:  # the quick way: nothing is made
            self._native.pull(
                wanted,
                dtype,
                _deadline(deadline_ms),
                _version(min_version),
                _wait(wait_ms),
                dedup,
            )
        return (out, mask) if return_mask and mask is not None else out

    def pull_answer(
        self,
        table: str,
        keys: npt.ArrayLike,
        out: Rows | None = None,
        dtype: Form = "f32",
        *,
        deadline_ms: int | None = None,
        min_version: int = 0,
        wait_ms: int = 0,
        dedup: bool | None = None,
    ) -> Answer:
        """As :meth:`pull`, and returns all that the answer says, the applied version included."""
        checked = as_keys(keys)
        mask = np.empty(checked.shape[0], np.bool_)
        (rows,), found, version, instance = self._pull(
            [(table, checked, out, mask)], dtype, deadline_ms, min_version, wait_ms, dedup
        )
        return Answer(rows, mask, found, version, instance)

    @overload
    def pull_many(
        self,
        keys: Mapping[str, npt.ArrayLike],
        *,
        out: Mapping[str, Rows] | None = ...,
        return_mask: Literal[False] = ...,
        dtype: Form = ...,
        deadline_ms: int | None = ...,
        min_version: int = ...,
        wait_ms: int = ...,
        dedup: bool | None = ...,
    ) -> dict[str, Rows]: ...
    @overload
    def pull_many(
        self,
        keys: Mapping[str, npt.ArrayLike],
        *,
        out: Mapping[str, Rows] | None = ...,
        return_mask: Literal[True],
        dtype: Form = ...,
        deadline_ms: int | None = ...,
        min_version: int = ...,
        wait_ms: int = ...,
        dedup: bool | None = ...,
    ) -> dict[str, tuple[Rows, Mask]]: ...
    def pull_many(
        self,
        keys: Mapping[str, npt.ArrayLike],
        *,
        out: Mapping[str, Rows] | None = None,
        return_mask: bool = False,
        dtype: Form = "f32",
        deadline_ms: int | None = None,
        min_version: int = 0,
        wait_ms: int = 0,
        dedup: bool | None = None,
    ) -> dict[str, Rows] | dict[str, tuple[Rows, Mask]]:
        """{table: integers[n]} -> {table: float32[n, dim]}, in one request, of one instance.

        out: {table: array} for tables whose rows go into the caller's arrays; the rest as
        :meth:`pull`.
        """
        answer = self.pull_many_answer(
            keys,
            out=out,
            dtype=dtype,
            deadline_ms=deadline_ms,
            min_version=min_version,
            wait_ms=wait_ms,
            dedup=dedup,
        )
        if return_mask:
            return {table: (answer.rows[table], answer.masks[table]) for table in keys}
        return answer.rows

    def pull_many_answer(
        self,
        keys: Mapping[str, npt.ArrayLike],
        *,
        out: Mapping[str, Rows] | None = None,
        dtype: Form = "f32",
        deadline_ms: int | None = None,
        min_version: int = 0,
        wait_ms: int = 0,
        dedup: bool | None = None,
    ) -> ManyAnswer:
        """As :meth:`pull_many`, and returns all that the answer says."""
        given = {} if out is None else out
        unknown = set(given) - set(keys)
        if unknown:
            raise InvalidArgument(f"out names tables that keys does not: {sorted(unknown)}")
        checked = {table: as_keys(each) for table, each in keys.items()}
        masks = {table: np.empty(len(each), np.bool_) for table, each in checked.items()}
        wanted = [(table, each, given.get(table), masks[table]) for table, each in checked.items()]
        rows, found, version, instance = self._pull(
            wanted, dtype, deadline_ms, min_version, wait_ms, dedup
        )
        return ManyAnswer(dict(zip(keys, rows, strict=True)), masks, found, version, instance)

    def _pull(
        self,
        wanted: Sequence[_Wanted],
        dtype: Form,
        deadline_ms: int | None,
        min_version: int,
        wait_ms: int,
        dedup: bool | None,
    ) -> tuple[list[Rows], int, int, str]:
        """(rows, found, applied version, instance); rows that are not given are made."""
        left_ms = _deadline(deadline_ms)
        options = (_version(min_version), _wait(wait_ms), dedup)
        end = time.monotonic() + left_ms / 1e3
        pulls = self._with_rows(wanted, dtype, left_ms)
        while True:
            try:
                found, version, instance = self._native.pull(pulls, dtype, left_ms, *options)
            except InvalidArgument:
                # The pull may have found the model switched to an instance whose rows are longer.
                if left_ms:
                    left_ms = max(1, int(1e3 * (end - time.monotonic())))
                before, pulls = pulls, self._with_rows(wanted, dtype, left_ms)
                if all(
                    np.shape(a[2]) == np.shape(b[2]) for a, b in zip(before, pulls, strict=True)
                ):
                    raise
            else:
                return [rows for _, _, rows, _ in pulls], found, version, instance

    def _with_rows(self, wanted: Sequence[_Wanted], dtype: Form, deadline_ms: int) -> list[_Wanted]:
        pulls = []
        for table, keys, out, mask in wanted:
            rows = out
            if rows is None:
                about = self._native.describe(table, deadline_ms)
                rows = (
                    np.empty((keys.shape[0], about["row_bytes"]), np.uint8)
                    if dtype == "stored"
                    else np.empty((keys.shape[0], about["dim"]), np.float32)
                )
            pulls.append((table, keys, rows, mask))
        return pulls

    # ---- push

    def push(
        self,
        table: str,
        keys: npt.ArrayLike,
        rows: npt.ArrayLike,
        *,
        dtype: Form = "f32",
        allow_not_finite: bool = False,
        deadline_ms: int | None = None,
    ) -> PushReport:
        """Writes full rows to every server that owns the key; durable when it returns.

        keys: integers[n], rows: floats[n, dim], encoded to the table's dtype, or with
        dtype="stored" uint8[n, row_bytes]. Of a repeated key the last row counts. It is not
        retried: an error says how many rows were acknowledged. A push that timed out may be
        applied later, but never over a newer push of this client.

        Errors: ResourceExhausted (the table is full: ``error.report`` counts what was refused, the
        rest is applied), FailedPrecondition (the table is fed by deltas), InvalidArgument (shape;
        a row with NaN or infinity, named).
        """
        stored = dtype == "stored"
        checked = rows if stored else as_rows(rows)
        return _report(
            self._native.push(
                table, as_keys(keys), checked, stored, allow_not_finite, _deadline(deadline_ms)
            )
        )

    def erase(
        self, table: str, keys: npt.ArrayLike, *, deadline_ms: int | None = None
    ) -> PushReport:
        """Deletes keys; durable when it returns. Keys that are not there are counted, no error."""
        return _report(self._native.erase(table, as_keys(keys), _deadline(deadline_ms)))

    # ---- what there is

    def describe(self, table: str) -> Table:
        """The table as last read from a server. NotFound lists the tables."""
        return Table(**self._native.describe(table, 0))

    def tables(self, *, deadline_ms: int | None = None) -> list[Table]:
        """The tables of the URL's model, read now; rows and capacity are those of one server."""
        return [Table(**each) for each in self._native.tables(_deadline(deadline_ms))]

    def status(
        self, server: int | None = None, *, deadline_ms: int | None = None
    ) -> dict[str, Any]:
        """The status of server number ``server`` of the URL, or of any of them that answers."""
        number = -1 if server is None else server
        status: dict[str, Any] = json.loads(self._native.status(number, _deadline(deadline_ms)))
        return status

    def switch_alias(self, alias: str, instance: str, *, deadline_ms: int | None = None) -> None:
        """From now on ``alias`` means ``instance``, of all tables at once, on every server.

        Durable when it returns. After an error (it names the server) call again: what is switched
        stays so. Other clients notice when they read the catalogue next (5 s by default).
        """
        self._native.switch_alias(alias, instance, _deadline(deadline_ms))

    def drop_instance(self, instance: str, *, deadline_ms: int | None = None) -> None:
        """Removes an instance and its tables on every server of the URL.

        FailedPrecondition while an alias (or the plain model name) means it.
        """
        self._native.drop_instance(instance, _deadline(deadline_ms))

    def send_hot_sets(self) -> None:
        """Sends the hot sets sampled so far, now; a background thread does it every 10 s."""
        self._native.send_hot_sets()

    # ---- asyncio

    async def pull_async(
        self, table: str, keys: npt.ArrayLike, out: Rows | None = None, **options: Any
    ) -> Any:
        """As :meth:`pull`, without blocking the event loop. Cancelling it does not stop the pull:

        do not touch ``out`` before its deadline then.
        """
        return await self._in_thread(lambda: self.pull(table, keys, out, **options))

    async def pull_answer_async(
        self, table: str, keys: npt.ArrayLike, out: Rows | None = None, **options: Any
    ) -> Answer:
        """As :meth:`pull_answer`, without blocking the event loop."""
        return await self._in_thread(lambda: self.pull_answer(table, keys, out, **options))

    async def pull_many_async(self, keys: Mapping[str, npt.ArrayLike], **options: Any) -> Any:
        """As :meth:`pull_many`, without blocking the event loop."""
        return await self._in_thread(lambda: self.pull_many(keys, **options))

    async def push_async(
        self, table: str, keys: npt.ArrayLike, rows: npt.ArrayLike, **options: Any
    ) -> PushReport:
        """As :meth:`push`, without blocking the event loop."""
        return await self._in_thread(lambda: self.push(table, keys, rows, **options))

    async def _in_thread(self, call: Callable[[], T]) -> T:
        with self._lock:
            if self._closed:
                raise FailedPrecondition("the client is closed: connect again")
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self._threads, "petps-client")
            executor = self._executor
        return await asyncio.get_running_loop().run_in_executor(executor, call)


def _check_u32(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 32:
        raise InvalidArgument(f"{name} is {value!r}, expected a whole number of 0 to 2**32 - 1")


def _deadline(deadline_ms: int | None) -> int:
    if deadline_ms is None:
        return 0
    _check_u32("deadline_ms", deadline_ms)
    if deadline_ms == 0:
        raise InvalidArgument("deadline_ms is 0, expected at least 1")
    return deadline_ms


def _version(min_version: int) -> int:
    if not 0 <= min_version < 1 << 64:
        raise InvalidArgument(f"min_version is {min_version}, outside 0..2**64-1")
    return min_version


def _wait(wait_ms: int) -> int:
    _check_u32("wait_ms", wait_ms)
    return wait_ms


def _report(outcome: tuple[str | None, tuple[int, int, int, int, int]]) -> PushReport:
    message, counts = outcome
    report = PushReport(*counts)
    if message is None:
        return report
    error = ResourceExhausted(message)
    error.report = report
    raise error
