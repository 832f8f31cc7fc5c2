"""What a kernel may have taken for the D or the lse of a row: other rows' numbers, parts of sums.

Every source is an array (num_heads_q, total_q) of what each row would have got; that a row out of
the array gets is 0, as from memory that nobody wrote.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np

from rawattn.check.diagnose.catalogue import maps
from rawattn.check.diagnose.engine.attention import LOG2_E, Context, Floats
from rawattn.check.diagnose.engine.question import Question


@dataclass(frozen=True)
class Source:
    """``values`` (num_heads_q, total_q) that would be a bug of class ``bug``, ``words`` for it."""

    bug: str
    words: str
    values: Floats


def of_delta(question: Question, contexts: Sequence[Context]) -> Iterator[Source]:
    """What D = dout . out - dlse may have been."""
    dout, out = (_by_head(question, x) for x in (question.dout, contexts[0].given[0]))
    product, dlse = (dout * out).sum(axis=-1), np.zeros(question.q.shape[1::-1])
    another, misplaced = "delta-of-another-out", "statistics-misplaced"
    if question.dlse is not None:
        dlse = np.asarray(question.dlse, dtype=np.float64)
        yield Source("delta-omitted", "D = -dlse", -dlse)
        yield Source("lse-gradient-dropped", "dlse is left out", product)
        for words, factor in _factors(question).items():
            text = f"D = dout . out - {words} dlse"
            yield Source("lse-gradient-sign", text, product - factor * dlse)
    yield Source("delta-omitted", "D = 0", np.zeros_like(product))
    yield from _misread("D", product - dlse, question)
    for words, moved in _elsewhere(question):
        yield Source(another, f"D of the out: {words}", (dout * moved(out)).sum(axis=-1) - dlse)
        yield Source(another, f"D of the dout: {words}", (moved(dout) * out).sum(axis=-1) - dlse)
        if question.dlse is not None:
            yield Source("input-layout", f"dlse: {words}", product - moved(dlse))
            yield Source(misplaced, f"dout . out: {words}", moved(product) - dlse)


def of_lse(question: Question, contexts: Sequence[Context]) -> Iterator[Source]:
    """What the lse of exp(S - lse) may have been."""
    lse = rows_of(question, contexts, lambda c: np.where(np.isneginf(c.L), 0.0, c.L))
    top = rows_of(question, contexts, _top)
    words = "an lse of 0, as if it were not written"
    yield Source("statistics-misplaced", words, np.zeros_like(lse))
    yield Source("lse-base-2", "lse times log2(e)", lse * LOG2_E)
    yield Source("lse-base-2", "lse times ln 2", lse / LOG2_E)
    yield Source("lse-without-max", "lse without the maximum", lse - top)
    yield Source("lse-without-max", "the maximum alone", top)
    yield Source("lse-without-max", "the maximum not scaled", lse - top + top / question.scale)
    yield from _misread("lse", lse, question)


def of_number(right: Floats, name: str, question: Question) -> Iterator[Source]:
    """What another row term may have been: ``right`` read elsewhere."""
    yield Source("statistics-misplaced", f"a {name} of 0", np.zeros_like(right))
    yield from _misread(name, right, question)


def rows_of(
    question: Question, contexts: Sequence[Context], of: Callable[[Context], Floats]
) -> Floats:
    """A number of every row, from all contexts: (num_heads_q, total_q)."""
    found = np.zeros(question.q.shape[1::-1])
    for c in contexts:
        found[c.view.heads[:, None], c.view.rows] = of(c)
    return found


def _top(c: Context) -> Floats:
    top = c.S.max(axis=-1)
    return np.where(np.isneginf(top), 0.0, top)


def _misread(name: str, x: Floats, question: Question) -> Iterator[Source]:
    """A number of every row, read elsewhere or rounded."""
    for words, moved in _elsewhere(question):
        yield Source("statistics-misplaced", f"{name}: {words}", moved(x))
    for dtype in (np.float16, ml_dtypes.bfloat16):
        narrow = x.astype(dtype).astype(np.float64)
        yield Source("accumulates-in-16-bit", f"{name} in {np.dtype(dtype).name}", narrow)


def _elsewhere(question: Question) -> list[tuple[str, Callable[[Floats], Floats]]]:
    """Where else numbers of rows, (heads, tokens), or vectors may have been read."""
    g = maps.geometry(question, "lse")

    def moved(by: maps.Map, x: Floats) -> Floats:
        whole = x.reshape(*x.shape[:2], -1).swapaxes(0, 1)
        at = by.of(g, g.everywhere)._replace(j=np.arange(whole.shape[2]))
        return maps.taken(whole, at).swapaxes(0, 1).reshape(x.shape)

    return [(by.words, partial(moved, by)) for by in maps.families(question, True)]


def _factors(question: Question) -> dict[str, float]:
    """What dlse may have been multiplied by."""
    s, group = question.scale, float(question.group)
    found = {"2": 2.0, "1/2": 0.5, "log2(e)": LOG2_E, "ln 2": 1 / LOG2_E, "s": s, "1/s": 1 / s}
    return found | {"-1": -1.0} | ({"group": group, "1/group": 1 / group} if group > 1 else {})


def _by_head(question: Question, x: Floats | None) -> Floats:
    """(num_heads_q, total_q, columns), 0 outside of sequences."""
    inside = question.sequence_of("q") >= 0
    found = np.where(inside[:, None, None], np.asarray(x, dtype=np.float64), 0.0)
    return np.asarray(found.swapaxes(0, 1))
