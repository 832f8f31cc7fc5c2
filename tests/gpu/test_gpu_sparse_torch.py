"""``rawattn.torch.sparse_attn`` on a GPU: first and second derivatives, compiled or not."""

from collections.abc import Callable
from typing import Any

import pytest

import rawattn
from rawattn.check.cases import Case
from tests.shared.gpu_arrays import bits
from tests.shared.gpu_problems import judge, sized
from tests.shared.gpu_sparse import (
    OF_FIRST,
    OF_JVP,
    OF_SECOND,
    Posed,
    Sparse,
    options_of,
    pose,
    table_of,
)
from tests.shared.gpu_sparse_random import SECOND, TWINS, edges

torch = pytest.importorskip("torch")

from rawattn.torch import sparse_attn  # noqa: E402

pytestmark = pytest.mark.gpu

Tensor = Any


def wide(name: str) -> Sparse:
    return edges(name, **sized(128))


def attention_of(posed: Posed, table: Any = None, **options: Any) -> Callable[..., Any]:
    """(q, k, v, block_scale) to (out, lse)."""
    options = options_of(posed, table) | {"return_lse": True, "deterministic": True} | options
    which = (posed.tensors.cu_seqlens_q, posed.chosen.block_indices if table is None else table)

    def attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None) -> Any:
        return sparse_attn(q, k, v, *which, **options | {"block_scale": g})

    return attention


def leaves_of(posed: Posed) -> list[Tensor]:
    t, c = posed.tensors, posed.chosen
    return [x.clone().requires_grad_() for x in (t.q, t.k, t.v, c.block_scale)]


@pytest.mark.parametrize("with_table", [False, True], ids=["indices", "table"])
def test_autograd_gives_what_the_functions_give(with_table: bool) -> None:
    posed = pose(wide("autograd"))
    t, c, leaves = posed.tensors, posed.chosen, leaves_of(posed)
    table = table_of(posed) if with_table else None
    out, lse = attention_of(posed, table)(*leaves)
    grads = torch.autograd.grad((out, lse), leaves, (t.dout, t.dlse))
    results = dict(zip(OF_FIRST, (out, lse, *grads), strict=True))
    judge(posed, results)
    which = (t.cu_seqlens_q, c.block_indices)
    options = options_of(posed)
    alone = rawattn.sparse_forward(t.q, t.k, t.v, *which, return_lse=True, **options)
    passed = (t.dout, t.q, t.k, t.v, *alone, *which)
    options |= {"dlse": t.dlse, "deterministic": True}
    wanted = bits(*alone, *rawattn.sparse_backward(*passed, **options))
    assert bits(*(x.detach() for x in results.values())) == wanted


@pytest.mark.parametrize("sparse", [wide("graph"), next(TWINS[0].problems())], ids=str)
def test_create_graph(sparse: Sparse) -> None:
    posed = pose(sparse, second=True)
    t, c, leaves = posed.tensors, posed.chosen, leaves_of(posed)
    dout = t.dout.clone().requires_grad_()
    dlse = (torch.zeros_like(posed.lse) if t.dlse is None else t.dlse).clone().requires_grad_()
    out, lse = attention_of(posed)(*leaves)
    first = torch.autograd.grad((out, lse), leaves, (dout, dlse), create_graph=True)
    inputs = (dout, dlse, *leaves)
    results = torch.autograd.grad(first, inputs, (*t.direction, c.tg))
    judge(posed, dict(zip(OF_SECOND, results, strict=True)))


def test_func_jvp() -> None:
    posed = pose(wide("jvp"), second=True)
    t, c = posed.tensors, posed.chosen
    (out, lse), (tout, tlse) = torch.func.jvp(
        attention_of(posed), (t.q, t.k, t.v, c.block_scale), (*t.direction, c.tg)
    )
    judge(posed, dict(zip(OF_JVP, (out, tout, lse, tlse), strict=True)))


def test_compiled_function() -> None:
    """One graph, without a break; run eagerly, which needs no compiler on the machine."""
    posed = pose(wide("compiled"))
    attention, t = attention_of(posed, return_lse=False), posed.tensors

    def layer(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return 2 * attention(q * 1, k, v, 1 * g)

    results = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        leaves = leaves_of(posed)
        out = function(*leaves)
        results.append(bits(out.detach(), *torch.autograd.grad(out, leaves, t.dout)))
    assert results[0] == results[1]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_gradgradcheck(causal: bool) -> None:
    """float64, by the Numba kernels: reverse over reverse, and forward over reverse."""
    sizes = {"num_heads_kv": 1, "group": 2, "past_q": 1, "past_k": 1, **sized(8)}
    lengths = (3, 0, 19, 1), (5, 2, 20, 0)
    case = Case("check", *lengths, dtype="float64", causal=causal, **sizes)
    posed = pose(Sparse(case, 16, num_selected=2, gate=True, tg=True))
    attention, t = attention_of(posed), posed.tensors
    inputs = (t.q, t.k, t.v, posed.chosen.block_scale)
    leaves = [x.nan_to_num(1.0).requires_grad_() for x in inputs]

    def function(*given: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attention(*given)
        return out, torch.where(torch.isfinite(lse), lse, 0)

    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, check_fwd_over_rev=True, fast_mode=True)


def test_a_gate_of_16_bits() -> None:
    """Its gradient has its own dtype."""
    posed = pose(next(SECOND[1].problems()))
    leaves = leaves_of(posed)
    gate = posed.chosen.block_scale.bfloat16().requires_grad_()
    out, _ = attention_of(posed)(*leaves[:3], gate)
    as_float, _ = attention_of(posed)(*leaves[:3], gate.float().detach())
    assert bits(out.detach()) == bits(as_float.detach())
    (found,) = torch.autograd.grad(out, [gate], posed.tensors.dout)
    assert found.dtype == torch.bfloat16 and bool(found.any())
