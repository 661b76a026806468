"""train.scale.<method>: the simulation at 128 to 1,536 ranks, against NestPipe's Table III.

The stages of a lookup and the other parts of a step are measured here. Their growth is fitted:

- fitted, to TorchRec's numbers alone (its column of Table III, its row of Table II, Figure 2): the
  time of a step besides its dense time, as a non-negative sum of three terms: the link's bytes, of
  which only the part that leaves a rank grows; a latency for each peer; and the wait for the
  slowest rank, which grows with the logarithm. Figure 2 says how much of it is transfers. All
  stages of a lookup grow with_processors; dense time and updates do not grow.
- predicted: everything else. ``dual`` is the paper's UniEmb, ``nested`` is NestPipe, ``groups`` is
  2D-SP (transfers as with a quarter of the ranks), ``nested_groups`` is both (Table IV).

``train.scale.real.<W>``: the real loop on two ranks, at the proportions of W ranks, against
its simulation. Each rank has one processor; in the paper it has a host and an accelerator.

It needs PyTorch; bench.lines runs it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from bench.train.simulate import Stages, step_seconds
from bench.train.steps import (
    LATENCY_SHARE,
    MICRO_BATCHES,
    Result,
    moving_of,
    processors_per_rank,
    run,
    runs,
    simulator_error,
    stages_of,
)

RANKS: Final = (128, 256, 512, 1024, 1536)
# The scaling factors of Table III and, for nested_groups, of Table IV: the throughput over that of
# 128 ranks, over the ratio of the numbers of ranks.
PAPER: Final[Mapping[str, Mapping[int, float]]] = {
    "synchronous": dict(zip(RANKS, (1, 0.9123, 0.6664, 0.5336, 0.4434), strict=True)),
    "groups": dict(zip(RANKS, (1, 0.9136, 0.6964, 0.5667, 0.4932), strict=True)),
    "dual": dict(zip(RANKS, (1, 0.9613, 0.8921, 0.7800, 0.6762), strict=True)),
    "nested": dict(zip(RANKS, (1, 0.9839, 0.9733, 0.9563, 0.9407), strict=True)),
    "nested_groups": {128: 1, 1536: 0.9717},
}
FITTED: Final = "synchronous"
# TorchRec with 1,536 ranks, Table II, in ms; and its shares with 128 ranks, Figure 2.
STEP_MS, LOOKUP_MS, TRANSFERS_MS = 5793.83, 2870.99, 1207.85
LOOKUP_SHARE, TRANSFERS_SHARE = 0.244, 0.092
GROUPS: Final = 4
# As in the paper's runs: 13 % of the transfers are exposed with 1,536 ranks.
PAPER_MICRO_BATCHES: Final = 8
# The threads of a rank; in the paper none of them waits for a processor.
PROCESSORS: Final = 6.0
STAGES: Final = ("prefetch", "to-device", "route", "exchange", "retrieve", "write-back")
ROUTING: Final = ("prefetch", "route", "exchange")


@dataclass(frozen=True, slots=True)
class Growth:
    """The paper's step with W ranks, in ms: the dense part, and terms of the other parts."""

    dense: float
    terms: tuple[float, float, float]
    """The terms of the link's bytes, of each peer, and of the slowest rank."""

    def beside(self, ranks: int) -> float:
        """Return the time of everything that is not dense."""
        return float(np.dot(self.terms, _basis(ranks)))

    def transfers(self, ranks: int) -> float:
        """Return the time of all transfers of rows and gradients."""
        first, last = RANKS[0], RANKS[-1]
        ends = (
            TRANSFERS_SHARE / (LOOKUP_SHARE + TRANSFERS_SHARE),
            TRANSFERS_MS / (LOOKUP_MS + TRANSFERS_MS),
        )
        part = math.log(ranks / first) / math.log(last / first)
        return (ends[0] + part * (ends[1] - ends[0])) * self.beside(ranks)

    def lookup(self, ranks: int) -> float:
        """Return the time of the rest."""
        return self.beside(ranks) - self.transfers(ranks)


def _basis(ranks: int) -> tuple[float, float, float]:
    return (ranks - 1) / ranks, ranks - 1, math.log(ranks)


def paper_steps() -> dict[int, float]:
    """Return the milliseconds of TorchRec's step by number of ranks."""
    factors = PAPER[FITTED]
    return {ranks: STEP_MS * factors[RANKS[-1]] / factors[ranks] for ranks in RANKS}


def fit_growth() -> Growth:
    """Fit the growth by least squares of the relative errors of a step."""
    dense = STEP_MS - LOOKUP_MS - TRANSFERS_MS
    steps = paper_steps()
    lengths = np.array([steps[ranks] for ranks in RANKS])
    basis = np.array([_basis(ranks) for ranks in RANKS]) / lengths[:, None]
    beside = 1 - dense / lengths
    best, best_terms = math.inf, np.zeros(3)
    for count in (1, 2, 3):
        for chosen in itertools.combinations(range(3), count):
            columns = list(chosen)
            terms = np.zeros(3)
            terms[columns] = np.linalg.lstsq(basis[:, columns], beside, rcond=None)[0]
            error = float(((basis @ terms - beside) ** 2).sum())
            if terms.min() >= 0 and error < best:
                best, best_terms = error, terms
    first, second, third = best_terms.tolist()
    return Growth(dense, (first, second, third))


def stages_with(
    growth: Growth, measured: Mapping[str, float], ranks: int, groups: int, only_routing: bool
) -> Stages:
    """Return the paper's stage times with ``ranks`` ranks, in milliseconds.

    measured: by stage, in any unit; it gives the division of a lookup, and the ratios of freshen,
    reduce and update to the lookup.
    """
    lookup = sum(measured.get(name, 0.0) for name in STAGES)
    unit = growth.lookup(RANKS[0]) / lookup
    fixed = {name: unit * measured.get(name, 0.0) for name in ("freshen", "reduce", "update")}
    grown = {name: unit * measured.get(name, 0.0) for name in STAGES}
    more = growth.lookup(ranks) - growth.lookup(RANKS[0])
    growing = ROUTING if only_routing else STAGES
    over = sum(grown[name] for name in growing)
    grown = {
        name: time * (1 + more / over if name in growing else 1) for name, time in grown.items()
    }
    transfers = growth.transfers(ranks // groups if groups > 1 else ranks)
    return Stages(
        cpu=fixed | grown | {"dense": 0.0},
        transfer_cpu=0.0,
        transfer=transfers / (2 * PAPER_MICRO_BATCHES),
        dense=max(0.0, growth.dense - fixed["reduce"] - fixed["update"]),
    )


def balance(measured: Mapping[str, float]) -> dict[str, float]:
    """Divide the same lookup as suits the loop best: half of it is routing.

    The other half is retrieval and write-back, because retrieval waits for the write-back before
    the last.
    """
    lookup = sum(measured.get(name, 0.0) for name in STAGES)
    return dict.fromkeys(STAGES, 0.0) | {
        "route": lookup / 2, "retrieve": lookup / 4, "write-back": lookup / 4,
    }  # fmt: skip


def factors(
    growth: Growth, measured: Mapping[str, float], method: str, only_routing: bool = False
) -> dict[int, float]:
    """Return the scaling factors by number of ranks."""
    groups = GROUPS if method.endswith("groups") else 1
    mode = {"groups": "synchronous", "nested_groups": "nested"}.get(method, method)
    steps = {
        ranks: step_seconds(
            mode,
            stages_with(growth, measured, ranks, groups, only_routing),
            PAPER_MICRO_BATCHES,
            PROCESSORS,
        )
        for ranks in PAPER[method]
    }
    return {ranks: steps[RANKS[0]] / step for ranks, step in steps.items()}


def figures(sizes: dict[str, Any]) -> Iterator[Result]:
    """Yield a result for each method, one for the worst prediction, one for each real run."""
    growth = fit_growth()
    alone = run(sizes, mode="synchronous")
    chosen = [(ranks, mode) for ranks in sizes["real_ranks"] for mode in MODES]
    links = {ranks: _at(alone, growth, ranks) for ranks in sizes["real_ranks"]}
    results = runs(sizes, [links[ranks] | {"mode": mode} for ranks, mode in chosen])
    real = dict(zip(chosen, results, strict=True))
    # The synchronous loop has nothing to freshen, so its time comes from the dual one.
    freshen = min(result["stages_s"]["freshen"] for (_, m), result in real.items() if m == "dual")
    measured = alone["stages_s"] | {"freshen": freshen}
    divided = measured | balance(measured)
    worst = 0.0
    for method, paper in PAPER.items():
        simulated = factors(growth, measured, method)
        routing = factors(growth, measured, method, only_routing=True)
        in_two = factors(growth, divided, method)
        errors = [abs(simulated[ranks] / paper[ranks] - 1) for ranks in paper]
        if method != FITTED:
            worst = max(worst, *errors)
        yield {
            "name": f"train.scale.{method}",
            "value": simulated[RANKS[-1]],
            "unit": "share",
            "ratio_to": "the paper's, " + ("fitted" if method == FITTED else "predicted"),
            "ratio": simulated[RANKS[-1]] / paper[RANKS[-1]],
            "simulated_and_paper": {
                ranks: [round(simulated[ranks], 4), each_paper]
                for ranks, each_paper in paper.items()
            },
            "if_only_routing_grew": {ranks: round(f, 4) for ranks, f in routing.items()},
            "if_balanced": {ranks: round(f, 4) for ranks, f in in_two.items()},
            "largest_error": max(errors),
            "largest_error_if_balanced": max(
                abs(in_two[ranks] / paper[ranks] - 1) for ranks in paper
            ),
        }
    yield {
        "name": "train.scale.error",
        "value": worst,
        "unit": "share",
        "ratio_to": "the paper's scaling factors that were not fitted",
        "ratio": worst,
        "terms_ms": dict(zip(("bytes", "peer", "slowest"), growth.terms, strict=True)),
        "stages_ms": {name: round(1e3 * seconds, 2) for name, seconds in measured.items()},
    }
    yield from _real(sizes, alone, links, real)


MODES: Final = ("synchronous", "dual", "nested")


def _at(alone: dict[str, Any], growth: Growth, ranks: int) -> dict[str, Any]:
    """Return settings of the real loop at the paper's proportions, for the lookup as measured."""
    unit = alone["lookup_stall_s"] / growth.lookup(ranks)
    wanted = unit * growth.transfers(ranks)
    left = max(wanted - moving_of(alone), 0.1 * wanted)
    return {
        "slow": True,
        "dense_s": unit * growth.dense,
        "latency_s": LATENCY_SHARE * left / (2 * MICRO_BATCHES),
        "bytes_per_second": alone["bytes"] / ((1 - LATENCY_SHARE) * left),
    }


def _real(
    sizes: dict[str, Any],
    alone: dict[str, Any],
    links: dict[int, dict[str, Any]],
    real: dict[tuple[int, str], dict[str, Any]],
) -> Iterator[Result]:
    share = processors_per_rank(2)
    beside: dict[str, tuple[float, float]] = {}
    for ranks in sizes["real_ranks"]:
        stages = stages_of(alone, links[ranks], share, real[ranks, "dual"])
        seconds = {mode: real[ranks, mode]["medians"]["seconds"] for mode in MODES}
        simulated = {m: step_seconds(m, stages, MICRO_BATCHES, share) for m in MODES}
        beside |= {f"{ranks}.{mode}": (simulated[mode], seconds[mode]) for mode in MODES}
        with_processors = {m: step_seconds(m, stages, MICRO_BATCHES, PROCESSORS) for m in MODES}
        yield {
            "name": f"train.scale.real.{ranks}",
            "value": 1e3 * seconds["nested"],
            "unit": "ms",
            "ratio_to": "the synchronous loop",
            "ratio": seconds["nested"] / seconds["synchronous"],
            "measured_ms": {mode: round(1e3 * s, 1) for mode, s in seconds.items()},
            "simulated_ms": {mode: round(1e3 * s, 1) for mode, s in simulated.items()},
            "simulated_with_processors_ms": {
                m: round(1e3 * s, 1) for m, s in with_processors.items()
            },
        }
    yield from simulator_error(beside)
