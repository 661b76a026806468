"""The page's files, its headers, its data, and the switch of an alias by it."""

from __future__ import annotations

import http.client
import json
import re
import threading
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import petps_client
import pytest

import petps
from petps.pool.audited import audit_log_of
from petps.server import Serving
from petps.server.access_file import AccessFile, Entry, hash_of
from petps.server.http import PAGE_FILES, SECURITY_HEADERS
from tests.python.server.conftest import Start

Reply = tuple[int, dict[str, str], str]
ADMIN = "a_token_of_an_admin"
READER = "a_token_of_a_reader"
OTHER = "a_token_of_the_admin_of_another_model"


def request(
    serving: Serving, method: str, path: str, body: bytes | None = None, **headers: str
) -> Reply:
    connection = http.client.HTTPConnection("127.0.0.1", serving.http_port or 0, timeout=30)
    try:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, names)
        reply = connection.getresponse()
        return reply.status, dict(reply.getheaders()), reply.read().decode()
    finally:
        connection.close()


def test_the_page_needs_no_other_site_and_no_code_within(serving: Serving) -> None:
    pages = {path: request(serving, "GET", path) for path in PAGE_FILES}
    for path, (code, headers, body) in pages.items():
        assert code == 200, path
        assert headers["Content-Type"] == PAGE_FILES[path][1]
        without_namespace = body.replace('"http://www.w3.org/2000/svg"', "")
        assert re.findall(r"https?://", without_namespace) == [], path
        assert ".innerHTML" not in body
        assert "insertAdjacentHTML" not in body
    html = pages["/"][2]
    assert "<title>petps</title>" in html
    assert re.findall(r"<script(?![^>]* src=)|<style| style=| on\w+=", html) == []
    scripts = "".join(body for path, (_, _, body) in pages.items() if path.endswith(".js"))
    loaded = set(re.findall(r'(?:src|href|from)[= ]"(/[^"]*)"', html + scripts))
    known = {*PAGE_FILES, "/status.json", "/history.json", "/metrics", "/healthz", "/readyz"}
    assert loaded <= known | {"/docs/how-to/page.md"}
    for path in loaded:
        assert request(serving, "GET", path)[0] == 200, path


def luminance(colour: str) -> float:
    """Return the relative luminance of "#rrggbb" (WCAG 2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_contrast(scheme: str) -> None:
    css = files("petps.server").joinpath("page", "page.css").read_text()
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w{6});", part)) for part in css.split("@media"))
    colours = light if scheme == "light" else dark
    assert set(light) == set(dark)
    pairs = [(text, "ground") for text in ("text", "soft", "link", "bad", "warn")]
    pairs += [(text, "panel") for text in ("text", "soft", "line", "line-two")]
    for severity in ("good", "bad", "warn"):
        pairs += [(text, f"{severity}-ground") for text in ("text", "soft", "link", severity)]
    pairs += [("bad", "warn-ground"), ("warn", "bad-ground")]  # marks of lesser problems
    for text, ground in pairs:
        bright, dim = sorted((luminance(colours[text]), luminance(colours[ground])), reverse=True)
        assert (bright + 0.05) / (dim + 0.05) >= 4.5, (text, ground)


@pytest.mark.parametrize("path", ["/", "/status.json", "/healthz", "/nonsense", "/page.js"])
def test_every_answer_has_strict_headers(serving: Serving, path: str) -> None:
    _, headers, _ = request(serving, "GET", path)
    assert SECURITY_HEADERS.items() <= headers.items()
    policy = dict(
        part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert "unsafe" not in headers["Content-Security-Policy"]


def test_the_status_says_what_is_wrong(start: Start, pool: Path) -> None:
    serving = start()
    status = json.loads(request(serving, "GET", "/status.json")[2])
    assert status["problems"] == []
    assert status["headline"].startswith("Nothing is wrong since ")
    with petps_client.connect(f"petps://127.0.0.1:{serving.port}") as client:
        client.pull("items", np.arange(100, dtype=np.uint64))
        client.push("items", np.arange(900, dtype=np.uint64), np.ones((900, 4), np.float32))
        status = json.loads(request(serving, "GET", "/status.json")[2])
        # `petps status petps://` reads the same, without HTTP.
        native = json.loads(serving._server.status_json())
    assert status["recent"]["counts"]["keys"] == 100
    assert status["recent"]["hit_rate"] == 1
    assert status["recent"]["latency"]["pull"]["p99_us"] > 0
    [problem] = status["problems"]
    assert "is 90 % full" in problem["text"]
    assert status["headline"] == problem["text"] == native["headline"]
    assert native["problems"] == status["problems"]


def test_a_draining_server_says_so_to_all(start: Start) -> None:
    serving = start()
    request(serving, "GET", "/status.json")
    serving._draining = True
    assert request(serving, "GET", "/readyz")[2] == "draining\n"
    status = json.loads(request(serving, "GET", "/status.json")[2])
    assert status["unready"] == "draining"
    assert status["headline"] == "The server is stopping (draining)."
    serving._draining = False


def test_the_history_has_series(serving: Serving) -> None:
    code, headers, body = request(serving, "GET", "/history.json")
    assert (code, headers["Content-Type"]) == (200, "application/json; charset=utf-8")
    report = json.loads(body)
    assert report["seconds"] == 10
    assert report["samples"] == 360
    assert report["series"]["hit_rate"] == []


def test_pages_of_the_docs_can_be_read(serving: Serving) -> None:
    code, headers, body = request(serving, "GET", "/docs/how-to/table-full.md")
    assert (code, headers["Content-Type"]) == (200, "text/plain; charset=utf-8")
    assert body.startswith("# Make room in a table")
    for path in ("how-to/../../README.md", "how-to/none.md", "decisions/index.md", "", "//etc/pwd"):
        assert request(serving, "GET", f"/docs/{path}")[0] == 404


# ---- the switch


@pytest.fixture
def guarded(start: Start, pool: Path, tmp_path: Path) -> Serving:
    """Return a server with an access file and two instances, of which default@2 is not served."""
    with petps.open(pool) as opened:
        opened.create_instance("default@2")
        opened.switch_alias("default", opened.status()["instances"][0]["name"])
    file = AccessFile(tmp_path / "access.json")
    entries: dict[str, tuple[list[str], list[str] | str]] = {
        ADMIN: (["admin"], "*"),
        READER: (["read"], "*"),
        OTHER: (["admin"], ["other"]),
    }
    for token, (roles, models) in entries.items():
        file.add(
            Entry(
                name=token,
                token_sha256=hash_of(token),
                roles=roles,  # type: ignore[arg-type]
                models=models,  # type: ignore[arg-type]
            )
        )
    return start(access={"file": tmp_path / "access.json"})


def aliased(serving: Serving) -> str:
    status = serving.status()
    names = {entry["id"]: entry["name"] for entry in status["instances"]}
    return str(names[status["aliases"]["default"]])


def switch(serving: Serving, token: str = ADMIN, **changes: Any) -> Reply:
    """Send the page's request, with some headers or members of the body changed."""
    host = f"127.0.0.1:{serving.http_port}"
    document = {"alias": "default", "instance": "default@2", "expected": aliased(serving)}
    headers = {
        "Host": host,
        "Origin": f"http://{host}",
        "Content_Type": "application/json",
        "Authorization": f"Bearer {token}",
        "Sec_Fetch_Site": "same-origin",
    }
    for name, value in changes.items():
        (headers if name in headers else document)[name] = value
    body = json.dumps({key: value for key, value in document.items() if value is not None}).encode()
    sent = {name: value for name, value in headers.items() if value is not None}
    return request(serving, "POST", "/switch", body, **sent)


def test_an_admin_switches_and_switches_back(guarded: Serving, pool: Path) -> None:
    first = aliased(guarded)
    code, _, body = switch(guarded)
    assert (code, json.loads(body)) == (
        200, {"alias": "default", "instance": "default@2", "before": first},
    )  # fmt: skip
    assert aliased(guarded) == "default@2"
    assert switch(guarded, instance=first)[0] == 200
    assert aliased(guarded) == first
    path = audit_log_of(pool)
    assert path is not None
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["what"] for line in lines[-2:]] == [
        "switch alias default to default@2", f"switch alias default to {first}",
    ]  # fmt: skip
    assert re.fullmatch(rf"'{ADMIN}' at 127\.0\.0\.1:\d+, by the page", lines[-1]["who"]), lines[-1]
    assert ADMIN not in str([line["what"] for line in lines])


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "no token": ({"Authorization": None}, 401, "Authorization: Bearer"),
    "a browser's password": ({"Authorization": "Basic eDp5"}, 401, "Authorization: Bearer"),
    "a wrong token": ({"token": "wrong"}, 401, "token"),
    "a reader": ({"token": READER}, 403, "admin"),
    "an admin of another model": ({"token": OTHER}, 403, "admin"),
    "another site": ({"Origin": "http://evil.example"}, 403, "own page"),
    "a page without an origin": ({"Origin": "null"}, 403, "own page"),
    "no origin": ({"Origin": None}, 403, "own page"),
    "a rebound name": ({"Sec_Fetch_Site": "cross-site"}, 403, "own page"),
    "a form": ({"Content_Type": "text/plain"}, 400, "application/json"),
    "no expected": ({"expected": None}, 400, "expected"),
    "a number": ({"instance": 7}, 400, "TEXT"),
    "more members": ({"force": "yes"}, 400, "expected"),
    "switched meanwhile": ({"expected": "default@9"}, 409, "switched meanwhile"),
    "no such instance": ({"instance": "default@9"}, 404, "default@9"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_switch_is_refused(guarded: Serving, name: str) -> None:
    changes, expected_code, text = REFUSED[name]
    first = aliased(guarded)
    code, headers, body = switch(guarded, **changes)
    assert (code, text in body) == (expected_code, True), body
    assert "WWW-Authenticate" not in headers  # the browser must not ask for a password
    assert aliased(guarded) == first
    for token in (ADMIN, READER, OTHER):
        assert token not in body.replace(f"'{token}'", "")  # a grant's name, not the token


def test_without_an_access_file_nobody_switches(start: Start, pool: Path) -> None:
    with petps.open(pool) as opened:
        opened.create_instance("default@2")
        opened.switch_alias("default", opened.status()["instances"][0]["name"])
    serving = start(server={"insecure": True, "port": 0, "http_port": 0, "grpc_port": 0})
    assert serving.status()["can_switch"] is False
    code, _, body = switch(serving)
    assert (code, "has no access file" in body) == (403, True)


@pytest.mark.parametrize(
    ("headers", "body", "code"),
    [
        ({"Content_Length": "5000"}, b"", 413),
        ({"Content_Length": "-1"}, b"", 413),
        ({"Transfer_Encoding": "chunked"}, b"", 413),
        ({}, b"{" * 4000, 401),
    ],
)
def test_a_post_has_a_bound(guarded: Serving, headers: Any, body: bytes, code: int) -> None:
    host = f"127.0.0.1:{guarded.http_port}"
    sent = {"Content_Type": "application/json", "Origin": f"http://{host}"} | headers
    assert request(guarded, "POST", "/switch", body, **sent)[0] == code
    assert request(guarded, "POST", "/status.json", b"", Origin=f"http://{host}")[0] == 405


def test_two_switches_at_once_do_not_both_win(guarded: Serving) -> None:
    first = aliased(guarded)
    codes: list[int] = []
    threads = [
        threading.Thread(target=lambda: codes.append(switch(guarded, expected=first)[0]))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == [200, *[409] * 5]
