"""The tolerance rule: it passes honest rounding, and every kind of wrong array is caught.

Long by its second part: the same of every tensor of a case, and of the symmetry of second
derivatives.
"""

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from rawattn.check.cases import DTYPES, HALF, Case, dtype_of, standard
from rawattn.check.diagnose.harness.pairs import rights, wrongs
from rawattn.check.diff import agree, allowance, breakdown, judge
from rawattn.check.exact import exact, of_direction
from rawattn.check.expected import Expected, expect
from rawattn.check.second import HESSIAN, expect_second, inner
from rawattn.reference import dense, second

TENSORS = (
    *("out", "lse", "delta", "dq", "dk", "dv"),
    *("tout", "tlse", "ddout", "ddlse", "gq", "gk", "gv"),
)
CASE = Case(
    "tolerance", (17, 5, 9), (17, 5, 9), num_heads_kv=2, group=3, causal=True, poisoned=(1,)
)


def arrays(dtype: str, shape: tuple[int, ...] = (40, 3, 64)) -> tuple[np.ndarray, np.ndarray]:
    """A float64 reference and an honest result of ``dtype``."""
    reference = np.random.default_rng(1).standard_normal(shape)
    return reference, reference.astype(dtype_of(dtype))


@pytest.fixture(scope="module")
def expected() -> Expected:
    return expect_second(CASE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_honest_rounding_passes(dtype: str) -> None:
    reference, rounded = arrays(dtype)
    verdict = judge(rounded, reference, rounded.astype(np.float64))
    assert verdict.ok and verdict.verdict == "pass" and verdict.error <= verdict.allowed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda a: a * a.dtype.type(1.03125), id="scaled"),
        pytest.param(np.zeros_like, id="zeroed"),
        pytest.param(lambda a: -a, id="negated"),
        pytest.param(lambda a: np.full_like(a, np.nan), id="nan"),
        pytest.param(lambda a: np.where(np.arange(64) == 5, np.nan, a).astype(a.dtype), id="1 nan"),
        pytest.param(lambda a: np.where(a > 2, np.inf, a).astype(a.dtype), id="overflow"),
        pytest.param(lambda a: a[:, ::-1], id="heads swapped"),
        pytest.param(lambda a: np.roll(a, 1, axis=0), id="tokens shifted"),
        pytest.param(lambda a: a.reshape(40, 64, 3).swapaxes(1, 2), id="transposed"),
        pytest.param(lambda a: a.swapaxes(0, 1), id="axes swapped"),
        pytest.param(lambda a: a[:-1], id="a row too few"),
    ],
)
def test_wrong_arrays_fail(dtype: str, spoil) -> None:
    reference, rounded = arrays(dtype)
    verdict = judge(spoil(rounded), reference, rounded.astype(np.float64), terms=64)
    assert verdict.verdict == "FAIL" and verdict.note and not verdict.ok


@pytest.mark.parametrize("dtype", [np.int32, np.complex64, np.bool_, object])
def test_other_dtypes_fail(dtype: type) -> None:
    reference, rounded = arrays("float32")
    verdict = judge(np.ones(reference.shape, dtype), reference, rounded)
    assert verdict.verdict == "FAIL" and "floating" in verdict.note


def test_one_wrong_element_is_found_and_named() -> None:
    reference, rounded = arrays("bfloat16")
    rounded[7, 2, 11] += 1
    verdict = judge(rounded, reference, arrays("bfloat16")[1])
    assert verdict.verdict == "FAIL" and "(7, 2, 11)" in verdict.note


def test_less_precision_than_claimed_fails() -> None:
    """A float32 result computed by tensor cores in 10-bit mantissas, a float64 one in float32."""
    reference, rounded = arrays("float32")
    coarse = rounded.astype(np.float16).astype(np.float32)
    assert judge(coarse, reference, rounded, terms=1000).verdict == "FAIL"
    assert judge(rounded.astype(np.float64), reference, reference, terms=1000).verdict == "FAIL"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_serial_sums_pass_by_the_drift(dtype: str) -> None:
    """A kernel adds one by one, the dense reference in blocks: both honest, one less exact."""
    terms = np.random.default_rng(2).standard_normal((4096, 50))
    reference = terms.astype(np.longdouble).sum(axis=0).astype(np.float64)
    serial = np.cumsum(terms.astype(dtype), axis=0, dtype=dtype)[-1]
    verdict = judge(serial, reference, reference, terms=4096)
    assert verdict.ok and verdict.error > 0


def test_allowance_is_the_stated_formula() -> None:
    reference, rounded = arrays("float16")
    same = rounded.astype(np.float64)
    c = np.float16(0.3 * np.abs(reference).max())
    atol = 2 * np.abs((rounded + c - c).astype(np.float64) - same).max()
    drift = np.finfo(np.float32).eps * math.sqrt(100) * np.abs(reference).max()
    by_hand = 2 * np.abs(same - reference).max() + atol + drift
    assert allowance(reference, same, np.dtype(np.float16), 100) == pytest.approx(by_hand)


@pytest.mark.parametrize("wide", [True, False], ids=["exact ref", "ref of the dtype"])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_data_of_every_size_is_judged_alike(dtype: str, size: float, wide: bool) -> None:
    """Right results of other roundings pass; scaled, shifted, swapped, cut ones do not."""
    for shape in ((40, 3, 64), (96, 32), (2, 3, 40, 16)):
        pairs = rights(shape, dtype, size=size, wide=wide)
        pairs += wrongs(shape, dtype, size=size, wide=wide)
        assert sum(pair.kind != "right" for pair in pairs) > 25
        for pair in pairs:
            reference = pair.ref.astype(np.float64)
            same = reference.astype(dtype_of(dtype)).astype(np.float64)
            verdict = judge(pair.x, reference, same, terms=64)
            assert verdict.ok == (pair.kind == "right"), (pair.name, verdict)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponent", [-8, 13])
def test_the_allowance_grows_with_the_data(dtype: str, exponent: int) -> None:
    reference, rounded = arrays(dtype)
    kind, same, factor = dtype_of(dtype), rounded.astype(np.float64), 2.0**exponent
    unit, scaled = (allowance(f * reference, f * same, kind, 64) for f in (1.0, factor))
    assert scaled == pytest.approx(factor * unit, rel=1e-12)


def test_the_largest_numbers_of_a_dtype_have_an_allowance() -> None:
    """ref + c is beyond float16 here."""
    reference = np.linspace(-65000.0, 65000.0, 500)
    right = reference.astype(np.float16)
    assert judge(right, reference, right).ok
    assert judge(right * np.float16(0.95), reference, right).verdict == "FAIL"


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
def test_gradients_of_any_size_are_judged_alike(dtype: str, size: float) -> None:
    """They grow with dout; right is what keeps P and dS in float32."""
    t, kind, offsets = expect(CASE).exact, dtype_of(dtype), np.array([0, 31])
    q, k, v, dout = (x[:31].astype(kind).astype(np.float64) for x in t.tensors)
    out, lse = dense.forward(q, k, v, offsets, offsets)

    def gradients(rounding: object) -> tuple[np.ndarray, ...]:
        passed = (size * dout, q, k, v, out.astype(kind), lse)
        return dense.backward(*passed, offsets, offsets, rounding=rounding)

    for truth, same, right in zip(*map(gradients, (None, kind, np.float32)), strict=True):
        assert judge(right.astype(kind), truth, same, terms=64).ok
        for wrong in (0.5 * truth, 0 * truth, -truth, truth[:, ::-1], 1.0625 * truth):
            assert judge(wrong.astype(kind), truth, same, terms=64).verdict == "FAIL"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_reference_of_zeros_allows_zeros_alone(dtype: str) -> None:
    """However much noise the dense computation makes of them."""
    zero, kind = np.zeros((4, 2, 8)), dtype_of(dtype)
    noise = np.full_like(zero, 1e-3)
    verdict = judge(noise.astype(kind), zero, noise)
    assert verdict.verdict == "FAIL" and verdict.allowed == 0
    assert judge(zero.astype(kind), zero, noise).verdict == "vacuous"


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_zero_is_vacuous(dtype: str) -> None:
    zero = np.zeros((4, 2, 8))
    verdict = judge(zero.astype(dtype_of(dtype)), zero, zero)
    assert verdict.verdict == "vacuous" and not verdict.ok


def test_reference_below_the_allowance_is_vacuous() -> None:
    """Zeros would pass, as the dense computation is as wrong: nothing is shown by passing."""
    reference = np.full((4, 2, 8), 1e-5)
    verdict = judge(reference.astype(ml_dtypes.bfloat16), reference, 0.4 * reference)
    assert verdict.verdict == "vacuous"


def test_zero_by_definition_is_said_to_be_so() -> None:
    zero, mask = np.zeros((4, 2, 8)), np.ones((4, 1, 1), bool)
    verdict = judge(zero.astype(np.float16), zero, zero, zeros=mask)
    assert verdict.ok and verdict.note == "all zero by definition"
    wrong = zero.astype(np.float16)
    wrong[2, 1, 3] = 6e-8
    assert judge(wrong, zero, zero, zeros=mask).verdict == "FAIL"
    assert (
        judge(np.zeros((0, 2, 8), np.float16), zero[:0], zero[:0], zeros=mask[:0]).note == "empty"
    )


def test_dead_rows_must_be_exactly_zero() -> None:
    reference, rounded = arrays("float16")
    reference[3], rounded[3] = 0, 0
    dead = (np.arange(40) == 3)[:, None, None]
    assert judge(rounded, reference, rounded, zeros=dead).ok
    rounded[3, 1, 2] = 1e-6  # far below the allowance
    verdict = judge(rounded, reference, arrays("float16")[1] * ~dead, zeros=dead)
    assert verdict.verdict == "FAIL" and "(3, 1, 2)" in verdict.note


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, -1e30])
def test_minus_inf_of_dead_rows_must_stand_in_place(value: float) -> None:
    reference = np.random.default_rng(1).standard_normal((2, 9))
    reference[:, 4] = -np.inf
    lse = reference.astype(np.float32)
    assert judge(lse, reference, lse).ok
    lse[1, 4] = value
    assert judge(lse, reference, reference).verdict == "FAIL"


def test_against_compares_two_candidates() -> None:
    reference, rounded = arrays("float16")
    other = (rounded * np.float16(1.25)).astype(np.float64)
    assert judge(rounded, reference, rounded, against=rounded).ok
    assert judge(other.astype(np.float16), reference, rounded, against=other).ok
    assert judge(rounded, reference, rounded, against=other).verdict == "FAIL"


def test_breakdown_points_at_sequence_and_head() -> None:
    reference, rounded = arrays("float32")
    sequences = np.repeat([0, 1, 3, -1], 10)
    rounded[25, 1, 0] += 0.5
    rounded[5, 2, 0] = np.nan
    first, second, *rest = breakdown(rounded, reference, sequences)
    assert (first.sequence, first.head, first.error) == (0, 2, math.inf)
    assert (second.sequence, second.head) == (3, 1) and second.error == pytest.approx(0.5)
    assert len(rest) == 4 * 3 - 2 and all(share.error < 1e-6 for share in rest)
    by_row = breakdown(rounded[:, :, 0].T, reference[:, :, 0].T, sequences, token_axis=1)
    assert (by_row[1].sequence, by_row[1].head) == (3, 1)


@pytest.mark.parametrize("tensor", TENSORS)
def test_targets_accept_the_dense_result(expected: Expected, tensor: str) -> None:
    target = expected.targets[tensor]
    verdict = target.judge(target.same_dtype.astype(target.dtype))
    assert verdict.ok and verdict.error > 0, verdict


@pytest.mark.parametrize("tensor", ["lse", "delta", "tlse", "ddlse"])
def test_sums_of_rows_are_exact_to_float32(expected: Expected, tensor: str) -> None:
    target = expected.targets[tensor]
    finite = target.reference[np.isfinite(target.reference)]
    assert CASE.dtype == "float16" and target.dtype == np.float32
    assert target.allowance() < 1e-5 * np.abs(finite).max()


@pytest.mark.parametrize("tensor", TENSORS)
def test_targets_catch_every_fault(expected: Expected, tensor: str) -> None:
    target = expected.targets[tensor]
    right = target.same_dtype.astype(target.dtype)
    for wrong in (
        right * target.dtype.type(1.0625),
        np.zeros_like(right),
        np.full_like(right, np.nan),
    ):
        assert target.judge(wrong).verdict == "FAIL"
    assert target.judge(right.astype(np.float64)).note.startswith("dtype")
    assert target.judge(right[:-1]).note.startswith("shape")


@pytest.mark.parametrize("tensor", TENSORS)
def test_poisoned_sequences_are_free_and_other_rows_are_not(
    expected: Expected, tensor: str
) -> None:
    target = expected.targets[tensor]
    right = target.same_dtype.astype(target.dtype)
    rows = np.moveaxis(right, target.token_axis, 0)  # a view: tokens first
    rows[np.isin(target.sequence_of, target.undefined)] = np.nan
    assert target.judge(right).ok
    rows[-4] = np.nan  # a token of the last healthy sequence
    verdict, worst = target.judge(right), target.shares(right)[0]
    assert verdict.verdict == "FAIL" and worst.sequence == 2 and worst.error == math.inf


@pytest.mark.parametrize("tensor", [name for name in TENSORS if name not in ("lse", "delta")])
def test_rows_past_the_end_must_be_zero(expected: Expected, tensor: str) -> None:
    target = expected.targets[tensor]
    right = target.same_dtype.astype(target.dtype)
    last = np.moveaxis(right, target.token_axis, 0)[-1]  # a view
    last[...] = 1e-7
    assert target.judge(right).verdict == "FAIL"
    last[...] = np.nan  # what a preallocated result holds that nobody wrote to
    assert target.judge(right).verdict == "FAIL"
    assert target.shares(right)[0].sequence == -1


@pytest.mark.parametrize(
    ("direction", "zeros"),
    [
        ((True, False, False), ()),
        ((False, True, False), ()),
        ((False, False, True), ("tlse", "ddlse", "gv")),
        ((False, False, False), ("tout", "tlse", "ddout", "ddlse", "gq", "gk", "gv")),
    ],
    ids=str,
)
def test_what_a_direction_leaves_out_is_zero_by_definition(
    direction: tuple[bool, bool, bool], zeros: tuple[str, ...]
) -> None:
    targets = expect_second(replace(CASE, direction=direction)).targets
    verdicts = {
        name: target.judge(target.same_dtype.astype(target.dtype))
        for name, target in targets.items()
    }
    assert all(verdict.ok for verdict in verdicts.values())
    assert {n for n, verdict in verdicts.items() if "by definition" in verdict.note} == set(zeros)


# ---- softcap, sinks and seqused_k --------------------------------------------------------------

OPTIONED = replace(CASE, poisoned=(), softcap=1.5, sinks=True, seqused_k=(11, 5, 0))


@pytest.mark.parametrize("tensor", ["dsinks", "gsinks"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_sinks_are_judged(dtype: str, tensor: str) -> None:
    target = expect_second(replace(OPTIONED, dtype=dtype)).targets[tensor]
    right = target.same_dtype.astype(target.dtype)
    assert right.shape == (OPTIONED.num_heads_q,) and right.dtype.itemsize >= 4
    assert target.judge(right).ok and target.shares(right) == []
    for wrong in (right * right.dtype.type(1.0625), 0 * right, -right, right[::-1], right * np.nan):
        assert target.judge(wrong).verdict == "FAIL"
    assert target.judge(right[:-1]).note.startswith("shape")


def test_without_keys_the_tangent_of_lse_is_that_of_the_sink() -> None:
    expected = expect_second(OPTIONED)
    dead = (expected.case.sequence_of("q") == 2).nonzero()[0]
    tlse = expected.targets["tlse"].same_dtype.astype(np.float32)
    assert np.allclose(tlse[:, dead], expected.tensors.tsinks[:, None], rtol=1e-6)
    assert expected.targets["tlse"].judge(tlse).ok
    tlse[:, dead] = 0.0
    assert expected.targets["tlse"].judge(tlse).verdict == "FAIL"


@pytest.mark.parametrize("case", [CASE, OPTIONED], ids=["plain", "optioned"])
def test_double_backward_of_the_same_dtype_where_the_reference_has_none(case: Case) -> None:
    """Rounded to float64 it is exact; else off by as much as the one that the reference has."""
    tensors, reference = exact(case)
    passed = reference.forward()["out"], reference.forward()["lse"]
    truth = reference.double_backward(tensors.direction, *passed)
    whole = reference.rounded_second(tensors.direction, *passed, np.float64)
    half = reference.rounded_second(tensors.direction, *passed, np.float16)
    plain = {} if case.sinks else reference.double_backward(tensors.direction, *passed, np.float16)
    assert truth.keys() == whole.keys() == half.keys()
    for name, exactly in truth.items():
        size = np.abs(exactly).max()
        assert np.abs(whole[name] - exactly).max() < 1e-13 * size
        error = np.abs(half[name] - exactly).max() / size
        assert 1e-5 < error < 1e-2
        if name in plain:
            assert 1 / 4 < error * size / np.abs(plain[name] - exactly).max() < 4


# ---- the symmetry of second derivatives -------------------------------------------------------


def hessian(expected: Expected, spoil: dict[str, float] | None = None) -> np.ndarray:
    """<u, H w> and <w, H u> by the float64 reference; ``spoil`` has factors of results."""
    t, symmetry = expected.tensors, expected.symmetry
    inputs = [np.nan_to_num(a.astype(np.float64)) for a in (t.dout, t.q, t.k, t.v)]
    passed = [expected.targets[name].reference for name in ("out", "lse")]
    ways = []
    for one, other in ((symmetry.direction, t.direction), (t.direction, symmetry.direction)):
        other = [None if x is None else np.nan_to_num(x.astype(np.float64)) for x in other]
        _, _, *grads = second.double_backward(
            *other,
            *inputs,
            *passed,
            *(t.cu_seqlens_q, t.cu_seqlens_k),
            dlse=np.nan_to_num(t.dlse),
            window=expected.case.mask_window,
        )
        grads = [(spoil or {}).get(n, 1.0) * g for n, g in zip(HESSIAN, grads, strict=True)]
        ways.append(inner(one, grads))
    return np.array(ways)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", [(True, True, True), (True, False, False)], ids=str)
def test_symmetry_holds_and_means_something(dtype: str, direction: tuple[bool, bool, bool]) -> None:
    expected = expect_second(replace(CASE, dtype=dtype, direction=direction))
    products = hessian(expected)
    verdict = expected.symmetry.judge(products)
    assert verdict.ok and verdict.allowed < 0.1 * abs(products[0])
    assert expected.symmetry.judge(np.zeros(2)).verdict == "vacuous"
    assert expected.symmetry.judge(products * [1, 1.2]).verdict == "FAIL"
    assert expected.symmetry.judge(products * [1, np.nan]).verdict == "FAIL"


@pytest.mark.parametrize("wrong", HESSIAN)
def test_symmetry_catches_a_wrong_factor(expected: Expected, wrong: str) -> None:
    verdict = expected.symmetry.judge(hessian(expected, {wrong: 1.25}))
    assert verdict.verdict == "FAIL" and "the other" in verdict.note


def test_symmetry_of_zeros_is_said_to_be_so() -> None:
    symmetry = expect_second(replace(CASE, direction=(False, False, False))).symmetry
    assert symmetry.judge(np.zeros(2)).note == "all zero by definition"
    assert symmetry.judge(np.array([0.0, 1e-30])).verdict == "FAIL"


def test_agree_is_vacuous_where_zeros_would_agree() -> None:
    assert agree(3.0, 3.1, 0.2).ok
    assert agree(3.0, 3.3, 0.2).verdict == "FAIL"
    assert agree(0.1, 0.1, 0.2).verdict == "vacuous"
    assert agree(0.0, 0.0, 0.0, zero=True).ok
    assert agree(math.nan, math.nan, 0.2, zero=True).verdict == "FAIL"


def test_inner_products_skip_poisoned_rows_and_nothing_else() -> None:
    part = np.array([1.0, np.nan, 2.0], ml_dtypes.bfloat16)
    assert inner((part, None, None), (np.array([3.0, np.nan, 4.0]), None, None)) == 11
    assert math.isnan(inner((part, None, None), (np.array([3.0, 5.0, np.nan]), None, None)))
    assert math.isnan(inner((part, None, None), (np.array([3.0, 5.0]), None, None)))


def test_reading_a_neighbour_is_caught() -> None:
    """Attention that takes the pack for one sequence: wrong even where no neighbour is NaN."""
    case = Case("leak", (9, 12), (9, 12), dtype="float32", past_q=0, past_k=0)
    expected = expect(case)
    t = expected.tensors
    whole = np.array([0, 21])
    out, lse = dense.forward(t.q, t.k, t.v, whole, whole)
    assert expected.targets["out"].judge(out.astype(np.float32)).verdict == "FAIL"
    assert expected.targets["lse"].judge(lse.astype(np.float32)).verdict == "FAIL"


@pytest.mark.parametrize("case", standard("small"), ids=str)
def test_no_standard_case_is_vacuous_or_beyond_a_dense_implementation(case: Case) -> None:
    expected = expect_second(case)
    for tensor, target in expected.targets.items():
        verdict = target.judge(target.same_dtype.astype(target.dtype))
        assert verdict.ok, (tensor, verdict)
    names = [name for name in of_direction(case) if name in expected.targets]
    grads = [expected.targets[name].reference for name in names]
    product = inner(expected.symmetry.direction, grads)
    assert expected.symmetry.judge(np.array([product, product])).ok
