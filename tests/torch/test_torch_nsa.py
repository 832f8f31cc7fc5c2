"""rawattn.torch.NativeSparseAttention on the CPU, against the same layer with dense masks."""

import math
from functools import partial
from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import func  # noqa: E402

from rawattn.torch import NativeSparseAttention  # noqa: E402
from rawattn.torch import nsa as torch_nsa  # noqa: E402
from tests.shared.torch_problems import agree, offsets  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

DIM, BLOCK = 24, 16
LENGTHS = (70, 0, 7, 33, 100, 1)
SIZES = {"num_heads_q": 4, "num_heads_kv": 2, "head_dim": 8, "head_dim_v": 16}
OPTIONS = {
    "block_size": BLOCK,
    "num_selected": 3,
    "num_local": 1,
    "compress_length": 8,
    "compress_stride": 4,
    "window": 10,
}


def layer(**options):
    torch.manual_seed(6)
    return NativeSparseAttention(DIM, **SIZES, **{**OPTIONS, **options}).double()


def batch(lengths=LENGTHS, spare=2):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(sum(lengths) + spare, DIM, generator=draw, dtype=torch.float64)
    return x, offsets(lengths)


# ---- the same, densely, one sequence at a time ------------------------------------------------


def compressed_rows(compression, x, length, stride):
    """(blocks, heads, width), by a loop over the blocks of one sequence."""
    rows = []
    for first in range(0, len(x) - length + 1, stride):
        block = x[first : first + length].transpose(0, 1)  # heads, length, width
        if compression.place is None:
            rows.append(block.mean(1))
        else:
            rows.append(compression.mlp((block + compression.place).flatten(1)))
    return torch.stack(rows) if rows else x.new_zeros(0, *x.shape[1:])


def masked_attention(q, k, v, mask):
    """out and probabilities, with mask (num_heads_kv or 1, queries, keys)."""
    group = q.shape[1] // k.shape[1]
    Q, K, V = (y.transpose(0, 1) for y in (q, *(x.repeat_interleave(group, 1) for x in (k, v))))
    mask = mask.expand(k.shape[1], *mask.shape[1:]).repeat_interleave(group, 0)
    S = (Q @ K.transpose(1, 2) * q.shape[2] ** -0.5).masked_fill(~mask, -torch.inf)
    P = torch.where(mask.any(2, keepdim=True), S.softmax(2), 0)
    return (P @ V).transpose(0, 1), P


def importance_of(P, m, blocks):
    """(num_heads_kv, queries, blocks): a compressed block counts once per stride that is shared."""
    group = SIZES["num_heads_q"] // SIZES["num_heads_kv"]
    shares = torch.zeros(P.shape[2], blocks, dtype=P.dtype)
    for i in range(P.shape[2]):
        for stride in range(m.compress_length // m.compress_stride):
            shares[i, (i + stride) * m.compress_stride // BLOCK] += 1
    return P.unflatten(0, (-1, group)).sum(1) @ shares


def chosen_blocks(m, importance):
    """For each (head, query), the set of its blocks."""
    importance = importance.detach()
    heads, queries, _ = importance.shape
    sets = []
    for head in range(heads):
        for t in range(queries):
            own = t // BLOCK
            forced = {*range(min(m.num_initial, own + 1))}
            forced |= {*range(max(own - m.num_local + 1, 0), own + 1)} if m.num_local else set()
            past = sorted(
                set(range(own + 1)) - forced, key=lambda n: -float(importance[head, t, n])
            )
            sets.append(forced | {*past[: m.num_selected - len(forced)]})
    return sets


def rotated(x, base):
    angle = torch.arange(len(x), dtype=x.dtype)[:, None] * base ** -(
        torch.arange(x.shape[2] // 2, dtype=x.dtype) / (x.shape[2] // 2)
    )
    turned = (
        torch.view_as_complex(torch.stack(x.chunk(2, -1), -1))
        * torch.polar(torch.ones_like(angle), angle)[:, None]
    )
    return torch.cat((turned.real, turned.imag), -1)


def densely(m, x):
    """The layer's output for one sequence."""
    if (tokens := len(x)) == 0:
        return x
    q = m.project_q(x).view(tokens, m.num_heads_q, m.head_dim)
    kv = m.project_kv(x).view(tokens, -1, m.num_heads_kv, m.head_dim + m.head_dim_v)
    pairs = [kv[:, min(i, kv.shape[1] - 1)].split((m.head_dim, m.head_dim_v), -1) for i in range(3)]
    position, key = torch.arange(tokens)[:, None], torch.arange(tokens)

    sizes = (m.compress_length, m.compress_stride)
    k, v = (
        compressed_rows(f, y, *sizes)
        for f, y in zip((m.compress_k, m.compress_v), pairs[0], strict=True)
    )
    ends = torch.arange(len(k)) * m.compress_stride + m.compress_length - 1
    compressed, P = masked_attention(q, k, v, (ends <= position)[None])
    blocks = math.ceil(tokens / BLOCK)
    sets = chosen_blocks(m, importance_of(P, m, blocks))
    seen = torch.tensor([[n in chosen for n in range(blocks)] for chosen in sets])
    seen = seen.view(m.num_heads_kv, tokens, blocks)[:, :, key // BLOCK] & (key <= position)

    (k_selected, v_selected), (k_sliding, v_sliding) = pairs[1:]
    if m.rotary_base is not None:
        q, k_selected, k_sliding = (rotated(y, m.rotary_base) for y in (q, k_selected, k_sliding))
    selected, _ = masked_attention(q, k_selected, v_selected, seen)
    near = (key <= position) & (key > position - m.window)
    sliding, _ = masked_attention(q, k_sliding, v_sliding, near[None])
    gates = m.gate(x).sigmoid().view(tokens, 3, m.num_heads_q, 1)
    mixed = gates[:, 0] * compressed + gates[:, 1] * selected + gates[:, 2] * sliding
    return m.project_out(mixed.flatten(1))


KINDS = {
    "plain": {},
    "mean": {"compression": "mean"},
    "shared": {"separate_kv": False},
    "rotary": {"rotary_base": 50.0},
    "unforced": {"num_initial": 0, "num_local": 0},
    "local": {"num_initial": 1, "num_local": 2, "num_selected": 4, "compress_hidden": 5},
    "coarse": {"compress_length": 16, "compress_stride": 16, "window": 1},
    "long": {"compress_length": 24, "compress_stride": 8},
}


@pytest.mark.parametrize("kind", KINDS)
def test_output_and_gradients_are_those_of_the_dense_layer(kind):
    m = layer(**KINDS[kind])
    x, cu = batch()
    x.requires_grad_()
    out = m(x, cu)
    assert out.shape == x.shape and not out[-2:].any()
    want = torch.cat([densely(m, part) for part in x.split([*LENGTHS, 2])[:-1]])
    agree(out[:-2].detach(), want.detach())
    weight = torch.linspace(-1, 1, want.numel(), dtype=want.dtype).view(want.shape)
    wanted = [x, *m.parameters()]
    of_ours = torch.autograd.grad((out[:-2] * weight).sum(), wanted)
    agree(of_ours, torch.autograd.grad((want * weight).sum(), wanted))


def test_every_parameter_learns():
    m = layer()
    x, cu = batch()
    m(x, cu).square().sum().backward()
    names = {name for name, _ in m.named_parameters()}
    assert {"compress_k.place", "compress_v.mlp.2.weight", "gate.bias"} <= names
    for name, parameter in m.named_parameters():
        assert parameter.grad is not None and float(parameter.grad.abs().max()) > 1e-6, name
    assert not any(
        name.startswith("compress") for name, _ in layer(compression="mean").named_parameters()
    )


# ---- packing ----------------------------------------------------------------------------------


def test_sequences_do_not_see_each_other():
    """Not even NaN in all the others."""
    m = layer(rotary_base=10.0)
    x, cu = batch()
    out, start = m(x, cu), 0
    for length in LENGTHS:
        here = slice(start, start + length)
        poisoned = torch.full_like(x, torch.nan)
        poisoned[here] = x[here]
        got = poisoned.requires_grad_()
        result = m(got, cu)[here]
        torch.testing.assert_close(result, out[here])
        torch.testing.assert_close(result, m(x[here], offsets((length,))))
        if length:
            (grad,) = torch.autograd.grad(result.sum(), got)
            assert grad[here].isfinite().all() and grad[here].any()
        start += length


def test_the_future_is_not_seen():
    m = layer()
    x, cu = batch((90,), spare=0)
    out = m(x, cu)
    for t in (15, 16, 40, 63, 64, 88):
        changed = x.clone()
        changed[t + 1 :] = 9 * torch.randn_like(changed[t + 1 :])
        torch.testing.assert_close(m(changed, cu)[: t + 1], out[: t + 1])
        assert not torch.allclose(m(changed, cu)[t + 1], out[t + 1])


@pytest.mark.parametrize("lengths", [(), (0,), (3,), (3, 7), (8,)], ids=str)
def test_short_and_empty_batches(lengths):
    m = layer()
    x, cu = batch(lengths, spare=1)
    out = m(x.requires_grad_(), cu)
    assert out.shape == x.shape and out.isfinite().all() and not out[-1].any()
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert grad.isfinite().all() and bool(grad.any()) == bool(sum(lengths))
    nothing = m(x[:0], offsets(tuple(0 for _ in lengths)))
    assert nothing.shape == (0, DIM)


def test_rows_past_the_last_sequence():
    m = layer()
    x, cu = batch(LENGTHS, spare=40)
    out = m(x, cu)
    assert not out[-40:].any()
    torch.testing.assert_close(out[:-40], m(x[:-40], cu))


# ---- the choice of blocks ---------------------------------------------------------------------


def sets_of(indices):
    return [{int(n) for n in row if n >= 0} for row in indices.flatten(0, 1)]


@pytest.mark.parametrize("queries", [1, 7, 64, 1000])
@pytest.mark.parametrize("longest", [None, 100, 5000])
def test_chunks_and_bounds_change_no_choice(monkeypatch, queries, longest):
    m = layer()
    x, cu = batch()
    seen = []
    choose = torch_nsa.choose_blocks
    monkeypatch.setattr(
        torch_nsa, "choose_blocks", lambda *a, **k: seen.append(choose(*a, **k)) or seen[-1]
    )
    m(x, cu)
    monkeypatch.setattr(torch_nsa, "MOST_QUERIES", queries)
    out = m(x, cu, max_seqlen=longest)
    assert sets_of(seen[0]) == sets_of(seen[1]) and out.isfinite().all()
    monkeypatch.setattr(torch_nsa, "MOST_SCORES", 1)
    m(x, cu, max_seqlen=longest)
    assert sets_of(seen[0]) == sets_of(seen[2])
    assert {len(s) for s in sets_of(seen[0][:70])} == {1, 2, 3}
    chosen = seen[0]
    assert chosen.dtype == torch.int32 and chosen.shape == (len(x), 2, OPTIONS["num_selected"])


def test_no_score_array_is_larger_than_allowed(monkeypatch):
    """Memory of the selection: watch every exponential."""
    monkeypatch.setattr(torch_nsa, "MOST_SCORES", 4000)
    x, cu = batch()
    sizes = []
    exp_ = torch.Tensor.exp_
    monkeypatch.setattr(torch.Tensor, "exp_", lambda y: sizes.append(y.numel()) or exp_(y))
    layer()(x, cu)
    assert sizes and max(sizes) <= 4000 and sum(sizes) > 4000


# ---- use --------------------------------------------------------------------------------------


def test_the_loss_falls():
    """Each token has to name the token that stood right after its own last occurrence."""
    torch.manual_seed(2)
    enter, m = torch.nn.Embedding(12, DIM), NativeSparseAttention(DIM, **SIZES, **OPTIONS)
    leave = torch.nn.Linear(DIM, 12)
    lengths = (60, 30, 75)
    tokens = torch.cat(
        [torch.arange(n) * step % 12 for n, step in zip(lengths, (1, 5, 7), strict=True)]
    )
    cu = offsets(lengths)
    target = tokens.roll(-1)
    parameters = [*enter.parameters(), *m.parameters(), *leave.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    losses = []
    for _ in range(30):
        h = enter(tokens)
        loss = F.cross_entropy(leave(h + m(h, cu)), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert max(b - a for a, b in pairwise(losses)) < 0.3


def test_dtypes_and_autocast():
    x, cu = batch()
    m = layer().float()
    with torch.autocast("cpu", torch.bfloat16):
        out = m(x.float(), cu)
    assert out.dtype == torch.bfloat16 and out.isfinite().all()
    out.float().sum().backward()
    assert {p.grad.dtype for p in m.parameters()} == {torch.float32}
    low = layer().bfloat16()
    assert low(x.bfloat16(), cu).dtype == torch.bfloat16
    wide = layer()(x, cu)
    assert (m(x.float(), cu) - wide).abs().max() < 1e-3
    made = NativeSparseAttention(DIM, **SIZES, dtype=torch.float16, device="meta")
    assert {(p.dtype, p.device.type) for p in made.parameters()} == {(torch.float16, "meta")}


def test_int64_offsets_and_compile():
    torch._dynamo.reset()
    m = layer()
    x, cu = batch()
    compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
    outs = compiled(x, cu.long()), m(x, cu)
    torch.testing.assert_close(*outs)
    wanted = [*m.parameters()]
    agree(*(torch.autograd.grad(out.sin().sum(), wanted) for out in outs))


def test_the_second_derivative_and_the_jvp():
    m = layer()
    x, cu = batch((40, 20), spare=0)
    direction = x.cos()

    def loss(y, function):
        return function(y).sin().sum()

    ours = partial(m, cu_seqlens=cu)
    dense = lambda y: torch.cat([densely(m, part) for part in y.split((40, 20))])  # noqa: E731
    routes = [
        torch.autograd.functional.hvp(partial(loss, function=f), x, direction)[1]
        for f in (ours, dense)
    ]
    agree(*routes)
    agree(*(func.jvp(f, (x,), (direction,)) for f in (ours, dense)))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_heads_kv": 3}, r"num_heads_q is 4: expected a multiple of num_heads_kv \(3\)"),
        ({"compress_stride": 3}, "compress_stride is 3: expected a divisor"),
        ({"block_size": 18}, "compress_stride is 4: expected a divisor"),
        ({"num_local": 3}, "only 3; raise it"),
        ({"compression": "max"}, "expected 'mlp' or 'mean'"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_cannot_be(options, text):
    with pytest.raises(ValueError, match=text):
        NativeSparseAttention(DIM, **{**SIZES, **OPTIONS, **options})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_cuda_agrees_with_the_cpu(dtype):
    """With all blocks selected, so that no rounding can change a choice."""
    m = layer(num_selected=7)
    x, cu = batch()
    want = m(x, cu)
    got = m.to("cuda", dtype)(x.to("cuda", dtype), cu.cuda())
    atol = {torch.bfloat16: 4e-2, torch.float32: 1e-4}[dtype] * float(want.abs().max())
    torch.testing.assert_close(got.cpu().double(), want, rtol=0, atol=atol)
    got.float().square().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in m.parameters())


@pytest.mark.gpu
def test_cuda_waits_for_nothing():
    m = layer().to("cuda", torch.bfloat16)
    x, cu = batch()
    x, cu = x.to("cuda", torch.bfloat16), cu.cuda()
    m(x, cu).float().sum().backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        m(x, cu).float().sum().backward()
        m(x, cu, max_seqlen=100)
    finally:
        torch.cuda.set_sync_debug_mode("default")
