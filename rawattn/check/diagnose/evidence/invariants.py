"""Identities that right attention satisfies, each checked on one side alone; long by their list.

I1 rows of P sum to 1                    I7 moving all keys alike moves no out
I2 rows of dS sum to dlse, or to 0       I8 the order of the sequences does not matter
I3 with one key, out is its v            I9 nor do the numbers of the neighbours
I4 dv sums to dout                       I10 second derivatives are symmetric
I5 <q, dq> = <k, dk>                     I11 a factor of q is one of softmax_scale
I6 <v, dv> = <out, dout>                 I12 running again gives the same bits

I1 has three names, by the P that it is about: "I1" a saved one, "I1 lse" that of the scores and a
saved lse, "I1 out" the weights that out was made with, seen where v is 1 and in the range of out.
Some stand for more: I2 without dS is about the sum of dk over the keys, which is softmax_scale
times that of dlse q; I3 is about every row whose results are known without a softmax; I10 is also
the derivatives of I2, I4, I5 and I6 in the given direction. All hold for block-sparse attention,
except that with a gate (block_scale) keys cannot be moved: no I7, no I2 from dk, or from gk. With a
softcap, sinks or seqused_k the sums are others, and none is checked.

Longer than other modules by the list of identities; those between runs are in ``runs``.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.evidence.noise import Bools, Float64, sequences
from rawattn.check.diagnose.evidence.runs import Call, Runs
from rawattn.check.diagnose.evidence.side import Side
from rawattn.check.diagnose.evidence.structure import by_rows
from rawattn.check.diagnose.findings import Check

# what a question about the sliding branch alone does not have
NOT_SLIDING = (
    *("block_indices", "block_counts", "block_scale", "tblock_scale", "sliding"),
    *("dout", "dlse", "tq", "tk", "tv", "out", "lse"),
)


def checks(
    question: Question, answers: Answers, side: str, *, call: Call | None = None
) -> tuple[Check, ...]:
    """The identities I1 to I6 and I10 as far as ``answers`` allow; with ``call`` all of them.

    ``call`` computes the answers to another question. An identity for which something is missing
    has the verdict "-", and ``where`` says what. Sequences with NaN or inf in their inputs and rows
    of no sequence do not count; NaN elsewhere in the answers fails.
    """
    if question.rare:
        return ()
    with np.errstate(all="ignore"):
        found = list(_alone(Side.of(question, answers, side)))
        if call is not None:
            found += Runs(question, side, call).checks()
    return tuple(found)


def _alone(one: Side) -> Iterator[Check]:
    """The identities that need no other run."""
    q = one.question
    yield from _forward(one, "out", "lse")
    if q.sliding is not None:
        left, right = q.sliding
        changes: dict[str, Any] = dict.fromkeys(NOT_SLIDING)
        dense = replace(q, **changes, window=(left, 0 if q.causal else right))
        yield from _forward(one.branch(dense), "sliding out", "sliding lse")
    if not one.lacks("jvp out") or not one.lacks("jvp lse"):
        yield from _forward(one, "jvp out", "jvp lse")
    if not one.lacks("P"):
        yield from _intermediate(one, "P")
    if not one.lacks("dS"):
        yield from _intermediate(one, "dS")
    if "backward" in q.stages:
        yield from _first_order(one)
    if not one.lacks("tout"):
        yield from _tangents(one, "tout", "tlse")
    if "second" in q.stages:
        yield from _tangents(one, "ddout", "ddlse")
        yield from _second_order(one)


# ---- the forward, and rows whose results are known --------------------------------------------


def _forward(one: Side, out: str, lse: str) -> Iterator[Check]:
    noise, x, y = one.noise, one.x, one.answers
    text = f"exp(scores - {lse}) sums to 1 over the keys of a row"
    if why := one.lacks(lse):
        yield one.missing("I1 lse", text, why)
    else:
        yield _mass(one, text, y[lse], coarse=one.dtypes[lse].itemsize == 2)
    text = f"{out} lies between the smallest and the largest v of its sequence"
    if why := one.lacks(out):
        yield one.missing("I1 out", text, why)
        return
    low, high = _range_of_v(one)
    beyond = np.maximum(np.maximum(low - y[out], y[out] - high), 0.0)  # NaN stays NaN
    yield one.rows("I1 out", text, beyond, noise["out"] + y[out] ** 2, np.abs(y[out]), one.alive)
    text = f"a query with one key: {out} is its v"
    rounding = (1 + noise["mass"]) * _of_key(one, x.v**2)
    yield from _known(one, text, out, _of_key(one, x.v), rounding)


def _mass(one: Side, text: str, lse: Float64, *, coarse: bool = False) -> Check:
    """I1 of an lse (total_q, num_heads_q, 1); ``coarse``: rounded to 16 bits."""
    exact, noise = one.noise["lse"], one.noise["mass"]
    noise = noise + lse**2 if coarse else noise
    looked = one.alive & ~np.isnan(exact[..., 0])
    size = np.full_like(lse, np.inf)
    return one.rows("I1 lse", text, np.expm1(exact - lse), noise, size, looked)


def _range_of_v(one: Side) -> tuple[Float64, Float64]:
    """The smallest and the largest v of the sequence of a row: both like out."""
    q, seen = one.question, one.reach.seen[..., None]
    shape = (len(q.q), q.num_heads_q, q.v.shape[2])
    low, high = np.full(shape, np.inf), np.full(shape, -np.inf)
    for rows, keys in sequences(q):
        v = one.x.v[keys]
        least = np.where(seen[keys], v, np.inf).min(axis=0, initial=np.inf)
        most = np.where(seen[keys], v, -np.inf).max(axis=0, initial=-np.inf)
        low[rows], high[rows] = (np.repeat(edge, q.group, axis=0) for edge in (least, most))
    return low, high


def _of_key(one: Side, array: Float64) -> Float64:
    """For every row and head of q what ``array`` (like k or v) has for its one key; 0 without."""
    key = one.reach.key
    if not len(array):
        return np.zeros((*key.shape, array.shape[2]))
    head = np.arange(key.shape[1]) // one.question.group
    return np.where((key >= 0)[..., None], array[np.maximum(key, 0), head], 0.0)


def _known(
    one: Side, text: str, tensor: str, wanted: Float64, noise: Float64, why: str = ""
) -> Iterator[Check]:
    """I3: what rows with one key must have, and those without any (0)."""
    if why := one.lacks(tensor) or why:
        yield one.missing("I3", text, why)
        return
    found = one.answers[tensor]
    looked = (one.reach.key >= 0) & ~np.isnan(one.noise["gate"][..., 0])
    size = np.maximum(np.abs(found), np.abs(wanted))
    size = size if wanted.any() else one.unless_zero(tensor, found)
    yield one.rows("I3", text, found - wanted, noise + one.rounded(found), size, looked)
    looked = ~one.alive & (one.question.sequence_of("q") >= 0)[:, None]
    if looked.any():
        zero, text = np.zeros_like(found), f"a query without a key: {tensor} is 0"
        yield one.rows("I3", text, found, zero, zero + np.inf, looked)


# ---- P and dS ---------------------------------------------------------------------------------


def _intermediate(one: Side, tensor: str) -> Iterator[Check]:
    """I1 for P, I2 for dS: their sums, and zeros where nothing is allowed. Of one sequence.

    It is one with the lengths of the array; of several the one that suits best.
    """
    q, array = one.question, one.answers[tensor]
    zero = "0" if q.dlse is None else "dlse"
    name, text = {"P": ("I1", "rows of P sum to 1"), "dS": ("I2", f"rows of dS sum to {zero}")}[
        tensor
    ]
    outside = f"{tensor} is 0 where no key is allowed"
    found = [
        (
            _row_sums(one, name, text, tensor, rows),
            _outside(one, name, outside, tensor, rows, keys),
        )
        for rows, keys in sequences(q)
        if array.shape == (q.num_heads_q, rows.stop - rows.start, keys.stop - keys.start)
    ]
    if not found:
        yield one.missing(name, text, f"no sequence has the lengths of {tensor}")
    else:
        yield from min(found, key=lambda pair: pair[0].value / (pair[0].allowed or 1.0))


def _row_sums(one: Side, name: str, text: str, tensor: str, rows: slice) -> Check:
    array = one.answers[tensor]
    stored = one.rounded(array).sum(axis=2)
    if tensor == "P":
        wanted, noise = one.alive[..., None].astype(np.float64), one.noise["mass"]
    else:
        wanted, noise = one.x.dlse, one.noise["ds"]
        if one.question.dout is None:  # then a row's own numbers are all that is known
            stored = stored + stored.max(initial=0.0)
    off, size = np.zeros_like(wanted), one.unless_zero(tensor, wanted)
    off[rows] = array.sum(axis=2).T[..., None] - wanted[rows]
    noise = noise.copy()
    noise[rows] += stored.T[..., None]
    return one.rows(name, text, off, noise, size, _within(one, rows))


def _outside(one: Side, name: str, text: str, tensor: str, rows: slice, keys: slice) -> Check:
    array, mask = one.answers[tensor], one.reach.mask(rows, keys)
    off = np.zeros((*one.alive.shape, 1))
    off[rows] = np.abs(np.where(mask, 0.0, array)).max(axis=2, initial=0.0).T[..., None]
    looked = _within(one, rows)
    looked[rows] &= ~mask.all(axis=2).T
    return one.rows(name, text, off, np.zeros_like(off), one.unless_zero(tensor, off), looked)


def _within(one: Side, rows: slice) -> Bools:
    within = np.zeros_like(one.alive)
    within[rows] = True
    return within


# ---- gradients --------------------------------------------------------------------------------


def _first_order(one: Side) -> Iterator[Check]:
    q, x, noise, s = one.question, one.x, one.noise, one.question.scale
    larger, zero = _larger(one), q.dlse is None
    text = "sum of dk over the keys is " + ("0" if zero else "softmax_scale times that of dlse q")
    if why := one.lacks("dk") or ("a gate" if q.block_scale is not None else larger):
        yield one.missing("I2", text, why)
    else:
        rounding = s**2 * one.total(x.q**2 * noise["ds"], "q")
        yield one.total_is("I2", text, "dk", s * one.total(x.dlse * x.q, "q"), rounding)
    text = f"a query with one key: dq is {'0' if zero else 'softmax_scale dlse k'}"
    factor = s * np.nan_to_num(noise["gate"])
    wanted = factor * x.dlse * _of_key(one, x.k)
    rounding = factor**2 * _of_key(one, x.k**2) * noise["ds"]
    yield from _known(one, text, "dq", wanted, rounding, larger)
    text = "sum of dv over the keys is that of dout over the queries that see any"
    if why := one.lacks("dv") or larger:
        yield one.missing("I4", text, why)
    else:
        rounding = one.total(x.dout**2 * noise["mass"], "q")
        yield one.total_is("I4", text, "dv", one.total(x.dout, "q"), rounding)
    # a gate does not matter here: q times c and k over c leave the scores as they are
    of_q, of_k, of_gate = [(x.q, "dq")], [(x.k, "dk")], [(x.gate, "dblock_scale")]
    yield one.balance("I5", "<q, dq> = <k, dk>", of_q, of_k, noise["scores"])
    if q.block_scale is not None:
        why = "own blocks have no gate" if one.reach.apart else ""
        text = "<q, dq> = <block_scale, dblock_scale>"
        yield one.balance("I5", text, of_q, of_gate, noise["scores"], why)
    out = "given out" if one.lacks("out") and q.out is not None else "out"
    of_v, of_out = [(x.v, "dv")], [(x.dout, out)]
    yield one.balance("I6", "<v, dv> = <out, dout>", of_v, of_out, noise["values"], larger)


def _larger(one: Side) -> str:
    """Why identities of P's sums do not hold: the given lse may be that of more keys than these."""
    if one.question.lse is None:
        return ""
    failed = _mass(one, "", by_rows("lse", one.question.lse)).verdict == "FAIL"
    return "the lse given to the backward is not that of these keys" if failed else ""


def _tangents(one: Side, tout: str, tlse: str) -> Iterator[Check]:
    """I3 for a tangent of out, and that tangents and gradients are each other's transpose."""
    q, x, noise = one.question, one.x, one.noise
    text = f"a query with one key: {tout} is the tangent of its v"
    rounding = _of_key(one, x.tv**2) * (1 + noise["mass"]) + _of_key(one, x.v**2) * noise["te"]
    yield from _known(one, text, tout, _of_key(one, x.tv), rounding)
    if "backward" not in q.stages:
        return
    direction = {"dq": (q.tq, x.tq), "dk": (q.tk, x.tk), "dv": (q.tv, x.tv)}
    direction["dblock_scale"] = (q.tblock_scale, x.tgate)
    moved = [(part, name) for name, (given, part) in direction.items() if given is not None]
    tangents = [(x.dout, tout)] + [(x.dlse, tlse)] * (q.dlse is not None)
    text = f"<direction, gradients> = <dout, {tout}>"
    text += "" if q.dlse is None else f" + <dlse, {tlse}>"
    yield one.balance("I10", text, moved, tangents, noise["adjoint"])


def _second_order(one: Side) -> Iterator[Check]:
    """The derivatives of I2 to I6, which are H w for those w that leave scores or out alone."""
    q, x, noise, s = one.question, one.x, one.noise, one.question.scale
    text = "sum of gv over the keys is 0"
    if why := one.lacks("gv"):
        yield one.missing("I10", text, why)
    else:
        rounding = one.total(x.dout**2 * noise["te"], "q")
        yield one.total_is("I10", text, "gv", np.zeros_like(rounding), rounding)
    zero = q.dlse is None
    text = "sum of gk over the keys is " + ("0" if zero else "softmax_scale times that of dlse tq")
    if why := one.lacks("gk") or ("" if q.block_scale is None else "a gate"):
        yield one.missing("I10", text, why)
    else:
        rounding = s**2 * one.total(x.q**2 * noise["tds"] + x.tq**2 * noise["ds"], "q")
        yield one.total_is("I10", text, "gk", s * one.total(x.dlse * x.tq, "q"), rounding)
    text = f"a query with one key: gq is {'0' if zero else 'softmax_scale dlse tk'}"
    gate, tgate = (np.nan_to_num(noise[name]) for name in ("gate", "tgate"))
    wanted = s * x.dlse * (gate * _of_key(one, x.tk) + tgate * _of_key(one, x.k))
    yield from _known(one, text, "gq", wanted, noise["gq"])
    left, right = [(x.tq, "dq"), (x.q, "gq")], [(x.tk, "dk"), (x.k, "gk")]
    text = "<tq, dq> + <q, gq> = <tk, dk> + <k, gk>"
    yield one.balance("I10", text, left, right, noise["tscores"])
    left, right = [(x.tv, "dv"), (x.v, "gv")], [(x.dout, "ddout")]
    text = "<tv, dv> + <v, gv> = <dout, ddout>"
    yield one.balance("I10", text, left, right, noise["tvalues"])
