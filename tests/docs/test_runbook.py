"""The runbook: a page for each alert, each page in the index, and the same parts in each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.docs.pages import ROOT

RUNBOOK: Final = ROOT / "docs" / "runbook"
ERRORS: Final = ROOT / "docs" / "reference" / "errors"
RULES: Final = ROOT / "deploy" / "prometheus" / "petps.rules.yml"
PARTS: Final = [
    "What it means",
    "How bad",
    "What to look at",
    "What to do",
    "What not to do",
    "How to know that it is over",
    "How to keep it from happening",
]
# Pages of work that is planned, not of something that has gone wrong.
PLANNED: Final = {"capacity", "backup-drill", "move-pool"}
PAGES: Final = sorted(path for path in RUNBOOK.glob("*.md") if path.name != "index.md")


def page_of(alert: str) -> str:
    """Return the name of an alert's page: that of PetpsTableFull is table-full."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", alert.removeprefix("Petps")).lower()


def alerts_of(text: str) -> dict[str, str]:
    """Return the page that each alert of the index links, by the alert."""
    return dict(
        re.findall(r"^\| `(Petps\w+)` \| \[[^\]]+\]\(([\w-]+)\.md\) \|", text, re.MULTILINE)
    )


INDEX: Final = (RUNBOOK / "index.md").read_text()
ALERTS: Final = alerts_of(INDEX)


def without_code(text: str) -> str:
    """Return the text without fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_all_parts_in_order(page: Path) -> None:
    headings = re.findall(r"^## (.+)$", without_code(page.read_text()), re.MULTILINE)
    if page.stem in PLANNED:
        assert headings
    else:
        assert headings == PARTS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_in_the_index(page: Path) -> None:
    links, tree = INDEX.split("```{toctree}")
    assert f"({page.name})" in links
    assert page.stem in tree.split()


@pytest.mark.parametrize("alert", sorted(ALERTS))
def test_an_alert_has_its_page_which_names_it(alert: str) -> None:
    assert ALERTS[alert] == page_of(alert)
    assert f"Alert `{alert}`:" in (RUNBOOK / f"{page_of(alert)}.md").read_text()


def test_a_page_names_no_alert_that_the_index_lacks() -> None:
    named = {
        alert
        for page in PAGES
        for alert in re.findall(r"^Alert `(\w+)`", page.read_text(), re.MULTILINE)
    }
    assert named == set(ALERTS)


def test_the_alerts_are_those_of_the_rules() -> None:
    rules = RULES.read_text()
    assert set(re.findall(r"- alert: (\w+)", rules)) == set(ALERTS)
    urls = re.findall(r"runbook_url: (\S+)", rules)
    assert len(urls) == len(ALERTS)
    assert {Path(url).stem for url in urls} == set(ALERTS.values())


def test_each_error_code_has_a_line_on_the_page_of_errors() -> None:
    text = (RUNBOOK / "errors-high.md").read_text()
    codes = [path.stem for path in ERRORS.glob("*.md") if path.stem != "index"]
    assert [code for code in codes if f"reference/errors/{code}.md)" not in text] == []


@pytest.mark.parametrize(
    ("alert", "page"),
    [("PetpsDown", "down"), ("PetpsTableNearlyFull", "table-nearly-full")],
)
def test_the_name_of_a_page(alert: str, page: str) -> None:
    assert page_of(alert) == page
