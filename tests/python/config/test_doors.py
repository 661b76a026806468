"""[server], [tls] and [access]: what is refused, what is insecure, and what is never shown."""

from __future__ import annotations

import pytest

from petps import config
from petps.errors import InvalidArgument

POOL = '[pool]\npath = "p"\n'
TLS = '[tls]\ncertificate = "c.pem"\nkey = "k.pem"\n'
REQUIRED = TLS + 'client_ca = "ca.pem"\nclient_certificates = "required"\n'
ACCESS = '[access]\nfile = "access.json"\n'


def server(host: str, *more: str) -> config.Config:
    lines = "".join(f"{line}\n" for line in more if not line.startswith("["))
    sections = "".join(line for line in more if line.startswith("["))
    return config.parse(f'{POOL}[server]\nhost = "{host}"\n{lines}{sections}')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[tls]\ncertificate = "c"\n', r"\[tls\]: certificate is given without key: give both"),
        ('[tls]\nkey = "k"\n', r"\[tls\]: key is given without certificate"),
        ('[tls]\nclient_ca = "a"\nclient_certificates = "required"\n', "'required' needs TLS"),
        (TLS + 'client_certificates = "optional"\n', "'optional' needs client_ca"),
        (TLS + 'client_ca = "a"\n', "client_ca is given, but client_certificates = 'off'"),
        (TLS + 'client_certificates = "yes"\n', "should be 'off', 'optional' or 'required'"),
        ('[server]\nhost = "localhost"\n', "host: must be a numeric .*, not 'localhost'"),
        ('[server]\nhost = "127.0.0.256"\n', "must be a numeric IPv4 or IPv6 address"),
        ('[server]\nhttp_host = "127.0.0.1"\n', "http_host is not a known key"),
        ('[server]\ngrpc_host = "127.0.0.1"\n', "grpc_host is not a known key"),
    ],
)
def test_wrong_values_are_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        config.parse(POOL + text)


@pytest.mark.parametrize(
    "settings",
    [
        server("127.0.0.1"),
        server("127.1.2.3"),
        server("::1"),
        server("127.0.0.1", "admin_port = 0", ACCESS),
        server("0.0.0.0", TLS, ACCESS),
        server("::", REQUIRED),
        server("::", REQUIRED, ACCESS, "admin_port = 0"),
    ],
)
def test_safe_doors(settings: config.Config) -> None:
    assert settings.risks() == []
    settings.check_doors()


@pytest.mark.parametrize(
    ("host", "more", "risks"),
    [
        ("0.0.0.0", [], ["nothing is encrypted", "nobody is asked for credentials"]),
        ("192.168.0.7", [TLS], ["nobody is asked for credentials"]),
        ("::", [ACCESS], ["nothing is encrypted"]),
        ("fe80::1", [TLS + 'client_ca = "a"\nclient_certificates = "optional"\n'], ["nobody is"]),
        ("127.0.0.1", ["admin_port = 0"], ["admin_port asks nobody for credentials"]),
    ],
)
def test_risks_need_insecure(host: str, more: list[str], risks: list[str]) -> None:
    refused = server(host, *more)
    assert len(refused.risks()) == len(risks)
    with pytest.raises(InvalidArgument, match=r"with server.insecure \(--insecure\)") as error:
        refused.check_doors()
    accepted = server(host, *more, "insecure = true")
    accepted.check_doors()
    for risk in risks:
        assert risk in str(error.value)
        assert any(risk in text for text in accepted.risks())


def test_an_admin_port_beyond_loopback_needs_a_grant() -> None:
    for more in ([], [TLS], [REQUIRED]):
        settings = server("0.0.0.0", "admin_port = 7073", "insecure = true", *more)
        with pytest.raises(InvalidArgument, match=r"admin_port on 0.0.0.0.* needs access.file"):
            settings.check_doors()
    server("0.0.0.0", "admin_port = 7073", "insecure = true", ACCESS).check_doors()
    with pytest.raises(InvalidArgument, match="role admin"):
        server("127.0.0.1", "admin_port = 7073", REQUIRED).check_doors()  # nobody could use it


PLANTED = "the-planted-secret"


@pytest.mark.parametrize(
    "text",
    [
        f'[kafka]\n"sasl.password" = ["{PLANTED}"]\n',
        f'[kafka]\nsasl.password = ["{PLANTED}"]\n',
        f'[backup]\nstore = "s3://me:{PLANTED}@bucket/x"\n',
    ],
)
def test_errors_hide_secrets(text: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        config.parse(POOL + text)
    assert PLANTED not in str(error.value)


def test_a_password_in_the_address_of_a_log_is_refused_and_hidden() -> None:
    from petps.delta.kafka.options import parse_address

    for address in (f"me:{PLANTED}@h:9092/t", f"h:1,me:{PLANTED}@h:9092/t", f"me:{PLANTED}@h:1"):
        with pytest.raises(InvalidArgument) as error:
            parse_address(f"kafka://{address}")
        assert PLANTED not in str(error.value)
