"""The media contract on real mappings: fsdax with MAP_SYNC, and a device-DAX device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.conftest import Suite
from tests.lab.guest import FSDAX, Guest

pytestmark = pytest.mark.timeout(600)


def test_media_on_fsdax(share: Path, suite: Suite) -> None:
    guest = Guest(share, medium="fsdax", medium_bytes=256 << 20)
    suite(guest, "test_media", "*/dax", environment={"PETPS_TEST_DAX_FOLDER": str(FSDAX)})
