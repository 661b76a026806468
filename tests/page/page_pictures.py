"""Pictures of the status page for docs/how-to/page.md, in build/page.

PETPS_PICTURES=1 replaces the pictures of the documentation by these.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.page.conftest import PHONE, FakeServer, Open
from tests.page.page_browser import break_things

BUILT = Path("build/page")
DOCS = Path("docs/how-to/pictures")
PICTURE_BYTES_MAX = 150_000


def dip(reports: Any) -> None:
    """Let the hour have a restart's gap and the beginning of the trouble."""
    for values in reports.series.values():
        values[150:162] = [None] * 12
    reports.series["hit_rate"][330:] = [0.74] * 30
    reports.series["lag_seconds"][300:] = [10.0 * n for n in range(60)]


@pytest.mark.parametrize(
    ("name", "scheme", "size", "is_broken"),
    [
        ("page-well", "light", {"width": 960, "height": 790}, False),
        ("page-broken", "light", {"width": 960, "height": 790}, True),
        ("page-dark", "dark", {"width": 960, "height": 790}, True),
        ("page-phone", "dark", PHONE, True),
        ("page-phone-light", "light", PHONE, False),
    ],
)
def test_take_a_picture(
    fake: FakeServer, open_page: Open, name: str, scheme: str, size: Any, is_broken: bool
) -> None:
    dip(fake.reports)
    if is_broken:
        fake.reports.changes.append(break_things)
    page = open_page(fake.url, scheme=scheme, size=size)
    expect(page.locator("#charts figure")).to_have_count(7)
    BUILT.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=BUILT / f"{name}-whole.png", full_page=True)
    page.screenshot(path=BUILT / f"{name}.png")
    assert (BUILT / f"{name}.png").stat().st_size < PICTURE_BYTES_MAX


def test_take_a_picture_of_the_switch(fake: FakeServer, open_page: Open) -> None:
    page = open_page(fake.url, size={"width": 800, "height": 460})
    page.get_by_role("button", name="Switch ctr to ctr@2").click()
    page.screenshot(path=BUILT / "page-switch.png")


def test_the_pictures_of_the_documentation_are_small() -> None:
    pictures = sorted(DOCS.glob("page-*.png"))
    if os.environ.get("PETPS_PICTURES") == "1":
        for picture in pictures:
            shutil.copy(BUILT / picture.name, picture)
    assert pictures
    assert all(picture.stat().st_size < PICTURE_BYTES_MAX for picture in pictures)
