"""A test that needs a tool which is not installed is skipped, with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.tools import NotAvailable


def _skip_without_tool() -> Iterator[None]:
    try:
        return (yield)
    except NotAvailable as reason:
        pytest.skip(str(reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    """Skip a test whose fixture raises NotAvailable."""
    return (yield from _skip_without_tool())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip a test that raises NotAvailable."""
    return (yield from _skip_without_tool())
