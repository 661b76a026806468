"""The section [cluster]: what it refuses, and that its secret is shown nowhere."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from petps import config
from petps.config import read_settings
from petps.config.shown import shown_settings
from petps.doctor.secrets import known_secrets
from petps.errors import InvalidArgument, IoError
from petps.server.cluster import access_of

POOL = '[pool]\npath = "p"\n[cluster]\n'
PASSWORD = "a-password-of-etcd"


@pytest.mark.parametrize(("text", "reason"), [
    ('endpoints = ["etcd:2379"]', "must be http://HOST:PORT or https://HOST:PORT"),
    ('endpoints = ["http://user:word@etcd:2379"]', "without a password"),
    ('endpoints = ["http://etcd:2379/x"]', "must be http://HOST:PORT"),
    ('prefix = "petps"', "prefix"),
    ('prefix = "/petps/"', "prefix"),
    ("weight = 0.0", "greater than 0"),
    ("weight = inf", "finite"),
    ('replace_after = "soon"', "replace_after"),
    ('replace_after = "0s"', "it must be a whole number with its unit"),
    ('certificate = "c.pem"', "certificate and key belong together"),
    ('user = "petps"', "give password_file too"),
    ('password_file = "f"', "a password is given without user"),
    ('user = "u"\npassword = "a-password-of-etcd"\npassword_file = "f"', "give one of them"),
    (
        'user = "u"\npassword_file = "f"\nendpoints = ["https://e1:2379", "http://e2:2379"]',
        "the password would cross the network unencrypted to http://e2:2379: write https://",
    ),
    ("lease_seconds = 1", "greater than or equal to 2"),
    ("moves = 0", "greater than or equal to 1"),
])  # fmt: skip
def test_bad_settings_are_refused(text: str, reason: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        config.parse(POOL + text)
    assert reason in str(error.value)
    assert PASSWORD not in str(error.value)


@pytest.mark.parametrize("endpoint", [
    "http://etcd:2379", "https://etcd.example.com", "http://[::1]:2379", "http://10.0.0.1:2379/",
])  # fmt: skip
def test_endpoints(endpoint: str) -> None:
    parsed = config.parse(POOL + f'endpoints = ["{endpoint}"]').cluster
    assert parsed.endpoints == [endpoint.rstrip("/")]


@pytest.mark.parametrize("endpoint", [
    "https://etcd:2379", "http://127.0.0.1:2379", "http://[::1]:2379", "http://localhost",
])  # fmt: skip
def test_endpoints_that_may_get_a_password(endpoint: str) -> None:
    text = f'user = "u"\npassword = "{PASSWORD}"\nendpoints = ["{endpoint}"]'
    assert config.parse(POOL + text).cluster.has_secrets


def test_a_lost_server_may_never_be_replaced() -> None:
    assert config.parse(POOL + 'replace_after = "never"').cluster.replace_after_seconds() == inf
    assert config.parse(POOL + 'replace_after = "2m"').cluster.replace_after_seconds() == 120


def test_a_server_has_one_map() -> None:
    text = POOL + 'endpoints = ["http://e:1"]\n[server]\nshard_map = "m"\n'
    with pytest.raises(InvalidArgument, match="both give a shard map"):
        config.parse(text)


def test_members_of_a_cluster_have_stores_of_their_own_and_evict_nothing() -> None:
    cluster = POOL + 'endpoints = ["http://e:1"]\n'
    with pytest.raises(InvalidArgument, match="needs a store of its own"):
        config.parse(cluster + '[backup]\nstore = "s"\n')
    table = '[tables.t]\ndim = 1\ncapacity = 1\nwhen_full = "evict_oldest"\n'
    with pytest.raises(InvalidArgument, match="for a server without a shard map"):
        config.parse(cluster + table)


def test_the_password_comes_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(PASSWORD + "\n")
    of_file = config.parse(POOL + f'user = "u"\npassword_file = "{file}"').cluster
    assert of_file.read_password() == PASSWORD
    file.unlink()
    with pytest.raises(IoError, match=r"cluster\.password_file .*No such file"):
        of_file.read_password()
    environ = {
        "PETPS_POOL_PATH": "p",
        "PETPS_CLUSTER_USER": "u",
        "PETPS_CLUSTER_PASSWORD": PASSWORD,
        "PETPS_CLUSTER_ENDPOINTS": '["https://e:1"]',
    }
    settings = read_settings(None, environ)
    cluster = settings.config.cluster
    assert cluster.read_password() == PASSWORD
    shown = {setting.key: setting.value for setting in shown_settings(settings)}
    assert shown["cluster.password"] == "(hidden)"
    assert shown["cluster.user"] == "u"
    assert PASSWORD not in str(shown)
    assert PASSWORD not in repr(access_of(cluster))
    assert PASSWORD in known_secrets(settings.config, {})
