"""A client of etcd over its JSON gateway: several endpoints, deadlines, transactions, leases.

It speaks through etcd3gw, which `pip install 'petps[cluster]'` brings. docs/how-to/cluster.md.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlsplit

from petps.errors import FailedPrecondition, InvalidArgument, PermissionDenied, Unavailable

__all__ = ["Access", "Compare", "Etcd", "Read", "Value", "check_package"]

CALL_SECONDS: Final = 2.0  # for one endpoint to answer
RETRY_SECONDS: Final = 0.2
LEASE_SHARE: Final = 3  # a lease is kept alive after this part of its time
API: Final = "/v3/"  # of etcd 3.4 and later
# Of one reply, which is whole in memory. A model of 1,024 partitions and as many servers takes less
# than a tenth of each.
REPLY_BYTES_MAX: Final = 64 << 20
KEYS_MAX: Final = 100_000
CHUNK_BYTES: Final = 64 << 10  # of a reply, read at a time
REFUSED_TOKEN: Final = "invalid auth token"
T = TypeVar("T")


def check_package() -> None:
    """Raise FailedPrecondition if the extra is not installed."""
    if importlib.util.find_spec("etcd3gw") is None:
        raise FailedPrecondition(
            "cluster.endpoints needs the Python package etcd3gw, which is not installed: "
            "pip install 'petps[cluster]', or leave cluster.endpoints out"
        )


@dataclass(frozen=True)
class Access:
    """How to reach etcd: endpoints http(s)://HOST:PORT, files of TLS, and credentials."""

    endpoints: tuple[str, ...]
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    user: str | None = None
    password: Callable[[], str] | None = field(default=None, repr=False)
    """Returns the password, which is read again for each login."""


@dataclass(frozen=True, slots=True)
class Value:
    """The value of a key. ``changed``: the revision of its last change. ``lease`` 0: no lease."""

    text: str
    changed: int
    created: int
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Read:
    """All keys of a prefix, as they were at one revision."""

    revision: int
    values: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Compare:
    """A condition of a transaction: the revision of the key's last change; 0: it does not exist.

    is_created: compare the revision at which the key was created instead.
    """

    key: str
    revision: int
    is_created: bool = False


class Etcd:
    """A client of one etcd cluster. Any thread may call its methods, one call runs at a time.

    A call tries each endpoint, beginning with the one that answered last. Unavailable: no
    endpoint answered in time. A transaction that is Unavailable may have happened or not.
    """

    def __init__(
        self, access: Access, *, seconds: float = CALL_SECONDS, patience: float = 0.0
    ) -> None:
        """``seconds``: for one endpoint to answer. ``patience``: for how long a call tries again.

        etcd answers nothing for a second or two while its members elect a leader.
        """
        check_package()
        if not access.endpoints:
            raise InvalidArgument("cluster.endpoints names no endpoint of etcd")
        self._access, self._seconds, self._patience = access, seconds, patience
        self._lock = threading.Lock()
        self._clients: dict[str, Any] = {}
        self._order = list(access.endpoints)
        self._answered_at: float | None = None

    @property
    def answered_at(self) -> float | None:
        """Return when etcd answered last, by time.monotonic(); None: it has not answered yet."""
        return self._answered_at

    def read(self, prefix: str, *, since: int = 0) -> Read:
        """Return the keys that begin with ``prefix``, all at one revision.

        since: only those that have changed at this revision or later. Raises Unavailable also if
        there are more than KEYS_MAX.
        """
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        body = {"key": _encode(prefix), "range_end": _encode(end), "limit": str(KEYS_MAX)}
        if since:
            body["min_mod_revision"] = str(since)
        reply = self._call("kv/range", body)
        with _parsing():
            if reply.get("more"):
                raise Unavailable(
                    f"etcd has {int(reply['count']):,} keys that begin with '{prefix}', and at "
                    f"most {KEYS_MAX:,} are read: delete those that petps did not write, or "
                    "choose another cluster.prefix"
                )
            values = {_decode(pair["key"]): _value(pair) for pair in reply.get("kvs", [])}
            return Read(int(reply["header"]["revision"]), values)

    def commit(
        self,
        compares: Sequence[Compare],
        puts: Mapping[str, str],
        deletes: Sequence[str] = (),
        *,
        lease: int = 0,
    ) -> int | None:
        """Write and delete keys in one transaction, if all ``compares`` hold.

        lease: of the keys of ``puts``. Return the revision; None if a condition does not hold,
        and then nothing has changed.
        """
        operations: list[dict[str, Any]] = [
            {"request_put": {"key": _encode(key), "value": _encode(text), "lease": str(lease)}}
            for key, text in puts.items()
        ]
        operations += [{"request_delete_range": {"key": _encode(key)}} for key in deletes]
        body = {"compare": [_condition(compare) for compare in compares], "success": operations}
        reply = self._call("kv/txn", body)
        with _parsing():
            revision = int(reply["header"]["revision"])
        return revision if reply.get("succeeded") else None

    def grant(self, seconds: int) -> int:
        """Return a new lease, which ends unless it is kept alive within ``seconds``."""
        reply = self._call("lease/grant", {"TTL": str(seconds), "ID": "0"})
        with _parsing():
            return int(reply["ID"])

    def keep_alive(self, lease: int) -> bool:
        """Extend a lease. Return False if it has ended: its keys are gone."""
        reply = self._call("lease/keepalive", {"ID": str(lease)})
        with _parsing():
            return int(reply.get("result", reply).get("TTL", 0)) > 0

    def revoke(self, lease: int) -> None:
        """End a lease, which deletes its keys."""
        self._call("lease/revoke", {"ID": str(lease)})

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            for client in self._clients.values():
                client.session.close()
            self._clients.clear()

    # ---- calls

    def _call(self, path: str, body: dict[str, Any]) -> Any:
        until = time.monotonic() + self._patience
        while True:
            try:
                return self._call_once(path, body)
            except Unavailable:
                if time.monotonic() >= until:
                    raise
            time.sleep(RETRY_SECONDS)

    def _call_once(self, path: str, body: dict[str, Any]) -> Any:
        with self._lock:
            failures = []
            for endpoint in list(self._order):
                try:
                    reply = self._ask(endpoint, path, body)
                except _Failed as failure:
                    failures.append(f"{endpoint}: {failure}")
                    continue
                self._order.remove(endpoint)
                self._order.insert(0, endpoint)
                self._answered_at = time.monotonic()
                return reply
        raise Unavailable(f"etcd does not answer: {'; '.join(failures)}")

    def _ask(self, endpoint: str, path: str, body: dict[str, Any]) -> Any:
        """Return the reply of one endpoint, after a new login if it asks for one."""
        client = self._clients.get(endpoint)
        if client is None:
            client = self._clients[endpoint] = self._open(endpoint)
            self._log_in(client)
        try:
            return self._post(client, path, body)
        except PermissionDenied as error:
            if REFUSED_TOKEN not in str(error) or self._access.user is None:
                raise
        self._log_in(client)  # etcd forgets tokens when they are old, or when it restarts
        return self._post(client, path, body)

    def _open(self, endpoint: str) -> Any:
        import requests
        from etcd3gw.client import Etcd3Client

        access, parts = self._access, urlsplit(endpoint)
        session = requests.Session()
        session.trust_env = False  # a proxy for the web is no way to etcd
        session.max_redirects = 0  # nor is another place
        session.hooks["response"] = [_read_bounded]
        if access.ca is not None:
            session.verify = str(access.ca)
        if access.certificate is not None and access.key is not None:
            session.cert = (str(access.certificate), str(access.key))
        return Etcd3Client(
            host=parts.hostname or "",
            port=parts.port or 2379,
            protocol=parts.scheme,
            timeout=self._seconds,
            api_path=API,
            session=session,
        )

    def _log_in(self, client: Any) -> None:
        access = self._access
        if access.user is None:
            return
        client.session.headers.pop("Authorization", None)
        password = "" if access.password is None else access.password()
        credentials = {"name": access.user, "password": password}
        try:
            token = self._post(client, "auth/authenticate", credentials, secret=password).get(
                "token"
            )
            if not isinstance(token, str) or not token.isascii() or not token.isprintable():
                raise _Failed("the answer to the login has no token; is it an endpoint of etcd?")
            client.session.headers["Authorization"] = token
        except (InvalidArgument, PermissionDenied, _Failed) as error:
            for endpoint, known in list(self._clients.items()):
                if known is client:
                    del self._clients[endpoint]
            if isinstance(error, _Failed):
                raise
            raise PermissionDenied(
                f"etcd refuses the user '{access.user}' of [cluster]: {error}"
            ) from None

    def _post(self, client: Any, path: str, body: dict[str, Any], *, secret: str = "") -> Any:
        """Return the reply. Raises _Failed if another endpoint may answer, else a PetpsError.

        secret: what no error may repeat, beside the token of the login.
        """
        import requests
        from etcd3gw import exceptions

        secrets = (secret, client.session.headers.get("Authorization", ""))
        try:
            reply = client.post(client.get_url(path), json=body)
        except exceptions.ConnectionTimeoutError:
            raise _Failed(f"no answer within {self._seconds:g} s") from None
        except exceptions.ConnectionFailedError as error:
            raise _Failed(_reason(_without(secrets, error.detail_text or str(error)))) from None
        except exceptions.Etcd3Exception as error:
            raise _refusal(error.detail_text or str(error), secrets) from None
        except (requests.RequestException, OSError, ValueError) as error:
            raise _Failed(_reason(_without(secrets, str(error)))) from None
        if not isinstance(reply, dict):
            raise _Failed("the reply is no JSON object; is it an endpoint of etcd?")
        return reply


@contextmanager
def _parsing() -> Iterator[None]:
    """Raise Unavailable for a reply that is not etcd's."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Unavailable(
            f"etcd does not answer: a reply is not etcd's ({type(error).__name__}); is it an "
            "endpoint of etcd?"
        ) from None


def _read_bounded(response: Any, **_: Any) -> None:
    """Read a reply of requests, also one that is an error or a redirect.

    Raises requests.ConnectionError if it has more than REPLY_BYTES_MAX bytes.
    """
    import requests
    from urllib3.exceptions import HTTPError

    content = io.BytesIO()
    try:
        for chunk in response.raw.stream(CHUNK_BYTES, decode_content=True):
            content.write(chunk)
            if content.tell() > REPLY_BYTES_MAX:
                break
    except HTTPError as error:
        raise requests.ConnectionError(error) from None
    if content.tell() > REPLY_BYTES_MAX:
        response.close()
        raise requests.ConnectionError(
            f"the reply has more than {REPLY_BYTES_MAX:,} bytes: delete the keys below "
            "cluster.prefix that petps did not write; or is it no endpoint of etcd?"
        )
    content.seek(0)
    response.raw = content


class _Failed(Exception):
    """An endpoint gave no answer that counts."""


def _refusal(text: str, secrets: Sequence[str]) -> Exception:
    """Return the error for what etcd answered."""
    lowered, shown = text.lower(), _reason(_without(secrets, text))
    if "permission denied" in lowered or REFUSED_TOKEN in lowered or "user name is empty" in text:
        return PermissionDenied(
            f"etcd refuses the request: {shown}; look at cluster.user and the user's roles"
        )
    if "commonname of client" in lowered:
        return PermissionDenied(
            "etcd's gateway takes no user of a client certificate: make cluster.certificate "
            "without a common name (CN), and give cluster.user"
        )
    if "requested lease not found" in lowered:
        return FailedPrecondition("the lease has ended")
    if "authentication failed" in lowered:
        return InvalidArgument("user or password is wrong")
    return _Failed(shown)


def _without(secrets: Sequence[str], text: str) -> str:
    """Return the text, unless it has a secret: who answers for etcd may repeat what it got."""
    for secret in filter(None, secrets):
        if any(form in text for form in (secret, json.dumps(secret)[1:-1], quote(secret))):
            return "the answer has a secret, so it is not shown; is it an endpoint of etcd?"
    return text


def _reason(text: str) -> str:
    """Return the last cause of an error's text, on one line."""
    line = " ".join(text.split())
    for mark in ("Caused by ", "Errno"):
        if mark in line:
            line = line[line.rindex(mark) :].removeprefix("Caused by ")
    return line[:200].rstrip(")'\" ")


def _condition(compare: Compare) -> dict[str, Any]:
    target = "create_revision" if compare.is_created else "mod_revision"
    return {
        "key": _encode(compare.key),
        "result": "EQUAL",
        "target": "CREATE" if compare.is_created else "MOD",
        target: str(compare.revision),
    }


def _value(pair: Mapping[str, Any]) -> Value:
    return Value(
        _decode(pair.get("value", "")),
        int(pair["mod_revision"]),
        int(pair["create_revision"]),
        int(pair.get("lease", 0)),
    )


def _encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _decode(text: str) -> str:
    return base64.b64decode(text).decode(errors="replace")
