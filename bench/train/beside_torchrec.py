"""train.torchrec.<link>: petps' modes beside TorchRec, for the same DLRM (NestPipe, Table II).

torchrec_rank.py trains on two ranks, over loopback and over links that the kernel shapes.

It needs PyTorch and TorchRec; bench.lines runs it. Without root only loopback has a result.
"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bench.train.namespaces import shaped, unavailable
from bench.train.shaped import inside
from bench.train.steps import MICRO_BATCHES, ROOT

WORLD: Final = 2
BASELINE: Final = "torchrec"
# By how much the losses of the first steps may differ: the sums have another order.
LOSS_TOLERANCE: Final = 1e-3
Result = dict[str, Any]


def figures(sizes: dict[str, Any]) -> Iterator[Result]:
    """Yield a result for each link."""
    yield _result("loopback", _run(sizes, [(), ()]))
    why = unavailable()
    if why:
        print(f"skipped train.torchrec over shaped links: {why}", file=sys.stderr, flush=True)
        return
    for rate in sizes["mb_per_second"]:
        with shaped(1e6 * rate) as link:
            yield _result(f"{rate}mb_per_second", _run(sizes, inside(link)))


def _run(sizes: dict[str, Any], prefixes: Any) -> list[dict[str, Any]]:
    """Return each rank's line."""
    with tempfile.TemporaryDirectory() as folder:
        settings = json.dumps(
            {"world": WORLD, "micro_batches": MICRO_BATCHES, "seed": 1}
            | sizes
            | {"meeting": f"{folder}/meeting"}
        )
        outputs = [Path(folder) / f"{rank}.out" for rank in range(WORLD)]
        processes = []
        for rank, output in enumerate(outputs):
            command = [sys.executable, "-m", "bench.train.torchrec_rank", str(rank), settings]
            with output.open("w") as file:
                processes.append(
                    subprocess.Popen([*prefixes[rank], *command], cwd=ROOT, stdout=file)
                )
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit("a rank of train.torchrec failed")
        return [json.loads(output.read_text().splitlines()[-1]) for output in outputs]


def _result(link: str, ranks: list[dict[str, Any]]) -> Result:
    missing = {name: result["missing"] for name, result in ranks[0].items() if "missing" in result}
    names = [name for name in ranks[0] if name not in missing]
    _check_losses({name: ranks[0][name]["losses"] for name in names})
    # By round, the rank that took longest.
    steps = {
        name: [max(pair) for pair in zip(*(rank[name]["step_s"] for rank in ranks), strict=True)]
        for name in names
    }
    ratios = [nested / base for nested, base in zip(steps["nested"], steps[BASELINE], strict=True)]
    return {
        "name": f"train.torchrec.{link}",
        "value": 1e3 * statistics.median(steps["nested"]),
        "unit": "ms",
        "ratio_to": "TorchRec's synchronous EmbeddingBagCollection",
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "step_ms": {
            name: round(1e3 * statistics.median(values), 2) for name, values in steps.items()
        },
        "losses": ranks[0][BASELINE]["losses"],
        "missing": missing,
    }


def _check_losses(losses: dict[str, list[float]]) -> None:
    """Raise SystemExit if the trainers do not train the same model."""
    for name, own in losses.items():
        for loss, base in zip(own, losses[BASELINE], strict=True):
            if not math.isclose(loss, base, rel_tol=LOSS_TOLERANCE):
                raise SystemExit(f"{name} trains another model than {BASELINE}: {losses}")
