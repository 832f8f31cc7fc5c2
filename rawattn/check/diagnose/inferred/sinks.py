"""What a wrong gradient of the sinks is the sum of: of which rows, of which terms."""

from itertools import product

import numpy as np

from rawattn.check.diagnose.catalogue import maps
from rawattn.check.diagnose.catalogue.reading import array_of
from rawattn.check.diagnose.engine.attention import TILES, Floats, Passed, Same, deltas
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.engine.steps import LOG2_E
from rawattn.reference.dense import dead_to_inf

ALL, ITS = "all queries", "exp(sink - lse)"


def said(question: Question, stage: str, given: Passed, found: Floats, allowed: float) -> str:
    """In words; "" where no sum gives it up to ``allowed``. Two sums with the fewest changes."""
    factors = {"": -1.0, " with the wrong sign": 1.0, " times softmax_scale": -question.scale}
    factors |= {" divided by the number of sequences": -1 / max(question.batch, 1)}
    terms, rows = _terms(question, given, stage), _rows(question)
    like: dict[str, int] = {}
    for (sign, factor), (term, (x, changes)) in product(factors.items(), terms.items()):
        sums = {of: factor * (x * often).sum(axis=1) for of, often in rows.items()}
        of_group = sums[ALL].reshape(-1, question.group).sum(axis=1)
        sums[f"{ALL}, of all heads of its group,"] = of_group.repeat(question.group)
        sums[f"{ALL}, of all heads of a group, at head h // group,"] = np.append(
            of_group, np.zeros(len(found) - len(of_group))
        )
        for of, y in sums.items():
            if np.abs(y - found).max() <= allowed:
                text = f"the sum of {term} over {of}{sign}"
                like[text] = changes + (of != ALL) + (sign != "")
    for by in maps.families(question, True) if stage == "backward" else ():
        x = by.moved(maps.geometry(question, "lse"), terms[f"{ITS} D"][0])
        if np.abs(x.sum(axis=1) + found).max() <= allowed:
            like[f"the sum of {ITS} D over {ALL}, summed as other rows: {by.words}"] = 1
    best = [text for text in like if like[text] == min(like.values())]
    return f"it is {' or '.join(best[:2])}" if best else ""


def _terms(question: Question, given: Passed, stage: str) -> dict[str, tuple[Floats, int]]:
    """What a row (num_heads_q, total_q) may add, and how many changes it is."""
    sinks, D = np.asarray(question.sinks, dtype=np.float64)[:, None], deltas(question, Same(given))
    inside = question.sequence_of("q") >= 0
    lse = dead_to_inf(np, np.asarray(given[1], dtype=np.float64))
    dlse = np.zeros(D.shape) if question.dlse is None else np.asarray(question.dlse, np.float64)
    dlse = np.where(inside, dlse, 0.0)  # which may be NaN past the end
    weights = _weights(question, sinks, lse)
    if stage == "backward":
        rows = {"D": D, "": 1 + 0 * D, "dout . out": D + dlse}
    else:
        e, W = (array_of(question, Same(given), name) for name in ("e", "w"))
        moved = 0 * sinks if question.tsinks is None else np.asarray(question.tsinks)[:, None]
        parts = {"ddsinks D": moved * D, "e D": -e * D, "W": W}
        whole, text = (moved - e) * D + W, "((ddsinks - e) D + W)"
        weights, rows = {ITS: weights[ITS]}, {text: whole}
        for how, often in (("without", -1), ("with the other sign of", -2), ("with twice", 1)):
            rows |= {f"{text} {how} {n}": whole + often * x for n, x in parts.items()}
        rows[f"{text} without dlse in D"] = whole + (moved - e) * dlse
    first = next(iter(rows))
    return {
        f"{by} {row}".strip(): (w * inside * x, (by != ITS) + (row != first))
        for (by, w), (row, x) in product(weights.items(), rows.items())
    }


def _weights(question: Question, sinks: Floats, lse: Floats) -> dict[str, Floats]:
    """What the weight of the sink may be in every row."""
    factors = {"": 1.0, "log2(e) ": LOG2_E, "ln 2 ": 1 / LOG2_E, "0 ": 0.0}
    factors |= {"softmax_scale ": question.scale}
    exponents = {
        f"exp({a}sink - {b}lse)": x * sinks - y * np.where(np.isfinite(lse), lse, 0.0)
        for (a, x), (b, y) in product(factors.items(), factors.items())
    }
    if (cap := question.softcap) is not None:
        exponents["exp(softcap(sink) - lse)"] = cap * np.tanh(sinks / cap) - dead_to_inf(np, lse)
    with np.errstate(over="ignore"):
        return {words: np.exp(x) * np.isfinite(lse) for words, x in exponents.items()}


def _rows(question: Question) -> dict[str, Floats]:
    """Rows (total_q,) of which there may be a sum."""
    b, i = question.sequence_of("q"), question.place_of("q")
    n, m = (np.array([*lengths, 0])[b] for lengths in (question.lengths_q, question.lengths_k))
    final = b == b.max(initial=-1)
    found = {ALL: b >= 0, "the last sequence alone": final, "queries of sequences with keys": m > 0}
    for t in TILES:
        tail = final & (i // t == (n - 1) // t)
        found[f"the last tile of {t} queries of the last sequence"] = tail
    return {of: rows & (b >= 0) for of, rows in found.items()}
