"""The names of flash-attn: each function against torch's own attention, values and gradients."""

import inspect

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from rawattn.torch import flash_attn as fa  # noqa: E402
from rawattn.torch import flash_attn_interface as fa3  # noqa: E402
from rawattn.torch import varlen_attn  # noqa: E402

BATCH, LENGTH, HEADS, DIM = 3, 7, 4, 16
LENGTHS = (5, 0, 1, 7)


def drawn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def sdpa(q, k, v, **options):
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, enable_gqa=True, **options).transpose(1, 2)


def same(found, exact, inputs):
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)
    cotangent = drawn(*exact.shape, seed=9).detach()
    pairs = (torch.autograd.grad(x, inputs, cotangent, retain_graph=True) for x in (found, exact))
    for ours, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softmax_scale": 0.3}], ids=str)
def test_batched(options):
    theirs = {{"causal": "is_causal", "softmax_scale": "scale"}[n]: x for n, x in options.items()}
    q = drawn(BATCH, LENGTH, HEADS, DIM)
    kv = drawn(BATCH, LENGTH, 2, 2, DIM, seed=1)
    qkv = drawn(BATCH, LENGTH, 3, HEADS, DIM, seed=2)
    k, v = kv.unbind(2)
    exact = sdpa(q, k, v, **theirs)
    same(fa.flash_attn_func(q, k, v, **options), exact, (q, kv))
    same(fa.flash_attn_kvpacked_func(q, kv, **options), exact, (q, kv))
    exact = sdpa(*qkv.unbind(2), **theirs)
    same(fa.flash_attn_qkvpacked_func(qkv, **options), exact, (qkv,))


def test_lse_of_a_batch():
    q, k, v = (drawn(BATCH, LENGTH, HEADS, DIM, seed=i) for i in range(3))
    out, lse, probabilities = fa.flash_attn_func(q, k, v, return_attn_probs=True)
    exact = torch.einsum("bihd,bjhd->bhij", q, k).mul(DIM**-0.5).logsumexp(-1)
    assert probabilities is None and lse.shape == (BATCH, HEADS, LENGTH)
    same(lse, exact, (q, k))
    assert torch.equal(out, fa.flash_attn_func(q, k, v))


def test_other_lengths_of_keys():
    """Aligned at the ends, where torch's own is_causal aligns the beginnings."""
    q, k, v = (drawn(BATCH, n, HEADS, DIM, seed=n) for n in (4, 9, 9))
    seen = torch.ones(4, 9, dtype=torch.bool)
    found = fa.flash_attn_func(q, k, v, causal=True)
    same(found, sdpa(q, k, v, attn_mask=seen.tril(5)), (q, k, v))
    found = fa.flash_attn_func(q, k, v, window_size=(2, 1))
    same(found, sdpa(q, k, v, attn_mask=seen.tril(6).triu(3)), (q, k, v))


@pytest.mark.parametrize(("size", "size_v"), [(11, 11), (16, 3), (11, 8)])
def test_any_head_size(size, size_v):
    q, k = drawn(BATCH, 4, HEADS, size), drawn(BATCH, 9, 2, size, seed=1)
    v = drawn(BATCH, 9, 2, size_v, seed=2)
    exact = sdpa(q, k, v)
    same(fa.flash_attn_func(q, k, v), exact, (q, k, v))
    same(fa3.flash_attn_func(q, k, v), exact, (q, k, v))
    cu_q, cu_k = (torch.arange(BATCH + 1) * n for n in (4, 9))
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    for module in (fa, fa3):
        found = module.flash_attn_varlen_func(*packed, cu_q, cu_k, 4, 9)
        same(found, exact.flatten(0, 1), (q, k, v))
    with pytest.raises(ValueError, match=f"k has head_dim {size} beside q of head_dim 13"):
        fa.flash_attn_func(drawn(BATCH, 4, HEADS, 13), k, v)


def test_a_window_in_a_tensor():
    q, k, v = (drawn(BATCH, LENGTH, HEADS, DIM, seed=i) for i in range(3))
    found = fa.flash_attn_func(q, k, v, window_size=torch.tensor((2, 1)))
    assert torch.equal(found, fa.flash_attn_func(q, k, v, window_size=(2, 1)))


@pytest.fixture
def packed():
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    return drawn(sum(LENGTHS), 3, HEADS, DIM), cu_seqlens


def test_packed(packed):
    qkv, cu = packed
    q, k, v = qkv.unbind(1)
    longest = max(LENGTHS)
    exact = varlen_attn(q, k, v, cu, causal=True)
    options = {"causal": True, "deterministic": True}
    same(fa.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, **options), exact, (qkv,))
    same(fa.flash_attn_varlen_qkvpacked_func(qkv, cu, longest, **options), exact, (qkv,))
    found = fa.flash_attn_varlen_kvpacked_func(
        q, torch.stack((k, v), 1), cu, cu, longest, longest, **options
    )
    same(found, exact, (qkv,))
    _, lse, _ = fa.flash_attn_varlen_func(q, k, v, cu, cu, return_attn_probs=True)
    assert torch.equal(lse, varlen_attn(q, k, v, cu, return_lse=True)[1])


def test_positions_of_the_shared_arguments(packed):
    """dropout_p, softmax_scale, causal, window_size, as flash-attn's own examples pass them."""
    qkv, cu = packed
    longest = max(LENGTHS)
    tail = (0.0, 0.2, True, (3, -1), 1.5, None, True, True)
    found = fa.flash_attn_varlen_qkvpacked_func(qkv, cu, longest, *tail)
    exact = varlen_attn(
        *qkv.unbind(1),
        cu,
        causal=True,
        window=(3, -1),
        softmax_scale=0.2,
        softcap=1.5,
        return_lse=True,
    )
    assert torch.equal(found[0], exact[0]) and torch.equal(found[1], exact[1])


def test_a_ring_of_two_parts(packed):
    """As ring attention calls the private functions: parts of the keys, merged by lse."""
    qkv, cu = packed
    q, k, v = (x.detach() for x in qkv.unbind(1))
    half = torch.tensor([0, *LENGTHS]).mul(HEADS).cumsum(0).div(HEADS).to(torch.int32)
    assert torch.equal(half, cu)
    common = {"max_seqlen_q": 7, "max_seqlen_k": 7, "dropout_p": 0.0, "softmax_scale": DIM**-0.5}
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    others = [torch.randn_like(x) for x in (k, v)]
    parts = [
        fa._flash_attn_varlen_forward(q=q, k=a, v=b, causal=False, **lengths, **common)
        for a, b in ((k, v), others)
    ]
    lse = torch.stack([part[1] for part in parts]).logsumexp(0)
    weights = [(part[1] - lse).exp().nan_to_num(0.0).T[..., None] for part in parts]
    out = sum(w * part[0] for w, part in zip(weights, parts, strict=True))
    leaves = [x.clone().requires_grad_() for x in (q, k, v, *others)]
    both = []
    for n, start in zip(LENGTHS, cu.tolist(), strict=False):
        rows = slice(start, start + n)
        keys, values = (torch.cat([leaves[i][rows], leaves[i + 2][rows]]) for i in (1, 2))
        both.append(sdpa(leaves[0][rows][None], keys[None], values[None])[0])
    exact = torch.cat(both)
    torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(exact, leaves, dout)
    mask = {"causal": False, "window_size_left": -1, "window_size_right": -1}
    rest = {"softcap": 0.0, "alibi_slopes": None, "deterministic": False}
    total = torch.zeros_like(q)
    for number, (a, b) in enumerate(((k, v), tuple(others))):
        dq, dk, dv = (torch.empty_like(x) for x in (q, a, b))
        delta = fa._flash_attn_varlen_backward(
            *(dout, q, a, b, out, lse, dq, dk, dv), **lengths, **common, **mask, **rest
        )
        total += dq
        torch.testing.assert_close(dk, wanted[1 + 2 * number], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(dv, wanted[2 + 2 * number], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(total, wanted[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(delta, (dout * out).sum(-1).T)


PUBLIC = {  # parameters of flash-attn 2.8, in order
    "flash_attn_func": "q k v TAIL",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k TAIL "
    "block_table",
}
TAIL = (
    "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
    "return_attn_probs"
)


@pytest.mark.parametrize("name", PUBLIC)
def test_parameters_are_theirs(name):
    *parameters, last = inspect.signature(getattr(fa, name)).parameters.values()
    assert last.kind is last.VAR_KEYWORD  # refused
    given = " ".join(parameter.name for parameter in parameters)
    assert given == PUBLIC[name].replace("TAIL", TAIL)


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ({"dropout_p": 0.1}, "drop out the result"),
        ({"alibi_slopes": torch.ones(HEADS)}, "rotate q and k"),
        ({"block_table": torch.zeros(1, 1)}, "packed"),
    ],
    ids=str,
)
def test_what_is_refused(packed, option, remedy):
    qkv, cu = packed
    with pytest.raises(ValueError, match=f"flash_attn_varlen_func: {next(iter(option))}.*{remedy}"):
        fa.flash_attn_varlen_qkvpacked_func(qkv, cu, **option)
    if "block_table" not in option:
        q, k, v = (x[None] for x in qkv.unbind(1))
        with pytest.raises(ValueError, match=remedy):
            fa.flash_attn_func(q, k, v, **option)


@pytest.mark.parametrize("module", [fa, fa3], ids=["2", "3"])
@pytest.mark.parametrize(
    ("keyword", "remedy"),
    [
        ("window", r"pass window_size=\(left, right\)"),
        ("scale", "pass softmax_scale"),
        ("return_lse", "pass return_attn_probs=True"),
        ("sinks", "rawattn.torch.varlen_attn takes it"),
        ("casual", r"help\(rawattn.torch.flash_attn"),
    ],
)
def test_foreign_keywords_name_the_remedy(packed, keyword, remedy, module):
    qkv, cu = packed
    q, k, v = qkv.unbind(1)
    for function, given in (
        (module.flash_attn_varlen_func, (q, k, v, cu, cu, 7, 7)),
        (module.flash_attn_func, (q[None], k[None], v[None])),
    ):
        with pytest.raises(TypeError, match=f"{function.__name__} got {keyword}, .*; {remedy}"):
            function(*given, **{keyword: 1})


def test_keys_in_use_are_of_version_3(packed):
    qkv, cu = packed
    with pytest.raises(TypeError, match=r"seqused_k.*flash_attn_interface"):
        fa.flash_attn_varlen_func(*qkv.unbind(1), cu, cu, seqused_k=cu[1:])


def test_shapes_that_do_not_fit(packed):
    qkv, cu = packed
    with pytest.raises(ValueError, match=r"4 dimensions.*flash_attn_varlen_func"):
        fa.flash_attn_func(*qkv.unbind(1))
    with pytest.raises(ValueError, match="third from the end 2, for k, v"):
        fa.flash_attn_varlen_kvpacked_func(qkv[:, 0], qkv, cu, cu)
    with pytest.raises(ValueError, match="one batch"):
        fa.flash_attn_func(qkv[None, :, 0], qkv[None, :, 1], qkv[None, :3, 2])
    with pytest.raises(ValueError, match=r"caches.*cu_seqlens_k"):
        fa.flash_attn_with_kvcache(qkv, qkv, qkv)
    with pytest.raises(TypeError, match="seqused_q"):
        fa.flash_attn_varlen_func(*qkv.unbind(1), cu, cu, seqused_q=cu)


# ---- FlashAttention-3 ----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 2.0}, {"window_size": (3, 1)}])
def test_names_of_version_3(options):
    q, k, v = drawn(2, 7, 4, DIM), drawn(2, 7, 2, DIM, seed=1), drawn(2, 7, 2, DIM, seed=2)
    second = fa.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    for found, exact in zip(
        fa3.flash_attn_func(q, k, v, num_splits=0, return_attn_probs=True, **options),
        second[:2],
        strict=True,
    ):
        assert torch.equal(found, exact)
    cu, used = torch.tensor((0, 7, 14)), torch.tensor((4, 7))
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    found = fa3.flash_attn_varlen_func(*flat, cu, cu, 7, 7, seqused_k=used, **options)
    parts = [
        fa.flash_attn_func(q[b, None], k[b, None, :n], v[b, None, :n], **options)
        for b, n in enumerate(used.tolist())
    ]
    torch.testing.assert_close(found, torch.cat(parts, 1)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "value"), [("qv", torch.ones(1)), ("q_descale", torch.ones(1)), ("attention_chunk", 8)]
)
def test_what_version_3_has_and_we_lack(name, value):
    q, k, v = (drawn(1, 3, 2, DIM) for _ in range(3))
    with pytest.raises(ValueError, match=f"flash_attn_func: {name} is"):
        fa3.flash_attn_func(q, k, v, **{name: value})
