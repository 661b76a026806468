"""Keys below 0, and URLs where a command takes a path."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import petps_client
import pytest

from petps.server import Serving
from tests.python.cli.conftest import DIM, Command
from tests.python.cli.test_server_target import settings

ONE = np.ones((2, DIM), np.float32)


@pytest.fixture
def signed(tmp_path: Path) -> Path:
    path = tmp_path / "signed.npz"
    np.savez(path, keys=np.array([-7, 5], np.int64), rows=ONE * [[1.0], [2.0]])
    return path


def test_signed_keys_cross_every_command(run: Command, pool: Path, signed: Path) -> None:
    message = run.fails(2, "load", pool, "items", signed)
    assert "keys[0] is -7" in message
    assert "--signed-keys" in message
    assert run.json("load", pool, "items", signed, "--signed-keys")["rows"] == 2
    report = run.json("pull", pool, "items", -7, 5, "--signed-keys")
    assert [(row["key"], row["row"][0]) for row in report["rows"]] == [(-7, 1.0), (5, 2.0)]
    assert run.json("pull", pool, "items", 2**64 - 7)["rows"][0]["found"]
    run("push", pool, "items", "-8=1,1,1,1", "--delete", -7, "--signed-keys")
    report = run.json("pull", pool, "items", -7, -8, "--signed-keys")
    assert [row["found"] for row in report["rows"]] == [False, True]


def test_a_key_below_0_names_the_flag_and_is_no_option(run: Command, pool: Path) -> None:
    for arguments in (
        ("pull", pool, "items", -7),
        ("push", pool, "items", "-7=1,1,1,1"),
        ("push", pool, "items", "--delete", -7),
    ):
        message = run.fails(2, *arguments)
        assert "got '-7': --signed-keys" in message, arguments
        assert str(2**64 - 7) in message
    message = run.fails(2, "pull", pool, "items", -(2**63) - 1, "--signed-keys")
    assert "from -2^63 to 2^64-1" in message
    assert "No such option" in run.fails(2, "pull", pool, "items", 1, "--jsno")


def test_signed_keys_of_files(run: Command, pool: Path, signed: Path, tmp_path: Path) -> None:
    run("load", pool, "items", signed, "--signed-keys")
    np.save(tmp_path / "k.npy", np.array([5, -7], np.int64))
    files = ("--keys", tmp_path / "k.npy", "--out", tmp_path / "o.npz")
    assert "keys[1] is -7" in run.fails(2, "pull", pool, "items", *files)
    run("pull", pool, "items", *files, "--signed-keys")
    with np.load(tmp_path / "o.npz") as arrays:
        assert arrays["keys"].tolist() == [5, -7]
        assert arrays["found"].all()


def test_signed_keys_are_published(run: Command, signed: Path, tmp_path: Path) -> None:
    publish = ("publish", tmp_path / "log", "items", signed, "--delete", "-9")
    assert "--signed-keys" in run.fails(2, *publish)
    assert run.json(*publish, "--signed-keys")["rows"] == 2


def test_a_client_of_signed_keys(pool: Path) -> None:
    with Serving(settings(pool)) as serving:
        url = f"petps://127.0.0.1:{serving.port}/default"
        with petps_client.connect(url, signed_keys=True) as client:
            client.push("items", np.array([-7, 5], np.int64), ONE)
            for keys in ([-7, 5], np.array([-7, 5], np.int32), np.array([2**64 - 7, 5], np.uint64)):
                _, mask = client.pull("items", keys, return_mask=True)
                assert mask.tolist() == [True, True]
            many = client.pull_many({"items": [-7, 6]}, return_mask=True)
            assert many["items"][1].tolist() == [True, False]
            puller = petps_client.Puller(client, ["items"])
            assert (puller.pull({"items": [-7]}).rows["items"] == 1).all()
            assert client.erase("items", [-7]).deleted == 1
        with petps_client.connect(url) as client:
            _, mask = client.pull("items", np.array([5], np.int64), return_mask=True)
            assert mask.all(), "integers from 0 on may have any dtype"
            for negative in ([-7], np.array([-7], np.int64)):
                with pytest.raises(petps_client.errors.InvalidArgument) as error:
                    client.pull("items", negative)
                assert "keys[0] is -7" in str(error.value)
                assert "signed_keys=True" in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("serve", "petps://127.0.0.1:7070"), "POOL"),
        (("serve", "--config", "s3://bucket/petps.toml"), "CONFIG"),
        (("config", "check", "https://host/petps.toml"), "FILE"),
        (("export", "POOL", "s3://bucket/base"), "FOLDER"),
        (("restore", "backups", "petps://127.0.0.1:7070"), "POOL"),
        (("checkpoint", "restore", "store", "s3://bucket/base"), "FOLDER"),
        (("token", "list", "--file", "s3://bucket/access.json"), "FILE"),
        (("pull", "POOL", "items", "1", "--out", "s3://bucket/o.npz"), "OUT"),
        (("report", "POOL", "--output", "s3://bucket/r.tar.gz"), "OUTPUT"),
        (("plan", "--rows", "1k", "--dim", "4", "--folder", "s3://bucket/x"), "FOLDER"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else None,
)
def test_a_url_is_no_path(
    run: Command, pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...], name: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    given = [str(pool) if argument == "POOL" else argument for argument in arguments]
    message = run.fails(2, *given)
    (url,) = (argument for argument in given if "://" in argument)
    assert f"{name} takes a path of this machine, got the URL {url}" in message
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("url", ["petps://127.0.0.1:7070", "s3://bucket/my.pool"])
def test_create_takes_no_url(run: Command, url: str) -> None:
    message = run.fails(2, "create", url, "--table", "items:4:f32:10")
    assert url in message
    assert "path" in message


@pytest.mark.parametrize(
    "arguments",
    [
        ("backup", "POOL", "petps://127.0.0.1:7070"),
        ("restore", "kafka://h:1/t", "new.pool"),
        ("checkpoint", "list", "petps://127.0.0.1:7070"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_what_is_no_store(run: Command, pool: Path, arguments: tuple[str, ...]) -> None:
    given = [str(pool) if argument == "POOL" else argument for argument in arguments]
    message = run.fails(2, *given)
    (url,) = (argument for argument in given if "://" in argument)
    assert url in message
    assert "a store is a folder, or a URL that fsspec knows" in message


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("petps://127.0.0.1:7070", "is a server, which is no source"),
        ("petps+tls://h:1/m", "is a server"),
        ("kafka://h:1/t", "is a log, which servers follow"),
        ("memory://no/such.parquet", "no such file"),
        ("memory://no/such.npz", "no such file"),
        ("memory://no/such-store", "a URL names a checkpoint store, a base, or a file"),
        ("odd://x/y.npz", "odd"),
    ],
)
def test_what_is_no_source(run: Command, pool: Path, source: str, text: str) -> None:
    result = run._run("load", str(pool), "items", source)
    assert result.exit_code in (2, 3), result.output
    assert source in result.stderr
    assert text in result.stderr
