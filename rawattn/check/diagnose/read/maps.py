"""Scores that belong to other rows or heads of q and k: which ones, and how they are found."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rawattn.check.diagnose.engine import Context, Step
from rawattn.check.diagnose.read.places import Places
from rawattn.check.diagnose.read.terms import PEAK, Field

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Map:
    """of: "k" or "q". heads (num_heads_q,): the head of it that each query head takes; rows of the
    whole pack (num_heads_q, total): the row that is taken in place of each, None for the own one.
    """

    of: str
    heads: Array
    rows: Array | None
    text: str

    @property
    def step(self) -> Step:
        """Y with these heads and rows; rows as on the problem that was read."""

        def Y(c: Context) -> Array:
            q, k = c.question.q, c.question.k
            found = []
            for h in c.view.heads:
                rows = c.view.keys if self.rows is None else self.rows[h][c.view.keys]
                rows = np.where(rows < 0, c.view.keys, rows)
                of_q, of_k = (self.heads[h], c.view.head_kv) if self.of == "q" else (h, self.heads[h])
                Q, K = q[c.view.rows, of_q], k[rows, of_k]
                found.append(c.s * (Q.astype(np.float64) @ K.astype(np.float64).T))
            return np.stack(found)

        return Y


def map_of(field: Field, places: Places, S: Array, lse: Array | None) -> Map | None:
    """Which other heads or rows the scores are of; ``field`` is log-weights less S."""
    q = places.question
    if q.softcap is not None:
        return None
    Q = q.scale * q.q.astype(np.float64).swapaxes(0, 1)
    K = q.k.astype(np.float64).swapaxes(0, 1)
    all_scores = np.einsum("hnd,kmd->hknm", Q, K)
    logs = np.where(field.there, field.x + S, 0.0)
    own = np.arange(q.num_heads_q) // q.group
    heads = _best(field, logs, all_scores)
    if heads is not None:
        return Map("k", heads, None, f"query head h takes the keys of head {of_heads(heads, q.group)}")
    by_query = all_scores[:, own].transpose(1, 0, 2, 3)  # (own head, other query head, ...)
    heads = _best(field, logs, by_query)
    if heads is not None:
        return Map("q", heads, None, f"head h takes the queries of head {of_heads(heads, 1)}")
    if lse is None:
        return None
    rows = _rows(field, logs + lse[..., None], all_scores[np.arange(len(own)), own])
    return None if rows is None else Map("k", own, rows, _shift(rows, places, field))


def of_heads(heads: Array, group: int) -> str:
    """A map from h to a head, as a formula or as a list."""
    h, top = np.arange(len(heads)), int(heads.max(initial=0)) + 1
    known = {f"h // {group}" if group > 1 else "h": h // group, "0": 0 * h}
    known |= {f"h % {n}": h % n for n in range(2, top + 1)}
    known |= {f"h // {n}": h // n for n in range(2, len(heads) + 1)}
    known |= {f"(h {by:+}) % {len(heads)}": (h + by) % len(heads) for by in (1, -1)}
    known |= {f"{len(heads) - 1} - h": len(heads) - 1 - h}
    text = next((name for name, x in known.items() if np.array_equal(x, heads)), "")
    return text or ", ".join(map(str, heads))


def _best(field: Field, logs: Array, scores: Array) -> Array | None:
    """For every head the other head whose scores (heads, others, total_q, total_k) are in it."""
    found = []
    for h in range(len(logs)):
        part = Field(logs[h : h + 1], field.there[h : h + 1], field.by_row, field.noise)
        left = [part.left(other[None]) for other in scores[h]]
        if min(left) > 1:
            return None
        found.append(int(np.argmin(left)))
    return np.array(found)


def _rows(field: Field, scores: Array, all_scores: Array) -> Array | None:
    """For every head and key the row of k (num_heads_q, total_k) whose scores it has; -1 where
    fewer than three queries see the key."""
    found = []
    for x, there, own in zip(scores, field.there, all_scores, strict=True):
        mask, x = there.astype(np.float64), np.where(there, x, 0.0)
        off = (x * x).sum(axis=0)[:, None] - 2 * x.T @ own + mask.T @ own**2
        count = mask.sum(axis=0)
        best = off.argmin(axis=1)
        rms = np.sqrt(np.maximum(off.min(axis=1), 0.0) / np.maximum(count, 1))
        if (rms[count >= 3] > 3 * field.noise).any():
            return None
        found.append(np.where(count >= 3, best, -1))
    rows = np.stack(found)
    return rows if (rows >= 0).any() else None


def _shift(rows: Array, places: Places, field: Field) -> str:
    """Where the rows lie that are taken."""
    there = rows >= 0
    key = np.broadcast_to(np.arange(rows.shape[1]), rows.shape)
    by = np.unique((rows - key)[there])
    if len(by) == 1:
        return f"key j has the scores of key j {int(by[0]):+}"
    first = np.asarray(places.question.cu_seqlens_k)[places.question.sequence_of("k")]
    if np.array_equal(rows[there], np.broadcast_to(key - first, rows.shape)[there]):
        return "keys are read without the offset of their sequence"
    moved = np.argwhere(there & (rows != key))[:4]
    told = ", ".join(f"key {key[h, j]} has those of key {rows[h, j]}" for h, j in moved)
    return f"rows of k are read at other rows' places (rows of the pack: {told}, ...)"


def moved_of(P: Array, right: Array, noise: float) -> str:
    """In words, whose weights stand where: of which other key, or of which other row; "" if that
    does not say all."""
    H, n, m = P.shape
    for of, shape in (("key", (H * n, m)), ("row", (m, H * n))):
        x, y = (a.reshape(H * n, m) if of == "key" else a.reshape(H * n, m).T for a in (P, right))
        off = (x * x).sum(axis=0)[:, None] - 2 * x.T @ y + (y * y).sum(axis=0)
        best, own = off.argmin(axis=1), np.arange(shape[1])
        dead = ~x.any(axis=0)
        moved = (best != own) & ~dead
        if (np.abs(x - y[:, best]) > PEAK * noise * (y[:, best] + 0.01))[:, ~dead].any():
            continue
        if of == "key" and moved.any():
            return f"the values of a key get other weights: {_moves(own, best, moved, str)}"
        if moved.any():
            told = _moves(own, best, moved, lambda at: f"{at % n} of head {at // n}")
            return f"rows of out hold those of other rows: {told}"
    return ""


def _moves(own: Array, best: Array, moved: Array, name: Callable[[int], str]) -> str:
    by = np.unique((best - own)[moved])
    if len(by) == 1:
        return f"of {int(by[0]):+} in the pack, {int(moved.sum())} of {len(own)}"
    some = np.flatnonzero(moved)[:3]
    told = ", ".join(f"{name(int(at))} those of {name(int(best[at]))}" for at in some)
    return f"{int(moved.sum())} of {len(own)} of the pack ({told}, ...)"
