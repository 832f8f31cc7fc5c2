"""What a wrong gradient of the sinks is the sum of: of which rows, of which terms."""

from itertools import product

import numpy as np

from rawattn.check.diagnose.catalogue import maps
from rawattn.check.diagnose.catalogue.reading import array_of
from rawattn.check.diagnose.engine.attention import Floats, Same, deltas
from rawattn.check.diagnose.engine.question import Question
from rawattn.reference.dense import dead_to_inf

ALL = "all queries"


def said(
    question: Question, stage: str, given: tuple[Floats, Floats], found: Floats, allowed: float
) -> str:
    """In words; "" where no sum gives it up to ``allowed``."""
    factors = {"": -1.0, " with the wrong sign": 1.0, " times softmax_scale": -question.scale}
    terms, rows = _terms(question, given, stage), _rows(question)
    for (sign, factor), (term, x) in product(factors.items(), terms.items()):
        sums = {of: factor * (x * there).sum(axis=1) for of, there in rows.items()}
        of_group = sums[ALL].reshape(-1, question.group).sum(axis=1).repeat(question.group)
        sums[f"{ALL} and all heads of the group"] = of_group
        if like := [of for of, y in sums.items() if np.abs(y - found).max() <= allowed]:
            over = " or ".join(like[: 1 + (like[0] != ALL)])
            return f"it is the sum of {term} over {over}{sign}"
    return ""


def _terms(question: Question, given: tuple[Floats, Floats], stage: str) -> dict[str, Floats]:
    """What a row (num_heads_q, total_q) may add."""
    sinks, D = np.asarray(question.sinks, dtype=np.float64)[:, None], deltas(question, Same(given))
    inside = question.sequence_of("q") >= 0
    weight = np.exp(sinks - dead_to_inf(np, np.asarray(given[1], dtype=np.float64))) * inside
    dlse = 0.0 if question.dlse is None else question.dlse
    if stage == "backward":
        heads = maps.other_heads(np.arange(len(sinks)), len(sinks), question.group)
        others = {
            f"exp(sink - lse) D, with the sink of {of}": weight * np.exp(sinks[h] - sinks) * D
            for of, h in heads.items()
        }
        return {
            "exp(sink - lse) D": weight * D,
            "exp(sink - lse), without D,": weight,
            "exp(sink - lse) dout . out, without dlse,": weight * (D + dlse),
            "exp(sink) D, without lse,": np.exp(sinks) * D * (weight > 0),
            **others,
        }
    e, W = (array_of(question, Same(given), name) for name in ("e", "w"))
    moved = 0 * sinks if question.tsinks is None else np.asarray(question.tsinks)[:, None]
    parts = {"ddsinks D": moved * D, "e D": -e * D, "W": W}
    whole, text = weight * sum(parts.values()), "exp(sink - lse) ((ddsinks - e) D + W)"
    found = {text: whole}
    for how, often in (("without", -1), ("with the other sign of", -2), ("with twice", 1)):
        found |= {f"{text} {how} {n},": whole + often * weight * x for n, x in parts.items()}
    return found | {f"{text} without dlse in D,": whole + weight * (moved - e) * dlse}


def _rows(question: Question) -> dict[str, np.ndarray]:
    """Rows (total_q,) of which there may be a sum."""
    b = question.sequence_of("q")
    first, last = b == b[b >= 0].min(initial=len(b)), b == b.max(initial=-1)
    return {ALL: b >= 0, "the last sequence alone": last, "the first sequence alone": first}
