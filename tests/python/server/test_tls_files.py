"""The files of [tls]: what is refused, and what a change does."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from petps.config import TlsConfig
from petps.errors import InvalidArgument, IoError
from petps.server.tls import TlsFiles, certificate_names, is_name, peer_names
from tests.certificates import Authority, Pair, replace


class Opened:
    """Files in use, with what they logged and how often the native door read them."""

    def __init__(self, pair: Pair, **config: Any) -> None:
        self.lines: list[str] = []
        self.reloads = 0
        self.native_error: Exception | None = None
        Config = TlsConfig  # noqa: N806
        Config.model_rebuild()
        self.files = TlsFiles(
            Config(certificate=pair.certificate, key=pair.key, **config),
            reload_native=self._reload,
            log=self.lines.append,
        )

    def _reload(self) -> None:
        if self.native_error is not None:
            raise self.native_error
        self.reloads += 1


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def pair(authority: Authority) -> Pair:
    return authority.issue("server", "DNS:one.example,DNS:two.example,URI:spiffe://x/y,IP:::1")


def test_status_has_names_and_expiry(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Opened(pair).files
    status = files.status()
    assert status["names"] == ["one.example", "two.example", "spiffe://x/y"]
    assert abs(status["expires_at"] - time.time() - 30 * 86_400) < 3600
    assert (status["is_expired"], status["error"]) == (False, "")
    monkeypatch.setattr(time, "time", lambda: status["expires_at"] + 1)
    assert files.status()["is_expired"] is True


def test_repr_shows_no_key(pair: Pair) -> None:
    assert "PRIVATE" not in repr(Opened(pair).files.current)


def test_files_that_cannot_be_used_are_refused(
    authority: Authority, pair: Pair, tmp_path: Path
) -> None:
    other = authority.issue("other")
    empty, locked = tmp_path / "empty", tmp_path / "locked.key"
    empty.write_text("nothing")
    subprocess.run(
        ["openssl", "pkey", "-in", pair.key, "-aes128", "-passout", "pass:x", "-out", locked],
        check=True,
    )
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n")
    kinds = {
        "ed25519": (), "rsa-pss": ("rsa_keygen_bits:2048",),
        "ec": ("ec_paramgen_curve:P-256", "ec_param_enc:explicit"),
    }  # fmt: skip
    for kind, settings in kinds.items():
        options = [option for setting in settings for option in ("-pkeyopt", setting)]
        names = ["-subj", "/CN=x", "-keyout", f"{tmp_path / kind}.key"]
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", kind, *options, "-nodes", *names,
             "-out", f"{tmp_path / kind}.pem"],
            check=True,
            capture_output=True,
        )  # fmt: skip
    huge = tmp_path / "huge.pem"
    huge.write_bytes(bytes(2 << 20))
    cases = [
        (Pair(tmp_path / "none.pem", pair.key), "none.pem cannot be read: No such file"),
        (Pair(pair.certificate, tmp_path / "none.key"), "none.key cannot be read"),
        (Pair(pair.certificate, other.key), "the key does not belong to the certificate"),
        (Pair(empty, pair.key), "empty has no certificate in PEM"),
        (Pair(pair.certificate, empty), "empty has no private key in PEM"),
        (Pair(pair.certificate, locked), "locked.key has a passphrase"),
        (Pair(garbage, pair.key), "garbage.pem and .* cannot be used"),
        *(
            (Pair(tmp_path / f"{kind}.pem", tmp_path / f"{kind}.key"), "gRPC does not know")
            for kind in kinds
        ),
        (Pair(huge, pair.key), "more than 1,048,576 bytes"),
        (authority.issue("old", days=-1), "old.pem: certificate has expired"),
    ]
    for files, message in cases:
        with pytest.raises(InvalidArgument, match=message):
            Opened(files)
    for ca in (empty, tmp_path / "none.pem"):
        with pytest.raises(InvalidArgument, match=str(ca)):
            Opened(pair, client_ca=ca, client_certificates="required")


def test_a_changed_file_is_used_once(authority: Authority, pair: Pair) -> None:
    opened = Opened(pair)
    before = opened.files.current
    opened.files.check()
    assert opened.files.current is before
    assert opened.reloads == 1  # at the start
    replace(pair, authority.issue("next", "DNS:next.example"))
    opened.files.check()
    opened.files.check()
    assert opened.files.status()["names"] == ["next.example"]
    assert opened.reloads == 2
    assert len(opened.lines) == 1
    assert "new connections use the certificate of next.example" in opened.lines[0]


def test_a_swapped_link_is_a_change(authority: Authority, tmp_path: Path) -> None:
    # As Kubernetes replaces a secret: ..data is a link to a folder, renamed over the old link.
    for number, name in enumerate(("first", "second")):
        folder = tmp_path / f"version-{number}"
        folder.mkdir()
        issued = authority.issue(name, f"DNS:{name}.example")
        os.link(issued.certificate, folder / "tls.crt")
        os.link(issued.key, folder / "tls.key")
    data = tmp_path / "..data"
    data.symlink_to("version-0")
    opened = Opened(Pair(data / "tls.crt", data / "tls.key"))
    (tmp_path / "..new").symlink_to("version-1")
    os.replace(tmp_path / "..new", data)
    opened.files.check()
    assert opened.files.status()["names"] == ["second.example"]


def test_files_that_cannot_be_used_keep_the_old(authority: Authority, pair: Pair) -> None:
    opened = Opened(pair)
    before = opened.files.current
    good = pair.key.read_bytes()
    pair.key.write_bytes(authority.issue("other").key.read_bytes())
    for _ in range(3):
        opened.files.check()
    assert opened.files.current is before
    assert "the key does not belong" in opened.files.status()["error"]
    assert len(opened.lines) == 1
    assert "the current certificate stays in use" in opened.lines[0]
    replace(pair, authority.issue("old", days=-1))
    opened.files.check()
    assert "expired" in opened.files.status()["error"]
    pair.certificate.unlink()
    opened.files.check()
    assert "cannot be read" in opened.files.status()["error"]
    assert opened.files.current is before
    assert opened.reloads == 1
    renewed = authority.issue("renewed")
    replace(pair, renewed)
    opened.files.check()
    assert opened.files.status()["error"] == ""
    assert opened.files.current.certificate == renewed.certificate.read_bytes()
    assert good != pair.key.read_bytes()


def test_a_native_door_that_refuses_keeps_the_old_of_all(authority: Authority, pair: Pair) -> None:
    opened = Opened(pair)
    before = opened.files.current
    opened.native_error = IoError("the native door cannot")
    replace(pair, authority.issue("next"))
    opened.files.check()
    assert opened.files.current is before
    assert opened.files.status()["error"] == "the native door cannot"
    opened.native_error = None
    opened.files.check()  # tried again, although the files are the same
    assert opened.files.current is not before
    assert opened.files.status()["error"] == ""


def test_files_that_change_while_they_are_read_are_read_again(
    authority: Authority, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Opened(pair)
    before = opened.files.current
    replace(pair, authority.issue("next", "DNS:next.example"))
    read = opened.files._read

    def read_and_change() -> Any:
        found = read()
        replace(pair, authority.issue("last", "DNS:last.example"))
        return found

    monkeypatch.setattr(opened.files, "_read", read_and_change)
    opened.files.check()
    assert opened.files.current is before
    monkeypatch.undo()
    opened.files.check()
    assert opened.files.status()["names"] == ["last.example"]


def test_names_are_dns_names_and_uris_else_the_common_name() -> None:
    subject = ((("organizationName", "o"),), (("commonName", "cn"),))
    alternatives = (("DNS", "a"), ("IP Address", "127.0.0.1"), ("URI", "spiffe://b"))
    assert certificate_names({"subject": subject, "subjectAltName": alternatives}) == (
        "a", "spiffe://b",
    )  # fmt: skip
    assert certificate_names({"subject": subject, "subjectAltName": alternatives[1:2]}) == ("cn",)
    assert certificate_names({"subject": subject}) == ("cn",)
    assert certificate_names({}) == ()
    both = {"peer_dns": [b"a"], "peer_uri": [b"spiffe://b"], "x509_common_name": [b"cn"]}
    assert peer_names(both) == ("a", "spiffe://b")
    assert peer_names({"peer_ip": [b"::1"], "x509_common_name": [b"cn"]}) == ("cn",)
    assert peer_names({}) == ()


@pytest.mark.parametrize("odd", ["x:\x1b[2J", "a\x7f", "x:\x9b", "a\0b", "", "x" * 256])
def test_what_is_not_printable_is_no_name(odd: str) -> None:
    subject = ((("commonName", odd),), (("commonName", "cn"),))
    alternatives = (("DNS", odd),)
    assert certificate_names({"subject": subject, "subjectAltName": alternatives}) == ("cn",)
    both = {"peer_dns": [odd.encode(), b"\xff"], "peer_uri": [b"x:\xed\xa0\x80"]}
    assert peer_names(both | {"x509_common_name": [b"cn"]}) == ("cn",)
    assert certificate_names({"subjectAltName": (("URI", "M\xfcller"),)}) == ("M\xfcller",)


@pytest.mark.parametrize("character", ["\u202e", "\u2028", "\u200b", "\ufeff", "\x1b"])
def test_a_text_with_a_character_that_no_eye_sees_is_no_name(character: str) -> None:
    """The native doors refuse the same ones (native/base/printable.cc)."""
    assert is_name("web.example")
    assert not is_name(f"web{character}example")
