"""TARGET of a command: a pool's path, or a running server (petps://HOST:PORT[/MODEL])."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from petps.errors import InUse, InvalidArgument, NotFound

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Keys = npt.NDArray[np.uint64]
    Rows = npt.NDArray[np.float32]
    Mask = npt.NDArray[np.bool_]

__all__ = ["Target", "is_server", "open_target"]

# A request of a command may take long: it makes up to 65,536 rows durable on a disk.
DEADLINE_MS: Final = 60_000


class Target(Protocol):
    """Tables that can be pulled and pushed, in a pool or on a server."""

    def dim(self, table: str) -> int:
        """Return a table's dim. NotFound lists the existing tables."""

    def pull(self, table: str, keys: Keys) -> tuple[Rows, Mask]:
        """Return rows float32[n, dim] and mask bool[n]."""

    def push(self, table: str, keys: Keys, rows: Rows, allow_not_finite: bool) -> dict[str, int]:
        """Write rows; return the counts. Durable on return."""

    def load(self, table: str, keys: Keys, rows: Rows, allow_not_finite: bool) -> dict[str, int]:
        """Write rows as push() does. A pool also accepts a delta-fed table without deltas yet."""

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
    """Return whether TARGET names a server. Raises InvalidArgument for another kind of URL."""
    if target.startswith("petps://"):
        return True
    scheme, separator, _ = target.partition("://")
    if separator:
        raise InvalidArgument(
            f"{target}: '{scheme}://' is unknown; write petps://HOST:PORT[/MODEL] or a path"
        )
    return False


def open_target(target: str, *, model: str | None, read_only: bool) -> Target:
    """Open a target. Raises InUse, with the remedy, if a server has the pool open."""
    if is_server(target):
        return _ServerTarget(target, model)
    return _PoolTarget(target, model, read_only)


class _PoolTarget:
    def __init__(self, path: str, model: str | None, read_only: bool) -> None:
        from petps import _native
        from petps.pool import Pool

        _native.stop_on_lost_pool()
        try:
            self._pool = Pool.open(path, read_only=read_only)
        except NotFound:
            raise NotFound(f"there is no pool at {path}: create it with `petps create`") from None
        except InUse:
            raise InUse(
                f"{path} is in use by another process. If that is a server, name the server "
                "instead: petps://HOST:PORT (by default petps://127.0.0.1:7070)"
            ) from None
        self._model = model

    def dim(self, table: str) -> int:
        return self._pool.table(table, self._model).dim

    def pull(self, table: str, keys: Keys) -> tuple[Rows, Mask]:
        return self._pool.pull(table, keys, return_mask=True, model=self._model)

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
        import petps_client

        if model is not None:
            host, _, url_model = url.removeprefix("petps://").partition("/")
            if url_model not in ("", model):
                raise InvalidArgument(
                    f"{url} names model '{url_model}', but --model is '{model}'; name one model"
                )
            url = f"petps://{host}/{model}"
        self._client = petps_client.connect(url, name="petps command", hot_sample_every=0)

    def dim(self, table: str) -> int:
        return int(self._client.describe(table).dim)

    def pull(self, table: str, keys: Keys) -> tuple[Rows, Mask]:
        rows, mask = self._client.pull(table, keys, return_mask=True, deadline_ms=DEADLINE_MS)
        return rows, mask

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

        return normalise_status(self._client.status())

    def switch_alias(self, alias: str, instance: str) -> None:
        self._client.switch_alias(alias, instance, deadline_ms=DEADLINE_MS)

    def drop_instance(self, instance: str) -> None:
        self._client.drop_instance(instance, deadline_ms=DEADLINE_MS)

    def close(self) -> None:
        self._client.close()


def _counts(report: Any) -> dict[str, int]:
    names = ("inserted", "updated", "deleted", "absent", "refused")
    return {name: int(getattr(report, name)) for name in names}
