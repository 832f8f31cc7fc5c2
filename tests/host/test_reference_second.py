"""Second derivatives and forward mode of the reference: against autograd, and against each other.

Cases are those of test_reference, with a direction for each of q, k and v.
"""

from itertools import product

import numpy as np
import pytest

from rawattn.reference import dense, online, second
from tests.host.test_reference import CASES, make, seen_by

# Dead rows, empty sequences and NaN elsewhere must not even warn; torch.func does, of itself.
pytestmark = [
    pytest.mark.filterwarnings("error::RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]

NAMES = ("ddout", "ddlse", "gq", "gk", "gv", "out", "tout", "lse", "tlse")  # as both return
PRESENT = list(product((True, False), repeat=3))  # which directions of q, k, v are given


def directions(name, seed=0):
    """Directions of q, k and v, NaN where these are."""
    rng = np.random.default_rng([seed, len(name)])
    return tuple(
        np.where(np.isnan(a), np.nan, rng.standard_normal(a.shape)) for a in make(name)[:3]
    )


def attention(q, k, v, cu_q, cu_k, window, scale):
    """Out and lse by torch's own operations, in the dtype of q; lse in float32 at least."""
    import torch

    group, tokens, outs, lses = q.shape[1] // k.shape[1], [], [], []
    for b in range(len(cu_q) - 1):
        seqlen_q, seqlen_k = cu_q[b + 1] - cu_q[b], cu_k[b + 1] - cu_k[b]
        seen = [seen_by(i, seqlen_q, seqlen_k, window) for i in range(seqlen_q)]
        alive = [i for i in range(seqlen_q) if seen[i]]
        if not alive:
            continue
        forbidden = torch.ones(len(alive), seqlen_k, dtype=torch.bool)
        for i, row in zip(alive, forbidden, strict=True):
            row[seen[i]] = False
        tokens += [int(cu_q[b]) + i for i in alive]
        K, V = (a[cu_k[b] : cu_k[b + 1]].repeat_interleave(group, 1) for a in (k, v))
        Q = q[tokens[-len(alive) :]].transpose(0, 1)
        S = (scale * (Q @ K.permute(1, 2, 0))).masked_fill(forbidden, -torch.inf)
        outs.append((torch.softmax(S, -1) @ V.transpose(0, 1)).transpose(0, 1))
        lses.append(torch.logsumexp(S if S.dtype == torch.float64 else S.float(), -1))
    index, lse = torch.tensor(tokens), torch.cat(lses, 1)
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=q.dtype)
    empty = torch.full(q.shape[1::-1], -torch.inf, dtype=lse.dtype)
    return out.index_copy(0, index, torch.cat(outs)), empty.index_copy(1, index, lse)


def autograd(us, dout, dlse, q, k, v, *problem, dtype="float64"):
    """What ``double_backward`` returns, by torch.autograd.grad twice."""
    torch = pytest.importorskip("torch")
    dout, q, k, v = (tensor(a, dtype).requires_grad_() for a in (dout, q, k, v))
    out, lse = attention(q, k, v, *problem)
    dlse = torch.tensor(dlse, dtype=lse.dtype, requires_grad=True)
    alive = torch.isfinite(lse[0])
    cotangents = (dout[alive], dlse[:, alive])
    grads = torch.autograd.grad(
        (out[alive], lse[:, alive]), (q, k, v), cotangents, create_graph=True
    )
    given = [(g, tensor(u, dtype)) for g, u in zip(grads, us, strict=True) if u is not None]
    inputs = (dout, dlse, q, k, v)
    results = torch.autograd.grad(
        [g for g, _ in given], inputs, [u for _, u in given], allow_unused=True
    )
    zeros = (torch.zeros_like(a) for a in inputs)
    return [to_numpy(z if a is None else a) for a, z in zip(results, zeros, strict=True)]


def forward_mode(us, q, k, v, *problem, dtype="float64"):
    """What ``jvp`` returns, by torch.func.jvp."""
    torch = pytest.importorskip("torch")
    arrays = tuple(tensor(a, dtype) for a in (q, k, v))
    tangents = tuple(
        torch.zeros_like(a) if u is None else tensor(u, dtype)
        for a, u in zip(arrays, us, strict=True)
    )
    (out, lse), (tout, tlse) = torch.func.jvp(lambda *a: attention(*a, *problem), arrays, tangents)
    return [to_numpy(a) for a in (out, tout, lse, tlse)]


def tensor(array, dtype="float64"):
    import torch

    return torch.tensor(array.astype(np.float64)).to(getattr(torch, dtype))


def to_numpy(tensor):
    return tensor.detach().double().numpy()


def close(got, wanted, rtol=1e-12):
    """Equal to rtol of the largest element; zeros and infinities exactly."""
    assert got.dtype == np.float64 and got.shape == wanted.shape
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(wanted))
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(got[~finite], wanted[~finite])
    largest = abs(wanted[finite]).max(initial=0.0)
    np.testing.assert_allclose(got[finite], wanted[finite], rtol=0, atol=rtol * largest)


def dot(xs, ys):
    """Sum of products of two lists of arrays, past the rows of no sequence."""
    return sum(np.nansum(x * y) for x, y in zip(xs, ys, strict=True))


def absent(us, present):
    return tuple(u if there else None for u, there in zip(us, present, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_double_backward_matches_autograd(name):
    q, k, v, dout, dlse, *problem = make(name)
    us, scale = directions(name), 0.3 if name == "gqa" else q.shape[2] ** -0.5
    options = {"window": problem[-1], "softmax_scale": scale if name == "gqa" else None}
    out, lse = dense.forward(q, k, v, *problem[:2], **options)
    got = second.double_backward(*us, dout, q, k, v, out, lse, *problem[:2], dlse=dlse, **options)
    wanted = autograd(us, dout, dlse, q, k, v, *problem, scale)
    for result, expected in zip(got, wanted, strict=True):
        close(result, expected)
    dead = np.isneginf(lse[0])
    assert not got[0][dead].any() and not got[1][:, dead].any() and not got[2][dead].any()


@pytest.mark.parametrize("name", CASES)
def test_jvp_matches_forward_mode(name):
    q, k, v, _, _, *problem = make(name)
    us, scale = directions(name), 0.3 if name == "gqa" else q.shape[2] ** -0.5
    options = {"window": problem[-1], "softmax_scale": scale if name == "gqa" else None}
    got = second.jvp(q, k, v, *us, *problem[:2], **options)
    wanted = forward_mode(us, q, k, v, *problem, scale)
    for result, expected in zip(got, wanted, strict=True):
        close(result, expected)
    dead = np.isneginf(got[2][0])
    assert not got[1][dead].any() and not got[3][:, dead].any()
    same = dense.forward(q, k, v, *problem[:2], **options)
    np.testing.assert_array_equal(got[0], same[0])
    np.testing.assert_array_equal(got[2], same[1])


@pytest.mark.parametrize("present", PRESENT)
@pytest.mark.parametrize("name", ["gqa", "past the end"])
def test_absent_directions(name, present):
    q, k, v, dout, dlse, *problem = make(name)
    us, window = absent(directions(name), present), problem[-1]
    out, lse = dense.forward(q, k, v, *problem[:2], window=window)
    got = second.double_backward(
        *us, dout, q, k, v, out, lse, *problem[:2], dlse=dlse, window=window
    )
    tangents = second.jvp(q, k, v, *us, *problem[:2], window=window)
    problem.append(q.shape[2] ** -0.5)
    if not any(present):
        assert not any(a.any() for a in (*got, tangents[1], tangents[3]))
        return
    for result, expected in zip(got, autograd(us, dout, dlse, q, k, v, *problem), strict=True):
        close(result, expected)
    for result, expected in zip(tangents, forward_mode(us, q, k, v, *problem), strict=True):
        close(result, expected)


def test_dlse_defaults_to_zero():
    q, k, v, dout, dlse, cu_q, cu_k, window = make("gqa")
    out, lse = dense.forward(q, k, v, cu_q, cu_k, window=window)
    arguments = (*directions("gqa"), dout, q, k, v, out, lse, cu_q, cu_k)
    without = second.double_backward(*arguments, window=window)
    zeros = second.double_backward(*arguments, dlse=np.zeros_like(dlse), window=window)
    for a, b in zip(without, zeros, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", CASES)
def test_relations(name):
    """<u, H w> = <w, H u>; the tangent is what the gradient says; ddout and ddlse are the jvp."""
    q, k, v, dout, dlse, cu_q, cu_k, window = make(name)
    dlse[:, cu_q[-1] :] = np.nan
    us, ws = directions(name, 1), directions(name, 2)
    out, lse = dense.forward(q, k, v, cu_q, cu_k, window=window)
    arguments = (dout, q, k, v, out, lse, cu_q, cu_k)
    grads = dense.backward(*arguments, dlse=dlse, window=window)
    along_u, along_w = (
        second.double_backward(*x, *arguments, dlse=dlse, window=window) for x in (us, ws)
    )
    np.testing.assert_allclose(dot(ws, along_u[2:]), dot(us, along_w[2:]), rtol=1e-11)
    _, tout, _, tlse = second.jvp(q, k, v, *us, cu_q, cu_k, window=window)
    np.testing.assert_allclose(dot((dout, dlse), (tout, tlse)), dot(us, grads), rtol=1e-11)
    close(along_u[0], tout)
    close(along_u[1], tlse)


def test_backward_of_jvp():
    """The gradients of jvp are those that the module's docstring names."""
    torch = pytest.importorskip("torch")
    q, k, v, wtout, wtlse, cu_q, cu_k, window = make("cross longer keys")
    us, rng = directions("cross longer keys"), np.random.default_rng(0)
    wout, wlse = rng.standard_normal(wtout.shape), rng.standard_normal(wtlse.shape)
    inputs = [tensor(a).requires_grad_() for a in (q, k, v, *us)]
    results = torch.func.jvp(
        lambda *a: attention(*a, cu_q, cu_k, window, q.shape[2] ** -0.5),
        tuple(inputs[:3]),
        tuple(inputs[3:]),
    )
    cotangents = [tensor(a) for a in (wout, wlse, wtout, wtlse)]
    wanted = torch.autograd.grad((*results[0], *results[1]), inputs, cotangents)
    out, lse = dense.forward(q, k, v, cu_q, cu_k, window=window)
    arguments = (q, k, v, out, lse, cu_q, cu_k)
    of_u = dense.backward(wtout, *arguments, dlse=wtlse, window=window)
    first = dense.backward(wout, *arguments, dlse=wlse, window=window)
    then = second.double_backward(*us, wtout, *arguments, dlse=wtlse, window=window)[2:]
    got = (*(a + b for a, b in zip(first, then, strict=True)), *of_u)
    for result, expected in zip(got, wanted, strict=True):
        close(result, to_numpy(expected))


def test_finite_differences():
    """The tangents of forward and of backward, from two points a small step apart."""
    q, k, v, dout, dlse, cu_q, cu_k, window = make("cross longer queries")
    us, step = directions("cross longer queries"), 1e-5
    alive = np.isfinite(dense.forward(q, k, v, cu_q, cu_k, window=window)[1])

    def results(step):
        x = [a + step * u for a, u in zip((q, k, v), us, strict=True)]
        out, lse = dense.forward(*x, cu_q, cu_k, window=window)
        grads = dense.backward(dout, *x, out, lse, cu_q, cu_k, dlse=dlse, window=window)
        return out, np.where(alive, lse, 0.0), *grads

    out, lse = dense.forward(q, k, v, cu_q, cu_k, window=window)
    got = second.double_backward(*us, dout, q, k, v, out, lse, cu_q, cu_k, dlse=dlse, window=window)
    for result, above, below in zip(got, results(step), results(-step), strict=True):
        close(result, (above - below) / (2 * step), rtol=1e-8)


def test_neighbours_do_not_leak():
    q, k, v, dout, dlse, cu_q, cu_k, window = make("empty")
    us = directions("empty")
    out, lse = dense.forward(q, k, v, cu_q, cu_k, window=window)
    rows, keys = slice(cu_q[4], cu_q[5]), slice(cu_k[4], cu_k[5])
    tangents = second.jvp(q, k, v, *us, cu_q, cu_k, window=window)
    results = second.double_backward(
        *us, dout, q, k, v, out, lse, cu_q, cu_k, dlse=dlse, window=window
    )

    def poisoned(array, kept):
        copy = np.full_like(array, np.nan)
        copy[kept] = array[kept]
        return copy

    q, dout, out, ddq = (poisoned(a, rows) for a in (q, dout, out, us[0]))
    k, v, ddk, ddv = (poisoned(a, keys) for a in (k, v, *us[1:]))
    lse, dlse = (poisoned(a.T, rows).T for a in (lse, dlse))
    us = (ddq, ddk, ddv)
    again = second.jvp(q, k, v, *us, cu_q, cu_k, window=window)
    for got, wanted in zip(again, tangents, strict=True):
        kept = rows if got.ndim == 3 else (slice(None), rows)
        np.testing.assert_array_equal(got[kept], wanted[kept])
    again = second.double_backward(
        *us, dout, q, k, v, out, lse, cu_q, cu_k, dlse=dlse, window=window
    )
    for got, wanted, kept in zip(
        again, results, (rows, (slice(None), rows), rows, keys, keys), strict=True
    ):
        np.testing.assert_array_equal(got[kept], wanted[kept])


ROUNDED = {
    "all": ((True, True, True), 1, 0.0),
    "ddq": ((True, False, False), 1, 0.0),
    "ddv": ((False, False, True), 1, 0.0),
    "gqa": ((True, True, True), 3, 0.0),
    "far from zero": ((True, True, True), 1, 0.5),
}


@pytest.mark.parametrize("case", ROUNDED)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_errs_like_torch(dtype, case):
    """The largest error of every result, beside that of torch in the same dtype on the same data.

    Nearly always the operations are the same and so are the errors; torch's logsumexp and its
    tangent are other sums.
    """
    present, group, mean = ROUNDED[case]
    kind = np.dtype(dtype if dtype == "float16" else pytest.importorskip("ml_dtypes").bfloat16)
    rng = np.random.default_rng(1)
    cu_q, cu_k = np.array([0, 1, 41, 72]), np.array([0, 1, 41, 90])
    shapes = [(72, 2 * group, 24), (90, 2, 24), (90, 2, 16)] * 2 + [(72, 2 * group, 16)]
    q, k, v, *us, dout = ((mean + rng.standard_normal(shape)).astype(kind) for shape in shapes)
    dlse = rng.standard_normal((2 * group, 72))
    us, window = absent(us, present), (-1, 0)
    problem = (cu_q, cu_k, window, 24**-0.5)
    exact = autograd(us, dout, dlse, q, k, v, *problem)
    exact += forward_mode(us, q, k, v, *problem)
    torch = autograd(us, dout, dlse, q, k, v, *problem, dtype=dtype)
    torch += forward_mode(us, q, k, v, *problem, dtype=dtype)
    out, lse = (np.full_like(a, np.nan) for a in exact[5::2])  # not used
    options = {"window": window, "rounding": kind}
    ours = second.double_backward(*us, dout, q, k, v, out, lse, cu_q, cu_k, dlse=dlse, **options)
    ours += second.jvp(q, k, v, *us, cu_q, cu_k, **options)
    for name, wanted, theirs, got in zip(NAMES, exact, torch, ours, strict=True):
        if not wanted.any():
            assert not theirs.any() and not got.any()
            continue
        assert 0.5 < abs(got - wanted).max() / abs(theirs - wanted).max() < 2, name
        if "lse" not in name:
            np.testing.assert_array_equal(got, got.astype(kind).astype(np.float64))


def test_rounding_to_float32():
    q, k, v, dout, dlse, cu_q, cu_k, window = make("gqa")
    us = directions("gqa")

    def run(rounding):
        options = {"window": window, "rounding": rounding}
        out, tout, lse, tlse = second.jvp(q, k, v, *us, cu_q, cu_k, **options)
        return (
            out,
            tout,
            tlse,
            *second.double_backward(*us, dout, q, k, v, out, lse, cu_q, cu_k, dlse=dlse, **options),
        )

    for exact, single in zip(run(None), run(np.float32), strict=True):
        assert single.dtype == np.float64
        assert 0 < abs(single - exact).max() < 1e-5


@pytest.mark.parametrize("blocks", [(64, 64), (4, 3), (1, 1), (3, 16)])
@pytest.mark.parametrize("name", CASES)
def test_online_is_dense(name, blocks):
    q, k, v, *_, cu_q, cu_k, window = make(name)
    us = absent(directions(name), PRESENT[len(name) % 7])
    options = {"window": window, "softmax_scale": 0.4}
    wanted = second.jvp(q, k, v, *us, cu_q, cu_k, **options)
    got = online.jvp(q, k, v, *us, cu_q, cu_k, block_m=blocks[0], block_n=blocks[1], **options)
    for result, expected in zip(got, wanted, strict=True):
        close(result, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_cupy_arrays(name):
    cupy = pytest.importorskip("cupy")
    if not cupy.cuda.is_available():
        pytest.skip("needs a GPU")
    *arrays, window = make(name)
    us = absent(directions(name), PRESENT[len(name) % 7])

    def run(us, q, k, v, dout, dlse, *offsets):
        tangents = second.jvp(q, k, v, *us, *offsets, window=window)
        tiled = online.jvp(q, k, v, *us, *offsets, window=window, block_m=5, block_n=7)
        out, _, lse, _ = tangents
        seconds = second.double_backward(
            *us, dout, q, k, v, out, lse, *offsets, dlse=dlse, window=window
        )
        return *tangents, *tiled, *seconds

    on_gpu = [None if u is None else cupy.asarray(u) for u in us]
    results = run(on_gpu, *(cupy.asarray(a) for a in arrays))
    for got, wanted in zip(results, run(us, *arrays), strict=True):
        assert isinstance(got, cupy.ndarray)
        close(got.get(), wanted)
