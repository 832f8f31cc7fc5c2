"""Second derivatives and forward mode in plain loops over heads and tiles, with bugs of what they
read, and of their tiles.

Separate from rawattn.reference, and from what rawattn-check matches answers with. Formulas are
those of ``planted_second``, which has the bugs of the formulas themselves.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.question import Answers, Question
from tests.diagnose.planted import second as planted_second
from tests.diagnose.planted.second import (
    JVP,
    SECOND,
    Array,
    Planted,
    given,
    loaded,
    query_tiles,
    showing,
)

BOTH = SECOND + JVP


@dataclass(frozen=True)
class Rules:
    """What is other than right. tile: queries and keys. sums: what an online softmax does not
    rescale, "e" or "tout". backwards: from the last key. by_remainder, local, turned: directions of
    head h % num_heads_kv, at rows of the first sequence, and with heads before tokens. order: the
    directions that stand in the place of tq, tk and tv. operand: one product with another array.
    power: of softmax_scale in front of a term of gq or gk. row_term: which is read in another
    layout. skips: whether the pass over keys begins too late. product: that which reads a direction
    of another head, and which. overwritten: a gradient that every tile stores anew.
    """

    tile: tuple[int, int] = (32, 16)
    sums: str = ""
    backwards: bool = False
    by_remainder: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    turned: tuple[str, ...] = ()
    order: tuple[str, ...] = ("tq", "tk", "tv")
    operand: str = ""
    power: tuple[str, int] = ("", 0)
    row_term: tuple[str, str] = ("", "")
    skips: bool = False
    product: tuple[str, str] = ("", "")
    overwritten: str = ""


_GROUPED = {"grouped": True}


def _planted(
    bug: str,
    stages: tuple[str, ...],
    needs: dict[str, Any],
    *variants: tuple[str, dict[str, Any]],
    also: tuple[str, ...] = (),
) -> list[Planted]:
    return [
        Planted(bug, f"{name}, {' '.join(stages)}", stages, Rules(**rules), needs, also)
        for name, rules in variants
    ]


PLANTED = (
    *_planted(
        "no-rescale",
        JVP,
        {},
        ("row sum, tile of 16", {"sums": "e"}),
        ("row sum, tile of 32, from the last", {"sums": "e", "tile": (16, 32), "backwards": True}),
        ("tout, tile of 16", {"sums": "tout"}),
    ),
    *_planted(
        "gqa-head-map",
        JVP,
        _GROUPED | {"heads": 2},
        ("tk", {"by_remainder": ("tk",)}),
        ("tv", {"by_remainder": ("tv",)}),
    ),
    *_planted(
        "gqa-head-map",
        SECOND,
        _GROUPED | {"heads": 2},
        ("ddk", {"by_remainder": ("tk",)}),
        ("ddk and ddv", {"by_remainder": ("tk", "tv")}),
    ),
    *_planted(
        "gqa-head-map",
        SECOND,
        _GROUPED | {"heads": 2},
        ("ddq of the group's first head in gk", {"product": ("dS ddq", "first")}),
        ("ddq of head h // group in gk", {"product": ("dS ddq", "kv")}),
        ("ddk of head h % num_heads_kv in gq", {"product": ("dS ddk", "remainder")}),
        ("ddv of head 0 in dout ddv^T", {"product": ("dout ddv", "zero")}),
        ("q of the group's first head in gk", {"product": ("dS' q", "first")}),
    ),
    *_planted(
        "tile-overwrites",
        SECOND,
        {"whole": True},
        ("gq", {"overwritten": "gq"}),
        ("gk", {"overwritten": "gk", "tile": (16, 16)}),
    ),
    *_planted(
        "input-layout",
        BOTH,
        {},
        ("tk and tv without offset", {"local": ("tk", "tv")}),
        ("tq without offset", {"local": ("tq",)}),
    ),
    *_planted("input-layout", BOTH, {"heads": 2}, ("tk turned", {"turned": ("tk",)})),
    *_planted(
        "arguments-swapped",
        BOTH,
        {"alike": True},
        ("tk and tv", {"order": ("tq", "tv", "tk")}),
        ("tq and tk", {"order": ("tk", "tq", "tv")}),
    ),
    *_planted(
        "arguments-swapped",
        SECOND,
        {"whole": True},
        ("ddout v^T", {"operand": "ddout v^T"}),
        ("ddout for dout in gv", {"operand": "ddout in gv"}),
        ("k for ddk in gq", {"operand": "k for ddk"}),
    ),
    *_planted(
        "second-scale",
        SECOND,
        {"whole": True},
        ("dS ddk without s", {"power": ("dS ddk", 0)}),
        ("dS'^T q with s twice", {"power": ("tdS q", 2)}),
    ),
    *_planted(
        "statistics-misplaced",
        SECOND,
        {"heads": 2, "whole": True},
        ("W, heads first", {"row_term": ("W", "th")}),
        ("D, heads last", {"row_term": ("D", "ht")}),
    ),
    *_planted(
        "pairs-dropped",
        SECOND,
        {"causal": True},
        ("32 by 16", {"skips": True}),
        ("64 by 32", {"skips": True, "tile": (64, 32)}),
    ),
)


def answers(planted: Planted | None, question: Question) -> Answers:
    """What the double backward and forward mode give."""
    rules = {stage: planted.change for stage in planted.stages} if planted else {}
    second = double_backward(question, rules.get("second", Rules()))
    return second | jvp(question, rules.get("jvp", Rules()))


def problems(planted: Planted, count: int, seed: int) -> Iterator[Question]:
    """Random problems on which ``planted`` shows."""
    return showing(planted, count, seed, draw, answers, given)


def draw(
    rng: np.random.Generator,
    dtype: np.dtype[Any],
    *,
    grouped: bool = False,
    heads: int = 1,
    alike: bool = False,
    whole: bool = False,
    causal: bool | None = None,
) -> Question:
    """A random problem. heads: at least so many kv heads. alike: q, k and v have one shape. whole:
    all three directions are there."""
    while True:
        question = planted_second.draw(rng, dtype, grouped=grouped, masked=bool(causal))
        directions = question.tq is not None and question.tk is not None and question.tv is not None
        if question.num_heads_kv < heads or ((whole or alike or heads > 1) and not directions):
            continue
        if causal:
            question = replace(question, causal=True, window=(-1, -1))
        if not alike or question.q.shape == question.k.shape == question.v.shape:
            return question


# ---- what is read -----------------------------------------------------------------------------


def _read(question: Question, rules: Rules) -> SimpleNamespace:
    """The arrays, with directions as they are read."""
    x = loaded(question)
    x.tq, x.tk, x.tv = (getattr(x, name) for name in rules.order)
    for name in rules.turned:
        a = getattr(x, name)
        setattr(x, name, a.reshape(a.shape[1], a.shape[0], -1).swapaxes(0, 1).copy())
    for name in rules.local:
        a, offsets = getattr(x, name), question.cu_seqlens_q
        offsets = question.cu_seqlens_q if name == "tq" else question.cu_seqlens_k
        b = a.copy()
        for start, stop in pairwise(offsets):
            b[start:stop] = a[: stop - start]
        setattr(x, name, b)
    x.remainders = rules.by_remainder
    return x


def _of_head(x: SimpleNamespace, name: str, keys: slice, head: int) -> Array:
    found: Array = getattr(x, name)[
        keys, head % x.k.shape[1] if name in x.remainders else head // x.group
    ]
    return found


# ---- forward mode -----------------------------------------------------------------------------


def jvp(question: Question, rules: Rules) -> Answers:
    """By an online softmax."""
    x, s = _read(question, rules), question.scale
    out, tout = (x.number.zeros(*x.q.shape[:2], x.v.shape[2]) for _ in range(2))
    lse, tlse = (x.number.zeros(*x.q.shape[1::-1]) for _ in range(2))
    lse[:] = -np.inf
    for head, rows, key_tiles in query_tiles(question, rules.tile):
        Q, tQ, size = x.q[rows, head], x.tq[rows, head], rows.stop - rows.start
        top, total, ttotal = np.full(size, -np.inf), x.number.zeros(size), x.number.zeros(size)
        acc, tacc = (x.number.zeros(size, x.v.shape[2]) for _ in range(2))
        for keys, mask in reversed(key_tiles) if rules.backwards else key_tiles:
            K, V, tK, tV = (_of_head(x, name, keys, head) for name in ("k", "v", "tk", "tv"))
            S, E = np.where(mask, s * Q @ K.T, -np.inf), s * (tQ @ K.T + Q @ tK.T)
            new = np.maximum(top, S.max(axis=1))
            shift = np.where(np.isneginf(new), 0.0, new)
            P, rescale, top = np.exp(S - shift[:, None]), np.exp(top - shift), new
            total = total * rescale + P.sum(axis=1)
            ttotal = ttotal * (1 if rules.sums == "e" else rescale) + (P * E).sum(axis=1)
            PE, P = x.number.narrow(P * E), x.number.narrow(P)
            acc = acc * rescale[:, None] + P @ V
            kept = tacc if rules.sums == "tout" else tacc * rescale[:, None]
            tacc = kept + PE @ V + P @ tV
        total[np.isneginf(top)] = 1.0
        e = ttotal / total
        out[rows, head], lse[head, rows] = acc / total[:, None], top + np.log(total)
        tout[rows, head] = tacc / total[:, None] - e[:, None] * out[rows, head]
        tlse[head, rows] = e
    return x.number.store({"jvp out": out, "tout": tout, "jvp lse": lse, "tlse": tlse})


# ---- second derivatives -----------------------------------------------------------------------


def double_backward(question: Question, rules: Rules) -> Answers:
    """By a pass over the keys of each tile of queries, and one over tiles of both."""
    x, s, narrow = _read(question, rules), question.scale, loaded(question).number.narrow
    out, lse = (a.astype(x.number.wide) for a in given(question))
    ddout, ddlse, gq, gk, gv = map(np.zeros_like, (out, lse, x.q, x.k, x.v))
    tiles = list(query_tiles(question, rules.tile))
    pairs = [(head, rows, keys, mask) for head, rows, some in tiles for keys, mask in some]

    def weights(head: int, rows: slice, keys: slice, mask: Array) -> tuple[Array, Array]:
        """P and E."""
        K, tK = (_of_head(x, name, keys, head) for name in ("k", "tk"))
        L = lse[head, rows, None]
        S = s * x.q[rows, head] @ K.T
        P = np.where(mask & (L > -np.inf), np.exp(np.where(mask, S - L, 0.0)), 0.0)
        return P, s * (x.tq[rows, head] @ K.T + x.q[rows, head] @ tK.T)

    for head, rows, keys, mask in pairs:
        P, E = weights(head, rows, keys, mask)
        V, tV = (_of_head(x, name, keys, head) for name in ("v", "tv"))
        ddout[rows, head] += narrow(P * E) @ V + narrow(P) @ tV
        ddlse[head, rows] += (P * E).sum(axis=1)
    ddout -= ddlse.T[..., None] * out
    D = (x.dout * out).sum(axis=2).T - x.dlse
    W = (x.dout * ddout).sum(axis=2).T
    name, layout = rules.row_term
    D, W = (_misread(a, layout) if name == one else a for one, a in (("D", D), ("W", W)))
    by_head = bool(rules.product[0])
    powers = {"tdS k": 1, "dS ddk": 1, "tdS q": 1, "dS ddq": 1} | dict([rules.power])
    for head, rows, keys, mask in pairs:
        if rules.skips and not _comes_to(question, rules, rows, keys):
            continue
        kv = head // x.group
        P, E = weights(head, rows, keys, mask)
        K, V, tK, tV = (_of_head(x, name, keys, head) for name in ("k", "v", "tk", "tv"))
        Q, tQ, dO, ddO = (a[rows, head] for a in (x.q, x.tq, x.dout, ddout))
        tP = P * (E - ddlse[head, rows, None])
        Z = dO @ V.T - D[head, rows, None]
        tQ = x.tq[rows, _other_head(question, rules, "dS ddq", head, head)]
        tV = x.tv[keys, _other_head(question, rules, "dout ddv", head, kv)] if by_head else tV
        tZ = (ddO @ V.T if rules.operand == "ddout v^T" else dO @ tV.T) - W[head, rows, None]
        dS, tdS = narrow(P * Z), narrow(tP * Z + P * tZ)
        tK = x.tk[keys, _other_head(question, rules, "dS ddk", head, kv)] if by_head else tK
        Q = x.q[rows, _other_head(question, rules, "dS' q", head, head)]
        moved = K if rules.operand == "k for ddk" else tK
        if rules.overwritten == "gq":
            gq[rows, head] = 0
        elif rules.overwritten == "gk" and head % x.group == 0:
            gk[keys, kv] = 0
        gq[rows, head] += s ** powers["tdS k"] * (tdS @ K) + s ** powers["dS ddk"] * (dS @ moved)
        gk[keys, kv] += s ** powers["tdS q"] * (tdS.T @ Q) + s ** powers["dS ddq"] * (dS.T @ tQ)
        gv[keys, kv] += narrow(tP).T @ (ddO if rules.operand == "ddout in gv" else dO)
    return x.number.store({"ddout": ddout, "ddlse": ddlse, "gq": gq, "gk": gk, "gv": gv})


def _other_head(question: Question, rules: Rules, product: str, head: int, right: int) -> int:
    """The head of which a product reads something, where it should be ``right``."""
    name, which = rules.product
    group, heads_kv = question.group, question.num_heads_kv
    others = {"first": head - head % group, "kv": head // group, "zero": 0}
    return (others | {"remainder": head % heads_kv})[which] if name == product else right


def _misread(a: Array, layout: str) -> Array:
    """(H, T) as if it were (T, H), or the reverse."""
    heads, tokens = a.shape
    found = np.empty_like(a)
    for h, t in np.ndindex(heads, tokens):
        flat = t * heads + h if layout == "th" else h * tokens + t
        found[h, t] = a.reshape(-1)[flat] if layout == "th" else a.T.reshape(-1)[flat]
    return found


def _comes_to(question: Question, rules: Rules, rows: slice, keys: slice) -> bool:
    """The first tile of queries is the first that begins at or behind a tile of keys."""
    b = int(np.searchsorted(question.cu_seqlens_q, rows.start, side="right")) - 1
    first = rows.start - int(question.cu_seqlens_q[b])
    key = keys.start - int(question.cu_seqlens_k[b])
    key -= question.lengths_k[b] - question.lengths_q[b]
    return first >= key
