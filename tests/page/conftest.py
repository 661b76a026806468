"""Fixtures of the suite of the status page: a browser, and servers for it to show.

`make page` runs it in .venv-page, which has Playwright, with Debian's Chromium.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
from playwright.sync_api import Browser, Page, ViewportSize, expect, sync_playwright

from petps import _native
from petps.server.http import HttpServer
from tests.page.fake import FakeReports

SECONDS: Final = 30.0
expect.set_options(timeout=1e3 * SECONDS)
WIDE: Final[ViewportSize] = {"width": 1200, "height": 900}
PHONE: Final[ViewportSize] = {"width": 360, "height": 740}


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("Chromium is not installed (deploy/bootstrap.sh page)")
    arguments = ["--disable-lcd-text"]  # text in shades of grey makes small pictures
    if os.geteuid() == 0:  # Chromium's own sandbox refuses to run as root
        arguments.append("--no-sandbox")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@dataclass
class Seen:
    """What a page did beside showing itself."""

    complaints: list[str] = field(default_factory=list)  # of the console and of scripts
    urls: list[str] = field(default_factory=list)


Open = Callable[..., Page]


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def open_page(browser: Browser, seen: Seen) -> Iterator[Open]:
    """Return a function that opens a URL in a window of its own."""
    with contextlib.ExitStack() as stack:

        def open_one(
            url: str,
            *,
            scheme: str = "light",
            size: ViewportSize = WIDE,
            token: str | None = None,
        ) -> Page:
            password = None if token is None else {"username": "petps", "password": token}
            context = browser.new_context(
                http_credentials=password,
                color_scheme=scheme,
                viewport=size,
                reduced_motion="reduce",
            )
            context.set_default_timeout(1e3 * SECONDS)
            stack.callback(context.close)
            page = context.new_page()
            page.on("console", lambda message: note(message.type, message.text))
            page.on("pageerror", lambda error: seen.complaints.append(str(error)))
            page.on("request", lambda request: seen.urls.append(request.url))
            page.goto(url)
            return page

        def note(kind: str, text: str) -> None:
            if kind in ("error", "warning"):
                seen.complaints.append(text)

        yield open_one


@dataclass
class FakeServer:
    """The HTTP door over reports that a test changes."""

    reports: FakeReports
    door: HttpServer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.door.port}/"


def serve(reports: FakeReports, port: int = 0) -> HttpServer:
    return HttpServer(
        "127.0.0.1",
        port,
        gate=_native.Gate("open"),
        status=reports.status,
        metrics=lambda accepted: (b"", "text/plain"),
        fault=lambda: None,
        ready=lambda: None,
        shard_map=dict,
        history=reports.history,
    )


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the status of a real server, which the fakes change."""
    from tests.page.fake import status_of_a_real_server

    return status_of_a_real_server(Path(tmp_path_factory.mktemp("real")))


@pytest.fixture
def fake(base: dict[str, Any]) -> Iterator[FakeServer]:
    reports = FakeReports(base)
    server = FakeServer(reports, serve(reports))
    yield server
    server.door.close()
