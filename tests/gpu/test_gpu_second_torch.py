"""Second derivatives and forward mode through torch on a GPU, and what they take of its memory."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn.check import diff
from rawattn.check.cases import Case, make
from rawattn.check.transfer import to_numpy
from tests.shared.gpu_problems import (
    DOUBLE_BACKWARD,
    OF_JVP,
    PARTIAL,
    WHOLE,
    Posed,
    by_autograd,
    dense_attention,
    judge,
    mask_of,
    poisoned,
    pose,
    scale_of,
    sequences,
    sized,
)

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad  # noqa: E402

from rawattn.torch import varlen_attn  # noqa: E402

pytestmark = pytest.mark.gpu

Tensor = Any
TANGENTS = ("tq", "tk", "tv")


# ---- gradients of gradients -------------------------------------------------------------------


def attention_of(posed: Posed, **options: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """(q, k, v) to (out, lse)."""
    options |= mask_of(posed.case, posed.tensors) | {"return_lse": True, "deterministic": True}
    offsets = posed.tensors.cu_seqlens_q, options.pop("cu_seqlens_k")
    return lambda q, k, v: varlen_attn(q, k, v, *offsets, **options)


def edges(name: str, **changes: Any) -> Case:
    usual = {"dtype": "bfloat16", "group": 3, "num_heads_kv": 1, "causal": True, **sized(128, 64)}
    return poisoned(name, (63, 0, 129, 1), (129, 5, 64, 9), **usual | changes)


@pytest.mark.parametrize(
    ("dtype", "direction"),
    [*product(("float16", "bfloat16", "float64"), [WHOLE]), *product(["bfloat16"], PARTIAL)],
    ids=str,
)
def test_create_graph(dtype: str, direction: tuple[bool, bool, bool]) -> None:
    """By autograd what double_backward gives by itself, to the bit, and right."""
    posed = pose(edges("graph", dtype=dtype, direction=direction))
    t = posed.tensors
    q, k, v, dout, dlse = (x.clone().requires_grad_() for x in (t.q, t.k, t.v, t.dout, t.dlse))
    out, lse = attention_of(posed)(q, k, v)
    first = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse), create_graph=True)
    used = [(grad, part) for grad, part in zip(first, t.direction, strict=True) if part is not None]
    results = torch.autograd.grad(
        [grad for grad, _ in used],
        (dout, dlse, q, k, v),
        [part for _, part in used],
        materialize_grads=True,
    )
    judge(posed, dict(zip(DOUBLE_BACKWARD, results, strict=True)))
    passed = (t.dout, t.q, t.k, t.v, out.detach(), lse.detach(), t.cu_seqlens_q)
    options = mask_of(posed.case, t) | {"dlse": t.dlse, "deterministic": True}
    for result, wanted in zip(
        results, rawattn.double_backward(*t.direction, *passed, **options), strict=True
    ):
        assert torch.equal(result.nan_to_num(7), wanted.nan_to_num(7))


@pytest.mark.parametrize("lengths_k", [(3, 0, 4, 1), (5, 2, 3, 0)], ids=["self", "cross"])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (1, 2), "softmax_scale": 0.3}])
def test_gradgradcheck(mask: dict[str, Any], lengths_k: tuple[int, ...]) -> None:
    """float64, by the Numba kernels: reverse over reverse, and forward over reverse."""
    sizes = {"num_heads_kv": 1, "group": 2, "past_q": 1, "past_k": 1, **sized(8)}
    case = Case("check", (3, 0, 4, 1), lengths_k, dtype="float64", **sizes, **mask)
    attention, t = attention_of(pose(case)), make(case).on("torch")
    leaves = [x.nan_to_num(1.0).requires_grad_() for x in (t.q, t.k, t.v)]

    def function(*qkv: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attention(*qkv)
        return out, torch.where(torch.isfinite(lse), lse, 0)

    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, leaves, check_fwd_over_rev=True)


def test_grad_of_grad() -> None:
    """torch.func, in float64: one column of the Hessian of a sum."""
    posed = pose(edges("func", dtype="float64", direction=(True, False, False), dlse=False))
    t, attention = posed.tensors, attention_of(posed)

    def loss(*qkv: Tensor) -> Tensor:
        return (attention(*qkv)[0] * t.dout.nan_to_num()).sum()

    def along(*qkv: Tensor) -> Tensor:
        return (torch.func.grad(loss)(*qkv) * t.tq.nan_to_num()).sum()

    gq, gk, gv = torch.func.grad(along, argnums=(0, 1, 2))(t.q, t.k, t.v)
    judge(posed, {"gq": gq, "gk": gk, "gv": gv})


# ---- forward mode -----------------------------------------------------------------------------


def tangents(posed: Posed) -> tuple[Tensor, ...]:
    t = posed.tensors
    pairs = zip((t.q, t.k, t.v), t.direction, strict=True)
    return tuple(torch.zeros_like(x) if part is None else part for x, part in pairs)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_func_jvp(dtype: str) -> None:
    posed = pose(edges("jvp", dtype=dtype))
    t = posed.tensors
    (out, lse), (tout, tlse) = torch.func.jvp(attention_of(posed), (t.q, t.k, t.v), tangents(posed))
    judge(posed, {"out": out, "tout": tout, "lse": lse, "tlse": tlse})


@pytest.mark.parametrize("direction", PARTIAL, ids=str)
def test_dual_tensors(direction: tuple[bool, bool, bool]) -> None:
    posed = pose(edges("dual", direction=direction))
    t = posed.tensors
    with forward_ad.dual_level():
        duals = [
            x if part is None else forward_ad.make_dual(x, part)
            for x, part in zip((t.q, t.k, t.v), t.direction, strict=True)
        ]
        (out, tout), (lse, tlse) = map(forward_ad.unpack_dual, attention_of(posed)(*duals))
    results = {"out": out, "tout": tout, "lse": lse}
    judge(posed, results | ({} if tlse is None else {"tlse": tlse}))
    assert tlse is not None or not any(direction[:2])


def through_jvp(attention: Callable[..., Any], inputs: list[Tensor], weights: list[Tensor]) -> Any:
    """As a MeanFlow loss does it: gradients of what a jvp gives, in its inputs and tangents."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    (out, lse), (tout, tlse) = torch.func.jvp(attention, tuple(leaves[:3]), tuple(leaves[3:]))
    return torch.autograd.grad((out, lse, tout, tlse), leaves, weights)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_gradient_of_a_jvp(dtype: str) -> None:
    lengths = {"lengths_q": (129,), "lengths_k": (200,), "past_q": 0, "past_k": 0}
    case = Case("meanflow", dtype=dtype, group=2, causal=True, **lengths, **sized(64))
    posed, more = pose(case), make(case, seed=1).on("torch")
    [(_, _, allowed)] = sequences(case)
    t, mask = posed.tensors, torch.from_numpy(allowed).to(posed.out.device)
    inputs, weights = [t.q, t.k, t.v, *tangents(posed)], [t.dout, t.dlse, more.dout, more.dlse]

    def dense(kind: Any) -> list[Any]:
        wide = torch.promote_types(kind, torch.float32)
        narrow = [x.to(wide if x.dtype == t.dlse.dtype else kind) for x in (*inputs, *weights)]
        attention = partial(dense_attention, mask=mask, scale=scale_of(case))
        return [to_numpy(x.double()) for x in through_jvp(attention, narrow[:6], narrow[6:])]

    exact = dense(torch.float64)
    found = [to_numpy(x) for x in through_jvp(attention_of(posed), inputs, weights)]
    same = exact if dtype == "float64" else dense(t.q.dtype)
    for name, a, b, c in zip((*"qkv", *TANGENTS), found, exact, same, strict=True):
        if dtype == "float64":
            assert np.abs(a - b).max() <= 1e-12 * np.abs(b).max(), name
        else:
            verdict = diff.judge(a, b, c, terms=case.terms)
            assert verdict.ok, (name, verdict)


# ---- memory -----------------------------------------------------------------------------------


def long_problem(tokens: int, heads: int) -> dict[str, Tensor]:
    """One causal sequence of bfloat16, head_dim 128, with what forward gives for it."""
    generator = torch.Generator("cuda").manual_seed(tokens)
    names = ("q", "k", "v", "dout", "ddq", "ddk", "ddv")
    options = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    a = {name: torch.randn(tokens, heads, 128, **options) for name in names}
    a["cu_seqlens"] = torch.tensor([0, tokens], device="cuda", dtype=torch.int32)
    qkv = (a["q"], a["k"], a["v"])
    a["out"], a["lse"] = rawattn.forward(*qkv, a["cu_seqlens"], causal=True, return_lse=True)
    a["dlse"] = torch.randn(heads, tokens, device="cuda", generator=generator)
    return a


def double_backward(a: dict[str, Tensor], **options: Any) -> tuple[Tensor, ...]:
    names = ("ddq", "ddk", "ddv", "dout", "q", "k", "v", "out", "lse", "cu_seqlens")
    inputs = [a[name] for name in names]
    result: tuple[Tensor, ...] = rawattn.double_backward(
        *inputs, dlse=a["dlse"], causal=True, **options
    )
    return result


def jvp(a: dict[str, Tensor]) -> tuple[Tensor, ...]:
    names = ("q", "k", "v", "ddq", "ddk", "ddv", "cu_seqlens")
    result: tuple[Tensor, ...] = rawattn.jvp(*(a[name] for name in names), causal=True)
    return result


def peak_in_units_of_q(function: Callable[..., Any], a: dict[str, Tensor]) -> float:
    """What a call takes at its peak beyond the inputs, results included, by the size of q."""
    function(a)  # compiled and loaded
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function(a)
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    return float(taken / (a["q"].numel() * a["q"].element_size()))


BOUNDS = {  # results of 16 bits, a workspace of 32 bits for gq, a few numbers for each row
    "jvp": (jvp, 2 + 0.2),
    "atomic": (double_backward, 4 + 2 + 0.3),
    "deterministic": (lambda a: double_backward(a, deterministic=True), 4 + 0.3),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_memory_is_linear_in_tokens(name: str) -> None:
    function, bound = BOUNDS[name]
    found = [peak_in_units_of_q(function, long_problem(tokens, 2)) for tokens in (8192, 16384)]
    assert max(found) <= bound
    assert found[1] == pytest.approx(found[0], rel=0.05)


@pytest.fixture
def memory_goes_back() -> Iterator[None]:
    """Other processes may test on the same GPU."""
    yield
    torch.cuda.empty_cache()


@pytest.mark.usefixtures("memory_goes_back")
@pytest.mark.parametrize("name", ["atomic", "deterministic"])
def test_65536_tokens(name: str) -> None:
    """16 heads on one card, where one array of scores is 128 GiB; one head against autograd."""
    a, head, (function, bound) = long_problem(65536, 16), 5, BOUNDS[name]
    assert peak_in_units_of_q(function, a) <= bound
    results = dict(zip(DOUBLE_BACKWARD, function(a), strict=True))
    results |= dict(zip(OF_JVP, jvp(a), strict=True))
    assert all(bool(torch.isfinite(x).all()) for x in results.values())
    exact, wide, same = (
        one_head(a, head, getattr(torch, x)) for x in ("float64", "float32", "bfloat16")
    )
    for name, x in results.items():
        source, statistic = {"tout": "ddout", "tlse": "ddlse"}.get(name, name), name.endswith("lse")
        found = to_numpy(x[head] if statistic else x[:, head])
        wanted, allowing = exact[source], (wide if statistic else same)[source]
        # In parts, since late rows are means over many keys, and much smaller than early ones.
        for first, last in pairwise((0, 512, 4096, 32768, 65536)):
            arrays = (array[first:last] for array in (found, wanted, allowing))
            verdict = diff.judge(*arrays, terms=last)
            assert verdict.ok, (name, first, verdict)


def one_head(a: dict[str, Tensor], head: int, dtype: Any, rows: int = 512) -> dict[str, Any]:
    """All results of a head in the arithmetic of ``dtype``, some rows of the scores at a time."""
    wide = torch.promote_types(dtype, torch.float32)
    own = {name: x[:, head, None].to(dtype) for name, x in a.items() if x.dim() == 3}
    total, device = len(own["q"]), own["q"].device
    sums = {name: torch.zeros_like(own["q"], dtype=torch.float64) for name in ("gk", "gv")}
    parts: list[dict[str, Tensor]] = []
    for start in range(0, total, rows):
        here, keys = slice(start, start + rows), slice(0, min(start + rows, total))
        mask = torch.ones(len(own["q"][here]), keys.stop, dtype=torch.bool, device=device)
        inputs = (own["q"][here], own["k"][keys], own["v"][keys], own["dout"][here])
        direction = (own["ddq"][here], own["ddk"][keys], own["ddv"][keys])
        dlse = a["dlse"][head, None, here].to(wide)
        part = by_autograd((*inputs, dlse), direction, mask.tril(start), own["q"].shape[2] ** -0.5)
        for name in sums:
            sums[name][keys] += part.pop(name)
        parts.append({name: x.detach() for name, x in part.items()})
    joined = {
        name: torch.cat([p[name] for p in parts], dim=-1 if "lse" in name else 0)
        for name in parts[0]
    }
    return {
        name: to_numpy(x.double()[0 if "lse" in name else (slice(None), 0)])
        for name, x in (joined | sums).items()
    }
