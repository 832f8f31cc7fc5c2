"""rawattn.api_second on every kind of array: numbers, passes, workspaces, streams, refusals.

As in ``test_api.py`` the CUDA path runs on the fakes of ``fake_gpu``; its second derivatives are
formulas of their own, by what the passes hand to each other, and are held against the reference.
Long by the kinds of array and refusals, times two functions.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import arrays, call, device, passes
from rawattn.ops.workspaces import accum_shape
from rawattn.reference import second
from rawattn.variants import TABLE
from tests.shared import fake_gpu
from tests.shared.api_case import (
    KINDS,
    KINDS_AND_DTYPES,
    TOLERANCE,
    Case,
    check_waits,
    host,
    host_values,
    named_parameters,
    on,
    spread,
)
from tests.shared.fake_gpu import DTYPES, GPU, MAKERS, RESULTS, STREAMS, values_of

ROWS = {row.name: row for row in TABLE}
DIRECTIONS = list(itertools.product((True, False), repeat=3))
WHOLE, NOWHERE = (True, True, True), (False, False, False)
PARTS = ("tq", "tk", "tv")
ROOMS = ("ddout", "ddlse", "gq", "gk", "gv")  # what double_backward writes into


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_gpu.Kernels]:
    yield fake_gpu.install(monkeypatch)
    fake_gpu.remove()


class Second(Case):
    """A case with a direction (tq, tk, tv), which double_backward takes as (ddq, ddk, ddv)."""

    NAMES = (*Case.NAMES, *PARTS)

    def __init__(self, dtype: str = "float32", **options: Any) -> None:
        super().__init__(dtype, **options)
        rng = np.random.default_rng(1)
        for name, like in zip(PARTS, (self.q, self.k, self.v), strict=True):
            setattr(self, name, fake_gpu.aligned(rng.standard_normal(like.shape), DTYPES[dtype]))

    def _direction(self, parts: tuple[bool, ...]) -> list[Any]:
        pairs = zip(PARTS, parts, strict=True)
        return [getattr(self, name) if part else None for name, part in pairs]

    def tangents(self, parts: tuple[bool, ...] = WHOLE) -> Any:
        inputs = (self.q, self.k, self.v, *self._direction(parts), self.cu_q, self.cu_k)
        return second.jvp(*inputs, **self.mask)

    def gradients2(self, parts: tuple[bool, ...] = WHOLE, *, dlse: bool = True) -> Any:
        return second.double_backward(
            *self._direction(parts),
            *(self.dout, self.q, self.k, self.v, self.out, self.lse, self.cu_q, self.cu_k),
            dlse=self.dlse if dlse else None,
            **self.mask,
        )

    def check(self, given: Any, expected: Any, statistics: tuple[int, ...]) -> None:
        """Results against expectations; ``statistics`` are the places of lse's relatives."""
        for place, (x, y) in enumerate(zip(given, expected, strict=True)):
            self.close(x, y, self.statistic if place in statistics else None)


def jvp(a: dict[str, Any], case: Case, parts: tuple[bool, ...] = WHOLE, **options: Any) -> Any:
    direction = [a[name] if part else None for name, part in zip(PARTS, parts, strict=True)]
    options = {**case.mask, **options}
    return rawattn.jvp(
        a["q"], a["k"], a["v"], *direction, a["cu_q"], cu_seqlens_k=a["cu_k"], **options
    )


def double_backward(
    a: dict[str, Any], case: Case, parts: tuple[bool, ...] = WHOLE, **options: Any
) -> Any:
    direction = [a[name] if part else None for name, part in zip(PARTS, parts, strict=True)]
    options = {"dlse": a["dlse"], **case.mask, **options}
    names = ("dout", "q", "k", "v", "out", "lse", "cu_q")
    return rawattn.double_backward(
        *direction, *(a[name] for name in names), cu_seqlens_k=a["cu_k"], **options
    )


def check_jvp(case: Second, given: Any, parts: tuple[bool, ...] = WHOLE) -> None:
    case.check(given, case.tangents(parts), (2, 3))


def check_double(
    case: Second, given: Any, parts: tuple[bool, ...] = WHOLE, *, dlse: bool = True
) -> None:
    case.check(given, case.gradients2(parts, dlse=dlse), (1,))


# ---- the mathematics --------------------------------------------------------------------------


def exact_gradients(case: Second, moved: dict[str, np.ndarray]) -> Any:
    """dq, dk, dv of moved inputs, with the out and lse that belong to them."""
    x = {name: getattr(case, name) for name in ("q", "k", "v", "dout", "dlse")} | moved
    inputs = (x["q"], x["k"], x["v"])
    out, lse = rawattn.forward(
        *inputs, case.cu_q, cu_seqlens_k=case.cu_k, return_lse=True, **case.mask
    )
    cotangents = {"dlse": x["dlse"], "cu_seqlens_k": case.cu_k}
    return rawattn.backward(x["dout"], *inputs, out, lse, case.cu_q, **cotangents, **case.mask)


MASKS = [{}, {"window": (-1, -1)}, {"window": (1, 1), "softmax_scale": None}, {"heads": (3, 1)}]


@pytest.mark.parametrize("options", MASKS)
def test_jvp_is_the_derivative_of_forward(options: dict[str, Any]) -> None:
    case = Second("float64", **options)
    step, results = 1e-5, []
    for sign in (1, -1):
        inputs = [
            getattr(case, name) + sign * step * getattr(case, f"t{name}")
            for name in ("q", "k", "v")
        ]
        results.append(
            rawattn.forward(
                *inputs, case.cu_q, cu_seqlens_k=case.cu_k, return_lse=True, **case.mask
            )
        )
    out, tout, lse, tlse = jvp(host("numpy", case), case)
    seen = np.isfinite(lse)
    expected = (results[0][0] - results[1][0]) / (2 * step)
    np.testing.assert_allclose(tout, expected, rtol=1e-7, atol=1e-8)
    expected = (results[0][1][seen] - results[1][1][seen]) / (2 * step)
    np.testing.assert_allclose(tlse[seen], expected, rtol=1e-7, atol=1e-8)
    assert (tlse[~seen] == 0).all() and (~seen).any()
    np.testing.assert_array_equal(out, case.exact[0])
    np.testing.assert_array_equal(lse, case.exact[1])


@pytest.mark.parametrize("options", MASKS)
def test_double_backward_is_the_gradient_of_backward(options: dict[str, Any]) -> None:
    case = Second("float64", **options)
    given = dict(zip(ROOMS, double_backward(host("numpy", case), case), strict=True))
    rng = np.random.default_rng(2)
    step = 1e-5
    for name, result in zip(("dout", "dlse", "q", "k", "v"), given.values(), strict=True):
        way = rng.standard_normal(result.shape)
        sums = []
        for sign in (1, -1):
            moved = {name: getattr(case, name) + sign * step * way}
            grads = exact_gradients(case, moved)
            pairs = zip((case.tq, case.tk, case.tv), grads, strict=True)
            sums.append(sum((dd * grad).sum() for dd, grad in pairs))
        expected = (sums[0] - sums[1]) / (2 * step)
        assert math.isclose((way * result).sum(), expected, rel_tol=1e-6), name


def test_the_two_agree() -> None:
    case = Second("float64")
    a = host("numpy", case)
    _, tout, _, tlse = jvp(a, case)
    ddout, ddlse, *_ = double_backward(a, case)
    np.testing.assert_allclose(ddout, tout, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(ddlse, tlse, rtol=1e-12, atol=1e-13)


def test_second_derivatives_are_symmetric() -> None:
    case = Second("float64")
    a = host("numpy", case)
    rng = np.random.default_rng(3)
    other = {name: rng.standard_normal(a[name].shape) for name in PARTS}
    there = double_backward(a, case)[2:]
    back = double_backward(a | other, case)[2:]
    one = sum((other[name] * g).sum() for name, g in zip(PARTS, there, strict=True))
    two = sum((a[name] * g).sum() for name, g in zip(PARTS, back, strict=True))
    assert math.isclose(one, two, rel_tol=1e-12) and abs(one) > 1


# ---- the CUDA path ----------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "dtype"), KINDS_AND_DTYPES)
def test_jvp_on_a_device(gpu: fake_gpu.Kernels, kind: str, dtype: str) -> None:
    case = Second(dtype)
    results = jvp(on(kind, case), case)
    assert {type(x) for x in results} == {RESULTS[kind]}
    check_jvp(case, results)
    [(row, used)] = gpu.launched
    assert ROWS[row].stem == "jvp"
    assert ROWS[row].family == ("sm80" if dtype in ("float16", "bfloat16") else "numba")
    assert used == STREAMS.get(kind, STREAMS["cupy"])
    assert GPU.entered == []


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("kind", "dtype"), KINDS_AND_DTYPES)
def test_double_backward_on_a_device(
    gpu: fake_gpu.Kernels, kind: str, dtype: str, deterministic: bool
) -> None:
    case = Second(dtype)
    results = double_backward(on(kind, case), case, deterministic=deterministic)
    assert {type(x) for x in results} == {RESULTS[kind]}
    check_double(case, results)
    assert {used for _, used in gpu.launched} == {STREAMS.get(kind, STREAMS["cupy"])}
    assert GPU.entered == []


def stems_and_families(gpu: fake_gpu.Kernels) -> tuple[list[str], set[str]]:
    rows = [ROWS[name] for name, _ in gpu.launched]
    return [row.stem for row in rows], {row.family for row in rows}


@pytest.mark.parametrize("backend", [None, "cuda", "numba"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_passes(gpu: fake_gpu.Kernels, deterministic: bool, backend: str | None) -> None:
    case = Second("float16")
    double_backward(on("cupy", case), case, deterministic=deterministic, backend=backend)
    last = "double_backward_q" if deterministic else "backward_postprocess"
    stems, families = stems_and_families(gpu)
    assert stems == ["double_backward_out", "double_backward_kv", last]
    assert families == {"numba" if backend == "numba" else "sm80"}
    gpu.launched.clear()
    jvp(on("cupy", case), case, backend=backend)
    assert stems_and_families(gpu) == (["jvp"], families)


@pytest.mark.parametrize("deterministic", [False, True])
def test_one_family_for_all_passes(
    gpu: fake_gpu.Kernels, monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    monkeypatch.setenv("RAWATTN_VARIANT", "double_backward_kv_numba")
    case = Second("float16")
    results = double_backward(on("cupy", case), case, deterministic=deterministic)
    check_double(case, results)
    assert stems_and_families(gpu)[1] == {"numba"}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_workspaces(gpu: fake_gpu.Kernels, dtype: str) -> None:
    case = Second(dtype)
    double_backward(on("torch", case), case)
    (first, keys, last), problem = gpu.views, gpu.problems[0]
    [name] = [row for row, _ in gpu.launched if "postprocess" in row]
    *_, delta, ddelta, zeroed, cu_q, cu_k, _sinks, _ddsinks, _seqused_k = first
    accum, gq, offsets = last
    assert offsets == cu_q != cu_k and gq.shape == case.q.shape
    assert accum.shape == accum_shape(ROWS[name], problem, "dq")
    for view in (delta, ddelta, accum):
        assert view.dtype == case.statistic
    for view in (delta, ddelta):
        assert view.shape == case.lse.shape
    _q, _k, _v, _ddq, _ddk, _ddv, _dout, _lse, *sums, gq_accum, _gk, _gv, _, _, _ = keys
    assert sums == [delta, first[11], ddelta], "delta, ddlse, ddelta"
    assert gq_accum == zeroed == accum
    assert len({view.ptr for view in (delta, ddelta, accum, first[11])}) == 4


def test_no_atomics_where_determinism_is_asked_for(gpu: fake_gpu.Kernels) -> None:
    case = Second("float16")
    double_backward(on("cupy", case), case, deterministic=True)
    assert gpu.views[0][14] is gpu.views[1][11] is None, "gq_accum"
    assert gpu.views[2][:11] == gpu.views[1][:11], "both halves read the same"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("parts", DIRECTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_direction(
    gpu: fake_gpu.Kernels, kind: str, parts: tuple[bool, ...], deterministic: bool
) -> None:
    case = Second()
    a = on(kind, case)
    check_jvp(case, jvp(a, case, parts), parts)
    [views] = gpu.views
    if parts == NOWHERE:
        assert stems_and_families(gpu)[0] == ["forward"]
    else:
        assert [view is not None for view in views[3:6]] == list(parts)
    gpu.views.clear()
    check_double(case, double_backward(a, case, parts, deterministic=deterministic), parts)
    assert len(gpu.views) == (0 if parts == NOWHERE else 3)
    for views in gpu.views[: 3 if deterministic else 2]:
        assert [view is not None for view in views[3:6]] == list(parts)


def test_no_direction_is_zero_whatever_is_passed(gpu: fake_gpu.Kernels) -> None:
    case = Second()
    a = on("cupy", case)
    a["out"][...], a["lse"][...] = np.nan, np.nan
    for backend in (None, "reference"):
        for result in double_backward(a, case, NOWHERE, backend=backend):
            assert (values_of(result) == 0).all()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_without_dlse(gpu: fake_gpu.Kernels, kind: str, deterministic: bool) -> None:
    case = Second()
    results = double_backward(on(kind, case), case, dlse=None, deterministic=deterministic)
    check_double(case, results, dlse=False)
    assert gpu.views[0][9] is None


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_runs_on_the_stream(
    gpu: fake_gpu.Kernels, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    current: list[list[int]] = []

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **options: Any) -> Any:
            current.append([*GPU.entered])
            return function(*given, **options)

        return run

    for name in ("jvp", "double_backward"):
        monkeypatch.setattr(second, name, watched(getattr(second, name)))
    case = Second()
    a = on(kind, case)
    jvp(a, case, backend="reference")
    double_backward(a, case, backend="reference")
    assert current == 2 * [[STREAMS.get(kind, STREAMS["cupy"])]]


@pytest.mark.parametrize("kind", KINDS)
def test_reference_on_a_device(gpu: fake_gpu.Kernels, kind: str) -> None:
    case = Second()
    a = on(kind, case)
    for parts in DIRECTIONS:
        results = jvp(a, case, parts, backend="reference")
        check_jvp(case, results, parts)
        assert {type(x) for x in results} == {RESULTS[kind]}
        results = double_backward(a, case, parts, backend="reference")
        check_double(case, results, parts)
        assert {type(x) for x in results} == {RESULTS[kind]}
    check_double(case, double_backward(a, case, dlse=None, backend="reference"), dlse=False)
    assert gpu.launched == []


def test_dead_rows_and_rows_of_no_sequence(gpu: fake_gpu.Kernels) -> None:
    case = Second()
    dead = case.lse == -np.inf
    assert dead.any(axis=0).sum() >= 3, "a sequence without keys, and two rows of none"
    for backend in (None, "reference"):
        a = on("torch", case)
        out, tout, lse, tlse = map(values_of, jvp(a, case, backend=backend))
        ddout, ddlse, gq, gk, gv = map(values_of, double_backward(a, case, backend=backend))
        assert (lse[dead] == -np.inf).all()
        for rows in (out, tout, tlse.T, ddout, ddlse.T, gq):
            assert (rows[dead.T] == 0).all()
        for keys in (gk, gv):
            assert (keys[case.cu_k[-1] :] == 0).all()


# ---- layouts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["strided", "odd", "last", "heads"])
@pytest.mark.parametrize(("kind", "dtype"), [(k, "float16") for k in KINDS] + [("cupy", "float64")])
def test_any_layout_in(gpu: fake_gpu.Kernels, kind: str, dtype: str, how: str) -> None:
    case = Second(dtype)
    a = on(kind, case)
    for name in ("q", "k", "v", "dout", "out", *PARTS):
        a[name] = MAKERS[kind](spread(getattr(case, name), how))
    for name in ("lse", "dlse"):
        a[name] = MAKERS[kind](np.asfortranarray(getattr(case, name)))
    for name in ("cu_q", "cu_k"):
        a[name] = MAKERS[kind](np.repeat(getattr(case, name), 2).astype(np.int64)[::2])
    check_jvp(case, jvp(a, case))
    for deterministic in (False, True):
        check_double(case, double_backward(a, case, deterministic=deterministic))


AXES = [(0,), (1,), (0, 1), (2,), (0, 1, 2)]


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "jax"])
def test_expanded_directions(gpu: fake_gpu.Kernels, kind: str, axes: tuple[int, ...]) -> None:
    case = Second("float16")
    a = on(kind, case)
    for name in PARTS:
        values = getattr(case, name)
        one = fake_gpu.aligned(
            values[tuple(slice(1) if i in axes else slice(None) for i in range(3))]
        )
        expanded = np.broadcast_to(one, values.shape)
        if 1 in axes and values.shape[1] > 1:
            assert 0 in expanded.strides
        setattr(case, name, expanded)
        a[name] = MAKERS[kind](expanded)
    check_jvp(case, jvp(a, case))
    check_double(case, double_backward(a, case))
    for views in (gpu.views[0], gpu.views[1]):
        for name, view in zip(PARTS, views[3:6], strict=True):
            same = view.ptr == getattr(case, name).ctypes.data
            assert same == (2 not in axes), "copied only where a kernel could not read it"


@pytest.mark.parametrize("how", ["dense", "strided", "odd", "last", "heads"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "jax"])
def test_preallocated(gpu: fake_gpu.Kernels, kind: str, how: str) -> None:
    case = Second("float16")
    a = on(kind, case)

    def room(values: np.ndarray) -> Any:
        empty = fake_gpu.poison(fake_gpu.aligned(np.zeros_like(values)))
        if values.ndim == 2:
            return MAKERS[kind](empty if how == "dense" else np.asfortranarray(empty))
        return MAKERS[kind](empty if how == "dense" else spread(empty, how))

    for backend, parts in itertools.product((None, "reference"), (WHOLE, NOWHERE)):
        rooms = {"out": room(case.out), "tout": room(case.out)}
        results = jvp(a, case, parts, backend=backend, **rooms)
        check_jvp(case, results, parts)
        assert results[0] is rooms["out"] and results[1] is rooms["tout"]
        for deterministic in (False, True):
            arrays_ = (case.out, case.lse, case.q, case.k, case.v)
            rooms = {name: room(x) for name, x in zip(ROOMS, arrays_, strict=True)}
            options = {"backend": backend, "deterministic": deterministic}
            results = double_backward(a, case, parts, **rooms, **options)
            check_double(case, results, parts)
            for result, name in zip(results, ROOMS, strict=True):
                assert result is rooms[name]


@pytest.mark.parametrize("name", ROOMS)
def test_one_result_preallocated(gpu: fake_gpu.Kernels, name: str) -> None:
    case = Second()
    likes = dict(zip(ROOMS, (case.out, case.lse, case.q, case.k, case.v), strict=True))
    room = MAKERS["torch"](fake_gpu.poison(fake_gpu.aligned(likes[name])))
    results = double_backward(on("torch", case), case, **{name: room})
    assert [result is room for result in results] == [other == name for other in ROOMS]
    check_double(case, results)


# ---- nothing to see ---------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [WHOLE, NOWHERE])
@pytest.mark.parametrize("preallocated", [False, True])
@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize(
    ("total_q", "total_k", "batch"), [(0, 0, 1), (0, 5, 2), (5, 0, 2), (4, 5, 0)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens_or_no_sequences(
    gpu: fake_gpu.Kernels,
    kind: str,
    total_q: int,
    total_k: int,
    batch: int,
    backend: str | None,
    preallocated: bool,
    parts: tuple[bool, ...],
) -> None:
    if preallocated and kind == "jax":
        pytest.skip("JAX arrays cannot be written to")
    make = MAKERS[kind]
    q, out = (np.ones((total_q, 2, size), np.float16) for size in (16, 8))
    k, v = (np.ones((total_k, 1, size), np.float16) for size in (16, 8))
    lse = np.zeros((2, total_q), np.float32)
    cu_q, cu_k = (
        make(np.linspace(0, total if batch else 0, batch + 1).astype(np.int32))
        for total in (total_q, total_k)
    )

    def room(values: np.ndarray) -> Any:
        return make(fake_gpu.poison(values.copy())) if preallocated else None

    direction = [make(x) if part else None for x, part in zip((q, k, v), parts, strict=True)]
    inputs = [make(x) for x in (q, k, v)]
    options = {"cu_seqlens_k": cu_k, "backend": backend}
    rooms = {"out": room(out), "tout": room(out)}
    results = rawattn.jvp(*inputs, *direction, cu_q, **rooms, **options)
    expected = [(out, 0), (out, 0), (lse, -np.inf), (lse, 0)]
    for result, (like, value) in zip(results, expected, strict=True):
        assert values_of(result).shape == like.shape and (values_of(result) == value).all()
    likes = (out, lse, q, k, v)
    rooms = {name: room(like) for name, like in zip(ROOMS, likes, strict=True)}
    rows = (make(out), make(lse))
    results = rawattn.double_backward(
        *direction, make(out), *inputs, *rows, cu_q, **rooms, **options
    )
    for result, like in zip(results, likes, strict=True):
        assert values_of(result).shape == like.shape and (values_of(result) == 0).all()
        assert values_of(result).dtype == like.dtype
    assert gpu.launched == []


# ---- devices and streams ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_another_device_becomes_current_for_the_call(gpu: fake_gpu.Kernels, kind: str) -> None:
    case = Second()
    a = on(kind, case, device=1)
    for run, check in ((jvp, check_jvp), (double_backward, check_double)):
        GPU.log.clear()
        check(case, run(a, case))
        visits = [entry for entry in GPU.log if entry[0] == "device"]
        assert visits == [("device", 1), ("device", 0)]
    assert GPU.current == 0


@pytest.mark.parametrize("run", [jvp, double_backward])
def test_the_device_is_left_after_an_error(
    gpu: fake_gpu.Kernels, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]
) -> None:
    case = Second()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("launch failed")

    monkeypatch.setattr(passes.jvp_op, "launch", fail)
    monkeypatch.setattr(passes.double_kv_op, "launch", fail)
    with pytest.raises(RuntimeError, match="launch failed"):
        run(on("torch", case, device=1), case)
    assert GPU.current == 0


def test_every_input_is_waited_for(gpu: fake_gpu.Kernels) -> None:
    case = Second()
    a = on("numba", case)
    for run, names in [
        (jvp, "q k v cu_q cu_k tq tk tv"),
        (double_backward, "q k v cu_q cu_k tq tk tv dout out lse dlse"),
    ]:
        check_waits(gpu, a, partial(run, a, case), names)


def test_without_validation_nothing_is_read_back(
    gpu: fake_gpu.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(view: arrays.View) -> Any:
        raise AssertionError("read back")

    case = Second("float16")
    a = on("torch", case)
    monkeypatch.setattr(arrays, "host_values", fail)
    for run in (jvp, double_backward):
        run(a, case)
        with pytest.raises(AssertionError, match="read back"):
            run(a, case, validate=True)


def test_the_arch_of_the_device_decides(gpu: fake_gpu.Kernels) -> None:
    GPU.compute_capability = "75"
    case = Second("float16")
    a = on("cupy", case)
    for run in (jvp, double_backward):
        run(a, case)
        assert stems_and_families(gpu)[1] == {"numba"}
        launches = len(gpu.launched)
        with pytest.raises(ValueError, match="8"):
            run(a, case, backend="cuda")
        assert len(gpu.launched) == launches, "refused before anything is launched"


# ---- host memory ------------------------------------------------------------------------------


@pytest.mark.parametrize("preallocated", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_host_arrays(kind: str, dtype: str, preallocated: bool) -> None:
    case = Second(dtype)
    a, copies = host(kind, case), host(kind, Second(dtype))
    rooms: dict[str, Any] = {}
    if preallocated:
        rooms = {"out": copies["out"], "tout": copies["dout"]}
    results = jvp(a, case, validate=True, **rooms)
    assert {type(x) for x in results} == {type(a["q"])}
    check_jvp(case, [host_values(x) for x in results])
    for result, room in zip(results, rooms.values(), strict=False):
        assert result is room
    if preallocated:
        names = ("out", "lse", "q", "k", "v")
        rooms = {room: copies[name] for room, name in zip(ROOMS, names, strict=True)}
    results = double_backward(a, case, validate=True, **rooms)
    assert {type(x) for x in results} == {type(a["q"])}
    check_double(case, [host_values(x) for x in results])
    for result, room in zip(results, rooms.values(), strict=False):
        assert result is room


def test_jax_in_host_memory() -> None:
    jax = pytest.importorskip("jax")
    case = Second("bfloat16")
    a = {name: jax.numpy.asarray(getattr(case, name)) for name in case.NAMES}
    results = [*jvp(a, case), *double_backward(a, case)]
    assert all(isinstance(result, jax.Array) for result in results)
    check_jvp(case, [np.asarray(result) for result in results[:4]])
    check_double(case, [np.asarray(result) for result in results[4:]])


def test_expanded_tensors() -> None:
    torch = pytest.importorskip("torch")
    case = Second("float64")
    for name in PARTS:
        setattr(case, name, np.ones_like(getattr(case, name)))
    a = host("torch", case)
    for name in PARTS:
        a[name] = torch.ones((), dtype=torch.float64).expand(a[name].shape)
    check_jvp(case, [host_values(x) for x in jvp(a, case)])
    check_double(case, [host_values(x) for x in double_backward(a, case)])


def test_defaults() -> None:
    case = Second("float64", window=(-1, -1), softmax_scale=None)
    k, v = case.q[:, 2:].copy(), case.dout[:, :2].copy()
    tk, tv = case.tq[:, :2].copy(), case.out[:, 2:].copy()
    for options, window in (({}, (-1, -1)), ({"causal": True, "window": (3, 9)}, (3, 0))):
        offsets, mask = (case.cu_q, case.cu_q), {"window": window, "softmax_scale": 0.25}
        results = rawattn.jvp(case.q, k, v, case.tq, tk, tv, case.cu_q, **options)
        expected = second.jvp(case.q, k, v, case.tq, tk, tv, *offsets, **mask)
        case.check(results, expected, (2, 3))
        out, _, lse, _ = results
        given = (case.tq, tk, tv, case.dout, case.q, k, v, out, lse)
        results = rawattn.double_backward(*given, case.cu_q, max_seqlen=4, **options)
        case.check(results, second.double_backward(*given, *offsets, **mask), (1,))


# ---- Numba on host arrays ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype", "parts", "deterministic"),
    [
        ("numpy", "float32", WHOLE, False),
        ("numpy", "float64", (True, False, False), True),
        ("torch", "bfloat16", (False, True, True), False),
        ("numpy", "float32", NOWHERE, False),
    ],
)
def test_numba_on_host_arrays(
    kind: str, dtype: str, parts: tuple[bool, ...], deterministic: bool
) -> None:
    pytest.importorskip("numba.cuda")
    case = Second(dtype, surplus=1, heads=(2, 1))
    if kind == "numpy":
        case.tq = np.broadcast_to(case.tq[:1, :1], case.tq.shape)
    a = host(kind, case)
    results = jvp(a, case, parts, backend="numba")
    check_jvp(case, [host_values(x) for x in results], parts)
    results = double_backward(a, case, parts, deterministic=deterministic, backend="numba")
    check_double(case, [host_values(x) for x in results], parts)


@pytest.mark.parametrize("run", [jvp, double_backward])
def test_numba_without_gpu_and_simulator(
    monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]
) -> None:
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "0")
    monkeypatch.setattr(device, "has_cuda_device", lambda: False)
    call.pose.cache_clear()
    case = Second()
    with pytest.raises(RuntimeError, match="NUMBA_ENABLE_CUDASIM=1"):
        run(host("numpy", case), case, backend="numba")


# ---- refusals: the wiring of checks -----------------------------------------------------------

A = np.zeros
CU = np.array([0, 5], np.int32)
INPUTS: dict[str, Any] = {
    "q": A((5, 4, 16)),
    "k": A((5, 2, 16)),
    "v": A((5, 2, 8)),
    "cu_seqlens": CU,
}
REFUSALS = [
    ({"q": [1.0]}, TypeError, "q is a list"),
    ({"q": A((5, 64))}, ValueError, "q has shape"),
    ({"k": A((5, 2, 24))}, ValueError, "k has head_dim 24"),
    ({"cu_seqlens": CU.astype(float)}, TypeError, "cu_seqlens has dtype float64"),
    ({"cu_seqlens_k": np.array([0, 1, 5], np.int32)}, ValueError, "cu_seqlens_k has 3 offsets"),
    ({"window": (-3, 0)}, ValueError, "window is"),
    ({"softmax_scale": float("nan")}, ValueError, "softmax_scale is nan"),
    ({"backend": "cuda"}, ValueError, "backend is 'cuda' beside arrays in host memory"),
    ({"validate": True, "cu_seqlens": CU + 1}, ValueError, "cu_seqlens starts at 1"),
]
OF_JVP = [
    ({"tq": A((5, 2, 16))}, ValueError, "tq has shape .*like q"),
    ({"tk": A((5, 4, 16))}, ValueError, "tk has shape .*like k"),
    ({"tv": A((5, 2, 16))}, ValueError, "tv has shape .*like v"),
    ({"tq": A((5, 64))}, ValueError, "tq has shape"),
    ({"tq": A((5, 4, 16), np.float32)}, TypeError, "tq has dtype float32: expected float64"),
    ({"tv": A((5, 2, 8), np.float16)}, TypeError, "tv has dtype float16: expected float64"),
    ({"tk": 0.0}, TypeError, "tk is a float"),
    ({"out": A((5, 4, 16))}, ValueError, "out has shape"),
    ({"tout": A((5, 2, 8))}, ValueError, "tout has shape .*like out"),
    ({"tout": A((5, 4, 8), np.float32)}, TypeError, "tout has dtype float32"),
    ({"tout": np.broadcast_to(A(8), (5, 4, 8))}, ValueError, "tout is read-only"),
]
OF_DOUBLE_BACKWARD = [
    ({"ddq": A((5, 2, 16))}, ValueError, "ddq has shape .*like q"),
    ({"ddk": A((5, 2, 8))}, ValueError, "ddk has shape .*like k"),
    ({"ddv": A((5, 2, 16))}, ValueError, "ddv has shape .*like v"),
    ({"ddk": A((5, 2, 16), np.float32)}, TypeError, "ddk has dtype float32: expected float64"),
    ({"ddq": "zeros"}, TypeError, "ddq is a str"),
    ({"dout": A((5, 4, 16))}, ValueError, "dout has shape"),
    ({"dout": None}, TypeError, "dout is a NoneType"),
    ({"out": A((5, 2, 8))}, ValueError, "out has shape"),
    ({"lse": A((5, 4))}, ValueError, "lse has shape"),
    ({"lse": A((4, 5), np.float32)}, TypeError, "lse has dtype float32: expected float64"),
    ({"dlse": A((4, 6))}, ValueError, "dlse has shape"),
    ({"ddout": A((5, 4, 16))}, ValueError, "ddout has shape .*like out"),
    ({"ddlse": A((5, 4))}, ValueError, "ddlse has shape .*like lse"),
    ({"ddlse": A((4, 5), np.float32)}, TypeError, "ddlse has dtype float32: expected float64"),
    ({"gq": A((5, 2, 16))}, ValueError, "gq has shape .*like q"),
    ({"gk": A((5, 2, 16), np.float32)}, TypeError, "gk has dtype float32"),
    ({"gv": np.broadcast_to(A(8), (5, 2, 8))}, ValueError, "gv is read-only"),
]


@pytest.mark.parametrize(("changes", "error", "text"), [*REFUSALS, *OF_JVP])
def test_jvp_refuses(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    given = INPUTS | {"tq": A((5, 4, 16)), "tk": A((5, 2, 16)), "tv": A((5, 2, 8))}
    with pytest.raises(error, match=text):
        rawattn.jvp(**given | changes)
    rawattn.jvp(**given)


@pytest.mark.parametrize(("changes", "error", "text"), [*REFUSALS, *OF_DOUBLE_BACKWARD])
def test_double_backward_refuses(
    changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    given = INPUTS | {"ddq": A((5, 4, 16)), "ddk": A((5, 2, 16)), "ddv": A((5, 2, 8))}
    given |= {"dout": A((5, 4, 8)), "out": A((5, 4, 8)), "lse": A((4, 5))}
    with pytest.raises(error, match=text):
        rawattn.double_backward(**given | changes)
    rawattn.double_backward(**given)


@pytest.mark.parametrize("name", [*PARTS, "k", "cu_q", "dout", "out", "lse", "dlse"])
def test_arrays_on_two_devices(gpu: fake_gpu.Kernels, name: str) -> None:
    case = Second()
    a = on("torch", case)
    a[name] = MAKERS["torch"](getattr(case, name).copy(), 1)
    with pytest.raises(ValueError, match="is on CUDA device 1 beside an array on CUDA device 0"):
        double_backward(a, case)


def test_arrays_of_two_libraries(gpu: fake_gpu.Kernels) -> None:
    case = Second()
    a = on("torch", case)
    a["tk"] = case.tk
    for run, name in ((jvp, "tk"), (double_backward, "ddk")):
        with pytest.raises(TypeError, match=f"{name} is a NumPy array beside a torch CUDA array"):
            run(a, case)


# ---- the face ---------------------------------------------------------------------------------


def test_signatures() -> None:
    mask = "cu_seqlens_k causal window softmax_scale softcap sinks"
    order = {
        rawattn.double_backward: "ddq ddk ddv dout q k v out lse cu_seqlens "
        f"{mask} ddsinks seqused_k max_seqlen dlse deterministic ddout ddlse gq gk gv gsinks "
        "backend validate",
        rawattn.jvp: f"q k v tq tk tv cu_seqlens {mask} tsinks seqused_k max_seqlen deterministic "
        "out tout backend validate",
    }
    positional = {rawattn.double_backward: 10, rawattn.jvp: 7}
    for function, names in order.items():
        parameters = named_parameters(function)
        assert [p.name for p in parameters] == names.split()
        kinds = [p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters]
        assert kinds.index(True) == positional[function]
