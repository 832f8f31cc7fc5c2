"""Sinks composed from lse, as models do where the attention takes none: who has their gradient.

One query sees one key, q = k = 1, v = 2, and a sink of 0: out is 2 sigmoid(q k), so that dq and dk
are 2 sigmoid'(1) (pytorch/torchtitan#4796). They come through lse alone: the softmax is constant.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rawattn.torch import AuxRequest, provider, varlen_attn, varlen_attn_compat  # noqa: E402
from tests.shared.torch_problems import offsets  # noqa: E402

SLOPE = 0.39322387
CU = offsets((1,))
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

Attention = Callable[..., tuple[Any, Any]]


def ours(q: Any, k: Any, v: Any, cu: Any) -> tuple[Any, Any]:
    return varlen_attn(q, k, v, cu, softmax_scale=1.0, return_lse=True)


def compat(q: Any, k: Any, v: Any, cu: Any) -> tuple[Any, Any]:
    return varlen_attn_compat(q, k, v, cu, cu, 1, 1, scale=1.0, return_aux=AuxRequest(lse=True))


def torchs(q: Any, k: Any, v: Any, cu: Any) -> tuple[Any, Any]:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    request = varlen.AuxRequest(lse=True)
    return varlen.varlen_attn(q, k, v, cu, cu, 1, 1, scale=1.0, return_aux=request)


def one_key(dtype: Any, device: str) -> list[Any]:
    """q, k, v and the sink; the other elements of a head are zeros."""
    first = torch.eye(8, dtype=dtype, device=device)[None, :1]
    sink = torch.zeros(1, dtype=dtype, device=device)
    return [x.clone().requires_grad_() for x in (first, first, 2 * first, sink)]


def composed(attend: Attention, dtype: Any, device: str = "cpu") -> list[float]:
    """out of an attention whose sinks are composed from lse, dq, dk, dv and dsink."""
    q, k, v, sink = leaves = one_key(dtype, device)
    out, lse = attend(q, k, v, CU.to(device))
    out = out * torch.sigmoid(lse - sink[:, None]).T[..., None]
    return elements(out, torch.autograd.grad(out.sum(), leaves))


def elements(out: Any, gradients: Any) -> list[float]:
    return [x.flatten()[0].item() for x in (out, *gradients)]


def exact(slope: float = SLOPE) -> list[float]:
    """The sink's gradient is -dq, since out is a function of their difference."""
    kept = torch.sigmoid(torch.ones((), dtype=torch.float64)).item()
    return [2 * kept, slope, slope, kept, -SLOPE]


@pytest.fixture
def active() -> Iterator[None]:
    attention = pytest.importorskip("torch.nn.attention")
    attention.activate_flash_attention_impl(provider.NAME)
    yield
    attention.restore_flash_attention_impl()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("attend", [ours, compat])
def test_composed_from_lse(attend: Attention, device: str) -> None:
    found = composed(attend, torch.float64, device)
    assert found == pytest.approx(exact(), rel=0, abs=5e-9)  # of the digits of SLOPE


@pytest.mark.parametrize("device", DEVICES)
def test_fused(device: str) -> None:
    q, k, v, sink = leaves = one_key(torch.float64, device)
    out = varlen_attn(q, k, v, CU.to(device), softmax_scale=1.0, sinks=sink)
    found = elements(out, torch.autograd.grad(out.sum(), leaves))
    assert found == pytest.approx(exact(), rel=0, abs=5e-9)


def test_torchs_own_operator_loses_it(active: None) -> None:
    """Even on rawattn's kernels: torch's formula of the backward drops the gradient of lse."""
    found = composed(torchs, torch.float64)
    assert found == pytest.approx(exact(slope=0.0), rel=0, abs=5e-9)


@pytest.mark.gpu
def test_torchs_own_kernels_lose_it() -> None:
    found = composed(torchs, torch.bfloat16, "cuda")
    assert found == pytest.approx(exact(slope=0.0), abs=1e-2)
    assert composed(ours, torch.bfloat16, "cuda") == pytest.approx(exact(), abs=1e-2)
