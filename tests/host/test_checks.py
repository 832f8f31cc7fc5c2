"""rawattn.checks: every rule has its text, and every text says what, given, allowed and remedy."""

import inspect
import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from rawattn import checks


def refusal(rule: Callable[..., Any], *given: Any, kind: type, text: str) -> Any:
    words = re.sub(r"\W+", "_", text)[:40]
    return pytest.param(rule, given, kind, text, id=f"{rule.__name__}-{words}")


def value(rule: Callable[..., Any], *given: Any, text: str) -> Any:
    return refusal(rule, *given, kind=ValueError, text=text)


def kind(rule: Callable[..., Any], *given: Any, text: str) -> Any:
    return refusal(rule, *given, kind=TypeError, text=text)


REFUSALS = [
    # arrays
    kind(
        checks.unknown_array, "q", list, text="q is a list, which is no array: expected one of CuPy"
    ),
    kind(checks.unknown_array, "q", Fraction, text="q is a fractions.Fraction, which is no array"),
    kind(checks.no_memory, "q", "torch FakeTensor", text="q is a torch FakeTensor, which has no m"),
    kind(checks.unsupported_device, "k", "mps", text="k is on device mps: expected host memory or"),
    kind(checks.masked, "v", text="v has an element mask, .*: expected plain data"),
    kind(checks.requires_grad, "q", text=r"q .* requires grad: .*no_grad\(\), or pass q\.detach"),
    kind(checks.lazily_negated, "q", text=r"q is a lazily negated torch.*pass q\.resolve_neg\(\)"),
    value(checks.uneven_strides, "q", (33, 2), 2, text=r"q has strides of \(33, 2\) bytes.* 2; "),
    refusal(
        checks.no_cupy,
        kind=RuntimeError,
        text="CuPy cannot be imported: .*; install rawattn.*cuda13",
    ),
    kind(checks.same_framework, "k", "NumPy", "CuPy", text="k is a NumPy array beside a CuPy arr"),
    kind(checks.same_framework, "k", "torch CPU", "torch CUDA", text="k to torch CUDA$"),
    kind(
        checks.same_framework,
        "cu_seqlens",
        "NumPy",
        "torch CUDA",
        text="convert cu_seqlens to torch CUDA, once per batch: the kernels read it on the device",
    ),
    kind(checks.same_framework, "cu_seqlens", "NumPy", "JAX CPU", text="cu_seqlens to JAX CPU$"),
    kind(checks.same_framework, "cu_seqlens", "torch CPU", "NumPy", text="cu_seqlens to NumPy$"),
    value(checks.same_device, "k", 1, 0, text="k is on CUDA device 1 .* move k to device 0"),
    kind(
        checks.dtype, "q", "int8", text="q has dtype int8: expected float16, bfloat16, float32 or"
    ),
    kind(checks.dtype, "q", ">f2", text="q has dtype >f2: .*big-endian: convert it to native"),
    kind(checks.dtype, "q", "void16", text=r"dtype void16: .*bfloat16.*DLPack.*cupy\.from_dlpack"),
    kind(checks.same_dtype, "k", "float32", "float16", text="k has dtype float32: expected float1"),
    value(checks.rank, "q", (4, 8), text=r"q has shape \(4, 8\): expected 3 dim.*num_heads_q, hea"),
    value(checks.rank, "k", (1, 4, 2, 8), text="expected 3 dimensions.*join its first two axes"),
    value(checks.shape, "lse", (8, 2), (2, 8), text=r"lse has shape \(8, 2\): expected \(2, 8\)"),
    value(checks.shape, "ddq", (5, 2, 16), (5, 4, 16), text=r"ddq .*head_dim\), like q; check"),
    value(checks.shape, "tv", (5, 1, 8), (5, 2, 8), text=r"tv has .*head_dim_v\), like v; check"),
    value(checks.tokens, "q", 2**31 - 1023, text="q has 2147482625 tokens: .* at most 2147482624"),
    # heads
    value(checks.keys_and_values, (5, 2, 8), (6, 2, 16), text=r"v .*expected \(5, 2, 16\)"),
    value(checks.keys_and_values, (5, 2, 8), (5, 1, 8), text=r"v has shape .*expected \(5, 2, 8\)"),
    value(
        checks.head_dim, "q", 12, text="q has head size 12: .*zeros to 16, that of k too, .*scale"
    ),
    value(checks.head_dim, "v", 12, text="v has head size 12: .*pad the last axis of v .* to 16$"),
    value(checks.head_dim, "q", 264, text="q has head size 264: .*8 to 256; split the heads$"),
    value(checks.head_dim, "q", 0, text="q has head size 0: expected a multiple of 8 from 8"),
    value(checks.same_head_dim, 64, 32, text="k has head_dim 32 beside q of head_dim 64"),
    value(checks.heads, 4, 3, text="q has 4 heads and k has 3: expected .*divisible"),
    value(checks.heads, 2, 4, text="q has 2 heads and k has 4"),
    value(checks.heads, 0, 1, text="q has 0 heads .*at least one"),
    value(checks.heads, 1, 0, text="k has 0: .*at least one"),
    value(checks.heads, 65536, 1, text="q has 65536 heads: expected at most 65535, .*; split"),
    # cu_seqlens
    value(checks.cu_seqlens, "cu_seqlens", (2, 3), "int32", text=r"shape \(2, 3\): .*\(batch \+ 1"),
    value(
        checks.cu_seqlens, "cu_seqlens", (0,), "int32", text=r"shape \(0,\): .*empty batch is \[0"
    ),
    kind(checks.cu_seqlens, "cu_seqlens_k", (3,), "float32", text="cu_seqlens_k has dtype float32"),
    kind(checks.cu_seqlens, "cu_seqlens", (3,), "uint32", text="dtype uint32: expected int32, or"),
    value(checks.same_batch, 3, 4, text="cu_seqlens_k has 4 offsets beside 3 of cu_seqlens"),
    value(checks.shared_cu_seqlens, 3, 4, text="k has 4 tokens beside 3 of q, .*pass cu_seqlens_k"),
    value(checks.offsets, "cu_seqlens", [1, 4], 4, text="cu_seqlens starts at 1: expected 0"),
    value(checks.offsets, "cu_seqlens", [0, 4, 3], 4, text="falls from 4 to 3 at index 2"),
    value(checks.offsets, "cu_seqlens_k", [0, 5], 4, text="cu_seqlens_k ends at 5: .*at most 4"),
    # blocks of keys
    value(
        checks.block_axes, "block_indices", (5, 3), text=r"has shape \(5, 3\): .*num_selected\);"
    ),
    value(checks.block_axes, "block_mask", (5,), text=r"block_mask has shape .*num_blocks\); resh"),
    kind(checks.block_dtype, "block_indices", "int8", text="block_indices has dtype int8: .*int32"),
    kind(checks.block_dtype, "block_counts", "bool", text="convert block_counts to int32$"),
    kind(checks.block_dtype, "block_mask", "uint8", text="block_mask has dtype uint8: .*!= 0"),
    value(checks.selection_tokens, "block_mask", 5, 6, text="block_mask has 5 tokens beside 6 of"),
    value(checks.selection_heads, 3, 8, 2, text=r"has 3 heads: expected 2 \(.*\) or 8 \(.*repeat"),
    value(checks.block_size, 256, text="block_size is 256: expected 16, 32, 64 or 128; split"),
    kind(checks.block_size, 64.0, text=r"block_size is 64\.0: expected an integer, keys of"),
    value(checks.entries, 2, 2**28, 16, text="268435456 queries with 2 .*: expected at most 2147"),
    value(checks.selection_heads, 1, 65, 1, text="65 query heads share a selection: .*at most 64;"),
    value(checks.lists, 2**31 - 2, 1, text="2147483646 lists of queries .*: .* most 2147483645;"),
    value(checks.lists, 1, 2**29, text="536870912 segments: expected at most 536870911; split"),
    value(checks.counts, "block_counts", -1, text="block_counts holds -1: expected 0 or more"),
    value(
        checks.beside_block_scale, "tblock_scale", True, False, text="tblock_scale is given without"
    ),
    value(checks.same_as_table, "causal", False, True, text="causal is False .* pass causal=True,"),
    value(checks.counted_by_table, True, text="block_counts is given beside .*: expected None, s"),
    value(checks.table_lists, False, text="no lists of queries.*lists=True; build it so, or pass"),
    value(checks.pattern, 0, 0, text="sliding_blocks is 0 and global_blocks 0: .*1 or more, and 0"),
    value(checks.pattern, 1, -1, text="global_blocks -1: expected"),
    kind(checks.pattern, 1, 0.5, text=r"global_blocks is 0\.5: expected an integer"),
    value(checks.size, "total_k", None, text="total_k is None: expected a number.*pass total_k"),
    kind(checks.size, "total_k", "5", text="total_k is '5': expected an integer, a size"),
    value(checks.only_sliding, (3, 0), False, text=r"window is \(3, 0\) without return_sliding"),
    kind(checks.sliding_window, "5", 64, True, text="window is '5': expected two integers"),
    value(
        checks.sliding_window, -2, 64, True, text=r"window is \(-2, 0\): expected left and right"
    ),
    # outputs
    value(checks.writable, "dq", False, text="dq is read-only .*pass dq=None"),
    value(checks.distinct_elements, "out", (4, 2, 8), (8, 0, 1), text=r"out has strides \(8, 0, 1"),
    value(checks.separate, "dq", "dk", text="dq shares memory with dk: .*pass dq=None and take"),
    value(checks.separate, "out", None, text="out shares memory with an input: expected memory"),
    # options
    kind(checks.call_style, "forward", (), {"max_seqlen_q": 5}, text="max_seqlen_q: .*leave it"),
    kind(checks.call_style, "forward", (), {"foo": 5}, text=r"foo: .*; help\(rawattn\.forward\)"),
    kind(checks.call_style, "jvp", (5, 5), {}, text="jvp is given 2 more arguments by position"),
    kind(checks.flag, "causal", "yes", text="causal is 'yes': expected True or False; pass a bool"),
    kind(checks.flag, "causal", 1, text="causal is 1: expected True"),
    kind(checks.window, 5, False, text="window is 5: expected two integers"),
    kind(checks.window, (1, 2, 3), False, text=r"window is \(1, 2, 3\): expected two integers"),
    kind(checks.window, (1.0, 2), False, text=r"window is \(1\.0, 2\): expected two integers"),
    kind(checks.window, None, False, text="window is None: .*for no window"),
    value(checks.window, (-2, 0), False, text=r"window is \(-2, 0\): .*-1 \(open\) or more"),
    value(checks.window, (4, -2), True, text=r"window is \(4, -2\): .*causal=True"),
    value(checks.softmax_scale, math.inf, text="softmax_scale is inf: expected a positive"),
    value(checks.softmax_scale, 0, text="softmax_scale is 0.0: expected a positive finite number"),
    value(checks.softmax_scale, -0.1, text="softmax_scale is -0.1: .* or scale q"),
    value(checks.softmax_scale, math.nan, text="softmax_scale is nan: expected a positive"),
    kind(checks.softmax_scale, "1", text="softmax_scale is a str: expected a number or None"),
    kind(checks.softmax_scale, np.ones(()), text="softmax_scale is a numpy.ndarray: .*read back"),
    value(checks.softcap, math.inf, text="softcap is inf: expected a positive finite number"),
    value(checks.softcap, -2, text="softcap is -2.0: expected a positive finite number; None"),
    kind(checks.softcap, np.ones(()), text="softcap is a numpy.ndarray: expected .*read back"),
    value(checks.without_sinks, "tsinks", text="tsinks is given without sinks: expected both"),
    value(checks.backend, "cudnn", 0, text="backend is 'cudnn': expected cuda, numba or reference"),
    value(checks.backend, "cuda", -1, text="backend is 'cuda' beside arrays in host memory"),
    refusal(checks.numba_device, False, kind=RuntimeError, text="NUMBA_ENABLE_CUDASIM=1 before"),
    value(
        checks.method, "split", False, text="method is 'split': expected atomic_dq, atomic_dkv or"
    ),
    value(
        *(checks.method, "atomic_dq", True),
        text="'atomic_dq' with deterministic=True: expected 'deterministic'",
    ),
    value(checks.method, "atomic_dkv", True, text="'atomic_dkv' with deterministic=True"),
]


@pytest.mark.parametrize(("rule", "given", "error", "text"), REFUSALS)
def test_refusal(
    rule: Callable[..., Any], given: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as caught:
        rule(*given)
    message = str(caught.value)
    assert "expected" in message, "what is allowed"
    assert "; " in message, "the remedy"
    assert not message.endswith("."), "one sentence, as Python's own"


def test_every_rule_is_tested() -> None:
    rules = {
        name
        for name, function in vars(checks).items()
        if inspect.isfunction(function) and not name.startswith("_") and name != "index"
    }
    assert rules == {parameter.values[0].__name__ for parameter in REFUSALS}


@pytest.mark.parametrize(
    ("rule", "given"),
    [
        (checks.same_framework, ("k", "CuPy", "CuPy")),
        (checks.same_device, ("k", 1, 1)),
        (checks.same_dtype, ("k", "float16", "float16")),
        (checks.rank, ("q", (0, 1, 8))),
        (checks.shape, ("lse", (2, 8), (2, 8))),
        (checks.tokens, ("q", 2**31 - 1024)),
        (checks.keys_and_values, ((5, 2, 8), (5, 2, 16))),
        (checks.same_head_dim, (64, 64)),
        (checks.heads, (8, 8)),
        (checks.heads, (9, 3)),
        (checks.heads, (8, 1)),
        (checks.heads, (65535, 65535)),
        (checks.cu_seqlens, ("cu_seqlens", (1,), "int32")),
        (checks.cu_seqlens, ("cu_seqlens", (9,), "int64")),
        (checks.same_batch, (3, 3)),
        (checks.shared_cu_seqlens, (3, 3)),
        (checks.offsets, ("cu_seqlens", [0], 0)),
        (checks.offsets, ("cu_seqlens", [0, 0, 3, 3, 4], 9)),
        (checks.block_axes, ("block_mask", (5, 2, 3))),
        (checks.block_dtype, ("block_indices", "int32")),
        (checks.block_dtype, ("block_counts", "int64")),
        (checks.block_dtype, ("block_mask", "bool")),
        (checks.selection_tokens, ("block_indices", 5, 5)),
        (checks.selection_heads, (2, 8, 2)),
        (checks.selection_heads, (8, 8, 2)),
        (checks.entries, (1, 2**31 - 1, 1)),
        (checks.selection_heads, (1, 64, 1)),
        (checks.lists, (2**31 - 3, 2**29 - 1)),
        (checks.counts, ("block_counts", 0)),
        (checks.only_sliding, (None, False)),
        (checks.only_sliding, (3, True)),
        (checks.beside_block_scale, ("tblock_scale", True, True)),
        (checks.beside_block_scale, ("tblock_scale", False, False)),
        (checks.same_as_table, ("block_size", 64, 64)),
        (checks.counted_by_table, (False,)),
        (checks.table_lists, (True,)),
        (checks.writable, ("out", True)),
        (checks.distinct_elements, ("out", (1, 2, 8), (0, 8, 1))),
        (checks.distinct_elements, ("out", (0, 2, 8), (0, 0, 0))),
        (checks.backend, (None, -1)),
        (checks.backend, ("reference", 0)),
        (checks.backend, ("numba", -1)),
        (checks.backend, ("cuda", 0)),
        (checks.numba_device, (True,)),
        (checks.method, (None, True)),
        (checks.method, ("deterministic", True)),
        (checks.method, ("atomic_dkv", False)),
    ],
)
def test_allowed(rule: Callable[..., Any], given: tuple[Any, ...]) -> None:
    assert rule(*given) is None


@pytest.mark.parametrize("head_dim", range(8, 257, 8))
def test_head_dims(head_dim: int) -> None:
    checks.head_dim("q", head_dim)


@pytest.mark.parametrize("dtype", checks.DTYPES)
def test_dtypes(dtype: str) -> None:
    checks.dtype("q", dtype)


@pytest.mark.parametrize(
    ("given", "causal", "expected"),
    [
        ((-1, -1), False, (-1, -1)),
        ((-1, -1), True, (-1, 0)),
        ((4, 5), False, (4, 5)),
        ((4, 5), True, (4, 0)),  # causal caps the right side
        ((0, 0), True, (0, 0)),
        ([3, 2], False, (3, 2)),
        ((np.int64(3), np.int32(2)), False, (3, 2)),
    ],
)
def test_window(given: Any, causal: bool, expected: tuple[int, int]) -> None:
    window = checks.window(given, causal)
    assert window == expected
    assert all(type(side) is int for side in window)


@pytest.mark.parametrize(
    ("given", "causal", "expected"),
    [
        (None, True, (63, 0)),
        (None, False, (63, 0)),
        (5, False, (5, 0)),
        (np.int32(5), True, (5, 0)),
        (-1, True, (-1, 0)),
        ((5, 3), False, (5, 3)),
        ((5, 3), True, (5, 0)),
    ],
)
def test_sliding_window(given: Any, causal: bool, expected: tuple[int, int]) -> None:
    assert checks.sliding_window(given, 64, causal) == expected


def test_sizes_of_blocks() -> None:
    for size in checks.BLOCK_SIZES:
        given = checks.block_size(np.int64(size))
        assert given == size and type(given) is int
    assert checks.pattern(np.int32(3), 2) == (3, 2)
    assert checks.size("total_q", np.int64(5)) == 5


def test_flags() -> None:
    for given in (True, np.True_):
        assert checks.flag("causal", given) is True
    assert checks.flag("causal", np.bool_(False)) is False


def test_softmax_scale() -> None:
    assert checks.softmax_scale(None) is None
    for given in (0.125, np.float32(0.125), Fraction(1, 8)):
        scale = checks.softmax_scale(given)
        assert scale == 0.125 and type(scale) is float
