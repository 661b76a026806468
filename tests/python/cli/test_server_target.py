"""petps load, pull, push and status work against a running server as they do on a pool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petps import config
from petps.server import Serving
from tests.python.cli.conftest import COUNT, DIM, Command, expected, save_rows


def settings(path: Path, **tables: dict[str, Any]) -> config.Config:
    given: dict[str, dict[str, Any]] = {
        "pool": {"path": path},
        "server": {"port": 0, "http": False, "grpc_port": 0},
        "tables": tables,
    }
    return config.merge(None, given, "test")


@pytest.fixture
def url(pool: Path) -> Iterator[str]:
    with Serving(settings(pool)) as serving:
        yield f"petps://127.0.0.1:{serving.port}"


def test_load_pull_and_push_through_a_server(run: Command, url: str, tmp_path: Path) -> None:
    save_rows(tmp_path / "rows.npz")
    report = run.json("load", url, "items", tmp_path / "rows.npz")
    assert (report["rows"], report["inserted"]) == (COUNT, COUNT)
    keys = np.arange(COUNT, dtype=np.uint64)
    np.save(tmp_path / "all.npy", keys)
    files = ("--keys", tmp_path / "all.npy", "--out", tmp_path / "o.npy")
    run("pull", f"{url}/default", "items", *files)
    assert (np.load(tmp_path / "o.npy") == expected(keys)).all()
    report = run.json("push", url, "items", "5=1,2,3,4", "--delete", 6, "--delete", 10**9)
    assert report == {"table": "items", "inserted": 0, "updated": 1, "deleted": 1, "absent": 1}
    report = run.json("pull", url, "items", 5, 6, "--model", "default@0")
    assert [row["found"] for row in report["rows"]] == [True, False]
    assert report["rows"][0]["row"] == [1, 2, 3, 4]


def test_status_of_a_server(run: Command, url: str) -> None:
    report = run.json("status", url)
    assert report["tables"][0]["dtype"] == "f32"
    assert report["tables"][0]["instance"] == "default@0"
    output = run("status", url)
    for text in ("server", "items", "4 x f32", "connections"):
        assert text in output
    pages = report["pool"].get("sampled_pages")
    if pages is None:
        pytest.skip("this kernel does not say which pages a mapping has (Linux 6.7)")
    assert 0 <= pages["huge_bytes"] <= pages["mapped_bytes"]
    assert pages["mapped_bytes"] > 0, "the server has written rows"
    assert "of what is mapped is on huge pages" in output


def test_a_server_refuses_bad_requests(run: Command, url: str, tmp_path: Path) -> None:
    assert "items" in run.fails(3, "pull", url, "users", 1)
    message = run.fails(3, "pull", f"{url}/m", "items", 1)
    assert "m" in message
    assert "default" in message
    message = run.fails(2, "pull", f"{url}/m", "items", 1, "--model", "n")
    assert "names model 'm', but --model is 'n'; name one model" in message
    message = run.fails(2, "push", url, "items", "5=1,2")
    assert f"table 'items' has dim {DIM}, but key 5 has 2 numbers" in message
    message = run.fails(2, "push", url, "items", "5=1,2,3,inf")
    assert "NaN or infinity" in message or "finite" in message
    np.savez(tmp_path / "a.npz", keys=[1], rows=np.ones((1, 3), np.float32))
    message = run.fails(2, "load", url, "items", tmp_path / "a.npz")
    assert "has rows of dim 3" in message
    for bad in ("petps://", "petps://127.0.0.1:x", "petps://127.0.0.1:99999"):
        message = run.fails(2, "status", bad)
        assert bad.removeprefix("petps://") in message


def test_a_full_table_of_a_server_refuses_new_keys(run: Command, tmp_path: Path) -> None:
    path = tmp_path / "small"
    run("create", path, "--table", f"items:{DIM}:f32:100")
    save_rows(tmp_path / "rows.npz")
    with Serving(settings(path)) as serving:
        url = f"petps://127.0.0.1:{serving.port}"
        message = run.fails(5, "load", url, "items", tmp_path / "rows.npz")
    assert "after 0 rows" in message
    assert "full" in message
    assert "900" in message
