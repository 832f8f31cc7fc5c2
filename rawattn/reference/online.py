"""Packed attention by tiles with an online softmax: what the forward kernels' entry reads like.

One (m_block, head) pair of the inner loops is one CTA; a line here is a phase of the kernel there.
"""

from rawattn.reference.dense import Array, Window, allowed, namespace, sequences


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
    xp, group = namespace(q), q.shape[1] // k.shape[1]
    s = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    q, k, v = (a.astype(xp.float64) for a in (q, k, v))
    out = xp.zeros((*q.shape[:2], v.shape[2]), dtype=xp.float64)
    lse = xp.full((q.shape[1], q.shape[0]), -xp.inf, dtype=xp.float64)
    for rows, keys in sequences(cu_seqlens_q, cu_seqlens_k):
        seqlen_q, seqlen_k = rows.stop - rows.start, keys.stop - keys.start
        mask = allowed(seqlen_q, seqlen_k, window, xp)
        for m_start in range(0, seqlen_q, block_m):
            m_stop = min(m_start + block_m, seqlen_q)
            for head in range(q.shape[1]):
                tokens = slice(rows.start + m_start, rows.start + m_stop)
                Q = q[tokens, head]
                row_max = xp.full(m_stop - m_start, -xp.inf)
                row_sum = xp.zeros(m_stop - m_start)
                acc = xp.zeros((m_stop - m_start, v.shape[2]))
                first, last = key_range(m_start, m_stop, seqlen_q, seqlen_k, window)
                for n_start in range(first // block_n * block_n, last, block_n):
                    n_stop = min(n_start + block_n, seqlen_k)
                    K = k[keys.start + n_start : keys.start + n_stop, head // group]
                    V = v[keys.start + n_start : keys.start + n_stop, head // group]
                    S = xp.where(mask[m_start:m_stop, n_start:n_stop], s * (Q @ K.T), -xp.inf)
                    new_max = xp.maximum(row_max, S.max(axis=1))
                    shift = xp.where(new_max == -xp.inf, 0.0, new_max)  # no key so far: exp gives 0
                    P = xp.exp(S - shift[:, None])
                    rescale = xp.exp(row_max - shift)
                    row_sum = row_sum * rescale + P.sum(axis=1)
                    acc = acc * rescale[:, None] + P @ V
                    row_max = new_max
                dead = row_sum == 0.0
                row_sum = xp.where(dead, 1.0, row_sum)
                out[tokens, head] = acc / row_sum[:, None]
                lse[head, tokens] = row_max + xp.log(row_sum)
    return out, lse


def key_range(
    m_start: int, m_stop: int, seqlen_q: int, seqlen_k: int, window: Window
) -> tuple[int, int]:
    """First key that a query in [m_start, m_stop) may see, and one past the last."""
    left, right = window
    shift = seqlen_k - seqlen_q
    first = max(m_start + shift - left, 0) if left >= 0 else 0
    last = min(m_stop + shift + right, seqlen_k) if right >= 0 else seqlen_k
    return first, last
