"""The public functions on a GPU: array libraries, streams, CUDA graphs, torch, time on the host.

The numbers themselves are judged in test_gpu_kernels.py; here a call is mostly compared with the
plain call on CuPy arrays, to the bit. Long, since every library has its own ways.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import api
from rawattn.check.cases import dtype_of
from rawattn.reference import dense
from rawattn.variants import METHODS
from tests.shared.gpu_arrays import (
    NAMES,
    Arrays,
    assert_close,
    bits,
    host_arrays,
    keep_busy,
    numpy_of,
    on,
)
from tests.shared.gpu_graphs import replays

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

# ---- calls ------------------------------------------------------------------------------------


def first_order(a: Arrays, **options: Any) -> tuple[Any, ...]:
    """(out, lse, dq, dk, dv), causal and repeatable to the bit."""
    options = {"causal": True} | options
    inputs = (a["q"], a["k"], a["v"])
    out, lse = api.forward(*inputs, a["cu_seqlens"], return_lse=True, **options)
    passed = (a["dout"], *inputs, out, lse, a["cu_seqlens"])
    return (out, lse, *api.backward(*passed, deterministic=True, **options))


def second_order(a: Arrays, **options: Any) -> tuple[Any, ...]:
    """(out, tout, lse, tlse, ddout, ddlse, gq, gk, gv), causal and repeatable to the bit."""
    options = {"causal": True} | options
    inputs, direction = (a["q"], a["k"], a["v"]), (a["ddq"], a["ddk"], a["ddv"])
    results = rawattn.jvp(*inputs, *direction, a["cu_seqlens"], **options)
    passed = (a["dout"], *inputs, results[0], results[2], a["cu_seqlens"])
    options["deterministic"] = True
    return (*results, *rawattn.double_backward(*direction, *passed, **options))


def atomic(call: Callable[..., Any], a: Arrays, results: tuple[Any, ...]) -> list[Any]:
    """The gradients among the ``results`` of ``call``, by the ways that are not repeatable."""
    inputs, direction = (a["q"], a["k"], a["v"]), (a["ddq"], a["ddk"], a["ddv"])
    if call is first_order:
        passed = (a["dout"], *inputs, *results[:2], a["cu_seqlens"])
        return [api.backward(*passed, causal=True, method=method) for method in METHODS[:2]]
    passed = (a["dout"], *inputs, results[0], results[2], a["cu_seqlens"])
    return [rawattn.double_backward(*direction, *passed, causal=True)]


Call = Callable[..., tuple[Any, ...]]
LIKES = {  # the input that a result is shaped like, None for a number for each row and head
    first_order: ("q", None, "q", "k", "v"),
    second_order: ("q", "q", None, None, "q", None, "q", "k", "v"),
}
any_order = pytest.mark.parametrize("call", LIKES, ids=lambda call: call.__name__)


def plain(call: Call, host: Arrays, **options: Any) -> list[bytes]:
    """What ``call`` gives for CuPy arrays, in bits."""
    return bits(*call(on("cupy", host), **options))


# ---- libraries --------------------------------------------------------------------------------


@any_order
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("library", ["cupy", "torch", "jax", "numba"])
def test_libraries(call: Call, library: str, dtype: str) -> None:
    if library == "numba" and dtype == "bfloat16":
        pytest.skip("Numba has no device arrays of bfloat16")
    host = host_arrays(dtype, lengths=(5, 40, 0, 9))
    a = on(library, host)
    results = call(a)
    for result, like in zip(results, LIKES[call], strict=True):
        assert type(result) is type(a["q"])
        found = numpy_of(result)
        assert found.dtype == (np.float32 if like is None else dtype_of(dtype))
        assert found.shape == (host["q"].shape[1::-1] if like is None else host[like].shape)
    if library == "torch":
        assert {result.device for result in results} == {a["q"].device}
    if library == "jax":
        assert all(result.devices() == a["q"].devices() for result in results)
    assert bits(*results) == plain(call, host)


@pytest.mark.parametrize("library", ["cupy", "torch", "jax", "numba"])
def test_preprocess(library: str) -> None:
    host = host_arrays("float16")
    a = on(library, host)
    delta = api.backward_preprocess(a["q"], a["dout"])
    assert type(delta) is type(a["q"])
    wanted = (host["q"].astype(np.float64) * host["dout"].astype(np.float64)).sum(axis=-1).T
    np.testing.assert_allclose(numpy_of(delta), wanted, rtol=1e-4, atol=1e-4)


@any_order
@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_int64_offsets_and_validation(call: Call, library: str) -> None:
    host = host_arrays()
    wide = host | {"cu_seqlens": host["cu_seqlens"].astype(np.int64)}
    assert bits(*call(on(library, wide))) == plain(call, host)
    assert bits(*call(on(library, host), validate=True)) == plain(call, host)
    broken = host | {"cu_seqlens": host["cu_seqlens"][::-1].copy()}
    with pytest.raises(ValueError, match="cu_seqlens"):
        call(on(library, broken), validate=True)


@any_order
@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_views_of_one_array(call: Call, library: str) -> None:
    host = host_arrays()
    a = on(library, host)
    joined = np.concatenate([host["q"], host["k"], host["v"]], axis=1)
    qkv = on(library, {"qkv": joined})["qkv"]
    views = {"q": qkv[:, :4], "k": qkv[:, 4:6], "v": qkv[:, 6:]}
    assert bits(*call(a | views)) == plain(call, host)


@any_order
@pytest.mark.parametrize("library", ["cupy", "torch"])
@pytest.mark.parametrize("kind", ["last stride", "misaligned"])
def test_layouts_that_cost_a_copy(call: Call, library: str, kind: str) -> None:
    """Elements that lie apart, and rows that do not start at a multiple of 16 bytes."""
    host = host_arrays()

    def spread(array: Any) -> Any:
        gaps = np.full((*array.shape[:2], 2 * array.shape[2] + 1), np.nan).astype(array.dtype)
        at = slice(0, -1, 2) if kind == "last stride" else slice(1, array.shape[2] + 1)
        gaps[:, :, at] = array
        return on(library, {"gaps": gaps})["gaps"][:, :, at]

    a = on(library, host) | {name: spread(host[name]) for name in NAMES}
    assert bits(*call(a)) == plain(call, host)


@pytest.mark.parametrize("library", ["cupy", "torch", "numba"])
def test_preallocated_results(library: str) -> None:
    host = host_arrays("float16")
    a = on(library, host)
    full = {name: np.full_like(host[name], np.nan) for name in NAMES}
    spare = on(library, full)
    inputs = (a["q"], a["k"], a["v"])
    out, lse = api.forward(
        *inputs, a["cu_seqlens"], causal=True, out=spare["dout"], return_lse=True
    )
    assert out is spare["dout"]
    targets = {f"d{name}": spare[name] for name in "qkv"}
    grads = api.backward(
        a["dout"], *inputs, out, lse, a["cu_seqlens"], causal=True, deterministic=True, **targets
    )
    assert all(a is b for a, b in zip(grads, targets.values(), strict=True))
    assert bits(out, lse, *grads) == plain(first_order, host)


@pytest.mark.parametrize("library", ["cupy", "torch", "numba"])
def test_preallocated_results_of_second_order(library: str) -> None:
    host = host_arrays("float16")
    a = on(library, host)
    names = ("out", "tout", "ddout", "gq", "gk", "gv")
    likes = {name: host[name[-1] if name[0] == "g" else "q"] for name in names}
    spare = on(library, {name: np.full_like(like, np.nan) for name, like in likes.items()})
    spare |= on(library, {"ddlse": np.full(host["q"].shape[1::-1], np.nan, dtype=np.float32)})
    inputs, direction = (a["q"], a["k"], a["v"]), (a["ddq"], a["ddk"], a["ddv"])
    of_jvp = {name: spare.pop(name) for name in ("out", "tout")}
    results = rawattn.jvp(*inputs, *direction, a["cu_seqlens"], causal=True, **of_jvp)
    assert results[0] is of_jvp["out"] and results[1] is of_jvp["tout"]
    passed = (a["dout"], *inputs, results[0], results[2], a["cu_seqlens"])
    options = {"causal": True, "deterministic": True}
    grads = rawattn.double_backward(*direction, *passed, **options, **spare)
    for name, grad in zip(("ddout", "ddlse", "gq", "gk", "gv"), grads, strict=True):
        assert grad is spare[name]
    assert bits(*results, *grads) == plain(second_order, host)


def test_a_result_that_kernels_cannot_write_to_directly() -> None:
    host = host_arrays()
    a = on("cupy", host)
    out = cupy.empty((len(host["q"]), 4, 128), dtype=a["q"].dtype)[:, :, ::2]
    given = api.forward(a["q"], a["k"], a["v"], a["cu_seqlens"], causal=True, out=out)
    assert given is out and bits(out) == plain(first_order, host)[:1]


@pytest.mark.parametrize("method", [None, *METHODS])
def test_methods(method: str | None) -> None:
    host = host_arrays("float16")
    a = on("cupy", host)
    out, lse, *exact = first_order(a)
    passed = (a["dout"], a["q"], a["k"], a["v"], out, lse, a["cu_seqlens"])
    grads = api.backward(*passed, causal=True, method=method)
    for found, wanted in zip(grads, exact, strict=True):
        assert_close(found, wanted, 2.0**-10)
    if method in ("atomic_dq", "atomic_dkv"):
        with pytest.raises(ValueError, match="deterministic"):
            api.backward(*passed, method=method, deterministic=True)


@any_order
@pytest.mark.parametrize("lengths", [(), (0, 0)])
def test_no_tokens(call: Call, lengths: tuple[int, ...]) -> None:
    results = call(on("cupy", host_arrays(lengths=lengths)))
    lse = results[LIKES[call].index(None)]
    assert not any(numpy_of(a).astype(np.float32).any() for a in results if a is not lse)
    assert np.isneginf(numpy_of(lse)).all()


# ---- streams ----------------------------------------------------------------------------------


@any_order
def test_current_stream_of_cupy(call: Call) -> None:
    """Inputs that are written late on the same stream are seen, and the host does not wait."""
    host = host_arrays()
    wanted, a = plain(call, host), on("cupy", host)
    late = on("cupy", {name: np.zeros_like(array) for name, array in host.items()})
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        keep_busy()
        call(late)  # the stream's part of the pool gets its memory
        stream.synchronize()
        keep_busy()
        for name, array in late.items():
            array[...] = a[name]
        results = call(late)
        assert not stream.done, "a call waited for the device"
        stream.synchronize()
    assert bits(*results) == wanted


@any_order
def test_current_stream_of_torch(call: Call) -> None:
    host = host_arrays()
    a = on("torch", host)
    import torch

    wanted = plain(call, host)
    assert bits(*call(a)) == wanted
    late = {name: torch.zeros_like(array) for name, array in a.items()}
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(late)  # the stream's part of the pool gets its memory
        stream.synchronize()
        torch.cuda._sleep(40_000_000)  # clock cycles
        for name, array in late.items():
            array.copy_(a[name])
        results = call(late)
        assert not stream.query(), "a call waited for the device"
    stream.synchronize()
    assert bits(*results) == wanted


@any_order
def test_nothing_waits(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    a = on("cupy", host_arrays())
    first = bits(*call(a))

    def refuse(*_: Any) -> None:
        raise AssertionError("the host waits for the device")

    with monkeypatch.context() as patch:
        for name in ("deviceSynchronize", "streamSynchronize", "eventSynchronize"):
            patch.setattr(cupy.cuda.runtime, name, refuse)
        results = call(a)
        atomic(call, a, results)
    assert bits(*results) == first


@any_order
def test_nothing_waits_in_torch(call: Call) -> None:
    a = on("torch", host_arrays())
    import torch

    first = bits(*call(a))
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = call(a)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bits(*results) == first


# ---- CUDA graphs ------------------------------------------------------------------------------


def contents() -> list[Arrays]:
    """Two batches of equal shapes: other numbers, and other lengths with the same sum."""
    return [host_arrays(), host_arrays(lengths=(70, 1, 120, 8), seed=1)]


def all_results(call: Call, a: Arrays) -> tuple[Any, ...]:
    results = call(a)
    return (*results, *(grad for grads in atomic(call, a, results) for grad in grads))


def check_replay(call: Call, results: tuple[Any, ...], content: Arrays) -> None:
    exact = call(on("cupy", content))
    assert bits(*results[: len(exact)]) == bits(*exact)
    added = results[len(exact) :]
    grads = exact[2:] if call is first_order else exact[4:]
    for found, grad in zip(added, grads * (len(added) // len(grads)), strict=True):
        assert_close(found, grad, 2.0**-7)


@any_order
@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_graph(call: Call, library: str) -> None:
    for results, content in replays(library, partial(all_results, call), contents()):
        check_replay(call, results, content)


# ---- part of a larger attention ---------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_gradients_of_two_halves_of_the_keys_add_up(method: str) -> None:
    """As in context parallelism: every part gets out and lse of the whole."""
    host = host_arrays("float16", lengths=(100, 60))
    host["cu_seqlens"] = np.array([0, 100, 160], dtype=np.int32)
    q, dout = host["q"][:160], host["dout"][:160]
    halves = [np.r_[0:64, 100:131], np.r_[64:100, 131:160]]  # keys of both sequences in either
    lengths = [(64, 31), (36, 29)]
    k, v, offsets = host["k"][:160], host["v"][:160], host["cu_seqlens"]
    exact_out, exact_lse = dense.forward(q, k, v, offsets, offsets)
    exact = dense.backward(dout, q, k, v, exact_out, exact_lse, offsets, offsets)

    a = on("cupy", {"q": q, "k": k, "v": v, "dout": dout, "cu_seqlens": offsets})
    out, lse = api.forward(a["q"], a["k"], a["v"], a["cu_seqlens"], return_lse=True)
    dq = np.zeros(q.shape)
    for rows, parts in zip(halves, lengths, strict=True):
        offsets_k = np.cumsum([0, *parts]).astype(np.int32)
        part = on("cupy", {"k": k[rows], "v": v[rows], "cu_seqlens_k": offsets_k})
        passed = (a["dout"], a["q"], part["k"], part["v"], out, lse, a["cu_seqlens"])
        share, dk, dv = api.backward(*passed, cu_seqlens_k=part["cu_seqlens_k"], method=method)
        dq += numpy_of(share).astype(np.float64)
        assert_close(dk, exact[1][rows], 2.0**-10)
        assert_close(dv, exact[2][rows], 2.0**-10)
    assert_close(dq, exact[0], 2.0**-10)


# ---- torch ------------------------------------------------------------------------------------


@pytest.fixture
def torch_arrays() -> Arrays:
    return on("torch", host_arrays())


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)])
def test_autograd_gives_what_the_functions_give(heads: tuple[int, int]) -> None:
    host = host_arrays(heads=heads)
    a = on("torch", host)
    from rawattn.torch import varlen_attn

    leaves = [a[name].requires_grad_() for name in "qkv"]
    out, lse = varlen_attn(
        *leaves, a["cu_seqlens"], causal=True, return_lse=True, deterministic=True
    )
    out.backward(a["dout"])
    found = bits(out.detach(), lse.detach(), *(leaf.grad for leaf in leaves))
    assert found == plain(first_order, host)


@pytest.mark.parametrize("lengths", [(4096,), (1, 2, 3, 17) * 64], ids=["long", "short"])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_memory_beyond_the_gradients(head_dim: int, lengths: tuple[int, ...]) -> None:
    """4 bytes an element of q and 12 a row and head; torch allocates 512 bytes at a time."""
    torch = pytest.importorskip("torch")
    a = on("torch", host_arrays(lengths=lengths, head_dim=head_dim))
    inputs = (a["q"], a["k"], a["v"])
    out, lse = api.forward(*inputs, a["cu_seqlens"], return_lse=True, causal=True)
    grads = [torch.empty_like(x) for x in inputs]
    given = dict(zip(("dq", "dk", "dv"), grads, strict=True))

    def step() -> None:
        api.backward(a["dout"], *inputs, out, lse, a["cu_seqlens"], causal=True, **given)

    step()  # compiled and loaded
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    taken = torch.cuda.max_memory_allocated() - before
    assert lse.nbytes < taken <= 4 * a["q"].numel() + 12 * lse.numel() + 2 * 512


def test_cotangent_of_lse(torch_arrays: Arrays) -> None:
    a = torch_arrays
    import torch

    from rawattn.torch import varlen_attn

    leaves = [a[name].requires_grad_() for name in "qkv"]
    options = {"causal": True, "deterministic": True}
    out, lse = varlen_attn(*leaves, a["cu_seqlens"], return_lse=True, **options)
    dlse = torch.randn_like(lse)
    found = torch.autograd.grad((out, lse), leaves, (a["dout"], dlse))
    inputs = [leaf.detach() for leaf in leaves]
    passed = (a["dout"], *inputs, out.detach(), lse.detach(), a["cu_seqlens"])
    assert bits(*found) == bits(*api.backward(*passed, dlse=dlse, **options))


def test_compiled_function(torch_arrays: Arrays) -> None:
    """One graph, without a break; run eagerly, which needs no compiler on the machine."""
    a = torch_arrays
    import torch

    from rawattn.torch import varlen_attn

    def layer(q: Any, k: Any, v: Any, cu_seqlens: Any) -> Any:
        return 2 * varlen_attn(q * 1, k, v, cu_seqlens, causal=True, deterministic=True)

    results = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        leaves = [a[name].detach().clone().requires_grad_() for name in "qkv"]
        out = function(*leaves, a["cu_seqlens"])
        out.backward(a["dout"])
        results.append(bits(out.detach(), *(leaf.grad for leaf in leaves)))
    assert results[0] == results[1]


# ---- time on the host -------------------------------------------------------------------------


def host_microseconds(function: Callable[[], Any], synchronize: Callable[[], Any]) -> float:
    """Median over 20 queues of 100 calls each; the device catches up between the queues."""
    times = []
    for _ in range(21):  # the first one warms up
        synchronize()
        began = time.perf_counter()
        for _ in range(100):
            function()
        times.append((time.perf_counter() - began) / 100)
    synchronize()
    return 1e6 * float(np.median(times[1:]))


def torch_microseconds() -> float:
    """torch's own attention of packed sequences, here and now: hosts differ by half in speed."""
    import torch
    from torch.nn.attention.varlen import varlen_attn

    a = on("torch", host_arrays(heads=(4, 4)))
    longest = int(a["cu_seqlens"].diff().max())
    inputs = (a["q"], a["k"], a["v"], a["cu_seqlens"], a["cu_seqlens"], longest, longest)
    return host_microseconds(lambda: varlen_attn(*inputs), torch.cuda.synchronize)


@pytest.mark.slow
def test_host_time_of_cupy(capsys: pytest.CaptureFixture[str]) -> None:
    a = on("cupy", host_arrays())
    inputs = (a["q"], a["k"], a["v"], a["cu_seqlens"])
    found = host_microseconds(
        lambda: api.forward(*inputs, causal=True), cupy.cuda.Device().synchronize
    )
    peer = torch_microseconds()
    with capsys.disabled():
        print(f"\nforward on CuPy arrays: {found:.1f} us a call on the host, torch's {peer:.1f}")
    assert found <= 0.6 * peer


@pytest.mark.slow
def test_host_time_of_torch(capsys: pytest.CaptureFixture[str], torch_arrays: Arrays) -> None:
    import torch

    from rawattn.torch import varlen_attn

    a = torch_arrays
    inputs = (a["q"], a["k"], a["v"], a["cu_seqlens"])
    found = host_microseconds(lambda: varlen_attn(*inputs, causal=True), torch.cuda.synchronize)
    peer = torch_microseconds()
    with capsys.disabled():
        print(
            f"\nvarlen_attn on torch tensors: {found:.1f} us a call on the host, torch's {peer:.1f}"
        )
    assert found <= 0.8 * peer
