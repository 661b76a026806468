"""The pages of the reference that are made from the code: they cannot say anything else than it.

`python docs/generate.py FOLDER` writes them; `make docs` calls it through conf.py.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from peers import draw_peers, peers_page  # in this folder

ROOT: Final = Path(__file__).resolve().parent.parent
PUBLISHED: Final = ROOT / "bench" / "published"  # what `make bench` measured


def version() -> str:
    """Return the version of pyproject.toml."""
    match = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert match is not None
    return match[1]


def write_pages(folder: Path) -> None:
    """Write all generated pages into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {
        "command-line.md": command_line(),
        "configuration.md": configuration(),
        "measured.md": measured(),
        "peers.md": peers_page(PUBLISHED),
    }
    draw_ratios(folder / "measured.svg")
    draw_peers(folder / "peers.svg", PUBLISHED)
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:  # unchanged pages are not built again
            path.write_text(text)


def command_line() -> str:
    """Return the page with every command's help."""
    import typer

    from petps.cli.app import app

    lines = ["# Command line", "", _plain(app.info.help or ""), "", app.info.epilog or "", ""]
    for name, command in _commands(typer.main.get_command(app), "petps"):
        lines += [f"## {name}", "", _plain(command.help or ""), ""]
        pieces = command.collect_usage_pieces(typer.Context(command, info_name=name))
        lines += [f"    {' '.join([name, *pieces])}", ""]
        for parameter in command.params:
            lines += _parameter(parameter)
    return "\n".join(lines) + "\n"


def _commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, command in sorted(group.commands.items()):
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from _commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def _parameter(parameter: Any) -> list[str]:
    text = getattr(parameter, "help", None)
    if not text or getattr(parameter, "hidden", False):
        return []
    if parameter.param_type_name == "argument":
        names = parameter.metavar or parameter.name.upper()
    else:
        names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    default = parameter.default
    shown = default not in (None, False, ()) and not callable(default)
    suffix = f" Default: `{default}`." if shown else ""
    return [f"`{names}`", f": {_plain(text)}{suffix}", ""]


def _plain(text: str) -> str:
    """Return a help text as Markdown: rich's bold, and examples as code blocks."""
    text = re.sub(r"\[/?bold\]", "**", text)
    blocks = [block.strip() for block in re.split(r"\n\s*\n", text)]
    return "\n\n".join(
        f"```sh\n{block}\n```" if block.startswith("petps ") else block for block in blocks
    )


def configuration() -> str:
    """Return the page with every key of the configuration file."""
    from petps.config import keys_markdown

    return keys_markdown()


def measured() -> str:
    """Return the published figures, each with its limit and its target."""
    from bench.report import PARTS
    from bench.targets import bounds, missed

    config = json.loads((PUBLISHED / "config.json").read_text())
    again = [f"`{name}`" for name in config["measured_again"]]
    left_out = [f"`{name}`" for name, _ in PARTS if name not in config["part_seconds"]]
    joined: dict[str, list[str]] = {}
    for name, revision in config.get("joined", {}).items():
        joined.setdefault(revision, []).append(f"`{name}`")
    notes = [
        f"{text}: {', '.join(parts)}."
        for text, parts in (
            *(
                (f"Measured in a run of its own, at revision {revision}", parts)
                for revision, parts in joined.items()
            ),
            ("Measured again in this run, because the machine was busy the first time", again),
            ("Not measured in this run", left_out),
        )
        if parts
    ]
    lines = [
        f"The figures of `make bench` at revision {config['revision']}, on {config['processors']}",
        f"processors ({config['cpu']}), Linux {config['kernel'].split('-')[0]}. Where two media",
        "are measured, a figure without `.dram` is on a file. The plot shows the ratio of each",
        "figure to its limit; a bar is its target, and a red point misses it. Peers follow below,",
        "and `scale.*`, which compares numbers of threads, is not in the plot.",
        *notes,
        "",
        "![Ratio of each figure to its limit, with its target](measured.svg)",
        "",
        "| figure | value | ratio | to | target |",
        "|---|---|---|---|---|",
    ]
    for result in _published():
        if result["name"].startswith("peers."):  # see peers.py
            continue
        ratio = "" if result["ratio"] is None else f"{result['ratio']:.2f}"
        value = f"{_figure(result['value'])} {result['unit']}"
        target = bounds(result) + (" **missed**" if missed(result) else "")
        lines.append(
            f"| `{result['name']}` | {value} | {ratio} | {result['ratio_to'] or ''} | {target} |"
        )
    return "\n".join(lines) + "\n"


def _published() -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = json.loads((PUBLISHED / "results.json").read_text())
    return results


def _figure(value: float) -> str:
    """Return a value with three digits, and millions as M."""
    if value >= 1e6:
        return f"{value / 1e6:.3g} M"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def draw_ratios(path: Path) -> None:
    """Draw the ratio of each published figure to its limit, and its target."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "petps"  # the same figures give the same file
    from matplotlib import pyplot

    from bench.targets import TARGETS, missed

    shown = [
        result
        for result in reversed(_published())
        if result["ratio"] is not None and not result["name"].startswith(("peers.", "scale."))
    ]
    figure, axes = pyplot.subplots(figsize=(8, 0.28 * len(shown) + 1), layout="constrained")
    for at, result in enumerate(shown):
        colour = "tab:red" if missed(result) else "tab:blue"
        axes.plot(result["ratio"], at, "o", color=colour)
        field, bound, _ = TARGETS.get(result["name"], ("", 0.0, True))
        if field == "ratio":
            axes.plot([bound, bound], [at - 0.4, at + 0.4], color="0.4", linewidth=2)
    axes.axvline(1, color="0.8", zorder=0)
    axes.set_yticks(range(len(shown)), [result["name"] for result in shown])
    axes.set_xlim(left=0)
    axes.set_ylim(-0.7, len(shown) - 0.3)
    axes.set_xlabel("ratio to the limit (bar: target)")
    axes.grid(axis="x", color="0.92")
    axes.set_axisbelow(True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
