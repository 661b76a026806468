"""Environment variables of configuration keys: their names, values, precedence and errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from petps import config
from petps.config.environment import read_environment
from petps.config.shown import shown_settings
from petps.config.variable import table_of, variable_of
from petps.errors import InvalidArgument

POOL = {"PETPS_POOL_PATH": "p"}


def settings_of(**environ: str) -> config.Settings:
    return config.read_settings(None, POOL | environ)


def test_every_key_has_a_variable_of_its_own() -> None:
    keys = list(config.keys())
    variables = {variable_of(key.path) for key in keys}
    assert len(variables) == len(keys)
    assert {"PETPS_SERVER_PORT", "PETPS_SERVER_LIMITS_PIN_MS"} <= variables
    # Those of clients (petps/admin/client.py, client/python).
    clients = {"PETPS_TLS_CA", "PETPS_TLS_CERTIFICATE", "PETPS_TLS_KEY", "PETPS_TLS_SERVER_NAME"}
    assert variables.isdisjoint(clients | {"PETPS_TOKEN_FILE"})


def test_every_key_without_a_name_of_the_users_is_read() -> None:
    paths = [key.path for key in list(config.keys()) if "<name>" not in key.path]
    read = read_environment({variable_of(path): "1" for path in paths})
    assert list(read) == sorted(paths, key=variable_of)


@pytest.mark.parametrize("name", ["items", "user-items", "a.b", "Ads_2", "x2d", "_a__b_", "ITEMS"])
def test_every_name_of_a_table_has_a_variable(name: str) -> None:
    variable = variable_of(("tables", name, "dim"))
    assert variable.replace("_", "").isalnum(), "a shell could not export it"
    tables = {variable: "3", variable_of(("tables", name, "capacity")): "10"}
    assert settings_of(**tables).config.tables[name].dim == 3
    assert table_of(variable.removeprefix("PETPS_TABLES__").removesuffix("__DIM")) == name


def test_values_have_the_types_of_their_keys() -> None:
    read = settings_of(
        PETPS_SERVER_PORT="7171",
        PETPS_SERVER_HTTP="false",
        PETPS_SERVER_HOST="127.0.0.2",
        PETPS_SERVER_DRAIN_SECONDS="3",
        PETPS_SERVER_ADDRESS="17",
        PETPS_BACKUP_EVERY="6h",
        PETPS_SERVER_TLS_CERTIFICATE="c.pem",
        PETPS_SERVER_TLS_KEY="k.pem",
        PETPS_MODEL_NAME="12",
        PETPS_KAFKA_SOCKET_TIMEOUT_MS="1000",
        PETPS_TABLES__ITEMS__DIM="2",
        PETPS_TABLES__ITEMS__CAPACITY="10",
        PETPS_TABLES__ITEMS__DEFAULT="[0.5, 1]",
        PETPS_TABLES__ITEMS__EXPIRE_AFTER="30d",
    ).config
    server = read.server
    assert (server.port, server.http, server.host) == (7171, False, "127.0.0.2")
    assert (server.drain_seconds, server.address) == (3.0, "17")
    assert (read.backup.every, read.tls.certificate) == ("6h", Path("c.pem"))
    assert read.model.name == "12"
    assert read.kafka == {"socket.timeout.ms": "1000"}
    assert read.tables["items"].default == [0.5, 1.0]
    assert read.tables["items"].expire_after_seconds() == 30 * 86_400


def test_an_option_wins_over_the_environment_that_over_the_file_that_over_the_default(
    tmp_path: Path,
) -> None:
    file = tmp_path / "petps.toml"
    file.write_text(
        "[server]\nport = 1\nhttp_port = 1\nworkers = 1\n[kafka]\nsasl.username = 'file'\n"
        "[tables.items]\ndim = 2\ncapacity = 5\n"
    )
    environ = POOL | {
        "PETPS_SERVER_PORT": "2",
        "PETPS_SERVER_HTTP_PORT": "2",
        "PETPS_SERVER_WORKERS": "",  # an empty one is not set
        "PETPS_KAFKA_SASL_USERNAME": "variable",
        "PETPS_TABLES__ITEMS__CAPACITY": "7",
    }
    options = {"server": {"port": 3, "workers": None}}
    read = config.read_settings(file, environ, options)
    server = read.config.server
    assert (server.port, server.http_port, server.workers, server.grpc_port) == (3, 2, 1, 7071)
    assert read.config.kafka == {"sasl.username": "variable"}
    assert (read.config.tables["items"].dim, read.config.tables["items"].capacity) == (2, 7)
    sources = {setting.key: setting.source for setting in shown_settings(read)}
    assert sources == {
        "pool.path": "PETPS_POOL_PATH",
        "server.port": "command line",
        "server.http_port": "PETPS_SERVER_HTTP_PORT",
        "server.workers": str(file),
        "kafka.sasl.username": "PETPS_KAFKA_SASL_USERNAME",
        "tables.items.dim": str(file),
        "tables.items.capacity": "PETPS_TABLES__ITEMS__CAPACITY",
    }


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("PETPS_SERVER_PROT", "did you mean PETPS_SERVER_PORT?"),
        ("PETPS_LOG_LEVLE", "did you mean PETPS_LOG_LEVEL?"),
        ("PETPS_SERVER__PORT", "did you mean PETPS_SERVER_PORT?"),
        ("PETPS_TLS_CLIENT_CA", "did you mean PETPS_SERVER_TLS_CLIENT_CA?"),
        ("PETPS_TABLES__ITEMS__DIMM", "did you mean PETPS_TABLES__ITEMS__DIM?"),
        ("PETPS_TABLES__user-items__DIM", "did you mean PETPS_TABLES__USERx2DITEMS__DIM?"),
        ("PETPS_TABLES_ITEMS_DIM", "write PETPS_TABLES__NAME__KEY"),
        ("PETPS_TABLES____DIM", "write PETPS_TABLES__NAME__KEY"),
        ("PETPS_SERVER_SERVICE_HOST", "set enableServiceLinks: false in the pod"),
        ("PETPS_SERVER_PORT_7070_TCP_ADDR", "set enableServiceLinks: false in the pod"),
    ],
)
def test_an_unknown_variable_is_named_with_the_nearest_one(variable: str, message: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        settings_of(**{variable: "secret"})
    assert str(refused.value).startswith(f"{variable} is not a known variable")
    assert message in str(refused.value)
    assert "secret" not in str(refused.value)


def test_other_variables_are_ignored() -> None:
    others = ("PETPS_TOKEN_FILE", "PETPS_TLS_KEY", "PETPS_CPU", "PETPS_TEST_SCALE", "SERVER_PORT")
    read = settings_of(**dict.fromkeys(others, "x"))
    assert list(read.sources) == [("pool", "path")]


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"PETPS_SERVER_PORT": "x"}, "PETPS_SERVER_PORT: [server] port: should be a valid integer"),
        ({"PETPS_SERVER_HTTP": "yes"}, "PETPS_SERVER_HTTP: [server] http: should be a valid bool"),
        ({"PETPS_SERVER_PORT": "tcp://10.0.0.1:7070"}, "set enableServiceLinks: false"),
        ({"PETPS_SERVER_TLS_KEY": "k"}, "PETPS_SERVER_TLS_KEY: [tls]: key is given without"),
        ({"PETPS_TABLES__A__DIM": "2"}, "PETPS_TABLES__A__DIM: [tables.a] capacity is missing"),
        ({"PETPS_BACKUP_EVERY": "6"}, "PETPS_BACKUP_EVERY: [backup] every: it must be a whole"),
    ],
)
def test_a_wrong_value_is_named_with_its_variable(variables: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        settings_of(**variables)
    assert message in str(refused.value)


def test_each_fault_names_the_source_of_its_value(tmp_path: Path) -> None:
    file = tmp_path / "petps.toml"
    file.write_text("[server]\nworkers = -1\n[poool]\n")
    with pytest.raises(InvalidArgument) as refused:
        config.read_settings(file, {"PETPS_SERVER_PORT": "-1"}, {"server": {"http_port": -1}})
    assert {line.partition(" ")[0] for line in str(refused.value).splitlines()} == {
        f"{file}:", "PETPS_SERVER_PORT:", "command",
    }  # fmt: skip
    assert f"{file}: [server] workers" in str(refused.value)
    assert f"{file}: [pool] is missing" in str(refused.value)


def test_a_section_that_is_no_section_is_refused_beside_a_variable(tmp_path: Path) -> None:
    file = tmp_path / "petps.toml"
    file.write_text("server = 1\n")
    with pytest.raises(InvalidArgument, match=r"petps.toml: \[server\] is a section"):
        config.read_settings(file, POOL | {"PETPS_SERVER_PORT": "1"})


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    read = settings_of(
        PETPS_KAFKA_SASL_PASSWORD="planted",
        PETPS_INGEST_LOG="kafka://me:planted@h:1/t",
        PETPS_KAFKA_SASL_PASSWORD_FILE="/run/password",
    )
    shown = {setting.key: setting.value for setting in shown_settings(read)}
    assert "planted" not in str(shown)
    assert shown["kafka.sasl.password.file"] == "/run/password"
