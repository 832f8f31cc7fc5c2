"""rawattn in the place of the kernels behind torch's own varlen_attn."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", minversion="2.11")

from torch.nn import attention  # noqa: E402
from torch.nn.attention import varlen  # noqa: E402

import rawattn.torch  # noqa: E402
from rawattn.torch import provider  # noqa: E402

CU = torch.tensor((0, 5, 5, 22), dtype=torch.int32)


def inputs(heads: int = 4, grad: bool = False) -> list[Any]:
    torch.manual_seed(0)
    shapes = (22, heads, 16), (22, 2, 16), (22, 2, 16)
    return [torch.randn(s, dtype=torch.float32).requires_grad_(grad) for s in shapes]


@pytest.fixture
def active() -> Iterator[None]:
    attention.activate_flash_attention_impl(provider.NAME)
    provider._told.clear()
    yield
    attention.restore_flash_attention_impl()


def test_the_name_is_known_but_not_active() -> None:
    assert provider.NAME in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None
    with pytest.raises((NotImplementedError, RuntimeError)):
        varlen.varlen_attn(*inputs(2), CU, CU, 17, 17)  # torch has no kernel for the CPU


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0)])
def test_results_and_gradients(window: tuple[int, int], active: None) -> None:
    mine, its = inputs(grad=True), inputs(grad=True)
    out, lse = varlen.varlen_attn(
        *(*its, CU, CU, 17, 17),
        window_size=window,
        enable_gqa=True,
        return_aux=varlen.AuxRequest(lse=True),
    )
    wanted, exact = rawattn.torch.varlen_attn(*mine, CU, window=window, return_lse=True)
    assert torch.equal(out, wanted) and torch.equal(lse, exact)
    dout = torch.randn_like(out)
    for got, want in zip(
        torch.autograd.grad(out, its, dout), torch.autograd.grad(wanted, mine, dout), strict=True
    ):
        assert torch.equal(got, want)


def test_out(active: None) -> None:
    q, k, v = inputs(2)
    out = torch.empty_like(q)
    varlen.varlen_attn_out(out, q, k, v, CU, CU, 17, 17)
    assert torch.equal(out, rawattn.torch.varlen_attn(q, k, v, CU))


def test_keys_in_use(active: None) -> None:
    q, k, v = inputs(2)
    used = torch.tensor((3, 0, 9), dtype=torch.int32)
    out = varlen.varlen_attn(q, k, v, CU, CU, 17, 17, seqused_k=used)
    assert torch.equal(out, rawattn.torch.varlen_attn(q, k, v, CU, seqused_k=used))


def test_compiled(active: None) -> None:
    q, k, v = inputs(2)
    compiled = torch.compile(varlen.varlen_attn, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(q, k, v, CU, CU, 17, 17), rawattn.torch.varlen_attn(q, k, v, CU)
    )


def test_what_is_lacking_goes_to_torch_and_is_said_once(active: None) -> None:
    q, k, v = inputs(2)
    for times in (1, 0):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with pytest.raises((NotImplementedError, RuntimeError)):  # of torch, on the CPU
                varlen.varlen_attn(q, k, v, CU, CU, 17, 17, num_splits=2)
        told = [w for w in seen if "split keys" in str(w.message)]
        assert len(told) == times


def test_it_is_gone_when_torch_says_so() -> None:
    attention.activate_flash_attention_impl(provider.NAME)
    attention.restore_flash_attention_impl()
    with pytest.raises((NotImplementedError, RuntimeError)):
        varlen.varlen_attn(*inputs(2), CU, CU, 17, 17)
