"""The standard cases hold what they promise: every feature, every trap, the same numbers."""

import subprocess
import sys
from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest

from rawattn.check.cases import DTYPES, HALF, Case, dtype_of, in_use, make, standard, with_options
from rawattn.check.expected import expect
from rawattn.check.run import jobs
from rawattn.check.second import expect_second
from rawattn.check.transfer import to_framework, to_numpy
from rawattn.variants.steps import STEPS

SIZES = ("small", "large")


@pytest.mark.parametrize("size", SIZES)
def test_every_feature_is_there(size: str) -> None:
    cases, block = standard(size), {"small": 16, "large": 128}[size]
    lengths = {n for case in cases for n in (*case.lengths_q, *case.lengths_k)}
    assert {0, 1, block - 1, block, block + 1} <= lengths and max(lengths) > 2 * block
    assert {1, 3, 8} <= {case.group for case in cases}
    dims = {case.head_dim for case in cases}
    assert {32, 40, 72, 136, 256} <= dims and all(d % 8 == 0 for d in dims)
    assert size == "small" or {64, 96, 128, 192} <= dims
    assert {case.dtype for case in cases} == set(DTYPES)
    assert any(case.head_dim > case.head_dim_v for case in cases)
    assert any(case.head_dim < case.head_dim_v for case in cases)
    assert any(case.lengths_q != case.lengths_k for case in cases)
    assert {case.causal for case in cases} == {case.dlse for case in cases} == {True, False}
    sides = {(case.window[0] >= 0, case.window[1] >= 0) for case in cases}
    assert sides == {(True, True), (True, False), (False, True), (False, False)}
    assert any(case.strided for case in cases) and any(case.softmax_scale for case in cases)
    assert {case.direction for case in cases} == set(product((True, False), repeat=3))
    assert any(not case.lengths_q for case in cases)
    assert any(sum(case.lengths_k) + case.past_k == 0 for case in cases)
    assert {case.sinks_direction for case in cases if case.sinks} == {True, False}
    capped = {case.softcap for case in cases} - {None}
    assert len(capped) > 1 and min(capped) < 2 < max(capped)
    of_keys = [(c.lengths_k, c.seqused_k) for c in cases if c.seqused_k is not None]
    pairs = [pair for lengths in of_keys for pair in zip(*lengths, strict=True)]
    assert all(used <= allotted for allotted, used in pairs)
    parts = {(used > 0, used < allotted) for allotted, used in pairs if allotted}
    assert parts == {(True, False), (True, True), (False, True)}, "all, some and no keys in use"


@pytest.mark.parametrize("arch", [0, 90])
def test_every_step_meets_softcap_sinks_and_seqused_k(arch: int) -> None:
    """On a GPU with both backends, in every dtype."""
    backends = {"numba", "cuda"} if arch else {"numba"}
    for option in (lambda c: c.softcap, lambda c: c.sinks, lambda c: c.seqused_k):
        met = [(case, by, steps) for case, by, steps in jobs(arch) if option(case)]
        for backend in backends:
            assert {step for _, by, steps in met if by == backend for step in steps} == set(STEPS)
        assert not arch or {case.dtype for case, *_ in met} == set(DTYPES)


@pytest.mark.parametrize("size", SIZES)
def test_names_are_unique_and_large_cases_come_in_both_half_precisions(size: str) -> None:
    names = [str(case) for case in standard(size)]
    assert len(names) == len(set(names))
    if size == "large":
        by_dtype = [{c.name for c in standard(size) if c.dtype == dtype} for dtype in HALF]
        assert by_dtype[0] == by_dtype[1]


@pytest.mark.parametrize("case", standard("small"), ids=str)
def test_poison_stands_where_it_should(case: Case) -> None:
    t = make(case)
    parts = (*case.direction, case.sinks_direction) if case.sinks else case.direction
    assert tuple(part is not None for part in t.direction) == parts
    assert t.direction == (t.tq, t.tk, t.tv, t.tsinks)[: 3 + case.sinks]
    for origin, part in zip(t.origins, t.direction, strict=True):
        assert part is None or (part.shape == origin.shape and part.strides == origin.strides)
    assert (t.sinks is not None) == case.sinks and not (case.sinks and case.poisoned)
    assert (t.seqused_k is not None) == (case.seqused_k is not None)
    for side, given in (("q", (t.q, t.dout, t.tq)), ("k", (t.k, t.v, t.tk, t.tv))):
        arrays = [array for array in given if array is not None]
        bad = case.trapped(side)
        assert (bad >= ~case.healthy(side) | (case.sequence_of(side) < 0)).all()
        for array in arrays:
            assert np.isnan(array[bad].astype(np.float64)).all()
            assert np.isfinite(array[~bad].astype(np.float64)).all()
            assert array.dtype == dtype_of(case.dtype)
    offsets = t.cu_seqlens_q
    assert offsets.dtype == np.int32 and offsets[0] == 0 and len(offsets) == len(case.lengths_q) + 1
    assert len(t.q) == offsets[-1] + case.past_q and (t.dlse is not None) == case.dlse
    if len(case.lengths_q) > 2 and case.poisoned:
        assert 0 < case.poisoned[0] <= len(case.lengths_q) - 2, "a neighbour on either side"


def test_strided_cases_have_gaps_full_of_nan() -> None:
    case = next(c for c in standard("small") if c.strided and c.dtype == "float16")
    t = make(case)
    for array in (t.q, t.k, t.v, t.dout, *t.direction):
        assert not array.flags.c_contiguous and array.strides[2] == array.itemsize
        assert all(stride % 16 == 0 for stride in array.strides[:2])
        assert np.isnan(array.base[:, array.shape[1] :]).all()
        assert np.isnan(array.base[:, :, array.shape[2] :]).all()


def test_same_seed_same_numbers() -> None:
    case = standard("small")[0]
    first, second, other = make(case), make(case), make(case, seed=1)
    for field in fields(first):
        a, b = getattr(first, field.name), getattr(second, field.name)
        assert a is b is None or a.tobytes() == b.tobytes()
    assert first.q.tobytes() != other.q.tobytes()


def test_masks_of_rows() -> None:
    case = Case("rows", (3, 2, 1), (1, 2, 0), causal=True, poisoned=(1,), past_q=2, past_k=0)
    assert case.sequence_of("q").tolist() == [0, 0, 0, 1, 1, 2, -1, -1]
    assert case.sequence_of("k").tolist() == [0, 1, 1]
    assert case.healthy("q").tolist() == [True] * 3 + [False] * 2 + [True] * 3
    # Causal masks end together: of three queries on one key only the last sees it.
    assert case.unseen("q").tolist() == [True, True, False, False, False, True, True, True]
    assert case.unseen("k").tolist() == [False, False, False]
    assert case.mask_window == (-1, 0)


def test_rows_of_keys_that_are_not_in_use() -> None:
    lengths = ((2, 1, 1), (3, 2, 1))
    case = Case("rows", *lengths, causal=True, seqused_k=(2, 0, 1), past_q=0, past_k=1)
    # The last query sees the last key in use, and a key that is not in use counts as none.
    assert case.unseen("q").tolist() == [False, False, True, False]
    assert case.unseen("k").tolist() == [False, False, True, True, True, False, True]
    assert case.trapped("k").tolist() == [False, False, True, True, True, False, True]
    assert not case.trapped("q").any() and case.lengths_used == (2, 0, 1)
    plain = replace(case, seqused_k=None)
    assert plain.trapped("k").tolist() == [False] * 6 + [True]
    same = [(make(one).q, make(one).k[:2]) for one in (case, plain)]
    for one, other in zip(*same, strict=True):
        assert one.tobytes() == other.tobytes(), "the numbers do not depend on what is in use"


def test_options_on_top_of_a_case() -> None:
    case = standard("small")[0]
    assert with_options(case, None, False, False) == case
    found = with_options(case, 2.0, True, True)
    assert (found.softcap, found.sinks, found.poisoned) == (2.0, True, ())
    assert found.seqused_k == in_use(case.lengths_k) != case.lengths_k
    assert with_options(case, None, False, True).poisoned == case.poisoned


@pytest.mark.parametrize("size", SIZES)
def test_some_case_has_dead_rows_among_live_ones_and_unseen_keys(size: str) -> None:
    inner = [
        case.unseen(side)[: sum(lengths)]
        for case in standard(size)
        for side, lengths in (("q", case.lengths_q), ("k", case.lengths_k))
    ]
    mixed = [i for i, rows in enumerate(inner) if rows.any() and not rows.all()]
    assert any(i % 2 == 0 for i in mixed) and any(i % 2 == 1 for i in mixed)


def test_expected_gives_the_backward_nothing_of_other_rows() -> None:
    case = standard("small")[0]
    expected = expect(case)
    bad = ~case.healthy("q") | (case.sequence_of("q") < 0)
    assert np.isnan(expected.out[bad].astype(np.float64)).all()
    assert np.isnan(expected.lse[:, bad]).all()
    assert not np.isnan(expected.lse[:, ~bad]).any()
    for target in expected.targets.values():
        assert not np.isnan(target.reference).any()
    second = expect_second(case)
    assert second.out is expected.out and second.lse is expected.lse
    for target in second.targets.values():
        assert not np.isnan(target.reference).any()
    for part, side in zip(second.symmetry.direction, "qkk", strict=True):
        bad = ~case.healthy(side) | (case.sequence_of(side) < 0)
        assert np.isnan(part[bad].astype(np.float64)).all()
        assert np.isfinite(part[~bad].astype(np.float64)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_arrays_travel_and_come_back(framework: str, dtype: str) -> None:
    if framework == "torch":
        pytest.importorskip("torch")
    case = next(c for c in standard("large") if c.strided)
    t = make(Case("travel", (5,), (5,), dtype=dtype, strided=case.strided, sinks=True))
    moved = t.on(framework)
    for field in fields(t):
        if getattr(t, field.name) is None:
            continue
        before, after = getattr(t, field.name), to_numpy(getattr(moved, field.name))
        assert after.dtype == before.dtype and after.shape == before.shape
        assert after.strides == before.strides and after.tobytes() == before.tobytes()
    assert to_framework(None, framework) is None


def test_importable_without_gpu_libraries() -> None:
    code = (
        "import sys\n"
        "for name in ('cupy', 'torch', 'numba'): sys.modules[name] = None\n"
        "from rawattn.check import cases, diff, second\n"
        "second.expect_second(cases.standard('small')[0])\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
