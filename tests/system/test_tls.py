"""`petps serve` with TLS, and without: what it refuses, says and never shows."""

from __future__ import annotations

import http.server
import json
import os
import ssl
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import Authority, Pair, replace
from tests.system.servers import PETPS, Server, petps, wait_until

PLANTED = "the-planted-password"
pytestmark = pytest.mark.system


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    path = tmp_path / "my.pool"
    petps("create", path, "--table", "items:4:f32:1k", "--feed", "delta", "--durability", "process")
    return path


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    folder = tmp_path / "certificates"
    folder.mkdir()
    return Authority(folder)


@pytest.fixture
def pair(authority: Authority) -> Pair:
    return authority.issue("server")


def refuse(*arguments: object) -> str:
    """Return the error of `petps serve`, which must refuse to start."""
    done = subprocess.run(
        [*PETPS, "serve", *map(str, arguments)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    return " ".join(done.stderr.split())


def metric(text: str, name: str) -> float:
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[1])


def test_unsafe_doors_beyond_loopback_are_refused(pool: Path, pair: Pair) -> None:
    tls = ("--tls-certificate", pair.certificate, "--tls-key", pair.key)
    message = refuse(pool, "--host", "0.0.0.0")
    assert "nothing is encrypted" in message
    assert "nobody is asked for credentials" in message
    assert "--tls-certificate" in message
    assert "--insecure" in message
    message = refuse(pool, "--host", "0.0.0.0", *tls)
    assert "nothing is encrypted" not in message
    assert "nobody is asked for credentials" in message
    message = refuse(pool, "--client-certificates", "required", *tls)
    assert "'required' needs client_ca" in message


def test_an_insecure_server_says_so(serve: Callable[..., Server], pool: Path) -> None:
    config = pool.with_name("petps.toml")
    config.write_text(f'[pool]\npath = "{pool}"\n[server]\nadmin_port = 0\n')
    assert "admin_port asks nobody for credentials" in refuse(pool, "--config", config)
    server = serve(pool, "--config", config, "--insecure")
    assert server.status()["insecure"] is True
    assert metric(server.read("metrics").decode(), "petps_server_insecure") == 1
    wait_until("it has printed", lambda: server.output)
    assert server.output.startswith("INSECURE: admin_port asks nobody for credentials")
    assert "INSECURE" in petps("status", pool)
    server.stop()
    server = serve(pool)
    assert server.status()["insecure"] is False
    assert metric(server.read("metrics").decode(), "petps_server_insecure") == 0
    assert "INSECURE" not in server.output + petps("status", pool)


class Door:
    """HTTPS of a server, as a client with a certificate."""

    def __init__(self, server: Server, context: ssl.SSLContext, token: str) -> None:
        self._port = server.wait_ready()["http_port"]
        self._context = context
        self._headers = {"authorization": f"Bearer {token}"}

    def read(self, path: str) -> str:
        url = f"https://127.0.0.1:{self._port}/{path}"
        request = urllib.request.Request(url, headers=self._headers)
        with urllib.request.urlopen(request, timeout=60, context=self._context) as answer:
            text: str = answer.read().decode()
        return text

    def tls(self) -> Any:
        return json.loads(self.read("status.json"))["tls"]


def test_a_server_with_tls(
    serve: Callable[..., Server],
    pool: Path,
    authority: Authority,
    pair: Pair,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = authority.issue("client")
    access, token_file = pool.with_name("access.json"), pool.with_name("token")
    petps("token", "new", "all", "--role", "admin", "--file", access, "--out", token_file)
    token = token_file.read_text().strip()
    config = pool.with_name("petps.toml")
    config.write_text(f"""
[pool]
path = "{pool}"
[server]
admin_port = 0
[tls]
certificate = "{pair.certificate}"
key = "{pair.key}"
client_ca = "{authority.certificate}"
client_certificates = "required"
[access]
file = "{access}"
[kafka]
sasl.password = "{PLANTED}"
""")
    server = serve(pool, "--config", config)
    facts = server.wait_ready()
    door = Door(server, authority.client_context(client), token)
    page = f"https://127.0.0.1:{facts['http_port']}/"
    wait_until("it says where its page is", lambda: page in server.output)
    address = f"petps+tls://127.0.0.1:{facts['port']}"
    wait_until("it says where it serves", lambda: address in server.output)
    assert "INSECURE" not in server.output
    texts = [door.read(path) for path in ("", "status.json", "metrics")]
    assert metric(texts[2], "petps_server_insecure") == 0
    assert metric(texts[2], "petps_tls_reload_failed") == 0
    expires_at = door.tls()["expires_at"]
    name = "petps_tls_certificate_expiry_timestamp_seconds"
    assert metric(texts[2], name) == pytest.approx(expires_at)
    with pytest.raises(OSError, match=r"(?i)certificate.required|reset|eof|closed"):
        Door(server, authority.client_context(), token).read("readyz")

    target = f"petps+admin+tls://127.0.0.1:{facts['admin_port']}"
    monkeypatch.setenv("PETPS_TLS_CA", str(authority.certificate))
    monkeypatch.setenv("PETPS_TLS_CERTIFICATE", str(client.certificate))
    monkeypatch.setenv("PETPS_TLS_KEY", str(client.key))
    monkeypatch.setenv("PETPS_TOKEN_FILE", str(token_file))
    texts += [petps("status", target), petps("status", target, "--json"), petps("status", pool)]
    assert "expires at" in texts[-1]
    assert "1 grant" in texts[-1]
    grants = access.read_bytes()
    access.write_text("{")
    wait_until(
        "the access file is refused", lambda: "access file not used" in petps("status", pool)
    )
    access.write_bytes(grants)

    secrets = [PLANTED, token, *_key_lines(pair.key)]
    broken = pair.key.with_name("broken.pem")
    broken.write_text("-----BEGIN PRIVATE KEY-----\nbroken\n-----END PRIVATE KEY-----\n")
    os.replace(broken, pair.key)
    wait_until("the error is in the status", lambda: door.tls()["error"])
    texts += [door.read("status.json"), door.read("metrics"), petps("status", pool)]
    assert metric(texts[-2], "petps_tls_reload_failed") == 1
    assert "tls files not used" in texts[-1]
    new = authority.issue("new", "IP:127.0.0.1,DNS:new.example")
    secrets += _key_lines(new.key)
    replace(pair, new)
    wait_until("the new certificate is used", lambda: door.tls()["names"] == ["new.example"])
    assert door.tls()["error"] == ""
    texts += [petps("config", "check", config), petps("config", "check", config, "--json")]
    server.end()
    assert server.output.count("TLS: the current certificate stays in use") == 1
    texts += [server.output, server.errors]
    for text in texts:
        for secret in secrets:
            assert secret not in text


def test_the_password_of_kafka_is_not_shown(serve: Callable[..., Server], pool: Path) -> None:
    config = pool.with_name("petps.toml")
    config.write_text(f"""
[pool]
path = "{pool}"
[ingest]
log = "kafka://127.0.0.1:1/deltas"
[kafka]
security.protocol = "SASL_PLAINTEXT"
sasl.mechanism = "PLAIN"
sasl.username = "petps"
sasl.password = "{PLANTED}"
""")
    server = serve(pool, "--config", config)
    server.wait_ready()
    texts = [server.read(path).decode() for path in ("status.json", "metrics")]
    assert "kafka://127.0.0.1:1/deltas" in texts[0]
    server.end()
    for text in (*texts, server.output, server.errors):
        assert PLANTED not in text


@pytest.mark.parametrize("status", [None, 200, 201, 307, 400, 500])
def test_the_password_of_etcd_is_not_shown(
    serve: Callable[..., Server], pool: Path, status: int | None
) -> None:
    """Neither by a server nor by a controller, whatever etcd answers; None: it does not."""
    answered: list[bytes] = []
    paths: set[str] = set()

    class Etcd(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            paths.add(self.path)
            answered.append(self.rfile.read(int(self.headers["Content-Length"])))
            echoed = json.dumps(
                {"error": f"not {answered[-1].decode()}", "token": "\n" * (status == 201) + PLANTED}
            ).encode()
            self.send_response(status or 0)
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", str(len(echoed)))
            self.end_headers()
            self.wfile.write(echoed)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Etcd) as etcd:
        if status is not None:
            threading.Thread(target=etcd.serve_forever, daemon=True).start()
        else:
            etcd.server_close()
        config = pool.with_name("petps.toml")
        config.write_text(f"""
[pool]
path = "{pool}"
[cluster]
endpoints = ["http://127.0.0.1:{etcd.server_address[1]}"]
user = "petps"
password = "{PLANTED}"
""")
        server = serve(pool, "--config", config)
        server.wait_ready()
        wait_until("etcd has failed", lambda: "takes no part in its cluster" in server.output)
        texts = [server.read(path).decode() for path in ("status.json", "metrics")]
        output = pool.with_name("controller.out")
        command = [*PETPS, "controller", "--config", str(config)]
        with output.open("wb") as file:
            controller = subprocess.Popen(command, stdout=file, stderr=file)
        wait_until("it says that etcd fails", lambda: "etcd " in output.read_text())
        controller.terminate()
        controller.wait(120)
        texts.append(output.read_text())
        server.end()
        if status is not None:
            etcd.shutdown()
    assert status is None or any(PLANTED.encode() in request for request in answered)
    assert "/elsewhere" not in paths
    for text in (*texts, server.output, server.errors):
        assert PLANTED not in text


def _key_lines(key: Path) -> list[str]:
    return [line for line in key.read_text().splitlines() if not line.startswith("-----")]


def test_a_process_with_a_key_leaves_no_core(pool: Path, pair: Pair) -> None:
    program = """
import ctypes, os, sys
from petps import _native
from petps.cli.app import main

def start(tables, **options):  # in place of the native server
    print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), flush=True)  # PR_GET_DUMPABLE
    os._exit(0)

_native.Server.start = start
sys.argv = ["petps", "serve", *sys.argv[1:]]
main()
"""
    key = ["--tls-certificate", pair.certificate, "--tls-key", pair.key]
    for arguments, variables, dumpable in (
        ([], {}, "1\n"),
        (key, {}, "0\n"),
        ([], {"PETPS_CLUSTER_USER": "u", "PETPS_CLUSTER_PASSWORD": "word"}, "0\n"),
        ([], {"PETPS_KAFKA_SASL_PASSWORD": "word"}, "0\n"),
    ):
        command = [*PETPS[:1], "-c", program, pool, *arguments]
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, timeout=120,
            env=os.environ | variables,
        )  # fmt: skip
        assert done.stdout == dumpable, done.stderr
