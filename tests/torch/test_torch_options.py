"""softcap, sinks and seqused_k of varlen_attn: every derivative, in q, k, v and sinks."""

import pytest

torch = pytest.importorskip("torch")

from rawattn.torch import varlen_attn  # noqa: E402
from rawattn.torch.varlen_ops import varlen_backward, varlen_forward  # noqa: E402
from tests.host import test_reference_options as cases  # noqa: E402

CU_Q, CU_K = (torch.tensor(x) for x in (cases.CU_Q, cases.CU_K))
USED = torch.tensor(cases.USED)
OPTIONS = [{}, {"softcap": 1.5}, {"seqused_k": USED}, {"softcap": 1.5, "seqused_k": USED}]
each = pytest.mark.parametrize("options", OPTIONS, ids=lambda x: "+".join(x) or "sinks alone")


def inputs(count=4):
    return [torch.tensor(x, requires_grad=True) for x in cases.drawn(1)[:count]]


def finite(options, q, k, v, sinks):
    """out and lse, without the rows of no sequence."""
    mask = {"causal": True, "return_lse": True}
    out, lse = varlen_attn(q, k, v, CU_Q, CU_K, sinks=sinks, **mask, **options)
    return out, lse[:, : CU_Q[-1]]


def close(found, exact):
    for got, wanted in zip(found, exact, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@each
def test_against_operations_of_torch(options):
    leaves = inputs()
    given = {"window": (-1, 0), "softcap": options.get("softcap"), "seqused_k": None}
    if "seqused_k" in options:
        given["seqused_k"] = cases.USED
    out, lse, tokens = cases.attention(*leaves, **given)
    found, found_lse = finite(options, *leaves)
    close((found[tokens], found_lse[:, tokens]), (out, lse))
    cotangents = torch.randn_like(out), torch.randn_like(lse)
    exact = torch.autograd.grad((out, lse), leaves, cotangents)
    found = torch.autograd.grad((found[tokens], found_lse[:, tokens]), leaves, cotangents)
    close(found, exact)


@each
def test_derivatives_of_both_orders_and_modes(options):
    function = lambda *leaves: finite(options, *leaves)  # noqa: E731
    both = {"check_forward_ad": True, "fast_mode": True}
    assert torch.autograd.gradcheck(function, inputs(), **both)
    assert torch.autograd.gradgradcheck(
        function, inputs(), check_fwd_over_rev=True, check_rev_over_rev=True, fast_mode=True
    )


def test_a_jvp_in_sinks_alone():
    q, k, v, sinks = (x.detach() for x in inputs())
    tangent = torch.randn_like(sinks)
    _, (tout, tlse) = torch.func.jvp(lambda s: finite({}, q, k, v, s), (sinks,), (tangent,))
    exact = torch.func.jacrev(lambda s: finite({}, q, k, v, s)[1], chunk_size=1)(sinks)
    close((tlse,), (exact @ tangent,))
    assert tout.abs().max() > 0.01


def test_sinks_move_every_part_of_a_step():
    """A bug that drops dsinks, or takes them for a constant, would show."""
    leaves = inputs()
    out, _ = finite({}, *leaves)
    grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    assert all(grad.abs().max() > 1e-3 for grad in grads)
    second = torch.autograd.grad(grads[3].square().sum(), leaves)
    assert all(grad.abs().max() > 1e-3 for grad in second)


def test_opcheck():
    q, k, v, sinks = inputs()
    rest = (CU_Q, CU_K, USED, True, -1, -1, None, 2.0, False, None)
    checks = torch.library.opcheck(varlen_forward, (q, k, v, sinks, *rest))
    assert set(checks.values()) == {"SUCCESS"}
    q, k, v, sinks = (x.detach() for x in (q, k, v, sinks))
    out, lse = varlen_forward(q, k, v, sinks, *rest)
    args = (torch.randn_like(out), None, q, k, v, sinks, out, lse, *rest)
    assert set(torch.library.opcheck(varlen_backward, args).values()) == {"SUCCESS"}


def test_compiled_and_by_autocast():
    leaves = inputs()
    compiled = torch.compile(
        lambda *x: finite({"softcap": 1.5}, *x), fullgraph=True, backend="eager"
    )
    close(compiled(*leaves), finite({"softcap": 1.5}, *leaves))


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("sinks", 1.0, "sinks is a float: expected a torch tensor"),
        ("seqused_k", [1], "seqused_k is a list: expected a torch tensor"),
        ("sinks", torch.zeros(3), "sinks has shape"),
    ],
)
def test_bad_values(name, value, text):
    with pytest.raises((TypeError, ValueError), match=text):
        varlen_attn(*inputs(3), CU_Q, CU_K, **{name: value})
