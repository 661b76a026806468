"""Certificates of a private CA for tests, made by `openssl`."""

from __future__ import annotations

import os
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Pair:
    """The files of a certificate and its key."""

    certificate: Path
    key: Path


class Authority:
    """A CA whose files are in a folder of its own."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._name = name
        self.certificate = folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        _openssl(
            "req", "-x509", *_new_key(self._key), "-out", self.certificate, "-days", 30,
            "-subj", f"/CN={name}", "-addext", "basicConstraints=critical,CA:TRUE",
        )  # fmt: skip

    def issue(
        self,
        name: str,
        alternatives: str = "DNS:localhost,IP:127.0.0.1",
        days: int = 30,
        common_name: str = "",
    ) -> Pair:
        """Return a new certificate. With negative days it has expired."""
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={alternatives}\n" if alternatives else "")
        subject = f"/CN={common_name or name}"
        _openssl("req", *_new_key(pair.key), "-out", request, "-subj", subject)
        _openssl(
            "x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._key,
            "-CAcreateserial", "-days", days, "-extfile", extensions, "-out", pair.certificate,
        )  # fmt: skip
        return pair

    def client_context(self, pair: Pair | None = None) -> ssl.SSLContext:
        """Return a context of a client that trusts this CA, and shows this certificate."""
        context = ssl.create_default_context(cafile=str(self.certificate))
        if pair is not None:
            context.load_cert_chain(pair.certificate, pair.key)
        return context


def replace(old: Pair, new: Pair) -> None:
    """Replace the files of ``old`` by those of ``new``, each atomically."""
    for target, source in ((old.certificate, new.certificate), (old.key, new.key)):
        temporary = target.with_suffix(".new")
        temporary.write_bytes(source.read_bytes())
        os.replace(temporary, target)


def _new_key(path: Path) -> tuple[Any, ...]:
    return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", path)


def _openssl(*arguments: Any) -> None:
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
