"""Identities that right attention satisfies whatever the inputs: evidence that needs no reference.

I1 rows of P sum to 1                    I9 the numbers of the neighbours do not matter
I2 rows of dS sum to dlse, or to 0       I11 a factor of q is one of softmax_scale
I3 with one key, out is its v            I12 running again gives the same bits
I4 dv sums to dout
I5 <q, dq> = <k, dk>

I2 is about the sum of dk over the keys, which is softmax_scale times that of dlse q. These five are
coarse: what fails them is wrong, what passes may be wrong by a few percent. With a softcap, sinks
or seqused_k the sums are others. Those between runs are in ``runs``.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.engine.attention import Floats, solve
from rawattn.check.diagnose.engine.parts import sequences
from rawattn.check.diagnose.engine.question import Answers, Question, by_rows, side_of
from rawattn.check.diagnose.evidence.precision import finite
from rawattn.check.diagnose.evidence.rows import Reach
from rawattn.check.diagnose.evidence.structure import named
from rawattn.check.diagnose.findings import Check

SHARE = 0.1  # of the size of what is added up, which an identity may be off by
Identity = tuple[str, str, Floats, Floats]  # name, text, what it is off by, of which size


class Off(NamedTuple):
    """What an identity is off by at most in a sequence, in the results ``of``."""

    sequence: int
    value: float
    allowed: float
    of: str = ""


def judged(side: str, name: str, text: str, found: Sequence[Off]) -> Check:
    """The check that nothing is off by more than is allowed."""
    if not found:
        return Check(side, name, text, 0.0, 0.0, "-", "no place to check it at")
    bad = [one for one in found if one.value > one.allowed]
    worst = max(bad or found, key=lambda one: one.value - one.allowed)
    places = sorted({one.sequence for one in bad})
    parts = [*dict.fromkeys(one.of for one in bad if one.of)]
    parts += [named("sequence", places)] * (len(places) < len({one.sequence for one in found}))
    verdict, where = ("FAIL", ", ".join(parts) or "all") if bad else ("pass", "")
    return Check(side, name, text, worst.value, worst.allowed, verdict, where)


def largest(x: Floats) -> float:
    """inf where there is NaN."""
    return float(np.nan_to_num(np.abs(x), nan=np.inf, posinf=np.inf).max(initial=0.0))


def healthy(question: Question) -> Iterator[tuple[int, slice, slice, dict[str, Floats]]]:
    """Sequences without NaN and inf in their inputs: rows of q and of k, and these inputs by rows,
    0 where nobody looks at them."""
    reach, x = Reach(question), {}
    for name in ("q", "dout", "dlse", "tq", "k", "v", "tk", "tv"):
        if (given := getattr(question, name)) is not None:
            there = reach.seen if side_of(name) == "k" else reach.count > 0
            array = by_rows("lse" if name == "dlse" else name, given)
            x[name] = np.where(there[..., None], array, 0.0)
    for b, (rows, keys) in enumerate(sequences(question)):
        here = {name: array[keys if side_of(name) == "k" else rows] for name, array in x.items()}
        if all(np.isfinite(array).all() for array in here.values()):
            yield b, rows, keys, here


def checks(question: Question, answers: Answers, side: str) -> tuple[Check, ...]:
    """I1 to I5 as far as ``answers`` allow, in healthy sequences."""
    x = {n: by_rows(n, answers[n]) for n in ("out", "lse", "dq", "dk", "dv") if n in answers}
    lse, key = solve(question, "forward")["lse"], Reach(question).key
    # what is passed in may be of a softmax over more keys
    own = question.lse is None or np.allclose(question.lse, lse, SHARE, SHARE, equal_nan=True)
    right = by_rows("lse", lse)
    found: dict[tuple[str, str], list[Off]] = {}
    for b, rows, keys, at in () if question.rare else healthy(question):
        at |= {name: array[keys if side_of(name) == "k" else rows] for name, array in x.items()}
        of = [*_forward(at, right[rows], key[rows] - keys.start), *_backward(question, at, own)]
        for name, text, off, size in of:
            one = Off(b, largest(off), SHARE * largest(finite(size)))
            found.setdefault((name, text), []).append(one)
    return tuple(judged(side, *key, of) for key, of in found.items())


def _forward(at: dict[str, Floats], lse: Floats, key: np.ndarray) -> Iterator[Identity]:
    """key: of each row and head the only one that it sees, negative for none."""
    if "lse" in at:
        alive, text = np.isfinite(lse), "exp(scores - lse) sums to 1 over the keys of a row"
        with np.errstate(all="ignore"):
            yield "I1", text, np.expm1((lse - at["lse"])[alive]), 1 + np.abs(lse[alive])
    if "out" in at:
        row, head = np.nonzero(key >= 0)
        v = at["v"][key[row, head], head * at["v"].shape[1] // key.shape[1]]
        yield "I3", "a query with one key: out is its v", at["out"][row, head] - v, v


def _backward(question: Question, at: dict[str, Floats], own: bool) -> Iterator[Identity]:
    """Sums over the rows of a sequence and the heads that share keys. own: P sums to 1."""

    def balance(of_keys: Floats, of_queries: Floats) -> tuple[Floats, Floats]:
        """What two sums differ by, and the root of the squares of their terms."""
        kv = (-1, question.group, of_queries.shape[2])
        sums, squares = ((of_queries**n).sum(axis=0).reshape(kv).sum(axis=1) for n in (1, 2))
        return of_keys.sum(axis=0) - sums, np.sqrt((of_keys**2).sum(axis=0) + squares)

    def inner(a: str, b: str) -> Floats:
        return np.asarray((at[a] * at[b]).sum(axis=2, keepdims=True))

    if "dk" in at and own and question.block_scale is None:
        given = "dlse" in at
        of = "sum of softmax_scale dlse q over the queries" if given else "0"
        sums = balance(at["dk"], question.scale * at["dlse"] * at["q"] if given else 0 * at["q"])
        yield "I2", f"sum of dk over the keys = {of}", *sums
    if "dv" in at and own:
        text = "sum of dv over the keys = sum of dout over the queries"
        yield "I4", text, *balance(at["dv"], at["dout"])
    if {"dq", "dk"} <= at.keys():
        yield "I5", "<q, dq> = <k, dk>", *balance(inner("k", "dk"), inner("q", "dq"))
