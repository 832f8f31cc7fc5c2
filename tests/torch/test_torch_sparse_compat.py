"""native_sparse_attend and parallel_nsa agree with what the two libraries compute, faults aside.

The libraries' kernels need a GPU; here stands what they compute, query by query, in plain torch.
"""

import inspect

import pytest

torch = pytest.importorskip("torch")

from rawattn.torch import native_sparse_attend, parallel_nsa, varlen_attn  # noqa: E402
from tests.shared.torch_problems import agree, leaves, offsets  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK, BATCH, TOKENS, SELECTED = 16, 2, 64, 2
HEADS, HEADS_KV, DIM = 4, 2, 8


def softmax_rows(scores, values):
    """Of one query over a list of keys: out and lse."""
    return scores.softmax(0) @ values, scores.logsumexp(0)


# ---- native_sparse_attend ---------------------------------------------------------------------


def their_native(q, k, v, block_size, indices, fmask, gate=None, own=True, window=None):
    """out and lse of one branch: selected keys, not causal, and the causal part of the own block.

    Keys are a list: whatever is named twice is in it twice. With a window, these keys alone.
    """
    outs, lses = torch.empty_like(q[..., : v.shape[3]]), torch.empty_like(q[..., 0])
    scale = q.shape[3] ** -0.5
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            kv = h * k.shape[1] // q.shape[1]
            sel = h * indices.shape[1] // q.shape[1]
            for t in range(q.shape[2]):
                first = (t - window) if window is not None else t // block_size * block_size
                keys = list(range(max(first, 0), t + 1)) if own else []
                factors = [q.new_ones(())] * len(keys)
                for slot in range(indices.shape[3] if window is None else 0):
                    if fmask[b, sel, t, slot]:
                        block = int(indices[b, sel, t, slot])
                        keys += range(block * block_size, (block + 1) * block_size)
                        one = q.new_ones(()) if gate is None else gate[b, sel, t, slot]
                        factors += [one] * block_size
                scores = scale * (k[b, kv, keys] @ q[b, h, t]) * torch.stack(factors)
                outs[b, h, t], lses[b, h, t] = softmax_rows(scores, v[b, kv, keys])
    return outs, lses


def native_problem(heads_sel=HEADS_KV, batch=BATCH):
    """Selected blocks are distinct and lie before the query's own, as the library's layer makes."""
    draw = torch.Generator().manual_seed(3)
    qkv = [
        torch.randn(batch, h, TOKENS, DIM, generator=draw, dtype=torch.float64)
        for h in (HEADS, HEADS_KV, HEADS_KV)
    ]
    indices = torch.zeros(batch, heads_sel, TOKENS, SELECTED, dtype=torch.int64)
    fmask = torch.zeros(indices.shape, dtype=torch.bool)
    for t in range(TOKENS):
        past = t // BLOCK
        for place in indices[:, :, t].flatten(0, 1):
            chosen = torch.randperm(past, generator=draw)[:SELECTED]
            place[: len(chosen)] = chosen
        fmask[:, :, t, : min(past, SELECTED)] = True
    fmask &= torch.rand(fmask.shape, generator=draw) < 0.8
    gate = torch.ones(indices.shape, dtype=torch.float64)
    return [*qkv, gate], indices, fmask


@pytest.mark.parametrize("heads_sel", [HEADS_KV, HEADS])
@pytest.mark.parametrize("gated", [True, False])
def test_native_sparse_attend(heads_sel, gated):
    inputs, indices, fmask = native_problem(heads_sel)
    results = []
    for function in (native_sparse_attend, their_native):
        q, k, v, gate = leaves(inputs)
        keywords = {"return_lse": True} if function is native_sparse_attend else {}
        given = gate if gated else None
        out, lse = function(q, k, v, BLOCK, indices, fmask, given, **keywords)
        wanted = (q, k, v, gate) if gated else (q, k, v)
        grads = torch.autograd.grad((out.sin().sum() + lse.sin().sum()), wanted)
        results.append((out.detach(), lse.detach(), *grads))
    assert results[0][0].shape == inputs[0].shape
    agree(*results)


def test_native_sparse_attend_without_causality():
    inputs, indices, _ = native_problem()
    indices = (indices + torch.arange(SELECTED)) % (TOKENS // BLOCK)  # the future as well
    indices[..., 1] = (indices[..., 0] + 2) % (TOKENS // BLOCK)
    fmask = torch.ones(indices.shape, dtype=torch.bool)
    out = native_sparse_attend(*inputs[:3], BLOCK, indices, fmask, None, False)
    agree(out, their_native(*inputs[:3], BLOCK, indices, fmask, own=False)[0])


def test_native_sparse_attend_with_the_sliding_branch():
    inputs, indices, fmask = native_problem()
    q, k, v, _ = leaves(inputs)
    (out, sliding), (lse, sliding_lse) = native_sparse_attend(
        *(q, k, v, BLOCK, indices, fmask), return_lse=True, return_sliding_window_out=True
    )
    want = their_native(q, k, v, BLOCK, indices, fmask)
    of_window = their_native(q, k, v, BLOCK, indices, fmask, window=BLOCK)
    results = ((out, lse, sliding, sliding_lse), (*want, *of_window))
    agree(*([x.detach() for x in y] for y in results))
    agree(*(torch.autograd.grad(sum(x.sin().sum() for x in y), (q, k, v)) for y in results))
    pair = native_sparse_attend(q, k, v, BLOCK, indices, fmask, return_sliding_window_out=True)
    assert torch.equal(pair[0], out) and torch.equal(pair[1], sliding)


def test_the_parameters_of_native_sparse_attend():
    names = [*inspect.signature(native_sparse_attend).parameters]
    assert names == [
        *("fq", "fk", "fv", "block_size", "selected_block_indices", "fmask", "sel_scale"),
        *("include_block_causal", "return_lse", "block_dk_dv_use_dot", "return_sliding_window_out"),
    ]


def test_where_native_sparse_attend_differs():
    inputs, indices, fmask = native_problem(batch=1)
    q, k, v, gate = inputs
    call = lambda *x, **y: native_sparse_attend(q, k, v, BLOCK, *x, **y)  # noqa: E731
    plain = call(indices, fmask)
    twice, own = (
        torch.cat((indices, indices), 3),
        torch.arange(TOKENS)[None, None, :, None] // BLOCK,
    )
    both = torch.cat((fmask, fmask), 3)
    agree(call(twice, both), plain)
    own = own.expand(1, HEADS_KV, TOKENS, 1)
    seen = torch.ones(own.shape, dtype=torch.bool)
    agree(call(torch.cat((indices, own), 3), torch.cat((fmask, seen), 3)), plain)
    future = torch.cat((indices, own + 1), 3)
    agree(call(future, torch.cat((fmask, seen), 3)), plain)
    # A partial last block: queries of the first tokens are the same without what follows.
    short = [x[:, :, :40] for x in (q, k, v)]
    agree(
        native_sparse_attend(*short, BLOCK, indices[:, :, :40], fmask[:, :, :40]), plain[:, :, :40]
    )
    # The scale is applied.
    assert not torch.allclose(call(indices, fmask, 2 * gate), plain)


def test_native_sparse_attend_refuses_a_causal_own_block_of_unequal_lengths():
    inputs, indices, fmask = native_problem()
    q, k, v, _ = inputs
    with pytest.raises(ValueError, match=r"64 tokens and fk 32: .* call rawattn.torch.sparse_attn"):
        native_sparse_attend(q, k[:, :, :32], v[:, :, :32], BLOCK, indices, fmask)
    out = native_sparse_attend(
        q, k[:, :, :32], v[:, :, :32], BLOCK, indices % 2, fmask, None, False
    )
    assert out.shape == q.shape


# ---- parallel_nsa -----------------------------------------------------------------------------


def their_nsa(q, k, v, g_slc, indices, counts, cu_q, cu_k, gate_swa=None, window=0):
    """The selected branch, and the sliding one, of one packed batch."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    scale = q.shape[3] ** -0.5
    group = q.shape[2] // k.shape[2]
    for b in range(len(cu_q) - 1):
        ahead = int(cu_k[b + 1] - cu_k[b]) - int(cu_q[b + 1] - cu_q[b])
        for t in range(int(cu_q[b]), int(cu_q[b + 1])):
            position = t - int(cu_q[b]) + ahead
            for h in range(q.shape[2]):
                keys = []
                slots = indices.shape[3] if counts is None else int(counts[0, t, h // group])
                for block in indices[0, t, h // group, :slots].tolist():
                    if 0 <= block * BLOCK <= position:
                        keys += range(block * BLOCK, min((block + 1) * BLOCK, position + 1))
                for keys, gate in (  # noqa: B020
                    (keys, g_slc),
                    (
                        range(max(position - window + 1, 0), position + 1) if window else (),
                        gate_swa,
                    ),
                ):
                    if len(keys):
                        rows = torch.tensor([*keys]) + int(cu_k[b])
                        scores = scale * (k[0, rows, h // group] @ q[0, t, h])
                        value, _ = softmax_rows(scores, v[0, rows, h // group])
                        out[0, t, h] += value if gate is None else value * gate[0, t, h]
    return out


def nsa_problem(lengths=(33, 0, 20), lengths_k=None, padding=-1):
    lengths_k = lengths if lengths_k is None else lengths_k
    draw = torch.Generator().manual_seed(4)
    rows, keys = sum(lengths), sum(lengths_k)
    tensors = [
        torch.randn(1, *shape, generator=draw, dtype=torch.float64)
        for shape in ((rows, HEADS, DIM), (keys, HEADS_KV, DIM), (keys, HEADS_KV, 16))
    ]
    gates = [torch.rand(1, rows, HEADS, generator=draw, dtype=torch.float64) for _ in range(2)]
    named = torch.rand(rows, HEADS_KV, 4, generator=draw).topk(3).indices  # distinct, of 4 blocks
    named = named.masked_fill(torch.rand(named.shape, generator=draw) < 0.2, padding)
    return (*tensors, *gates), named[None], offsets(lengths), offsets(lengths_k)


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("padding", [-1, 53])
@pytest.mark.parametrize("lengths_k", [None, (40, 3, 64)], ids=["self", "cross"])
def test_parallel_nsa(lengths_k, padding, counted):
    inputs, indices, cu_q, cu_k = nsa_problem(lengths_k=lengths_k, padding=padding)
    counts = torch.randint(0, 4, indices.shape[:3]) if counted else None
    q, k, v, g_slc, g_swa = leaves(inputs)
    out = parallel_nsa(
        q,
        k,
        v,
        g_slc=g_slc,
        g_swa=g_swa,
        block_indices=indices,
        block_counts=counts if counted else 1,  # an int limits nothing
        block_size=BLOCK,
        window_size=5,
        cu_seqlens=cu_q if lengths_k is None else (cu_q, cu_k),
    )
    want = their_nsa(q, k, v, g_slc, indices, counts, cu_q, cu_k, g_swa, 5)
    agree(out.detach(), want.detach())
    agree(*(torch.autograd.grad(x.sin().sum(), (q, k, v, g_slc, g_swa)) for x in (out, want)))


def test_parallel_nsa_of_a_batch():
    inputs, indices, cu_q, _ = nsa_problem((32, 32))
    two = [x[0].unflatten(0, (2, 32)) for x in inputs]
    out = parallel_nsa(
        *two[:3], g_slc=two[3], block_indices=indices[0].unflatten(0, (2, 32)), block_size=BLOCK
    )
    want = their_nsa(*inputs[:4], indices, None, cu_q, cu_q)
    assert out.shape == (2, 32, HEADS, 16)
    agree(out.flatten(0, 1), want[0])
    ungated = parallel_nsa(
        *inputs[:3], block_indices=indices, block_size=BLOCK, cu_seqlens=cu_q, scale=0.1
    )
    ones = torch.ones_like(inputs[3])
    agree(
        ungated,
        their_nsa(inputs[0] * 0.1 * DIM**0.5, *inputs[1:3], ones, indices, None, *[cu_q] * 2),
    )


def test_parallel_nsa_s_own_block_and_queries_without_keys():
    inputs, indices, cu_q, _ = nsa_problem((33,))
    nothing = torch.full_like(indices, 33)
    call = lambda x: parallel_nsa(*inputs[:3], block_indices=x, block_size=BLOCK)  # noqa: E731
    assert not call(nothing).any()
    every = torch.arange(3).expand(indices.shape)
    causal = varlen_attn(*(x[0] for x in inputs[:3]), cu_q, causal=True)
    agree(call(every)[0], causal)
    agree(call(every.repeat(1, 1, 1, 2))[0], causal)  # duplicates count once


def test_what_parallel_nsa_refuses():
    inputs, indices, cu_q, _ = nsa_problem()
    q, k, v, gate, _ = inputs
    with pytest.raises(ValueError, match=r"g_cmp asks for .*NativeSparseAttention"):
        parallel_nsa(q, k, v, g_cmp=gate, block_indices=indices, cu_seqlens=cu_q)
    with pytest.raises(ValueError, match="block_indices=None asks for"):
        parallel_nsa(q, k, v, g_slc=gate, cu_seqlens=cu_q)
    with pytest.raises(ValueError, match="window_size=4 needs g_swa"):
        parallel_nsa(q, k, v, block_indices=indices, window_size=4, cu_seqlens=cu_q)
    with pytest.raises(ValueError, match="batch is 2: expected 1"):
        parallel_nsa(*(x.expand(2, -1, -1, -1) for x in (q, k, v)), block_indices=indices,
                     cu_seqlens=cu_q)  # fmt: skip
    names = [*inspect.signature(parallel_nsa).parameters]
    assert names == [
        *("q", "k", "v", "g_cmp", "g_slc", "g_swa", "block_indices", "block_counts", "block_size"),
        *("window_size", "scale", "cu_seqlens"),
    ]


@pytest.mark.parametrize("name", ["native", "nsa"])
def test_compile(name):
    torch._dynamo.reset()
    if name == "native":
        inputs, indices, fmask = native_problem()
        inputs = leaves(inputs[:3])

        def call(q, k, v):
            return native_sparse_attend(q, k, v, BLOCK, indices, fmask)
    else:
        inputs, indices, cu_q, _ = nsa_problem()
        inputs = leaves(inputs[:4])

        def call(q, k, v, gate):
            return parallel_nsa(
                *(q, k, v), g_slc=gate, block_indices=indices, block_size=BLOCK, cu_seqlens=cu_q
            )

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    agree(*(torch.autograd.grad(f(*inputs).sin().sum(), inputs) for f in (compiled, call)))
