"""TLS of the Python doors: its files, which are read again when they change, and names in it."""

from __future__ import annotations

import base64
import os
import re
import ssl
import time
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from petps.config import TlsConfig
from petps.errors import InvalidArgument, PetpsError
from petps.log import UNSEEN, WARNING, Line
from petps.regular_file import read_regular_file

__all__ = [
    "Certificates",
    "TlsFiles",
    "certificate_names",
    "grpc_credentials",
    "peer_names",
    "use_safe_grpc_ciphers",
]

# TLS 1.2 of gRPC: forward secrecy and AEAD. grpcio cannot set the lowest version; CBC, which TLS
# 1.1 needs, is missing here, so that it speaks 1.2 and 1.3 only.
GRPC_CIPHERS: Final = (
    "ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES128-GCM-SHA256:"
    "ECDHE-ECDSA-AES256-GCM-SHA384:ECDHE-RSA-AES256-GCM-SHA384:"
    "ECDHE-ECDSA-CHACHA20-POLY1305:ECDHE-RSA-CHACHA20-POLY1305"
)
NAME_BYTES_MAX: Final = 255  # native/tls/certificate.cc kNameBytesMax
FILE_BYTES_MAX: Final = 1 << 20  # a bundle of all public CAs takes 200 KiB
READS_MAX: Final = 10  # of the files at the start, while they are being replaced
PAUSE_SECONDS: Final = 0.05  # between two of them
# Keys that OpenSSL reads and the library in grpcio does not, by bytes of their algorithm in DER.
_KEYS_UNKNOWN_TO_GRPC: Final = {
    b"\x06\x03\x2b\x65": "an Ed25519 or Ed448 key",  # RFC 8410: 1.3.101.112 and .113
    b"\x06\x09\x2a\x86\x48\x86\xf7\x0d\x01\x01\x0a": "a key for RSA-PSS alone",  # RFC 4055
}
_ALGORITHM_BYTES: Final = 24  # of a PKCS 8 key, up to the end of the algorithm's OID
# In a certificate: an EC key whose curve has numbers instead of a name (RFC 3279).
_CURVE_WITHOUT_NAME: Final = b"\x06\x07\x2a\x86\x48\xce\x3d\x02\x01\x30"

_VERIFY: Final = {
    "off": ssl.CERT_NONE,
    "optional": ssl.CERT_OPTIONAL,
    "required": ssl.CERT_REQUIRED,
}
# What a file looks like from outside; None: it is missing.
_Look = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True)
class Certificates:
    """The contents of the files, checked, and what they say."""

    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)
    client_ca: bytes | None = field(repr=False)
    context: ssl.SSLContext = field(repr=False)
    """Of HTTP: TLS 1.3 only."""
    names: tuple[str, ...]
    expires_at: float
    """Seconds since 1970."""


class TlsFiles:
    """The files of [tls], in use for new connections.

    Call check() several times a second, always from the same thread. Raises InvalidArgument, which
    names the file, if they cannot be used at the start.
    """

    def __init__(
        self,
        config: TlsConfig,
        *,
        reload_native: Callable[[], None],
        log: Callable[[str], None],
    ) -> None:
        """``reload_native`` makes the native door read the files again; it raises PetpsError."""
        assert config.certificate is not None
        assert config.key is not None
        self._certificate, self._key = config.certificate, config.key
        self._client_ca = config.client_ca
        self.client_certificates = config.client_certificates
        self._reload_native, self._log = reload_native, log
        self._error = ""
        self._seen: _Look = ()
        for attempt in range(READS_MAX):
            if attempt > 0:
                time.sleep(PAUSE_SECONDS)
            if self._read_all():
                break
        else:
            raise InvalidArgument(
                f"{self._certificate}: it changes all the time, start again later"
            )

    @property
    def current(self) -> Certificates:
        """Return what new connections use. It is never changed, but replaced."""
        return self._current

    def check(self) -> None:
        """Use changed files for new connections. If they cannot be used, keep the current ones.

        The status, a metric and one line in the log say why, until the files can be used.
        """
        if self._look() == self._seen and not self._error:
            return
        try:
            if not self._read_all():
                return  # they are being replaced: the next check reads them
        except PetpsError as error:
            if str(error) != self._error:
                self._error = str(error)
                text = f"TLS: the current certificate stays in use: {error}"
                self._log(Line(text, "tls_reload_failed", WARNING, code=error.code))
            return
        self._error = ""
        names = ", ".join(self._current.names)
        text = f"TLS: new connections use the certificate of {names}, {self._expiry_text()}"
        self._log(Line(text, "tls_reloaded", names=self._current.names))

    def move(self, config: TlsConfig) -> None:
        """Use the files that ``config`` names. Raises InvalidArgument; then all stay as they were.

        ``reload_native`` must read these files too.
        """
        assert config.certificate is not None
        assert config.key is not None
        old = self._certificate, self._key, self._client_ca
        self._certificate, self._key, self._client_ca = (
            config.certificate, config.key, config.client_ca,
        )  # fmt: skip
        try:
            if not self._read_all():
                raise InvalidArgument(f"{self._certificate} changes just now: reload again")
        except PetpsError:
            self._certificate, self._key, self._client_ca = old
            raise
        self._error = ""

    def status(self) -> dict[str, Any]:
        """Return the member `tls` of the status."""
        return {
            "names": list(self._current.names),
            "expires_at": self._current.expires_at,
            "is_expired": time.time() >= self._current.expires_at,
            "client_certificates": self.client_certificates,
            "error": self._error,
        }

    def _expiry_text(self) -> str:
        at = time.gmtime(self._current.expires_at)
        return f"which expires at {time.strftime('%Y-%m-%d %H:%M:%S', at)} UTC"

    def _paths(self) -> tuple[Path, ...]:
        given = (self._certificate, self._key, self._client_ca)
        return tuple(path for path in given if path is not None)

    def _look(self) -> _Look:
        """Return what changes when a file is written or replaced, or a link to it."""
        looks: list[tuple[int, ...] | None] = []
        for path in self._paths():
            try:
                found = os.stat(path)
                looks.append((found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev))
            except OSError:
                looks.append(None)
        return tuple(looks)

    def _read_all(self) -> bool:
        """Use the files for all doors. Return False if they changed while they were read."""
        seen = self._look()
        read = self._read()
        if self._look() != seen:
            return False
        self._reload_native()
        self._current, self._seen = read, seen
        return True

    def _read(self) -> Certificates:
        certificate, key = _bytes_of(self._certificate), _bytes_of(self._key)
        client_ca = None if self._client_ca is None else _bytes_of(self._client_ca)
        if b"-----BEGIN CERTIFICATE-----" not in certificate:
            raise InvalidArgument(f"{self._certificate} has no certificate in PEM")
        if b"PRIVATE KEY-----" not in key:
            raise InvalidArgument(f"{self._key} has no private key in PEM")
        if b"ENCRYPTED" in key:
            raise InvalidArgument(
                f"{self._key} has a passphrase, which nobody could enter: `openssl pkey` removes it"
            )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # a resumed session would not show its certificate again
        try:
            context.load_cert_chain(self._certificate, self._key, password=_refuse_passphrase)
        except (ssl.SSLError, OSError, ValueError) as error:
            raise InvalidArgument(
                f"{self._certificate} and {self._key} cannot be used: {_reason(error)}"
            ) from None
        if kind := _unknown_to_grpc(certificate, key):
            raise InvalidArgument(
                f"{self._key} is {kind}, which gRPC does not know: make an EC key (P-256) or an "
                "RSA key"
            )
        facts = self._verified_facts(context, certificate.decode("ascii", "replace"))
        if client_ca is not None:
            try:
                context.load_verify_locations(cadata=client_ca.decode("ascii", "replace"))
            except ssl.SSLError as error:
                raise InvalidArgument(
                    f"{self._client_ca} has no CA's certificate in PEM: {_reason(error)}"
                ) from None
            context.verify_mode = _VERIFY[self.client_certificates]
        return Certificates(
            certificate,
            key,
            client_ca,
            context,
            certificate_names(facts),
            ssl.cert_time_to_seconds(facts["notAfter"]),
        )

    def _verified_facts(self, server: ssl.SSLContext, certificate: str) -> Any:
        """Return the facts of the server's certificate, once a handshake has checked it.

        The handshake is with a client in memory, which trusts this certificate alone. It fails as
        with any client if the certificate has expired, is not valid yet, or is not for servers.
        """
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        try:
            client.load_verify_locations(cadata=certificate)
            sides = [
                client.wrap_bio(to_client, to_server),
                server.wrap_bio(to_server, to_client, server_side=True),
            ]
            while sides:
                for side in list(sides):
                    try:
                        side.do_handshake()
                        sides.remove(side)
                        if not side.server_side:
                            facts = side.getpeercert()
                    except ssl.SSLWantReadError:
                        continue
        except ssl.SSLError as error:
            raise InvalidArgument(f"{self._certificate}: {_reason(error)}") from None
        return facts


def _bytes_of(path: Path) -> bytes:
    try:
        content = read_regular_file(path, FILE_BYTES_MAX)
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from None
    if len(content) > FILE_BYTES_MAX:
        raise InvalidArgument(f"{path} has more than {FILE_BYTES_MAX:,} bytes: it is no PEM file")
    return content


def _unknown_to_grpc(certificate: bytes, key: bytes) -> str:
    """Return what a pair in PEM is that OpenSSL has read, but grpcio cannot use; '': it can."""
    if _CURVE_WITHOUT_NAME in _der_of(b"CERTIFICATE", certificate):
        return "an EC key without the name of its curve"
    algorithm = _der_of(b"PRIVATE KEY", key)[:_ALGORITHM_BYTES]
    return next((kind for mark, kind in _KEYS_UNKNOWN_TO_GRPC.items() if mark in algorithm), "")


def _der_of(label: bytes, pem: bytes) -> bytes:
    """Return the first block with a label; b'' without one."""
    body = re.search(b"-----BEGIN " + label + b"-----(.*?)-----END", pem, re.DOTALL)
    return b"" if body is None else base64.b64decode(body[1])


def _refuse_passphrase() -> str:
    raise ValueError("the key has a passphrase")


def _reason(error: Exception) -> str:
    """Return an error of OpenSSL without its names of places in the source."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError):
        if error.reason == "KEY_VALUES_MISMATCH":
            return "the key does not belong to the certificate"
        return (error.reason or "no valid PEM").lower().replace("_", " ")
    return str(error)


def certificate_names(certificate: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a certificate as of ssl.getpeercert(): DNS names and URIs, else its CN.

    A certificate of no client (an empty mapping) has none.
    """
    alternatives = certificate.get("subjectAltName", ())
    names = tuple(value for kind, value in alternatives if kind in ("DNS", "URI") if is_name(value))
    if names:
        return names
    subject = (entry for part in certificate.get("subject", ()) for entry in part)
    return tuple(value for kind, value in subject if kind == "commonName" and is_name(value))


def peer_names(auth_context: Mapping[str, Iterable[bytes]]) -> tuple[str, ...]:
    """Return the names of the peer's certificate as of ServicerContext.auth_context() of gRPC."""
    alternatives = (*auth_context.get("peer_dns", ()), *auth_context.get("peer_uri", ()))
    subject = auth_context.get("x509_common_name", ())
    return _names_in(alternatives) or _names_in(subject)


def _names_in(texts: Iterable[bytes]) -> tuple[str, ...]:
    # A byte that is no UTF-8 becomes a surrogate, which is_name() refuses.
    names = (text.decode("utf-8", "surrogateescape") for text in texts)
    return tuple(name for name in names if is_name(name))


def is_name(text: str) -> bool:
    """Return whether this can be a name of a certificate: see text_of() of native/tls.

    Others are ignored. Names are shown in errors and in the status.
    """
    if any(unicodedata.category(character) in UNSEEN for character in text):
        return False
    return 1 <= len(text.encode()) <= NAME_BYTES_MAX


def use_safe_grpc_ciphers() -> None:
    """Limit TLS 1.2 of gRPC to safe ciphers. Call it before anything imports grpc."""
    os.environ["GRPC_SSL_CIPHER_SUITES"] = GRPC_CIPHERS


def grpc_credentials(files: TlsFiles) -> Any:
    """Return credentials of a gRPC server, which uses the newest files for each new connection."""
    import grpc

    def configuration(used: Certificates) -> Any:
        return grpc.ssl_server_certificate_configuration(
            [(used.key, used.certificate)], root_certificates=used.client_ca
        )

    used = files.current

    def newest() -> Any:  # gRPC calls it at each handshake; None: as before
        nonlocal used
        if files.current is used:
            return None
        used = files.current
        return configuration(used)

    return grpc.dynamic_ssl_server_credentials(
        configuration(used), newest, files.client_certificates == "required"
    )
