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
from rawattn.check.diagnose.engine.question import STAGES, Answers, Question, by_rows
from rawattn.check.diagnose.evidence.reach import Float64
from rawattn.check.diagnose.evidence.runs import Call, Runs
from rawattn.check.diagnose.evidence.side import Side
from rawattn.check.diagnose.findings import Check

# Of each stage equations, and what they do not hold with (``_hindered``). They are read as they
# stand: inner products with an input, and sums over all rows.
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
OF_GATES = ("I5", "<q, dq> = <block_scale, dblock_scale>", "own")
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
    """The identities that need no other run, of stages that there is something of."""
    hindered = _hindered(one)
    for stage in one.question.stages:
        if not one.answers.keys() & {*STAGES[stage]}:
            continue
        yield from _of_softmax(one, *SOFTMAX.get(stage, ()))
        for tensor, of, but in OF_ONE_KEY[stage]:
            yield from _of_one_key(one, tensor, of, _why(hindered, but))
        equations = EQUATIONS.get(stage, ()) if one.question.dout is not None else ()
        if stage == "backward" and one.question.block_scale is not None:
            equations = (*equations, OF_GATES)
        for name, text, but in equations:
            yield _equation(one, name, text, _why(hindered, but))


def _hindered(one: Side) -> dict[str, str]:
    """Why identities do not hold, "" where they do: there is a gate, own blocks have none, or the
    lse that a backward was given may be that of more keys than these."""
    lse = one.question.lse
    larger = lse is not None and _of_lse(one, "lse", by_rows("lse", lse)).verdict == "FAIL"
    return {
        "gate": "a gate" * (one.question.block_scale is not None),
        "own": "own blocks have no gate" * one.reach.apart,
        "lse": "the lse given to the backward is not that of these keys" * larger,
    }


def _why(hindered: dict[str, str], names: str) -> str:
    return next(filter(None, (hindered[name] for name in names.split())), "")


def _of_softmax(one: Side, *names: str) -> Iterator[Check]:
    """I1 of an out and an lse."""
    for name in names:
        if why := one.lacks(name):
            yield one.missing(f"I1 {name[-3:]}", f"rows of P sum to 1 in {name}", why)
        elif name.endswith("lse"):
            yield _of_lse(one, name, one.answers[name])
        else:
            text = f"{name} lies between the smallest and the largest v of its sequence"
            off = one.answers[name] - np.clip(one.answers[name], *_range_of_v(one))
            yield one.rows("I1 out", text, name, off, one.alive)


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


def _of_one_key(one: Side, tensor: str, of: str, why: str) -> Iterator[Check]:
    """I3: what rows with one key must have, and those without any (0)."""
    zero = "dlse" in of and one.question.dlse is None
    text = f"a query with one key: {tensor} is {'0' if zero else of if ' ' in of else f'its {of}'}"
    if why := one.lacks(tensor) or why:
        yield one.missing("I3", text, why)
        return
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


def _equation(one: Side, name: str, text: str, why: str) -> Check:
    """What an equation of EQUATIONS says, without what is not given."""
    sides: list[list[tuple[Float64 | float, str]]] = [[], []]
    said: list[list[str]] = [[], []]
    for n, side in enumerate(text.split(" = ")):
        for term in TERM.finditer(side):
            of, tensor, summed = term.groups()
            absent = of or ("dlse" if "dlse" in (summed or "") else "q")
            if getattr(one.question, absent) is not None:
                sides[n].append((one.x[of] if of else 1.0, tensor or summed))
                said[n].append(term[0])
    if one.lacks("out") and one.question.out is not None:
        sides[1] = [(a, "given out" if n == "out" else n) for a, n in sides[1]]
    text = " = ".join(" + ".join(terms) or "0" for terms in said)
    why = one.lacks(*(tensor for terms in sides for _, tensor in terms)) or why
    return one.missing(name, text, why) if why else one.balance(name, text, *sides)
