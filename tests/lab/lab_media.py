"""Tests of the media contract on real mappings: fsdax with MAP_SYNC, and device-DAX."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.conftest import Suite
from tests.lab.guest import DEVDAX, FSDAX, Guest

pytestmark = pytest.mark.timeout(600)


def test_media_on_fsdax(share: Path, suite: Suite) -> None:
    guest = Guest(share, medium="fsdax", medium_bytes=256 << 20)
    suite(guest, "test_media", "*/dax", environment={"PETPS_TEST_DAX_FOLDER": str(FSDAX)})


def test_media_on_device_dax(share: Path, suite: Suite) -> None:
    guest = Guest(share, medium="devdax", medium_bytes=64 << 20)
    suite(guest, "test_media", "*/device", environment={"PETPS_TEST_DAX_DEVICE": str(DEVDAX)})
