"""train.step.<mode>, train.exposed_communication.<N>, train.lookup_hidden, train.simulator_error.

The named figures have 2 ranks, `nested`, 4 micro-batches, and lookup : all-to-all : dense =
1 : 0.5 : 1. The lookup is real. Each round first measures it alone, and sets the dense wait and the
link by it.

It needs PyTorch; bench.lines runs it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.train.simulate import Stages, step_seconds

ROOT: Final = Path(__file__).resolve().parents[2]
MODES: Final = ("synchronous", "dual", "frozen", "nested", "stale")
SIMULATED: Final = ("synchronous", "dual", "frozen", "nested")
ALONE: Final[dict[str, Any]] = {
    "mode": "synchronous",
    "slow": False,
    "dense_s": 0.0,
    "calibrates": True,
}
ALONE_AHEAD: Final[dict[str, Any]] = {"mode": "dual", "calibrated": False}
ROUNDS: Final = 5
CALLS: Final = {"exchange": 2, "reduce": 1}  # collective calls of a step besides its transfers
MICRO_BATCHES: Final = 4
ALL_TO_ALL: Final = 0.5  # of the lookup
LATENCY_SHARE: Final = 0.1  # of a transfer
Result = dict[str, Any]


def run(sizes: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Run all ranks with these settings; return the result of slowest()."""
    return runs(sizes, [settings])[0]


def runs(
    sizes: dict[str, Any],
    run_settings: Sequence[dict[str, Any]],
    *,
    inside: Sequence[Sequence[str]] = (),
    **settings: Any,
) -> list[dict[str, Any]]:
    """Run all ranks with several settings, one after another in the same processes.

    All runs share ``settings``. inside: for each rank, the prefix of its command (shaped.py).
    Returns the result of slowest() for each run.
    """
    with tempfile.TemporaryDirectory() as folder:
        full: dict[str, Any] = {
            "world": 2, "micro_batches": MICRO_BATCHES, "dense_s": 0.0, "latency_s": 0.0,
            "bytes_per_second": 1e18, "slow": False, "seed": 1, "meeting": f"{folder}/meeting",
            "sessions": 0, "session_keys": 0, "clustered": False, "arrange": None,
        } | sizes | settings | {"runs": list(run_settings)}  # fmt: skip
        # Files, because a pipe that is not read would stop its rank, and so all ranks.
        paths = [Path(folder, f"{rank}.out") for rank in range(full["world"])]
        files = [path.open("w+") for path in paths]
        processes = [
            subprocess.Popen(
                [*(inside[rank] if inside else ()),
                 sys.executable, "-m", "bench.train.rank", str(rank), json.dumps(full)],
                cwd=ROOT, stdout=file,
            )
            for rank, file in enumerate(files)
        ]  # fmt: skip
        codes = [process.wait() for process in processes]
        outputs = [Path(file.name).read_text() for file in files]
        for file in files:
            file.close()
    if any(codes):
        raise SystemExit(f"a rank of {settings | run_settings[0]} failed")
    return [
        slowest([json.loads(line) for line in lines])
        for lines in zip(
            *(text.splitlines()[-len(full["runs"]) :] for text in outputs), strict=True
        )
    ]


def slowest(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the means of the rank that computed most, for which all others wait.

    Times that a target limits are the longest of all ranks.
    """
    return max(results, key=lambda result: result["process_s"]) | {
        name: max(result[name] for result in results)
        for name in ("step_s", "lookup_stall_s", "hooks_s", "tracking_s")
    }


def rounds(
    sizes: dict[str, Any], run_settings: Sequence[dict[str, Any]], **settings: Any
) -> list[list[dict[str, Any]]]:
    """Run all ``run_settings`` ROUNDS times, each round after a run ALONE that sets its link.

    All runs use the same processes. The speed of the machine varies, so each figure compares runs
    of one round.
    """
    one_round = [ALONE, *({"calibrated": True} | run for run in run_settings)]
    results = runs(sizes, [ALONE, *one_round * ROUNDS], **settings)[1:]
    length = len(one_round)
    return [results[n : n + length] for n in range(0, len(results), length)]


def moving_of(alone: dict[str, Any]) -> float:
    """Return the part of all transfers that is not the link's: gathering and adding rows."""
    used = alone["processor_s"]
    return float(used["send_rows"] + used["take_gradients"])


def link_of(alone: dict[str, Any]) -> dict[str, Any]:
    """Return the settings at which lookup : all-to-all : dense = 1 : 0.5 : 1.

    alone: the figures of a synchronous run without a slow link.
    """
    lookup = alone["lookup_stall_s"]
    wanted = ALL_TO_ALL * lookup
    left = max(wanted - moving_of(alone), 0.1 * wanted)
    return {
        "slow": True,
        "dense_s": lookup,
        "latency_s": LATENCY_SHARE * left / (2 * MICRO_BATCHES),
        "bytes_per_second": alone["bytes"] / ((1 - LATENCY_SHARE) * left),
    }


def figures(sizes: dict[str, Any]) -> Iterator[Result]:
    """Yield the figures of the real loop, then the error of the simulation."""
    yield from _measure(sizes)
    yield from _simulate(sizes)


def _measure(sizes: dict[str, Any]) -> Iterator[Result]:
    """Yield one result for each name, from the round that is the median of that figure."""
    counts = [count for count in sizes["micro_batch_counts"] if count != MICRO_BATCHES]
    run_settings = [{"mode": mode} for mode in MODES]
    run_settings += [{"mode": "nested", "micro_batches": count} for count in counts]
    all_rounds = rounds(sizes, run_settings)
    for place, mode in enumerate(MODES, 1):
        steps = [results[place]["step_s"] for results in all_rounds]
        ratios = [
            step / results[1]["step_s"] for step, results in zip(steps, all_rounds, strict=True)
        ]
        _, results = _median(steps if place == 1 else ratios, all_rounds)
        result, ratio = results[place], results[place]["step_s"] / results[1]["step_s"]
        yield {
            "name": f"train.step.{mode}",
            "value": 1e3 * result["step_s"],
            "unit": "ms",
            "ratio_to": "the synchronous loop",
            "ratio": ratio,
            "lookup_stall_ms": 1e3 * result["lookup_stall_s"],
            "exposed_ms": 1e3 * result["exposed_s"],
            "crossing_ms": 1e3 * result["crossing_s"],
            "dense_ms": 1e3 * result["dense_s"],
            "page_faults": result["page_faults"],
            "stages_ms": {k: round(1e3 * v, 2) for k, v in result["stages_s"].items()},
        }
    nested = 1 + MODES.index("nested")
    hidden = [
        1 - results[nested]["lookup_stall_s"] / results[1]["lookup_stall_s"]
        for results in all_rounds
    ]
    yield _share(
        "train.lookup_hidden", _median(hidden, all_rounds)[0], "the synchronous loop's lookup stall"
    )
    places = {MICRO_BATCHES: nested} | {n: 1 + len(MODES) + at for at, n in enumerate(counts)}
    for count in sizes["micro_batch_counts"]:
        shares = [results[places[count]]["exposed_s"] / results[places[count]]["crossing_s"]
                  for results in all_rounds]  # fmt: skip
        share, results = _median(shares, all_rounds)
        result = results[places[count]]
        yield _share(f"train.exposed_communication.{count}", share, "all transfers") | {
            "step_ms": 1e3 * result["step_s"],
            "crossing_ms": 1e3 * result["crossing_s"],
            "dense_covers_transfers": result["dense_s"] >= result["crossing_s"],
        }


def _median(values: Sequence[float], all_rounds: Sequence[Any]) -> tuple[float, Any]:
    """Return the median, and the round that has it."""
    at = sorted(range(len(values)), key=values.__getitem__)[len(values) // 2]
    return values[at], all_rounds[at]


def stages_of(
    alone: dict[str, Any], link: dict[str, Any], share: float, ahead: dict[str, Any]
) -> Stages:
    """Return the inputs of the simulation, from a run of the synchronous loop without a slow link.

    share: the part of a processor that each rank has. ahead: a run of the dual loop without
    dense part and slow link. It provides what the synchronous loop does not have: finding and
    copying the common keys of two buffers.

    A stage's time is its processor time plus its wait for peers; that wait is the rest of its
    clock time, less its wait for a processor. Processor time of the process outside its stages is
    gloo's, equal for each collective call.
    """
    transfers = 2 * MICRO_BATCHES
    used = {stage: seconds for stage, seconds in alone["processor_s"].items() if stage != "wait"}
    call = max(0.0, alone["process_s"] - sum(used.values())) / (transfers + sum(CALLS.values()))
    cpu = used | {stage: used[stage] + calls * call for stage, calls in CALLS.items()}
    cpu["freshen"] = ahead["processor_s"]["freshen"]
    cpu["intersect"] = max(0.0, ahead["processor_s"]["retrieve"] - used["retrieve"])
    moving = moving_of(alone) / transfers
    # gloo's own transfer overlaps the slow link's wait, and so does the wait for a peer.
    on_link = max(
        link["latency_s"] + alone["bytes"] / transfers / link["bytes_per_second"],
        alone["crossing_s"] / transfers - moving / share,
    )
    sent = {"exchange": alone["key_bytes"], "reduce": 0.0}  # the gradient of one weight
    wait = {
        stage: max(
            calls * link["latency_s"] + sent[stage] / link["bytes_per_second"],
            alone["stages_s"][stage] - cpu[stage] / share,
        )
        for stage, calls in CALLS.items()
    }
    return Stages(
        cpu=cpu,
        transfer_cpu=moving + call,
        transfer=max(0.0, on_link - call / share),
        dense=link["dense_s"],
        wait=wait,
        samples=alone["samples"],
        rows=alone["rows"],
    )


def _simulate(sizes: dict[str, Any]) -> Iterator[Result]:
    """Compare the simulation, fed with stage times of the synchronous loop, with real runs."""
    beside = {}
    for world in sizes["simulated_ranks"]:
        share = processors_per_rank(world)
        pairs: dict[str, list[tuple[float, float]]] = {mode: [] for mode in SIMULATED}
        run_settings = [ALONE_AHEAD, *({"mode": mode} for mode in SIMULATED)]
        for alone, ahead, *real in rounds(sizes, run_settings, world=world):
            stages = stages_of(alone, link_of(alone), share, ahead)
            for mode, measured in zip(SIMULATED, real, strict=True):
                predicted_s = step_seconds(mode, stages, MICRO_BATCHES, share)
                pairs[mode].append((predicted_s, measured["step_s"]))
        for mode in SIMULATED:
            ordered = sorted(pairs[mode], key=lambda pair: abs(pair[0] - pair[1]) / pair[1])
            beside[f"{mode}.{world}"] = ordered[len(ordered) // 2]
    yield from simulator_error(beside)


def processors_per_rank(world: int) -> float:
    """Return the processors that each rank has: ranks share them while all of them look up."""
    return min(1.0, (os.cpu_count() or 1) / world)


def simulator_error(beside: Mapping[str, tuple[float, float]]) -> Iterator[Result]:
    """Yield train.simulator_error. beside: by run, the simulated and the measured seconds.

    Each part of the training benchmarks yields one, unless it ran nothing; the report keeps the
    worst.
    """
    if not beside:
        return
    errors = {name: abs(simulated - real) / real for name, (simulated, real) in beside.items()}
    yield _share("train.simulator_error", max(errors.values()), "the measured step time") | {
        "errors": {name: round(error, 3) for name, error in errors.items()},
        "simulated_and_measured_ms": {
            name: [round(1e3 * seconds, 1) for seconds in pair] for name, pair in beside.items()
        },
    }


def _share(name: str, value: float, of: str) -> Result:
    return {"name": name, "value": value, "unit": "share", "ratio_to": of, "ratio": value}
