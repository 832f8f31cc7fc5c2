"""Block-sparse attention on a GPU by way of libraries, streams, CUDA graphs and torch.

The numbers themselves are judged in test_gpu_sparse.py; here a call is compared with the plain call
on CuPy arrays, to the bit.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import rawattn
from tests.shared.gpu_arrays import Arrays, assert_close, bits, host_arrays, keep_busy, numpy_of, on
from tests.shared.gpu_graphs import replays

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

SCALES = ("block_scale", "ddblock_scale")
SELECTION = ("block_indices", "block_counts", *SCALES)


def sparse_arrays(
    dtype: str = "float16", lengths: tuple[int, ...] = (5, 130, 0, 64), seed: int = 0
) -> Arrays:
    """``host_arrays``, 4 blocks of each query with a gate, and how many of them count."""
    host = host_arrays(dtype, lengths, heads=(16, 1), seed=seed)
    rng = np.random.default_rng(seed)
    shape = (len(host["q"]), 1, 4)
    host["block_indices"] = rng.integers(-1, 4, shape).astype(np.int32)
    host["block_counts"] = rng.integers(1, 5, shape[:2]).astype(np.int32)
    host |= {name: rng.standard_normal(shape).astype(np.float32) for name in SCALES}
    return host


# ---- calls ------------------------------------------------------------------------------------


def first_order(a: Arrays, **options: Any) -> tuple[Any, ...]:
    """(out, lse, dq, dk, dv, dblock_scale), repeatable to the bit."""
    options = {"block_counts": a["block_counts"], "block_scale": a["block_scale"]} | options
    inputs = (a["q"], a["k"], a["v"])
    which = (a["cu_seqlens"], a["block_indices"])
    out, lse = rawattn.sparse_forward(*inputs, *which, return_lse=True, **options)
    passed = (a["dout"], *inputs, out, lse, *which)
    return (out, lse, *rawattn.sparse_backward(*passed, deterministic=True, **options))


def second_order(a: Arrays, **options: Any) -> tuple[Any, ...]:
    """(out, tout, lse, tlse, ddout, ddlse, gq, gk, gv, gblock_scale), repeatable to the bit."""
    options = {"block_counts": a["block_counts"], "block_scale": a["block_scale"]} | options
    inputs, direction = (a["q"], a["k"], a["v"]), (a["ddq"], a["ddk"], a["ddv"])
    which, of_gate = (a["cu_seqlens"], a["block_indices"]), a["ddblock_scale"]
    results = rawattn.sparse_jvp(*inputs, *direction, *which, tblock_scale=of_gate, **options)
    passed = (a["dout"], *inputs, results[0], results[2], *which)
    options["ddblock_scale"] = of_gate
    return (*results, *rawattn.sparse_double_backward(*direction, *passed, **options))


def by_table(a: Arrays, **options: Any) -> tuple[Any, ...]:
    """``first_order`` with a table that is built once."""
    counted = {"block_counts": a["block_counts"], "num_heads_kv": 1} | options
    table = rawattn.BlockTable.of_indices(a["block_indices"], a["cu_seqlens"], **counted)
    return first_order(a | {"block_indices": table}, block_counts=None)


def fastest(a: Arrays, results: tuple[Any, ...]) -> tuple[Any, ...]:
    """dq, dk, dv and dblock_scale by the way that is not repeatable."""
    passed = (a["dout"], a["q"], a["k"], a["v"], *results[:2], a["cu_seqlens"], a["block_indices"])
    options = {"block_counts": a["block_counts"], "block_scale": a["block_scale"]}
    grads: tuple[Any, ...] = rawattn.sparse_backward(*passed, **options)
    return grads


Call = Callable[..., tuple[Any, ...]]
any_call = pytest.mark.parametrize("call", [first_order, second_order, by_table])


def plain(call: Call, host: Arrays) -> list[bytes]:
    """What ``call`` gives for CuPy arrays, in bits."""
    return bits(*call(on("cupy", host)))


# ---- libraries and layouts --------------------------------------------------------------------


@any_call
@pytest.mark.parametrize("library", ["torch", "jax", "numba"])
def test_libraries(call: Call, library: str) -> None:
    host = sparse_arrays("float16", lengths=(5, 40, 0, 9))
    a = on(library, host)
    results = call(a)
    assert {type(result) for result in results} == {type(a["q"])}
    assert bits(*results) == plain(call, host)


def test_a_table_changes_nothing() -> None:
    host = sparse_arrays()
    assert plain(by_table, host) == plain(first_order, host)


@any_call
@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_int64(call: Call, library: str) -> None:
    host = sparse_arrays()
    names = ("cu_seqlens", "block_indices", "block_counts")
    wide = host | {name: host[name].astype(np.int64) for name in names}
    assert bits(*call(on(library, wide))) == plain(call, host)


@any_call
@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_selections_of_any_strides(call: Call, library: str) -> None:
    """As they come out of a layout with the heads before the tokens, or from a wider array."""
    host = sparse_arrays()
    a = on(library, host)
    for name in SELECTION:
        array = host[name]
        tokens, heads, *rest = array.shape
        wide = np.zeros((heads + 1, tokens, *(2 * n for n in rest)), dtype=array.dtype)
        at = (slice(1, None), slice(None), *(slice(None, None, 2) for _ in rest))
        wide[at] = array.swapaxes(0, 1)
        a[name] = on(library, {"wide": wide})["wide"][at].swapaxes(0, 1)
    assert bits(*call(a)) == plain(call, host)


@any_call
def test_misaligned_rows(call: Call) -> None:
    host = sparse_arrays()
    a = on("cupy", host)
    for name in ("q", "k", "v", "dout", "ddq", "ddk", "ddv"):
        wide = cupy.full((*a[name].shape[:2], a[name].shape[2] + 1), np.nan, dtype=a[name].dtype)
        wide[..., 1:] = a[name]
        a[name] = wide[..., 1:]
    assert bits(*call(a)) == plain(call, host)


@any_call
@pytest.mark.parametrize("lengths", [(), (0, 0)], ids=str)
def test_no_tokens(call: Call, lengths: tuple[int, ...]) -> None:
    for result in call(on("cupy", sparse_arrays(lengths=lengths))):
        found = numpy_of(result).astype(np.float32)
        assert np.isneginf(found).all() or not found.any()


# ---- streams ----------------------------------------------------------------------------------


@any_call
def test_current_stream_of_cupy(call: Call) -> None:
    """Inputs that are written late on the same stream are seen, and the host does not wait."""
    host = sparse_arrays()
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


@any_call
def test_current_stream_of_torch(call: Call) -> None:
    host = sparse_arrays()
    a = on("torch", host)
    import torch

    wanted = plain(call, host)
    late = {name: torch.zeros_like(array) for name, array in a.items()}
    call(a)
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


@any_call
def test_nothing_waits(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    a = on("cupy", sparse_arrays())
    wide = a | {"block_indices": a["block_indices"].astype(np.int64)}
    first = bits(*call(a))
    call(wide)
    fastest(a, first_order(a))

    def refuse(*_: Any) -> None:
        raise AssertionError("the host waits for the device")

    with monkeypatch.context() as patch:
        for name in ("deviceSynchronize", "streamSynchronize", "eventSynchronize"):
            patch.setattr(cupy.cuda.runtime, name, refuse)
        results = call(a)
        call(wide)
        fastest(a, first_order(a))
    assert bits(*results) == first


@any_call
def test_nothing_waits_in_torch(call: Call) -> None:
    a = on("torch", sparse_arrays())
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
    """Two batches of equal shapes: other numbers, selections, and lengths with the same sum."""
    return [sparse_arrays(), sparse_arrays(lengths=(70, 1, 120, 8), seed=1)]


def all_results(call: Call, a: Arrays) -> tuple[Any, ...]:
    results = call(a)
    return (*results, *fastest(a, results)) if call is not second_order else results


def check_replay(call: Call, results: tuple[Any, ...], content: Arrays) -> None:
    exact = call(on("cupy", content))
    assert bits(*results[: len(exact)]) == bits(*exact)
    for found, grad in zip(results[len(exact) :], exact[2:], strict=False):
        assert_close(found, grad, 2.0**-7)


@any_call
@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_graph(call: Call, library: str) -> None:
    for results, content in replays(library, partial(all_results, call), contents()):
        check_replay(call, results, content)


# ---- two devices ------------------------------------------------------------------------------


@any_call
def test_arrays_of_the_second_device(call: Call) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("two GPUs needed")
    host = sparse_arrays()
    wanted, first = plain(call, host), on("cupy", host)
    with cupy.cuda.Device(1):
        second = on("cupy", host)
    results = call(second)  # while device 0 is the current one
    assert all(str(result.device) == str(second["q"].device) for result in results)
    assert bits(*results) == wanted
    with pytest.raises(ValueError, match="device"):
        call(second | {"block_scale": first["block_scale"]})
