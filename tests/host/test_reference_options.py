"""softcap, sinks and seqused_k in the reference, at every order: against autograd in float64."""

from itertools import product

import numpy as np
import pytest

from rawattn.reference import dense, second
from tests.host.test_reference import seen_by

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.filterwarnings("error::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]

HEADS_Q, HEADS_KV, DIM, DIM_V = 4, 2, 8, 16
LENGTHS_Q, LENGTHS_K, USED = (5, 3, 0, 7, 4), (7, 0, 2, 5, 6), (3, 0, 2, 9, -1)
CU_Q, CU_K = (np.cumsum([0, *lengths]) for lengths in (LENGTHS_Q, LENGTHS_K))
PAST = 2  # rows of no sequence
WINDOWS = [(-1, -1), (-1, 0), (2, 1)]
SOFTCAPS = [None, 0.7, 30.0]
MODES = list(product(WINDOWS, SOFTCAPS, (False, True), (False, True)))
modes = pytest.mark.parametrize(("window", "softcap", "with_sinks", "with_used"), MODES)


def options(window, softcap, with_sinks, with_used):
    sinks = np.random.default_rng(7).standard_normal(HEADS_Q) if with_sinks else None
    used = np.array(USED) if with_used else None
    return {"window": window, "softcap": softcap, "sinks": sinks, "seqused_k": used}


def drawn(seed):
    """q, k, v and sinks, or as many directions."""
    rng = np.random.default_rng(seed)
    rows, keys = CU_Q[-1] + PAST, CU_K[-1] + PAST
    shapes = (rows, HEADS_Q, DIM), (keys, HEADS_KV, DIM), (keys, HEADS_KV, DIM_V), (HEADS_Q,)
    return [rng.standard_normal(shape) for shape in shapes]


def cotangents(seed=2):
    rng = np.random.default_rng(seed)
    rows = CU_Q[-1] + PAST
    return rng.standard_normal((rows, HEADS_Q, DIM_V)), rng.standard_normal((HEADS_Q, rows))


def attention(q, k, v, sinks, *, window, softcap, seqused_k):
    """Row by row, out and lse of the queries that have a key or a sink; and which these are."""
    outs, lses, tokens = [], [], []
    for b, (n, m) in enumerate(zip(LENGTHS_Q, LENGTHS_K, strict=True)):
        m = m if seqused_k is None else min(m, max(0, seqused_k[b]))
        for i in range(n):
            seen = [CU_K[b] + j for j in seen_by(i, n, m, window)]
            if not seen and sinks is None:
                continue
            keys, values = (x[seen].repeat_interleave(HEADS_Q // HEADS_KV, 1) for x in (k, v))
            scores = torch.einsum("hd,jhd->hj", q[CU_Q[b] + i], keys) * DIM**-0.5
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            extended = scores if sinks is None else torch.cat([scores, sinks[:, None]], 1)
            p = torch.softmax(extended, 1)[:, : len(seen)]
            outs.append(torch.einsum("hj,jhd->hd", p, values))
            lses.append(torch.logsumexp(extended, 1))
            tokens.append(CU_Q[b] + i)
    return torch.stack(outs), torch.stack(lses, 1), tokens


def run(inputs, given):
    """``attention`` on q, k, v and, where they are given, sinks."""
    sinks = inputs[3] if len(inputs) > 3 else None
    chosen = {name: given[name] for name in ("window", "softcap", "seqused_k")}
    return attention(*inputs[:3], sinks, **chosen)


def leaves(given):
    values = drawn(1)[: 3 if given["sinks"] is None else 4]
    if given["sinks"] is not None:
        values[3] = given["sinks"]
    return values, [torch.tensor(x, requires_grad=True) for x in values]


def close(got, wanted):
    wanted = wanted.detach().numpy() if isinstance(wanted, torch.Tensor) else wanted
    size = max(1.0, float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0)))
    np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12 * size)


@modes
def test_first_order(window, softcap, with_sinks, with_used):
    given = options(window, softcap, with_sinks, with_used)
    values, tensors = leaves(given)
    out, lse, tokens = run(tensors, given)
    found, found_lse = dense.forward(*values[:3], CU_Q, CU_K, **given)
    close(found[tokens], out)
    close(found_lse[:, tokens], lse)
    others = np.setdiff1d(np.arange(len(values[0])), tokens)
    assert not found[others].any() and (found_lse[:, others] == -np.inf).all()
    dout, dlse = cotangents()
    exact = torch.autograd.grad(
        (out, lse), tensors, (torch.tensor(dout[tokens]), torch.tensor(dlse[:, tokens]))
    )
    grads = dense.backward(dout, *values[:3], found, found_lse, CU_Q, CU_K, dlse=dlse, **given)
    for got, wanted in zip(grads, exact, strict=True):
        close(got, wanted)


@modes
def test_forward_mode(window, softcap, with_sinks, with_used):
    given = options(window, softcap, with_sinks, with_used)
    values, tensors = leaves(given)
    us = drawn(3)[: len(values)]
    tokens = run(tensors, given)[2]
    (out, lse), (tout, tlse) = torch.func.jvp(
        lambda *inputs: run(inputs, given)[:2],
        tuple(x.detach() for x in tensors),
        tuple(map(torch.tensor, us)),
    )
    tsinks = us[3] if with_sinks else None
    found = second.jvp(*values[:3], *us[:3], CU_Q, CU_K, tsinks=tsinks, **given)
    for got, wanted in zip(found, (out, tout, lse, tlse), strict=True):
        close(got[tokens] if got.ndim == 3 else got[:, tokens], wanted)


@modes
def test_second_order(window, softcap, with_sinks, with_used):
    given = options(window, softcap, with_sinks, with_used)
    values, tensors = leaves(given)
    us = drawn(4)[: len(values)]
    out, lse, tokens = run(tensors, given)
    dout, dlse = cotangents()
    given_out, given_lse = (
        torch.tensor(x, requires_grad=True) for x in (dout[tokens], dlse[:, tokens])
    )
    first = torch.autograd.grad((out, lse), tensors, (given_out, given_lse), create_graph=True)
    exact = torch.autograd.grad(
        first, [given_out, given_lse, *tensors], list(map(torch.tensor, us))
    )
    passed = dense.forward(*values[:3], CU_Q, CU_K, **given)
    found = second.double_backward(
        *us[:3],
        *(dout, *values[:3], *passed, CU_Q, CU_K),
        dlse=dlse,
        ddsinks=us[3] if with_sinks else None,
        **given,
    )
    close(found[0][tokens], exact[0])
    close(found[1][:, tokens], exact[1])
    for got, wanted in zip(found[2:], exact[2:], strict=True):
        close(got, wanted)


def test_the_gradient_of_sinks_composed_from_lse():
    """pytorch/torchtitan#4796: ds = -sum sigmoid(s - lse) D, of an attention without sinks."""
    given = options((-1, 0), None, True, False)
    values, _ = leaves(given)
    dout, dlse = cotangents()
    results = dense.forward(*values[:3], CU_Q, CU_K, **given)
    dsinks = dense.backward(dout, *values[:3], *results, CU_Q, CU_K, dlse=dlse, **given)[3]
    out, lse = dense.forward(*values[:3], CU_Q, CU_K, window=(-1, 0))
    s, inside = given["sinks"][:, None], np.arange(CU_Q[-1])
    lse = lse[:, inside]
    kept = 1 / (1 + np.exp(s - lse, where=lse > -np.inf, out=np.full(lse.shape, np.inf)))
    D = (dout * out).sum(-1).T[:, inside] * kept - dlse[:, inside]
    close(dsinks, -((1 - kept) * D).sum(1))


def test_rounding_has_no_double_backward_with_a_softcap():
    values, _ = leaves(options((-1, -1), None, False, False))
    passed = dense.forward(*values[:3], CU_Q, CU_K)
    with pytest.raises(ValueError, match="softcap"):
        second.double_backward(
            *(None, None, None, cotangents()[0], *values[:3], *passed, CU_Q, CU_K),
            softcap=1.0,
            rounding=np.float16,
        )
