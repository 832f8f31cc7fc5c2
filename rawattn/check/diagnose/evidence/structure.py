"""Where one side differs from the other: a slope, the pattern of the wrong rows."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.question import OF_KEYS, OF_SLOTS, Question, side_of
from rawattn.check.diagnose.evidence.rows import Bools, Float64, Rows
from rawattn.check.diagnose.evidence.rules import Shown, rule_of

SPANS = 3  # of a rule: from so many on chance makes some
COVERED = 0.9  # share of rows that are nearly all
ROWS = {"q": "row", "k": "key"}


def fit(x: Float64, y: Float64) -> tuple[float, float]:
    """Slope of the least-squares line from ``y`` to ``x`` through 0, and what it leaves of x; of
    finite numbers."""
    size_x, size_y = float(np.linalg.norm(x)), float(np.linalg.norm(y))
    if not size_y:
        return (1.0, 0.0) if not size_x else (math.inf, 1.0)
    slope = float(np.vdot(x / size_y, y / size_y))
    rest = float(np.linalg.norm(x - slope * y))
    return slope, rest / size_x if size_x else 0.0


def where(question: Question, tensor: str, bad: Bools) -> tuple[str, ...]:
    """Where the ``bad`` rows (tokens, heads) lie: heads, sequences, rows, in sentences."""
    return tuple(_sentences(question, tensor, bad))


def named(what: str, indices: Any) -> str:
    """ "sequence 1", "sequences 1, 3", "heads 2 to 7"."""
    numbers = np.array([*indices], dtype=int)
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    short = ([f"{x[0]} to {x[-1]}"] if len(x) > 2 else map(str, x) for x in runs)
    pieces = [piece for run in short for piece in run]
    if len(pieces) > 6:
        pieces = [*pieces[:6], f"... ({len(numbers)} of them)"]
    plural = "s" if what and len(numbers) > 1 else ""
    return f"{what}{plural} {', '.join(pieces)}".strip()


def _sentences(question: Question, tensor: str, bad: Bools) -> Iterator[str]:
    within = question.sequence_of(tensor)
    there, row = within >= 0, ROWS[side_of(tensor)]
    head = "kv head" if tensor in OF_KEYS else "selection head" if tensor in OF_SLOTS else "head"
    bad = bad & there[:, None]
    tokens, heads, sequences = int(there.sum()), bad.shape[1], len(np.unique(within[there]))
    of_heads = np.flatnonzero(bad.any(axis=0))
    of_sequences = np.unique(within[bad.any(axis=1)])
    if not bad.any():
        return
    if bad[there].all():
        counts = {"sequence": sequences, "head": heads}
        several = " and ".join(word for word, count in counts.items() if count > 1)
        yield f"every {row} is wrong" + (f", in every {several}" if several else "")
        return
    product = f" ({tokens} tokens in {heads} {head}s)" if heads > 1 else ""
    yield f"{bad.sum()} of {tokens * heads} {row}s are wrong{product}"
    if len(of_heads) < heads:
        yield f"only {named(head, of_heads)} of {heads}"
    if len(of_sequences) < sequences:
        yield f"only {named('sequence', of_sequences)} of {sequences}"
    places = Rows(question, tensor, heads)
    whole = np.broadcast_to(there[:, None], bad.shape)
    touched = np.isin(within, of_sequences)[:, None] & np.isin(np.arange(heads), of_heads)[None]
    for domain, words in ((whole, ""), (touched, "of these, ")):
        rule = rule_of(Shown(places, domain.T, bad.T))
        if rule is not None and 0 < len(rule.spans) < SPANS:
            yield f"{words}the {row}s with {rule}"
            return
    if bad.sum() < COVERED * touched.sum():
        token = int(np.flatnonzero(bad.any(axis=1))[0])
        first = f"{row} {question.place_of(tensor)[token]} of sequence {within[token]}"
        yield f"no pattern of rows, tiles or lengths fits; the first wrong one is {first}"
    elif not touched[there].all():  # else it would say what the count has said
        yield f"{'nearly ' * bool((bad != touched).any())}every {row} of these"
