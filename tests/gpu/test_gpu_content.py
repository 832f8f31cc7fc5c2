"""Numbers that are none, and results that share memory, on a GPU."""

from itertools import product
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn.check.cases import HALF, dtype_of
from rawattn.variants import HEAD_DIMS
from tests.shared import scores
from tests.shared.gpu_arrays import Arrays, bits, host_arrays, on

cupy = pytest.importorskip("cupy")

pytestmark = pytest.mark.gpu

MASKS = ({}, {"causal": True}, {"window": (20, 9)})
VALUES = (np.nan, np.inf, -np.inf)
OFFSETS = np.array([0, 30, 100, 170], np.int32)
AT = 95  # of the second sequence's tokens, 65 from its start


def spoilt(dims: tuple[int, int], dtype: str, side: str, value: float) -> Arrays:
    """Inputs with a single number, of a query or a key, that is ``value``."""
    rng, (d, dv) = np.random.default_rng(0), dims
    shapes = {"q": (170, 2, d), "k": (170, 1, d), "v": (170, 1, dv)}
    a = {n: rng.standard_normal(s).astype(dtype_of(dtype)) for n, s in shapes.items()}
    a[side][AT, 0, d - 5] = value
    return a | {"cu_seqlens": OFFSETS}


def by_function(a: Arrays, mask: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """out and lse of every function that computes them."""
    inputs, offsets = (a["q"], a["k"], a["v"]), a["cu_seqlens"]
    causal = {"causal": bool(mask.get("causal"))}
    chosen = np.arange(2 * len(a["q"])).reshape(-1, 1, 2).astype(np.int32) % 3
    if not isinstance(a["q"], np.ndarray):
        chosen = cupy.asarray(chosen)
    out, _, lse, _ = rawattn.jvp(*inputs, *inputs, offsets, **mask)
    found = {
        "jvp": (out, lse),
        "forward": rawattn.forward(*inputs, offsets, return_lse=True, **mask),
    }
    if "window" not in mask:
        options = {"block_size": 32, "return_lse": True} | causal
        found["sparse"] = rawattn.sparse_forward(*inputs, offsets, chosen, **options)
    return found


@pytest.mark.parametrize(("side", "value"), product("qk", VALUES))
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 32), (40, 96)], ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_number_that_is_none(
    mask: dict[str, Any], dims: tuple[int, int], side: str, value: float
) -> None:
    """lse and out are NaN in exactly the rows where those of the reference are."""
    host = spoilt(dims, HALF[dims[0] // 64 % 2], side, value)
    with np.errstate(invalid="ignore"):
        exact = by_function(host, mask)
    for name, (out, lse) in by_function(on("cupy", host), mask).items():
        nan = np.isnan(exact[name][1])
        assert nan.any() and not nan.all()
        np.testing.assert_array_equal(np.isnan(lse.get()), nan, name)
        of_rows = np.isnan(out.get().astype(np.float32))
        np.testing.assert_array_equal(of_rows.all(axis=2).T, nan, name)
        np.testing.assert_array_equal(of_rows.any(axis=2).T, nan, name)


@pytest.mark.parametrize("kind", scores.KINDS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_scores_that_lead_a_softmax_astray(head_dim: int, kind: str) -> None:
    for dtype, mask in product(HALF, MASKS):
        assert scores.deviation(kind, dtype, head_dim, mask, cupy.asarray) < 4, (dtype, mask)


# ---- memory of results ------------------------------------------------------------------------


def calls() -> dict[str, tuple[Any, tuple[str, ...]]]:
    """By function a call of arrays and results, and the names of the results."""

    def forward(a: Arrays, **results: Any) -> Any:
        return rawattn.forward(a["q"], a["k"], a["v"], a["cu_seqlens"], **results)

    def backward(a: Arrays, **results: Any) -> Any:
        out, lse = forward(a, return_lse=True)
        passed = (a["dout"], a["q"], a["k"], a["v"], out, lse, a["cu_seqlens"])
        return rawattn.backward(*passed, deterministic=True, **results)

    def jvp(a: Arrays, **results: Any) -> Any:
        direction = (a["ddq"], a["ddk"], a["ddv"])
        return rawattn.jvp(a["q"], a["k"], a["v"], *direction, a["cu_seqlens"], **results)[:2]

    def double_backward(a: Arrays, **results: Any) -> Any:
        out, lse = forward(a, return_lse=True)
        passed = (a["dout"], a["q"], a["k"], a["v"], out, lse, a["cu_seqlens"])
        options = results | {"deterministic": True}
        ddout, _, *g = rawattn.double_backward(a["ddq"], a["ddk"], a["ddv"], *passed, **options)
        return ddout, *g

    return {
        "forward": (forward, ("out",)),
        "backward": (backward, ("dq", "dk", "dv")),
        "jvp": (jvp, ("out", "tout")),
        "double_backward": (double_backward, ("ddout", "gq", "gk", "gv")),
    }


@pytest.mark.parametrize("function", ["forward", "backward", "jvp", "double_backward"])
def test_results_that_share_memory(function: str) -> None:
    """Refused where elements are shared; heads of one array, in turn, are not."""
    call, names = calls()[function]
    a = on("cupy", host_arrays("float16", heads=(2, 2)))
    exact = call(a)
    exact = bits(*(exact if isinstance(exact, tuple) else (exact,)))
    for name in names:
        with pytest.raises(ValueError, match=f"{name} shares memory with an input"):
            call(a, **{name: a["v"]})
    rows, heads, width = a["q"].shape
    joined = cupy.full((rows, heads * len(names), width), np.nan, np.float16)
    rooms = {name: joined[:, i :: len(names)] for i, name in enumerate(names)}
    call(a, **rooms)
    assert bits(*rooms.values()) == exact
    for name in names[1:]:
        with pytest.raises(ValueError, match=f"{name} shares memory with {names[0]}"):
            call(a, **{names[0]: joined[:, :2], name: joined[:, 1:3]})
