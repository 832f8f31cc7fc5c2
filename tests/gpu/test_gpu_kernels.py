"""The CUDA kernels, and the Numba twins, on a GPU: every row of the table, judged by the tolerance.

The cases carry NaN in a middle sequence, in the rows past the last one and in the arrays that the
results go to. Expected values come from the dense reference in float64, on the host, which needs
no library of CUDA. Long by its lists of cases.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rawattn import api, variants
from rawattn.build import Build
from rawattn.check.cases import HALF, Case, Tensors, dtype_of
from rawattn.check.expected import Expected, expect
from rawattn.check.transfer import to_numpy
from rawattn.variants import METHODS, Row
from tests.shared.gpu_arrays import Far, bits, moved
from tests.shared.gpu_drawn import draw_case, lay_out
from tests.shared.gpu_problems import (
    ARCH,
    builds_of,
    built,
    chosen,
    judge,
    kernels_of,
    mask_of,
    poisoned,
    sized,
    warm,
)

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

STEPS = ("forward", *METHODS)
STEPS_OF = {
    "forward": ("forward",),
    "backward_kv": ("atomic_dq", "deterministic"),
    "backward_q": ("atomic_dkv", "deterministic"),
}
EDGES = (0, 1, 63, 64, 65, 127, 128, 129, 200)
EDGES_K = (5, 0, 64, 129, 1, 200, 65, 0, 127)  # with queries that see no key, under any mask
FEW = (1, 63, 0, 65, 129)  # the widest tiles are of 64 rows, and their references slow
FEW_K = (129, 64, 9, 0, 65)
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (33, 7)},
    "diagonal": {"window": (0, 0)},
    "left-open": {"window": (-1, 5)},
    "right-open": {"window": (16, -1)},
}
HEADS = ((2, 1), (1, 3), (1, 8))  # num_heads_kv, group
OTHER_DIMS = ((40, 40), (72, 72), (136, 136), (200, 200), (128, 64), (192, 128), (64, 256))


# ---- cases ------------------------------------------------------------------------------------


def lengths_for(d: int, unequal: bool) -> tuple[tuple[int, ...], ...]:
    q, k = (EDGES, EDGES_K) if d <= 128 else (FEW, FEW_K)
    return (q, k) if unequal else (q, q)


def masked(d: int) -> Iterator[Case]:
    """Every mask in both dtypes; lengths and groups take turns."""
    for i, (name, mask) in enumerate(MASKS.items()):
        for j, dtype in enumerate(HALF):
            heads_kv, group = HEADS[(i + j + d // 32) % 3]
            unequal = bool((i + j) % 2)
            yield poisoned(
                f"d{d}-{name}-group{group}{'-unequal' * unequal}",
                *lengths_for(d, unequal),
                dtype=dtype,
                num_heads_kv=heads_kv,
                group=group,
                **sized(d),
                **mask,
            )


def of_short(d: int) -> Iterator[Case]:
    """Every mask for batches of short sequences, which have rows of their own."""
    for i, (name, mask) in enumerate(MASKS.items()):
        changes = {"dtype": HALF[i % 2], "num_heads_kv": 1, "group": 2, **sized(d), **mask}
        yield poisoned(
            f"d{d}-short-{name}", (40, 5, 0, 64, 1, 33), (40, 64, 7, 1, 0, 33), **changes
        )


def cases() -> Iterator[Case]:
    for i, d in enumerate(variants.HEAD_DIMS):
        yield from masked(d)
        if d <= 128:
            yield from of_short(d)
        changes = {"dtype": HALF[i % 2], "num_heads_kv": 1, "causal": True}
        yield poisoned(f"d{d}-long", (1000, 3), **sized(d), **changes)
    for (d, dv), (i, dtype) in product(OTHER_DIMS, enumerate(HALF)):
        lengths = lengths_for(max(d, dv), unequal=i == 1)
        yield poisoned(f"d{d}-dv{dv}", *lengths, dtype=dtype, causal=True, **sized(d, dv))
    for d, (heads_kv, group), dtype in product((64, 128), HEADS, HALF):
        changes = {"num_heads_kv": heads_kv, "group": group, "causal": True}
        yield poisoned(f"d{d}-group{group}", FEW, FEW_K, dtype=dtype, **sized(d), **changes)
    rng = np.random.default_rng(0)
    many = tuple(int(n) for n in rng.integers(0, 40, 60))
    for dtype, dims in zip(HALF, (sized(64), sized(128)), strict=True):
        plain = partial(poisoned, dtype=dtype, **dims)
        yield plain("decode", (1, 1, 1, 1), (129, 256, 3, 0), causal=True, group=3)
        yield plain("all-dead", (129, 7), (0, 0), past_k=4)
        yield plain("dead-but-few", (129, 7), (4, 3), causal=True)
        yield plain("scale", (129, 7), softmax_scale=0.5, causal=True)
        yield plain("no-dlse", (129, 7), dlse=False)
        yield plain("no-rows-past-the-end", (129, 7), past_q=0, past_k=0)
        yield plain("many-rows-past-the-end", (70, 7), past_q=200, past_k=300, causal=True)
        yield plain("strided", (129, 7), strided=True, causal=True, group=2)
        yield plain("many", many, causal=True)


def forced() -> Iterator[tuple[Row, Case, str]]:
    """Rows that this arch can run, and would not run by itself."""
    for row in variants.TABLE:
        if row.family == "numba" or row.stem not in STEPS_OF:
            continue
        if not variants.serves(row, ARCH):
            continue
        for case, step in product(masked(row.head_dim), STEPS_OF[row.stem]):
            if chosen(row.stem, case) is not row and (case.causal or case.window == (33, 7)):
                if when_asked(row, case) is row:
                    yield row, case, step


def when_asked(row: Row, case: Case) -> Row:
    """The row that a case runs on when RAWATTN_VARIANT asks for ``row``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAWATTN_VARIANT", row.name)
        return chosen(row.stem, case)


CASES = tuple(cases())
RUNS = [(case, step) for case in CASES for step in STEPS]
FORCED = list(forced())
RUN_IDS = [f"{case}-{step}" for case, step in RUNS]
FORCED_IDS = [f"{row.name}-{case}-{step}" for row, case, step in FORCED]


# ---- builds ahead of time ---------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """Fill the cache of cubins from several processes, where many tests are selected."""
    wanted: list[Build] = []
    for item in request.session.items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path == request.path and {"case", "step"} <= given.keys():
            wanted += builds_of(given["case"], given["step"], given.get("row"))
    warm(wanted)


@pytest.mark.parametrize("step", STEPS)
def test_builds_are_those_that_a_call_asks_for(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = built(monkeypatch)
    case = next(case for case in CASES if case.head_dim != case.head_dim_v)
    run_step(*prepared(case), step)
    assert asked == kernels_of(builds_of(case, step))


# ---- running and judging ----------------------------------------------------------------------


# The tests of a case follow each other; that is how often its reference is computed.
@lru_cache(maxsize=4)
def prepared(case: Case) -> tuple[Expected, Tensors]:
    """The expected values, and the inputs on the GPU."""
    expected = expect(case)
    return expected, expected.tensors.on("cupy")


def poison(expected: Expected, *names: str) -> dict[str, Any]:
    """Arrays full of NaN for the results."""
    shapes = {name: expected.targets[name].reference.shape for name in names}
    dtype = dtype_of(expected.case.dtype)
    return {name: moved(np.full(shape, np.nan, dtype=dtype)) for name, shape in shapes.items()}


def run_step(expected: Expected, t: Tensors, step: str, **options: Any) -> dict[str, Any]:
    """One forward, or one backward by a method, on the reference's out and lse."""
    options |= mask_of(expected.case, t)
    if step == "forward":
        target = poison(expected, "out")
        out, lse = api.forward(t.q, t.k, t.v, t.cu_seqlens_q, return_lse=True, **target, **options)
        assert out is target["out"]
        return {"out": out, "lse": lse}
    targets = poison(expected, "dq", "dk", "dv")
    inputs = (t.dout, t.q, t.k, t.v, moved(expected.out), moved(expected.lse), t.cu_seqlens_q)
    grads = api.backward(*inputs, dlse=t.dlse, method=step, **targets, **options)
    assert all(a is b for a, b in zip(grads, targets.values(), strict=True))
    return targets


def test_there_are_many_cases() -> None:
    assert len(RUNS) + len(FORCED) >= 500
    assert len(set(RUN_IDS)) == len(RUN_IDS) and len(set(FORCED_IDS)) == len(FORCED_IDS)


@pytest.mark.parametrize(("case", "step"), RUNS, ids=RUN_IDS)
def test_step(case: Case, step: str) -> None:
    expected, t = prepared(case)
    judge(expected, run_step(expected, t, step, backend="cuda"))


@pytest.mark.parametrize(("row", "case", "step"), FORCED, ids=FORCED_IDS)
def test_other_row(row: Row, case: Case, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAWATTN_VARIANT", row.name)
    assert chosen(row.stem, case) is row
    expected, t = prepared(case)
    judge(expected, run_step(expected, t, step, backend="cuda"))


@pytest.mark.parametrize("dlse", [True, False], ids=["dlse", "no-dlse"])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("head_dim_v", [32, 40, 128, 200, 256])
def test_preprocess(head_dim_v: int, dtype: str, dlse: bool) -> None:
    case = poisoned("delta", (129, 7), dtype=dtype, dlse=dlse, **sized(64, head_dim_v))
    expected, t = prepared(case)
    delta = moved(np.full(expected.lse.shape, np.nan, dtype=np.float32))
    result = api.backward_preprocess(moved(expected.out), t.dout, dlse=t.dlse, delta=delta)
    assert result is delta
    judge(expected, {"delta": delta})


# ---- repeatability ----------------------------------------------------------------------------

REPEATED = [
    poisoned("repeated", EDGES, EDGES_K, dtype=dtype, group=3, num_heads_kv=1, causal=True, **dims)
    for dtype, dims in (("float16", sized(64)), ("bfloat16", sized(128)), ("bfloat16", sized(256)))
]
REPEATED_IDS = [f"{case}-d{case.head_dim}" for case in REPEATED]


@pytest.mark.parametrize("step", ["forward", "deterministic"])
@pytest.mark.parametrize("case", REPEATED, ids=REPEATED_IDS)
def test_bitwise_repeatable(case: Case, step: str) -> None:
    expected, t = prepared(case)
    first = run_step(expected, t, step)
    for _ in range(3):
        again = run_step(expected, t, step)
        assert {name: bits(a) for name, a in again.items()} == {
            name: bits(a) for name, a in first.items()
        }


@pytest.mark.parametrize("step", ["atomic_dq", "atomic_dkv"])
@pytest.mark.parametrize("case", REPEATED, ids=REPEATED_IDS)
def test_atomics_differ_by_rounding_alone(case: Case, step: str) -> None:
    """One unit in the last place of the result, and what the order of float32 sums may change."""
    expected, t = prepared(case)
    first, again = (run_step(expected, t, step) for _ in range(2))
    healthy = {"dq": case.healthy("q"), "dk": case.healthy("k"), "dv": case.healthy("k")}
    for name, rows in healthy.items():
        a, b = (to_numpy(r[name])[rows].astype(np.float64) for r in (first, again))
        ulp = float(ml_dtypes.finfo(dtype_of(case.dtype)).eps) * np.maximum(np.abs(a), np.abs(b))
        order = 2 * float(np.finfo(np.float32).eps) * case.terms**0.5 * np.abs(a).max()
        assert (np.abs(a - b) <= ulp + order).all(), name


@pytest.mark.parametrize("case", REPEATED, ids=REPEATED_IDS)
def test_a_sequence_alone_and_in_a_batch(case: Case) -> None:
    expected, t = prepared(case)
    whole = run_step(expected, t, "forward") | run_step(expected, t, "deterministic")
    given_out, given_lse = moved(expected.out), moved(expected.lse)
    bounds_q, bounds_k = (np.cumsum([0, *n]).tolist() for n in (case.lengths_q, case.lengths_k))
    for b in range(len(case.lengths_q)):
        if b in case.poisoned:
            continue
        rows, keys = slice(*bounds_q[b : b + 2]), slice(*bounds_k[b : b + 2])
        q, k, v, dout = t.q[rows], t.k[keys], t.v[keys], t.dout[rows]
        offsets = [moved(np.array([0, len(a)], dtype=np.int32)) for a in (q, k)]
        options = {"causal": case.causal, "cu_seqlens_k": offsets[1]}
        out, lse = api.forward(q, k, v, offsets[0], return_lse=True, **options)
        passed = (dout, q, k, v, given_out[rows], given_lse[:, rows], offsets[0])
        options["dlse"] = t.dlse[:, rows]
        dq, dk, dv = api.backward(*passed, deterministic=True, **options)
        assert bits(out) == bits(whole["out"][rows])
        assert bits(lse) == bits(whole["lse"][:, rows])
        assert bits(dq) == bits(whole["dq"][rows])
        assert bits(dk) == bits(whole["dk"][keys])
        assert bits(dv) == bits(whole["dv"][keys])


# ---- layouts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("axis", ["token", "head"])
def test_offsets_of_more_than_32_bits(axis: str, step: str) -> None:
    """Three tokens or three heads, 2**30 elements from each other, in one buffer."""
    case = Case("far", (3,), (3,), num_heads_kv=3, causal=True, past_q=0, past_k=0)
    expected, near = prepared(case)
    host, far = expected.tensors, Far(axis, slots=8)
    q, k, v = far.put(host.q), far.put(host.k), far.put(host.v)
    if step == "forward":
        out = api.forward(q, k, v, near.cu_seqlens_q, causal=True, out=far.nan())
        judge(expected, {"out": far.get(out)})
        return
    dout, out = far.put(host.dout), far.put(expected.out)
    targets = {name: far.nan() for name in ("dq", "dk", "dv")}
    passed = (dout, q, k, v, out, moved(expected.lse), near.cu_seqlens_q)
    api.backward(*passed, causal=True, dlse=near.dlse, method=step, **targets)
    judge(expected, {name: far.get(array) for name, array in targets.items()})


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_lengths_strides_heads_and_masks(data: st.DataObject) -> None:
    case, qkv = draw_case(data)
    expected = expect(case)
    t = lay_out(data, expected.tensors, ("dout",), qkv)
    for step in ("forward", data.draw(st.sampled_from(METHODS), "method")):
        results = {name: to_numpy(a) for name, a in run_step(expected, t, step).items()}
        for name, array in results.items():
            verdict = expected.targets[name].judge(array)
            # Lengths of 0 and 1 alone may leave a result so small that zeros would pass.
            assert verdict.verdict in ("pass", "vacuous"), (name, verdict)


# ---- the Numba twins --------------------------------------------------------------------------

TWINS = [
    poisoned("twin-causal", (1, 65, 40), (30, 66, 0), dtype="float32", causal=True, group=3),
    poisoned("twin-window", (33, 1, 70), dtype="float64", window=(16, 5), group=2),
    poisoned("twin-full", (33, 0, 70), (9, 8, 65), dtype="bfloat16", **sized(40, 72)),
]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("twin", TWINS, ids=str)
def test_numba(twin: Case, step: str) -> None:
    pytest.importorskip("numba.cuda")
    expected, t = prepared(replace(twin, num_heads_kv=1))
    # Without backend= float32 and float64 come here by themselves.
    options = {"backend": "numba"} if twin.dtype in HALF else {}
    judge(expected, run_step(expected, t, step, **options))
