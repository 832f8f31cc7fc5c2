"""What a wrong gradient of the sinks is the sum of: of which rows, of which terms."""

from collections.abc import Iterator

import numpy as np

from rawattn.check.diagnose.catalogue.reading import array_of
from rawattn.check.diagnose.engine.attention import TILES, Floats, Same, deltas
from rawattn.check.diagnose.engine.question import Question
from rawattn.reference.dense import dead_to_inf

ALL = "all queries"


def said(
    question: Question, stage: str, given: tuple[Floats, Floats], found: Floats, allowed: float
) -> str:
    """In words; "" where no sum gives it up to ``allowed``."""
    rows, terms = dict(_rows(question)), dict(_terms(question, given, stage))
    factors = {"": -1.0, " with the wrong sign": 1.0, " times softmax_scale": -question.scale}
    for sign, factor in factors.items():
        for term, x in terms.items():
            sums = {of: factor * (x * there).sum(axis=1) for of, there in rows.items()}
            if like := [of for of, y in sums.items() if np.abs(y - found).max() <= allowed]:
                over = " or ".join(like[: 1 + (like[0] != ALL)])
                return f"it is the sum of {term} over {over}{sign}"
    return ""


def _terms(
    question: Question, given: tuple[Floats, Floats], stage: str
) -> Iterator[tuple[str, Floats]]:
    """What a row (num_heads_q, total_q) may add."""
    sinks, D = np.asarray(question.sinks, dtype=np.float64)[:, None], deltas(question, Same(given))
    inside = question.sequence_of("q") >= 0
    weight = np.exp(sinks - dead_to_inf(np, np.asarray(given[1], dtype=np.float64))) * inside
    if stage == "second":
        e, W = (array_of(question, Same(given), name) for name in ("e", "w"))
        moved = np.zeros(len(sinks)) if question.tsinks is None else np.asarray(question.tsinks)
        parts = {"ddsinks D": moved[:, None] * D, "e D": -e * D, "W": W}
        whole, text = weight * sum(parts.values()), "exp(sink - lse) ((ddsinks - e) D + W)"
        yield text, whole
        for how, often in (("without", -1), ("with the other sign of", -2), ("with twice", 1)):
            yield from (
                (f"{text} {how} {n},", whole + often * weight * x) for n, x in parts.items()
            )
        if question.dlse is not None:
            more = weight * (moved[:, None] - e) * question.dlse
            yield f"{text} without dlse in D,", whole + more
        return
    yield "exp(sink - lse) D", weight * D
    yield "exp(sink - lse), without D,", weight
    if question.dlse is not None:
        yield "exp(sink - lse) dout . out, without dlse,", weight * (D + question.dlse)
    yield "exp(sink) D, without lse,", np.exp(sinks) * D * (weight > 0)


def _rows(question: Question) -> Iterator[tuple[str, np.ndarray]]:
    """Rows (total_q,) of which there may be a sum."""
    b, i = question.sequence_of("q"), question.place_of("q")
    n = np.asarray(question.lengths_q)[b]
    first, last = b == b[b >= 0].min(initial=len(b)), b == b.max(initial=-1)
    yield ALL, b >= 0
    yield from (("the last sequence alone", last), ("the first sequence alone", first))
    yield from (("all sequences but the last", ~last), ("all sequences but the first", ~first))
    for tile in TILES:
        own, end = i // tile, (n - 1) // tile
        parts = {"last tile": own == end, "first tile": own == 0}
        for name, there in parts.items():
            yield f"the {name} of {tile} queries of each sequence alone", there
            yield f"all queries but the {name} of {tile} of each sequence", ~there
        yield f"whole tiles of {tile} queries alone", i < n // tile * tile
