"""Configuration: refused values and their errors, defaults, agreement with the documents."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from petps import config
from petps.errors import InvalidArgument, NotFound

DEPLOY = Path(__file__).parents[3] / "deploy/config"
POOL = '[pool]\npath = "p"\n'


def test_defaults_of_a_minimal_file() -> None:
    settings = config.parse(POOL)
    assert settings.pool.durability == "power"
    assert (settings.server.host, settings.server.port) == ("127.0.0.1", 7070)
    assert settings.server.http_port == 7072
    assert settings.ingest.log is None
    assert settings.bases() is None
    assert settings.ingest_model() == settings.model.name == "default"
    assert settings.dead_letters() == "dead-letters"
    assert settings.tables == {}


def test_values_replace_the_defaults() -> None:
    settings = config.parse(
        POOL
        + '[model]\nname = "ranking"\npartitions = 3\n[ingest]\nlog = "x/deltas"\n'
        + "[tables.items]\ndim = 2\ncapacity = 10\ndefault = [1.0, 2.5]\n"
        + '[tables.users]\ndim = 2\ncapacity = 10\ndefault = 0.5\nfeed = "delta"\n'
    )
    assert settings.ingest_model() == "ranking"
    assert settings.bases() == Path("x/bases")
    assert settings.tables["items"].default_row() == [1.0, 2.5]
    assert settings.tables["users"].default_row() == [0.5, 0.5]
    assert settings.tables["users"].feed == "delta"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"\[pool\] is missing"),
        ("[pool]\n", r"\[pool\] path is missing"),
        ("[pool]\npth = 'x'", r"\[pool\] pth is not a known key; did you mean 'path'\?"),
        (POOL + "[sever]\nport = 1", r"\[sever\] is not a known key; did you mean 'server'\?"),
        (POOL + "[server]\nprot = 1", r"\[server\] prot .* did you mean 'port'\?"),
        (POOL + "[server.limits]\nzzz = 1", r"\[server.limits\] zzz .*; known are keys_per_pull,"),
        (POOL + "[server]\nport = '70'", r"\[server\] port: should be a valid integer, not '70'"),
        (
            POOL + "[server]\nport = 70000",
            r"port: should be less than or equal to 65535, not 70000",
        ),
        (POOL + "[server]\nworkers = true", r"workers: should be a valid integer, not True"),
        (
            POOL + "[server]\ngather = 'dma'",
            r"gather: should be 'auto', 'copy', 'sendmsg' or 'zerocopy'",
        ),
        (POOL + "[pool2]\n", "pool2"),
        ("pool = 3", r"\[pool\] is a section"),
        ("a = [", "not valid TOML"),
        ("a = " + "[" * 4000, "not valid TOML"),
        (POOL + "[tables.x]\ndim = 2", r"\[tables.x\] capacity is missing"),
        (POOL + "[tables.x]\ndim = 0\ncapacity = 1", r"\[tables.x\] dim: .* not 0"),
        (POOL + "[tables.x]\ndim = 2\ncapacity = 1\nsize = 3", r"\[tables.x\] size is not a known"),
        (
            POOL + "[tables.x]\ndim = 2\ncapacity = 1\ndefault = [1.0]",
            r"\[tables.x\]: default has 1 numbers, but dim is 2",
        ),
        (POOL + "[tables.x]\ndim = 2\ncapacity = 1\ndefault = nan", "default: must be finite"),
        (POOL + "[tables.'a b']\ndim = 2\ncapacity = 1", "must be 1 to 63 letters, digits.*'a b'"),
        (
            POOL + "[tables.x]\ndim = 2\ncapacity = 1\ndtype = 'f64'",
            "dtype: should be 'f32', 'f16'",
        ),
    ],
)
def test_bad_files_name_section_key_and_remedy(text: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as refused:
        config.parse(text, "my.toml")
    assert all(line.startswith("my.toml") for line in str(refused.value).splitlines())


def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such configuration file; `petps config` shows"):
        config.load(tmp_path / "none.toml")
    with pytest.raises(InvalidArgument, match="is a folder"):
        config.load(tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidArgument, match="not a text file"):
        config.load(binary)
    large = tmp_path / "large.toml"
    large.write_bytes(bytes(2 << 20))
    with pytest.raises(InvalidArgument, match=r"2,097,152 bytes.*is it the pool\?"):
        config.load(large)


def test_the_command_line_overrides_the_file() -> None:
    base = config.parse(POOL + "[server]\nport = 1\nworkers = 3\n")
    merged = config.merge(base, {"server": {"port": 2, "workers": None}}, "command line")
    assert (merged.server.port, merged.server.workers) == (2, 3)
    assert merged.pool == base.pool
    with pytest.raises(InvalidArgument, match=r"command line: \[server\] port"):
        config.merge(base, {"server": {"port": -1}}, "command line")


def test_a_device_has_no_folder_of_its_own() -> None:
    device = '[pool]\npath = "/dev/null"\n'  # any character device
    kafka = '[ingest]\nlog = "kafka://h:9092/deltas"\n'
    with pytest.raises(InvalidArgument, match=r"/dev/null is a device.*set pool\.folder"):
        config.parse(device + kafka).bases()
    settings = config.parse(device + 'folder = "/var/petps"\n' + kafka)
    assert settings.bases() == Path("/var/petps/bases")
    assert settings.folder() == Path("/var/petps")
    settings = config.parse(device + '[ingest]\nlog = "x/deltas"\n')
    assert settings.bases() == Path("x/bases")
    assert settings.dead_letters() == "x/dead-letters"


def test_a_log_in_kafka_takes_options_and_places() -> None:
    settings = config.parse(
        POOL
        + '[ingest]\nlog = "kafka://h:9092/deltas"\n[kafka]\nsecurity.protocol = "SASL_SSL"\n'
        + '"sasl.username" = "me"\nsocket.timeout.ms = 1000\nsocket.keepalive.enable = true\n'
    )
    assert settings.kafka == {
        "security.protocol": "SASL_SSL",
        "sasl.username": "me",
        "socket.timeout.ms": 1000,
        "socket.keepalive.enable": True,
    }
    assert settings.bases() == Path("bases")
    assert settings.dead_letters() == "kafka://h:9092/deltas.dead-letters"
    with pytest.raises(InvalidArgument, match=r"\[kafka\] x"):
        config.parse(POOL + "[kafka]\nx = [1]\n")
    merged = config.merge(settings, {"kafka": {"sasl.username": "you"}}, "command line")
    assert merged.kafka["sasl.username"] == "you"
    assert merged.kafka["security.protocol"] == "SASL_SSL"


def test_every_key_is_documented() -> None:
    keys = list(config.keys())
    assert len(keys) > 30
    for key in keys:
        assert key.description.endswith("."), key
        assert key.kind, key


def test_the_example_names_every_key_with_its_default() -> None:
    text = (DEPLOY / "petps.toml").read_text()
    settings = config.parse(text, "petps.toml")
    assert set(settings.tables) == {"items", "users"}
    document = tomllib.loads(text)
    for key in list(config.keys()):
        if key.section == "tables.<name>":
            section = document["tables"]["items"]
        else:
            section = document
            for part in key.section.split("."):
                section = section[part]  # also checks that the file has the section
        if key.default == "none":
            assert (f"# {key.name} = " in text) or key.name == "<name>", key
        elif key.default != "required":
            assert section[key.name] == tomllib.loads(f"x = {key.default}")["x"], key
        else:
            assert key.name in section, key


def test_the_document_of_keys_is_up_to_date() -> None:
    assert (DEPLOY / "KEYS.md").read_text() == config.keys_markdown()
