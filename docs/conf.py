"""Configuration of Sphinx: `make docs` builds the site into build/docs, and fails on a warning."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "client" / "python"), str(ROOT / "docs")]

import generate  # noqa: E402  # in this folder

project = "petps"
release = version = generate.version()
extensions = [
    "breathe",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.graphviz",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
# The last two are included by explanation/measurements.md.
exclude_patterns = [
    "decisions/template.md",
    "reference/generated/measured.md",
    "reference/generated/peers.md",
]
html_theme = "furo"
html_title = f"petps {release}"
graphviz_output_format = "svg"
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
# Documents beside the code are included, with links that Sphinx cannot follow to source files.
suppress_warnings = ["myst.xref_missing", "myst.header"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_mock_imports = ["torch"]
breathe_projects = {"petps_client": str(ROOT / "build" / "doxygen" / "xml")}
breathe_default_project = "petps_client"


def leave_out_sign(_app: Any, what: str, *arguments: Any) -> None:
    """Cut a package's docstring before its sign (Owns, ...), which is for developers."""
    lines: list[str] = arguments[-1]
    starts = [number for number, line in enumerate(lines) if line.startswith("Owns:")]
    if what == "module" and starts:
        del lines[starts[0] :]


def setup(app: Any) -> None:
    """Write the generated pages before Sphinx reads the sources."""
    app.connect("autodoc-process-docstring", leave_out_sign)
    generate.write_pages(ROOT / "docs" / "reference" / "generated")
