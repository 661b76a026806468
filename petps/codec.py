"""Quantised rows, which make checkpoints smaller (Check-N-Run 5.2, ``native/codec/FORMAT.md``).

Owns:        the choice of method, bits and search parameters; the Python API of the native codec.
Never does:  know tables, chunks or files; change a row that is kept whole.
Called by:   delta and checkpoint.
Invariants:  The same rows, ``Quantisation`` and build give the same bytes on every processor.
Threads:     any. The GIL is released while the codec runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from petps import _native
from petps.errors import InvalidArgument

__all__ = [
    "BITS",
    "METHODS",
    "Quantisation",
    "bits_for_restores",
    "bits_for_state",
    "choose_parameters",
    "default_quantisation",
    "mean_l2_error",
    "sample_rows",
]

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Method = Literal["symmetric", "asymmetric", "adaptive", "kmeans"]

METHODS: Final[tuple[Method, ...]] = ("symmetric", "asymmetric", "adaptive", "kmeans")
BITS: Final = (2, 3, 4, 8)

# Where the curves of Check-N-Run's Figures 10 and 11 flatten. ``choose_parameters`` finds
# the values of a table.
BINS_DEFAULT: Final = {2: 25, 3: 25, 4: 45, 8: 45}
BINS_TRIED: Final = (5, 10, 15, 20, 25, 30, 35, 40, 45, 50)
RATIOS_TRIED: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
# A gain of at least this share of the largest gain is enough.
GAIN_SHARE: Final = 0.98
# Rows that show the gain: 0.001 % of a large table, but at least this number. (A thousand rows of
# GloVe lead to the same choice as all of them.)
SAMPLE_SHARE: Final = 1e-5
SAMPLE_ROWS_MIN: Final = 1000

# (restores, bits) of Check-N-Run 6.2: a training with so few bits that is resumed at most that
# often loses less than 0.01 % accuracy.
RESTORES_MAX: Final = ((1, 2), (3, 3), (20, 4))
BITS_SAFE: Final = 8


@dataclass(frozen=True, slots=True)
class Quantisation:
    """A method of quantising rows, with its parameters.

    Rows can be read with the ``method`` and ``bits`` that wrote them; the rest affects writing.

    Attributes:
        method: One of ``METHODS``.
        bits: Bits per value, one of ``BITS``.
        bins: Steps into which the search divides a row's range (adaptive, 1..1024).
        ratio: Share of the range that the search covers (adaptive, 0..1).
        seed: Selects the elements of a row from which k-means starts.

    A number outside its limits raises InvalidArgument when rows are quantised.
    """

    method: Method = "asymmetric"
    bits: int = 8
    bins: int = 25
    ratio: float = 1.0
    seed: int = 0

    def row_bytes(self, dim: int) -> int:
        """Return the bytes of one quantised row of ``dim`` values."""
        return _native.quantised_row_bytes(self.method, self.bits, dim)

    def quantise(self, rows: Floats) -> Bytes:
        """Quantise rows, float32[n, dim], to uint8[n, row_bytes(dim)].

        Raises:
            InvalidArgument: A row has a NaN, an infinity or a range beyond float32; names the
                first such row.
        """
        return _native.quantise_rows(
            self.method, self.bits, rows, bins=self.bins, ratio=self.ratio, seed=self.seed
        )

    def dequantise(self, rows: Bytes, dim: int) -> Floats:
        """Decode rows, uint8[n, row_bytes(dim)], to float32[n, dim]."""
        return _native.dequantise_rows(self.method, self.bits, dim, rows)


def default_quantisation(bits: int) -> Quantisation:
    """Return Check-N-Run's choice: asymmetric with 8 bits, adaptive with fewer."""
    _check_bits(bits)
    if bits == BITS_SAFE:
        return Quantisation("asymmetric", bits)
    return Quantisation("adaptive", bits, bins=BINS_DEFAULT[bits])


def bits_for_restores(expected: float, restores: int = 0) -> int:
    """Return the bits of a checkpoint's rows for a training expected to resume ``expected`` times.

    ``restores`` is how often it has resumed. If that exceeds ``expected``, the result is 8.
    """
    if not expected >= 0 or restores < 0:
        raise InvalidArgument(
            f"expected restores and restores must be at least 0, got {expected} and {restores}"
        )
    if restores > expected:
        return BITS_SAFE
    return next((bits for most, bits in RESTORES_MAX if expected <= most), BITS_SAFE)


def bits_for_state(bits: int, state_bits: int | None = None) -> int:
    """Return the bits of optimizer state: ``state_bits``, or if None, ``bits`` but at least 8."""
    chosen = max(bits, BITS_SAFE) if state_bits is None else state_bits
    _check_bits(chosen)
    return chosen


def sample_rows(n: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """Return which of ``n`` rows to give to ``choose_parameters``: ascending int64[m]."""
    count = min(n, max(SAMPLE_ROWS_MIN, int(n * SAMPLE_SHARE)))
    generator = np.random.default_rng(seed)
    return np.sort(generator.choice(n, count, replace=False, shuffle=False))


def choose_parameters(rows: Floats, bits: int) -> Quantisation:
    """Return the quantisation for a table with rows like ``rows``.

    The search takes the smallest number of bins whose gain over asymmetric is near the largest
    gain, and then the smallest ratio in the same way. With 8 bits it returns asymmetric, which
    cannot be improved.

    Args:
        rows: float32[n, dim]; see ``sample_rows``.
        bits: Bits per value.

    Raises:
        InvalidArgument: As in ``Quantisation.quantise``, or ``rows`` is empty.
    """
    chosen = default_quantisation(bits)
    if chosen.method != "adaptive":
        return chosen
    plain = mean_l2_error(rows, Quantisation("asymmetric", bits))
    by_bins = [replace(chosen, bins=bins) for bins in BINS_TRIED]
    chosen = _where_gain_tapers_off(rows, plain, by_bins)
    by_ratio = [replace(chosen, ratio=ratio) for ratio in RATIOS_TRIED]
    return _where_gain_tapers_off(rows, plain, by_ratio)


def mean_l2_error(rows: Floats, quantisation: Quantisation) -> float:
    """Return the mean l2 distance between rows, float32[n > 0, dim], and the rows as decoded."""
    if len(rows) == 0:
        raise InvalidArgument("rows must have at least one row, got 0")
    back = quantisation.dequantise(quantisation.quantise(rows), rows.shape[1])
    return float(np.linalg.norm(back.astype(np.float64) - rows, axis=1).mean())


def _where_gain_tapers_off(rows: Floats, plain: float, tried: list[Quantisation]) -> Quantisation:
    """Return the first of ``tried`` (cheapest first) with nearly the largest gain."""
    gains = [plain - mean_l2_error(rows, quantisation) for quantisation in tried]
    sufficient_gain = GAIN_SHARE * max(gains)
    return tried[next(i for i, gain in enumerate(gains) if gain >= sufficient_gain)]


def _check_bits(bits: int) -> None:
    if bits not in BITS:
        raise InvalidArgument(f"bits must be 2, 3, 4 or 8, got {bits}")
