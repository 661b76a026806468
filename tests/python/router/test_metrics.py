"""The metrics of a router, and the page that documents them."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from petps import _native
from petps.router.metrics import RouterMetrics

PAGE = Path(__file__).parents[3] / "docs/reference/router.md"


def test_every_metric_is_documented() -> None:
    router = _native.Router.start(servers="petps://127.0.0.1:1", port=0)
    try:
        metrics = RouterMetrics(
            router.stats,
            is_ready=lambda: True,
            is_insecure=lambda: False,
            tls=lambda: {"error": "", "expires_at": 1.0},
            grpc=lambda: {"error": "", "restarts": 0},
        )
        text, _ = metrics.text("")
    finally:
        router.stop()
    families = {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in text_string_to_metric_families(text.decode())
        if family.name.startswith("petps_")
    }
    documented = {
        name: (kind, meaning)
        for name, kind, meaning in re.findall(
            r"^\| `(petps_\w+)` \| (\w+) \| [^|]*\| (.*) \|$", PAGE.read_text(), re.MULTILINE
        )
    }
    assert documented == {
        name: (family.type, family.documentation) for name, family in families.items()
    }
