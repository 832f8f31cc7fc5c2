"""Block-sparse attention and its derivatives by loops over blocks, and the same with bugs in them.

Long by the list of bugs. Separate from rawattn.reference, and from what rawattn-check matches
answers with. As in a kernel
that gathers, the tile of queries is the heads of one token that read the same selection, and the
tile of keys a block that the token visits; ``_visits`` has the rules of which those are. A bug is
an exception to a rule, or a term of a formula left out (``Rules``). Formulas of second order are
those of ``planted_second``, where a block has a gate G that moves along C, and Y = s Q K^T:

    S = G Y    tY = s (A K^T + Q B^T)    E = G tY + C Y
    dY = G dS  dY' = G dS' + C dS        gG = dS' Y + dS tY
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from rawattn.check.diagnose.engine.question import Answers, Question
from tests.diagnose.planted.second import (
    JVP,
    SECOND,
    Array,
    Planted,
    Terms,
    draw_direction,
    draw_packed,
    loaded,
    normal,
    showing,
)
from tests.diagnose.planted.second import jvp as dense_jvp

FORWARD, BACKWARD = ("forward",), ("backward",)
BOTH, EVERY = FORWARD + BACKWARD, FORWARD + BACKWARD + SECOND + JVP


@dataclass(frozen=True)
class Rules:
    """What is other than right in the rules and in the formulas.

    not_causal: which selected blocks are seen past the query's position: "all", or "own" for the
    one that the position lies in. twice: what of a block that is there already counts again:
    "slots", "own" or "all". padding: the block that index -1 stands for: "first" or "last".
    own: "missing", or "whole" where it is not selected, or "always whole". selection: whose one a
    query head reads: "first" head, "next" one, "modulo", or "leader" of its group. dropped: a slot,
    "last" or "last counted".
    """

    not_causal: str = ""
    twice: str = ""
    padding: str = ""
    own: str = ""
    selection: str = ""
    dropped: str = ""
    counts: bool = True
    zero_keys: bool = False
    gate_in_scores: bool = True
    gate_in_gradient: bool = True  # the factor of dS in dq and dk, of its tangent in gq and gk
    gate_in_tangent: bool = True  # of the scores
    gate_moves: bool = True  # along ddblock_scale
    gate_gradient: bool = True
    only_head: int | None = None  # of those that share a gate
    sliding: int = 0  # keys more to the left


class Visit(NamedTuple):
    """A block that a token sees up to key ``last``, and the slot that named it, -1 for none."""

    block: int
    slot: int
    last: int


def _planted(
    bug: str,
    stages: tuple[str, ...],
    needs: dict[str, Any],
    *variants: tuple[str, dict[str, Any]],
    also: tuple[str, ...] = (),
) -> list[Planted]:
    """``variants``: what it is in words, and the rules."""
    places = {BOTH: "", EVERY: ", in every stage"}
    where = places.get(stages, f", {' '.join(stages)} alone")
    return [
        Planted(bug, variant + where, stages, Rules(**rules), needs, also)
        for variant, rules in variants
    ]


def _beyond(
    bug: str,
    needs: dict[str, Any],
    variant: tuple[str, dict[str, Any]],
    also: tuple[str, ...] = (),
) -> list[Planted]:
    """``variant`` in the double backward and in forward mode, in each alone."""
    needs = needs | _MOVED
    return [
        planted
        for stages in (SECOND, JVP)
        for planted in _planted(bug, stages, needs, variant, also=also)
    ]


_CAUSAL, _OWN, _GATE, _COUNTS = ({name: True} for name in ("causal", "own", "gate", "counts"))
_SHARED_GATE = {"gate": True, "per_head": False, "grouped": True}
_HEADS = {"gate": False, "heads": 2}
_PER_HEAD = {"gate": False, "per_head": True, "grouped": True}
_SLIDING = {"sliding": True}
_MOVED = {"moved": True}
_NO_GATE = {"gate_in_scores": False, "gate_in_gradient": False}
_NO_GATE_BEYOND = _NO_GATE | {"gate_in_tangent": False, "gate_moves": False}

PLANTED = (
    *_planted(
        "sparse-not-causal",
        BOTH,
        _CAUSAL,
        ("blocks that are selected", {"not_causal": "all"}),
        ("own block where selected", {"not_causal": "own"}),
    ),
    *_planted("sparse-not-causal", BACKWARD, _CAUSAL, ("all blocks", {"not_causal": "all"})),
    *_planted("sparse-duplicate-twice", BOTH, _OWN, ("own block", {"twice": "own"})),
    *_planted(
        "sparse-duplicate-twice",
        BOTH,
        {"duplicates": True},
        ("slots", {"twice": "slots"}),
        ("slots and own block", {"twice": "all"}),
    ),
    *_planted(
        "sparse-duplicate-twice", BACKWARD, {"duplicates": True}, ("slots", {"twice": "slots"})
    ),
    *_planted(
        "sparse-partial-block-zeros", BOTH, {"causal": False}, ("zero keys", {"zero_keys": True})
    ),
    *_planted(
        "sparse-padding-read",
        BOTH,
        {"padding": True},
        ("as block 0", {"padding": "first"}),
        ("as the last block", {"padding": "last"}),
    ),
    *_planted("sparse-gate-gradient-missing", BACKWARD, _GATE, ("zeros", {"gate_gradient": False})),
    *_planted(
        "sparse-gate-not-summed",
        BACKWARD,
        _SHARED_GATE,
        ("last head", {"only_head": -1}),
        ("first head", {"only_head": 0}),
    ),
    *_planted(
        "sparse-gate-ignored",
        BOTH,
        _GATE,
        ("everywhere", _NO_GATE),
        ("everywhere, no gradient of it", _NO_GATE | {"gate_gradient": False}),
    ),
    *_planted(
        "sparse-gate-ignored",
        BACKWARD,
        _GATE,
        ("scores and dq, dk", _NO_GATE),
        ("dq and dk", {"gate_in_gradient": False}),
    ),
    *_planted(
        "sparse-sliding-off-by-one",
        FORWARD,
        _SLIDING,
        ("one key more", {"sliding": 1}),
        ("one key less", {"sliding": -1}),
    ),
    *_planted("sparse-own-block-missing", BOTH, _OWN, ("not seen", {"own": "missing"})),
    *_planted("sparse-own-block-missing", BACKWARD, _OWN, ("not seen", {"own": "missing"})),
    *_planted(
        "sparse-own-block-not-causal",
        BOTH,
        _OWN,
        ("where not selected", {"own": "whole"}),
        ("selected or not", {"own": "always whole"}),
    ),
    *_planted(
        "sparse-other-heads-selection",
        BOTH,
        _HEADS,
        ("of the first head", {"selection": "first"}),
        ("of the next head", {"selection": "next"}),
    ),
    *_planted(
        "sparse-other-heads-selection",
        BOTH,
        _HEADS | {"grouped": True, "per_head": False},
        ("head modulo num_heads_kv", {"selection": "modulo"}),
    ),
    *_planted(
        "sparse-other-heads-selection",
        BOTH,
        _PER_HEAD,
        ("of the group's first head", {"selection": "leader"}),
    ),
    *_planted("sparse-last-slot-dropped", BOTH, {}, ("last slot", {"dropped": "last"})),
    *_planted("sparse-last-slot-dropped", BACKWARD, {}, ("last slot", {"dropped": "last"})),
    *_planted(
        "sparse-last-slot-dropped", BOTH, _COUNTS, ("last that counts", {"dropped": "last counted"})
    ),
    *_planted("sparse-counts-ignored", BOTH, _COUNTS, ("all slots", {"counts": False})),
    *_planted("sparse-counts-ignored", BACKWARD, _COUNTS, ("all slots", {"counts": False})),
    *_beyond("sparse-not-causal", _CAUSAL, ("all blocks", {"not_causal": "all"})),
    *_beyond("sparse-not-causal", _CAUSAL, ("own block where selected", {"not_causal": "own"})),
    *_beyond("sparse-duplicate-twice", _OWN, ("own block", {"twice": "own"})),
    *_beyond("sparse-duplicate-twice", {"duplicates": True}, ("slots", {"twice": "slots"})),
    *_planted(
        "sparse-partial-block-zeros",
        JVP,
        {"causal": False} | _MOVED,
        ("zero keys", {"zero_keys": True}),
    ),
    *_planted(
        "sparse-partial-block-zeros",  # not after a right lse: there zeros add nothing
        EVERY,
        {"causal": False} | _MOVED,
        ("zero keys", {"zero_keys": True}),
    ),
    *_beyond("sparse-padding-read", {"padding": True}, ("as block 0", {"padding": "first"})),
    *_beyond("sparse-own-block-missing", _OWN, ("not seen", {"own": "missing"})),
    *_beyond(
        "sparse-own-block-not-causal",
        _OWN,
        ("selected or not", {"own": "always whole"}),
        ("sparse-not-causal",),  # where the own block is always selected
    ),
    *_beyond("sparse-other-heads-selection", _HEADS, ("of the first head", {"selection": "first"})),
    *_beyond("sparse-last-slot-dropped", {}, ("last slot", {"dropped": "last"})),
    *_beyond("sparse-counts-ignored", _COUNTS, ("all slots", {"counts": False})),
    *_beyond("sparse-gate-ignored", _GATE, ("everywhere", _NO_GATE_BEYOND)),
    *_beyond("sparse-gate-ignored", _GATE, ("scores", {"gate_in_scores": False})),
    *_beyond("sparse-gate-ignored", _GATE, ("tangent", {"gate_in_tangent": False})),
    *_planted(
        "sparse-gate-ignored",
        SECOND,
        _GATE | _MOVED,
        ("gq and gk", {"gate_in_gradient": False}),
        ("everywhere, no gradient of it", _NO_GATE_BEYOND | {"gate_gradient": False}),
    ),
    *_planted(
        "sparse-gate-gradient-missing",
        SECOND,
        _GATE | _MOVED,
        ("zeros", {"gate_gradient": False}),
        ("zeros, nor does it move", {"gate_gradient": False, "gate_moves": False}),
    ),
    *_planted(
        "sparse-gate-not-summed",
        SECOND,
        _SHARED_GATE | _MOVED,
        ("last head", {"only_head": -1}),
        ("first head", {"only_head": 0}),
    ),
    *_beyond("sparse-gate-gradient-missing", _GATE, ("does not move", {"gate_moves": False})),
    *_planted(
        "direction-ignored",
        SECOND + JVP,
        _GATE | _MOVED,
        ("of the gate", {"gate_moves": False}),
        also=("sparse-gate-gradient-missing",),
    ),
    *_planted("sparse-not-causal", EVERY, _CAUSAL | _MOVED, ("all blocks", {"not_causal": "all"})),
    *_planted("sparse-own-block-missing", EVERY, _OWN | _MOVED, ("not seen", {"own": "missing"})),
    *_planted("sparse-gate-ignored", EVERY, _GATE | _MOVED, ("everywhere", _NO_GATE_BEYOND)),
)


def answers(planted: Planted | None, question: Question) -> Answers:
    """What the functions of block-sparse attention give, as far as they have what they need."""
    rules = {stage: planted.change for stage in planted.stages} if planted else {}
    computed = forward(question, rules.get("forward", Rules()))
    out, lse = question.out, question.lse
    if out is None or lse is None:
        out, lse = computed["out"], computed["lse"]
    for stage, compute in (("backward", backward), ("second", double_backward)):
        if stage in question.stages:
            computed |= compute(question, rules.get(stage, Rules()), out, lse)
    if "jvp" in question.stages:
        computed |= jvp(question, rules.get("jvp", Rules()))
    return computed


def forward(question: Question, rules: Rules) -> Answers:
    """By an online softmax over the blocks of every token."""
    x = loaded(question)
    out, lse = x.number.zeros(*x.q.shape[:2], x.v.shape[2]), x.number.zeros(*x.q.shape[1::-1])
    lse[:] = -np.inf
    for item in _items(question, rules):
        row_max, row_sum = x.number.zeros(2, len(item.heads))
        row_max[:] = -np.inf
        acc = x.number.zeros(len(item.heads), x.v.shape[2])
        for visit in item.visits:
            tile = _tile(x, rules, question, item, visit)
            S = tile.scale_in_scores * tile.Y
            new_max = np.maximum(row_max, S.max(axis=1))
            P, rescale, row_max = np.exp(S - new_max[:, None]), np.exp(row_max - new_max), new_max
            row_sum = row_sum * rescale + P.sum(axis=1)
            acc = acc * rescale[:, None] + x.number.narrow(P) @ tile.V
        if item.visits:
            out[item.token, item.heads] = acc / row_sum[:, None]
            lse[item.heads, item.token] = row_max + np.log(row_sum)
    results = {"out": out, "lse": lse}
    if question.sliding is not None:
        left, right = question.sliding
        window = (left + rules.sliding, right)
        still = {"tq": None, "tk": None, "tv": None}
        near = dense_jvp(replace(question, causal=False, window=window, **still), Terms())
        results |= {f"sliding {name}": near[f"jvp {name}"] for name in ("out", "lse")}
    return x.number.store(results)


def backward(question: Question, rules: Rules, out: Array, lse: Array) -> Answers:
    """By the same walk over blocks, which adds to dk and dv wherever it comes."""
    x, s, narrow = loaded(question), question.scale, loaded(question).number.narrow
    D = (x.dout * out.astype(x.number.wide)).sum(axis=2).T - x.dlse
    dq, dk, dv = map(np.zeros_like, (x.q, x.k, x.v))
    dgate = x.number.zeros(*question.block_indices.shape)
    kept = slice(None) if rules.only_head is None else rules.only_head
    for item in _items(question, rules):
        here = item.token, item.heads
        Q, dO = x.q[here], x.dout[here]
        L, delta = (a[item.heads, item.token, None] for a in (lse.astype(x.number.wide), D))
        for visit in item.visits:
            tile = _tile(x, rules, question, item, visit)
            P = np.where(L > -np.inf, np.exp(tile.scale_in_scores * tile.Y - L), 0.0)
            dS = P * (dO @ tile.V.T - delta)
            dY = narrow(tile.scale_in_gradient * dS)
            dq[here] += s * (dY @ tile.K)
            dk[tile.keys, item.head_kv] += s * (dY.T @ Q)[: tile.real]
            dv[tile.keys, item.head_kv] += (narrow(P).T @ dO)[: tile.real]
            if visit.slot >= 0 and rules.gate_gradient:
                dgate[item.token, item.head_sel, visit.slot] += (dS * tile.Y)[kept].sum()
    results = x.number.store({"dq": dq, "dk": dk, "dv": dv})
    return results if question.block_scale is None else results | {"dblock_scale": dgate}


def jvp(question: Question, rules: Rules) -> Answers:
    """As ``forward``; the tangents wait, as out does, for the last block."""
    x = loaded(question)
    out, tout = (x.number.zeros(*x.q.shape[:2], x.v.shape[2]) for _ in range(2))
    lse, tlse = (x.number.zeros(*x.q.shape[1::-1]) for _ in range(2))
    lse[:] = -np.inf
    for item in _items(question, rules):
        if not item.visits:
            continue
        row_max, row_sum, trow_sum = x.number.zeros(3, len(item.heads))
        row_max[:] = -np.inf
        acc, tacc = x.number.zeros(2, len(item.heads), x.v.shape[2])
        for visit in item.visits:
            tile = _tile(x, rules, question, item, visit)
            S = tile.scale_in_scores * tile.Y
            new_max = np.maximum(row_max, S.max(axis=1))
            P, rescale, row_max = np.exp(S - new_max[:, None]), np.exp(row_max - new_max), new_max
            row_sum = row_sum * rescale + P.sum(axis=1)
            trow_sum = trow_sum * rescale + (P * tile.E).sum(axis=1)
            P, PE = x.number.narrow(P), x.number.narrow(P * tile.E)
            acc = acc * rescale[:, None] + P @ tile.V
            tacc = tacc * rescale[:, None] + PE @ tile.V + P @ tile.tV
        e, here = trow_sum / row_sum, (item.token, item.heads)
        out[here] = acc / row_sum[:, None]
        tout[here] = tacc / row_sum[:, None] - e[:, None] * out[here]
        lse[item.heads, item.token] = row_max + np.log(row_sum)
        tlse[item.heads, item.token] = e
    return x.number.store({"jvp out": out, "tout": tout, "jvp lse": lse, "tlse": tlse})


def double_backward(question: Question, rules: Rules, out: Array, lse: Array) -> Answers:
    """By two walks over the blocks of a token: the first for ddO and e."""
    x, s = loaded(question), question.scale
    narrow, out, lse = x.number.narrow, out.astype(x.number.wide), lse.astype(x.number.wide)
    D = (x.dout * out).sum(axis=2).T - x.dlse
    ddout, ddlse, gq, gk, gv = map(np.zeros_like, (out, lse, x.q, x.k, x.v))
    ggate = x.number.zeros(*question.block_indices.shape)
    kept = slice(None) if rules.only_head is None else rules.only_head
    for item in _items(question, rules):
        here, by_row = (item.token, item.heads), (item.heads, item.token)
        Q, ddQ, dO, L = x.q[here], x.tq[here], x.dout[here], lse[by_row][:, None]
        tiles = [_tile(x, rules, question, item, visit) for visit in item.visits]
        for tile in tiles:
            tile.P = np.where(L > -np.inf, np.exp(tile.scale_in_scores * tile.Y - L), 0.0)
            ddlse[by_row] += (tile.P * tile.E).sum(axis=1)
            ddout[here] += narrow(tile.P * tile.E) @ tile.V + narrow(tile.P) @ tile.tV
        e = ddlse[by_row][:, None]
        ddout[here] -= e * out[here]
        W = (dO * ddout[here]).sum(axis=1, keepdims=True)
        for visit, tile in zip(item.visits, tiles, strict=True):
            P, Z, tP = tile.P, dO @ tile.V.T - D[by_row][:, None], tile.P * (tile.E - e)
            dS, tdS = P * Z, tP * Z + P * (dO @ tile.tV.T - W)
            dY = narrow(tile.scale_in_gradient * dS)
            tdY = narrow(tile.scale_in_gradient * tdS + tile.tscale * dS)
            gq[here] += s * (tdY @ tile.K + dY @ tile.tK)
            gk[tile.keys, item.head_kv] += s * (tdY.T @ Q + dY.T @ ddQ)[: tile.real]
            gv[tile.keys, item.head_kv] += (narrow(tP).T @ dO)[: tile.real]
            if visit.slot >= 0 and rules.gate_gradient:
                moved = tdS * tile.Y + dS * tile.tY
                ggate[item.token, item.head_sel, visit.slot] += moved[kept].sum()
    results = {"ddout": ddout, "ddlse": ddlse, "gq": gq, "gk": gk, "gv": gv}
    results = x.number.store(results)
    return results if question.block_scale is None else results | {"gblock_scale": ggate}


class Item(NamedTuple):
    """A token with query heads of one kv head that read the same selection; its keys start at row
    ``start`` of k, and there are ``seqlen_k``."""

    token: int
    head_sel: int
    heads: list[int]
    head_kv: int
    start: int
    seqlen_k: int
    visits: list[Visit]


def _items(question: Question, rules: Rules) -> Iterator[Item]:
    """All work of a problem, token by token."""
    together: dict[tuple[int, int], list[int]] = {}
    heads_sel, group = question.block_indices.shape[1], question.group
    for head in range(question.num_heads_q):
        right = head * heads_sel // question.num_heads_q
        read = {
            "": right,
            "first": 0,
            "next": (right + 1) % heads_sel,
            "modulo": head % heads_sel,
            "leader": right - right % group,
        }[rules.selection]
        together.setdefault((head // group, read), []).append(head)
    for b, (seqlen_q, seqlen_k) in enumerate(
        zip(question.lengths_q, question.lengths_k, strict=True)
    ):
        start_q, start_k = int(question.cu_seqlens_q[b]), int(question.cu_seqlens_k[b])
        for i in range(seqlen_q):
            for (head_kv, head_sel), heads in together.items():
                here, place = (start_q + i, head_sel), i + seqlen_k - seqlen_q
                visits = _visits(question, rules, here, place, seqlen_k)
                yield Item(*here, heads, head_kv, start_k, seqlen_k, visits)


def _visits(
    question: Question, rules: Rules, here: tuple[int, int], place: int, seqlen_k: int
) -> list[Visit]:
    """The blocks of one token and selection head; ``place``: where it is among the keys."""
    size, named = question.block_size, question.block_indices[here].tolist()
    num_blocks, own = -(-seqlen_k // size), place // size
    if question.block_counts is not None and rules.counts:
        named = named[: max(0, int(question.block_counts[here]))]
    if rules.dropped == "last":
        named = named[: question.block_indices.shape[2] - 1]
    elif rules.dropped == "last counted":
        named = named[:-1]
    visits: dict[int, Visit] = {}
    again: list[Visit] = []
    for slot, block in enumerate(named):
        if block < 0 and rules.padding:
            block = 0 if rules.padding == "first" else num_blocks - 1
        cut = question.causal and rules.not_causal != "all"
        if cut and not (rules.not_causal == "own" and block == own):
            last = place
        else:
            last = (block + 1) * size - 1 if rules.zero_keys else seqlen_k - 1
        if 0 <= block < num_blocks and block * size <= last:
            visit = Visit(block, slot, last)
            if visits.setdefault(block, visit) != visit and rules.twice in ("slots", "all"):
                again.append(visit)
    if question.own and place >= 0 and rules.own != "missing":
        visit = Visit(own, -1, seqlen_k - 1 if "whole" in rules.own else place)
        if visits.setdefault(own, visit) != visit:
            if rules.own == "always whole":
                visits[own] = visits[own]._replace(last=visit.last)
            elif rules.twice in ("own", "all"):
                again.append(visit)
    return [*visits.values(), *again]


def _tile(
    x: SimpleNamespace, rules: Rules, question: Question, item: Item, visit: Visit
) -> SimpleNamespace:
    """K, V and Y = s Q K^T of a visit with their tangents, its gate, and E; and which rows of k
    these ``real`` keys are. What lies past the end of the sequence is zeros."""
    first = visit.block * question.block_size
    stop = min(first + question.block_size, visit.last + 1)
    real = min(stop, item.seqlen_k) - first
    keys = slice(item.start + first, item.start + first + real)
    K, V, tK, tV = (a[keys, item.head_kv] for a in (x.k, x.v, x.tk, x.tv))
    if stop > item.seqlen_k:
        past = (0, stop - item.seqlen_k), (0, 0)
        K, V, tK, tV = (np.pad(a, past) for a in (K, V, tK, tV))
    scale, tscale = (
        float(gate[item.token, item.head_sel, visit.slot])
        if gate is not None and visit.slot >= 0
        else still
        for gate, still in ((question.block_scale, 1.0), (question.tblock_scale, 0.0))
    )
    Q, tQ = (a[item.token, item.heads] for a in (x.q, x.tq))
    tscale = tscale if rules.gate_moves else 0.0
    Y, tY = question.scale * (Q @ K.T), question.scale * (tQ @ K.T + Q @ tK.T)
    return SimpleNamespace(
        K=K,
        V=V,
        tK=tK,
        tV=tV,
        Y=Y,
        tY=tY,
        E=(scale if rules.gate_in_tangent else 1.0) * tY + tscale * Y,
        scale_in_scores=scale if rules.gate_in_scores else 1.0,
        scale_in_gradient=scale if rules.gate_in_gradient else 1.0,
        tscale=tscale,
        keys=keys,
        real=real,
    )


def problems(planted: Planted, count: int, seed: int) -> Iterator[Question]:
    """Random problems on which ``planted`` shows."""

    def given(question: Question) -> tuple[Array, Array]:
        right = forward(question, Rules())
        return right["out"], right["lse"]

    return showing(planted, count, seed, draw, answers, given)


def draw(
    rng: np.random.Generator,
    dtype: np.dtype[Any],
    *,
    causal: bool | None = None,
    own: bool | None = None,
    gate: bool | None = None,
    counts: bool | None = None,
    per_head: bool | None = None,
    duplicates: bool | None = None,
    padding: bool | None = None,
    sliding: bool | None = None,
    moved: bool = False,
    grouped: bool = False,
    heads: int = 1,
) -> Question:
    """A random problem; what is None is drawn too. heads: at least so many kv heads.

    per_head: every query head selects for itself. duplicates: a block may be named twice. moved:
    with directions, of the gate too.
    """

    def drawn(option: bool | None, chance: float) -> bool:
        return bool(rng.random() < chance) if option is None else option

    packed = draw_packed(rng, dtype, grouped=grouped, least=heads, most=4)
    size, num_selected = int(rng.choice([16, 16, 32])), int(rng.integers(1, 5))
    selecting = packed["q" if drawn(per_head, 0.3) else "k"].shape[1]
    shape = (len(packed["q"]), selecting, num_selected)
    repeats, padded = drawn(duplicates, 0.3), drawn(padding, 0.4)
    indices = np.full(shape, -1, np.int32)
    for b, seqlen_k in enumerate(np.diff(packed["cu_seqlens_k"])):
        num_blocks = -(-int(seqlen_k) // size)
        for row in indices[packed["cu_seqlens_q"][b] : packed["cu_seqlens_q"][b + 1]]:
            for slots in row:
                named = rng.integers(num_blocks, size=num_selected)
                if not repeats:
                    named = rng.permutation(num_blocks)[:num_selected]
                slots[: len(named)] = named
                if padded:
                    slots[rng.random(num_selected) < 0.3] = rng.choice([-1, -1, num_blocks])
    rows = np.float64 if dtype == np.float64 else np.float32
    counts_of = rng.integers(0, num_selected + 1, shape[:2], np.int32)
    gated, counted, own = drawn(gate, 0.3), drawn(counts, 0.3), drawn(own, 0.7)
    direction = draw_direction(rng, dtype, packed) if moved else {}
    if moved and gated:
        direction["tblock_scale"] = normal(rng, rows, shape)
    return Question(
        **packed,
        **direction,
        causal=drawn(causal, 0.6),
        block_indices=indices,
        block_counts=counts_of if counted else None,
        block_scale=rng.uniform(0.3, 1.8, shape).astype(rows) if gated else None,
        block_size=size,
        own=own,
        sliding=(size - 1, 0) if drawn(sliding, 0.3) else None,
    )
