"""The CUDA kernels of double_backward and jvp on a GPU, judged by the tolerance of autograd.

The truth is torch's autograd of dense attention in float64, the error allowed that of the same in
the kernels' dtype. The cases carry NaN in a sequence between others, in the rows past the last one
and in the arrays that the results go to. Long by the ways to be right: numbers, symmetry, bits.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rawattn
from rawattn import variants
from rawattn.build import Build
from rawattn.check.cases import HALF, Case, make
from rawattn.check.second import expect_second
from rawattn.check.transfer import to_numpy
from rawattn.variants import Row
from rawattn.variants.steps import SECOND
from tests.shared.gpu_arrays import Far, bits, moved
from tests.shared.gpu_drawn import draw_case, lay_out
from tests.shared.gpu_problems import (
    ARCH,
    DOUBLE_BACKWARD,
    MASKS,
    OF_JVP,
    PARTIAL,
    STEMS,
    WHOLE,
    Chunk,
    Posed,
    along,
    builds_of,
    built,
    chosen,
    faults,
    inner,
    judge,
    kernels_of,
    place,
    poisoned,
    pose,
    run_double_backward,
    run_jvp,
    scale_of,
    sequences,
    sized,
    spelled,
    warm,
)

torch = pytest.importorskip("torch")
pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

DIMS = (
    *((64, 64), (64, 64), (128, 128), (128, 128), (32, 32), (96, 96), (192, 192), (256, 256)),
    *((8, 8), (40, 40), (72, 56), (104, 120), (136, 136), (200, 248), (16, 24), (24, 144)),
    *((64, 32), (64, 128), (192, 128), (256, 64)),
)


def chunk_of(i: int) -> Chunk:
    """Random problems of one size, half of them with the whole direction, half with parts of it.

    Few kinds of masks and directions, since each is compiled.
    """
    masks = MASKS[i % 5], MASKS[(i // 5 + i + 1) % 5]
    kinds = (masks[0], WHOLE), (masks[1], PARTIAL[(i // 6 + i) % 6])
    return Chunk(HALF[i % 2], DIMS[i], kinds, seed=i)


CHUNKS = [chunk_of(i) for i in range(len(DIMS))]


def builds_of_second(case: Case) -> Iterator[Build]:
    """What jvp and both ways of double_backward compile."""
    return (build for step in SECOND for build in builds_of(case, step))


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """Fill the cache of cubins from several processes, where many chunks are selected."""
    items = [item for item in request.session.items if item.path == request.path]
    given = [item.callspec.params for item in items if hasattr(item, "callspec")]
    wanted = [params["chunk"] for params in given if "chunk" in params]
    warm(build for chunk in wanted for case in chunk.cases() for build in builds_of_second(case))


# ---- 500 problems -----------------------------------------------------------------------------


def test_the_random_problems_have_everything_in_them() -> None:
    cases = [case for chunk in CHUNKS for case in chunk.cases()]
    assert len(cases) == 500 and len({case.name for case in cases}) == 500
    assert {case.group for case in cases} == {1, 3, 8}
    assert {case.direction for case in cases} == {WHOLE, *PARTIAL}
    open_sides = {tuple(side < 0 for side in case.mask_window) for case in cases}
    assert open_sides == set(product((False, True), repeat=2))
    for some in (
        [case for case in cases if case.lengths_q != case.lengths_k],
        [case for case in cases if case.unseen("q")[: sum(case.lengths_q)].any()],
        [case for case in cases if 0 in case.lengths_q or 0 in case.lengths_k],
        [case for case in cases if case.past_q],
        [case for case in cases if case.strided],
    ):
        assert len(some) > 50


@pytest.mark.parametrize("chunk", CHUNKS, ids=str)
def test_500_problems(chunk: Chunk) -> None:
    wrong = []
    for i, case in enumerate(chunk.cases()):
        posed, deterministic = pose(case), bool(i // 2 % 2)
        results = run_jvp(posed, backend="cuda")
        results |= run_double_backward(posed, backend="cuda", deterministic=deterministic)
        wrong += [f"{spelled(case)}\n  {fault}" for fault in faults(posed, results)]
    assert not wrong, "\n".join(wrong)


def test_builds_are_those_that_a_call_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = built(monkeypatch)
    posed = pose(next(CHUNKS[-1].cases()))
    run_jvp(posed)
    for deterministic in (False, True):
        run_double_backward(posed, deterministic=deterministic)
    assert asked == kernels_of(builds_of_second(posed.case))


# ---- symmetry ---------------------------------------------------------------------------------

EDGES = (63, 0, 129, 1, 65)
EDGES_K = (129, 5, 64, 9, 65)


def edges(name: str, **changes: Any) -> Case:
    """Lengths around a tile of 64 rows, with queries that see no key."""
    usual = {"group": 3, "num_heads_kv": 1, "causal": True}
    return poisoned(name, EDGES, EDGES_K, **usual | changes)


SYMMETRIC = [
    edges("symmetry-64-32", dtype="float16", **sized(64, 32)),
    edges("symmetry-128", dtype="bfloat16", **sized(128)),
    edges("symmetry-256", dtype="float16", causal=False, window=(33, 7), **sized(256)),
    edges("symmetry-72", dtype="bfloat16", causal=False, dlse=False, group=8, **sized(72)),
    *(
        edges(f"symmetry-part-{i}", dtype=HALF[i % 2], direction=direction)
        for i, direction in enumerate(PARTIAL)
    ),
]


def variance_of_rounding(posed: Posed, grads: list[Any]) -> float:
    """How far from the truth |(gq, gk, gv)|^2 is on the average, by roundings to 16 bits alone.

    To first order, each rounding is an error of its own, of relative size up to the unit roundoff
    u, thus of a variance up to u^2 / 3. Rounded are the results, the operands P', dS' and dS of
    their products, out, and the operands P o E and P of ddO. Those of out, P o E and P spread over
    a row through the errors d and w of its D and W: dS moves by -P d, and dS' by -P' d - P w.
    """
    t, case = posed.tensors, posed.case
    total = inner(case, grads, grads)  # the results are rounded too
    for rows, keys, mask in sequences(case):
        heads = torch.arange(case.num_heads_q, device=t.q.device) // case.group
        A, B, C = (
            torch.zeros_like(x[at]) if part is None else part[at]
            for x, part, at in zip((t.q, t.k, t.v), t.direction, (rows, keys, keys), strict=True)
        )
        Q, A, dO = (x.double().transpose(0, 1) for x in (t.q[rows], A, t.dout[rows]))
        K, V, B, C = (x.double().transpose(0, 1)[heads] for x in (t.k[keys], t.v[keys], B, C))
        dL = 0.0 if t.dlse is None else t.dlse[:, rows, None].double()
        s, forbidden = scale_of(case), ~torch.from_numpy(mask).to(Q.device)
        P = torch.softmax((s * Q @ K.mT).masked_fill(forbidden, -torch.inf), dim=-1).nan_to_num()
        E, dP, out = s * (A @ K.mT + Q @ B.mT), dO @ V.mT, P @ V
        e, D = over_keys(P * E), over_keys(P * dP) - dL
        ddO = (P * E) @ V + P @ C - e * out
        tP, dS = P * (E - e), P * (dP - D)
        tdS = tP * (dP - D) + P * (dO @ C.mT - over_keys(dO * ddO))
        d = over_keys((dO * out).square())
        of_ddO = (P * E).square() @ V.square() + P.square() @ C.square() + (e * out).square()
        w = over_keys(dO.square() * (of_ddO + ddO.square()))
        gV = tP.square().mT @ dO.square()
        gQ = tdS.square() @ K.square() + dS.square() @ B.square()
        gK = tdS.square().mT @ Q.square() + dS.square().mT @ A.square()
        gQ += d * (tP @ K + P @ B).square() + w * (P @ K).square()
        gK += (d * tP.square() + w * P.square()).mT @ Q.square()
        gK += 2 * (d * tP * P).mT @ (Q * A) + (d * P.square()).mT @ A.square()
        total += float(gV.sum() + s**2 * (gQ.sum() + gK.sum()))
    return total * float(torch.finfo(t.q.dtype).eps / 2) ** 2 / 3


def over_keys(a: Any) -> Any:
    return a.sum(dim=-1, keepdim=True)


@pytest.mark.parametrize("case", SYMMETRIC, ids=str)
def test_second_derivatives_are_symmetric(case: Case) -> None:
    """<u, H v> = <v, H u> within six standard deviations.

    u is standard normal and knows nothing of the errors of H v, so what they bring into <u, H v>
    has their square sum for its variance; <u, H v> itself is of the size of |H v|.
    """
    posed = pose(case)
    other = along(posed, make(case, seed=1).on("torch").direction)
    ways, variance, size = [], 0.0, 0.0
    for here, there in ((posed, other), (other, posed)):
        results = run_double_backward(here, backend="cuda")
        grads = [results[name] for name in ("gq", "gk", "gv")]
        ways.append(inner(case, there.tensors.direction, grads))
        variance += variance_of_rounding(here, grads)
        size += inner(case, grads, grads)
    assert abs(ways[0] - ways[1]) <= 6 * variance**0.5
    assert 6 * variance**0.5 < 0.05 * size**0.5, "the bound says nothing"


# ---- repeatability ----------------------------------------------------------------------------

REPEATED = [
    edges("repeated-64", dtype="float16", **sized(64)),
    edges("repeated-128", dtype="bfloat16", **sized(128)),
    edges("repeated-256", dtype="bfloat16", causal=False, **sized(256)),
]


@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_bitwise_repeatable(case: Case) -> None:
    posed = pose(case)
    options = {"deterministic": True, "backend": "cuda"}
    runs = [
        bits(*run_jvp(posed, backend="cuda").values())
        + bits(*run_double_backward(posed, **options).values())
        for _ in range(4)
    ]
    assert all(run == runs[0] for run in runs)


@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_a_sequence_alone_and_in_a_batch(case: Case) -> None:
    posed = pose(case)
    t, options = posed.tensors, {"causal": case.causal, "backend": "cuda"}
    whole = run_jvp(posed, backend="cuda")
    whole |= run_double_backward(posed, backend="cuda", deterministic=True)
    for rows, keys, _ in sequences(case):
        q, k, v, of_q, of_k, of_v = (
            x[at]
            for x, at in zip((t.q, t.k, t.v, *t.direction), (rows, keys, keys) * 2, strict=True)
        )
        offsets = [torch.tensor([0, len(x)], dtype=torch.int32, device=q.device) for x in (q, k)]
        options["cu_seqlens_k"] = offsets[1]
        alone = rawattn.jvp(q, k, v, of_q, of_k, of_v, offsets[0], **options)
        for name, array in zip(OF_JVP, alone, strict=True):
            assert bits(array) == bits(whole[name][place(name, rows, keys)]), name
        passed = (t.dout[rows], q, k, v, posed.out[rows], posed.lse[:, rows], offsets[0])
        dlse = None if t.dlse is None else t.dlse[:, rows]
        again = rawattn.double_backward(
            of_q, of_k, of_v, *passed, dlse=dlse, deterministic=True, **options
        )
        for name, array in zip(DOUBLE_BACKWARD, again, strict=True):
            assert bits(array) == bits(whole[name][place(name, rows, keys)]), name


@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_atomic_and_deterministic_agree(case: Case) -> None:
    posed = pose(case)
    atomic, exact = (
        run_double_backward(posed, backend="cuda", deterministic=d) for d in (False, True)
    )
    judge(posed, atomic)
    judge(posed, exact)
    check_agreement(posed, atomic, exact)


def check_agreement(posed: Posed, results: dict[str, Any], others: dict[str, Any]) -> None:
    for name, array in results.items():
        verdict = posed.targets[name].judge(to_numpy(array), against=to_numpy(others[name]))
        assert verdict.ok, (name, verdict)


# ---- rows of the table ------------------------------------------------------------------------


def rows_and_cases() -> Iterator[tuple[Row, Case]]:
    """Every row that this arch can run without a softcap, on lengths that cross its tiles."""
    rows = [row for row in variants.TABLE if row.stem in STEMS and row.family != "numba"]
    rows = [row for row in rows if row.when.softcap is not True]
    for i, row in enumerate(row for row in rows if variants.serves(row, ARCH)):
        m, n = row.cfg.block_m, row.cfg.block_n
        lengths = (m - 1, 2 * m + 1, 1, m, 0), (2 * n + 1, n + 1, n, n - 1, 3)
        changes = {"dtype": HALF[i % 2], "group": 3, "num_heads_kv": 1, **sized(row.head_dim)}
        yield row, poisoned("row-causal", *lengths, causal=True, **changes)
        changes["dtype"] = HALF[(i + 1) % 2]
        yield row, poisoned("row-window", *lengths, window=(33, 7), **changes)


ROWS = list(rows_and_cases())
FORMS = {  # deterministic or not: what uses a stem
    "double_backward_out": (True,),
    "double_backward_kv": (False, True),
    "double_backward_q": (True,),
}


@pytest.mark.parametrize(("row", "case"), ROWS, ids=[f"{r.name}-{c}" for r, c in ROWS])
def test_row(row: Row, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAWATTN_VARIANT", row.name)
    assert chosen(row.stem, case) is row
    posed = pose(case)
    if row.stem == "jvp":
        judge(posed, run_jvp(posed, backend="cuda"))
        return
    for deterministic in FORMS[row.stem]:
        judge(posed, run_double_backward(posed, backend="cuda", deterministic=deterministic))


# ---- directions -------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "deterministic"])
@pytest.mark.parametrize("direction", PARTIAL, ids=str)
def test_none_is_zero(direction: tuple[bool, bool, bool], deterministic: bool) -> None:
    posed = pose(edges(f"part-{direction}", direction=direction))
    t = posed.tensors
    filled = along(
        posed,
        tuple(
            torch.zeros_like(x) if part is None else part
            for x, part in zip((t.q, t.k, t.v), t.direction, strict=True)
        ),
    )
    check_agreement(posed, run_jvp(posed, backend="cuda"), run_jvp(filled, backend="cuda"))
    options = {"backend": "cuda", "deterministic": deterministic}
    results = run_double_backward(posed, **options)
    judge(posed, results)
    check_agreement(posed, results, run_double_backward(filled, **options))


def test_no_direction_at_all() -> None:
    posed = pose(edges("none", direction=(False, False, False)))
    judge(posed, run_jvp(posed, backend="cuda"))  # tangents exactly zero
    judge(posed, run_double_backward(posed, backend="cuda"))


@pytest.mark.parametrize(
    "lengths", [((), ()), ((0, 0), (0, 0)), ((4, 2), (0, 0)), ((0, 0), (4, 2))]
)
def test_nothing_to_see(lengths: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    posed = pose(Case("nothing", *lengths))
    results = run_jvp(posed, backend="cuda")
    assert (results.pop("lse") == -torch.inf).all()
    results |= run_double_backward(posed, backend="cuda")
    assert not any(array.any() for array in results.values())


# ---- layouts ----------------------------------------------------------------------------------


def test_expanded_directions() -> None:
    """A direction that repeats one number or one row, without memory for each."""
    posed = pose(edges("expanded"))
    t, one = posed.tensors, torch.ones((), dtype=posed.out.dtype, device=posed.out.device)
    expanded = one.expand(t.q.shape), t.tk[:1].expand(t.k.shape), t.tv[:, :1].expand(t.v.shape)
    views, copies = (along(posed, x) for x in (expanded, tuple(x.contiguous() for x in expanded)))
    assert bits(*run_jvp(views).values()) == bits(*run_jvp(copies).values())
    results = [run_double_backward(x, deterministic=True) for x in (views, copies)]
    assert bits(*results[0].values()) == bits(*results[1].values())


@pytest.mark.parametrize("deterministic", [False, True], ids=["atomic", "deterministic"])
@pytest.mark.parametrize("axis", ["token", "head"])
def test_offsets_of_more_than_32_bits(axis: str, deterministic: bool) -> None:
    """Three tokens or three heads, 2**30 elements from each other, in one buffer."""
    case = Case("far", (3,), (3,), num_heads_kv=3, causal=True, past_q=0, past_k=0)
    posed, host, far = pose(case), make(case), Far(axis, slots=14)
    near = host.on("cupy")
    q, k, v, dout, out = (
        far.put(x) for x in (host.q, host.k, host.v, host.dout, to_numpy(posed.out))
    )
    direction = [far.put(part) for part in host.direction]
    targets = {name: far.nan() for name in ("out", "tout")}
    rawattn.jvp(q, k, v, *direction, near.cu_seqlens_q, causal=True, **targets)
    judge(posed, {name: far.get(array) for name, array in targets.items()})
    targets = {name: far.nan() for name in ("ddout", "gq", "gk", "gv")}
    passed = (dout, q, k, v, out, moved(to_numpy(posed.lse)), near.cu_seqlens_q)
    options = {"causal": True, "dlse": near.dlse, "deterministic": deterministic}
    rawattn.double_backward(*direction, *passed, **targets, **options)
    judge(posed, {name: far.get(array) for name, array in targets.items()})


# ---- any shape and layout ---------------------------------------------------------------------


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_lengths_strides_heads_masks_and_directions(data: st.DataObject) -> None:
    parts = data.draw(st.sampled_from((WHOLE, *PARTIAL)), "direction")
    case, qkv = draw_case(data, direction=parts)
    expected = expect_second(case)
    t = lay_out(data, expected.tensors, ("dout", "tq", "tk", "tv"), qkv)
    direction = (t.tq, t.tk, t.tv)
    mask = {"causal": case.causal, "window": case.window, "cu_seqlens_k": t.cu_seqlens_k}
    inputs = (t.q, t.k, t.v)
    out, lse = rawattn.forward(*inputs, t.cu_seqlens_q, return_lse=True, **mask)
    of_jvp = rawattn.jvp(*inputs, *direction, t.cu_seqlens_q, **mask)
    second = rawattn.double_backward(
        *direction,
        *(t.dout, *inputs, out, lse, t.cu_seqlens_q),
        dlse=t.dlse,
        deterministic=data.draw(st.booleans(), "deterministic"),
        **mask,
    )
    results = dict(zip(("jvp out", "tout", "jvp lse", "tlse"), of_jvp, strict=True))
    results |= zip(DOUBLE_BACKWARD, second, strict=True)
    for name, array in results.items():
        verdict = expected.targets[name].judge(to_numpy(array))
        # Rows that see one key alone may leave a result so small that zeros would pass, or nothing
        # but the roundings of terms that cancel.
        roundings = np.finfo(np.float32).eps * case.terms
        cancels = verdict.allowed == 0 and verdict.error < roundings
        assert cancels or verdict.verdict in ("pass", "vacuous"), (name, verdict)
