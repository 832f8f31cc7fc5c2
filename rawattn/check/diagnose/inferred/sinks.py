"""What a wrong gradient of the sinks is the sum of: of which rows, of which terms."""

from itertools import product

import numpy as np

from rawattn.check.diagnose.catalogue import maps
from rawattn.check.diagnose.catalogue.reading import array_of
from rawattn.check.diagnose.engine.attention import LOG2_E, TILES, Floats, Same, deltas
from rawattn.check.diagnose.engine.question import Question
from rawattn.reference.dense import dead_to_inf

ALL, ITS = "all queries", "exp(sink - lse)"


def said(
    question: Question, stage: str, given: tuple[Floats, Floats], found: Floats, allowed: float
) -> str:
    """In words; "" where no sum gives it up to ``allowed``. Of sums that do those with the fewest
    changes, the first two."""
    factors = {"": -1.0, " with the wrong sign": 1.0, " times softmax_scale": -question.scale}
    factors |= {" divided by the number of sequences": -1 / max(question.batch, 1)}
    terms, rows = _terms(question, given, stage), _rows(question)
    like: dict[str, int] = {}
    for (sign, factor), (term, (x, changes)) in product(factors.items(), terms.items()):
        sums = {of: factor * (x * often).sum(axis=1) for of, often in rows.items()}
        of_group = sums[ALL].reshape(-1, question.group)
        for of, y in {"sum": of_group.sum(axis=1), "mean": of_group.mean(axis=1)}.items():
            sums[f"{ALL}, of the heads of its group the {of},"] = y.repeat(question.group)
        for of, y in sums.items():
            if np.abs(y - found).max() <= allowed:
                text = f"the sum of {term} over {of}{sign}"
                like[text] = changes + (of != ALL) + (sign != "")
    best = [text for text in like if like[text] == min(like.values())]
    return f"it is {' or '.join(best[:2])}" if best else ""


def _terms(
    question: Question, given: tuple[Floats, Floats], stage: str
) -> dict[str, tuple[Floats, int]]:
    """What a row (num_heads_q, total_q) may add, and how many changes it is."""
    sinks, D = np.asarray(question.sinks, dtype=np.float64)[:, None], deltas(question, Same(given))
    inside = question.sequence_of("q") >= 0
    lse = dead_to_inf(np, np.asarray(given[1], dtype=np.float64))
    weight = np.exp(sinks - lse) * inside
    dlse = np.zeros(D.shape) if question.dlse is None else np.asarray(question.dlse, np.float64)
    dlse = np.where(inside, dlse, 0.0)  # which may be NaN past the end
    if stage == "backward":
        of_rows = {"D": D, "1, without D,": 1 + 0 * D, "dout . out, without dlse,": D + dlse}
        weights = _weights(question, sinks, lse)
        return {
            f"{by} {row}".replace(" 1,", ","): (w * inside * x, (by != ITS) + (row != "D"))
            for (by, w), (row, x) in product(weights.items(), of_rows.items())
        }
    e, W = (array_of(question, Same(given), name) for name in ("e", "w"))
    moved = 0 * sinks if question.tsinks is None else np.asarray(question.tsinks)[:, None]
    parts = {"ddsinks D": moved * D, "e D": -e * D, "W": W}
    whole, text = weight * sum(parts.values()), "exp(sink - lse) ((ddsinks - e) D + W)"
    found = {text: whole}
    for how, often in (("without", -1), ("with the other sign of", -2), ("with twice", 1)):
        found |= {f"{text} {how} {n},": whole + often * weight * x for n, x in parts.items()}
    found |= {f"{text} without dlse in D,": whole + weight * (moved - e) * dlse}
    return {name: (x, int(name != text)) for name, x in found.items()}


def _weights(question: Question, sinks: Floats, lse: Floats) -> dict[str, Floats]:
    """What the weight of the sink may be in every row."""
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        of_keys = np.exp(lse) - np.exp(sinks)
        alone = np.where(of_keys > 1e-9 * np.exp(lse), np.exp(sinks) / of_keys, 0.0)
    exponents = {
        ITS: sinks - lse,
        "exp2(sink - lse)": (sinks - lse) / LOG2_E,
        "exp(sink - log2(e) lse)": sinks - LOG2_E * lse,
        "exp(log2(e) sink - lse)": LOG2_E * sinks - lse,
        "exp(sink - ln 2 lse)": sinks - lse / LOG2_E,
        "exp(softmax_scale sink - lse)": question.scale * sinks - lse,
        "exp(sink), without lse,": sinks + 0 * lse,
        "exp(-lse), without the sink,": -lse,
    }
    heads = maps.other_heads(np.arange(len(sinks)), len(sinks), question.group)
    exponents |= {f"{ITS}, with the sink of {of},": sinks[h] - lse for of, h in heads.items()}
    alive = np.isfinite(lse)
    with np.errstate(over="ignore"):
        found = {words: np.exp(x) * alive for words, x in exponents.items()}
    return {**found, "exp(sink - lse), with the lse of keys alone,": alone * alive}


def _rows(question: Question) -> dict[str, Floats]:
    """Rows (total_q,) of which there may be a sum, and how often each counts."""
    b, i = question.sequence_of("q"), question.place_of("q")
    n, m = (np.array([*x, 0])[b] for x in (question.lengths_q, question.lengths_k))
    first, last = b == b[b >= 0].min(initial=len(b)), b == b.max(initial=-1)
    found = {ALL: b >= 0, "the last sequence alone": last, "the first sequence alone": first}
    for t in TILES:
        found |= {
            f"queries but those of a partial tile of {t}": i < n // t * t,
            f"the last tile of {t} queries of each sequence": i // t == (n - 1) // t,
            f"the first tile of {t} queries of each sequence": i < t,
            f"the last tile of {t} queries of the last sequence": last & (i // t == (n - 1) // t),
            f"{ALL} once for every tile of {t} keys": -(-m // t),
        }
    return {of: often * (b >= 0.0) for of, often in found.items()}
