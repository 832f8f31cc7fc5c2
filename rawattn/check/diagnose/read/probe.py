"""Questions to which a function's results are its intermediates, entry by entry: with unit vectors
for v, out is P; for k, dq is dS; for q and dout, dk and dv are the transposes of dS and P. All
sequences and heads are asked at once. Long, since the passes share how a function is asked."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from rawattn.check.cases import in_use
from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.evidence.places import Array, Places, Right
from rawattn.check.diagnose.read.fields import Calls, backward_of
from rawattn.check.diff import FLOATING

Ask = Callable[[Question], Answers]  # answers of one stage; may raise anything
STILL: dict[str, Any] = dict.fromkeys(("dout", "dlse", "tq", "tk", "tv", "tsinks", "tblock_scale"))
STILL |= {"sliding": None}  # what a forward pass has not
SPREAD = 0.8  # standard deviation of scores: small, so that no weight is too small for 16 bits
NOISE = {"float64": 1e-5, "float32": 1e-3, "float16": 2e-3, "bfloat16": 1e-2}  # of log-weights
SEEN = {"float16": 1e-5}  # weights above are seen; of other dtypes those above TINY
TINY = 1e-30
CALLS = 160  # of a reading, at most: counted, so that a busy machine reads what an idle one does


class Refused(Exception):
    """The function cannot be read; the text says why."""


class Weights:
    """P (num_heads_q, total_q, total_k) as out has it, and lse (num_heads_q, total_q), None if it
    is not given or depends on v. value_head, like lse: the head of v that a row took, 0.5 and the
    like where that is none; None of a backward pass, of which ``calls`` are the lse that each was
    given, and the rows that it tells of. passed: it is that of a backward pass, which makes it with
    the lse that it is given. telling: rows that tell anything: with an lse of no keys a backward
    pass has no weights. alive: rows that are numbers. seen: which weights are not 0, and logs their
    logarithms, 0 of others."""

    def __init__(
        self, right: Right, P: Array, lse: Array | None, head: Array | None, calls: Calls = ()
    ) -> None:
        self.right, self.P, self.lse, self.value_head, self.calls = right, P, lse, head, calls
        self.places, self.passed = right.places, head is None
        dtype = self.places.question.dtype.name
        self.noise, self.least = NOISE[dtype], SEEN.get(dtype, TINY)
        self.telling = np.isfinite(right.lse) if self.passed else np.full(P.shape[:2], True)
        self.alive = np.asarray(np.isfinite(P).all(axis=-1))
        self.seen = self.alive[..., None] & (np.nan_to_num(P) > self.least)
        self.logs = np.log(np.where(self.seen, P, 1.0))


class Slopes:
    """dS as dq or dk has it, and what is right in the calls in which it was read: S, L (the lse
    that was passed), dP, D, slope (of a softcap, or the gate of a block), all (num_heads_q,
    total_q, total_k). asked: what each call was about, and where in dS what it gave is."""

    def __init__(self, *shape: int) -> None:
        self.dS, self.S, self.L, self.dP, self.D, self.slope = (np.zeros(shape) for _ in range(6))
        self.asked = list[tuple[Question, Any]]()


class Backward(NamedTuple):
    """weights: P as dv has it, with the lse that was passed. slopes: dS as dq and dk have it."""

    weights: Weights
    slopes: dict[str, Slopes]


def problem(question: Question, seed: int, *, other: int = 0, more: Sequence[int] = ()) -> Question:
    """Like ``question``, of a forward pass; ``other``: with lengths more by multiples of that;
    more: lengths of further sequences, or, without ``other``, of all."""
    rng = np.random.default_rng([seed, 77])
    lengths = [np.diff(question.offsets(of)).astype(int) for of in "qk"]
    apart = question.lengths_q != question.lengths_k
    further = [np.array(x, dtype=int) for x in (more, more[:: -1 if apart else 1])]
    if other:  # where it can, another order, so that nothing hangs on the place of a sequence
        longer = [other * (3 + 5 * b % 7) for b in range(question.batch)]
        lengths = [np.where(x > 0, x + longer, 0)[::-1] for x in lengths]
        lengths = [np.append(x, y) for x, y in zip(lengths, further, strict=True)]
    elif more:
        lengths = further
    offsets = [np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in lengths]
    used = question.seqused_k
    if used is not None and (other or more):
        used = np.array(in_use(tuple(int(n) for n in lengths[1])), dtype=np.int32)
    size = float(np.sqrt(SPREAD / max(abs(question.scale) * question.q.shape[2] ** 0.5, 1e-6)))
    (n, m), of_v = (int(x[-1]) for x in offsets), question.v.shape[2]
    q, k = _drawn(rng, question.q, size, n), _drawn(rng, question.k, size, m)
    given = STILL | {"q": q, "k": k, "v": _drawn(rng, question.v, 1.0, m), "seqused_k": used}
    given |= {"cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1]}
    given |= {"out": np.zeros((*q.shape[:2], of_v), q.dtype), "lse": np.zeros(q.shape[1::-1])}
    found = replace(question, **given)
    return replace(found, **_lists(found, rng)) if question.sparse else found


def _drawn(rng: np.random.Generator, like: Array, size: float, rows: int) -> Array:
    """Normal numbers in so many rows like those of an array."""
    return np.asarray((size * rng.standard_normal((rows, *like.shape[1:]))).astype(like.dtype))


def _lists(question: Question, rng: np.random.Generator) -> dict[str, Any]:
    """Block lists and what comes with them: blocks up to the query's own, some behind it, some
    named again, slots that name none, the first block that is not there."""
    like, size = np.asarray(question.block_indices), question.block_size
    shape = (len(question.q), *like.shape[1:])
    b = question.sequence_of("q")
    lengths_q, lengths_k = (np.asarray(x)[b] for x in (question.lengths_q, question.lengths_k))
    place = question.place_of("q") + lengths_k - lengths_q
    blocks, own = -(-lengths_k // size), np.maximum(place // size, -1)
    top = np.where(rng.random(shape) < 0.8, own[:, None, None], blocks[:, None, None])
    named = np.floor(rng.random(shape) * (top + 1)).astype(like.dtype)
    named[..., 1:] = np.where(rng.random(shape)[..., 1:] < 0.15, named[..., :-1], named[..., 1:])
    named[rng.random(shape) < 0.15] = -1
    found = {"block_indices": named}
    if question.block_counts is not None:
        counts = rng.integers(0, shape[2] + 1, (shape[0], question.block_counts.shape[1]))
        found["block_counts"] = counts.astype(question.block_counts.dtype)
    if question.block_scale is not None:
        found["block_scale"] = rng.uniform(0.5, 1.5, shape).astype(question.block_scale.dtype)
    return found


def _called(ask: Ask, question: Question, **shapes: tuple[int, ...]) -> Answers:
    """The function's results in float64; those named have these shapes."""
    try:
        answers = ask(question)
    except Exception as error:  # whatever a candidate throws: it takes no such inputs
        raise Refused(f"it raises {type(error).__name__}: {error}") from error
    for name, shape in shapes.items():
        x = answers.get(name)
        if x is None or x.shape != shape or x.dtype not in FLOATING:
            raise Refused(f"it gives no numbers called {name} of shape {shape}")
    return {name: np.asarray(x, dtype=np.float64) for name, x in answers.items()}


def _allow(wanted: int) -> None:
    if wanted > CALLS:
        raise Refused(f"it would take {wanted} calls, and {CALLS} are the limit")


def read_forward(ask: Ask, question: Question) -> Weights:
    """The weights of a forward pass on the q and k of ``question``. Raises Refused."""
    places, width = Places(question), question.v.shape[2]
    P = np.zeros((question.num_heads_q, *places.j.shape))
    shape = (*question.q.shape[:2], width)
    _allow(-(-P.shape[2] // width) + 1)
    given = []
    for block in _blocks(P.shape[2], width):
        answers = _called(ask, replace(question, v=_units(question.v, block)), out=shape)
        P[:, :, block] = answers["out"].transpose(1, 0, 2)[..., : len(block)]
        given.append(answers.get("lse"))
    of_heads = np.broadcast_to(np.arange(question.num_heads_kv)[:, None] + 1, question.v.shape)
    heads = replace(question, v=of_heads.astype(question.v.dtype))
    out, sums = _called(ask, heads, out=shape)["out"], P.sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        value_head = np.where(np.abs(sums) > 0.1, out[..., 0].T / sums - 1, np.nan)
    lses = [x for x in given if x is not None and x.shape == P.shape[:2]]
    alike = (np.allclose(x, lses[0], 1e-3, 1e-3, equal_nan=True) for x in lses)
    same = lses and len(lses) == len(given) and all(alike)  # else it depends on v
    return Weights(Right(places), P, lses[0] if same else None, value_head)


def read_backward(ask: Ask, question: Question) -> Backward:
    """P and dS of a backward pass on a problem of ``question``'s sizes. Raises Refused."""
    places, H, group = Places(question), question.num_heads_q, question.group
    (n, m), depth = places.j.shape, question.q.shape[2]
    width = min(depth, question.v.shape[2])
    if width < H:
        raise Refused(f"it has {H} heads, but only {width} columns to tell them apart by")
    _allow(-(-m // depth) + group * -(-n // width) + 1)
    rng = np.random.default_rng([n, m, 78])
    size = SPREAD / (abs(question.scale) or 1.0)
    like: Any = (question.q, size), (question.k, size), (question.v, 1.0), (question.out, 1.0)
    q, k, v, dout = (_drawn(rng, x, by, len(x)) for x, by in like)
    of_q, of_k = Slopes(H, n, m), Slopes(H, n, m)
    for block in _blocks(m, depth):
        right, asked = with_right(replace(question, q=q, k=_units(k, block), v=v, dout=dout))
        dq = _called(ask, asked, dq=q.shape)["dq"].transpose(1, 0, 2)[..., : len(block)]
        _put(of_q, right, np.s_[:, :, block], dq / question.scale)
    P, lse, calls = np.zeros((H, n, m)), np.zeros((H, n)), list[tuple[Array, Any]]()
    for r, block in itertools.product(range(group), _blocks(n, width)):
        heads = np.arange(question.num_heads_kv) * group + r
        queries, cotangent = (_units(like, block, heads) for like in (q, dout))
        right, asked = with_right(replace(question, q=queries, k=k, v=v, dout=cotangent))
        answers, at = _called(ask, asked, dk=k.shape, dv=v.shape), np.ix_(heads, block)
        dk, dv = (answers[x].transpose(1, 2, 0)[:, : len(block)] for x in ("dk", "dv"))
        _put(of_k, right, at, dk / question.scale)
        P[at], lse[at] = dv, right.lse[at]
        calls.append((right.lse, at))
    # each query head has a column of its own
    columns = [np.zeros_like(x) + np.eye(*x.shape[1:], dtype=x.dtype) for x in (q, dout)]
    _, asked = with_right(replace(question, q=columns[0], k=k, v=v, dout=columns[1]))
    answers = _called(ask, asked, dk=k.shape, dv=v.shape)
    own = np.repeat(np.eye(question.num_heads_kv), group, axis=1) > 0
    for name in ("dk", "dv"):
        adds = np.abs(answers[name][..., :H]).sum(axis=0)
        if adds.any() and not np.array_equal(adds > 0.02 * adds.max(), own):
            raise Refused(f"heads of {name} are not sums over the query heads of their groups")
    passed = Right(places)
    vars(passed).update(S=of_k.S, lse=lse)  # of several calls, in place of what is computed
    return Backward(Weights(passed, P, lse, None, calls), {"dq": of_q, "dk": of_k})


def read_entries(ask: Ask, question: Question, name: str, of: str) -> Array:
    """With what a result is a sum of rows of v or k, or of q or dout, (num_heads_q, total_q,
    total_k), of each query head alone. Raises Refused."""
    like: Any = question.out if of == "dout" else getattr(question, of)
    (n, m), H = Places(question).j.shape, question.num_heads_q
    found, of_keys = np.zeros((H, n, m)), of in ("v", "k")
    heads: Any = [np.s_[:]] if of_keys else range(H)
    parts = [*itertools.product(heads, _blocks(m if of_keys else n, like.shape[2]))]
    _allow(len(parts))
    for head, block in parts:
        units: Any = {of: _units(like, block, head)}
        x = _called(ask, replace(question, **units))[name].swapaxes(0, 1)[..., : len(block)]
        at = np.s_[:, :, block] if of_keys else np.s_[head, block]
        found[at] = x if of_keys else x[head // question.group].T
    return found / (question.scale if of in ("q", "k") else 1.0)


def _blocks(count: int, width: int) -> Iterator[Array]:
    return (np.arange(first, min(first + width, count)) for first in range(0, count, width))


def _units(like: Array, block: Array, heads: Any = np.s_[:]) -> Array:
    """Unit vectors in the rows of ``block``, of some heads; zeros like ``like`` elsewhere."""
    found = np.zeros_like(like)
    found[block[:, None], heads, (block - block[0])[:, None]] = 1
    return found


def with_right(question: Question) -> tuple[Right, Question]:
    """What is right there, and the question with the right out and lse for a backward pass."""
    right = Right(Places(question))
    return right, replace(question, out=right.out.astype(question.q.dtype), lse=right.lse)


def _put(slopes: Slopes, right: Right, at: Any, dS: Array) -> None:
    """Store what one call gave at ``at``, and what is right there."""
    c = backward_of(right)
    slopes.asked.append((c.question, at))
    slopes.dS[at] = dS
    values = {"S": c.S, "L": c.L[..., None], "dP": c.dP, "D": c.D[..., None], "slope": c.slope}
    for name, x in values.items():
        getattr(slopes, name)[at] = np.broadcast_to(x, slopes.dS.shape)[at]
