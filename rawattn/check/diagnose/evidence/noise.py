"""What rounding may do to the identities of ``invariants``, derived from the inputs alone.

A right implementation rounds every score, probability, product and stored number by a relative u
at most. Here the squares of those errors are added up, to first order and in units of u ** 2, where
they meet: in the sum of a row of P or dS, in an element of out or dq, in an inner product. Such a
square is called noise. Arrays are float64 and (tokens, heads, width), numbers by row too.

Scores are needed one by one for it; of long problems every so many rows stand for the others.
Longer than other modules by the formulas of two orders.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.reference.selection import OWN, Part, parts

Float64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

# Of rows (total_q, num_heads_q, 1): "mass", "ds", "te" and "tds" of the sums of P, dS, P' and dS';
# "lse", which is no noise but the exact one, NaN in rows left out; of rows with one key "gate" and
# "tgate", the factor of that key's scores and its tangent. Of elements: "out", "tout", "dq", "gq".
# Of sums (batch, num_heads_kv, 1): "scores" and "values" of <q, dq> and <v, dv>, "tscores" and
# "tvalues" of their derivatives, "adjoint" of <direction, gradients>. What is about a direction is
# 0 without one.
Noise = dict[str, Float64]
OF_SUMS = ("scores", "values", "tscores", "tvalues", "adjoint")

# Distance of neighbouring numbers at 1, as far as an implementation is held to it: float32 may have
# been TF32 on the way, and in float64 the length of sums counts for more than a rounding.
EPS = {
    np.dtype(np.float16): 2.0**-10,
    np.dtype(ml_dtypes.bfloat16): 2.0**-7,
    np.dtype(np.float32): 2.0**-10,
    np.dtype(np.float64): 2.0**-46,
}
TINY = {np.dtype(np.float16): 2.0**-14}  # below it the error is no longer relative
BUDGET = 2**21  # scores that noise is taken from
BUDGET_LSE = 2**24  # and the lse
TILE = 2**18  # scores at a time
ONE_KEY_ROWS = 32  # of every sequence, at most, that noise is taken from in any case


def precision(question: Question, answers: Answers) -> tuple[float, float]:
    """The coarsest EPS and the largest TINY of the inputs and of the answers.

    A wide array may hold numbers that were 16-bit ones before somebody widened them.
    """
    arrays = (question.q, question.k, question.v, *answers.values())
    found = {narrowest(np.asarray(a)) for a in arrays} & EPS.keys()
    return (
        max((EPS[d] for d in found), default=EPS[np.dtype(np.float64)]),
        max(TINY.get(d, 0.0) for d in found) if found else 0.0,
    )


def narrowest(array: npt.NDArray[Any]) -> np.dtype[Any]:
    """The narrowest dtype that holds ``array``, if it has enough numbers to tell."""
    if array.dtype not in (np.float32, np.float64):
        return array.dtype
    finite = array[np.isfinite(array) & (array != 0)]
    if len(np.unique(finite[:4096])) < 32:
        return array.dtype
    for narrow in (ml_dtypes.bfloat16, np.float16, np.float32):
        if (finite.astype(narrow).astype(array.dtype) == finite).all():
            return np.dtype(narrow)
    return array.dtype


@dataclass(frozen=True)
class Reach:
    """Who sees whom. count, key (total_q, num_heads_q): the number of keys that a query sees, and
    its key where that is one alone, else -1. seen (total_k, num_heads_kv): by any query.
    ``apart``: some query sees its own block without having selected it.
    """

    question: Question

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Of a sparse question, the masks."""
        q = self.question
        if q.block_indices is None:
            return ()
        found = parts(
            np.asarray(q.block_indices),
            q.num_heads_q,
            q.num_heads_kv,
            np.asarray(q.cu_seqlens_q),
            np.asarray(q.cu_seqlens_k),
            block_size=q.block_size,
            block_counts=q.block_counts,
            include_own_block=q.own,
            causal=q.causal,
        )
        return tuple(found)

    @cached_property
    def apart(self) -> bool:
        return any(bool((part.slot == OWN).any()) for part in self.parts)

    @cached_property
    def spans(self) -> tuple[Ints, Ints]:
        """Of a dense question, the first key of every query and one past the last, in k's rows."""
        q = self.question
        first, last = (np.zeros(len(q.q), dtype=np.int64) for _ in range(2))
        left, right = q.mask_window
        for rows, keys in sequences(q):
            at = np.arange(rows.stop - rows.start) + (keys.stop - keys.start)
            at += keys.start - (rows.stop - rows.start)
            first[rows] = np.maximum(at - left, keys.start) if left >= 0 else keys.start
            stop = np.minimum(at + right + 1, keys.stop) if right >= 0 else keys.stop
            last[rows] = np.maximum(stop, first[rows])
        return first, last

    @cached_property
    def count(self) -> Ints:
        q = self.question
        if not q.sparse:
            first, last = self.spans
            return np.repeat((last - first)[:, None], q.num_heads_q, axis=1)
        count = np.zeros((len(q.q), q.num_heads_q), dtype=np.int64)
        for part in self.parts:
            count[part.rows, part.heads] = part.mask.sum(axis=2).T
        return count

    @cached_property
    def key(self) -> Ints:
        q, one = self.question, self.count == 1
        key = np.full(one.shape, -1, dtype=np.int64)
        if not q.sparse:
            return np.where(one, self.spans[0][:, None], key)
        for part in self.parts:
            key[part.rows, part.heads] = part.mask.argmax(axis=2).T + part.keys.start
        return np.where(one, key, -1)

    @cached_property
    def seen(self) -> Bools:
        q = self.question
        seen = np.zeros((len(q.k), q.num_heads_kv), dtype=bool)
        for part in self.parts:
            seen[part.keys, part.head_kv] = part.mask.any(axis=(0, 1))
        if not q.sparse:
            edges = np.zeros(len(q.k) + 1, dtype=np.int64)
            for edge, step in zip(self.spans, (1, -1), strict=True):
                np.add.at(edges, edge, step)
            seen |= (np.cumsum(edges)[:-1] > 0)[:, None]
        return seen

    def mask(self, rows: slice, keys: slice) -> Bools:
        """Which keys of a sequence its queries see: (num_heads_q, seqlen_q, seqlen_k)."""
        q = self.question
        mask = np.zeros((q.num_heads_q, rows.stop - rows.start, keys.stop - keys.start), dtype=bool)
        if not q.sparse:
            first, last = (span[rows, None] for span in self.spans)
            index = np.arange(keys.start, keys.stop)
            mask |= (index >= first) & (index < last)
        for part in self.parts:
            if part.rows == rows:
                mask[part.heads] = part.mask
        return mask


class Arrays:
    """The inputs of a question in float64, 0 where there are none and where nobody looks at them.

    ``finite`` says which sequences have no NaN or inf.
    """

    def __init__(self, question: Question, reach: Reach) -> None:
        alive, seen = reach.count[..., None] > 0, reach.seen[..., None]
        q = question

        def clean(given: Any, like: tuple[int, ...], there: Bools | None) -> Float64:
            if given is None:
                return np.zeros(like)
            wide = np.asarray(given).astype(np.float64)
            wide = wide.T[..., None] if wide.ndim == 2 else wide
            return wide if there is None else np.where(there, wide, 0.0)

        of_out, of_row = (*q.q.shape[:2], q.v.shape[2]), (*q.q.shape[:2], 1)
        slots = (len(q.q), 1, 1) if q.block_indices is None else q.block_indices.shape
        self.q, self.tq = (clean(a, q.q.shape, alive) for a in (q.q, q.tq))
        self.k, self.tk = (clean(a, q.k.shape, seen) for a in (q.k, q.tk))
        self.v, self.tv = (clean(a, q.v.shape, seen) for a in (q.v, q.tv))
        self.dout, self.dlse = clean(q.dout, of_out, alive), clean(q.dlse, of_row, alive)
        self.gate, self.tgate = (clean(a, slots, None) for a in (q.block_scale, q.tblock_scale))
        broken = {"q": np.zeros(len(q.q), dtype=bool), "k": np.zeros(len(q.k), dtype=bool)}
        for side, names in (("q", ("q", "tq", "dout", "dlse")), ("k", ("k", "tk", "v", "tv"))):
            for name in names:
                broken[side] |= ~np.isfinite(getattr(self, name)).all(axis=(1, 2))
        self.finite = np.ones(q.batch, dtype=bool)
        for side in broken:
            within = q.sequence_of(side)
            self.finite[within[broken[side] & (within >= 0)]] = False


@dataclass(frozen=True)
class _Tile:
    """Some queries of a sequence, the query heads of one key/value head, and all keys.

    mask, gate and tgate: (group or 1, queries, keys) or a number.
    """

    sequence: int
    rows: Ints
    heads: slice
    here: tuple[slice, int]
    mask: Bools
    gate: Float64 | float
    tgate: Float64 | float


def sequences(question: Question) -> Iterator[tuple[slice, slice]]:
    """Rows of q and rows of k of every sequence, empty ones too."""
    bounds = (np.asarray(c).tolist() for c in (question.cu_seqlens_q, question.cu_seqlens_k))
    bounds_q, bounds_k = bounds
    for b in range(question.batch):
        yield slice(*bounds_q[b : b + 2]), slice(*bounds_k[b : b + 2])


def noise_of(question: Question, reach: Reach, x: Arrays, tiny: float) -> Noise:
    """The noise of every identity; ``tiny`` is the TINY of its numbers."""
    q, moved = question, "jvp" in question.stages
    width_q, width_v = q.q.shape[2], q.v.shape[2]
    widths = {"out": width_v, "tout": width_v, "dq": width_q, "gq": width_q}
    noise = {name: np.zeros((q.batch, q.num_heads_kv, 1)) for name in OF_SUMS}
    for name in ("mass", "ds", "te", "tds", "gate", "tgate", *widths):
        noise[name] = np.full((len(q.q), q.num_heads_q, widths.get(name, 1)), np.nan)
    noise["lse"] = _lse(q, reach, x)
    chosen = _chosen(q, reach, BUDGET)
    for tile in _tiles(q, reach, x, chosen):
        weight = q.lengths_q[tile.sequence] / len(chosen[tile.sequence])
        for name, values in _noise_of_tile(tile, x, q.scale, tiny, moved).items():
            if name in OF_SUMS:
                noise[name][tile.sequence, tile.here[1]] += weight * values.sum()
            else:
                noise[name][tile.rows, tile.heads] = values.swapaxes(0, 1)
    for name in noise.keys() - {*OF_SUMS, "lse", "gate", "tgate"}:
        for rows, _ in sequences(q):
            part = noise[name][rows]
            left_out = np.isnan(part).any(axis=(1, 2))
            part[left_out] = part[~left_out].mean(axis=0) if (~left_out).any() else 0.0
    return noise


def _lse(q: Question, reach: Reach, x: Arrays) -> Float64:
    """The exact lse (total_q, num_heads_q, 1), NaN in rows left out."""
    lse = np.full((len(q.q), q.num_heads_q, 1), np.nan)
    for tile in _tiles(q, reach, x, _chosen(q, reach, BUDGET_LSE)):
        Q, K = x.q[tile.rows, tile.heads].swapaxes(0, 1), x.k[tile.here]
        S = np.where(tile.mask, tile.gate * (q.scale * (Q @ K.T)), -np.inf)
        row_max = S.max(axis=-1, keepdims=True)
        row_max = np.where(np.isfinite(row_max), row_max, 0.0)
        row_sum = np.exp(S - row_max).sum(axis=-1, keepdims=True)
        lse[tile.rows, tile.heads] = (row_max + np.log(row_sum)).swapaxes(0, 1)
    return lse


def _chosen(q: Question, reach: Reach, budget: int) -> list[Ints]:
    """Rows of every sequence with that many scores, more or less."""
    lengths = zip(q.lengths_q, q.lengths_k, strict=True)
    scores = q.num_heads_q * sum(n * m for n, m in lengths)
    step = -(-scores // budget) | 1  # odd: no multiple of a tile
    chosen = []
    for rows, _ in sequences(q):
        regular = np.arange(rows.start + min(step // 2, rows.stop - rows.start), rows.stop, step)
        one = rows.start + np.flatnonzero((reach.key[rows] >= 0).any(axis=1))
        chosen.append(np.union1d(regular, one[:ONE_KEY_ROWS]).astype(np.int64))
    return chosen


def _tiles(q: Question, reach: Reach, x: Arrays, chosen: list[Ints]) -> Iterator[_Tile]:
    """``chosen`` rows, as many at a time as fit into TILE, of sequences without NaN."""
    bounds = list(sequences(q))
    of_keys = {(p.rows.start, p.rows.stop, p.head_kv): p for p in reach.parts}
    for b, (rows, keys) in enumerate(bounds):
        num_keys = keys.stop - keys.start
        if not num_keys or not x.finite[b]:
            continue
        size = max(TILE // (num_keys * q.group), 1)
        for head_kv in range(q.num_heads_kv):
            heads = slice(head_kv * q.group, (head_kv + 1) * q.group)
            part = of_keys.get((rows.start, rows.stop, head_kv))
            gates = [] if part is None else _gates(q, x, part)
            for start in range(0, len(chosen[b]), size):
                at = chosen[b][start : start + size]
                if part is None:
                    first, last = (span[at, None] for span in reach.spans)
                    index = np.arange(keys.start, keys.stop)
                    mask = ((index >= first) & (index < last))[None]
                    yield _Tile(b, at, heads, (keys, head_kv), mask, 1.0, 0.0)
                else:
                    mask = part.mask[:, at - rows.start]
                    now = (
                        g if isinstance(g, float) else np.where(mask, g[:, at - rows.start], 0.0)
                        for g in gates
                    )
                    yield _Tile(b, at, heads, (keys, head_kv), mask, *now)


def _gates(q: Question, x: Arrays, part: Part) -> list[Float64 | float]:
    """What the scores of every key are multiplied by, and the tangent of that."""

    def load(array: Any) -> Any:
        return array

    gate = part.per_key(None if q.block_scale is None else x.gate, 1.0, load)
    return [gate, part.per_key(None if q.tblock_scale is None else x.tgate, 0.0, load)]


def _noise_of_tile(tile: _Tile, x: Arrays, s: float, tiny: float, moved: bool) -> Noise:
    """``Noise`` of a tile, (group, queries, width or 1) or to be added up; ``moved``: all of it.

    X2 is the square of X, nX its noise. First order as ``reference.dense``, second as ``second``.
    """
    Q, A, dO, dL = (a[tile.rows, tile.heads].swapaxes(0, 1) for a in (x.q, x.tq, x.dout, x.dlse))
    K, B, V, C = (a[tile.here] for a in (x.k, x.tk, x.v, x.tv))
    G, tG, mask = tile.gate, tile.tgate, tile.mask
    Q2, A2, K2, B2, V2, C2, dO2 = (a**2 for a in (Q, A, K, B, V, C, dO))

    def over_row(a: Any) -> Float64:
        return np.asarray(a.sum(axis=-1, keepdims=True))

    Y = s * (Q @ K.T)
    nY = Y**2 + s**2 * (Q2 @ K2.T)
    S, nS = G * Y, G**2 * (Y**2 + nY)
    masked = np.where(mask, S, -np.inf)
    row_max = masked.max(axis=-1, keepdims=True)
    row_max = np.where(np.isfinite(row_max), row_max, 0.0)
    P = np.exp(masked - row_max)
    row_sum = over_row(P)
    P /= np.where(row_sum == 0, 1.0, row_sum)
    alive = row_sum > 0
    small = mask * tiny**2
    nP = P**2 * (1 + nS) + small
    small = small * (1 + s**-2) if s else small  # dS times s may be stored too
    PK, PB = (P * G) @ K, (P * G) @ B
    mass = alive * (1 + over_row(nP) + s**2 * over_row(Q2 * PK**2))

    dP, ndP = dO @ V.T, (dO @ V.T) ** 2 + dO2 @ V2.T + tiny**2
    out, D = P @ V, over_row(P * dP) - dL
    Z = dP - D
    dS = P * Z
    values = nP * dP**2 + P**2 * ndP  # of P dP
    ndS = values + P**2 * Z**2 * (1 + nS) + small
    nD = D**2 + dL**2 + over_row(dO2 * out**2) + over_row(values)
    dead = ~alive
    one = mask.sum(axis=-1, keepdims=True) == 1
    noise = {
        "mass": mass,
        "out": nP @ V2 + out**2,
        "ds": over_row(ndS) + nD,
        "dq": s**2 * ((G**2 * ndS) @ K2 + nD * PK**2),
        "scores": ndS * S**2 + dS**2 * (S**2 + nS),
        "values": over_row(values) + mass * (D + dL) ** 2,
        "gate": np.where(one, over_row(mask * G), np.nan) + np.zeros_like(mass),
        "tgate": np.where(one, over_row(mask * tG), np.nan) + np.zeros_like(mass),
    }
    if not moved:
        return {n: np.where(dead, 0.0, a) for n, a in noise.items()}

    EQ, EK = G * (s * (A @ K.T)), G * (s * (Q @ B.T))
    EG = tG * Y
    E = EQ + EK + EG
    nE = E**2 + EQ**2 + EK**2 + 2 * EG**2 + tG**2 * nY + G**2 * s**2 * (A2 @ K2.T + Q2 @ B2.T)
    e = over_row(P * E)
    tP = P * (E - e)
    ntP = P**2 * (nE + e**2) + nP * (E - e) ** 2 + small
    tdP, ntdP = dO @ C.T, (dO @ C.T) ** 2 + dO2 @ C2.T + tiny**2
    tO = tP @ V + P @ C
    W = over_row(dO * tO)
    tdS = tP * Z + P * (tdP - W)
    tvalues = nP * tdP**2 + P**2 * ntdP + ntP * dP**2 + tP**2 * ndP  # of P tdP + tP dP
    ntdS = ntP * (Z**2 + dP**2 + D**2) + tP**2 * (ndP + D**2) + nP * (tdP - W) ** 2
    ntdS += P**2 * (ntdP + ndP * (1 + E**2 + e**2) + D**2 * E**2) + 4 * small
    nW = W**2 + D**2 * e**2 + over_row(dO2 * tO**2) + over_row(tvalues)
    gq = (G**2 * ntdS + tG**2 * ndS) @ K2 + nW * PK**2 + (G**2 * ndS) @ B2 + nD * PB**2
    tscores = (EQ**2 + EK**2) * ndS + S**2 * ntdS + tdS**2 * (S**2 + nS) + dS**2 * nE
    te = over_row(ntP) + e**2 * mass
    noise |= {
        "te": te,
        "tds": over_row(ntdS) + nW,
        "tout": ntP @ V2 + nP @ C2 + tO**2 + e**2 * out**2,
        "gq": s**2 * gq,
        "tscores": over_row(tscores) + nD * (over_row(P * EQ) ** 2 + over_row(P * EK) ** 2),
        "tvalues": over_row(tvalues) + mass * over_row(P * tdP) ** 2,
        "adjoint": over_row(E**2 * ndS + dS**2 * nE + tvalues) + nD * e**2 + dL**2 * te,
    }
    return {n: np.where(dead, 0.0, a) for n, a in noise.items()}
