"""The section [cluster]: etcd, this server's place, and what a controller may do."""

from __future__ import annotations

import math
import re
from pathlib import Path

from pydantic import Field, field_validator, model_validator

from petps.config.doors import is_loopback
from petps.config.duration import parse_duration
from petps.config.place import check_store
from petps.config.section import Section
from petps.errors import InvalidArgument, IoError

__all__ = ["ClusterConfig"]

MAX_PASSWORD_BYTES = 4096  # a larger file is the wrong file
_PORT = re.compile(r":[0-9]+$")
_ENDPOINT = re.compile(r"https?://([^/@?#\s:\[\]]+|\[[0-9a-fA-F:.]+\])(:[0-9]{1,5})?/?")


def _keeps_secrets(endpoint: str) -> bool:
    """Return whether nobody between can read what is sent: by TLS, or within this machine."""
    scheme, _, place = endpoint.partition("://")
    host = place.rpartition(":")[0] if _PORT.search(place) else place
    return scheme == "https" or host == "localhost" or is_loopback(host.strip("[]"))


class ClusterConfig(Section):
    """Agreement of servers by etcd. Without endpoints, a server is on its own or has a map file."""

    endpoints: list[str] = Field(
        default=[],
        description="The members of etcd: 'https://HOST:2379' of each. The server then takes its "
        "shard map from there, and registers itself. Needs `pip install 'petps[cluster]'`.",
    )
    prefix: str = Field(
        default="/petps",
        pattern=r"^/[A-Za-z0-9_.\-/]{0,200}[A-Za-z0-9_.\-]$",
        description="How the keys in etcd begin. Clusters with different prefixes are strangers.",
    )
    zone: str = Field(
        default="",
        max_length=255,
        description="Where this server is: replicas of a partition are in different zones, if "
        "there are enough.",
    )
    weight: float = Field(
        default=1.0,
        gt=0,
        allow_inf_nan=False,
        description="This server's part of the partitions, relative to the other servers.",
    )
    ca: Path | None = Field(
        default=None,
        strict=False,
        description="File of the CA, in PEM, that etcd's certificates are checked with; by default "
        "those of the system.",
    )
    certificate: Path | None = Field(
        default=None,
        strict=False,
        description="File of the certificate, in PEM, that etcd asks its clients for.",
    )
    key: Path | None = Field(
        default=None, strict=False, description="File of that certificate's private key, in PEM."
    )
    user: str | None = Field(
        default=None, min_length=1, description="The user at etcd; by default none."
    )
    password: str | None = Field(
        default=None,
        min_length=1,
        description="The user's password. Prefer the variable, or `password_file`.",
    )
    password_file: Path | None = Field(
        default=None,
        strict=False,
        description="File of the user's password, without the end of its line. It is read at each "
        "login.",
    )
    lease_seconds: int = Field(
        default=10,
        ge=2,
        le=600,
        description="A server, or a controller, that etcd has not heard of for this time is away.",
    )
    replace_after: str = Field(
        default="1h",
        description="How long a server may be away, such as '10m' or '1h', before a controller "
        "gives its partitions to others; 'never': only if an operator drains it.",
    )
    moves: int = Field(
        default=2, ge=1, le=64, description="How many partitions of a model move at a time."
    )
    move_pause_seconds: float = Field(
        default=1.0, ge=0, le=3600, description="Seconds between the beginnings of two moves."
    )
    drain_seconds: float = Field(
        default=5.0,
        ge=0,
        le=600,
        description="Seconds after a switch for which the old owner keeps the rows of a "
        "partition, so that calls in flight end.",
    )

    store: str | None = Field(
        default=None,
        min_length=1,
        description="A folder or a URL that fsspec knows, which all servers of the model reach. "
        "The rows of tables that pushes feed move through it. Without it, partitions of such a "
        "model do not move.",
    )
    handover_seconds: float = Field(
        default=2.0,
        gt=0,
        le=60,
        description="When a push-fed partition moves, pushes to it pause: at most this long until "
        "its last rows are in the store, and at most this long again until the new owner has "
        "them. Otherwise the old owner goes on, and it is tried again.",
    )

    @field_validator("store")
    @classmethod
    def _is_a_place(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                check_store(value)
            except InvalidArgument as error:
                raise ValueError(str(error)) from None
        return value

    @field_validator("endpoints")
    @classmethod
    def _are_urls(cls, value: list[str]) -> list[str]:
        for endpoint in value:
            if _ENDPOINT.fullmatch(endpoint) is None:
                raise ValueError(
                    "must be http://HOST:PORT or https://HOST:PORT, without a password: "
                    "cluster.user and cluster.password_file take credentials"
                )
        return [endpoint.rstrip("/") for endpoint in value]

    @field_validator("replace_after")
    @classmethod
    def _is_a_duration(cls, value: str) -> str:
        try:
            parse_duration(value, "it")
        except InvalidArgument as error:
            raise ValueError(str(error).partition("; got")[0]) from None
        return value

    @model_validator(mode="after")
    def _is_complete(self) -> ClusterConfig:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key belong together: give both, or none")
        if self.password is not None and self.password_file is not None:
            raise ValueError("password and password_file are both given: give one of them")
        if self.user is None and (self.password or self.password_file):
            raise ValueError("a password is given without user: give both, or none")
        if self.user is not None and not (self.password or self.password_file):
            raise ValueError("user is given without a password: give password_file too")
        for endpoint in self.endpoints:
            if self.user is not None and not _keeps_secrets(endpoint):
                raise ValueError(
                    f"the password would cross the network unencrypted to {endpoint}: write "
                    "https://, or leave user out"
                )
        return self

    @property
    def has_secrets(self) -> bool:
        """Return whether the process holds a password or a key for etcd."""
        return self.user is not None or self.key is not None

    def replace_after_seconds(self) -> float:
        """Return replace_after in seconds; 'never' is infinity."""
        return parse_duration(self.replace_after, "replace_after") or math.inf

    def read_password(self) -> str:
        """Return the password. Raises IoError if its file cannot be read."""
        if self.password_file is None:
            return self.password or ""
        try:
            content = self.password_file.read_bytes()[:MAX_PASSWORD_BYTES]
        except OSError as error:
            raise IoError(f"cluster.password_file {self.password_file}: {error.strerror}") from None
        return content.decode(errors="replace").rstrip("\r\n")
