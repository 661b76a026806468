"""petps report: no secret is in it, whatever place it was planted in; it works without a server."""

from __future__ import annotations

import base64
import json
import stat
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest

import petps
from petps import config
from petps.doctor import Machine, Subject
from petps.doctor.bundle import TOTAL_BYTES_MAX, fit, write_bundle
from petps.doctor.report import MEMBER_BYTES_MAX, Member, Report, Sources, collect
from petps.doctor.secrets import Scrubber, known_secrets
from petps.errors import AlreadyExists, IoError
from petps.server import Serving
from petps.server.access_file import AccessFile, Entry, hash_of, new_token
from tests.certificates import Authority
from tests.python.doctor.fake import FakeFacts, serve


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    path = tmp_path / "my.pool"
    with petps.create(path, durability="process") as opened:
        opened.create_table("items", dim=4, capacity=1000)
        opened.push("items", [987654321], [[123456.75] * 4])
    return path


class Planted:
    """Secrets, each in its own place, and the subject that has them."""

    def __init__(self, folder: Path, pool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.secrets: list[str] = []
        pair = Authority(folder).issue("server")
        self.key_body = "".join(pair.key.read_text().splitlines()[1:-1])
        self.secrets += pair.key.read_text().splitlines()[1:-1]
        token = new_token()
        access = folder / "access.json"
        AccessFile(access).add(
            Entry(name="fleet", token_sha256=hash_of(token), roles=["read"], models="*")
        )
        self.secrets += [token, hash_of(token)]
        token_file, password_file = folder / "token", folder / "kafka-password"
        token_file.write_text(f"{self._plant('petps_in-a-token-file-1')}\n")
        password_file.write_text(f"{self._plant('in-a-password-file-2')}\n")
        for name, value in (
            ("PETPS_TOKEN_FILE", str(token_file)),
            ("AWS_SECRET_ACCESS_KEY", self._plant("aws-secret-3")),
            ("PETPS_KAFKA_SASL_PASSWORD", self._plant("of-the-environment-4")),
            ("HTTPS_PROXY", f"http://user:{self._plant('of-a-proxy-5')}@proxy:3128"),
            ("SOME_API_KEY", self._plant("api-key-6")),
        ):
            monkeypatch.setenv(name, value)
        self.log = folder / "petps.log"
        self.log.write_text(
            "begin\n"
            f"login with Bearer {self._plant('bearer-token-of-a-log-7')}\n"
            f"sasl.password={self._plant('in-a-log-line-8')} failed\n"
            f'{{"ssl.key.password": "{self._plant("in-json-of-a-log-9")}"}}\n'
            f"GET https://h/x?X-Amz-Signature={self._plant('0a1b2c3d4e5f60718293')}&a=1\n"
            f"store s3://id:{self._plant('url-of-a-log-10')}@bucket/x\n"
            f"token {new_token()}\n"
            f"-----BEGIN PRIVATE KEY-----\n{self._plant(base64.b64encode(b'k' * 45).decode())}\n"
            "-----END PRIVATE KEY-----\n"
            f"and {self.secrets[0]} again\n"
            "the end of the log\n"
        )
        self.settings = config.merge(
            None,
            {
                "pool": {"path": pool},
                "server": {"port": 0, "http_port": 0, "grpc": False},
                "tls": {"certificate": pair.certificate, "key": pair.key},
                "access": {"file": access},
                "ingest": {"dead_letters": f"memory://i:{self._plant('in-a-url-11')}@bucket/x"},
                "kafka": {
                    "sasl.username": "petps",
                    "sasl.password": self._plant("kafka-password-12"),
                    "sasl.password.file": str(password_file),
                    "ssl.key.password": self._plant("key-password-13"),
                    "sasl.jaas.config": f"x required password='{self._plant('in-jaas-14')}';",
                },
            },
            "test",
        )

    def _plant(self, secret: str) -> str:
        self.secrets.append(secret)
        return secret

    def subject(self) -> Subject:
        return Subject(
            Machine(), config=self.settings, config_path="petps.toml",
            pool=str(self.settings.pool.path),
        )  # fmt: skip

    def check(self, members: list[Member]) -> None:
        for member in members:
            for secret in self.secrets:
                assert secret.encode() not in member.content, (member.name, secret)


@pytest.fixture
def planted(tmp_path: Path, pool: Path, monkeypatch: pytest.MonkeyPatch) -> Planted:
    return Planted(tmp_path, pool, monkeypatch)


def contents(report: Report) -> dict[str, Any]:
    return {
        member.name: json.loads(member.content)
        for member in report.members
        if member.name.endswith(".json")
    }


def test_no_planted_secret_is_in_the_report_of_a_dead_server(planted: Planted) -> None:
    report = collect(planted.subject(), Sources(log_file=str(planted.log)))
    planted.check(report.members)
    names = {member.name for member in report.members}
    assert {"doctor.json", "configuration.json", "pool.json", "versions.json", "log.txt"} <= names
    values = contents(report)
    kafka = values["configuration.json"]["values"]["kafka"]
    assert kafka["sasl.username"] == "petps", "only what is secret is hidden"
    assert kafka["sasl.password"] == "(hidden)"
    assert values["pool.json"]["tables"][0]["name"] == "items"
    assert values["environment.json"]["PETPS_KAFKA_SASL_PASSWORD"] == "(hidden)"
    assert values["environment.json"]["PETPS_TOKEN_FILE"].endswith("/token")
    log = next(member.content for member in report.members if member.name == "log.txt")
    assert log.startswith(b"begin")
    assert b"the end of the log" in log


def test_no_planted_secret_is_in_the_report_of_a_live_server(planted: Planted, pool: Path) -> None:
    with Serving(planted.settings, log=lambda line: None):
        report = collect(planted.subject(), Sources(log_file=str(planted.log)))
    planted.check(report.members)
    values = contents(report)
    assert values["status.json"]["tables"][0]["rows"] == 1
    assert values["incidents.json"] == values["status.json"]["incidents"]


def test_the_report_has_no_rows_and_no_keys(planted: Planted) -> None:
    with Serving(planted.settings, log=lambda line: None):
        report = collect(planted.subject(), Sources())
    for member in report.members:
        if member.name not in ("machine.txt", "build.json"):  # numbers of the kernel
            assert b"987654321" not in member.content
            assert b"123456.75" not in member.content


def test_the_metrics_of_a_server_whose_port_is_not_known(pool: Path) -> None:
    settings = config.merge(
        None, {"pool": {"path": pool}, "server": {"port": 0, "http_port": 0, "grpc": False}}, "test"
    )
    with Serving(settings, log=lambda line: None):
        report = collect(Subject(Machine(), pool=str(pool)), Sources())
    metrics = next(member.content for member in report.members if member.name == "metrics.txt")
    assert b"petps_" in metrics
    assert metrics.startswith(b"# http://127.0.0.1:")


def test_the_metrics_of_a_server_with_tls_whose_port_is_not_known(
    pool: Path, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    pair = authority.issue("server")
    doors = {"port": 0, "http_port": 0, "grpc": False}
    tls = {"certificate": pair.certificate, "key": pair.key}
    settings = config.merge(None, {"pool": {"path": pool}, "server": doors, "tls": tls}, "test")
    sources = Sources(environment={"PETPS_TLS_CA": str(authority.certificate)})
    with Serving(settings, log=lambda line: None):
        report = collect(Subject(Machine(), pool=str(pool)), sources)
    metrics = next(member.content for member in report.members if member.name == "metrics.txt")
    assert metrics.startswith(b"# https://127.0.0.1:")


def test_a_part_that_fails_is_left_out_with_its_reason() -> None:
    facts = FakeFacts()
    serve(facts)
    facts.pool = IoError("the disk with password=hunter22 is gone")
    report = collect(
        Subject(facts, pool="/data/my.pool"),
        Sources(log_file="/no/such/log", metrics_url="http://127.0.0.1:9/metrics"),
    )
    assert "the disk" in report.left_out["pool.json"]
    assert "hunter22" not in str(report.left_out)
    assert "No such file" in report.left_out["log.txt"]
    assert "refused" in report.left_out["metrics.txt"]
    assert "status.json" in contents(report)
    assert contents(report)["contents.json"]["left_out"] == report.left_out


def test_a_part_that_hangs_is_left_out_with_its_reason() -> None:
    release = threading.Event()

    def hangs() -> dict[str, Any]:
        release.wait()
        return {}

    try:
        slow = collect(Subject(FakeFacts()), Sources(status=hangs), seconds=0.1)
    finally:
        release.set()
    assert "too long" in slow.left_out["status.json"]
    assert "too long" in slow.left_out["incidents.json"]


def test_the_journal_is_read_by_its_own_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "journalctl"
    program.write_text('#!/bin/sh\necho "$@"\necho password=hunter22\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    sources = Sources(journal_unit="petps@ctr")
    report = collect(Subject(FakeFacts()), sources)
    content = next(member.content for member in report.members if member.name == "journal.txt")
    assert content.startswith(b"--unit=petps@ctr --lines=5000")
    assert b"hunter22" not in content
    program.write_text("#!/bin/sh\necho no such unit >&2\nexit 1\n")
    assert "no such unit" in collect(Subject(FakeFacts()), sources).left_out["journal.txt"]
    program.unlink()
    assert "no journalctl" in collect(Subject(FakeFacts()), sources).left_out["journal.txt"]


def test_the_size_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "long.log"
    log.write_text("".join(f"line {number} {'x' * 200}\n" for number in range(20_000)))
    report = collect(Subject(FakeFacts()), Sources(log_file=str(log)))
    content = next(member.content for member in report.members if member.name == "log.txt")
    assert len(content) <= 1 << 20
    assert content.startswith(b"line 1")
    assert b"line 19999 " in content
    members = [Member(f"{number}.txt", "x", b"x" * MEMBER_BYTES_MAX) for number in range(9)]
    fitting = fit(Report(members, {}))
    assert sum(len(member.content) for member in fitting.members) <= TOTAL_BYTES_MAX
    assert list(fitting.left_out) == ["8.txt"]


def test_the_file_is_private_and_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "r.tar.gz"
    size = write_bundle(path, Report([Member("a.txt", "x", b"text")], {}))
    assert size == path.stat().st_size
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with tarfile.open(path) as archive:
        (entry,) = archive.getmembers()
        assert (entry.name, entry.mode) == ("r/a.txt", 0o600)
        file = archive.extractfile(entry)
        assert file is not None
        assert file.read() == b"text"
    with pytest.raises(AlreadyExists):
        write_bundle(path, Report([], {}))
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AlreadyExists):
        write_bundle(link, Report([], {}))
    assert not (tmp_path / "elsewhere").exists()


def test_settings_in_the_environment_are_no_secrets() -> None:
    environment = {
        "TOKENIZERS_PARALLELISM": "false", "KEY_COUNT": "1000", "DB_PASSWORD": "123456",
        "API_KEY": "0123456789ab", "SSH_AUTH_SOCK": "/",
    }  # fmt: skip
    assert known_secrets(None, environment) == {"123456", "0123456789ab"}


def test_the_headers_of_an_exporter_are_secrets() -> None:
    headers = "authorization=Bearer%20s3cret9,x-team=s3cret8"
    secrets = known_secrets(None, {"OTEL_EXPORTER_OTLP_HEADERS": headers})
    text = f"OTEL: {headers}; sent Bearer s3cret9; refused s3cret8"
    shown = Scrubber(secrets).text(text)
    assert "s3cret" not in shown
    assert shown.endswith("refused (hidden)")


def test_a_password_with_a_slash_or_an_at_sign_is_known() -> None:
    secrets = known_secrets(None, {"PROXY": "http://me:p@ss/word9@proxy:80/"})
    assert "p@ss/word9" in secrets


@pytest.mark.parametrize("name", ["authorization", "Proxy-Authorization", "Cookie", "AccountKey"])
def test_a_member_whose_name_is_a_header_is_hidden(name: str) -> None:
    assert Scrubber([]).value({name: "short"}) == {name: "(hidden)"}


def test_a_secret_name_hides_a_value_that_looks_like_none() -> None:
    options = {"sasl.password": "abc", "sasl.username": "abc", "sasl.password.file": "/f", "n": 5}
    assert Scrubber([]).value({"kafka": options}) == {
        "kafka": {**options, "sasl.password": "(hidden)"}
    }


@pytest.mark.parametrize(
    "text",
    [
        "tokens 5", "sasl.password.file=/etc/x", "PETPS_TOKEN_FILE=/run/token",
        "ssl.key.location: /etc/k.pem", "retention.ms=5", "kafka://k-1:9092/topic", "12:34:56",
        "http://h:9000/a@b", "design=5", "PWD=/srv/x", "eyJ", "the cookie is old",
    ],
)  # fmt: skip
def test_harmless_text_stays(text: str) -> None:
    assert Scrubber([]).text(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "password: s3cret9", "PASSWORD=s3cret9", '"apiKey": "s3cret9"', "secret_key='s3cret9'",
        "https://u:s3cret9@h/", "kafka://u:s3cret9@a:1,u:s3cret9@b:2/t",
        "Authorization: Basic s3cret9xx",
        "?sig=1&X-Amz-Signature=s3cret9", "x-token=s3cret9",
        "https://a.blob.core.windows.net/c?sv=2024&sig=s3cret9%3D",
        "AccountName=a;AccountKey=s3cret9==;x=y", "Server=x;Pwd=s3cret9",
        "https://u:s3c@s3cret9@h/x", "https://u:s3c/s3cret9@h/x",
        "Authorization: Token s3cret9", "authorization: s3cret9", '{"authorization": "s3cret9"}',
        "Cookie: session=s3cret9", "Set-Cookie: s3cret9; Secure", "x-honeycomb-team=s3cret9",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.s3cret9", "ghp_0123456789abcdefs3cret9",
        "github_pat_0123456789abcdefs3cret9", '{"password": "with \\" quote s3cret9"}',
    ],
)  # fmt: skip
def test_what_looks_like_a_secret_goes(text: str) -> None:
    assert "s3cret9" not in Scrubber([]).text(text)
