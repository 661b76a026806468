"""Types of the extension module. It checks arrays, converts none, and releases the GIL."""

from typing import Any

__version__: str

def distinct(keys: Any) -> tuple[Any, Any]: ...

class PullTrace:
    def __init__(self, trace_id: bytes, span_id: bytes, part_ids: list[bytes]) -> None: ...
    def parts(self) -> list[tuple[str, int, int, int, int, str]]: ...

class Client:
    def __init__(
        self,
        url: str,
        *,
        name: str,
        deadline_ms: int,
        keys_per_request: int,
        requests_in_flight: int,
        connections: int,
        hot_sample_every: int,
        hot_keys: int,
        hot_set_ms: int,
        catalogue_ms: int,
        token: str,
        token_file: str,
        tls_ca: str,
        tls_certificate: str,
        tls_key: str,
        tls_server_name: str,
        on_unavailable: str | None,
        zone: str,
        hedge: bool,
    ) -> None: ...
    def pull(
        self,
        pulls: list[tuple[str, Any, Any, Any, Any]],
        dtype: str,
        deadline_ms: int,
        min_version: int,
        wait_ms: int,
        dedup: bool | None,
        on_unavailable: str | None,
        trace: PullTrace | None = None,
    ) -> tuple[int, int, str]: ...
    def shards(self) -> int: ...
    def pull_counts(self) -> dict[str, int]: ...
    def server_counts(self) -> list[tuple[str, int, bool]]: ...
    def push(
        self,
        table: str,
        keys: Any,
        rows: Any,
        stored: bool,
        allow_not_finite: bool,
        deadline_ms: int,
    ) -> tuple[str | None, tuple[int, int, int, int, int]]: ...
    def erase(
        self, table: str, keys: Any, deadline_ms: int
    ) -> tuple[str | None, tuple[int, int, int, int, int]]: ...
    def describe(self, table: str, deadline_ms: int) -> dict[str, Any]: ...
    def tables(self, deadline_ms: int) -> list[dict[str, Any]]: ...
    def status(self, server: int, deadline_ms: int) -> str: ...
    def send_hot_sets(self) -> None: ...
    def close(self) -> None: ...
