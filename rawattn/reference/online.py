"""Packed attention by tiles with an online softmax: what the kernels' entries read like.

One step of the outer loop, a tile of queries and a head, is one CTA; a line inside is a phase of
the kernel there.
"""

from collections.abc import Iterator
from types import ModuleType

from rawattn.reference.dense import Array, Window, allowed, namespace, scale_of, sequences


def forward(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    *,
    window: Window = (-1, -1),
    softmax_scale: float | None = None,
    block_m: int = 64,
    block_n: int = 64,
) -> tuple[Array, Array]:
    """Out and lse of ``dense.forward``, from tiles of block_m queries and block_n keys."""
    xp, group, s = namespace(q), q.shape[1] // k.shape[1], scale_of(q, softmax_scale)
    q, k, v = (a.astype(xp.float64) for a in (q, k, v))
    out = xp.zeros((*q.shape[:2], v.shape[2]), dtype=xp.float64)
    lse = xp.full((q.shape[1], q.shape[0]), -xp.inf, dtype=xp.float64)
    for rows, key_tiles in tiles(cu_seqlens_q, cu_seqlens_k, window, block_m, block_n, xp):
        for head in range(q.shape[1]):
            Q = q[rows, head]
            row_max, row_sum = xp.full(len(Q), -xp.inf), xp.zeros(len(Q))
            acc = xp.zeros((len(Q), v.shape[2]))
            for keys, mask in key_tiles:
                K, V = k[keys, head // group], v[keys, head // group]
                S = xp.where(mask, s * (Q @ K.T), -xp.inf)
                P, rescale, row_max = softmax_step(xp, S, row_max)
                row_sum = row_sum * rescale + P.sum(axis=1)
                acc = acc * rescale[:, None] + P @ V
            row_sum, lse[head, rows] = finish(xp, row_max, row_sum)
            out[rows, head] = acc / row_sum[:, None]
    return out, lse


def jvp(
    q: Array,
    k: Array,
    v: Array,
    tq: Array | None,
    tk: Array | None,
    tv: Array | None,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    *,
    window: Window = (-1, -1),
    softmax_scale: float | None = None,
    block_m: int = 64,
    block_n: int = 64,
) -> tuple[Array, Array, Array, Array]:
    """Out, tout, lse and tlse of ``second.jvp``, from tiles of block_m queries and block_n keys.

    The tangents wait, as out does, for the last key: sums of p E, and of p E v + p tv.
    """
    xp, group, s = namespace(q), q.shape[1] // k.shape[1], scale_of(q, softmax_scale)
    tq, tk, tv = (xp.zeros(a.shape) if t is None else t for a, t in ((q, tq), (k, tk), (v, tv)))
    q, k, v, tq, tk, tv = (a.astype(xp.float64) for a in (q, k, v, tq, tk, tv))
    out, tout = (xp.zeros((*q.shape[:2], v.shape[2]), dtype=xp.float64) for _ in range(2))
    lse = xp.full((q.shape[1], q.shape[0]), -xp.inf, dtype=xp.float64)
    tlse = xp.zeros(lse.shape, dtype=xp.float64)
    for rows, key_tiles in tiles(cu_seqlens_q, cu_seqlens_k, window, block_m, block_n, xp):
        for head in range(q.shape[1]):
            Q, tQ = q[rows, head], tq[rows, head]
            row_max, row_sum = xp.full(len(Q), -xp.inf), xp.zeros(len(Q))
            acc = xp.zeros((len(Q), v.shape[2]))
            trow_sum, tacc = xp.zeros(row_sum.shape), xp.zeros(acc.shape)
            for keys, mask in key_tiles:
                K, V = k[keys, head // group], v[keys, head // group]
                tK, tV = tk[keys, head // group], tv[keys, head // group]
                S = xp.where(mask, s * (Q @ K.T), -xp.inf)
                E = s * (tQ @ K.T + Q @ tK.T)
                P, rescale, row_max = softmax_step(xp, S, row_max)
                row_sum = row_sum * rescale + P.sum(axis=1)
                trow_sum = trow_sum * rescale + (P * E).sum(axis=1)
                acc = acc * rescale[:, None] + P @ V
                tacc = tacc * rescale[:, None] + (P * E) @ V + P @ tV
            row_sum, lse[head, rows] = finish(xp, row_max, row_sum)
            tlse[head, rows] = trow_sum / row_sum
            out[rows, head] = acc / row_sum[:, None]
            tout[rows, head] = tacc / row_sum[:, None] - tlse[head, rows, None] * out[rows, head]
    return out, tout, lse, tlse


def tiles(
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    window: Window,
    block_m: int,
    block_n: int,
    xp: ModuleType,
) -> Iterator[tuple[slice, list[tuple[slice, Array]]]]:
    """Every tile of queries, with the tiles of keys that these see: rows, and (keys, mask) each."""
    for rows, keys in sequences(cu_seqlens_q, cu_seqlens_k):
        seqlen_q, seqlen_k = rows.stop - rows.start, keys.stop - keys.start
        mask = allowed(seqlen_q, seqlen_k, window, xp)
        for m_start in range(0, seqlen_q, block_m):
            m_stop = min(m_start + block_m, seqlen_q)
            first, last = key_range(m_start, m_stop, seqlen_q, seqlen_k, window)
            key_tiles = []
            for n_start in range(first // block_n * block_n, last, block_n):
                n_stop = min(n_start + block_n, seqlen_k)
                columns = slice(keys.start + n_start, keys.start + n_stop)
                key_tiles.append((columns, mask[m_start:m_stop, n_start:n_stop]))
            yield slice(rows.start + m_start, rows.start + m_stop), key_tiles


def softmax_step(xp: ModuleType, S: Array, row_max: Array) -> tuple[Array, Array, Array]:
    """exp of a tile's scores, the factor for all sums so far, and the new row_max."""
    new_max = xp.maximum(row_max, S.max(axis=1))
    shift = xp.where(new_max == -xp.inf, 0.0, new_max)  # no key so far: exp gives 0
    return xp.exp(S - shift[:, None]), xp.exp(row_max - shift), new_max


def finish(xp: ModuleType, row_max: Array, row_sum: Array) -> tuple[Array, Array]:
    """What to divide sums by, which for a row without keys is 1, and the logsumexp."""
    row_sum = xp.where(row_sum == 0.0, 1.0, row_sum)
    return row_sum, row_max + xp.log(row_sum)


def key_range(
    m_start: int, m_stop: int, seqlen_q: int, seqlen_k: int, window: Window
) -> tuple[int, int]:
    """First key that a query in [m_start, m_stop) may see, and one past the last."""
    left, right = window
    shift = seqlen_k - seqlen_q
    first = max(m_start + shift - left, 0) if left >= 0 else 0
    last = min(m_stop + shift + right, seqlen_k) if right >= 0 else seqlen_k
    return first, last
