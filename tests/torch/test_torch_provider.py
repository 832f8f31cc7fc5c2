"""rawattn in the place of the kernels behind torch's own varlen_attn."""

import inspect
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
OPTIONS = inspect.signature(varlen.varlen_attn).parameters  # 2.11 has few of them


def inputs(heads: int = 2, grad: bool = False, size: int = 16) -> list[Any]:
    torch.manual_seed(0)
    shapes = (22, heads, size), (22, 2, size), (22, 2, size)
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
        varlen.varlen_attn(*inputs(), CU, CU, 17, 17)  # torch has no kernel for the CPU


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0)])
def test_results_and_gradients(window: tuple[int, int], active: None) -> None:
    shared = {"enable_gqa": True} if "enable_gqa" in OPTIONS else {}
    mine, its = (inputs(4 if shared else 2, grad=True) for _ in range(2))
    request = varlen.AuxRequest(lse=True)
    out, lse = varlen.varlen_attn(
        *(*its, CU, CU, 17, 17), window_size=window, return_aux=request, **shared
    )
    wanted, exact = rawattn.torch.varlen_attn(*mine, CU, window=window, return_lse=True)
    assert torch.equal(out, wanted) and torch.equal(lse, exact)
    dout = torch.randn_like(out)
    for got, want in zip(
        torch.autograd.grad(out, its, dout), torch.autograd.grad(wanted, mine, dout), strict=True
    ):
        assert torch.equal(got, want)


@pytest.mark.skipif(not hasattr(varlen, "varlen_attn_out"), reason="this torch has none")
def test_out(active: None) -> None:
    q, k, v = inputs()
    out = torch.empty_like(q)
    varlen.varlen_attn_out(out, q, k, v, CU, CU, 17, 17)
    assert torch.equal(out, rawattn.torch.varlen_attn(q, k, v, CU))


@pytest.mark.skipif("seqused_k" not in OPTIONS, reason="this torch has none")
def test_keys_in_use(active: None) -> None:
    q, k, v = inputs()
    used = torch.tensor((3, 0, 9), dtype=torch.int32)
    out = varlen.varlen_attn(q, k, v, CU, CU, 17, 17, seqused_k=used)
    assert torch.equal(out, rawattn.torch.varlen_attn(q, k, v, CU, seqused_k=used))


def test_compiled(active: None) -> None:
    q, k, v = inputs()
    compiled = torch.compile(varlen.varlen_attn, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(q, k, v, CU, CU, 17, 17), rawattn.torch.varlen_attn(q, k, v, CU)
    )


LACKING = {"head sizes": (12, {}), "split keys": (16, {"num_splits": 2})}


@pytest.mark.parametrize("what", LACKING)
def test_what_is_lacking_goes_to_torch_and_is_said_once(what: str, active: None) -> None:
    size, options = LACKING[what]
    if options.keys() - OPTIONS:
        pytest.skip("this torch has none")
    for times in (1, 0):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with pytest.raises((NotImplementedError, RuntimeError)):  # of torch, on the CPU
                varlen.varlen_attn(*inputs(size=size), CU, CU, 17, 17, **options)
        told = [w for w in seen if what in str(w.message)]
        assert len(told) == times


def test_it_is_gone_when_torch_says_so() -> None:
    attention.activate_flash_attention_impl(provider.NAME)
    attention.restore_flash_attention_impl()
    with pytest.raises((NotImplementedError, RuntimeError)):
        varlen.varlen_attn(*inputs(), CU, CU, 17, 17)
