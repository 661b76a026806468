"""Quantised rows: the search agrees with numpy; Check-N-Run's choices; invalid input."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from petps.codec import (
    BITS,
    METHODS,
    Quantisation,
    bits_for_restores,
    bits_for_state,
    choose_parameters,
    default_quantisation,
    mean_l2_error,
    sample_rows,
)
from petps.errors import InvalidArgument
from tests.python.codec.search import search, search_row

ROOT = Path(__file__).resolve().parents[3]
SEED = 20262
FLOAT_MIN = np.finfo(np.float32).tiny
Floats = npt.NDArray[np.float32]


def trained_rows(n: int, dim: int, tail: int = 4) -> Floats:
    """Return rows of different spreads with outliers; a lower ``tail`` gives more of them."""
    print(f"seed {SEED}")
    generator = np.random.default_rng(SEED)
    rows = generator.standard_t(tail, (n, dim)) * generator.uniform(0.01, 2.0, (n, 1))
    return rows.astype(np.float32)


def headers(stored: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return float32[n, 2]: scale and zero."""
    return np.ascontiguousarray(stored[:, :8]).view(np.float32)


def l2(rows: Floats, quantisation: Quantisation) -> npt.NDArray[np.float64]:
    back = quantisation.dequantise(quantisation.quantise(rows), rows.shape[1])
    return np.asarray(np.linalg.norm(back.astype(np.float64) - rows, axis=1))


@pytest.mark.parametrize("dim", [1, 2, 7, 16, 50, 64, 130])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("bins", "ratio"), [(1, 1.0), (10, 0.35), (25, 1.0), (45, 0.6)])
def test_the_search_agrees_with_numpy(dim: int, bits: int, bins: int, ratio: float) -> None:
    rows = trained_rows(300, dim)
    rows = rows[rows.max(axis=1) > rows.min(axis=1)]
    if len(rows) == 0:  # with dim 1 every row is constant
        return
    expected = search(rows, bits, bins, ratio)
    grids = headers(Quantisation("adaptive", bits, bins=bins, ratio=ratio).quantise(rows))
    np.testing.assert_array_equal(grids[:, 1], expected.zero + np.float32(0))
    np.testing.assert_array_equal(grids[:, 0], expected.width / np.float32(2**bits - 1))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_errors_agree_with_the_papers_search_in_double(bits: int) -> None:
    """Compare most rows. Rounding may decide differently between two equally good ranges."""
    rows = trained_rows(400, 64)
    errors = l2(rows, Quantisation("adaptive", bits, bins=45))
    expected = np.array([search_row(row.astype(np.float64), bits, 45, 1.0) for row in rows])
    near = np.abs(errors - expected) <= 1e-6 * np.maximum(expected, 1.0)
    assert near.mean() > 0.99
    assert abs(errors.mean() / expected.mean() - 1) < 1e-4


@given(
    rows=arrays.arrays(
        np.float32,
        st.tuples(st.integers(1, 20), st.integers(1, 40)),
        elements=st.floats(-(2.0**100), 2.0**100, width=32),
    ),
    bits=st.sampled_from(BITS),
    bins=st.integers(1, 60),
    ratio=st.floats(0, 1),
)
def test_adaptive_is_never_worse_than_asymmetric(
    rows: Floats, bits: int, bins: int, ratio: float
) -> None:
    # Allow for the rounding of zero + scale * code, which does not depend on the search.
    slack = 1e-6 * np.abs(rows).max(axis=1).astype(np.float64) * rows.shape[1] + FLOAT_MIN
    plain = l2(rows, Quantisation("asymmetric", bits))
    adaptive = l2(rows, Quantisation("adaptive", bits, bins=bins, ratio=ratio))
    assert (adaptive <= plain * (1 + 1e-5) + slack).all()


@given(
    rows=arrays.arrays(
        np.float32,
        st.tuples(st.integers(1, 5), st.integers(1, 70)),
        elements=st.floats(allow_nan=True, allow_infinity=True, width=32),
    ),
    method=st.sampled_from(METHODS),
    bits=st.sampled_from(BITS),
)
def test_any_rows_are_quantised_or_refused_by_index(rows: Floats, method: Any, bits: int) -> None:
    quantisation = Quantisation(method, bits)
    finite = np.asarray(np.isfinite(rows).all(axis=1))
    try:
        stored = quantisation.quantise(rows)
    except InvalidArgument as error:
        row = int(str(error).split("row ")[1].split()[0])
        assert finite[:row].all()
        with np.errstate(over="ignore", invalid="ignore"):
            is_wide = ~np.isfinite(np.float32(2) * np.abs(rows[row]).max())
        assert not finite[row] or is_wide
        return
    assert finite.all()
    assert stored.shape == (len(rows), quantisation.row_bytes(rows.shape[1]))
    back = quantisation.dequantise(stored, rows.shape[1])
    assert np.isfinite(back).all()


def test_every_processor_writes_the_same_bytes() -> None:
    """Run one program for each vector width, because a process chooses its width once."""
    program = (
        "import hashlib, numpy as np; from petps.codec import METHODS, BITS, Quantisation\n"
        f"rows = np.random.default_rng({SEED}).standard_normal((203, 37)).astype(np.float32)\n"
        "rows[5] = 0; rows[6] *= 1e-42; digest = hashlib.sha256()\n"
        "for method in METHODS:\n"
        "  for bits in BITS: digest.update(Quantisation(method, bits, bins=30).quantise(rows))\n"
        "print(digest.hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={**os.environ, "PETPS_CPU": width},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for width in ("baseline", "avx2", "")
    }
    assert len(digests) == 1


def test_methods_have_the_papers_order_of_errors() -> None:
    """Check the order of Figure 9: adaptive near k-means, both below asymmetric."""
    rows = trained_rows(500, 64, tail=12)
    for bits in (2, 3, 4):
        error = {str(m): mean_l2_error(rows, Quantisation(m, bits)) for m in METHODS}
        error["adaptive"] = mean_l2_error(rows, default_quantisation(bits))
        assert error["adaptive"] < error["asymmetric"] < error["symmetric"]
        assert error["adaptive"] < 1.1 * error["kmeans"]


def test_chosen_parameters_give_most_of_the_gain() -> None:
    rows = trained_rows(2000, 32)
    for bits in (2, 3, 4):
        chosen = choose_parameters(rows, bits)
        assert chosen.method == "adaptive"
        assert chosen.bits == bits
        plain = mean_l2_error(rows, Quantisation("asymmetric", bits))
        gain = plain - mean_l2_error(rows, chosen)
        gain_max = plain - mean_l2_error(rows, Quantisation("adaptive", bits, bins=50))
        assert gain >= 0.95 * gain_max
        fewer = Quantisation("adaptive", bits, bins=max(1, chosen.bins // 4), ratio=chosen.ratio)
        assert gain > plain - mean_l2_error(rows, fewer)
    assert choose_parameters(rows, 8) == Quantisation("asymmetric", 8)
    with pytest.raises(InvalidArgument, match="at least one row, got 0"):
        choose_parameters(rows[:0], 4)


def test_a_sample_gives_parameters_as_good_as_all_rows() -> None:
    rows = trained_rows(20_000, 32)
    for bits in (2, 3):
        from_all = choose_parameters(rows, bits)
        sampled = choose_parameters(rows[sample_rows(len(rows))], bits)
        ratio = mean_l2_error(rows, sampled) / mean_l2_error(rows, from_all)
        assert ratio < 1.01


def test_the_number_of_sampled_rows() -> None:
    assert sample_rows(0).tolist() == []
    assert sample_rows(10).tolist() == list(range(10))
    assert len(sample_rows(1_000_000)) == 1000
    large = sample_rows(300_000_000, seed=3)
    assert len(large) == 3000
    assert len(np.unique(large)) == 3000
    assert (np.diff(large) > 0).all()
    assert large[0] >= 0
    assert large[-1] < 300_000_000


def test_bits_depend_on_the_expected_restores() -> None:
    expected = {0: 2, 1: 2, 1.5: 3, 3: 3, 4: 4, 20: 4, 21: 8, 1e9: 8}
    assert {restores: bits_for_restores(restores) for restores in expected} == expected
    assert bits_for_restores(1, restores=1) == 2
    assert bits_for_restores(1, restores=2) == 8
    assert bits_for_restores(20, restores=21) == 8
    for arguments in ((-1, 0), (float("nan"), 0), (1, -1)):
        with pytest.raises(InvalidArgument, match="restores"):
            bits_for_restores(*arguments)


def test_optimizer_state_keeps_eight_bits_by_default() -> None:
    assert [bits_for_state(bits) for bits in BITS] == [8, 8, 8, 8]
    assert bits_for_state(2, state_bits=4) == 4
    with pytest.raises(InvalidArgument, match="bits must be 2, 3, 4 or 8, got 5"):
        bits_for_state(2, state_bits=5)


def test_invalid_input_is_refused() -> None:
    rows = np.zeros((3, 4), np.float32)
    rows[2, 1] = np.nan
    with pytest.raises(InvalidArgument, match=r"row 2 of 3 has a NaN"):
        Quantisation("adaptive", 4).quantise(rows)
    with pytest.raises(InvalidArgument, match=r"rows: expected float32\[n, dim\]"):
        Quantisation().quantise(rows.astype(np.float64))
    with pytest.raises(InvalidArgument, match=r"dim 0 is outside"):
        Quantisation().quantise(rows[:, :0].copy())
    with pytest.raises(InvalidArgument, match=r"bits 5 is none of"):
        Quantisation("adaptive", 5).quantise(rows)
    with pytest.raises(InvalidArgument, match=r"bins 0 is outside 1..1024"):
        Quantisation("adaptive", 4, bins=0).quantise(rows)
    with pytest.raises(InvalidArgument, match=r"ratio 1.5"):
        Quantisation("adaptive", 4, ratio=1.5).quantise(rows)
    with pytest.raises(InvalidArgument, match=r"method 'best' is unknown"):
        Quantisation("best", 4).quantise(rows)  # type: ignore[arg-type]
    with pytest.raises(
        InvalidArgument, match=r"dim 4 has 10 bytes by adaptive with 4 bits, got uint8\[2, 9\]"
    ):
        Quantisation("adaptive", 4).dequantise(np.zeros((2, 9), np.uint8), 4)
    with pytest.raises(InvalidArgument, match="bits must be 2, 3, 4 or 8, got 6"):
        default_quantisation(6)
