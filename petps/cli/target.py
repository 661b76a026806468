"""TARGET of a command: a pool's path, or a running server (petps://HOST:PORT[/MODEL]).

If a server has the pool of a path open, the command talks to that server, by the socket beside the
pool (petps.admin). petps+admin://HOST:PORT is its admin port, if it
has one. With TLS: petps+tls:// and petps+admin+tls://.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from petps.admin.socket import ADMIN_SCHEME, ADMIN_TLS_SCHEME, is_admin_port
from petps.errors import (
    FailedPrecondition,
    InUse,
    InvalidArgument,
    IoError,
    NotFound,
    PetpsError,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from petps.admin.client import AdminClient
    from petps.pool.audited import AuditedPool

    Keys = npt.NDArray[np.uint64]
    Rows = npt.NDArray[np.float32]
    Mask = npt.NDArray[np.bool_]

__all__ = [
    "Target",
    "check_administered",
    "is_server",
    "open_pool",
    "open_server",
    "open_target",
    "reading_answer",
]

# A request of a command may take long: it makes up to 65,536 rows durable on a disk.
DEADLINE_MS: Final = 60_000
SCHEMES: Final = ("petps://", "petps+tls://")  # of the port for clients
# Where a server that listens on all addresses is found.
ANY_ADDRESS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
DEFAULT_MODEL: Final = "default"
# What Python raises for JSON that is too deep, too long, or of another form.
ODD_ANSWERS: Final = (
    ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, StopIteration,
    TypeError, ValueError,
)  # fmt: skip
REASON_CHARACTERS_MAX: Final = 200


class Target(Protocol):
    """Tables that can be pulled and pushed, in a pool or on a server."""

    def dim(self, table: str) -> int:
        """Return a table's dim. NotFound lists the existing tables."""

    def pull(self, table: str, keys: Keys) -> tuple[Rows, Mask, Mask]:
        """Return rows float32[n, dim], bool[n] found, and bool[n] unavailable."""

    def push(self, table: str, keys: Keys, rows: Rows, allow_not_finite: bool) -> dict[str, int]:
        """Write rows; return the counts. Durable on return."""

    def load(self, table: str, keys: Keys, rows: Rows, allow_not_finite: bool) -> dict[str, int]:
        """Write rows as push() does. By its path, a pool also takes a table without deltas yet."""

    def erase(self, table: str, keys: Keys) -> dict[str, int]:
        """Delete keys; return the counts. Durable on return."""

    def status(self) -> dict[str, Any]:
        """Return the normalised status."""

    def switch_alias(self, alias: str, instance: str) -> None:
        """Make an alias refer to an instance. Durable on return."""

    def drop_instance(self, instance: str) -> None:
        """Remove an instance. Durable on return."""

    def close(self) -> None:
        """Release the pool or the connections."""


def is_server(target: str) -> bool:
    """Return whether TARGET is a server's address for clients.

    Raises InvalidArgument for another kind of URL.
    """
    if target.startswith(SCHEMES):
        return True
    scheme, separator, _ = target.partition("://")
    if separator and not is_admin_port(target):
        raise InvalidArgument(
            f"{target}: '{scheme}://' is unknown; write petps://HOST:PORT[/MODEL], a path, or "
            f"{ADMIN_SCHEME}HOST:PORT; with TLS petps+tls:// or {ADMIN_TLS_SCHEME}"
        )
    return False


@contextlib.contextmanager
def reading_answer(target: str) -> Iterator[None]:
    """Raise IoError if the block cannot read what the server at TARGET has answered.

    Nobody has checked the JSON of a server, which may be another program or another version. What
    a pool in this process says is no such answer.
    """
    try:
        yield
    except PetpsError:
        raise
    except ODD_ANSWERS as error:
        if not (is_server(target) or is_admin_port(target)):
            raise
        reason = f"{type(error).__name__}: {error}"[:REASON_CHARACTERS_MAX]
        raise IoError(
            f"{target} sent a status that this command cannot read ({reason}): it is no server of "
            "petps, or one of another version, whose own command can read it"
        ) from None


def check_administered(target: str) -> None:
    """Raise InvalidArgument if TARGET is an address for clients, which takes no such request."""
    if is_server(target):
        raise InvalidArgument(
            f"{target} is an address for clients: name the pool by its path, on the machine of its "
            f"server, or the server's admin port ({ADMIN_SCHEME}HOST:PORT)"
        )


def open_target(target: str, *, model: str | None, read_only: bool) -> Target:
    """Open a target. Raises InUse if another process than a server has the pool open."""
    if is_server(target):
        return _ServerTarget(target, model)
    from petps.pool import Pool

    pool = open_pool(target, read_only=read_only)
    return _PoolTarget(pool, model) if isinstance(pool, Pool) else _ServedTarget(pool, model)


def open_pool(path: str | Path, *, read_only: bool = False) -> AuditedPool | AdminClient:
    """Open the pool, or connect to the server that has it open, or that has this admin port.

    Raises NotFound with the remedy, and InUse if another process than a server has the pool open.
    """
    from petps import _native
    from petps.pool.audited import AuditedPool

    if is_admin_port(path):
        from petps.admin.client import AdminClient

        return AdminClient(path)
    _native.stop_on_lost_pool()
    try:
        return AuditedPool.open(path, read_only=read_only)
    except NotFound:
        raise NotFound(f"there is no pool at {path}: create it with `petps create`") from None
    except InUse:
        from petps.admin.client import AdminClient

        return AdminClient(path)


def open_server(path: str, part: str) -> AdminClient:
    """Connect to the server that has a pool open, for its ``part`` that a closed pool has not.

    Raises FailedPrecondition if no server has the pool open.
    """
    from petps.admin.client import AdminClient

    check_administered(path)
    pool = open_pool(path, read_only=True)
    if isinstance(pool, AdminClient):
        return pool
    pool.close()
    raise FailedPrecondition(f"no server has {path} open, so there is no {part}")


class _PoolTarget:
    def __init__(self, pool: AuditedPool, model: str | None) -> None:
        self._pool = pool
        self._model = model

    def dim(self, table: str) -> int:
        return self._pool.table(table, self._model).dim

    def pull(self, table: str, keys: Keys) -> tuple[Rows, Mask, Mask]:
        rows, mask = self._pool.pull(table, keys, return_mask=True, model=self._model)
        return rows, mask, mask & False

    def push(self, table: str, keys: Keys, rows: Rows, allow_not_finite: bool) -> dict[str, int]:
        return self._pool.push(
            table, keys, rows, model=self._model, allow_not_finite=allow_not_finite
        ).as_dict()

    def load(self, table: str, keys: Keys, rows: Rows, allow_not_finite: bool) -> dict[str, int]:
        return self._pool.load(
            table, keys, rows, model=self._model, allow_not_finite=allow_not_finite
        ).as_dict()

    def erase(self, table: str, keys: Keys) -> dict[str, int]:
        return self._pool.erase(table, keys, model=self._model).as_dict()

    def status(self) -> dict[str, Any]:
        from petps.server.status import normalise_status

        return normalise_status(self._pool.status())

    def switch_alias(self, alias: str, instance: str) -> None:
        self._pool.switch_alias(alias, instance)

    def drop_instance(self, instance: str) -> None:
        self._pool.drop_instance(instance)

    def close(self) -> None:
        self._pool.close()


class _ServerTarget:
    def __init__(self, url: str, model: str | None) -> None:
        self._url, self._model = url, model

    @functools.cached_property
    def _client(self) -> Any:  # connected by the first call that needs it
        import petps_client

        return petps_client.connect(self._address(), name="petps command", hot_sample_every=0)

    def _address(self) -> str:
        scheme, _, rest = self._url.partition("://")
        if self._model is None:
            return self._url
        rest, question, options = rest.partition("?")
        host, _, url_model = rest.partition("/")
        if url_model not in ("", self._model):
            raise InvalidArgument(
                f"{self._url} names model '{url_model}', but --model is '{self._model}'; name one "
                "model"
            )
        return f"{scheme}://{host}/{self._model}{question}{options}"

    def dim(self, table: str) -> int:
        return int(self._client.describe(table).dim)

    def pull(self, table: str, keys: Keys) -> tuple[Rows, Mask, Mask]:
        answer = self._client.pull_answer(table, keys, deadline_ms=DEADLINE_MS)
        return answer.rows, answer.mask, answer.unavailable

    def push(self, table: str, keys: Keys, rows: Rows, allow_not_finite: bool) -> dict[str, int]:
        return _counts(
            self._client.push(
                table, keys, rows, allow_not_finite=allow_not_finite, deadline_ms=DEADLINE_MS
            )
        )

    load = push

    def erase(self, table: str, keys: Keys) -> dict[str, int]:
        return _counts(self._client.erase(table, keys, deadline_ms=DEADLINE_MS))

    def status(self) -> dict[str, Any]:
        from petps.server.status import normalise_status

        with reading_answer(self._url):
            return normalise_status(self._client.status())

    def switch_alias(self, alias: str, instance: str) -> None:
        check_administered(self._url)  # raises

    def drop_instance(self, instance: str) -> None:
        check_administered(self._url)  # raises

    def close(self) -> None:
        if "_client" in self.__dict__:
            self._client.close()


class _ServedTarget(_ServerTarget):
    """The server that has a pool open. Rows cross its native port."""

    def __init__(self, admin: AdminClient, model: str | None) -> None:
        super().__init__("", model)
        self._admin = admin

    def _address(self) -> str:
        if self._admin.is_port:  # it may be the end of a tunnel, and the other port is not
            raise InvalidArgument(
                "rows do not cross an admin port: name the server's port for clients, "
                "petps://HOST:PORT/MODEL"
            )
        status = self._admin.status()
        host = ANY_ADDRESS.get(status["host"], status["host"])
        models = {record["model"] for record in status["instances"]}
        model = self._model or (models.pop() if len(models) == 1 else DEFAULT_MODEL)
        scheme = "petps+tls" if status.get("tls") else "petps"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{status['port']}/{model}"

    def status(self) -> dict[str, Any]:
        return self._admin.status()

    def load(self, table: str, keys: Keys, rows: Rows, allow_not_finite: bool) -> dict[str, int]:
        if table not in self._delta_fed:
            return self.push(table, keys, rows, allow_not_finite)
        return self._admin.load(
            table, keys, rows, model=self._model, allow_not_finite=allow_not_finite
        )

    @functools.cached_property
    def _delta_fed(self) -> set[str]:
        """The names of all delta-fed tables. Pushes, which are faster, write the others."""
        return {record["name"] for record in self.status()["tables"] if record["feed"] == "delta"}

    def switch_alias(self, alias: str, instance: str) -> None:
        self._admin.switch_alias(alias, instance)

    def drop_instance(self, instance: str) -> None:
        self._admin.drop_instance(instance)

    def close(self) -> None:
        super().close()
        self._admin.close()


def _counts(report: Any) -> dict[str, int]:
    names = ("inserted", "updated", "deleted", "absent", "refused")
    return {name: int(getattr(report, name)) for name in names}
