"""Identities that right attention satisfies, each checked on one side alone.

I1 rows of P sum to 1                    I6 <v, dv> = <dout, out>
I2 rows of dS sum to dlse, or to 0       I8 the order of the sequences does not matter
I3 with one key, out is its v            I9 nor do the numbers of the neighbours
I4 dv sums to dout                       I10 derivatives are each other's transpose
I5 <q, dq> = <k, dk>                     I11 a factor of q is one of softmax_scale
                                         I12 running again gives the same bits

I1 has two names, by the P that it is about: "I1 lse" that of the scores and a saved lse, "I1 out"
the weights that out was made with, seen in the range of out. I2 is about the sum of dk over the
keys, which is softmax_scale times that of dlse q; I3 about every row whose results are known
without a softmax; I10 also stands for the derivatives of I2 to I6 in the given direction: these are
H w for those w that leave scores or out alone. With a softcap, sinks or seqused_k the sums are
others, and I12 alone is checked. Those between runs are in ``runs``.
"""

import re
from collections.abc import Iterator

import numpy as np

from rawattn.check.diagnose.engine.parts import sequences
from rawattn.check.diagnose.engine.question import Answers, Question, by_rows
from rawattn.check.diagnose.evidence.rows import Float64
from rawattn.check.diagnose.evidence.runs import Call, Runs
from rawattn.check.diagnose.evidence.side import Side
from rawattn.check.diagnose.findings import Check

# Of each stage equations, and with what they do not hold: a "gate", none, "own" blocks without one,
# and an "lse" that a backward was given and that may be that of more keys than these. They are read
# as they stand: inner products with an input, and sums over all rows.
TERM = re.compile(r"<(\w+), ([\w ]+)>|sum of ([\w ]+?) over the \w+")
OF_DIRECTION = "<tq, dq> + <tk, dk> + <tv, dv> + <tblock_scale, dblock_scale> = "
EQUATIONS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "backward": (
        (
            "I2",
            "sum of dk over the keys = sum of softmax_scale dlse q over the queries",
            "gate lse",
        ),
        ("I4", "sum of dv over the keys = sum of dout over the queries", "lse"),
        ("I5", "<q, dq> = <k, dk>", ""),
        ("I5", "<q, dq> = <block_scale, dblock_scale>", "own no-gate"),
        ("I6", "<v, dv> = <dout, out>", "lse"),
    ),
    "jvp": (("I10", OF_DIRECTION + "<dout, tout> + <dlse, tlse>", ""),),
    "second": (
        ("I10", OF_DIRECTION + "<dout, ddout> + <dlse, ddlse>", ""),
        ("I10", "sum of gk over the keys = sum of softmax_scale dlse tq over the queries", "gate"),
        ("I10", "sum of gv over the keys = 0", ""),
        ("I10", "<tq, dq> + <q, gq> = <tk, dk> + <k, gk>", ""),
        ("I10", "<tv, dv> + <v, gv> = <dout, ddout>", ""),
    ),
}
# Of a query with one key: a result, what it is of that key, and what that does not hold with.
OF_ONE_KEY = {
    "forward": (("out", "v", ""),),
    "backward": (("dq", "softmax_scale dlse k", "gate lse"),),
    "second": (("ddout", "tv", ""), ("gq", "softmax_scale dlse tk", "gate")),
    "jvp": (("jvp out", "v", ""), ("tout", "tv", "")),
}
SOFTMAX = {"forward": ("lse", "out"), "jvp": ("jvp lse", "jvp out")}


def checks(
    question: Question, answers: Answers, side: str, *, call: Call | None = None
) -> tuple[Check, ...]:
    """The identities I1 to I6 and I10 as far as ``answers`` allow; with ``call`` all of them.

    ``call`` computes the answers to another question. What cannot be checked is left out. Sequences
    with NaN or inf in their inputs and rows of no sequence do not count; NaN elsewhere fails.
    """
    with np.errstate(all="ignore"):
        found = [] if question.rare else list(_alone(Side(question, answers, side)))
        if call is not None:
            found += Runs(question, side, call).checks()
    return tuple(found)


def _alone(one: Side) -> Iterator[Check]:
    """The identities that need no other run, of what there is."""
    q, there = one.question, one.answers.keys()
    larger = q.lse is not None and _of_lse(one, "lse", by_rows("lse", q.lse)).verdict == "FAIL"
    gated = q.block_scale is not None
    reasons = {"gate": gated, "no-gate": not gated, "own": one.reach.apart, "lse": larger}
    hindered = {name for name, so in reasons.items() if so}
    for stage in q.stages:
        for name in (name for name in SOFTMAX.get(stage, ()) if name in there):
            yield _of_lse(one, name, one.answers[name]) if "lse" in name else _of_out(one, name)
        for tensor, of, but in OF_ONE_KEY[stage]:
            if tensor in there and not hindered & {*but.split()}:
                yield from _of_one_key(one, tensor, of)
        for name, text, but in EQUATIONS.get(stage, ()) if q.dout is not None else ():
            if not hindered & {*but.split()}:
                yield from _equation(one, name, text)


def _of_out(one: Side, name: str) -> Check:
    """I1 of an out."""
    text = f"{name} lies between the smallest and the largest v of its sequence"
    off = one.answers[name] - np.clip(one.answers[name], *_range_of_v(one))
    return one.rows("I1 out", text, name, off, one.alive)


def _of_lse(one: Side, name: str, lse: Float64) -> Check:
    """I1 of an lse (total_q, num_heads_q, 1)."""
    exact = one.right[name]
    text = f"exp(scores - {name}) sums to 1 over the keys of a row"
    looked = one.alive & ~np.isnan(exact[..., 0])
    return one.rows("I1 lse", text, name, np.expm1(exact - lse), looked)


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


def _of_one_key(one: Side, tensor: str, of: str) -> Iterator[Check]:
    """I3: what rows with one key must have, and those without any (0)."""
    zero = "dlse" in of and one.question.dlse is None
    text = f"a query with one key: {tensor} is {'0' if zero else of if ' ' in of else f'its {of}'}"
    (*factor, name), found, key = of.rsplit(" ", 1), one.answers[tensor], one.reach.key
    x = one.x[name]
    head = np.arange(key.shape[1]) // one.question.group
    wanted = np.where((key >= 0)[..., None], x[np.maximum(key, 0), head] if len(x) else 0.0, 0.0)
    wanted = one.question.scale * one.x["dlse"] * wanted if factor else wanted
    yield one.rows("I3", text, tensor, found - wanted, key >= 0)
    dead = ~one.alive & (one.question.sequence_of("q") >= 0)[:, None]
    if dead.any():
        text = f"a query without a key: {tensor} is 0"
        yield one.rows("I3", text, tensor, found, dead)


def _equation(one: Side, name: str, text: str) -> Iterator[Check]:
    """What an equation of EQUATIONS says, without what is not given."""
    sides: list[list[tuple[Float64 | float, str]]] = [[], []]
    said: list[list[str]] = [[], []]
    saved = "out" not in one.answers and one.question.out is not None
    for n, side in enumerate(text.split(" = ")):
        for term in TERM.finditer(side):
            of, tensor, summed = term.groups()
            absent = of or ("dlse" if "dlse" in summed else "q")
            if getattr(one.question, absent) is not None:
                tensor = "given out" if tensor == "out" and saved else tensor or summed
                sides[n].append((one.x[of] if of else 1.0, tensor))
                said[n].append(term[0])
    if all(tensor in one.answers for terms in sides for _, tensor in terms):
        text = " = ".join(" + ".join(terms) or "0" for terms in said)
        yield one.balance(name, text, *sides)
