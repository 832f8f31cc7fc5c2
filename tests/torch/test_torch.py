"""rawattn.torch on the CPU: values, gradients, and every torch subsystem that calls operators.

Long by the number of those subsystems.
"""

from functools import partial
from itertools import product

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils.checkpoint import (  # noqa: E402
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from rawattn.torch import varlen_attn  # noqa: E402
from rawattn.torch import varlen_ops as torch_ops  # noqa: E402
from tests.shared.torch_problems import (  # noqa: E402
    FAST,
    LENGTHS,
    MASKS,
    WIDTHS,
    allowed,
    count_calls,
    finite,
    offsets,
    tensors,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def calls(monkeypatch):
    return count_calls(monkeypatch)


def by_sdpa(q, k, v, cu_q, cu_k, *, causal=False, window=(-1, -1), softmax_scale=None):
    """The same attention by torch's own, sequence by sequence with a dense mask."""
    parts = []
    for b in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        mask = allowed(q[rows].shape[0], k[keys].shape[0], causal=causal, window=window)
        part = F.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in (q[rows], k[keys], v[keys])),
            attn_mask=mask,
            scale=softmax_scale,
            enable_gqa=True,
        )
        alive = mask.any(1)[:, None]
        parts.append(torch.where(alive, part, 0).transpose(0, 1))
    parts.append(q.new_zeros(q.shape[0] - int(cu_q[-1]), q.shape[1], v.shape[2]))
    return torch.cat(parts)


@pytest.mark.parametrize("lengths_k", [LENGTHS[0], LENGTHS[1]], ids=["self", "cross"])
@pytest.mark.parametrize("mask", MASKS)
def test_values_and_gradients_are_those_of_torch(mask, lengths_k):
    *qkv, cu_q, cu_k = tensors(lengths_k=lengths_k)
    own_cu_k = None if lengths_k == LENGTHS[0] else cu_k
    out, lse = varlen_attn(*qkv, cu_q, own_cu_k, return_lse=True, **MASKS[mask])
    expected = by_sdpa(*qkv, cu_q, cu_k, **MASKS[mask])
    torch.testing.assert_close(out, expected)
    assert out.shape == (*qkv[0].shape[:2], WIDTHS["dim_v"]) and out.is_contiguous()
    assert lse.shape == (WIDTHS["heads"], qkv[0].shape[0]) and lse.dtype == torch.float64
    dout = torch.randn_like(out)
    for got, want in zip(
        torch.autograd.grad(out, qkv, dout), torch.autograd.grad(expected, qkv, dout), strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_have_the_dtype_of_the_inputs(dtype):
    *qkv, cu_q, cu_k = tensors(dtype=dtype)
    out, lse = varlen_attn(*qkv, cu_q, cu_k, causal=True, return_lse=True)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert {g.dtype for g in torch.autograd.grad(out.float().sum(), qkv)} == {dtype}
    wide = [x.detach().double() for x in qkv]
    expected = varlen_attn(*wide, cu_q, cu_k, causal=True).to(dtype)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("loss", ["out", "lse", "both"])
@pytest.mark.parametrize("mask", MASKS)
def test_gradcheck(mask, loss):
    """Small and crooked: shared heads, empty sequences, rows without keys."""
    *qkv, cu_q, cu_k = tensors(
        (2, 0, 3, 1), (1, 2, 4, 0), heads=2, heads_kv=1, dim=8, dim_v=8, spare=1
    )

    def function(q, k, v):
        out, lse = varlen_attn(q, k, v, cu_q, cu_k, return_lse=True, **MASKS[mask])
        return {"out": (out,), "lse": (finite(lse),), "both": (out, finite(lse))}[loss]

    assert torch.autograd.gradcheck(function, qkv, **FAST)


def test_rows_without_keys_are_zero_with_zero_gradients():
    *qkv, cu_q, cu_k = tensors((4,), (2,), spare=0)  # the first two queries see no key
    out, lse = varlen_attn(*qkv, cu_q, cu_k, causal=True, return_lse=True)
    assert not out[:2].any() and (lse[:, :2] == -torch.inf).all() and out[2:].all()
    grads = torch.autograd.grad((out.sum() + lse[:, 2:].sum()), qkv)
    assert not grads[0][:2].any() and all(g.isfinite().all() and g.any() for g in grads)


@pytest.mark.parametrize(
    "option", [{}, {"causal": True, "window": (3, -1)}, {"deterministic": True}], ids=str
)
@pytest.mark.parametrize("grad", [True, False])
def test_opcheck_of_the_forward(option, grad):
    q, k, v, cu_q, cu_k = tensors(lengths_k=LENGTHS[1], grad=grad)
    causal, window = option.get("causal", False), option.get("window", (-1, -1))
    rest = (causal, *window, None, None, option.get("deterministic", False), None)
    args = (q, k, v, None, cu_q, cu_k, None, *rest)
    results = torch.library.opcheck(torch_ops.varlen_forward, args)
    assert len(results) == 4 and set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("with_dlse", [True, False])
def test_opcheck_of_the_backward(with_dlse):
    q, k, v, cu_q, _ = tensors(grad=False)
    options = (None, True, -1, -1, 0.25, None, False, "reference")
    out, lse = torch_ops.varlen_forward(q, k, v, None, cu_q, None, *options)
    dlse = torch.randn_like(lse) if with_dlse else None
    args = (torch.randn_like(out), dlse, q, k, v, None, out, lse, cu_q, None, *options)
    results = torch.library.opcheck(torch_ops.varlen_backward, args)
    assert len(results) == 4 and set(results.values()) == {"SUCCESS"}


def test_results_share_no_memory_with_inputs():
    *qkv, cu_q, cu_k = tensors((1,), (1,), spare=0)  # one key: out equals v, and must not be v
    out, lse = varlen_attn(*qkv, cu_q, cu_k, return_lse=True)
    grads = torch.autograd.grad(out, qkv, torch.ones_like(out))
    storages = [x.untyped_storage().data_ptr() for x in (*qkv, out, lse, *grads)]
    assert len(set(storages)) == len(storages)


@pytest.mark.parametrize("grad", [True, False])
def test_errors_of_the_checks_come_through(grad):
    q, k, v, cu_q, cu_k = tensors(grad=grad)
    with pytest.raises(TypeError, match="dtype"):
        varlen_attn(q, k.float(), v, cu_q, cu_k)
    with pytest.raises(ValueError, match="num_heads"):
        varlen_attn(q[:, :3], k, v, cu_q, cu_k)
    with pytest.raises(ValueError, match="backend"):
        varlen_attn(q, k, v, cu_q, cu_k, backend="triton")


# ---- shapes of memory and of graphs ----


def test_views_of_one_qkv_tensor():
    cu = offsets((3, 4))
    qkv = torch.randn(7, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    dense = qkv.detach().clone().requires_grad_()
    out = varlen_attn(*qkv.unbind(1), cu, causal=True)
    expected = varlen_attn(*(x.contiguous() for x in dense.unbind(1)), cu, causal=True)
    assert torch.equal(out, expected)
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    assert torch.equal(qkv.grad, dense.grad)


@pytest.mark.parametrize("make", [lambda x: x.sum(), lambda x: x.transpose(0, 2).sum(0).sum()])
def test_dout_of_any_stride(make):
    *qkv, cu_q, cu_k = tensors()
    make(varlen_attn(*qkv, cu_q, cu_k)).backward()
    expected = torch.autograd.grad(
        varlen_attn(*qkv, cu_q, cu_k), qkv, torch.ones_like(varlen_attn(*qkv, cu_q, cu_k))
    )
    assert all(torch.equal(x.grad, g) for x, g in zip(qkv, expected, strict=True))


@pytest.mark.parametrize("needed", [n for n in product([True, False], repeat=3) if any(n)], ids=str)
def test_any_of_the_inputs_may_want_a_gradient(needed):
    *qkv, cu_q, cu_k = tensors()
    full = torch.autograd.grad(varlen_attn(*qkv, cu_q, cu_k).square().sum(), qkv)
    some = [x.detach().requires_grad_(n) for x, n in zip(qkv, needed, strict=True)]
    varlen_attn(*some, cu_q, cu_k).square().sum().backward()
    for x, need, grad in zip(some, needed, full, strict=True):
        assert torch.equal(x.grad, grad) if need else x.grad is None


def test_lse_alone_carries_a_gradient():
    *qkv, cu_q, cu_k = tensors()
    _, lse = varlen_attn(*qkv, cu_q, cu_k, return_lse=True)
    dq, dk, dv = torch.autograd.grad(finite(lse).sum(), qkv)
    assert dq.any() and dk.any() and not dv.any()


# ---- torch.compile ----


def test_compile_without_breaks_or_recompiles_when_lengths_change():
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()

    @partial(torch.compile, backend=counter, fullgraph=True)
    def step(q, k, v, cu_q, cu_k):
        out, lse = varlen_attn(
            2 * q, k, v, cu_q, cu_k, causal=True, window=(4, -1), return_lse=True
        )
        return out.square().sum() + finite(lse).sum()

    batches = [
        ((3, 5), (4, 6)),
        ((1, 0, 9), (2, 3, 8)),
        ((20,), (7,)),
        ((2, 2, 2, 2), (2, 2, 2, 3)),
    ]
    for lengths_q, lengths_k in batches:
        *qkv, cu_q, cu_k = tensors(lengths_q, lengths_k)
        for x in (*qkv, cu_q, cu_k):
            torch._dynamo.mark_dynamic(x, 0)
        got = torch.autograd.grad(step(*qkv, cu_q, cu_k), qkv)
        out, lse = varlen_attn(
            2 * qkv[0], *qkv[1:], cu_q, cu_k, causal=True, window=(4, -1), return_lse=True
        )
        want = torch.autograd.grad(out.square().sum() + finite(lse).sum(), qkv)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b)
    assert counter.frame_count == 1
    # The detector detects: a tensor of another dtype must be seen as a second compilation.
    *qkv, cu_q, cu_k = tensors(dtype=torch.float32)
    step(*qkv, cu_q, cu_k)
    assert counter.frame_count == 2


def test_compile_with_autocast_and_checkpoint():
    torch._dynamo.reset()
    *qkv, cu_q, cu_k = tensors(dtype=torch.float32)

    def step(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            attend = partial(varlen_attn, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True)
            return checkpoint(attend, q, k, v, use_reentrant=False)

    out = torch.compile(step, backend="aot_eager", fullgraph=True)(*qkv)
    assert out.dtype == torch.bfloat16 and torch.equal(out, step(*qkv))
    got, want = (torch.autograd.grad(o.sum(), qkv) for o in (out, step(*qkv)))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_fake_tensors_trace_what_real_ones_do():
    q, k, v, cu_q, cu_k = tensors(lengths_k=LENGTHS[1])

    def describe(*args):
        out, lse = varlen_attn(*args, return_lse=True)
        grads = torch.autograd.grad(out.sum() + lse.sum(), args[:3])
        return [(tuple(x.shape), x.stride(), x.dtype) for x in (out, lse, *grads)]

    for x in (torch.float64, torch.bfloat16):
        args = [t.detach().to(x).requires_grad_() for t in (q, k.flip(0), v)]
        expected = describe(*args, cu_q, cu_k)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(t) for t in (*args, cu_q, cu_k)]
            assert describe(*fakes) == expected
    meta = [x.detach().to("meta").requires_grad_() for x in args]
    assert describe(*meta, cu_q.to("meta"), cu_k.to("meta")) == expected


# ---- checkpointing, autocast, determinism ----


def save_attention(context, op, *args, **keywords):
    saved = op in (torch.ops.rawattn.varlen_forward.default,)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    ("options", "forwards"),
    [
        ({"use_reentrant": True}, 2),
        ({"use_reentrant": False}, 2),
        (
            {
                "use_reentrant": False,
                "context_fn": partial(create_selective_checkpoint_contexts, save_attention),
            },
            1,
        ),
    ],
    ids=["reentrant", "non_reentrant", "selective"],
)
def test_activation_checkpointing(calls, options, forwards):
    *qkv, cu_q, cu_k = tensors()

    def block(q, k, v):
        return varlen_attn(q.sin(), k.sin(), v.sin(), cu_q, cu_k, causal=True).sin()

    want = torch.autograd.grad(block(*qkv).sum(), qkv)
    calls["forward"].clear()
    checkpoint(block, *qkv, **options).sum().backward()
    assert len(calls["forward"]) == forwards
    assert all(torch.equal(x.grad, g) for x, g in zip(qkv, want, strict=True))


def test_autocast_casts_to_its_dtype():
    *qkv, cu_q, cu_k = tensors(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = varlen_attn(*qkv, cu_q, cu_k, return_lse=True)
        wide = varlen_attn(*(x.double() for x in qkv), cu_q, cu_k)
    assert (out.dtype, lse.dtype, wide.dtype) == (torch.bfloat16, torch.float32, torch.float64)
    cast = [x.detach().bfloat16() for x in qkv]
    assert torch.equal(out, varlen_attn(*cast, cu_q, cu_k))
    assert {g.dtype for g in torch.autograd.grad(out.sum(), qkv)} == {torch.float32}


def test_options_reach_both_directions(calls):
    *qkv, cu_q, cu_k = tensors()
    options = {"causal": True, "window": (5, 0), "softmax_scale": 0.5, "backend": "reference"}
    varlen_attn(*qkv, cu_q, cu_k, deterministic=True, **options).sum().backward()
    ((_, forward),), ((_, backward),) = calls["forward"], calls["backward"]
    assert options.items() <= forward.items() and options.items() <= backward.items()
    assert backward["deterministic"] is True and backward["dlse"] is None


@pytest.mark.parametrize("wanted", [True, False])
def test_deterministic_follows_torch(calls, wanted):
    *qkv, cu_q, cu_k = tensors()
    torch.use_deterministic_algorithms(wanted)
    try:
        varlen_attn(*qkv, cu_q, cu_k).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert calls["backward"][0][1]["deterministic"] is wanted


# ---- cotangents ----


def test_batched_cotangents_are_right():
    q, k, v, cu_q, _ = tensors()
    out = varlen_attn(q, k, v, cu_q, causal=True)
    douts = torch.randn(2, *out.shape, dtype=out.dtype)
    (batched,) = torch.autograd.grad(out, q, douts, is_grads_batched=True, retain_graph=True)
    for dq, dout in zip(batched, douts, strict=True):
        torch.testing.assert_close(dq, *torch.autograd.grad(out, q, dout, retain_graph=True))


# ---- on a GPU ----

ROUNDING = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}


def cuda_tensors(dtype):
    """The tensors of a CUDA call and, as float64 on the CPU, the same numbers."""
    lengths = ((100, 0, 37, 64, 1), (80, 5, 37, 129, 0))
    *qkv, cu_q, cu_k = tensors(*lengths, dtype=dtype, dim=64, dim_v=64)
    cuda = [x.detach().cuda().requires_grad_() for x in qkv]
    wide = [x.detach().double().requires_grad_() for x in qkv]
    return (*cuda, cu_q.cuda(), cu_k.cuda()), (*wide, cu_q, cu_k)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_cuda_agrees_with_the_cpu(mask, dtype, compiled):
    torch._dynamo.reset()
    call = partial(varlen_attn, return_lse=True, **MASKS[mask])
    results = []
    for args, function in zip(
        cuda_tensors(dtype),
        (torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call, call),
        strict=True,
    ):
        out, lse = function(*args)
        weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
        total = (out.double() * weight.to(out.device)).sum() + finite(lse).double().sum()
        results.append((out, finite(lse), *torch.autograd.grad(total, args[:3])))
    for got, want in zip(*results, strict=True):
        assert got.isfinite().all()
        scale = float(want.abs().max())
        torch.testing.assert_close(
            got.cpu().double(), want, rtol=0, atol=4 * ROUNDING[dtype] * scale
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_cuda_opcheck(dtype):
    (q, k, v, cu_q, cu_k), _ = cuda_tensors(dtype)
    options = (None, True, -1, -1, None, None, True, None)
    results = torch.library.opcheck(torch_ops.varlen_forward, (q, k, v, None, cu_q, cu_k, *options))
    assert set(results.values()) == {"SUCCESS"}
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = torch_ops.varlen_forward(q, k, v, None, cu_q, cu_k, *options)
    args = (torch.randn_like(out), finite(lse), q, k, v, None, out, lse, cu_q, cu_k, *options)
    assert set(torch.library.opcheck(torch_ops.varlen_backward, args).values()) == {"SUCCESS"}


@pytest.mark.gpu
def test_cuda_graph_of_a_training_step():
    """Captured once, replayed with other numbers and other lengths in the same memory."""
    (*qkv, cu_q, cu_k), _ = cuda_tensors(torch.bfloat16)

    def step():
        out = varlen_attn(*qkv, cu_q, cu_k, causal=True, deterministic=True)
        return out, *torch.autograd.grad(out, qkv, torch.ones_like(out))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        qkv[0].neg_()
    cu_q.copy_(offsets((7, 90, 0, 60, 3)))
    graph.replay()
    for got, want in zip(captured, step(), strict=True):
        assert torch.equal(got, want)
