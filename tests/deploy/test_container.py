"""What runs in the container, beside a real server: the health check. deploy_image.py builds it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from petps import _native
from petps.server.http import HttpServer
from tests.certificates import Authority
from tests.deploy.tools import ROOT
from tests.python.server.test_tls_files import Opened
from tests.python.server.test_tls_http import door as tls_door

HEALTH = ROOT / "deploy/container/health.py"
CONTAINERFILE = (ROOT / "deploy/container/Containerfile").read_text()


def check(configuration: Path, **environment: str) -> tuple[int, str]:
    """Return the status and the output of the health check."""
    process = subprocess.run(
        [sys.executable, "-I", str(HEALTH), str(configuration)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    return process.returncode, process.stdout + process.stderr


def door(fault: str | None = None) -> HttpServer:
    return HttpServer(
        "127.0.0.1", 0, status=dict, metrics=lambda accepted: (b"", "text/plain"),
        fault=lambda: fault, ready=lambda: "not ready",
        shard_map=dict, gate=_native.Gate("open"),
    )  # fmt: skip


def test_a_server_is_healthy_unless_it_has_a_fault(tmp_path: Path) -> None:
    configuration = tmp_path / "petps.toml"
    for fault, expected in ((None, (0, "")), ("a write failed", (1, "/healthz: 503\n"))):
        server = door(fault)
        try:
            for host in ("127.0.0.1", "0.0.0.0"):
                configuration.write_text(f"[server]\nhost = '{host}'\nhttp_port = {server.port}\n")
                assert check(configuration) == expected
            configuration.write_text("")
            assert check(configuration, PETPS_SERVER_HTTP_PORT=str(server.port)) == expected
        finally:
            server.close()
    status, text = check(configuration, PETPS_SERVER_HTTP_PORT=str(server.port))
    assert (status, "the server does not answer" in text) == (1, True)
    assert "Traceback" not in text
    assert check(tmp_path / "none")[0] == 1


def test_it_asks_by_tls(tmp_path: Path) -> None:
    pair = Authority(tmp_path).issue("server", "DNS:another-name")
    with tls_door(Opened(pair).files) as server:
        configuration = tmp_path / "petps.toml"
        text = f"[server]\nhttp_port = {server.port}\n"
        configuration.write_text(f"{text}[tls]\ncertificate = 'server.pem'\nkey = 'server.key'\n")
        assert check(configuration) == (0, "")
        configuration.write_text(text)  # plain text
        assert check(configuration) == (1, "/healthz: 400\n")


def seconds(name: str) -> int:
    found = re.search(rf"--{name}=(\d+)s", CONTAINERFILE)
    assert found is not None
    return int(found[1])


def test_the_check_ends_before_its_time_limit() -> None:
    found = re.search(r"^SECONDS = ([\d.]+)", HEALTH.read_text(), re.MULTILINE)
    assert found is not None
    assert float(found[1]) < seconds("timeout")


def test_the_containerfile_names_no_shell_and_no_root() -> None:
    for instruction in ("ENTRYPOINT", "CMD"):
        assert re.search(rf"^(?:  )?{instruction} \[", CONTAINERFILE, re.MULTILINE)
    assert re.findall(r"^USER (.*)$", CONTAINERFILE, re.MULTILINE) == ["10001:10001"]
    assert "STOPSIGNAL SIGTERM" in CONTAINERFILE
    assert not re.search(r"(?i)password|token|secret", CONTAINERFILE)
