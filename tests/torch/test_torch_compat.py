"""varlen_attn_compat takes every call that torch's varlen_attn takes, of old and new versions."""

import inspect

import pytest

torch = pytest.importorskip("torch")

from rawattn.torch import AuxRequest, varlen_attn, varlen_attn_compat  # noqa: E402
from rawattn.torch.compat import varlen_attn_out_compat  # noqa: E402

LENGTHS = (5, 1, 7)


@pytest.fixture
def packed():
    torch.manual_seed(3)
    cu_seq = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    qkv = [torch.randn(sum(LENGTHS), 4, 16, requires_grad=True) for _ in range(3)]
    return (*qkv, cu_seq, cu_seq, max(LENGTHS), max(LENGTHS))


def rawattn(packed, **options):
    return varlen_attn(*packed[:5], **options)


@pytest.mark.parametrize("ours", [varlen_attn_compat, varlen_attn_out_compat])
def test_every_parameter_of_torch_is_there(ours):
    module = pytest.importorskip("torch.nn.attention.varlen")
    theirs = getattr(module, ours.__name__.removesuffix("_compat"), None)
    if theirs is None:
        pytest.skip("this torch has no such function")
    ours = inspect.signature(ours).parameters
    for place, (name, theirs_of) in enumerate(inspect.signature(theirs).parameters.items()):
        assert ours[name].default == theirs_of.default
        if theirs_of.kind is theirs_of.POSITIONAL_OR_KEYWORD:
            assert list(ours)[place] == name


@pytest.mark.parametrize(
    ("keywords", "options"),
    [
        ({}, {}),
        ({"window_size": (-1, 0)}, {"causal": True}),
        ({"is_causal": True}, {"causal": True}),
        ({"window_size": (4, 0)}, {"window": (4, 0)}),
        ({"window_size": [2, 3]}, {"window": (2, 3)}),
        ({"window_size": (1025, 1025)}, {}),
        ({"window_size": None}, {}),
        ({"is_causal": True, "window_size": (4, -1)}, {"causal": True, "window": (4, -1)}),
        ({"scale": 0.1}, {"softmax_scale": 0.1}),
        ({"num_splits": 1}, {}),
        ({"batch_invariant": True}, {"deterministic": True}),
        ({"seqused_k": torch.tensor([2, 1, 7])}, {"seqused_k": torch.tensor([2, 1, 7])}),
        ({"return_aux": None, "seqused_k": None, "block_table": None}, {}),
        ({"return_aux": AuxRequest()}, {}),
    ],
    ids=str,
)
def test_keywords(packed, keywords, options):
    assert torch.equal(varlen_attn_compat(*packed, **keywords), rawattn(packed, **options))


@pytest.mark.parametrize(
    ("keywords", "options"),
    [
        ({}, {}),
        ({"window_size": (-1, 0), "scale": 0.1}, {"causal": True, "softmax_scale": 0.1}),
        ({"seqused_k": torch.tensor([2, 1, 7])}, {"seqused_k": torch.tensor([2, 1, 7])}),
    ],
    ids=str,
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_into_a_tensor(packed, keywords, options, compiled):
    torch._dynamo.reset()
    exact, exact_lse = rawattn(packed, **options, return_lse=True)
    out = torch.empty_like(exact)

    def call(*arguments):
        found, lse = varlen_attn_out_compat(*arguments, return_aux=AuxRequest(lse=True), **keywords)
        return found, lse

    if compiled:
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    version = out._version
    with torch.no_grad():
        found, lse = call(out, *packed)
    assert found.data_ptr() == out.data_ptr() and out._version > version
    assert torch.equal(out, exact) and torch.equal(lse, exact_lse)
    assert varlen_attn_out_compat(out, *packed) is out


def test_old_positions_of_is_causal_and_return_aux(packed):
    out, lse = varlen_attn_compat(*packed, True, AuxRequest(lse=True))
    expected = rawattn(packed, causal=True, return_lse=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert torch.equal(varlen_attn_compat(*packed, True), out)


def test_everything_by_keyword(packed):
    names = ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k")
    assert torch.equal(
        varlen_attn_compat(**dict(zip(names, packed, strict=True))), varlen_attn_compat(*packed)
    )


def test_torch_s_own_request_for_lse(packed):
    request = pytest.importorskip("torch.nn.attention.varlen").AuxRequest(lse=True)
    out, lse = varlen_attn_compat(*packed, return_aux=request)
    assert out.shape == packed[0].shape and lse.shape == (4, sum(LENGTHS))
    assert lse.requires_grad  # torch's own has no gradient


def test_grouped_heads_need_the_flag(packed):
    q, k, v, *rest = packed
    few = (q, k[:, :2], v[:, :2], *rest)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        varlen_attn_compat(*few)
    assert torch.equal(varlen_attn_compat(*few, enable_gqa=True), rawattn(few))
    with pytest.raises(ValueError, match="multiple of kv heads"):
        varlen_attn_compat(q, k[:, :3], v[:, :3], *rest, enable_gqa=True)


def test_gradients_and_compile(packed):
    torch._dynamo.reset()
    compiled = torch.compile(varlen_attn_compat, backend="aot_eager", fullgraph=True)
    out = compiled(*packed, window_size=(-1, 0))
    expected = rawattn(packed, causal=True)
    assert torch.equal(out, expected)
    dout = torch.randn_like(out)
    for a, b in zip(
        torch.autograd.grad(out, packed[:3], dout),
        torch.autograd.grad(expected, packed[:3], dout),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"block_table": torch.zeros(3, 1)}, "block_table .*not supported; pass the keys"),
        ({"num_splits": 4}, "num_splits=4 is not supported, only None and 1"),
        ({"window_size": (1, 2, 3)}, r"window_size is \(1, 2, 3\): expected two integers"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_supported_is_refused(packed, keywords, text):
    with pytest.raises(ValueError, match=text):
        varlen_attn_compat(*packed, **keywords)


@pytest.mark.parametrize("function", [varlen_attn_compat, varlen_attn_out_compat])
@pytest.mark.parametrize(
    ("keyword", "remedy"),
    [
        ("causal", r"pass window_size=\(-1, 0\)"),
        ("softmax_scale", "pass scale"),
        ("softcap", "rawattn.torch.varlen_attn takes it"),
        ("dropout_p", "leave it out"),
        ("casual", "help"),
    ],
)
def test_foreign_keywords_name_the_remedy(packed, keyword, remedy, function):
    into = (torch.empty_like(packed[0]),) if function is varlen_attn_out_compat else ()
    with pytest.raises(TypeError, match=f"{function.__name__} got {keyword}, .*; {remedy}"):
        function(*into, *packed, **{keyword: 1})


def test_keys_without_offsets_are_refused(packed):
    q, k, v, cu_seq, _, *rest = packed
    with pytest.raises(ValueError, match="cu_seq_k is None"):
        varlen_attn_compat(q, k, v, cu_seq, None, *rest)
