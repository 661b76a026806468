"""The section [router], and which ports a router refuses to open."""

from __future__ import annotations

from pathlib import Path

import pytest

from petps.config import RouterConfig, TlsConfig, parse, read_settings
from petps.config.router import accepted_risks, check_router_doors
from petps.errors import InvalidArgument

POOL = '[pool]\npath = "unused"\n'
CERTIFICATE = TlsConfig(certificate=Path("c.pem"), key=Path("k.pem"))


def test_the_environment_overrides_the_file(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text(POOL + '[router]\nservers = "petps://h1:7070"\nport = 1\n')
    settings = read_settings(file, {"PETPS_ROUTER_PORT": "2", "PETPS_ROUTER_CALLS": "8"})
    router = settings.config.router
    assert (router.servers, router.port, router.calls) == ("petps://h1:7070", 2, 8)


@pytest.mark.parametrize(
    ("lines", "part"),
    [
        ('servers = "h1:7070"', "petps://HOST:PORT"),
        ('servers = "petps://h1:7070/model"', "without a model"),
        ('servers = "petps://h1"\nca = "ca.pem"', "petps\\+tls://"),
        ('host = "localhost"', "numeric"),
        ("calls = 0", "calls"),
        ("callers = 5000", "callers"),
        ("deadline_seconds = 0", "deadline_seconds"),
        ("grants = 1", "grants"),
    ],
)
def test_bad_keys_are_named(lines: str, part: str) -> None:
    with pytest.raises(InvalidArgument, match=part):
        parse(f"{POOL}[router]\n{lines}\n")


def test_beyond_loopback_it_needs_tls_unless_insecure() -> None:
    exposed = RouterConfig.model_validate({"host": "0.0.0.0"})
    with pytest.raises(InvalidArgument, match=r"router\.host 0\.0\.0\.0 .* router\.insecure"):
        check_router_doors(exposed, TlsConfig())
    check_router_doors(exposed, CERTIFICATE)
    check_router_doors(
        RouterConfig.model_validate({"host": "0.0.0.0", "insecure": True}), TlsConfig()
    )
    check_router_doors(RouterConfig(), TlsConfig())


@pytest.mark.parametrize("tls", [TlsConfig(), CERTIFICATE])
def test_what_insecure_accepts_is_said(tls: TlsConfig) -> None:
    """TLS alone is not enough: the servers may ask nobody for credentials."""
    exposed = {"host": "0.0.0.0", "insecure": True}
    risks = accepted_risks(RouterConfig.model_validate(exposed), tls)
    assert any("nothing is encrypted" in risk for risk in risks) == (tls.certificate is None)
    assert "open to everybody there" in risks[-1]
    assert not accepted_risks(RouterConfig.model_validate({"host": "0.0.0.0"}), tls)
    assert not accepted_risks(RouterConfig.model_validate({"insecure": True}), tls)


def test_it_takes_no_client_certificates() -> None:
    tls = CERTIFICATE.model_copy(
        update={"client_ca": Path("ca.pem"), "client_certificates": "required"}
    )
    with pytest.raises(InvalidArgument, match="cannot pass a certificate on"):
        check_router_doors(RouterConfig(), tls)
