"""The reference against autograd, against itself by tiles, and against the contract's edges."""

import warnings

import numpy as np
import pytest

from rawattn.reference import dense, online

# lengths_q, lengths_k, num_heads_kv, group, head_dim, head_dim_v, window, unused rows at the end
CASES = {
    "plain": ([5, 9], [5, 9], 2, 1, 8, 8, (-1, -1), 0),
    "causal": ([7, 12], [7, 12], 2, 1, 8, 8, (-1, 0), 0),
    "left": ([20], [20], 1, 1, 8, 8, (3, -1), 0),
    "right": ([20], [20], 1, 1, 8, 8, (-1, 2), 0),
    "window": ([17, 6], [17, 6], 1, 2, 8, 8, (4, 3), 0),
    "causal window": ([17], [17], 1, 1, 8, 8, (4, 0), 0),
    "gqa": ([6, 11], [6, 11], 2, 3, 8, 8, (-1, 0), 0),
    "mqa": ([9], [9], 1, 8, 16, 8, (-1, -1), 0),
    "cross longer keys": ([5, 3], [11, 8], 1, 2, 8, 8, (-1, 0), 0),
    "cross longer queries": ([13, 3], [6, 3], 1, 2, 8, 8, (-1, 0), 0),
    "dead by window": ([13, 4], [5, 9], 2, 1, 8, 8, (1, 1), 0),
    "empty": ([0, 5, 0, 4, 3, 0], [2, 5, 0, 0, 3, 0], 1, 2, 8, 8, (-1, 0), 0),
    "past the end": ([4, 6], [7, 2], 2, 2, 8, 8, (-1, -1), 5),
    "wide values": ([7, 5], [7, 5], 2, 2, 8, 24, (-1, 0), 2),
    "narrow values": ([7, 5], [7, 5], 1, 3, 24, 8, (-1, 0), 2),
}


def make(name):
    lengths_q, lengths_k, num_heads_kv, group, head_dim, head_dim_v, window, unused = CASES[name]
    rng = np.random.default_rng(len(name))
    cu_q, cu_k = (np.cumsum([0, *lengths]).astype(np.int32) for lengths in (lengths_q, lengths_k))
    total_q, total_k, heads = sum(lengths_q) + unused, sum(lengths_k) + unused, num_heads_kv * group
    shapes = {
        "q": (total_q, heads, head_dim),
        "k": (total_k, num_heads_kv, head_dim),
        "v": (total_k, num_heads_kv, head_dim_v),
        "dout": (total_q, heads, head_dim_v),
    }
    arrays = {key: rng.standard_normal(shape) for key, shape in shapes.items()}
    for key, end in zip(shapes, (cu_q[-1], cu_k[-1], cu_k[-1], cu_q[-1]), strict=True):
        arrays[key][end:] = np.nan
    dlse = rng.standard_normal((heads, total_q))
    return *arrays.values(), dlse, cu_q, cu_k, window


def seen_by(i, seqlen_q, seqlen_k, window):
    """Keys that query i sees, straight from the definition."""
    middle = i + seqlen_k - seqlen_q
    left = seqlen_k + seqlen_q if window[0] < 0 else window[0]
    right = seqlen_k + seqlen_q if window[1] < 0 else window[1]
    return [j for j in range(seqlen_k) if middle - left <= j <= middle + right]


def autograd(q, k, v, dout, dlse, cu_q, cu_k, window, scale):
    """Outputs and gradients of attention written query by query, differentiated by torch."""
    torch = pytest.importorskip("torch")
    q, k, v = (torch.tensor(a, requires_grad=True) for a in (q, k, v))
    group = q.shape[1] // k.shape[1]
    out, lse = np.zeros(dout.shape), np.full(dlse.shape, -np.inf)
    loss = torch.zeros((), dtype=torch.float64)
    for b in range(len(cu_q) - 1):
        seqlen_q, seqlen_k = cu_q[b + 1] - cu_q[b], cu_k[b + 1] - cu_k[b]
        for i in range(seqlen_q):
            keys = [cu_k[b] + j for j in seen_by(i, seqlen_q, seqlen_k, window)]
            token = cu_q[b] + i
            for head in range(q.shape[1] if keys else 0):
                scores = scale * (k[keys, head // group] @ q[token, head])
                row = torch.softmax(scores, 0) @ v[keys, head // group]
                row_lse = torch.logsumexp(scores, 0)
                loss = loss + row @ torch.tensor(dout[token, head]) + row_lse * dlse[head, token]
                out[token, head], lse[head, token] = row.detach().numpy(), float(row_lse.detach())
    grads = torch.autograd.grad(loss, (q, k, v), allow_unused=True)
    return out, lse, *(g.numpy() for g in grads)


@pytest.fixture(autouse=True)
def no_warnings():
    """Dead rows, empty sequences and NaN elsewhere must not even warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward_match_autograd(name):
    q, k, v, dout, dlse, cu_q, cu_k, window = make(name)
    scale = 0.3 if name == "gqa" else None
    expected = autograd(q, k, v, dout, dlse, cu_q, cu_k, window, scale or q.shape[2] ** -0.5)
    out, lse = dense.forward(q, k, v, cu_q, cu_k, window=window, softmax_scale=scale)
    grads = dense.backward(
        dout, q, k, v, out, lse, cu_q, cu_k, dlse=dlse, window=window, softmax_scale=scale
    )
    for got, wanted in zip((out, lse, *grads), expected, strict=True):
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-12)


def test_dlse_defaults_to_zero():
    q, k, v, dout, dlse, cu_q, cu_k, window = make("gqa")
    out, lse = dense.forward(q, k, v, cu_q, cu_k, window=window)
    absent = dense.backward(dout, q, k, v, out, lse, cu_q, cu_k, window=window)
    zeros = dense.backward(
        dout, q, k, v, out, lse, cu_q, cu_k, dlse=np.zeros_like(dlse), window=window
    )
    for a, b in zip(absent, zeros, strict=True):
        np.testing.assert_array_equal(a, b)


def test_cases_contain_dead_rows():
    for name in ("cross longer queries", "dead by window", "empty"):
        q, k, v, *_, cu_q, cu_k, window = make(name)
        lse = dense.forward(q, k, v, cu_q, cu_k, window=window)[1]
        assert np.isneginf(lse[:, : cu_q[-1]]).any() and np.isfinite(lse).any()


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (0, 0), (2, -1), (-1, 3), (1, 2)])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(6, 6), (4, 9), (9, 4), (1, 5), (0, 3), (3, 0)])
def test_allowed(seqlen_q, seqlen_k, window):
    mask = dense.allowed(seqlen_q, seqlen_k, window)
    assert mask.shape == (seqlen_q, seqlen_k) and mask.dtype == bool
    for i in range(seqlen_q):
        assert list(np.flatnonzero(mask[i])) == seen_by(i, seqlen_q, seqlen_k, window)


def test_neighbours_do_not_leak():
    q, k, v, dout, dlse, cu_q, cu_k, window = make("empty")
    out, lse = dense.forward(q, k, v, cu_q, cu_k, window=window)
    grads = dense.backward(dout, q, k, v, out, lse, cu_q, cu_k, dlse=dlse, window=window)
    rows, keys = slice(cu_q[4], cu_q[5]), slice(cu_k[4], cu_k[5])

    def poisoned(array, kept, axis=0):
        index = (slice(None),) * axis + (kept,)
        copy = np.full_like(array, np.nan)
        copy[index] = array[index]
        return copy

    q, dout, out_bad = (poisoned(a, rows) for a in (q, dout, out))
    k, v = (poisoned(a, keys) for a in (k, v))
    lse_bad, dlse = (poisoned(a, rows, axis=1) for a in (lse, dlse))
    again = dense.forward(q, k, v, cu_q, cu_k, window=window)
    np.testing.assert_array_equal(again[0][rows], out[rows])
    np.testing.assert_array_equal(again[1][:, rows], lse[:, rows])
    again = dense.backward(dout, q, k, v, out_bad, lse_bad, cu_q, cu_k, dlse=dlse, window=window)
    for got, wanted, kept in zip(again, grads, (rows, keys, keys), strict=True):
        np.testing.assert_array_equal(got[kept], wanted[kept])


def test_backward_of_a_part_of_a_larger_attention():
    """Keys in two parts, each with the out and lse of the whole: dq adds up, dk and dv join."""
    q, k, v, dout, dlse, cu_q, cu_k, _ = make("mqa")
    out, lse = dense.forward(q, k, v, cu_q, cu_k)
    dq, dk, dv = dense.backward(dout, q, k, v, out, lse, cu_q, cu_k, dlse=dlse)
    parts = [
        dense.backward(dout, q, k[a:b], v[a:b], out, lse, cu_q, np.array([0, b - a]), dlse=dlse)
        for a, b in ((0, 4), (4, len(k)))
    ]
    np.testing.assert_allclose(parts[0][0] + parts[1][0], dq, atol=1e-13)
    np.testing.assert_allclose(np.concatenate([p[1] for p in parts]), dk, atol=1e-13)
    np.testing.assert_allclose(np.concatenate([p[2] for p in parts]), dv, atol=1e-13)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_is_that_of_the_dtype(dtype):
    dtype = np.dtype(dtype if dtype == "float16" else pytest.importorskip("ml_dtypes").bfloat16)
    q, k, v, dout, _, cu_q, cu_k, window = make("gqa")
    q, k, v, dout = (a.astype(dtype) for a in (q, k, v, dout))

    def run(rounding):
        out, lse = dense.forward(q, k, v, cu_q, cu_k, window=window, rounding=rounding)
        grads = dense.backward(
            dout, q, k, v, out, lse, cu_q, cu_k, window=window, rounding=rounding
        )
        return out, *grads

    for exact, single, half in zip(run(None), run(np.float32), run(dtype), strict=True):
        assert half.dtype == np.float64
        np.testing.assert_array_equal(half, half.astype(dtype).astype(np.float64))
        assert 0 < abs(single - exact).max() < 1e-5
        assert 1e-4 < abs(half - exact).max() < 0.1


@pytest.mark.parametrize("blocks", [(64, 64), (4, 3), (1, 1), (3, 16)])
@pytest.mark.parametrize("name", CASES)
def test_online_is_dense(name, blocks):
    q, k, v, *_, cu_q, cu_k, window = make(name)
    expected = dense.forward(q, k, v, cu_q, cu_k, window=window, softmax_scale=0.4)
    got = online.forward(
        q, k, v, cu_q, cu_k, window=window, softmax_scale=0.4, block_m=blocks[0], block_n=blocks[1]
    )
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_cupy_arrays(name):
    cupy = pytest.importorskip("cupy")
    if not cupy.cuda.is_available():
        pytest.skip("needs a GPU")
    *arrays, window = make(name)
    q, k, v, dout, dlse, cu_q, cu_k = (cupy.asarray(a) for a in arrays)
    out, lse = dense.forward(q, k, v, cu_q, cu_k, window=window)
    grads = dense.backward(dout, q, k, v, out, lse, cu_q, cu_k, dlse=dlse, window=window)
    tiled = online.forward(q, k, v, cu_q, cu_k, window=window, block_m=5, block_n=7)
    q, k, v, dout, dlse, cu_q, cu_k = arrays
    wanted = dense.forward(q, k, v, cu_q, cu_k, window=window)
    wanted += dense.backward(dout, q, k, v, *wanted, cu_q, cu_k, dlse=dlse, window=window)
    for got, expected in zip((out, lse, *grads, *tiled), wanted + wanted[:2], strict=True):
        assert isinstance(got, cupy.ndarray)
        np.testing.assert_allclose(got.get(), expected, rtol=0, atol=1e-12)
