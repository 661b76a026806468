"""The status page in a real browser: what it shows, for whom, and what it never does."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import petps_client
import pytest
from playwright.sync_api import Page, expect

import petps
from petps import config
from petps.server import Serving
from petps.server.access_file import AccessFile, Entry, hash_of
from tests.page.conftest import PHONE, SECONDS, WIDE, FakeServer, Open, Seen, serve

HOSTILE = "<img src=x onerror=\"document.title='taken'\">'&amp;\"</script>"
TOKEN = "a_token_of_an_admin"


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_answers(fake: FakeServer, page: Page, number: int = 2) -> None:
    """Wait until the page has asked again, and has shown the answers."""
    goal = fake.reports.asked + number
    deadline = time.monotonic() + SECONDS
    while fake.reports.asked < goal:
        assert time.monotonic() < deadline
        page.wait_for_timeout(50)  # lets the events of the page come


def break_things(status: dict[str, Any]) -> None:
    """Let a partition stop, a table find nothing, and a member be away."""
    for stopped in (2, 3):
        status["ingest"]["partitions"][stopped] |= {
            "state": "full", "reason": "table 'ads' is full (capacity 1,000)", "lag_seconds": 812.0,
        }  # fmt: skip
    status["unready"] = "partition 2 is full: table 'ads' is full (capacity 1,000)"
    status["tables"][0]["rows"] = 1000
    number = str(status["tables"][2]["id"])
    status["recent"]["tables"][number] |= {"hit_rate": 0.31, "misses": 18_630_000}
    status["recent"]["latest"]["tables"][number] = {"keys": 4_302_118, "misses": 4_302_118}
    status["members"] = [
        {"address": "10.0.0.2:7070", "partitions": "0-1", "answers": True, "fault": "",
         "asked_at": time.time()},
        {"address": "10.0.0.3:7070", "partitions": "2-3", "answers": False,
         "fault": "no answer within 2 s", "asked_at": time.time()},
    ]  # fmt: skip
    status["incidents"] = ["peer 10.0.4.7:40112: the frame's signature is wrong"]


# ---- what is wrong


def test_a_healthy_server_says_since_when_nothing_is_wrong(
    fake: FakeServer, open_page: Open, seen: Seen
) -> None:
    page = open_page(fake.url)
    expect(page.locator("#headline")).to_have_text(re.compile("^Nothing is wrong since 20.* UTC.$"))
    expect(page.locator("#now")).to_have_class("good")
    expect(page.locator("#problems li")).to_have_count(0)
    expect(page.locator("#age")).to_contain_text("answered")
    wait_for_answers(fake, page)
    assert seen.complaints == []  # nor does the policy refuse anything
    assert {re.sub(r"/[^/]*$", "/", url) for url in seen.urls} == {fake.url}


def test_the_worst_is_on_top_with_links_to_the_remedies(
    fake: FakeServer, open_page: Open, seen: Seen
) -> None:
    fake.reports.changes.append(break_things)
    page = open_page(fake.url)
    expect(page.locator("#headline")).to_have_text(
        "Partitions 2 to 3 are full: table 'ads' is full (capacity 1,000), and there are 4 more "
        "problems."
    )
    expect(page.locator("#now")).to_have_class("critical")
    marks = page.locator("#problems .mark").all_inner_texts()
    assert marks == ["critical", "critical", "critical", "warning", "notice"]
    misses = page.locator("#problems li", has_text="all of the last 4,302,118 keys are missing")
    expect(misses).to_have_count(1)
    expect(page).to_have_title("(5) petps 127.0.0.1:7070")
    row = page.locator("#tables tbody tr", has=page.locator("th", has_text="users")).first
    expect(row.locator("td.bad")).to_contain_text("all missing now")
    link = page.locator("#problems li").first.get_by_role("link")
    link.click()
    expect(page.locator("body")).to_contain_text("# A table is full")
    assert seen.complaints == []


def test_a_screen_reader_hears_a_sentence_once(fake: FakeServer, open_page: Open) -> None:
    lag = iter(range(60, 10_000))

    def late(status: dict[str, Any]) -> None:
        status["unready"] = f"partition 3 is {next(lag)}.0 s behind (ready_lag_seconds = 60)"

    page = open_page(fake.url)
    page.evaluate(
        "() => { window.heard = []; new MutationObserver(() => heard.push("
        "document.getElementById('announcement').textContent)).observe("
        "document.getElementById('announcement'), {childList: true}); }"
    )
    fake.reports.changes.append(late)
    expect(page.locator("#headline")).to_contain_text("partition 3 is")
    first = page.locator("#headline").inner_text()
    expect(page.locator("#headline")).not_to_have_text(first)  # the number grows
    assert len(page.evaluate("heard")) == 1
    fake.reports.changes.clear()
    expect(page.locator("#headline")).to_contain_text("Nothing is wrong")
    assert [text.split()[0] for text in page.evaluate("heard")] == ["The", "Nothing"]


def test_the_page_says_when_the_server_answers_no_more(fake: FakeServer, open_page: Open) -> None:
    page = open_page(fake.url)
    expect(page.locator("#now")).to_have_class("good")
    port = fake.door.port
    fake.door.close()
    headline = page.locator("#headline")
    expect(headline).to_contain_text(
        re.compile(r"The server does not answer since \d\d:\d\d:\d\d UTC \(\d+ s\).*from then")
    )
    expect(page.locator("#now")).to_have_class("critical")
    expect(page.locator("#age")).to_have_text(re.compile(r"data is \d+ s old"))
    expect(page.locator("#announcement")).to_contain_text("does not answer")
    old = headline.inner_text()
    expect(headline).not_to_have_text(old)  # the age grows
    fake.door = serve(fake.reports, port)
    expect(page.locator("#now")).to_have_class("good")
    expect(page.locator("#age")).to_contain_text("answered")


def test_a_server_that_hangs_is_seen(fake: FakeServer, open_page: Open) -> None:
    page = open_page(fake.url)
    expect(page.locator("#now")).to_have_class("good")
    fake.reports.can_answer.clear()
    expect(page.locator("#age")).to_have_text(re.compile(r"answered [5-9] s ago"))
    expect(page.locator("#headline")).to_contain_text("nothing within 8 s")
    fake.reports.can_answer.set()
    expect(page.locator("#now")).to_have_class("good")


def test_an_error_of_the_server_is_shown(fake: FakeServer, open_page: Open) -> None:
    page = open_page(fake.url)
    expect(page.locator("#now")).to_have_class("good")

    def refuse(status: dict[str, Any]) -> None:
        from petps.errors import FailedPrecondition

        raise FailedPrecondition("the pool is closed")

    fake.reports.changes.append(refuse)
    expect(page.locator("#headline")).to_contain_text("503: the pool is closed")


# ---- numbers and charts


def test_a_chart_shows_gaps_and_says_its_numbers(fake: FakeServer, open_page: Open) -> None:
    values: list[float | None] = [10.0] * 360
    values[100:130] = [None] * 30
    values[200] = values[202] = None
    fake.reports.series["pulls_per_second"] = values
    page = open_page(fake.url)
    figures = page.locator("#charts figure")
    expect(figures).to_have_count(7)
    drawing = figures.first.locator("svg")
    expect(drawing).to_have_attribute(
        "aria-label",
        "Pulls per second, last 60 minutes: now 10.0, lowest 10.0, highest 10.0, "
        "32 of 360 samples without a value.",
    )
    line, dots = (path.get_attribute("d") or "" for path in drawing.locator("path").all())
    assert line.count("M") == 3  # three pieces
    assert dots.count("M") == 1  # and a value between two gaps
    expect(figures.nth(3)).to_contain_text("p99")
    expect(figures.nth(2).locator(".top")).to_have_text("100.0 %")


def test_charts_without_samples_say_so(fake: FakeServer, open_page: Open) -> None:
    for name in fake.reports.series:
        fake.reports.series[name] = []
    page = open_page(fake.url)
    expect(page.locator("#charts-note")).to_contain_text("The first sample comes 10 s after")
    expect(page.locator("#charts .top").first).to_have_text("no data")


# ---- people


@pytest.fixture
def axe() -> str:
    script = Path(".cache/axe/axe.min.js")
    if not script.is_file():
        pytest.skip("axe-core is not installed (deploy/bootstrap.sh page)")
    return script.read_text()


# axe says so of text that is scrolled out of a table, and of a single digit.
NOT_JUDGED = re.compile("partially obscured by another element|too short to determine")


def faults_of(page: Page, axe: str) -> list[str]:
    """Return what axe found, and what it could not judge, except for the contrast of some text.

    tests/python/server/test_page.py compares all colours.
    """
    page.evaluate(axe)
    result = page.evaluate("axe.run(document, {resultTypes: ['violations', 'incomplete']})")
    return [
        f"{kind}: {fault['id']} ({fault['help']}) at {node['target']}: {node['failureSummary']}"
        for kind in ("violations", "incomplete")
        for fault in result[kind]
        for node in fault["nodes"]
        if fault["id"] != "color-contrast" or not NOT_JUDGED.search(node["failureSummary"])
    ]


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("state", ["well", "broken", "dialog", "lost"])
def test_axe_has_no_finding(
    fake: FakeServer, open_page: Open, axe: str, scheme: str, size: Any, state: str
) -> None:
    if state == "broken":
        fake.reports.changes.append(break_things)
    page = open_page(fake.url, scheme=scheme, size=size)
    expect(page.locator("#now")).not_to_have_class("unknown")
    expect(page.locator("#charts figure")).to_have_count(7)
    if state == "dialog":
        page.get_by_role("button", name="Switch ctr to ctr@2").click()
        page.get_by_role("button", name="Switch", exact=True).click()  # the error shows too
        expect(page.locator("#switch-error")).not_to_be_empty()
    if state == "lost":
        fake.door.close()
        expect(page.locator("#headline")).to_contain_text("does not answer")
        expect(page.locator("#charts-note")).to_contain_text("are old", timeout=1e3 * SECONDS)
    faults = faults_of(page, axe)
    assert not faults, "\n".join(faults)


def test_axe_would_find_something(fake: FakeServer, open_page: Open, axe: str) -> None:
    page = open_page(fake.url)
    expect(page.locator("#now")).to_have_class("good")
    page.evaluate("() => document.getElementById('token').previousElementSibling.remove()")
    page.evaluate("() => document.getElementById('switch').showModal()")
    assert any("label" in fault for fault in faults_of(page, axe))


@pytest.mark.parametrize("state", ["well", "broken", "hostile"])
def test_a_phone_needs_no_sideways_scrolling(fake: FakeServer, open_page: Open, state: str) -> None:
    if state != "well":
        fake.reports.changes.append(break_things)
    if state == "hostile":
        fake.reports.changes.append(name_badly)
    page = open_page(fake.url, size=PHONE)
    expect(page.locator("#charts figure")).to_have_count(7)
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    assert page.locator("#headline").bounding_box() is not None


def test_the_keyboard_reaches_everything_and_updates_keep_the_focus(
    fake: FakeServer, open_page: Open
) -> None:
    fake.reports.changes.append(break_things)
    page = open_page(fake.url)
    expect(page.locator("#problems li")).to_have_count(5)
    reached = []
    for _ in range(40):
        page.keyboard.press("Tab")
        name = page.evaluate(
            "document.activeElement === document.body ? '' : "
            "document.activeElement.textContent.trim().slice(0, 30) || document.activeElement.id"
        )
        if not name:
            break
        reached.append(name)
    assert reached[0] == "Skip to what is wrong"
    assert sum("Read runbook" in name for name in reached) >= 3
    assert any("Switch ctr to ctr@2" in name for name in reached)
    button = page.get_by_role("button", name="Switch ctr to ctr@2")
    button.focus()
    page.evaluate("() => { window.focused = document.activeElement; }")
    link = page.locator("#problems a").nth(1)
    wait_for_answers(fake, page)
    assert page.evaluate("document.activeElement === window.focused")
    link.focus()
    fake.reports.changes.insert(0, lambda status: status.update(insecure=True))  # one more line
    expect(page.locator("#problems li")).to_have_count(6)
    assert page.evaluate("document.activeElement.tagName") == "A"
    page.locator(".wide").first.focus()
    page.keyboard.press("ArrowRight")
    wait_for_answers(fake, page)
    assert page.evaluate("document.activeElement.className") == "wide"


def test_the_parts_of_the_page_have_names(fake: FakeServer, open_page: Open) -> None:
    page = open_page(fake.url)
    expect(page.locator("#now")).to_have_class("good")
    for role in ("banner", "main", "contentinfo"):
        expect(page.get_by_role(role)).to_have_count(1)
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(h => h.tagName)")
    assert levels[0] == "H1"
    assert set(levels[1:]) == {"H2"}
    for table in page.locator("table").all():
        assert table.locator("caption").inner_text(timeout=1000) or table.is_hidden()
        assert table.locator("thead th[scope=col]").count() or table.is_hidden()


# ---- other people's names


def name_badly(status: dict[str, Any]) -> None:
    old = status["instances"][0]["name"]
    for table in status["tables"]:
        table["name"] = HOSTILE + table["name"]
        if table["instance"] == old:
            table["instance"] = HOSTILE
    status["instances"][0] |= {"name": HOSTILE, "model": HOSTILE, "aliases": [HOSTILE]}
    status["aliases"] = {HOSTILE: status["instances"][0]["id"]}
    status["previous_of_aliases"] = {HOSTILE: status["instances"][1]["id"]}
    status["instances"][1] |= {"model": HOSTILE}
    status["ingest"] |= {"model": HOSTILE, "log": HOSTILE}
    status["ingest"]["partitions"][2] |= {"state": "stale", "reason": HOSTILE}
    status["incidents"] = [f"peer {HOSTILE}: bad frame", "__proto__", "constructor"]
    status["pool"]["path"] = status["host"] = HOSTILE
    status["members"] = [
        {"address": HOSTILE, "partitions": HOSTILE, "answers": False, "fault": HOSTILE,
         "asked_at": 1.0}
    ]  # fmt: skip


def test_hostile_names_are_text(fake: FakeServer, open_page: Open, seen: Seen) -> None:
    fake.reports.changes += [break_things, name_badly]
    page = open_page(fake.url)
    expect(page.locator("#tables tbody tr")).to_have_count(8)
    expect(page.locator("#headline")).to_contain_text(HOSTILE)
    expect(page.locator("#events")).to_contain_text(HOSTILE)
    page.get_by_role("button", name=f"Switch {HOSTILE} back to ctr@2").click()
    expect(page.locator("#switch-what")).to_contain_text(HOSTILE)
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 1
    assert "taken" not in page.title().split("petps")[0]
    assert seen.complaints == []
    assert all(url.startswith(fake.url) for url in seen.urls)


# ---- a real server, and its switch


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Serving]:
    path = tmp_path / "pool"
    with petps.create(path, durability="process") as pool:
        pool.create_model("ctr")
        pool.create_table("items", dim=4, capacity=1000, model="ctr")
        pool.push("items", np.arange(100, dtype=np.uint64), np.ones((100, 4), np.float32))
        first = pool.status()["instances"][0]["name"]
        pool.create_instance("ctr@2")
        pool.switch_alias("ctr", first)
    file = AccessFile(tmp_path / "access.json")
    for name, roles in (("admin", ["admin", "read"]), ("reader", ["read"])):
        token = TOKEN if name == "admin" else f"{TOKEN}_of_a_reader"
        entry = Entry(
            name=name,
            token_sha256=hash_of(token),
            roles=roles,  # type: ignore[arg-type]
            models="*",
        )
        file.add(entry)
    sections: dict[str, Any] = {
        "pool": {"path": path},
        "server": {"port": 0, "http_port": 0, "grpc_port": 0},
        "access": {"file": tmp_path / "access.json"},
    }
    with Serving(config.merge(None, sections, "test"), log=lambda line: None) as serving:
        yield serving


def open_real(serving: Serving, open_page: Open) -> Page:
    return open_page(f"http://127.0.0.1:{serving.http_port}/", token=f"{TOKEN}_of_a_reader")


def alias_of(serving: Serving) -> str:
    return next(
        str(instance["name"])
        for instance in serving.status()["instances"]
        if "ctr" in instance["aliases"]
    )


def test_a_person_switches_and_switches_back_by_keyboard(real: Serving, open_page: Open) -> None:
    page = open_real(real, open_page)
    first = alias_of(real)
    button = page.get_by_role("button", name="Switch ctr to ctr@2")
    button.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Switch ctr to ctr@2?")
    expect(dialog).to_be_visible()
    expect(dialog).to_contain_text(f"instead of {first} (version 0, run 0, 100 rows)")
    expect(page.locator("#token")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#switch-error")).to_have_text("Type a token first.")
    page.keyboard.type(f"{TOKEN}_of_a_reader")
    page.keyboard.press("Enter")
    expect(page.locator("#switch-error")).to_contain_text("Nothing was switched")
    assert alias_of(real) == first
    page.locator("#token").fill(TOKEN)
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    expect(page.locator("#switched")).to_have_text(f"ctr names ctr@2 now, before {first}.")
    assert alias_of(real) == "ctr@2"
    page.get_by_role("button", name=f"Switch ctr back to {first}").click()
    expect(page.locator("#token")).to_have_value("")  # it is kept nowhere
    page.keyboard.press("Escape")
    expect(page.locator("#switch")).to_be_hidden()
    assert alias_of(real) == "ctr@2"
    page.get_by_role("button", name=f"Switch ctr back to {first}").click()
    page.locator("#token").fill(TOKEN)
    page.get_by_role("button", name="Switch", exact=True).click()
    expect(page.locator("#switched")).to_have_text(f"ctr names {first} now, before ctr@2.")
    kept = page.evaluate(
        "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie]) + "
        "document.documentElement.outerHTML"
    )
    assert TOKEN not in kept
    assert page.locator("#token").input_value() == ""


def test_a_switch_that_somebody_else_made_meanwhile_is_refused(
    real: Serving, open_page: Open
) -> None:
    from petps.admin.client import AdminClient

    page = open_real(real, open_page)
    first = alias_of(real)
    page.get_by_role("button", name="Switch ctr to ctr@2").click()
    with AdminClient(real.status()["pool"]["path"]) as client:
        client.switch_alias("ctr", "ctr@2")
    page.locator("#token").fill(TOKEN)
    page.get_by_role("button", name="Switch", exact=True).click()
    expect(page.locator("#switch-error")).to_contain_text("was switched meanwhile")
    assert first != alias_of(real) == "ctr@2"


def test_misses_of_a_real_table_are_seen(real: Serving, open_page: Open) -> None:
    page = open_real(real, open_page)
    url = f"petps://127.0.0.1:{real.port}/ctr"
    with petps_client.connect(url, token=f"{TOKEN}_of_a_reader") as client:
        client.pull("items", np.arange(1000, 1500, dtype=np.uint64))
    expect(page.locator("#headline")).to_contain_text("all of the last 500 keys are missing")
    expect(page.locator("#tables td.bad")).to_contain_text("0.0 % – all missing now")
