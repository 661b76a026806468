"""Secrets that no command shows."""

from __future__ import annotations

import json
from pathlib import Path

from tests.python.cli.conftest import Command

PLANTED = "the-planted-secret"
KAFKA = f'''[pool]
path = "p"
[kafka]
security.protocol = "SASL_SSL"
sasl.username = "me"
sasl.password = "{PLANTED}"
ssl.key.password = "{PLANTED}"
"ssl.key.pem" = "{PLANTED}"
"sasl.oauthbearer.client.secret" = "{PLANTED}"
"sasl.oauthbearer.config" = "principal={PLANTED}"
"ssl.key.location" = "/etc/petps/kafka.key"
"sasl.password.file" = "/etc/petps/kafka-password"
"sasl.oauthbearer.token.endpoint.url" = "https://login.example/token"
'''


def test_config_hides_secrets(run: Command, tmp_path: Path) -> None:
    file = tmp_path / "petps.toml"
    file.write_text(KAFKA)
    texts = [run("config", "check", file), run("config", "check", file, "--json")]
    for text in texts:
        assert PLANTED not in text
        for shown in ("SASL_SSL", "/etc/petps/kafka.key", "/etc/petps/kafka-password"):
            assert shown in text
        assert "https://login.example/token" in text
        assert text.count("(hidden)") == 5
    settings = {shown["key"]: shown["value"] for shown in json.loads(texts[1])["settings"]}
    assert settings["kafka.sasl.username"] == "me"
