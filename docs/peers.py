"""The part of the measurements that compares petps with its peers: tables and a plot."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
SIDES: Final = {"peers.tcp.": "over TCP", "peers.inprocess.": "in process"}
ACCESSES: Final = {"uniform": "uniform", "zipf099": "Zipf 0.99"}
Result = dict[str, Any]


def peers_page(published: Path) -> str:
    """Return the tables of peers in a published run, or say that the run has none."""
    results = _peers(published)
    if not _pulls(results):
        return (
            "Peers (Redis, memcached, RocksDB, LMDB and hash maps) are not in the published run.\n"
            "`make bench ONLY=peers` measures them.\n"
        )
    lines = [
        "The same rows, keys and requests from petps and from what users would pick instead. A",
        "ratio is the rate of petps over that of the peer; for times it is petps' time over the",
        "peer's, so that less is better. In brackets are the lowest and the highest round. `loads`",
        "and `updates` are ratios too, each peer alone.",
        "",
        "![Rate of petps over the rate of each peer, and times to restart](peers.svg)",
        "",
        *_pull_table(results),
    ]
    for table in (_update_table(results), _restart_table(results)):
        lines += ["", *table] if table else []
    return "\n".join([*lines, "", what_peers_do_better()]) + "\n"


def what_peers_do_better() -> str:
    """Return the paragraph of bench/README.md that says it."""
    text = (ROOT / "bench" / "README.md").read_text()
    match = re.search(r"^What each does better: .+?(?=\n\n)", text, re.MULTILINE | re.DOTALL)
    if match is None:
        raise SystemExit("bench/README.md has no paragraph 'What each does better: ...'")
    return match[0]


def _peers(published: Path) -> list[Result]:
    """Return every configuration of peers in a run."""
    results: list[Result] = json.loads((published / "all.json").read_text())
    return [result for result in results if result["name"].startswith("peers.")]


def _pulls(results: list[Result]) -> dict[str, dict[str, Result]]:
    """Return the results of pulls alone, by name and access."""
    pulls: dict[str, dict[str, Result]] = {}
    for result in results:
        if result["name"].startswith(tuple(SIDES)):
            pulls.setdefault(result["name"], {})[result["access"]] = result
    return pulls


def _peer(name: str) -> str:
    return name.rpartition(".")[2]


def _side(name: str) -> str:
    return next(side for prefix, side in SIDES.items() if name.startswith(prefix))


def _interval(result: Result | None) -> str:
    """Return the ratio with its lowest and highest round."""
    if result is None:
        return ""
    return f"{result['ratio']:.3g} ({result['ratio_low']:.3g} to {result['ratio_high']:.3g})"


def _pull_table(results: list[Result]) -> list[str]:
    from bench.targets import bounds, missed, worst

    lines = [
        "| pulls, ratio to | uniform | Zipf 0.99 | target | loads | updates | memory over rows |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, by_access in _pulls(results).items():
        result = next(iter(by_access.values()))
        (worst_result,) = worst(list(by_access.values()))
        target = bounds(worst_result) + (" **missed**" if missed(worst_result) else "")
        shares = (
            result["petps_load_rows_per_s"] / result["load_rows_per_s"],
            result["petps_update_rows_per_s"] / result["update_rows_per_s"],
        )
        memory = f"{result['memory_over_rows']:.2f} (petps {result['petps_memory_over_rows']:.2f})"
        cells = (
            f"`{_peer(name)}`, {_side(name)}",
            *(_interval(by_access.get(access)) for access in ACCESSES),
            target,
            *(f"{share:.3g}" for share in shares),
            memory,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _by_peer(results: list[Result], prefix: str) -> dict[str, Result]:
    return {
        _peer(result["name"]): result for result in results if result["name"].startswith(prefix)
    }


def _update_table(results: list[Result]) -> list[str]:
    rates = _by_peer(results, "peers.during_updates.")
    delays = _by_peer(results, "peers.p99_during_updates.")
    if not rates:
        return []
    lines = [
        "| pulls during updates, to | rate, ratio | p99, ratio | petps' p99 | the peer's p99 |",
        "|---|---|---|---|---|",
    ]
    for peer, rate in rates.items():
        delay = delays[peer]
        cells = (f"`{peer}`", _interval(rate), _interval(delay))
        lines.append(
            f"| {' | '.join(cells)} | {delay['value']:,.0f} us | {delay['limit']:,.0f} us |"
        )
    return lines


def _restart_table(results: list[Result]) -> list[str]:
    from bench.targets import bounds, missed

    restarts = _by_peer(results, "peers.restart.")
    if not restarts:
        return []
    lines = [
        "| restart after kill -9, to | petps | the peer | ratio | target |",
        "|---|---|---|---|---|",
    ]
    for result in restarts.values():
        target = bounds(result) + (" **missed**" if missed(result) else "")
        lines.append(
            f"| `{result['ratio_to']}` | {result['value']:,.3g} ms | {result['limit']:,.3g} ms "
            f"| {_interval(result)} | {target} |"
        )
    return lines


def draw_peers(path: Path, published: Path) -> None:
    """Draw the ratio to each peer, and the times to restart, on logarithmic scales.

    Write no file if the published run has no peers.
    """
    results = _peers(published)
    pulls = _pulls(results)
    if not pulls:
        path.unlink(missing_ok=True)
        return
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "petps"  # the same figures give the same file
    from matplotlib import pyplot

    restarts = _by_peer(results, "peers.restart.")
    widths = (3, 2) if restarts else (1,)
    figure, panels = pyplot.subplots(
        1,
        len(widths),
        figsize=(9, 0.45 * len(pulls) + 1.2),
        width_ratios=widths,
        layout="constrained",
        squeeze=False,
    )
    _draw_pulls(panels[0][0], pulls)
    if restarts:
        _draw_restarts(panels[0][1], restarts)
    for axes in panels[0]:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.grid(axis="x", color="0.92")
        axes.set_axisbelow(True)
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, 1.18), ncols=3)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _draw_pulls(axes: Any, pulls: dict[str, dict[str, Result]]) -> None:
    from bench.targets import TARGETS

    names = list(reversed(pulls))
    for (access, label), (shift, colour) in zip(
        ACCESSES.items(), ((0.12, "tab:blue"), (-0.12, "tab:orange")), strict=True
    ):
        shown = [
            (at + shift, pulls[name][access])
            for at, name in enumerate(names)
            if access in pulls[name]
        ]
        ratios = [result["ratio"] for _, result in shown]
        below = [result["ratio"] - result["ratio_low"] for _, result in shown]
        above = [result["ratio_high"] - result["ratio"] for _, result in shown]
        heights = [height for height, _ in shown]
        axes.errorbar(ratios, heights, xerr=(below, above), fmt="o", color=colour, label=label)
    label = "target"
    for at, name in enumerate(names):
        if name in TARGETS:
            bound = TARGETS[name][1]
            axes.plot([bound] * 2, [at - 0.4, at + 0.4], color="0.4", linewidth=2, label=label)
            label = ""
    axes.axvline(1, color="0.6", zorder=0)
    axes.set_yticks(range(len(names)), [f"{_peer(name)}, {_side(name)}" for name in names])
    axes.set_xlabel("rate of petps over the peer's")


def _draw_restarts(axes: Any, restarts: dict[str, Result]) -> None:
    peers = list(reversed(restarts))
    heights = range(len(peers))
    axes.plot([restarts[peer]["value"] for peer in peers], heights, "o", label="petps")
    axes.plot([restarts[peer]["limit"] for peer in peers], heights, "s", label="the peer")
    axes.set_yticks(heights, [restarts[peer]["ratio_to"].replace("_", " ") for peer in peers])
    axes.set_ylim(-0.7, len(peers) - 0.3)
    axes.set_xlabel("ms to a pull after kill -9")
