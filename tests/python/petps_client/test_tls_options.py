"""Where the options of TLS connections come from. Connections are in tests/native/client."""

from __future__ import annotations

import petps_client
import pytest
from petps_client.tls import tls_options

TLS_URL = "petps+tls://127.0.0.1:1/m"


def test_the_environment_gives_defaults_for_tls_urls_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CA", "CERTIFICATE", "KEY", "SERVER_NAME"):
        monkeypatch.setenv(f"PETPS_TLS_{name}", f"of {name}")
    assert tls_options(TLS_URL, None) == {
        "tls_ca": "of CA",
        "tls_certificate": "of CERTIFICATE",
        "tls_key": "of KEY",
        "tls_server_name": "of SERVER_NAME",
    }
    assert set(tls_options("petps://127.0.0.1:1/m", None).values()) == {""}
    assert tls_options(TLS_URL, petps_client.Tls(ca="own"))["tls_key"] == ""


def test_another_type_is_refused() -> None:
    with pytest.raises(petps_client.InvalidArgument, match=r"tls must be a petps_client\.Tls"):
        tls_options(TLS_URL, "ca.pem")  # type: ignore[arg-type]
