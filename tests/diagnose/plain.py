"""Attention and its derivatives, dense and block-sparse; any step of it can be another one.

Separate from rawattn.reference, and from what rawattn-check matches answers with: nothing of them
is used here. One head of one sequence at a time; a kernel's tiles are there where they matter. A
bug is a ``Kernel`` with ``hooks``: by the name of a quantity, what stands in its place, a function
of what is at hand (a ``Head``, or for whole arrays the ``Run``) and of the right value. The names
are where ``of`` is called. With s = softmax_scale, a gate G (1 if dense), a direction tQ, tK, tV,
tG, and D = rowsum(dO o O) - dL:

    Y = s Q K^T                  S = G cap(Y)      P = exp(S - L)     O = P V
    dP = dO V^T                  dS = P o (dP - D)                    dY = G cap'(Y) dS
    dQ = s dY K                  dK = s dY^T Q                        dV = P^T dO
    tY = s (tQ K^T + Q tK^T)     E = G cap'(Y) tY + tG Y              e = rowsum(P o E)
    tO = (P o E) V + P tV - e O  tP = P o (E - e)                     W = rowsum(dO o tO)
    tdS = tP o (dP - D) + P o (dO tV^T - W)
    tdY = G cap'(Y) tdS + tG dS + cap''(Y) tY dS
    gQ = s (tdY K + dY tK)       gK = s (tdY^T Q + dY^T tQ)           gV = tP^T dO

Long, since every order of derivative shares its steps with the others.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from types import SimpleNamespace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from rawattn.check.diagnose.engine.question import BY_ROW, STAGES, Answers, Question

Array = np.ndarray[Any, Any]
Hook = Callable[[Any, Any], Any]
FLOAT64, FLOAT32, FLOAT16 = (np.dtype(f"float{bits}") for bits in (64, 32, 16))
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ZEROS = -1  # a row of zeros in the place of q, k or v; nothing is stored for it
LN_2 = float(np.log(2))
OPEN = (-1, -1)
OPERANDS = {"q": "Q", "tq": "tQ", "dout": "dO", "k": "K", "v": "V", "tk": "tK", "tv": "tV"}
OF_KEYS = ("k", "v", "tk", "tv")


@dataclass(frozen=True)
class Kernel:
    """How an implementation computes, which is right, and its ``hooks``, which are not. only: the
    results that the hooks are felt in. own: of out and lse, what the backward pass makes anew;
    own_beyond: the double backward makes both. keeps_right: the backward pass has the right out and
    lse though the forward's are wrong."""

    hooks: Mapping[str, Hook] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    own_beyond: bool = False
    keeps_right: bool = False
    tile_m: int = 16
    tile_n: int = 16
    order: str = "ascending"  # of key tiles; "descending", "shuffled"; "merged" at the end
    two_pass: bool = False  # the row maximum first, then the sums
    base_2: bool = False  # exp2 of scores in units of ln 2
    rounding: str = "operands"  # "tf32"; "every step"; "results" alone
    skips_masked: bool = True  # tiles of which no query sees a key
    subtracts_max: bool = True
    unguarded: tuple[str, ...] = ()  # "max", "lse": against -inf; "sum": against 0


class Run:
    """A question in the arithmetic of a kernel: sums are ``wide``, operands of products are not."""

    def __init__(self, question: Question, kernel: Kernel, chance: int = 0) -> None:
        self.question, self.kernel = question, kernel
        self.wide = FLOAT64 if question.dtype == FLOAT64 else FLOAT32
        self.chance = np.random.default_rng((chance, len(question.q)))
        self.memory: dict[str, Any] = {}  # what a hook left for the next head
        q, k, v = question.q, question.k, question.v
        like = {"q": q, "k": k, "v": v, "tq": q, "tk": k, "tv": v, "dlse": np.zeros(q.shape[1::-1])}
        like["dout"] = np.zeros((*q.shape[:2], v.shape[2]))
        arrays = {}
        for name, a in like.items():
            given = getattr(question, name)
            x = np.zeros(a.shape, self.wide) if given is None else given.astype(self.wide)
            arrays[name] = self.operand(x) if kernel.rounding == "tf32" else x
        self.arrays: dict[str, Array] = self.of("arrays", arrays)

    def of(self, name: str, value: Any, at: Any = None) -> Any:
        """``value``, or what a hook puts in its place, of all or ``at`` a head."""
        hook = self.kernel.hooks.get(name)
        return value if hook is None else hook(at or self, value)

    def operand(self, x: Array) -> Array:
        if self.kernel.rounding == "tf32":
            bits = x.astype(FLOAT32).view(np.uint32)
            even = np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1))
            return ((bits + even) & np.uint32(0xFFFFE000)).view(FLOAT32)
        wide = self.question.dtype == self.wide or self.kernel.rounding == "results"
        return x if wide else self.narrow(x)

    def narrow(self, x: Array) -> Array:
        return x.astype(self.question.dtype).astype(self.wide)

    def step(self, x: Array) -> Array:
        """The result of a product that is no sum's operand."""
        return self.narrow(x) if self.kernel.rounding == "every step" else x

    def exp(self, x: Array) -> Array:
        return np.exp2(x / LN_2) if self.kernel.base_2 else np.exp(x)


class Head(SimpleNamespace):
    """A query head ``h`` of sequence ``b`` with all its arrays; ``g`` is its key/value head. rows,
    keys: those of q and k, ZEROS for none. i, p, j, r: the number of a query, its place among the
    keys, the number of a key, and its row of k; as columns and as rows. n, m: lengths. seen (n,
    keys): how often a query sees a key. sel, slot, G, tG: of block-sparse attention, the head of
    block_indices, the slot of a key's copy (-1 for none), and what its gate is."""

    def of(self, name: str, value: Any) -> Any:
        return self.run.of(name, value, self)

    def read(self, name: str, head: int) -> Array:
        """Rows of an array of q's or of k's."""
        rows = self.keys if name in OF_KEYS else self.rows
        x: Array = self.run.arrays[name][np.maximum(rows, 0), head]
        return np.where((rows == ZEROS)[:, None], x.dtype.type(0), x)

    def row(self, name: str, head: int | None = None) -> Array:
        """lse, delta and the like, as a column."""
        x: Array = self.run.arrays[name][self.h if head is None else head, np.maximum(self.rows, 0)]
        return np.where(self.rows == ZEROS, x.dtype.type(0), x)[:, None]


# ---- who sees whom ----------------------------------------------------------------------------


def spans(question: Question) -> list[tuple[int, int, int, int]]:
    """First row and length of every sequence's queries and keys, all keys and not those in use."""
    cu_q, cu_k = ([int(x) for x in cu] for cu in (question.cu_seqlens_q, question.cu_seqlens_k))
    ends = zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False)
    return [(q0, q1 - q0, k0, k1 - k0) for q0, q1, k0, k1 in ends]


def in_window(p: Array, j: Array, window: tuple[int, int], left: int = 0, right: int = 0) -> Array:
    """left, right: by how much its sides, where it has them, are farther away."""
    seen = np.ones(np.broadcast_shapes(p.shape, j.shape), dtype=bool)
    seen = seen & (j - p >= -window[0] - left) if window[0] >= 0 else seen
    return seen & (j - p <= window[1] + right) if window[1] >= 0 else seen


def heads(run: Run, window: tuple[int, int] | None = None) -> Iterator[Head]:
    """Every head of every sequence, ready to compute. window: of the sliding branch."""
    q = run.question
    visits = _visits(run) if q.sparse and window is None else None
    for b, (start_q, n, start_k, given) in enumerate(run.of("spans", spans(q))):
        used = given if q.seqused_k is None else min(int(q.seqused_k[b]), given)
        views: dict[int, Head] = {}
        for h in range(q.num_heads_q):
            c = Head(run=run, question=q, kernel=run.kernel, h=h, b=b, given=given)
            c.n, c.start_q, c.start_k, c.total_k = n, start_q, start_k, len(q.k)
            c.m, c.group = c.of("used", used), q.group
            c.g = c.of("kv head", h // q.group)
            c.window = c.of("window", window or q.mask_window)
            _see(c, visits, views)
            _load(c)
            if len(c.rows) and (len(c.keys) or c.sink is not None):
                yield c


def _see(c: Head, visits: "Visits | None", views: dict[int, Head]) -> None:
    """Who sees whom; with lists of blocks there is a copy of the keys for every slot, and for none,
    each with its own gate. views: what heads of one list share."""
    q, view = c.question, Head(keys=np.arange(c.start_k, c.start_k + c.m), slot=None)
    c.rows = c.of("rows", np.arange(c.start_q, c.start_q + c.n))
    c.i = np.arange(len(c.rows))[:, None]
    if visits is not None:
        c.sel = c.of("selection", c.h * q.block_indices.shape[1] // q.num_heads_q)
        view = views[c.sel] = views.get(c.sel) or _copies(c, visits)
    c.slot, c.keys = view.slot, np.asarray(c.of("keys", view.keys), dtype=np.int64)
    past = c.m - 1 + np.cumsum(c.keys == ZEROS)
    c.j = np.where(c.keys == ZEROS, past, c.keys - c.start_k)[None]
    c.r = c.keys[None]
    c.p = c.of("p", c.i + c.m - c.n)
    seen = in_window(c.p, c.j, c.window) if visits is None else view.seen
    c.seen = np.asarray(c.of("seen", seen), dtype=c.run.wide)
    c.G = c.of("G", _gate(c, q.block_scale, 1.0))
    c.tG = c.of("tG", _gate(c, q.tblock_scale, 0.0))


def _gate(c: Head, gate: Array | None, still: float) -> Any:
    if gate is None or c.slot is None:
        return still
    return np.where(c.slot < 0, still, gate[c.rows, c.sel][:, c.slot]).astype(c.run.wide)


def _load(c: Head) -> None:
    for name, big in OPERANDS.items():
        setattr(c, big, c.of(big, c.read(name, c.g if name in OF_KEYS else c.h)))
    sinks, tsinks = c.question.sinks, c.question.tsinks
    c.sink = c.of("sink", None if sinks is None else c.run.wide.type(sinks[c.h]))
    c.tsink = 0.0 if tsinks is None else c.run.wide.type(tsinks[c.h])
    c.s = c.of("scale", c.question.scale)


# ---- block-sparse attention -------------------------------------------------------------------


class Visit(NamedTuple):
    """Rows ``first`` to ``stop`` of k up to ``last``, for a slot (-1: none), with more zeros."""

    block: int
    slot: int
    first: int
    stop: int
    last: int
    zeros: int = 0


Visits = dict[tuple[int, int, int], list[Visit]]  # by sequence, token and head of block_indices


def _visits(run: Run) -> Visits:
    q, found = run.question, {}
    indices, size = run.of("indices", np.asarray(q.block_indices)), q.block_size
    for b, (start_q, n, start_k, m) in enumerate(spans(q)):
        at = {"run": run, "question": q, "n": n, "m": m, "start_k": start_k}
        for sel in range(indices.shape[1]):
            tokens = [Head(i=i, place=i + m - n, **at) for i in range(n)]
            for t in tokens:
                t.blocks = t.of("blocks", -(-m // size))
                t.own = t.of("own block", t.place // size)
                t.named = [int(block) for block in indices[start_q + t.i, sel]]
                t.count = len(t.named)
                if q.block_counts is not None:
                    t.count = min(max(0, int(q.block_counts[start_q + t.i, sel])), t.count)
                t.count = t.of("count", t.count)
            lists = run.of("lists", [t.of("entries", entries(t)) if m else [] for t in tokens])
            for t, of_token in zip(tokens, lists, strict=True):
                visits = [_visit(t, block, slot) for block, slot in of_token]
                visits = [visit for visit in visits if visit.first < visit.stop or visit.zeros]
                found[b, start_q + t.i, sel] = t.of("visits", visits)
    return run.of("inverted", found)


def entries(t: Any, *, within: int = 99, again: bool = False) -> Any:
    """Block and slot of all that a token names and that counts; the own block has slot -1. A block
    counts once ``within`` so many entries; again: the own one though it is there already."""
    found: list[tuple[int, int]] = []
    for slot, block in enumerate(t.named[: t.count]):
        before = [other for other, _ in found[max(len(found) - within, 0) :]]
        if 0 <= block < t.blocks and block not in before:
            found.append((block, slot))
    if t.question.own and 0 <= t.own < t.blocks:
        if again or t.own not in [block for block, _ in found]:
            found.append((t.own, -1))
    return found


def _visit(t: Head, block: int, slot: int) -> Visit:
    t.block, t.slot, t.size = block, slot, t.question.block_size
    first = t.start_k + block * t.size
    cut = t.question.causal or (slot < 0 and block == t.own)
    first, stop, cut = t.of("span", (first, min(first + t.size, t.start_k + t.m), cut))
    last = t.start_k + t.place if cut else stop - 1
    return Visit(block, slot, first, stop, last, 0 if cut else t.of("zeros", 0))


def _copies(c: Head, visits: Visits) -> Head:
    """The keys that some token visits, of which slot, and how often each token sees them."""
    slots = c.question.block_indices.shape[2]
    own = [visits.get((c.b, int(row), c.sel), []) for row in c.rows]
    width = max((visit.zeros for some in own for visit in some), default=0)
    often = np.zeros((c.n, slots + 1, c.total_k + width), dtype=c.run.wide)
    for i, some in enumerate(own):
        for visit in some:
            stop = min(visit.stop, visit.last + 1)
            often[i, visit.slot, visit.first : max(stop, visit.first)] += 1
            often[i, visit.slot, c.total_k : c.total_k + visit.zeros] += 1
    seen = often.any(axis=0)
    slot, keys = np.nonzero(seen)
    slot, keys = np.where(slot == slots, -1, slot), np.where(keys >= c.total_k, ZEROS, keys)
    return Head(seen=often[:, seen], slot=slot, keys=keys)


# ---- scores and softmax -----------------------------------------------------------------------


def scores(c: Head) -> None:
    """Y, the slope and the bend of the cap, S without a mask, S."""
    c.Y = c.of("Y", c.run.step(c.run.wide.type(c.s) * (c.Q @ c.K.T)))
    cap, c.slope, c.bend = c.of("cap", capped(c.Y, c.question.softcap))
    c.bare = c.of("scores", c.of("G in S", c.G) * cap)
    with np.errstate(divide="ignore"):
        c.S = c.of("S", np.where(c.seen > 0, c.bare + np.log(c.seen), -np.inf))


def capped(Y: Array, softcap: float | None) -> tuple[Array, Any, Any]:
    """The scores, and how they change with Y, once and twice."""
    if softcap is None:
        return Y, 1.0, 0.0
    T = np.tanh(Y / softcap)
    return softcap * T, 1 - T**2, -2 * T * (1 - T**2) / softcap


def tangents(c: Head) -> None:
    c.tY = c.run.wide.type(c.s) * (c.tQ @ c.K.T + c.Q @ c.tK.T)
    c.E = c.of("E", c.of("G in E", c.G) * c.slope * c.tY + c.tG * c.Y)


def finite(x: Array) -> Array:
    return np.where(np.isneginf(x), x.dtype.type(0), x)


def tiles(size: int, tile: int) -> list[slice]:
    return [slice(first, min(first + tile, size)) for first in range(0, size, tile)]


def online(c: Head, rows: slice, moved: bool) -> tuple[Array, dict[str, Array]]:
    """The row maximum and the sums over all keys of a tile of queries, tile by tile of keys."""
    k, run, size = c.kernel, c.run, rows.stop - rows.start
    loop = tiles(len(c.keys), k.tile_n)
    loop = [keys for keys in loop if not k.skips_masked or c.seen[rows, keys].any()]
    loop = loop[::-1] if k.order == "descending" else loop
    if k.order == "shuffled":
        loop = [loop[place] for place in run.chance.permutation(len(loop))]
    top = np.full((size, 1), -np.inf, run.wide)
    one, wide = np.zeros((size, 1), run.wide), np.zeros((size, c.V.shape[1]), run.wide)
    sums = {"row_sum": one, "out": wide} | ({"e": one, "tout": wide} if moved else {})
    if k.order == "merged" and loop:
        states = [_added(c, (rows, keys), (top, sums), moved) for keys in loop]
        return reduce(_merged, states)
    if k.two_pass and loop:
        top = c.S[rows].max(axis=1, keepdims=True)
    c.loop = loop
    for c.place, keys in enumerate(loop):
        top, sums = _added(c, (rows, keys), (top, sums), moved)
    return top, sums


def _added(c: Head, here: tuple[slice, slice], state: Any, moved: bool) -> Any:
    """The state of the sums with one more tile of keys in them."""
    k, run, (top, sums), (_, keys) = c.kernel, c.run, state, here
    S = c.S[here]
    new = np.maximum(top, S.max(axis=1, keepdims=True))
    shift = new if "max" in k.unguarded else finite(new)
    if not k.subtracts_max:
        top = new = shift = np.zeros_like(new)
    c.factor = np.where(np.isneginf(top) & ~np.isneginf(shift), 1, run.exp(top - shift))
    P, c.here = run.step(run.exp(S - shift)), here
    kept = run.operand(c.of("P of out", P))
    parts = {"row_sum": P.sum(axis=1, keepdims=True), "out": kept @ c.of("V tile", c.V[keys])}
    if moved:
        PE = P * c.E[here]
        parts["e"] = PE.sum(axis=1, keepdims=True)
        parts["tout"] = run.operand(PE) @ c.V[keys] + c.of("P tV", kept @ c.tV[keys])
    c.found = {}
    for name, c.part in parts.items():
        c.old = sums[name]
        c.found[name] = c.of(f"sum {name}", c.old * c.factor + c.part)
    return new, c.found


def _merged(one: Any, other: Any) -> Any:
    """The sums over the keys of both."""
    top = np.maximum(one[0], other[0])
    a, b = (np.exp(state[0] - finite(top)) for state in (one, other))
    return top, {name: a * x + b * other[1][name] for name, x in one[1].items()}


def attend(c: Head, moved: bool = False) -> None:
    """L and O, with ``moved`` their tangents too, of all tiles of queries."""
    states = [online(c, rows, moved) for rows in tiles(len(c.rows), c.kernel.tile_m)]
    c.top = np.concatenate([top for top, _ in states])
    sums = {name: np.concatenate([found[name] for _, found in states]) for name in states[0][1]}
    total = sums["row_sum"]
    c.L = c.bare_L = c.top + np.log(total)
    divisor = total if "sum" in c.kernel.unguarded else np.where(total == 0, 1, total)
    c.O = c.bare_O = sums["out"] / divisor
    if c.sink is not None:
        c.L = np.logaddexp(c.bare_L, c.sink)
        divisor = divisor * np.exp(c.L - c.bare_L)
        c.O = np.where(total == 0, 0, sums["out"] / divisor)
    c.L, c.O = c.of("softmax", (c.L, c.O))
    if moved:
        c.e = np.where(total == 0, 0, sums["e"] / divisor)
        c.tO = np.where(total == 0, 0, sums["tout"] / divisor)
        c.e = c.e if c.sink is None else c.e + np.exp(c.sink - c.L) * c.tsink
        c.tO = c.tO - c.of("e in tout", c.e) * c.O


# ---- stages -----------------------------------------------------------------------------------


def forward(run: Run, window: tuple[int, int] | None = None, moved: bool = False) -> Answers:
    q = run.question
    run.arrays = run.of("read", run.arrays)
    found = {"out": np.zeros((*q.q.shape[:2], q.v.shape[2]), run.wide)}
    found["lse"] = np.full(q.q.shape[1::-1], -np.inf, run.wide)
    found |= {"tout": found["out"].copy(), "tlse": np.zeros_like(found["lse"])} if moved else {}
    for c in heads(run, window):
        scores(c)
        if moved:
            tangents(c)
        attend(c, moved)
        found["out"][c.rows, c.h], found["lse"][c.h, c.rows] = c.O, c.L[:, 0]
        if moved:
            found["tout"][c.rows, c.h] = c.tO
            found["tlse"][c.h, c.rows] = c.of("e in tlse", c.e)[:, 0]
    if q.sliding is not None and window is None and not moved:
        near = forward(Run(q, Kernel()), run.of("sliding", q.sliding))
        found |= {f"sliding {name}": x for name, x in near.items()}
    return found


def jvp(run: Run) -> Answers:
    found = forward(run, moved=True)
    return {name if name[0] == "t" else f"jvp {name}": x for name, x in found.items()}


def weights(c: Head) -> None:
    """P out of lse, P0 of the sink, and D."""
    c.L = c.of("L", c.row("lse"))
    L = c.L if "lse" in c.kernel.unguarded else np.where(np.isneginf(c.L), np.inf, c.L)
    P = c.run.exp(c.S - L) if c.kernel.subtracts_max else np.exp(c.S) / np.exp(L)
    c.P = c.of("P", c.run.step(P))
    c.P0 = 0.0 if c.sink is None else np.exp(c.sink - c.row("lse"))
    c.D, c.dL = c.of("D", c.row("delta")), c.row("dlse")


def gradient_of_scores(c: Head) -> None:
    c.dP = c.of("dP", c.run.step(c.dO @ c.V.T))
    c.Z = c.dP - c.D
    c.dS = c.of("dS", c.P * c.Z)
    c.back = c.of("G in dY", c.G) * c.slope
    c.dY = c.run.operand(c.of("dY", c.back * c.dS))
    c.often = c.of("often", c.run.wide.type(1))


def product(c: Head, name: str, A: Array, B: Array) -> Array:
    """The sum of a gradient over its tiles: A B for dq and gq, A^T B for the others."""
    A, of_q, hook = A * c.often, name in ("dq", "gq"), f"sum {name}"
    if hook not in c.kernel.hooks and np.isfinite(A).all():  # NaN stays in its tiles
        return A @ B if of_q else A.T @ B
    found = np.zeros((A.shape[0 if of_q else 1], B.shape[1]), A.dtype)
    for keys in tiles(len(c.keys), c.kernel.tile_n):
        for rows in tiles(len(c.rows), c.kernel.tile_m):
            if c.seen[rows, keys].any() or not c.kernel.skips_masked:
                A_here = A[rows, keys] if of_q else A[rows, keys].T
                at, other = (rows, keys) if of_q else (keys, rows)
                found[at] = c.of(hook, found[at] + A_here @ B[other])
    return found


class Sums:
    """Gradients, to which heads add theirs."""

    def __init__(self, run: Run, prefix: str) -> None:
        q, self.prefix, self.wide = run.question, prefix, run.wide
        self.found = {f"{prefix}{x}": np.zeros(getattr(q, x).shape, run.wide) for x in "qkv"}
        if q.block_scale is not None:
            self.found[f"{prefix}block_scale"] = np.zeros(q.block_scale.shape, run.wide)
        if q.sinks is not None:
            self.found[f"{prefix}sinks"] = np.zeros(q.num_heads_q, run.wide)

    def add(self, c: Head, dQ: Array, dK: Array, dV: Array, dG: Array, dsink: Any) -> None:
        stored = (c.rows != ZEROS) & (np.arange(len(c.rows)) < c.n)
        self.found[f"{self.prefix}q"][c.rows[stored], c.h] = dQ[stored]
        keys, g = c.of("stored keys", c.keys), c.of("stored kv head", c.g)
        there = keys != ZEROS
        for name, x in (("k", dK), ("v", dV)):
            np.add.at(self.found[f"{self.prefix}{name}"][:, g], keys[there], x[there])
        if c.question.block_scale is not None:
            of_gate = self.found[f"{self.prefix}block_scale"]
            for slot in range(of_gate.shape[2]):
                of_gate[c.rows, c.sel, slot] += dG[:, c.slot == slot].sum(axis=1)
        if c.question.sinks is not None:
            self.found[f"{self.prefix}sinks"][c.h] += np.sum(dsink)


def _given(run: Run, out: Array, lse: Array, own: tuple[str, ...]) -> None:
    """out, lse and delta among the arrays."""
    if own:
        found = forward(Run(run.question, run.kernel))
        out = found["out"] if "out" in own else out
        lse = found["lse"] if "lse" in own else lse
    run.arrays |= {"out": out.astype(run.wide), "lse": lse.astype(run.wide)}
    OdO = (run.arrays["dout"] * run.arrays["out"]).sum(axis=2).T
    run.arrays["delta"] = OdO - run.arrays["dlse"]
    run.arrays = run.of("read", run.arrays)


def backward(run: Run, out: Array, lse: Array) -> Answers:
    _given(run, out, lse, run.kernel.own)
    sums = Sums(run, "d")
    for c in heads(run):
        scores(c)
        weights(c)
        gradient_of_scores(c)
        s = run.wide.type(c.s)
        dQ = s * product(c, "dq", c.of("dS of dq", c.dY), c.of("K of dq", c.K))
        dK = s * product(c, "dk", c.of("dS of dk", c.dY), c.Q)
        dV = product(c, "dv", run.operand(c.of("P of dv", c.P)), c.dO)
        dsink = -(c.P0 * c.of("D of dsinks", c.D))
        sums.add(c, c.of("dQ", dQ), c.of("dK", dK), dV, c.of("dG", c.dS * c.Y), dsink)
    return {"delta": run.arrays["delta"]} | sums.found


def double_backward(run: Run, out: Array, lse: Array) -> Answers:
    """By two passes over the keys: the first for tO and e."""
    _given(run, out, lse, ("out", "lse") if run.kernel.own_beyond else ())
    found = {"ddout": np.zeros(out.shape, run.wide), "ddlse": np.zeros(lse.shape, run.wide)}
    run.arrays["W"] = np.zeros(lse.shape, run.wide)
    kept = []
    for c in heads(run):
        scores(c)
        tangents(c)
        weights(c)
        P, c.O = c.of("P in ddout", c.P), c.read("out", c.h)
        c.e = (P * c.E).sum(axis=1, keepdims=True) + c.P0 * c.tsink
        c.tO = run.operand(P * c.E) @ c.V + c.of("P tV", run.operand(P) @ c.tV)
        c.tO = c.tO - c.of("e in tout", c.e) * c.O
        found["ddout"][c.rows, c.h] = c.tO
        found["ddlse"][c.h, c.rows] = c.of("e in tlse", c.e)[:, 0]
        W = c.of("W", (c.dO * c.tO).sum(axis=1, keepdims=True))
        run.arrays["W"][c.h, c.rows] = W[:, 0]
        kept.append(c)
    run.arrays = run.of("rows of second", run.arrays)
    sums = Sums(run, "g")
    for c in kept:
        c.D, c.w = c.row("delta"), c.row("W")
        gradient_of_scores(c)
        c.tP = c.P * (c.E - c.of("e in dS", c.e))
        c.tZ = c.of("tdP", c.dO @ c.tV.T) - c.w
        c.tdS = c.of("tP Z", c.tP * c.Z) + c.of("P tZ", c.P * c.tZ)
        tdY = run.operand(c.back * c.tdS + c.tG * c.dS + c.bend * c.tY * c.dS)
        s = run.wide.type(c.s)
        gQ = s * product(c, "gq", c.of("tdS of gq", tdY), c.of("K of gq", c.K))
        gQ = gQ + c.of("dS tK", s * product(c, "gq", c.dY, c.of("tK of gq", c.tK)))
        gK = c.of("tdS Q", s * product(c, "gk", tdY, c.Q))
        gK = gK + c.of("dS tQ", s * product(c, "gk", c.dY, c.tQ))
        tP = c.of("tP of gv", c.P * (c.E - c.of("e in gv", c.e)))
        gV = product(c, "gv", run.operand(tP), c.of("dO of gv", c.dO))
        dsink = -(c.P0 * ((c.tsink - c.e) * c.D + c.w))
        sums.add(c, gQ, gK, gV, c.of("dG", c.tdS * c.Y + c.dS * c.tY), dsink)
    return found | sums.found


# ---- answers ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planted:
    """A bug of class ``bug``, in ``stages``. ``also``: classes that are the same function. gives:
    the stages that are answered; () for all that the question has inputs for. otherwise: of the
    other stages."""

    bug: str
    variant: str
    stages: tuple[str, ...]
    kernel: Kernel
    needs: Any = None
    also: tuple[str, ...] = ()
    gives: tuple[str, ...] = ()
    otherwise: Kernel = Kernel()

    def at(self, stage: str) -> Kernel:
        return self.kernel if stage in self.stages else self.otherwise


RIGHT = Planted("", "", (), Kernel())


def answers(planted: Planted | None, question: Question, chance: int = 0) -> Answers:
    """What an implementation with this bug, or a right one, gives in the stages of the question.
    Backward passes work with the question's out and lse, or with those that the implementation's
    own forward gave. ``chance`` numbers the calls: only a race gives other results in another
    one."""
    planted = planted or RIGHT
    first = planted.at("forward")
    with np.errstate(all="ignore"):
        found = _stage(question, "forward", first, None, chance)
        own, passed = found, question.passed
        if passed is None:
            if first.keeps_right:
                own = _stage(question, "forward", Kernel(), None, chance)
            passed = own["out"], own["lse"]
        gives = [stage for stage in question.stages if stage in (planted.gives or STAGES)]
        found = found if "forward" in gives else {}
        for stage in gives:
            if stage != "forward":
                found |= _stage(question, stage, planted.at(stage), passed, chance)
    return found


def heads_of(question: Question) -> dict[tuple[int, int], Head]:
    """By sequence and head: all steps, from S to what the last backward pass makes of it."""
    found: dict[tuple[int, int], Head] = {}

    def keep(c: Head, dG: Any) -> Any:
        found[c.b, c.h] = c
        return dG

    answers(Planted("", "", (*STAGES,), Kernel({"dG": keep})), question)
    return found


def _stage(question: Question, stage: str, kernel: Kernel, passed: Any, chance: int) -> Answers:
    """One stage's results as they are stored."""
    hooks, asked = kernel.hooks, question
    if "question" in hooks:
        asked = replace(hooks["question"](None, question), out=None, lse=None)
        right = _stage(asked, "forward", Kernel(), None, chance) if passed else {}
        passed = passed and (right["out"], right["lse"])
    run = Run(asked, kernel, chance)
    of_stage = {"forward": forward, "jvp": jvp, "backward": backward, "second": double_backward}
    computed = of_stage[stage](run, *(passed if stage in ("backward", "second") else ()))
    if kernel.only:
        right = _stage(question, stage, replace(kernel, hooks={}, only=()), passed, chance)
        computed = {name: computed[name] if name in kernel.only else x for name, x in right.items()}
    for name in computed:
        run.name = name
        computed[name] = run.of(name, computed[name])
    return {
        name: x.astype(run.wide if name in BY_ROW or x.ndim < 3 or "scale" in name else asked.dtype)
        for name, x in run.of("results", computed).items()
    }
