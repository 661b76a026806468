"""The router of the extension module: part of petps/_native.pyi."""

from typing import Any

from petps._native_records import ServerTls

class CallReply:
    """Reply of a call. If the call failed, check(), pulled() and pushed() raise its error."""

    @property
    def ticket(self) -> int: ...
    def check(self) -> None: ...
    def pulled(self) -> tuple[int, list[tuple[int, int, int, bytes, bytes]]]:
        """Return (applied version, [(code, row bytes, rows found, presence bits, packed rows)])."""
    def pushed(self) -> tuple[int, int, int, int, int]:
        """Return (inserted, updated, deleted, absent, refused)."""

class RouterInstance:
    """Instance as a router lists it, for one token."""

    @property
    def id(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def partitions(self) -> int: ...
    @property
    def applied_version(self) -> int: ...
    def as_dict(self) -> dict[str, Any]: ...

class RouterTable:
    """Table as a router lists it, for one token. rows and capacity are sums over the servers."""

    @property
    def id(self) -> int: ...
    @property
    def instance(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def feed(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def capacity(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def default_row(self) -> bytes: ...
    def as_dict(self) -> dict[str, Any]: ...

class RouterNames:
    """What one token sees of the servers."""

    @property
    def instances(self) -> list[RouterInstance]: ...
    @property
    def tables(self) -> list[RouterTable]: ...
    def aliases(self, instance: int) -> list[str]: ...
    def leave(self) -> None:
        """End the waits of calls with these names: nobody waits for their replies."""
    def resolve(self, model: str) -> RouterInstance:
        """Return the instance of an alias, instance or model; "": the only model's.

        Raise NotFound, or InvalidArgument if there are several models.
        """
    def table(self, instance: RouterInstance, table: str) -> RouterTable:
        """Return a table of the instance. Raise NotFound."""

class Router:
    """Native router of a cluster: it answers requests by asking the servers."""

    @staticmethod
    def start(
        *,
        servers: str,
        host: str = "127.0.0.1",
        port: int = 7080,
        workers: int = 1,
        calls: int = 64,
        callers: int = 256,
        caller_idle_ms: int = 300_000,
        deadline_ms: int = 1_500,
        drain_ms: int = 5_000,
        limits: dict[str, int] = ...,
        tls: ServerTls | None = None,
        ca: str = "",
        server_name: str = "",
        zone: str = "",
        needs_token: bool = False,
    ) -> Router:
        """Start a router, which listens on return. The servers need not answer yet.

        servers: a URL without a model. calls: requests at the servers at a time. callers: tokens
        served at a time. tls: of the router's own port. ca, server_name: of servers with TLS.
        needs_token: serve nobody if the servers ask nobody for credentials.
        """
    @property
    def port(self) -> int: ...
    def stop(self) -> None:
        """Accept no more requests, answer those that arrived, then stop.

        Raise DeadlineExceeded if requests were cut after drain_ms.
        """
    def tend(self) -> None:
        """Forget tokens that were not used for caller_idle_ms."""
    def stats(self) -> dict[str, Any]: ...
    def progress(self) -> list[int]:
        """Return a count of each worker, which grows at least twice a second."""
    def check_sight(self, token: str, host: str) -> None:
        """Raise unless the servers let this token see their status. It may wait for them."""
    def names(self, token: str, host: str) -> RouterNames:
        """Return the names that a token sees, at most about a second old. Raise as a login."""
    def knows(self, token: str, host: str) -> bool:
        """Return whether the router knows a token, so that names() asks for no login."""
    def pull(
        self,
        seen: RouterNames,
        token: str,
        host: str,
        instance: int,
        sections: list[tuple[int, bytes]],
        *,
        min_version: int = 0,
        wait_ms: int = 0,
        trace: bytes = b"",
    ) -> CallReply:
        """Pull with a token, on this thread. The arguments are those of Calls.pull.

        seen: the names of this token, of which the ids are. Likewise push() and set_hot_keys().
        """
    def push(
        self,
        seen: RouterNames,
        token: str,
        host: str,
        table: RouterTable,
        keys: bytes,
        rows: bytes,
        *,
        deleted: bytes = b"",
        stamp: int = 0,
    ) -> CallReply:
        """Push with a token, on this thread. The arguments are those of Calls.push."""
    def set_hot_keys(
        self, seen: RouterNames, token: str, host: str, table: int, keys: bytes
    ) -> CallReply: ...
    def tables(self, seen: RouterNames, token: str, host: str) -> CallReply:
        """Ask a server for the names that a token sees, on this thread. names() then has them."""
    def hold(self, bytes: int) -> None:
        """Count bytes of a request or a reply until release(). Raise ResourceExhausted."""
    def release(self, bytes: int) -> None: ...
    def status_json(self) -> str: ...
