"""The client: a thin layer over ``petps_client._native`` that takes and returns numpy arrays."""

from __future__ import annotations

import asyncio
import contextvars
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, overload

import numpy as np
import numpy.typing as npt

from petps_client import _native
from petps_client.arrays import as_keys, as_rows
from petps_client.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from petps_client.records import (
    Answer,
    Form,
    ManyAnswer,
    Mask,
    OnUnavailable,
    PullOptions,
    PushReport,
    Rows,
    Table,
)
from petps_client.tls import Tls, tls_options
from petps_client.tracing import is_sampled, traced_pull

if TYPE_CHECKING:
    from typing import Self, Unpack  # Python 3.11

    from petps_client.metrics import CollectorRegistry

__all__ = ["Answer", "Client", "ManyAnswer", "PullOptions", "PushReport", "Table", "connect"]

TOKEN_FILE_VARIABLE: Final = "PETPS_TOKEN_FILE"
ZONE_VARIABLE: Final = "PETPS_ZONE"
T = TypeVar("T")
_PullRequest = tuple[str, npt.NDArray[np.uint64], Any, Mask | None, Mask | None]
"""(table, keys, rows, mask, unavailable) of a pull; rows are None if the caller passed none."""


def connect(
    url: str,
    *,
    name: str = "",
    deadline_ms: int = 2000,
    keys_per_request: int = 500,
    requests_in_flight: int = 8,
    connections: int = 16,
    hot_sample_every: int = 16,
    hot_keys: int = 65_536,
    hot_set_ms: int = 0,
    catalogue_ms: int = 5000,
    token: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    tls: Tls | None = None,
    signed_keys: bool = False,
    on_unavailable: OnUnavailable | None = None,
    zone: str | None = None,
    hedge: bool = True,
    metrics: CollectorRegistry | None = None,
) -> Client:
    """Connect to the servers of ``petps://h1:7070,h2:7070/model``.

    With ``petps+tls://`` all connections use TLS 1.3.

    The addresses are any servers of the model. If the servers have a shard map, it assigns keys
    and replicas to servers, and the client follows its changes. Without one the addresses are
    replicas. A call that fails on one replica is retried on another within its deadline. The
    model (an alias, an instance or a model) may be omitted when a server has only one.

    Args:
        url: Addresses and model, as above.
        name: Shown in the servers' reports.
        deadline_ms: Deadline of calls that set none.
        keys_per_request: A longer pull is split. The part for one of several servers may have a
            quarter more.
        requests_in_flight: Limit per connection.
        connections: Limit per server, and so of the calls that run at the same time.
        hot_sample_every: One pull in this number is sampled for the hot sets; 0: none are sent.
        hot_keys: Limit of a table's hot set.
        hot_set_ms: Period of sending hot sets; 0: the servers' choice.
        catalogue_ms: Period of reading tables and aliases; 0: only when needed.
        token: The credential for servers that ask for one. It is sent only to this machine or over
            an encrypted connection.
        token_file: The file that has the token, instead of ``token``. It is read for each new
            connection, so that a new token needs no restart. By default the environment variable
            PETPS_TOKEN_FILE names it.
        tls: Certificates of a ``petps+tls://`` URL. None: the files and the name that the
            environment variables PETPS_TLS_CA, PETPS_TLS_CERTIFICATE, PETPS_TLS_KEY and
            PETPS_TLS_SERVER_NAME give.
        signed_keys: Take a key below 0 as the unsigned key with the same 64 bits, instead of
            refusing it. Integers from 0 on are accepted in any dtype either way.
        on_unavailable: What pulls do with the keys of a shard that no server answers for, see
            :class:`PullOptions`. None: what the URL says (``?on_unavailable=default`` at its end),
            or "error".
        zone: Pulls prefer servers of this zone of the shard map while they are well. None: the zone
            that the environment variable PETPS_ZONE gives; "": no preference.
        hedge: Ask a second server if the first one is slower than 95 % of recent requests: for at
            most 5 % of the requests, and never for pushes.
        metrics: A registry of prometheus_client, which shows requests, errors and latency of this
            client, with ``name`` as label. It needs prometheus_client, which petps-client does not
            install.

    Raises:
        InvalidArgument: The URL or an option is wrong.
        Unavailable: No server is reachable; names each server and its reason.
        Unauthenticated: A certificate is not accepted, or the server needs a credential, or does
            not know this one.
        NotFound: The model is unknown; lists the known ones.
    """
    if token is not None and token_file is not None:
        raise InvalidArgument("give either token or token_file, not both")
    if token is None and token_file is None:
        token_file = os.environ.get(TOKEN_FILE_VARIABLE)
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
    arguments: dict[str, Any] = {
        **options,
        **tls_options(url, tls),
        "token": token or "",
        "token_file": os.fspath(token_file or ""),
        "on_unavailable": on_unavailable,
        "zone": os.environ.get(ZONE_VARIABLE, "") if zone is None else zone,
        "hedge": hedge,
    }
    native: Any = _native.Client(url, name=name, **arguments)
    if metrics is not None:
        from petps_client.metrics import MeasuredClient

        native = MeasuredClient(native, name, metrics)
    return Client(native, threads=connections, signed_keys=signed_keys)


class Client:
    """A client made by :func:`connect`. Any number of threads may pull and push.

    Close it with :meth:`close` or a ``with`` statement. After fork() a child must call
    :func:`connect` again.
    """

    def __init__(self, native: _native.Client, *, threads: int, signed_keys: bool = False) -> None:
        self._native = native
        self.signed_keys = signed_keys
        self._threads = min(threads, 32)
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the client. Calls in other threads finish first. A second call does nothing."""
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
        unavailable: Mask | None = ...,
        **options: Unpack[PullOptions],
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
        unavailable: Mask | None = ...,
        **options: Unpack[PullOptions],
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
        unavailable: Mask | None = None,
        **options: Unpack[PullOptions],
    ) -> Rows | tuple[Rows, Mask]:
        """Pull rows. A missing key has the table's default row.

        Args:
            table: The table's name.
            keys: integers[n].
            out: A C-contiguous float32[n, dim] that receives the rows without a copy, and is
                returned. After an error its contents are undefined.
            return_mask: Return (rows, mask); mask, bool[n], says which keys were found.
            dtype: "f32", or "stored" for uint8[n, row_bytes] as the server stores them.
            mask: A bool[n] that receives the mask.
            unavailable: A bool[n] that receives which keys no server answered for. With
                ``on_unavailable="default"``, a pull that takes a mask must take this one too.
            options: See :class:`PullOptions`.

        Returns:
            float32[n, dim], or with ``return_mask`` (rows, mask).

        Raises:
            NotFound: Lists the tables.
            InvalidArgument: Names the array.
            Stale: The rows are older than ``min_version``.
            DeadlineExceeded: Names the server.
            Unavailable: Names the server. With ``on_unavailable="default"`` these two mean that no
                server of the model answers.
        """
        key_array = as_keys(keys, self.signed_keys)
        if return_mask and mask is None:
            mask = np.empty(key_array.shape[0], np.bool_)
        requests = [(table, key_array, out, mask, unavailable)]
        if out is None:
            (out,), *_ = self._pull(requests, dtype, options)
        else:  # fast path: no array is created
            self._call(requests, dtype, *_check_options(**options))
        return (out, mask) if return_mask and mask is not None else out

    def pull_answer(
        self,
        table: str,
        keys: npt.ArrayLike,
        out: Rows | None = None,
        dtype: Form = "f32",
        **options: Unpack[PullOptions],
    ) -> Answer:
        """Pull like :meth:`pull`, and return the complete result with the applied version."""
        key_array = as_keys(keys, self.signed_keys)
        mask = np.empty(key_array.shape[0], np.bool_)
        unavailable = np.empty_like(mask)
        (rows,), found_count, version, instance = self._pull(
            [(table, key_array, out, mask, unavailable)], dtype, options
        )
        return Answer(rows, mask, found_count, version, instance, unavailable)

    @overload
    def pull_many(
        self,
        keys: Mapping[str, npt.ArrayLike],
        *,
        out: Mapping[str, Rows] | None = ...,
        return_mask: Literal[False] = ...,
        dtype: Form = ...,
        **options: Unpack[PullOptions],
    ) -> dict[str, Rows]: ...
    @overload
    def pull_many(
        self,
        keys: Mapping[str, npt.ArrayLike],
        *,
        out: Mapping[str, Rows] | None = ...,
        return_mask: Literal[True],
        dtype: Form = ...,
        **options: Unpack[PullOptions],
    ) -> dict[str, tuple[Rows, Mask]]: ...
    def pull_many(
        self,
        keys: Mapping[str, npt.ArrayLike],
        *,
        out: Mapping[str, Rows] | None = None,
        return_mask: bool = False,
        dtype: Form = "f32",
        **options: Unpack[PullOptions],
    ) -> dict[str, Rows] | dict[str, tuple[Rows, Mask]]:
        """Pull {table: integers[n]} as {table: float32[n, dim]}, in one call, of one instance.

        ``out`` is {table: array} for tables whose rows go into the caller's arrays. The other
        arguments and the errors are those of :meth:`pull`.
        """
        answer = self._pull_tables(keys, out, dtype, options, return_mask, False)
        if return_mask:
            return {table: (answer.rows[table], answer.masks[table]) for table in keys}
        return answer.rows

    def pull_many_answer(
        self,
        keys: Mapping[str, npt.ArrayLike],
        *,
        out: Mapping[str, Rows] | None = None,
        dtype: Form = "f32",
        **options: Unpack[PullOptions],
    ) -> ManyAnswer:
        """Pull like :meth:`pull_many`, and return the complete result."""
        return self._pull_tables(keys, out, dtype, options, True, True)

    def _pull_tables(
        self,
        keys: Mapping[str, npt.ArrayLike],
        out: Mapping[str, Rows] | None,
        dtype: Form,
        options: PullOptions,
        has_masks: bool,
        has_unavailable: bool,
    ) -> ManyAnswer:
        """Pull several tables, with the masks that the caller can see."""
        out_arrays = {} if out is None else out
        unknown = set(out_arrays) - set(keys)
        if unknown:
            raise InvalidArgument(f"out has tables {sorted(unknown)}, which keys does not have")
        key_arrays = {
            table: as_keys(table_keys, self.signed_keys) for table, table_keys in keys.items()
        }

        def masks_of(is_wanted: bool) -> dict[str, Mask]:
            arrays = key_arrays if is_wanted else {}
            return {table: np.empty(len(array), np.bool_) for table, array in arrays.items()}

        masks, unavailable = masks_of(has_masks), masks_of(has_unavailable)
        requests = [
            (table, table_keys, out_arrays.get(table), masks.get(table), unavailable.get(table))
            for table, table_keys in key_arrays.items()
        ]
        rows, found_count, version, instance = self._pull(requests, dtype, options)
        rows_by_table = dict(zip(keys, rows, strict=True))
        return ManyAnswer(rows_by_table, masks, found_count, version, instance, unavailable)

    def _pull(
        self, requests: Sequence[_PullRequest], dtype: Form, options: PullOptions
    ) -> tuple[list[Rows], int, int, str]:
        """Return (rows, found, applied version, instance). Create the arrays that are None."""
        remaining_ms, min_version, wait_ms, dedup, on_unavailable = _check_options(**options)
        end = time.monotonic() + remaining_ms / 1e3
        pulls = self._with_rows(requests, dtype, remaining_ms)
        while True:
            try:
                found_count, version, instance = self._call(
                    pulls, dtype, remaining_ms, min_version, wait_ms, dedup, on_unavailable
                )
            except InvalidArgument:
                # The model may resolve to another instance now, whose rows have another length.
                if remaining_ms:
                    remaining_ms = max(1, int(1e3 * (end - time.monotonic())))
                old_pulls, pulls = pulls, self._with_rows(requests, dtype, remaining_ms)
                if all(
                    np.shape(old[2]) == np.shape(new[2])
                    for old, new in zip(old_pulls, pulls, strict=True)
                ):
                    raise
            else:
                return [pull[2] for pull in pulls], found_count, version, instance

    def _call(self, pulls: list[_PullRequest], dtype: Form, *options: Any) -> tuple[int, int, str]:
        """Return (found, applied version, instance) of a pull. Make a span if it is sampled."""
        if is_sampled():
            traced: tuple[int, int, str] = traced_pull(self._native, pulls, dtype, *options)
            return traced
        return self._native.pull(pulls, dtype, *options)

    def _with_rows(
        self, requests: Sequence[_PullRequest], dtype: Form, deadline_ms: int
    ) -> list[_PullRequest]:
        """Create the arrays that are None, with the length of rows that describe() returns."""
        pulls = []
        for table, keys, out, mask, unavailable in requests:
            rows = out
            if rows is None:
                description = self._native.describe(table, deadline_ms)
                rows = (
                    np.empty((keys.shape[0], description["row_bytes"]), np.uint8)
                    if dtype == "stored"
                    else np.empty((keys.shape[0], description["dim"]), np.float32)
                )
            pulls.append((table, keys, rows, mask, unavailable))
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
        """Write full rows to the servers that own their keys. They are durable when it returns.

        A push is not retried: an error says how many rows were acknowledged. A push that timed
        out may be applied later, but never over a newer push of this client.

        Args:
            table: The table's name.
            keys: integers[n]. For a repeated key the last row counts.
            rows: floats[n, dim], encoded to the table's dtype; with dtype="stored"
                uint8[n, row_bytes].
            dtype: "f32" or "stored".
            allow_not_finite: Accept NaN and infinity.
            deadline_ms: Deadline of this call.

        Raises:
            ResourceExhausted: The table is full. ``error.report`` counts the refused rows; the
                others are applied.
            FailedPrecondition: The table is fed by deltas, or a key has several servers.
            InvalidArgument: The shape is wrong, or a row has NaN or infinity; names the row.
        """
        stored = dtype == "stored"
        row_array = rows if stored else as_rows(rows)
        return _report(
            self._native.push(
                table,
                as_keys(keys, self.signed_keys),
                row_array,
                stored,
                allow_not_finite,
                _deadline(deadline_ms),
            )
        )

    def erase(
        self, table: str, keys: npt.ArrayLike, *, deadline_ms: int | None = None
    ) -> PushReport:
        """Delete keys; durable when it returns. Keys that do not exist are counted as absent."""
        return _report(
            self._native.erase(table, as_keys(keys, self.signed_keys), _deadline(deadline_ms))
        )

    # ---- tables, status and operation

    def describe(self, table: str) -> Table:
        """Return the table as last read from a server. NotFound lists the known tables."""
        return Table(**self._native.describe(table, 0))

    def tables(self, *, deadline_ms: int | None = None) -> list[Table]:
        """Read the tables of the URL's model; rows and capacity are those of one server."""
        return [Table(**description) for description in self._native.tables(_deadline(deadline_ms))]

    def status(
        self, server: int | None = None, *, deadline_ms: int | None = None
    ) -> dict[str, Any]:
        """Return the status of server number ``server`` of the URL; None: of any that replies."""
        number = -1 if server is None else server
        status: dict[str, Any] = json.loads(self._native.status(number, _deadline(deadline_ms)))
        return status

    def pull_counts(self) -> dict[str, int]:
        """Return the counts of this client since :func:`connect`.

        Returns:
            {"pulls": pulls that succeeded, "partial_pulls": those of them with unavailable keys,
            "unavailable_keys": the keys that no server answered for, "hedges": requests to a second
            server because the first one was slow, "hedges_won": requests whose keys these answered
            first}.
        """
        return self._native.pull_counts()

    def send_hot_sets(self) -> None:
        """Send the sampled hot sets now. A background thread does this every 10 s."""
        self._native.send_hot_sets()

    # ---- asyncio

    async def pull_async(
        self, table: str, keys: npt.ArrayLike, out: Rows | None = None, **options: Any
    ) -> Any:
        """Pull like :meth:`pull`, without blocking the event loop.

        Cancelling it does not stop the pull: after that, do not touch ``out`` before the deadline.
        """
        return await self._in_thread(lambda: self.pull(table, keys, out, **options))

    async def pull_answer_async(
        self, table: str, keys: npt.ArrayLike, out: Rows | None = None, **options: Any
    ) -> Answer:
        """Pull like :meth:`pull_answer`, without blocking the event loop."""
        return await self._in_thread(lambda: self.pull_answer(table, keys, out, **options))

    async def pull_many_answer_async(
        self, keys: Mapping[str, npt.ArrayLike], **options: Any
    ) -> ManyAnswer:
        """Pull like :meth:`pull_many_answer`, without blocking the event loop."""
        return await self._in_thread(lambda: self.pull_many_answer(keys, **options))

    async def pull_many_async(self, keys: Mapping[str, npt.ArrayLike], **options: Any) -> Any:
        """Pull like :meth:`pull_many`, without blocking the event loop."""
        return await self._in_thread(lambda: self.pull_many(keys, **options))

    async def push_async(
        self, table: str, keys: npt.ArrayLike, rows: npt.ArrayLike, **options: Any
    ) -> PushReport:
        """Push like :meth:`push`, without blocking the event loop."""
        return await self._in_thread(lambda: self.push(table, keys, rows, **options))

    async def _in_thread(self, call: Callable[[], T]) -> T:
        with self._lock:
            if self._closed:
                raise FailedPrecondition("the client is closed: connect again")
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self._threads, "petps-client")
            executor = self._executor
        # The call's active span is that of the caller.
        run = contextvars.copy_context().run
        return await asyncio.get_running_loop().run_in_executor(executor, run, call)


def _check_u32(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 32:
        raise InvalidArgument(f"{name} is {value!r}, expected a whole number from 0 to 2**32 - 1")


def _deadline(deadline_ms: int | None) -> int:
    if deadline_ms is None:
        return 0
    _check_u32("deadline_ms", deadline_ms)
    if deadline_ms == 0:
        raise InvalidArgument("deadline_ms is 0, expected at least 1")
    return deadline_ms


def _check_options(
    deadline_ms: int | None = None,
    min_version: int = 0,
    wait_ms: int = 0,
    dedup: bool | None = None,
    on_unavailable: OnUnavailable | None = None,
) -> tuple[int, int, int, bool | None, OnUnavailable | None]:
    """Return the options as native code takes them."""
    if not 0 <= min_version < 1 << 64:
        raise InvalidArgument(f"min_version is {min_version}, expected 0 to 2**64 - 1")
    _check_u32("wait_ms", wait_ms)
    return _deadline(deadline_ms), min_version, wait_ms, dedup, on_unavailable


def _report(outcome: tuple[str | None, tuple[int, int, int, int, int]]) -> PushReport:
    message, counts = outcome
    report = PushReport(*counts)
    if message is None:
        return report
    error = ResourceExhausted(message)
    error.report = report
    raise error
