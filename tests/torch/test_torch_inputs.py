"""What callers of rawattn.torch may get wrong: each is said, with the remedy, by every route."""

import inspect
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from rawattn.torch import (  # noqa: E402
    NativeSparseAttention,
    native_sparse_attend,
    sparse_attn,
    varlen_attn,
    varlen_attn_compat,
)
from rawattn.torch.inputs import FOREIGN  # noqa: E402
from tests.shared.torch_problems import count_calls, offsets  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (3, 5)
GRAD = pytest.mark.parametrize("grad", [False, True], ids=["core", "operator"])


def given(grad=False):
    """The arguments of varlen_attn by name; ``grad`` decides which route they go."""
    torch.manual_seed(0)
    tensors = {name: torch.randn(sum(LENGTHS), 2, 16, requires_grad=grad) for name in "qkv"}
    return tensors | {"cu_seqlens_q": offsets(LENGTHS), "cu_seqlens_k": offsets(LENGTHS)}


def blocks():
    return torch.zeros(sum(LENGTHS), 2, 1, dtype=torch.int32)


def sparse(q, k, v, cu_seqlens_q, cu_seqlens_k, **options):
    return sparse_attn(
        q, k, v, cu_seqlens_q, options.pop("block_indices", blocks()), cu_seqlens_k=cu_seqlens_k,
        block_size=options.pop("block_size", 16), **options,
    )  # fmt: skip


def nested(x, **layout):
    return torch.nested.nested_tensor([*x.detach().split(LENGTHS)], **layout)


ALIKE = {  # what is no dense tensor, and what its message says
    "None": (lambda x: None, "is None: expected a torch tensor; pass"),
    "numpy": (lambda x: x.detach().numpy(), "is a ndarray: expected a torch tensor; convert it"),
    "list": (lambda x: x.tolist(), "is a list: expected a torch tensor"),
    "nested": (nested, "is a nested tensor: expected a packed one.* pass the values"),
    "jagged": (partial(nested, layout=torch.jagged), "is a nested tensor: .* its offsets"),
    "sparse": (lambda x: x.detach().to_sparse(), "layout torch.sparse_coo: .* pass .*to_dense"),
    "meta": (lambda x: x.detach().to("meta"), "device.*: expected all tensors of a call on one"),
}


@GRAD
@pytest.mark.parametrize("function", [varlen_attn, sparse], ids=["varlen", "sparse"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name in ("q", "k", "v", "cu_seqlens_q")
        for kind in ALIKE
        if name in "qkv" or kind not in ("nested", "jagged")  # offsets have one axis
    ],
)
def test_what_is_no_dense_tensor_is_named(name, kind, function, grad):
    convert, text = ALIKE[kind]
    arguments = given(grad)
    arguments[name] = convert(arguments[name])
    blamed = "k" if (name, kind) == ("q", "meta") else name  # which then stands beside it
    with pytest.raises(TypeError, match=f"^{blamed}.* {text}"):
        function(**arguments)


@pytest.mark.parametrize("name", ["block_indices", "block_counts", "block_scale"])
def test_arrays_of_a_selection_are_tensors(name):
    with pytest.raises(TypeError, match=f"{name} is a ndarray: expected a torch tensor"):
        sparse(**given(), **{name: np.ones((sum(LENGTHS), 2, 1), np.int32)})


@GRAD
@pytest.mark.parametrize("function", [varlen_attn, sparse], ids=["varlen", "sparse"])
def test_meta_tensors_give_the_shapes_of_the_results(function, grad):
    arguments = given(grad)
    want = function(**arguments, return_lse=True)
    options = {} if function is varlen_attn else {"block_indices": blocks().to("meta")}
    meta = {name: x.to("meta") for name, x in arguments.items()}
    got = function(**meta, **options, return_lse=True)
    assert all(x.is_meta for x in got)
    for x, y in zip(got, want, strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
    with pytest.raises(ValueError, match=r"q has shape .*: expected 3 dimensions"):
        function(**meta | {"q": meta["q"][0]}, **options)


@GRAD
@pytest.mark.parametrize("window", [3, None, (1,), (1, 2, 3), ("a", 0), (1.5, 0)], ids=str)
def test_a_window_that_is_none(window, grad):
    with pytest.raises(TypeError, match=r"window is .*: expected two integers \(left, right\)"):
        varlen_attn(**given(grad), window=window)
    if not isinstance(window, (int, type(None))):
        with pytest.raises(TypeError, match=r"window is .*: expected two integers"):
            sparse(**given(grad), window=window, return_sliding=True)


@GRAD
def test_options_of_the_wrong_kind(grad):
    arguments = given(grad)
    with pytest.raises(ValueError, match=r"window is \(-2, 0\): expected left and right of -1"):
        varlen_attn(**arguments, window=(-2, 0))
    with pytest.raises(TypeError, match=r"softmax_scale is a torch.Tensor: expected a number"):
        varlen_attn(**arguments, softmax_scale=torch.tensor(0.1))
    with pytest.raises(ValueError, match=r"softmax_scale is -1.0: expected a positive"):
        varlen_attn(**arguments, softmax_scale=-1)
    with pytest.raises(ValueError, match="window is 3 without return_sliding"):
        sparse(**arguments, window=3)
    with pytest.raises(TypeError, match="block_size is 'a': expected an integer"):
        sparse(**arguments, block_size="a")


def test_a_window_may_change_in_compiled_code():
    torch._dynamo.reset()
    arguments = given(grad=True)
    compiled = torch.compile(
        lambda left: varlen_attn(**arguments, window=(left, 0)), backend="eager", fullgraph=True
    )
    for left in (2, 0, 4, -1):
        torch.testing.assert_close(compiled(left), varlen_attn(**arguments, window=(left, 0)))


# ---- the content of cu_seqlens ----------------------------------------------------------------


@GRAD
@pytest.mark.parametrize("function", [varlen_attn, sparse], ids=["varlen", "sparse"])
@pytest.mark.parametrize(
    ("content", "text"),
    [([0, 5, 3], "falls from 5 to 3"), ([1, 3, 8], "starts at 1"), ([0, 3, 9], "ends at 9")],
)
@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_offsets_are_validated_on_request(name, content, text, function, grad):
    wrong = given(grad) | {name: torch.tensor(content)}
    with pytest.raises(ValueError, match=f"cu_seqlens.* {text}"):
        function(**wrong, validate=True)
    right = given(grad)
    assert torch.equal(function(**right, validate=True), function(**right))


def test_validation_asks_for_content():
    meta = {name: x.to("meta") for name, x in given().items()}
    with pytest.raises(ValueError, match="validate=True has to read cu_seqlens_q"):
        varlen_attn(**meta, validate=True)
    arguments = given(grad=True)
    compiled = torch.compile(varlen_attn, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="validate=True has to read cu_seqlens_q"):
        compiled(**arguments, validate=True)


# ---- other libraries' ways to call ------------------------------------------------------------


@pytest.mark.parametrize("function", [varlen_attn, sparse], ids=["varlen", "sparse"])
@pytest.mark.parametrize(
    ("keyword", "remedy"),
    [
        ("max_seqlen_q", "leave it out: the kernels read the lengths from cu_seqlens"),
        ("dropout_p", "leave it out: there is no dropout"),
        ("window_size", r"pass window=\(left, right\)"),
        ("scale", "pass softmax_scale"),
        ("is_causal", "pass causal"),
        ("return_attn_probs", "pass return_lse=True"),
        ("logits_soft_cap", "varlen_attn takes softcap"),
        ("s_aux", "varlen_attn takes sinks"),
        ("cache_seqlens", "varlen_attn takes seqused_k"),
        ("num_splits", "leave it out: how to compute"),
        ("casual", r"help\(rawattn.torch.*\) lists"),
    ],
)
def test_foreign_keywords_name_the_remedy(keyword, remedy, function):
    with pytest.raises(TypeError, match=f"got {keyword}, which is no argument of it; {remedy}"):
        function(**given(), **{keyword: 0})


def test_no_foreign_keyword_is_ours():
    for function in (varlen_attn, sparse_attn):
        # sparse_attn and the core say cu_seqlens for the queries' offsets
        assert not (FOREIGN.keys() - {"cu_seqlens"}) & {*inspect.signature(function).parameters}


def test_lengths_by_position():
    with pytest.raises(TypeError, match=r"2 positional arguments after cu_seqlens_k.*lengths"):
        varlen_attn(*given().values(), 5, 5)
    with pytest.raises(TypeError, match="1 positional arguments after block_indices"):
        sparse_attn(*[*given().values()][:4], blocks(), 16)


# ---- the adapters -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_compat_checks_what_it_looks_at(name):
    names = ("query", "key", "value", "cu_seq_q", "cu_seq_k")
    right = dict(zip(names, given().values(), strict=True)) | {"max_q": 5, "max_k": 5}
    with pytest.raises(TypeError, match=f"{name} is None: expected a torch tensor"):
        varlen_attn_compat(**right | {name: None})
    with pytest.raises(ValueError, match=f"{name} has shape .*: expected 3 dimensions"):
        varlen_attn_compat(**right | {name: right[name][0]})
    with pytest.raises(ValueError, match="window_size is 3: expected two integers"):
        varlen_attn_compat(**right, window_size=3)


def test_the_native_adapter_has_no_window_without_the_sliding_branch():
    x = torch.randn(1, 2, 32, 16)
    indices = torch.zeros(1, 2, 32, 1, dtype=torch.int64)
    alone = native_sparse_attend(x, x, x, 16, indices, None)
    both = native_sparse_attend(x, x, x, 16, indices, None, return_sliding_window_out=True)
    assert torch.equal(alone, both[0])


def test_inputs_of_the_layer():
    layer = NativeSparseAttention(
        *(32, 4, 2, 16), block_size=16, compress_length=8, compress_stride=8
    )
    x, cu_seqlens = torch.randn(8, 32), offsets(LENGTHS)
    for wrong in (x[None], x[0], x[:, :31]):
        with pytest.raises(ValueError, match=r"x has shape .*: expected \(total, 32\)"):
            layer(wrong, cu_seqlens)
    with pytest.raises(TypeError, match="x is a ndarray: expected a torch tensor"):
        layer(x.numpy(), cu_seqlens)
    with pytest.raises(TypeError, match="cu_seqlens is a list: expected a torch tensor"):
        layer(x, [0, 3, 8])


@pytest.mark.parametrize("wanted", [True, False])
def test_batch_invariance_reaches_the_jvp(wanted, monkeypatch):
    calls = count_calls(monkeypatch)
    q, k, v, cu_q, cu_k = given().values()

    def attend(q):
        return varlen_attn_compat(q, k, v, cu_q, cu_k, 5, 5, batch_invariant=wanted)

    torch.func.jvp(attend, (q,), (q.cos(),))
    ((_, keywords),) = calls["jvp"]
    assert keywords["deterministic"] is wanted
