"""train.step.<mode>, train.exposed_communication.<N>, train.lookup_hidden, train.simulator_error.

Named figures: 2 workers, `nested`, 4 micro-batches, lookup : all-to-all : dense = 1 : 0.5 : 1. The
lookup is real; it is measured first, alone, and the dense wait and the link are set by it.

Run by bench.report in the environment of `make test-train`: `python -m bench.train.steps
'<sizes as JSON>'` prints a JSON line a result.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from bench.train.simulate import Stages, step_seconds

ROOT: Final = Path(__file__).resolve().parents[2]
MODES: Final = ("synchronous", "dual", "frozen", "nested", "stale")
SIMULATED: Final = ("synchronous", "dual", "frozen", "nested")
ALONE: Final[dict[str, Any]] = {"mode": "synchronous", "slow": False, "dense_s": 0.0}
ROUNDS: Final = 3
CALLS: Final = {"route": 2, "reduce": 1}  # collective calls of a step beside its transfers
MICRO_BATCHES: Final = 4
ALL_TO_ALL: Final = 0.5  # of the lookup
LATENCY_SHARE: Final = 0.1  # of a transfer
Result = dict[str, Any]


def run(sizes: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """All workers with these settings; worker 0's means, seconds of the slowest."""
    return runs(sizes, [settings])[0]


def runs(
    sizes: dict[str, Any],
    each: Sequence[dict[str, Any]],
    *,
    inside: Sequence[Sequence[str]] = (),
    **settings: Any,
) -> list[dict[str, Any]]:
    """The same for several settings, one after another in the same processes, which share all
    that is in ``settings``. inside: by worker, what its command begins with (shaped.py).
    """
    with tempfile.TemporaryDirectory() as folder:
        full: dict[str, Any] = {
            "world": 2, "micro_batches": MICRO_BATCHES, "dense_s": 0.0, "latency_s": 0.0,
            "bytes_per_second": 1e18, "slow": False, "seed": 1, "meeting": f"{folder}/meeting",
            "sessions": 0, "session_keys": 0, "clustered": False,
        } | sizes | settings | {"runs": list(each)}  # fmt: skip
        workers = [
            subprocess.Popen(
                [*(inside[rank] if inside else ()),
                 sys.executable, "-m", "bench.train.worker", str(rank), json.dumps(full)],
                cwd=ROOT, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(full["world"])
        ]  # fmt: skip
        said = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise SystemExit(f"a worker of {settings | each[0]} failed")
    found = []
    for lines in zip(*(each.splitlines()[-len(full["runs"]) :] for each in said), strict=True):
        told = [json.loads(line) for line in lines]
        found.append(told[0])
        for name in ("step_s", "lookup_stall_s"):
            found[-1][name] = max(worker[name] for worker in told)
    return found


def calibrated(sizes: dict[str, Any], world: int = 2) -> dict[str, Any]:
    """Settings at which lookup : all-to-all : dense = 1 : 0.5 : 1."""
    return link_of(_alone(sizes, world), world)


def _alone(sizes: dict[str, Any], world: int) -> dict[str, Any]:
    """A synchronous run without a slow link, in processes that have run once."""
    return runs(sizes, [ALONE] * 2, world=world)[-1]


def _medians(
    sizes: dict[str, Any], each: Sequence[dict[str, Any]], **settings: Any
) -> list[dict[str, Any]]:
    """Of each, the run with the median step of ROUNDS, all in the same processes in turn."""
    found = runs(sizes, [*each] * ROUNDS, **settings)
    return [
        sorted(found[n :: len(each)], key=lambda told: told["step_s"])[ROUNDS // 2]
        for n in range(len(each))
    ]


def moving_of(alone: dict[str, Any]) -> float:
    """What of all transfers is no link's: rows are gathered and added."""
    used = alone["processor_s"]
    return float(used["send_rows"] + used["take_gradients"])


def link_of(alone: dict[str, Any], world: int) -> dict[str, Any]:
    """The same, of what a synchronous run without a slow link took."""
    lookup = alone["lookup_stall_s"]
    wanted = ALL_TO_ALL * lookup
    left = max(wanted - moving_of(alone), 0.1 * wanted)
    return {
        "world": world,
        "slow": True,
        "dense_s": lookup,
        "latency_s": LATENCY_SHARE * left / (2 * MICRO_BATCHES),
        "bytes_per_second": alone["bytes"] / ((1 - LATENCY_SHARE) * left),
    }


def figures(sizes: dict[str, Any]) -> Iterator[Result]:
    """One result a name, and what the calibration found in each."""
    link = calibrated(sizes)
    found = dict(zip(MODES, _medians(sizes, [{"mode": m} for m in MODES], **link), strict=True))
    base = found["synchronous"]
    for mode in MODES:
        yield {
            "name": f"train.step.{mode}",
            "value": 1e3 * found[mode]["step_s"],
            "unit": "ms",
            "ratio_to": "the synchronous loop",
            "ratio": found[mode]["step_s"] / base["step_s"],
            "lookup_stall_ms": 1e3 * found[mode]["lookup_stall_s"],
            "exposed_ms": 1e3 * found[mode]["exposed_s"],
            "crossing_ms": 1e3 * found[mode]["crossing_s"],
            "dense_ms": 1e3 * link["dense_s"],
            "stages_ms": {k: round(1e3 * v, 2) for k, v in found[mode]["stages_s"].items()},
        }
    hidden = 1 - found["nested"]["lookup_stall_s"] / base["lookup_stall_s"]
    yield _share("train.lookup_hidden", hidden, "the synchronous loop's lookup stall")
    for count in sizes["micro_batch_counts"]:
        told = (
            found["nested"]
            if count == MICRO_BATCHES
            else _medians(sizes, [{"mode": "nested"}], **link, micro_batches=count)[0]
        )
        share = told["exposed_s"] / told["crossing_s"]
        covered = link["dense_s"] >= told["crossing_s"]
        yield _share(f"train.exposed_communication.{count}", share, "all transfers") | {
            "step_ms": 1e3 * told["step_s"],
            "crossing_ms": 1e3 * told["crossing_s"],
            "dense_covers_transfers": covered,
        }


def stages_of(alone: dict[str, Any], link: dict[str, Any], share: float = 1.0) -> Stages:
    """What the simulation takes, of the synchronous loop alone; share: of a processor, a worker.

    A stage's time is what it had of a processor, and what it waited for peers: the rest of the
    clock's, less what it waited for a processor. What the process used beside its stages is
    gloo's, the same for each collective call.
    """
    transfers = 2 * MICRO_BATCHES
    used = {stage: each for stage, each in alone["processor_s"].items() if stage != "wait"}
    call = max(0.0, alone["process_s"] - sum(used.values())) / (transfers + sum(CALLS.values()))
    cpu = used | {stage: used[stage] + calls * call for stage, calls in CALLS.items()}
    moving = moving_of(alone) / transfers
    # gloo's own transfer goes on during the slow link's.
    on_link = max(
        link["latency_s"] + alone["bytes"] / transfers / link["bytes_per_second"],
        alone["crossing_s"] / transfers - moving / share,
    )
    return Stages(
        cpu=cpu,
        transfer_cpu=moving + call,
        transfer=max(0.0, on_link - call / share),
        dense=link["dense_s"],
        wait={stage: max(0.0, alone["stages_s"][stage] - cpu[stage] / share) for stage in CALLS},
    )


def simulated(sizes: dict[str, Any]) -> Iterator[Result]:
    """The simulation, fed with stage times of the synchronous loop alone, beside real runs: in turn
    with them, for the machine is now quicker, now slower."""
    errors = {}
    beside = {}
    for world in sizes["simulated_workers"]:
        link = calibrated(sizes, world)
        each = [ALONE, *({"mode": mode} for mode in SIMULATED)]
        alone, *real = _medians(sizes, each, **link)
        # The workers have the processors in turn while all of them look up.
        share = min(1.0, (os.cpu_count() or 1) / world)
        stages = stages_of(alone, link, share)
        for mode, measured in zip(SIMULATED, real, strict=True):
            told, seconds = step_seconds(mode, stages, MICRO_BATCHES, share), measured["step_s"]
            errors[f"{mode}.{world}"] = abs(told - seconds) / seconds
            beside[f"{mode}.{world}"] = [round(1e3 * told, 1), round(1e3 * seconds, 1)]
    if not errors:
        return
    worst = max(errors.values())
    yield _share("train.simulator_error", worst, "the measured step time") | {
        "errors": {name: round(each, 3) for name, each in errors.items()},
        "simulated_and_measured_ms": beside,
    }


def _share(name: str, value: float, of: str) -> Result:
    return {"name": name, "value": value, "unit": "share", "ratio_to": of, "ratio": value}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    for result in itertools.chain(figures(given), simulated(given)):
        print(json.dumps(result), flush=True)
