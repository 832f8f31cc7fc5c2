"""rawattn.api on every kind of array: numbers, kinds, dtypes, streams, devices, refusals.

The CUDA path runs on the fakes of ``fake_gpu``, whose kernels are the reference by raw pointer:
what is tested here is all that happens around the kernels. Long by the kinds of array and refusals.
"""

import inspect
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import api, arrays, call, checks, device, passes
from rawattn.reference import dense
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

METHODS = checks.METHODS


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_gpu.Kernels]:
    yield fake_gpu.install(monkeypatch)
    fake_gpu.remove()


def forward(arrays_: dict[str, Any], case: Case, **options: Any) -> Any:
    a = arrays_
    options = {"return_lse": True, **case.mask, **options}
    return api.forward(a["q"], a["k"], a["v"], a["cu_q"], cu_seqlens_k=a["cu_k"], **options)


def backward(arrays_: dict[str, Any], case: Case, **options: Any) -> Any:
    a = arrays_
    options = {"dlse": a["dlse"], **case.mask, **options}
    names = ("dout", "q", "k", "v", "out", "lse", "cu_q")
    return api.backward(*(a[name] for name in names), cu_seqlens_k=a["cu_k"], **options)


# ---- the CUDA path ----------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "dtype"), KINDS_AND_DTYPES)
def test_forward_on_a_device(gpu: fake_gpu.Kernels, kind: str, dtype: str) -> None:
    case = Case(dtype)
    out, lse = forward(on(kind, case), case)
    assert type(out) is type(lse) is RESULTS[kind]
    case.close(out, case.exact[0])
    case.close(lse, case.exact[1], case.statistic)
    family = "sm90" if dtype in ("float16", "bfloat16") else "numba"
    [(row, used)] = gpu.launched
    assert row.startswith("forward") and family in row
    assert used == STREAMS.get(kind, STREAMS["cupy"])
    assert GPU.entered == []


@pytest.mark.parametrize("method", [None, *METHODS])
@pytest.mark.parametrize(("kind", "dtype"), KINDS_AND_DTYPES)
def test_backward_on_a_device(
    gpu: fake_gpu.Kernels, kind: str, dtype: str, method: str | None
) -> None:
    case = Case(dtype)
    grads = backward(on(kind, case), case, method=method)
    for grad, expected in zip(grads, case.gradients(), strict=True):
        assert type(grad) is RESULTS[kind]
        case.close(grad, expected)
    assert {used for _, used in gpu.launched} == {STREAMS.get(kind, STREAMS["cupy"])}


PASSES = {
    "atomic_dq": ["preprocess", "kv", "postprocess"],
    "atomic_dkv": ["preprocess", "q", "postprocess", "postprocess"],
    "deterministic": ["preprocess", "kv", "postprocess"],  # in order, as Hopper's row does it
}


@pytest.mark.parametrize("backend", [None, "cuda", "numba"])
@pytest.mark.parametrize("method", METHODS)
def test_passes_of_a_method(gpu: fake_gpu.Kernels, method: str, backend: str | None) -> None:
    case = Case("float16")
    backward(on("cupy", case), case, method=method, backend=backend)
    family = dict.fromkeys(("preprocess", "q", "postprocess"), "sm80") | {"kv": "sm90"}
    passes = PASSES[method]
    if (method, backend) == ("deterministic", "numba"):
        passes = [*passes[:-1], "q"]
    expected = [
        f"backward_{stem}_{'numba' if backend == 'numba' else family[stem]}" for stem in passes
    ]
    given = [row for row, _ in gpu.launched]
    assert [row[: len(name)] for row, name in zip(given, expected, strict=True)] == expected


@pytest.mark.parametrize("method", METHODS)
def test_one_family_for_all_passes(
    gpu: fake_gpu.Kernels, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    stem = "backward_q" if method == "atomic_dkv" else "backward_kv"
    monkeypatch.setenv("RAWATTN_VARIANT", f"{stem}_numba")
    case = Case("float16")
    for grad, expected in zip(
        backward(on("cupy", case), case, method=method), case.gradients(), strict=True
    ):
        case.close(grad, expected)
    assert all("numba" in row for row, _ in gpu.launched)


def test_deterministic_means_that_method(gpu: fake_gpu.Kernels) -> None:
    case = Case("float16")
    for options in ({"deterministic": True}, {"method": "deterministic"}):
        backward(on("cupy", case), case, **options)
    assert gpu.launched[:3] == gpu.launched[3:]


def test_rows_that_cannot_add_in_order_take_two_passes(
    gpu: fake_gpu.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAWATTN_VARIANT", "backward_kv_sm80_d32_64x128")
    case = Case("float16")
    backward(on("cupy", case), case, deterministic=True)
    assert len(gpu.launched) == 3 and "backward_q" in gpu.launched[2][0]


@pytest.mark.parametrize("backend", [None, "numba"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_memory_beyond_the_gradients(
    gpu: fake_gpu.Kernels, monkeypatch: pytest.MonkeyPatch, dtype: str, backend: str | None
) -> None:
    """However short sequences are, and of a head_dim that no kernel has."""
    empty, taken = call.Call.empty, []

    def counted(self: call.Call, shape: Any, dtype: str) -> arrays.View:
        taken.append(math.prod(shape) * DTYPES[dtype].itemsize)
        return empty(self, shape, dtype)

    case = Case(dtype)
    monkeypatch.setattr(call.Call, "empty", counted)
    backward(on("cupy", case), case, backend=backend)
    assert len(taken) == 2, "D and the workspace of dQ"
    assert sum(taken) <= 4 * case.q.size + 12 * case.lse.size


@pytest.mark.parametrize("kind", KINDS)
def test_without_dlse(gpu: fake_gpu.Kernels, kind: str) -> None:
    case = Case()
    grads = backward(on(kind, case), case, dlse=None)
    for grad, expected in zip(grads, case.gradients(dlse=False), strict=True):
        case.close(grad, expected)


@pytest.mark.parametrize("with_dlse", [True, False])
@pytest.mark.parametrize(("kind", "dtype"), KINDS_AND_DTYPES)
def test_preprocess_on_a_device(
    gpu: fake_gpu.Kernels, kind: str, dtype: str, with_dlse: bool
) -> None:
    case = Case(dtype)
    a = on(kind, case)
    delta = api.backward_preprocess(a["out"], a["dout"], dlse=a["dlse"] if with_dlse else None)
    assert type(delta) is RESULTS[kind]
    expected = (case.out.astype(float) * case.dout.astype(float)).sum(-1).T
    case.close(delta, expected - (case.dlse if with_dlse else 0), case.statistic)


@pytest.mark.parametrize("kind", KINDS)
def test_reference_on_a_device(gpu: fake_gpu.Kernels, kind: str) -> None:
    case = Case()
    a = on(kind, case)
    out, lse = forward(a, case, backend="reference")
    case.close(out, case.exact[0])
    case.close(lse, case.exact[1])
    for grad, expected in zip(
        backward(a, case, backend="reference"), case.gradients(), strict=True
    ):
        assert type(grad) is RESULTS[kind]
        case.close(grad, expected)
    delta = api.backward_preprocess(a["out"], a["dout"], backend="reference")
    case.close(delta, (case.out * case.dout).sum(-1).T)
    assert gpu.launched == []


# ---- layouts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["strided", "odd", "last", "heads"])
@pytest.mark.parametrize(("kind", "dtype"), [(k, "float16") for k in KINDS] + [("cupy", "float64")])
def test_any_layout_in(gpu: fake_gpu.Kernels, kind: str, dtype: str, how: str) -> None:
    case = Case(dtype)
    a = on(kind, case)
    for name in ("q", "k", "v", "dout", "out"):
        a[name] = MAKERS[kind](spread(getattr(case, name), how))
    for name in ("lse", "dlse"):
        a[name] = MAKERS[kind](np.asfortranarray(getattr(case, name)))
    for name in ("cu_q", "cu_k"):
        a[name] = MAKERS[kind](np.repeat(getattr(case, name), 2).astype(np.int64)[::2])
    out, lse = forward(a, case)
    case.close(out, case.exact[0])
    case.close(lse, case.exact[1], case.statistic)
    for method in METHODS:
        grads = backward(a, case, method=method)
        for grad, expected in zip(grads, case.gradients(), strict=True):
            case.close(grad, expected)
    delta = api.backward_preprocess(a["out"], a["dout"], dlse=a["dlse"])
    expected = (case.out.astype(float) * case.dout.astype(float)).sum(-1).T - case.dlse
    case.close(delta, expected, case.statistic)


@pytest.mark.parametrize("how", ["dense", "strided", "odd", "last", "heads"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "jax"])
def test_preallocated(gpu: fake_gpu.Kernels, kind: str, how: str) -> None:
    case = Case("float16")
    a = on(kind, case)

    def room(values: np.ndarray) -> Any:
        empty = fake_gpu.poison(fake_gpu.aligned(np.zeros_like(values)))
        return MAKERS[kind](empty if how == "dense" else spread(empty, how))

    for backend in (None, "reference"):
        given = room(case.out)
        out, _ = forward(a, case, out=given, backend=backend)
        assert out is given
        case.close(out, case.exact[0])
        for method in METHODS:
            given = room(case.q), room(case.k), room(case.v)
            dq, dk, dv = given
            grads = backward(a, case, dq=dq, dk=dk, dv=dv, method=method, backend=backend)
            for grad, array, expected in zip(grads, given, case.gradients(), strict=True):
                assert grad is array
                case.close(grad, expected)
        rows = np.zeros_like(case.lse)
        given = MAKERS[kind](rows if how == "dense" else np.asfortranarray(rows))
        delta = api.backward_preprocess(a["out"], a["dout"], delta=given, backend=backend)
        assert delta is given
        expected = (case.out.astype(float) * case.dout.astype(float)).sum(-1).T
        case.close(delta, expected, case.statistic)


def test_only_some_gradients_preallocated(gpu: fake_gpu.Kernels) -> None:
    case = Case()
    a = on("torch", case)
    dk = MAKERS["torch"](np.zeros_like(case.k))
    grads = backward(a, case, dk=dk)
    assert grads[1] is dk
    for grad, expected in zip(grads, case.gradients(), strict=True):
        case.close(grad, expected)


def test_shared_offsets_are_converted_once(
    gpu: fake_gpu.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversions: list[str] = []
    convert = arrays.CUPY.as_int32
    framework = arrays.replace(
        arrays.CUPY, as_int32=lambda view, stream: conversions.append("") or convert(view, stream)
    )
    monkeypatch.setattr(arrays, "CUPY", framework)
    monkeypatch.setattr(arrays, "_CHOOSERS", {})
    case = Case()
    q = fake_gpu.cupy_array(case.q)
    k = fake_gpu.cupy_array(case.q[:, :2].copy())
    api.forward(q, k, k, fake_gpu.cupy_array(case.cu_q.astype(np.int64)))
    assert conversions == [""]


# ---- nothing to see ---------------------------------------------------------------------------


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
) -> None:
    if preallocated and kind == "jax":
        pytest.skip("JAX arrays cannot be written to")
    make = MAKERS[kind]
    q, out = (np.ones((total_q, 2, size), np.float16) for size in (16, 8))
    k, v = (np.ones((total_k, 1, size), np.float16) for size in (16, 8))
    lse = np.zeros((2, total_q), np.float32)
    cu_q = np.linspace(0, total_q if batch else 0, batch + 1).astype(np.int32)
    cu_k = np.linspace(0, total_k if batch else 0, batch + 1).astype(np.int32)

    def room(values: np.ndarray) -> Any:
        return make(fake_gpu.poison(values.copy())) if preallocated else None

    arrays_ = [make(x) for x in (q, k, v, cu_q)]
    result, lse_ = api.forward(
        *arrays_, cu_seqlens_k=make(cu_k), return_lse=True, out=room(out), backend=backend
    )
    assert type(result) is (type(make(out)) if preallocated else RESULTS[kind])
    assert values_of(result).shape == out.shape and (values_of(result) == 0).all()
    assert values_of(lse_).shape == lse.shape and (values_of(lse_) == -np.inf).all()
    grads = api.backward(
        *(make(out), *arrays_[:3], make(out), make(lse), arrays_[3]),
        cu_seqlens_k=make(cu_k),
        **{name: room(x) for name, x in (("dq", q), ("dk", k), ("dv", v))},
        backend=backend,
    )
    for grad, like in zip(grads, (q, k, v), strict=True):
        assert values_of(grad).shape == like.shape and (values_of(grad) == 0).all()
    delta = api.backward_preprocess(make(out), make(out), backend=backend)
    assert values_of(delta).shape == lse.shape
    assert all("preprocess" in row for row, _ in gpu.launched)


# ---- devices and streams ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_another_device_becomes_current_for_the_call(gpu: fake_gpu.Kernels, kind: str) -> None:
    case = Case()
    a = on(kind, case, device=1)
    GPU.log.clear()
    out, _ = forward(a, case)
    case.close(out, case.exact[0])
    assert [entry for entry in GPU.log if entry[0] == "device"] == [("device", 1), ("device", 0)]
    for grad, expected in zip(backward(a, case), case.gradients(), strict=True):
        case.close(grad, expected)
    api.backward_preprocess(a["out"], a["dout"])
    assert GPU.current == 0


def test_the_device_is_left_after_an_error(
    gpu: fake_gpu.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("launch failed")

    monkeypatch.setattr(passes.forward_op, "launch", fail)
    with pytest.raises(RuntimeError, match="launch failed"):
        forward(on("torch", case, device=1), case)
    assert GPU.current == 0


def test_every_input_is_waited_for(gpu: fake_gpu.Kernels) -> None:
    case = Case()
    a = on("numba", case)
    for run, names in [
        (lambda: forward(a, case), "q k v cu_q cu_k"),
        (lambda: backward(a, case), "q k v cu_q cu_k dout out lse dlse"),
        (lambda: api.backward_preprocess(a["out"], a["dout"], dlse=a["dlse"]), "out dout dlse"),
    ]:
        check_waits(gpu, a, run, names)


def test_without_validation_nothing_is_read_back(
    gpu: fake_gpu.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(view: arrays.View) -> Any:
        raise AssertionError("read back")

    case = Case("float16")
    a = on("torch", case)
    monkeypatch.setattr(arrays, "host_values", fail)
    forward(a, case)
    backward(a, case)
    with pytest.raises(AssertionError, match="read back"):
        forward(a, case, validate=True)


def test_the_arch_of_the_device_decides(gpu: fake_gpu.Kernels) -> None:
    GPU.compute_capability = "75"
    case = Case("float16")
    forward(on("cupy", case), case)
    assert "numba" in gpu.launched[0][0]
    with pytest.raises(ValueError, match="8"):
        forward(on("cupy", case), case, backend="cuda")


# ---- NumPy and torch in host memory ------------------------------------------------------------


@pytest.mark.parametrize("preallocated", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_host_arrays(kind: str, dtype: str, preallocated: bool) -> None:
    case = Case(dtype)
    a = host(kind, case)
    rooms: dict[str, Any] = {}
    if preallocated:
        copies = host(kind, Case(dtype))
        rooms = {f"d{name}": copies[name] for name in ("q", "k", "v")}
        rooms["out"] = copies["out"]
    out, lse = forward(a, case, out=rooms.pop("out", None), validate=True)
    assert type(out) is type(lse) is type(a["q"])
    case.close(host_values(out), case.exact[0])
    case.close(host_values(lse), case.exact[1], case.statistic)
    grads = backward(a, case, **rooms)
    for grad, expected in zip(grads, case.gradients(), strict=True):
        assert type(grad) is type(a["q"])
        case.close(host_values(grad), expected)
    for grad, room in zip(grads, rooms.values(), strict=False):
        assert grad is room
    delta = api.backward_preprocess(a["out"], a["dout"], dlse=a["dlse"])
    expected = (case.out.astype(float) * case.dout.astype(float)).sum(-1).T - case.dlse
    case.close(host_values(delta), expected, case.statistic)


def test_jax_in_host_memory() -> None:
    jax = pytest.importorskip("jax")
    case = Case("bfloat16")
    names = ("q", "k", "v", "dout", "dlse", "out", "lse", "cu_q", "cu_k")
    a = {name: jax.numpy.asarray(getattr(case, name)) for name in names}
    for result, expected in [
        *zip(forward(a, case), case.exact, strict=True),
        *zip(backward(a, case), case.gradients(), strict=True),
    ]:
        assert isinstance(result, jax.Array)
        case.close(np.asarray(result), expected, result.dtype.name)


def test_defaults() -> None:
    case = Case("float64", window=(-1, -1), softmax_scale=None)
    k, v = case.q[:, 2:].copy(), case.dout[:, :2].copy()
    out = api.forward(case.q, k, v, case.cu_q)
    expected, _ = dense.forward(
        case.q, k, v, case.cu_q, case.cu_q, window=(-1, -1), softmax_scale=0.25
    )
    case.close(out, expected)
    assert isinstance(out, np.ndarray), "without return_lse, out alone"
    causal = api.forward(case.q, k, v, case.cu_q, causal=True, window=(3, 9), max_seqlen=4)
    expected, _ = dense.forward(case.q, k, v, case.cu_q, case.cu_q, window=(3, 0))
    case.close(causal, expected)


@pytest.mark.parametrize("side", [10, 2**31 - 1, 2**40])
def test_a_window_wider_than_the_batch_is_open(side: int) -> None:
    case = Case("float64")
    k, v = case.q[:, 2:].copy(), case.dout[:, :2].copy()
    expected = api.forward(case.q, k, v, case.cu_q)
    np.testing.assert_array_equal(
        api.forward(case.q, k, v, case.cu_q, window=(side, side)), expected
    )


@pytest.mark.parametrize("causal", [False, True])
def test_kernels_get_a_window_that_fits_32_bits(gpu: fake_gpu.Kernels, causal: bool) -> None:
    case = Case(surplus=0)  # 8 queries, 10 keys
    for left, right in itertools.product((-1, 0, 7, 8, 9, 10, 2**31), repeat=2):
        forward(on("cupy", case), case, window=(left, right), causal=causal)
        problem = gpu.problems.pop()
        assert problem.window_left == (left if left < 10 else -1)
        assert problem.window_right == (0 if causal else right if right < 8 else -1)


@pytest.mark.parametrize("window", list(itertools.product((-1, 0, 1, 4, 9), repeat=2)))
def test_windows_keep_their_meaning(window: tuple[int, int]) -> None:
    case = Case("float64", surplus=0, window=window)
    out, lse = forward(host("numpy", case), case)
    np.testing.assert_array_equal(out, case.exact[0])
    np.testing.assert_array_equal(lse, case.exact[1])


# ---- Numba on host arrays ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype", "method"),
    [
        ("numpy", "float32", "atomic_dq"),
        ("numpy", "float64", "atomic_dkv"),
        ("torch", "bfloat16", "deterministic"),
    ],
)
def test_numba_on_host_arrays(kind: str, dtype: str, method: str) -> None:
    pytest.importorskip("numba.cuda")
    case = Case(dtype, surplus=1, heads=(2, 1))
    a = host(kind, case)
    out, lse = forward(a, case, backend="numba")
    case.close(host_values(out), case.exact[0])
    case.close(host_values(lse), case.exact[1], case.statistic)
    for grad, expected in zip(
        backward(a, case, backend="numba", method=method), case.gradients(), strict=True
    ):
        case.close(host_values(grad), expected)
    delta = api.backward_preprocess(a["out"], a["dout"], dlse=a["dlse"], backend="numba")
    expected = (case.out.astype(float) * case.dout.astype(float)).sum(-1).T - case.dlse
    case.close(host_values(delta), expected, case.statistic)


def test_numba_without_gpu_and_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "0")
    monkeypatch.setattr(device, "has_cuda_device", lambda: False)
    call.pose.cache_clear()
    case = Case()
    with pytest.raises(RuntimeError, match="NUMBA_ENABLE_CUDASIM=1"):
        forward(host("numpy", case), case, backend="numba")
    api._pose_preprocess.cache_clear()
    with pytest.raises(RuntimeError, match="NUMBA_ENABLE_CUDASIM=1"):
        api.backward_preprocess(case.out, case.dout, backend="numba")


# ---- refusals: the wiring of checks -----------------------------------------------------------

A = np.zeros
CU = np.array([0, 5], np.int32)


def attend(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "q": A((5, 4, 16)),
        "k": A((5, 2, 16)),
        "v": A((5, 2, 8)),
        "cu_seqlens": CU,
    }
    return api.forward(**given | changes)


def differentiate(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "dout": A((5, 4, 8)),
        "q": A((5, 4, 16)),
        "k": A((5, 2, 16)),
        "v": A((5, 2, 8)),
        "out": A((5, 4, 8)),
        "lse": A((4, 5)),
        "cu_seqlens": CU,
    }
    return api.backward(**given | changes)


FORWARD_REFUSALS = [
    ({"q": [1.0]}, TypeError, "q is a list"),
    ({"cu_seqlens": [0, 5]}, TypeError, "cu_seqlens is a list"),
    ({"q": A((5, 64))}, ValueError, "q has shape"),
    ({"k": A((1, 5, 2, 16))}, ValueError, "k has shape"),
    ({"v": A(5)}, ValueError, "v has shape"),
    ({"q": A((5, 4, 16), int)}, TypeError, "q has dtype int64"),
    ({"q": A((5, 4, 16), ">f8")}, TypeError, "q has dtype >f8: .*big-endian"),
    ({"q": np.ma.zeros((5, 4, 16))}, TypeError, "q has an element mask"),
    ({"k": A((5, 2, 16), np.float32)}, TypeError, "k has dtype float32: expected float64"),
    ({"v": A((5, 2, 8), np.float16)}, TypeError, "v has dtype float16: expected float64"),
    ({"v": A((6, 2, 8))}, ValueError, "v has shape"),
    ({"k": A((5, 2, 24))}, ValueError, "k has head_dim 24"),
    ({"q": A((5, 4, 12)), "k": A((5, 2, 12))}, ValueError, "q has head size 12"),
    ({"q": A((5, 4, 264)), "k": A((5, 2, 264))}, ValueError, "q has head size 264"),
    ({"v": A((5, 2, 12))}, ValueError, "v has head size 12"),
    ({"v": A((5, 2, 264))}, ValueError, "v has head size 264"),
    ({"q": A((5, 3, 16))}, ValueError, "q has 3 heads and k has 2"),
    ({"k": A((5, 0, 16)), "v": A((5, 0, 8))}, ValueError, "k has 0"),
    ({"cu_seqlens": CU.astype(np.uint32)}, TypeError, "cu_seqlens has dtype uint32"),
    ({"cu_seqlens": CU.astype(float)}, TypeError, "cu_seqlens has dtype float64"),
    ({"cu_seqlens": CU[None]}, ValueError, "cu_seqlens has shape"),
    ({"cu_seqlens": CU[:0]}, ValueError, "cu_seqlens has shape"),
    ({"cu_seqlens_k": CU[None]}, ValueError, "cu_seqlens_k has shape"),
    ({"cu_seqlens_k": CU.astype(np.int8)}, TypeError, "cu_seqlens_k has dtype int8"),
    ({"cu_seqlens_k": np.array([0, 1, 5], np.int32)}, ValueError, "cu_seqlens_k has 3 offsets"),
    ({"q": A((6, 4, 16))}, ValueError, "k has 5 tokens beside 6 of q"),
    ({"window": (-3, 0)}, ValueError, "window is"),
    ({"window": 3}, TypeError, "window is 3"),
    ({"softmax_scale": float("nan")}, ValueError, "softmax_scale is nan"),
    ({"softmax_scale": np.ones(1)}, TypeError, "softmax_scale is a numpy.ndarray"),
    ({"backend": "triton"}, ValueError, "backend is 'triton'"),
    ({"backend": "cuda"}, ValueError, "backend is 'cuda' beside arrays in host memory"),
    ({"validate": True, "cu_seqlens": CU + 1}, ValueError, "cu_seqlens starts at 1"),
    ({"validate": True, "cu_seqlens": CU * 2}, ValueError, "cu_seqlens ends at 10"),
    (
        {"validate": True, "cu_seqlens_k": CU[::-1] - 5},
        ValueError,
        "cu_seqlens_k falls|ends|starts",
    ),
    ({"out": A((5, 4, 16))}, ValueError, "out has shape"),
    ({"out": A((5, 4, 8), np.float32)}, TypeError, "out has dtype float32"),
    ({"out": np.broadcast_to(A(8), (5, 4, 8))}, ValueError, "out is read-only"),
    ({"out": np.lib.stride_tricks.as_strided(A(8), (5, 4, 8), (0, 0, 8))}, ValueError, "broadcast"),
]


@pytest.mark.parametrize(("changes", "error", "text"), FORWARD_REFUSALS)
def test_forward_refuses(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        attend(**changes)
    attend()


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"dout": A((5, 4, 16))}, ValueError, "dout has shape"),
        ({"dout": A((5, 4, 8), np.float32)}, TypeError, "dout has dtype float32"),
        ({"dout": None}, TypeError, "dout is a NoneType"),
        ({"out": A((5, 2, 8))}, ValueError, "out has shape"),
        ({"lse": A((5, 4))}, ValueError, "lse has shape"),
        ({"lse": A((4, 5), np.float32)}, TypeError, "lse has dtype float32: expected float64"),
        ({"dlse": A((4, 6))}, ValueError, "dlse has shape"),
        ({"dlse": A((4, 5), np.float16)}, TypeError, "dlse has dtype float16"),
        ({"method": "fast"}, ValueError, "method is 'fast'"),
        ({"method": "atomic_dq", "deterministic": True}, ValueError, "deterministic=True"),
        ({"method": "atomic_dkv", "deterministic": True}, ValueError, "deterministic=True"),
        ({"dq": A((5, 2, 16))}, ValueError, "dq has shape"),
        ({"dk": A((5, 2, 16), np.float32)}, TypeError, "dk has dtype float32"),
        ({"dv": np.broadcast_to(A(8), (5, 2, 8))}, ValueError, "dv is read-only"),
        ({"k": A((5, 2, 24))}, ValueError, "k has head_dim 24"),
    ],
)
def test_backward_refuses(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        differentiate(**changes)
    differentiate()


@pytest.mark.parametrize(
    ("out", "dout", "options", "error", "text"),
    [
        (A((5, 4)), A((5, 4)), {}, ValueError, "out has shape"),
        (A((5, 4, 8), bool), A((5, 4, 8)), {}, TypeError, "out has dtype bool"),
        (A((5, 4, 12)), A((5, 4, 12)), {}, ValueError, "out has head size 12"),
        (A((5, 0, 8)), A((5, 0, 8)), {}, ValueError, "heads"),
        (A((5, 4, 8)), A((5, 4, 16)), {}, ValueError, "dout has shape"),
        (A((5, 4, 8)), A((5, 4, 8)), {"dlse": A((5, 4))}, ValueError, "dlse has shape"),
        (A((5, 4, 8)), A((5, 4, 8)), {"delta": A((5, 4))}, ValueError, "delta has shape"),
        (A((5, 4, 8)), A((5, 4, 8)), {"backend": "cuda"}, ValueError, "backend is 'cuda'"),
    ],
)
def test_preprocess_refuses(
    out: Any, dout: Any, options: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        api.backward_preprocess(out, dout, **options)


def test_arrays_of_two_libraries(gpu: fake_gpu.Kernels) -> None:
    case = Case()
    for first, second in itertools.permutations(KINDS, 2):
        if {first, second} == {"dlpack", "interface"}:
            continue  # both are foreign: CuPy reads either
        a = on(first, case)
        a["k"] = on(second, case)["k"]
        with pytest.raises(TypeError, match=r"k is a .* array beside a .* array"):
            forward(a, case)
    a = on("torch", case)
    a["cu_q"] = case.cu_q
    with pytest.raises(
        TypeError, match=r"cu_seqlens is a NumPy array beside a torch CUDA .*device"
    ):
        forward(a, case)


@pytest.mark.parametrize("name", ["k", "v", "cu_q", "cu_k", "dout", "out", "lse", "dlse"])
@pytest.mark.parametrize("kind", KINDS)
def test_arrays_on_two_devices(gpu: fake_gpu.Kernels, kind: str, name: str) -> None:
    case = Case()
    a = on(kind, case)
    a[name] = MAKERS[kind](getattr(case, name).copy(), 1)
    with pytest.raises(ValueError, match="is on CUDA device 1 beside an array on CUDA device 0"):
        backward(a, case)


def test_host_and_device_tensors(gpu: fake_gpu.Kernels) -> None:
    case = Case()
    a = on("torch", case)
    a["v"].is_cuda, a["v"].is_cpu = False, True
    with pytest.raises(TypeError, match="v is a torch CPU array beside a torch CUDA array"):
        forward(a, case)


def test_jax_arrays_cannot_be_written_to(gpu: fake_gpu.Kernels) -> None:
    case = Case()
    a = on("jax", case)
    with pytest.raises(ValueError, match=r"out is read-only .as JAX arrays always are"):
        forward(a, case, out=a["out"])


def test_bfloat16_over_the_interface(gpu: fake_gpu.Kernels) -> None:
    case = Case("bfloat16")
    a = on("interface", case)
    for name in ("q", "k", "v"):
        a[name].extra["typestr"] = "<V2"
    with pytest.raises(TypeError, match=r"q has dtype void16: .*cupy\.from_dlpack"):
        forward(a, case)


# ---- the face ---------------------------------------------------------------------------------


def test_signatures() -> None:
    assert str(inspect.signature(rawattn.forward)).replace(" ", "").startswith("(q:Any,k:Any,v:Any")
    order = {
        rawattn.forward: "q k v cu_seqlens cu_seqlens_k causal window softmax_scale softcap sinks "
        "seqused_k max_seqlen return_lse out backend validate",
        rawattn.backward_preprocess: "out dout dlse delta backend",
        rawattn.backward: "dout q k v out lse cu_seqlens cu_seqlens_k causal window softmax_scale "
        "softcap sinks seqused_k max_seqlen dlse deterministic method dq dk dv dsinks backend "
        "validate",
    }
    positional = {rawattn.forward: 4, rawattn.backward_preprocess: 2, rawattn.backward: 7}
    for function, names in order.items():
        parameters = named_parameters(function)
        assert [p.name for p in parameters] == names.split()
        kinds = [p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters]
        assert kinds.index(True) == positional[function]


def test_docstrings_name_every_parameter() -> None:
    functions = [getattr(rawattn, name) for name in rawattn.__all__]
    table = rawattn.BlockTable
    for function in [*functions, table.of_indices, table.of_mask, table.of_pattern]:
        for parameter in named_parameters(function):
            assert parameter.name in function.__doc__, f"{function} says nothing of {parameter}"
