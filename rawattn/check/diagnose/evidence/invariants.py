"""Identities that right attention satisfies, each checked on one side alone.

I1 rows of P sum to 1                    I6 <v, dv> = <out, dout>
I2 rows of dS sum to dlse, or to 0       I8 the order of the sequences does not matter
I3 with one key, out is its v            I9 nor do the numbers of the neighbours
I4 dv sums to dout                       I10 derivatives are each other's transpose
I5 <q, dq> = <k, dk>                     I11 a factor of q is one of softmax_scale
                                         I12 running again gives the same bits

I1 has two names, by the P that it is about: "I1 lse" that of the scores and a saved lse, "I1 out"
the weights that out was made with, seen in the range of out. I2 is about the sum of dk over the
keys, which is softmax_scale times that of dlse q; I3 about every row whose results are known
without a softmax; I10 also stands for the derivatives of I2 to I6 in the given direction. All hold
for block-sparse attention, except that with a gate (block_scale) there is no I2. With a softcap,
sinks or seqused_k the sums are others, and I12 alone is checked. Those between runs are in
``runs``.
"""

from collections.abc import Iterator

import numpy as np

from rawattn.check.diagnose.engine.parts import sequences
from rawattn.check.diagnose.engine.question import Answers, Question, by_rows
from rawattn.check.diagnose.evidence.reach import Float64
from rawattn.check.diagnose.evidence.runs import Call, Runs
from rawattn.check.diagnose.evidence.side import Side
from rawattn.check.diagnose.findings import Check


def checks(
    question: Question, answers: Answers, side: str, *, call: Call | None = None
) -> tuple[Check, ...]:
    """The identities I1 to I6 and I10 as far as ``answers`` allow; with ``call`` all of them.

    ``call`` computes the answers to another question. An identity for which something is missing
    has the verdict "-", and ``where`` says what. Sequences with NaN or inf in their inputs and rows
    of no sequence do not count; NaN elsewhere in the answers fails.
    """
    with np.errstate(all="ignore"):
        found = [] if question.rare else list(_alone(Side(question, answers, side)))
        if call is not None:
            found += Runs(question, side, call).checks()
    return tuple(found)


def _alone(one: Side) -> Iterator[Check]:
    """The identities that need no other run."""
    stages = one.question.stages
    yield from _forward(one, "out", "lse")
    if not one.lacks("jvp out") or not one.lacks("jvp lse"):
        yield from _forward(one, "jvp out", "jvp lse")
    if "backward" in stages:
        yield from _first_order(one)
    if not one.lacks("tout"):
        yield from _tangents(one, "tout", "tlse")
    if "second" in stages:
        yield from _tangents(one, "ddout", "ddlse")
        yield from _second_order(one)


# ---- the forward, and rows whose results are known --------------------------------------------


def _forward(one: Side, out: str, lse: str) -> Iterator[Check]:
    text = f"exp(scores - {lse}) sums to 1 over the keys of a row"
    why = one.lacks(lse)
    yield one.missing("I1 lse", text, why) if why else _mass(one, text, lse, one.answers[lse])
    text = f"{out} lies between the smallest and the largest v of its sequence"
    if why := one.lacks(out):
        yield one.missing("I1 out", text, why)
        return
    y, (low, high) = one.answers[out], _range_of_v(one)
    beyond = np.maximum(np.maximum(low - y, y - high), 0.0)  # NaN stays NaN
    noise = one.off_by(out, one.alive) + (one.unit * y) ** 2
    yield one.rows("I1 out", text, beyond, noise, np.abs(y), one.alive)
    yield from _known(one, f"a query with one key: {out} is its v", out, _of_key(one, "v"))


def _mass(one: Side, text: str, tensor: str, lse: Float64) -> Check:
    """I1 of an lse (total_q, num_heads_q, 1)."""
    exact = one.right[tensor]
    looked = one.alive & ~np.isnan(exact[..., 0])
    noise = one.off_by(tensor, looked)
    return one.rows("I1 lse", text, np.expm1(exact - lse), noise, np.full_like(lse, np.inf), looked)


def _range_of_v(one: Side) -> tuple[Float64, Float64]:
    """The smallest and the largest v of the sequence of a row: both like out."""
    q, seen = one.question, one.reach.seen[..., None]
    low, high = (np.full((len(q.q), q.num_heads_q, q.v.shape[2]), by) for by in (np.inf, -np.inf))
    for rows, keys in sequences(q):
        v = one.x["v"][keys]
        least = np.where(seen[keys], v, np.inf).min(axis=0, initial=np.inf)
        most = np.where(seen[keys], v, -np.inf).max(axis=0, initial=-np.inf)
        low[rows], high[rows] = (np.repeat(edge, q.group, axis=0) for edge in (least, most))
    return low, high


def _of_key(one: Side, name: str) -> Float64:
    """For every row and head of q what an input (like k or v) has for its one key; 0 without."""
    key, array = one.reach.key, one.x[name]
    if not len(array):
        return np.zeros((*key.shape, array.shape[2]))
    head = np.arange(key.shape[1]) // one.question.group
    return np.where((key >= 0)[..., None], array[np.maximum(key, 0), head], 0.0)


def _known(one: Side, text: str, tensor: str, wanted: Float64, why: str = "") -> Iterator[Check]:
    """I3: what rows with one key must have, and those without any (0)."""
    if why := one.lacks(tensor) or why:
        yield one.missing("I3", text, why)
        return
    found, looked = one.answers[tensor], one.reach.key >= 0
    size = np.maximum(np.abs(found), np.abs(wanted))
    size = size if wanted.any() else one.unless_zero(tensor, found)
    noise = one.off_by(tensor, looked) + one.unit**2 * wanted**2
    yield one.rows("I3", text, found - wanted, noise, size, looked)
    looked = ~one.alive & (one.question.sequence_of("q") >= 0)[:, None]
    if looked.any():
        text = f"a query without a key: {tensor} is 0"
        yield one.rows("I3", text, found, 0.0, np.full_like(found, np.inf), looked)


# ---- gradients --------------------------------------------------------------------------------


def _sums_of_dS(one: Side, dq: str, dk: str, q: str, k: str, larger: str = "") -> Iterator[Check]:
    """I2, and I3 of dq: of gradients, or with a direction for q and k of their tangents."""
    x, s, zero = one.x, one.question.scale, one.question.dlse is None
    why = larger if one.question.block_scale is None else "a gate"
    text = f"sum of {dk} over the keys is " + ("0" if zero else f"that of softmax_scale dlse {q}")
    wanted = s * one.total(x["dlse"] * x[q], "q")
    yield one.balance("I2" if q == "q" else "I10", text, [(1.0, dk)], (), why, wanted)
    text = f"a query with one key: {dq} is " + ("0" if zero else f"softmax_scale dlse {k}")
    yield from _known(one, text, dq, s * x["dlse"] * _of_key(one, k), why)


def _first_order(one: Side) -> Iterator[Check]:
    q, x, larger = one.question, one.x, _larger(one)
    yield from _sums_of_dS(one, "dq", "dk", "q", "k", larger)
    text = "sum of dv over the keys is that of dout over the queries that see any"
    yield one.balance("I4", text, [(1.0, "dv")], (), larger, one.total(x["dout"], "q"))
    # a gate does not matter here: q times c and k over c leave the scores as they are
    of_q = [(x["q"], "dq")]
    yield one.balance("I5", "<q, dq> = <k, dk>", of_q, [(x["k"], "dk")])
    if q.block_scale is not None:
        why = "own blocks have no gate" if one.reach.apart else ""
        text = "<q, dq> = <block_scale, dblock_scale>"
        yield one.balance("I5", text, of_q, [(x["gate"], "dblock_scale")], why)
    out = "given out" if one.lacks("out") and q.out is not None else "out"
    yield one.balance("I6", "<v, dv> = <out, dout>", [(x["v"], "dv")], [(x["dout"], out)], larger)


def _larger(one: Side) -> str:
    """Why identities of P's sums do not hold: the given lse may be that of more keys than these."""
    if one.question.lse is None:
        return ""
    failed = _mass(one, "", "lse", by_rows("lse", one.question.lse)).verdict == "FAIL"
    return "the lse given to the backward is not that of these keys" if failed else ""


def _tangents(one: Side, tout: str, tlse: str) -> Iterator[Check]:
    """I3 for a tangent of out, and that tangents and gradients are each other's transpose."""
    q, x = one.question, one.x
    text = f"a query with one key: {tout} is the tangent of its v"
    yield from _known(one, text, tout, _of_key(one, "tv"))
    if "backward" not in q.stages:
        return
    moved = [(x[f"t{n}"], f"d{n}") for n in "qkv" if getattr(q, f"t{n}") is not None]
    moved += [(x["tgate"], "dblock_scale")] * (q.tblock_scale is not None)
    tangents = [(x["dout"], tout)] + [(x["dlse"], tlse)] * (q.dlse is not None)
    text = f"<direction, gradients> = <dout, {tout}>"
    text += "" if q.dlse is None else f" + <dlse, {tlse}>"
    yield one.balance("I10", text, moved, tangents)


def _second_order(one: Side) -> Iterator[Check]:
    """The derivatives of I2 to I6, which are H w for those w that leave scores or out alone."""
    x, none = one.x, np.zeros(one.total(one.x["v"], "k").shape)
    yield one.balance("I10", "sum of gv over the keys is 0", [(1.0, "gv")], wanted=none)
    yield from _sums_of_dS(one, "gq", "gk", "tq", "tk")
    left, right = [(x["tq"], "dq"), (x["q"], "gq")], [(x["tk"], "dk"), (x["k"], "gk")]
    yield one.balance("I10", "<tq, dq> + <q, gq> = <tk, dk> + <k, gk>", left, right)
    left, right = [(x["tv"], "dv"), (x["v"], "gv")], [(x["dout"], "ddout")]
    yield one.balance("I10", "<tv, dv> + <v, gv> = <dout, ddout>", left, right)
