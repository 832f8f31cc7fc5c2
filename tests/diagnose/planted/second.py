"""Second derivatives and forward mode by loops over tiles, and the same with bugs planted in them.

Long by the list of bugs. Separate from rawattn.reference, and from what rawattn-check matches
answers with. Every formula
stands here once, as kernels run it; a bug is a factor in front of one of its terms (``Terms``).
With s = softmax_scale, a direction A, B, C of q, k, v, and D = rowsum(dO o O) - dL:

    E = s (A K^T + Q B^T)    e = rowsum(P o E)    ddO = (P o E) V + P C - e O
    P' = P o (E - e)         Z = dO V^T - D       Z' = dO C^T - W    W = rowsum(dO o ddO)
    dS = P o Z               dS' = P' o Z + P o Z'
    gQ = s (dS' K + dS B)    gK = s (dS'^T Q + dS^T A)               gV = P'^T dO
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import log2
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import ml_dtypes
import numpy as np

from rawattn.check.diagnose.engine.question import Answers, Question

DTYPES = (np.dtype("float64"), np.dtype("float32"), np.dtype(ml_dtypes.bfloat16))
TILE = (16, 32)  # queries, keys
SECOND, JVP = ("second",), ("jvp",)
LOG2_E = log2(np.e)

Array = np.ndarray[Any, Any]
KeyTiles = list[tuple[slice, Array]]  # rows of k, and which queries of a tile see which of them


@dataclass(frozen=True)
class Terms:
    """What stands in front of each term: 1 is right, 0 leaves the term out.

    ``*_power`` are powers of s. w_of_right: W comes from the right ddO whatever ddout is.
    over_all: P is a softmax over all keys where it has no mask. only_head: the one head of a group
    that gk and gv get. unread: directions that are not read, by the names that ``Question`` has.
    """

    tangent: float = 1.0  # E
    tangent_power: int = 1
    gq_power: int = 1
    gk_power: int = 1
    ddv_in_ddout: float = 1.0
    ddv_in_dp: float = 1.0
    e_in_ddout: float = 1.0
    e_in_ddlse: float = 1.0
    e_in_ds: float = 1.0
    e_in_gv: float = 1.0
    p_in_ds: float = 1.0  # P' o Z
    z_in_ds: float = 1.0  # P o Z'
    p_in_gv: float = 1.0
    w: float = 1.0
    w_of_right: bool = False
    ddk_in_gq: float = 1.0
    ddq_in_gk: float = 1.0
    dlse: float = 1.0
    mask_in_ddout: bool = True
    mask_in_rest: bool = True
    over_all: bool = False
    only_head: int | None = None
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class Planted:
    """A bug of class ``bug``, in ``stages``. ``also``: classes that are the same function.

    change: what is not right, as the implementation has it. needs: what a problem has to have for
    the bug to show, as keywords of the function that draws problems.
    """

    bug: str
    variant: str
    stages: tuple[str, ...]
    change: Any
    needs: Mapping[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()


def _planted(bug: str, stages: tuple[str, ...], *variants: tuple[Any, ...]) -> list[Planted]:
    """``variants``: what it is in words, the terms, and whatever else there is to a Planted."""
    return [
        Planted(bug, variant, stages, Terms(**terms), *more) for variant, terms, *more in variants
    ]


_NO_E = {"e_in_ddout": 0.0, "e_in_ds": 0.0, "e_in_gv": 0.0}
_NO_MASK = {"mask_in_ddout": False, "mask_in_rest": False}
_GROUPED, _DLSE, _MASKED = {"grouped": True}, {"dlse": True}, {"masked": True}

PLANTED = (
    *_planted(
        "second-frozen-p",
        SECOND,
        ("dS' = 0", {"p_in_ds": 0.0, "z_in_ds": 0.0}),
        ("P' = 0 in dS'", {"p_in_ds": 0.0}),
        ("P' = 0 in dS' and in gv", {"p_in_ds": 0.0, "p_in_gv": 0.0}),
        ("P' = 0 everywhere, E = 0", {"tangent": 0.0}),
    ),
    *_planted(
        "second-frozen-delta",
        SECOND,
        ("D detached", _NO_E | {"w_of_right": True}),
        ("out detached", {"e_in_ds": 0.0, "e_in_gv": 0.0}, {}, ("second-e-omitted",)),
        ("W = 0, no e in ddout", {"w": 0.0, "e_in_ddout": 0.0}),
    ),
    *_planted("second-w-omitted", SECOND, ("W = 0", {"w": 0.0}, {}, ("second-frozen-delta",))),
    *_planted(
        "second-e-omitted",
        SECOND,
        ("in ddout and W", {"e_in_ddout": 0.0}),
        ("in ddout", {"e_in_ddout": 0.0, "w_of_right": True}),
        ("in dS'", {"e_in_ds": 0.0}),
        ("in gv", {"e_in_gv": 0.0}),
        ("all but ddlse", _NO_E),
        ("everywhere", _NO_E | {"e_in_ddlse": 0.0}),
    ),
    *_planted(
        "second-scale",
        SECOND,
        ("E without s", {"tangent_power": 0}),
        ("E with s twice", {"tangent_power": 2}),
        ("E in units of base 2", {"tangent": LOG2_E}),
        ("gq without s", {"gq_power": 0}),
        ("gk without s", {"gk_power": 0}),
        ("gq and gk without s", {"gq_power": 0, "gk_power": 0}),
        ("gq and gk with s twice", {"gq_power": 2, "gk_power": 2}),
    ),
    *_planted(
        "second-direct-term-dropped",
        SECOND,
        ("dS ddk of gq", {"ddk_in_gq": 0.0}),
        ("dS^T ddq of gk", {"ddq_in_gk": 0.0}),
        ("both", {"ddk_in_gq": 0.0, "ddq_in_gk": 0.0}),
    ),
    *_planted(
        "second-group-not-summed",
        SECOND,
        ("last head", {"only_head": -1}, _GROUPED),
        ("first head", {"only_head": 0}, _GROUPED),
    ),
    *_planted(
        "second-lse-gradient-dropped",
        SECOND,
        ("D without dlse", {"dlse": 0.0}, _DLSE),
        ("ddlse = 0", {"e_in_ddlse": 0.0}, _DLSE),
        ("both", {"dlse": 0.0, "e_in_ddlse": 0.0}, _DLSE),
    ),
    *_planted(
        "second-value-term-dropped",
        SECOND,
        ("P ddv of ddout and W", {"ddv_in_ddout": 0.0}),
        ("P ddv of ddout", {"ddv_in_ddout": 0.0, "w_of_right": True}),
        ("dO ddv^T of Z'", {"ddv_in_dp": 0.0}),
        ("all of ddv", {"ddv_in_ddout": 0.0, "ddv_in_dp": 0.0}),
    ),
    *_planted(
        "second-mask-missing",
        SECOND,
        ("second pass, exp(S - L)", {"mask_in_rest": False}, _MASKED),
        ("second pass, softmax over all", {"mask_in_rest": False, "over_all": True}, _MASKED),
        ("both passes, exp(S - L)", _NO_MASK, _MASKED),
        ("both passes, softmax over all", _NO_MASK | {"over_all": True}, _MASKED),
    ),
    *_planted("jvp-e-omitted", JVP, ("in tout", {"e_in_ddout": 0.0})),
    *_planted("jvp-value-term-dropped", JVP, ("P tv", {"ddv_in_ddout": 0.0})),
    *_planted(
        "jvp-scale",
        JVP,
        ("E without s", {"tangent_power": 0}),
        ("E with s twice", {"tangent_power": 2}),
        ("E in units of base 2", {"tangent": LOG2_E}),
    ),
    *_planted("jvp-lse-missing", JVP, ("tlse = 0", {"e_in_ddlse": 0.0})),
    *_planted(
        "direction-ignored",
        SECOND,
        ("ddq", {"unread": ("tq",)}),
        ("ddk", {"unread": ("tk",)}),
        ("ddv", {"unread": ("tv",)}, {}, ("second-value-term-dropped",)),
        ("all but ddv", {"unread": ("tq", "tk")}),
        ("all but ddk", {"unread": ("tq", "tv")}),
        ("all", {"unread": ("tq", "tk", "tv")}),
    ),
    *_planted(
        "direction-ignored",
        JVP,
        ("tq", {"unread": ("tq",)}, {}, ("second-frozen-p",)),
        ("tk", {"unread": ("tk",)}, {}, ("second-frozen-p",)),
        ("tv", {"unread": ("tv",)}, {}, ("jvp-value-term-dropped",)),
        ("all but tv", {"unread": ("tq", "tk")}, {}, ("second-frozen-p",)),
        ("all but tq", {"unread": ("tk", "tv")}),
    ),
    *_planted(
        "direction-ignored",
        SECOND + JVP,
        ("of v", {"unread": ("tv",)}),
        ("of k", {"unread": ("tk",)}),
    ),
)


class Arithmetic:
    """How a kernel computes for arrays of ``dtype``: sums in ``wide``, operands of products not."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self.wide = np.dtype("float64" if dtype == np.float64 else "float32")

    def load(self, array: Array | None, like: Array) -> Array:
        return np.zeros(like.shape, self.wide) if array is None else array.astype(self.wide)

    def narrow(self, array: Array) -> Array:
        return array.astype(self.dtype).astype(self.wide)

    def zeros(self, *shape: int) -> Array:
        return np.zeros(shape, self.wide)

    def store(self, results: Mapping[str, Array]) -> Answers:
        """What it writes: numbers of a row, (num_heads_q, total_q), stay as wide as they are."""
        return {
            name: array if array.ndim == 2 else array.astype(self.dtype)
            for name, array in results.items()
        }


def answers(
    planted: Planted | None, question: Question, *, tile: tuple[int, int] = TILE
) -> Answers:
    """What ``double_backward`` and ``jvp`` give, as far as ``question`` has what they need."""
    computed: Answers = {}
    for stage, compute in (("second", double_backward), ("jvp", jvp)):
        if stage in question.stages:
            wrong = planted is not None and stage in planted.stages
            computed |= compute(question, planted.change if wrong else Terms(), tile)
    return computed


def jvp(question: Question, terms: Terms, tile: tuple[int, int] = TILE) -> Answers:
    """By an online softmax: the tangents wait, as out does, for the last key."""
    x = loaded(question, terms.unread)
    out, tout = (x.number.zeros(*x.q.shape[:2], x.v.shape[2]) for _ in range(2))
    lse, tlse = (x.number.zeros(*x.q.shape[1::-1]) for _ in range(2))
    lse[:] = -np.inf
    for head, rows, key_tiles in query_tiles(question, tile):
        kv, size = head // question.group, rows.stop - rows.start
        row_max, row_sum, trow_sum = x.number.zeros(3, size)
        row_max[:] = -np.inf
        acc, tacc = x.number.zeros(2, size, x.v.shape[2])
        for keys, mask in key_tiles:
            S, E = _scores(x, terms, head, rows, keys)
            S = np.where(mask, S, -np.inf)
            new_max = np.maximum(row_max, S.max(axis=1))
            shift = np.where(np.isneginf(new_max), 0.0, new_max)
            P, rescale, row_max = np.exp(S - shift[:, None]), np.exp(row_max - shift), new_max
            row_sum = row_sum * rescale + P.sum(axis=1)
            trow_sum = trow_sum * rescale + (P * E).sum(axis=1)
            P, PE = x.number.narrow(P), x.number.narrow(P * E)
            acc = acc * rescale[:, None] + P @ x.v[keys, kv]
            moved = PE @ x.v[keys, kv] + terms.ddv_in_ddout * (P @ x.tv[keys, kv])
            tacc = tacc * rescale[:, None] + moved
        row_sum[np.isneginf(row_max)] = 1.0
        e = trow_sum / row_sum
        out[rows, head] = acc / row_sum[:, None]
        tout[rows, head] = tacc / row_sum[:, None]
        tout[rows, head] -= terms.e_in_ddout * e[:, None] * out[rows, head]
        lse[head, rows] = row_max + np.log(row_sum)
        tlse[head, rows] = terms.e_in_ddlse * e
    return x.number.store({"jvp out": out, "tout": tout, "jvp lse": lse, "tlse": tlse})


def double_backward(question: Question, terms: Terms, tile: tuple[int, int] = TILE) -> Answers:
    """By two passes over the keys of a tile of queries: the first for ddO and e."""
    x, s = loaded(question, terms.unread), question.scale
    narrow = x.number.narrow
    x.out, x.lse = (a.astype(x.number.wide) for a in given(question, tile))
    everything = replace(question, causal=False, window=(-1, -1), out=None, lse=None)
    x.lse_of_all = given(everything, tile)[1] if terms.over_all else x.lse
    ddout, ddlse, gq, gk, gv = map(np.zeros_like, (x.out, x.lse, x.q, x.k, x.v))
    for head, rows, key_tiles in query_tiles(question, tile):
        kv, group = head // question.group, question.group
        Q, ddQ, dO = x.q[rows, head], x.tq[rows, head], x.dout[rows, head]
        ddO, e = _first_pass(x, terms, head, rows, key_tiles)
        ddout[rows, head], ddlse[head, rows] = ddO, terms.e_in_ddlse * e
        followed = _first_pass(x, Terms(), head, rows, key_tiles)[0] if terms.w_of_right else ddO
        W = terms.w * (dO * followed).sum(axis=1)
        D = (dO * x.out[rows, head]).sum(axis=1) - terms.dlse * x.dlse[head, rows]
        for keys, mask in key_tiles:
            K, ddK, V, ddV = (a[keys, kv] for a in (x.k, x.tk, x.v, x.tv))
            P, E = _weights(x, terms, head, rows, keys, mask, masked=terms.mask_in_rest)
            Z = dO @ V.T - D[:, None]
            tZ = terms.ddv_in_dp * (dO @ ddV.T) - W[:, None]
            tP = P * (E - terms.e_in_ds * e[:, None])
            dS, tdS = narrow(P * Z), narrow(terms.p_in_ds * tP * Z + terms.z_in_ds * P * tZ)
            gQ = tdS @ K + terms.ddk_in_gq * (dS @ ddK)
            gq[rows, head] += s**terms.gq_power * gQ
            if terms.only_head is None or head % group == terms.only_head % group:
                gK = tdS.T @ Q + terms.ddq_in_gk * (dS.T @ ddQ)
                gk[keys, kv] += s**terms.gk_power * gK
                tP = terms.p_in_gv * P * (E - terms.e_in_gv * e[:, None])
                gv[keys, kv] += narrow(tP).T @ dO
    return x.number.store({"ddout": ddout, "ddlse": ddlse, "gq": gq, "gk": gk, "gv": gv})


def given(question: Question, tile: tuple[int, int] = TILE) -> tuple[Array, Array]:
    """out and lse that a backward pass of ``question`` is given, if need be those of its own."""
    if question.out is not None and question.lse is not None:
        return question.out, question.lse
    computed = jvp(replace(question, tq=None, tk=None, tv=None), Terms(), tile)
    return computed["jvp out"], computed["jvp lse"]


def query_tiles(question: Question, tile: tuple[int, int]) -> Iterator[tuple[int, slice, KeyTiles]]:
    """Every head with every tile of queries: the head, rows of q, and all keys of the sequence."""
    left, right = question.mask_window
    for b, (seqlen_q, seqlen_k) in enumerate(
        zip(question.lengths_q, question.lengths_k, strict=True)
    ):
        start_q, start_k = int(question.cu_seqlens_q[b]), int(question.cu_seqlens_k[b])
        for first in range(0, seqlen_q, tile[0]):
            i = np.arange(first, min(first + tile[0], seqlen_q))[:, None]
            key_tiles = []
            for first_k in range(0, seqlen_k, tile[1]):
                j = np.arange(first_k, min(first_k + tile[1], seqlen_k))
                distance = j - (i + seqlen_k - seqlen_q)
                mask = (left < 0) | (distance >= -left)
                mask = mask & ((right < 0) | (distance <= right))
                key_tiles.append((slice(start_k + j[0], start_k + j[-1] + 1), mask))
            rows = slice(start_q + first, start_q + first + len(i))
            for head in range(question.num_heads_q):
                yield head, rows, key_tiles


def loaded(question: Question, unread: tuple[str, ...] = ()) -> SimpleNamespace:
    """The arrays of ``question`` in a kernel's arithmetic, and zeros where there are none.

    Of those that are ``unread`` there are none.
    """
    number, q, k, v = Arithmetic(question.dtype), question.q, question.k, question.v
    like = {"q": q, "k": k, "v": v, "tq": q, "tk": k, "tv": v}
    like["dout"] = np.zeros((*q.shape[:2], v.shape[2]))
    like["dlse"] = np.zeros(q.shape[1::-1])
    found = {name: None if name in unread else getattr(question, name) for name in like}
    arrays = {name: number.load(found[name], a) for name, a in like.items()}
    return SimpleNamespace(number=number, scale=question.scale, group=question.group, **arrays)


def _scores(
    x: SimpleNamespace, terms: Terms, head: int, rows: slice, keys: slice
) -> tuple[Array, Array]:
    """S and E."""
    K, tK = (a[keys, head // x.group] for a in (x.k, x.tk))
    Q, tQ = (a[rows, head] for a in (x.q, x.tq))
    moved = terms.tangent * x.scale**terms.tangent_power * (tQ @ K.T + Q @ tK.T)
    return x.scale * (Q @ K.T), moved


def _weights(
    x: SimpleNamespace,
    terms: Terms,
    head: int,
    rows: slice,
    keys: slice,
    mask: Array,
    *,
    masked: bool,
) -> tuple[Array, Array]:
    """P and E."""
    S, E = _scores(x, terms, head, rows, keys)
    L = (x.lse if masked else x.lse_of_all)[head, rows, None]
    return np.where((mask | (not masked)) & (L > -np.inf), np.exp(S - L), 0.0), E


def _first_pass(
    x: SimpleNamespace, terms: Terms, head: int, rows: slice, key_tiles: KeyTiles
) -> tuple[Array, Array]:
    """ddO and e."""
    out, kv = x.out[rows, head], head // x.group
    acc, e = np.zeros_like(out), np.zeros_like(out[:, 0])
    for keys, mask in key_tiles:
        P, E = _weights(x, terms, head, rows, keys, mask, masked=terms.mask_in_ddout)
        acc += x.number.narrow(P * E) @ x.v[keys, kv]
        acc += terms.ddv_in_ddout * (x.number.narrow(P) @ x.tv[keys, kv])
        e += (P * E).sum(axis=1)
    return acc - terms.e_in_ddout * e[:, None] * out, e


def problems(planted: Planted, count: int, seed: int) -> Iterator[Question]:
    """Random problems on which ``planted`` shows."""
    return showing(planted, count, seed, draw, answers, given)


def showing(
    planted: Any,
    count: int,
    seed: int,
    draw: Callable[..., Question],
    answers: Callable[[Any, Question], Answers],
    given: Callable[[Question], tuple[Array, Array]],
) -> Iterator[Question]:
    """``count`` random problems with what ``planted`` needs, drawn until its answers differ.

    The dtypes come in turn, and every other problem has the right out and lse as given.
    """
    rng = np.random.default_rng([seed, crc32(f"{planted.bug} {planted.variant}".encode())])
    shown = 0
    while shown < count:
        question = draw(rng, DTYPES[shown % len(DTYPES)], **planted.needs)
        if shown % 2:
            out, lse = given(question)
            question = replace(question, out=out, lse=lse)
        if differ(answers(planted, question), answers(None, question)):
            shown += 1
            yield question


def differ(wrong: Answers, right: Answers) -> bool:
    """Is there an error of a tenth of the size of what is right, or a number for none?"""
    for name, there in right.items():
        a, b = (np.where(np.isfinite(x), x, 0.0).astype(np.float64) for x in (wrong[name], there))
        finite = np.array_equal(np.isfinite(wrong[name]), np.isfinite(there))
        if not finite or abs(a - b).max() > 0.1 * np.sqrt((b**2).mean()):
            return True
    return False


def draw(
    rng: np.random.Generator,
    dtype: np.dtype[Any],
    *,
    grouped: bool = False,
    dlse: bool = False,
    masked: bool = False,
) -> Question:
    """A random problem of second order. masked: no query is without a key then."""
    window = (-1, -1)
    causal = bool(rng.random() < 0.5)
    if rng.random() < 0.3 or (masked and not causal):
        window = (int(rng.integers(2, 30)), int(rng.integers(0, 20)))
    packed = draw_packed(rng, dtype, grouped=grouped, dlse=dlse, all_see=masked)
    direction = draw_direction(rng, dtype, packed)
    return Question(**packed, **direction, causal=causal, window=window)


def draw_direction(
    rng: np.random.Generator, dtype: np.dtype[Any], packed: Mapping[str, Any]
) -> dict[str, Array]:
    """A direction of q, k and v, or now and then of two of them."""
    moved = ("q", "k", "v")
    gone = moved[rng.integers(3)] if rng.random() < 0.15 else None
    return {f"t{n}": normal(rng, dtype, packed[n].shape) for n in moved if n != gone}


def draw_packed(
    rng: np.random.Generator,
    dtype: np.dtype[Any],
    *,
    grouped: bool = False,
    dlse: bool = False,
    all_see: bool = False,
    least: int = 1,
    most: int = 6,
) -> dict[str, Any]:
    """Arrays of 2 to 4 random sequences. all_see: none has more queries than keys. least, most: of
    kv heads and, but for that, of query heads."""
    lengths_q = rng.integers(1, 71, rng.integers(2, 5))
    lengths_q[rng.integers(len(lengths_q))] = rng.integers(20, 71)
    lengths_k = lengths_q.copy()
    if rng.random() < 0.3:
        lengths_k = rng.integers(1, 71, len(lengths_q))
        lengths_k[0] = rng.integers(40, 71)
    if all_see:
        lengths_k = np.maximum(lengths_k, lengths_q)
    group = int(rng.choice([2, 4] if grouped else [1, 2, 4]))
    heads = int(rng.integers(least, max(least, most // group) + 1))
    d = int(rng.choice([16, 24, 32, 40, 48]))
    dv = int(rng.choice([16, 32, 48])) if rng.random() < 0.3 else d
    q = (int(lengths_q.sum()), heads * group)
    k = (int(lengths_k.sum()), heads)
    rows = np.float64 if dtype == np.float64 else np.float32
    return {
        "q": normal(rng, dtype, (*q, d)),
        "k": normal(rng, dtype, (*k, d)),
        "v": normal(rng, dtype, (*k, dv)),
        "dout": normal(rng, dtype, (*q, dv)),
        "dlse": normal(rng, rows, q[::-1]) if dlse or rng.random() < 0.4 else None,
        "cu_seqlens_q": np.cumsum([0, *lengths_q]).astype(np.int32),
        "cu_seqlens_k": np.cumsum([0, *lengths_k]).astype(np.int32),
        "softmax_scale": float(rng.uniform(0.5, 1.6) * d**-0.5) if rng.random() < 0.25 else None,
    }


def normal(rng: np.random.Generator, dtype: Any, shape: tuple[int, ...]) -> Array:
    return rng.standard_normal(shape).astype(dtype)
