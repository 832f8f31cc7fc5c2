"""Where one side differs from the other: slopes by part, the pattern of the wrong rows.

A row is a token with one head: arrays are brought to (tokens, heads, width), numbers by row too.
Longer than other modules by the features that wrong rows are told by.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.question import (
    OF_KEYS,
    OF_SLOTS,
    Answers,
    Question,
    by_rows,
    side_of,
)
from rawattn.check.diagnose.evidence.reach import Bools, Float64, Ints, Reach
from rawattn.check.diagnose.evidence.rules import Shown, rule_of
from rawattn.check.diagnose.findings import Level

TILES = (16, 32, 64, 128)
FEW = 5  # rows that have levels of their own
CLOSE = 0.02  # slopes this near to 1 with residuals below it are those of rounding
SPANS = 3  # of a rule: from so many on chance makes some
COVERED = 0.9  # share of rows that are nearly all
ROWS = {"q": "row", "k": "key"}


def levels(question: Question, answers: Answers, reference: Answers) -> tuple[Level, ...]:
    """Slope, residual and error of ``answers`` over ``reference``: all, by sequence, by head, and
    of the few rows with the largest errors."""
    with np.errstate(all="ignore"):
        return tuple(level for x in _pairs(question, answers, reference) for level in _levels_of(x))


def fit(found: Float64, wanted: Float64) -> tuple[float, float, float]:
    """Slope of the least-squares line through 0, what it leaves of ``found``, the largest error.

    NaN and inf in unequal places are an infinite error, and left out of the line.
    """
    error = float(_error(found, wanted).max(initial=0.0))
    both = np.isfinite(found) & np.isfinite(wanted)
    x, y = found[both], wanted[both]
    size_x, size_y = float(np.linalg.norm(x)), float(np.linalg.norm(y))
    if not size_y:
        return (1.0, 0.0, error) if not size_x else (math.inf, 1.0, error)
    slope = float((x / size_y) @ (y / size_y))
    rest = float(np.linalg.norm(x - slope * y))
    return slope, rest / size_x if size_x else 0.0, error


def off(level: Level) -> bool:
    """Whether more than rounding is between the two sides."""
    return not (abs(level.slope - 1) < CLOSE and level.residual < CLOSE)


def where(question: Question, tensor: str, bad: Bools) -> tuple[str, ...]:
    """Where the ``bad`` rows (tokens, heads) lie: heads, sequences, rows, in sentences."""
    return tuple(_sentences(question, tensor, bad))


def named(what: str, indices: Any) -> str:
    """ "sequence 1", "sequences 1, 3", "heads 2 to 7"."""
    numbers = [int(i) for i in indices]
    runs: list[list[int]] = []
    for i in numbers:
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    pieces: list[str] = []
    for run in runs:
        pieces += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(i) for i in run]
    if len(pieces) > 6:
        pieces = [*pieces[:6], f"... ({len(numbers)} of them)"]
    plural = "s" if what and len(numbers) > 1 else ""
    return f"{what}{plural} {', '.join(pieces)}".strip()


@dataclass(frozen=True, eq=False)
class _Pair:
    """A tensor of both sides, (tokens, heads, width): found, wanted, and the error of every row, 0
    in rows of no sequence."""

    question: Question
    tensor: str
    found: Float64
    wanted: Float64

    @cached_property
    def sequence(self) -> Ints:
        return np.asarray(self.question.sequence_of(self.tensor))

    @cached_property
    def error(self) -> Float64:
        error = _error(self.found, self.wanted).max(axis=2, initial=0.0)
        return np.where((self.sequence >= 0)[:, None], error, 0.0)

    @property
    def head(self) -> str:
        return _head_word(self.question, self.tensor, self.found.shape[1])


def _pairs(question: Question, answers: Answers, reference: Answers) -> Iterator[_Pair]:
    """Tensors of both sides in equal shape."""
    for name, x in answers.items():
        if name in reference and x.shape == reference[name].shape:
            yield _Pair(question, name, by_rows(name, x), by_rows(name, reference[name]))


def _error(found: Float64, wanted: Float64) -> Float64:
    """|found - wanted|; 0 where both are NaN or the same inf, infinite where one alone is."""
    same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    error = np.where(same, 0.0, np.abs(found - wanted))
    return np.where(np.isnan(error), np.inf, error)


def _levels_of(pair: _Pair) -> Iterator[Level]:
    x, y, of = pair.found, pair.wanted, pair.sequence
    parts: list[tuple[str, str, Any]] = [("all", "all", of >= 0)]
    parts += [("sequence", f"sequence {b}", of == b) for b in np.unique(of[of >= 0])]
    heads = range(x.shape[1])
    parts += [("head", f"{pair.head} {h}", (np.flatnonzero(of >= 0), h)) for h in heads]
    place, row = pair.question.place_of(pair.tensor), ROWS[side_of(pair.tensor)]
    for token, h in _worst(pair.error):
        key = f"sequence {of[token]}, {row} {place[token]}, {pair.head} {h}"
        parts.append(("row", key, (token, h)))
    for level, key, here in parts:
        yield Level(pair.tensor, level, key, *fit(x[here], y[here]))


def _worst(error: Float64) -> list[tuple[int, int]]:
    """Indices of the few largest errors that are not 0."""
    if not error.size:
        return []
    order = np.argsort(-error, axis=None, kind="stable")[:FEW]
    rows, heads = np.unravel_index(order, error.shape)
    return [(int(i), int(h)) for i, h in zip(rows, heads, strict=True) if error[i, h] > 0]


def _head_word(question: Question, tensor: str, heads: int) -> str:
    if tensor in OF_KEYS:
        return "kv head"
    return "selection head" if tensor in OF_SLOTS else "head"


def _sentences(question: Question, tensor: str, bad: Bools) -> Iterator[str]:
    within = question.sequence_of(tensor)
    there, row, head = (
        within >= 0,
        ROWS[side_of(tensor)],
        _head_word(question, tensor, bad.shape[1]),
    )
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
    features = _features(question, tensor, bad.shape[1])
    whole = np.broadcast_to(there[:, None], bad.shape)
    touched = np.isin(within, of_sequences)[:, None] & np.isin(np.arange(heads), of_heads)[None]
    for domain, words in ((whole, ""), (touched, "of these, ")):
        rule = rule_of(Shown(_Rows(features, domain), domain, bad))
        if rule is not None and 0 < len(rule.spans) < SPANS:
            yield f"{words}the {row}s with {rule}"
            return
    if bad.sum() < COVERED * touched.sum():
        token = int(np.flatnonzero(bad.any(axis=1))[0])
        first = f"{row} {question.place_of(tensor)[token]} of sequence {within[token]}"
        yield f"no pattern of rows, tiles or lengths fits; the first wrong one is {first}"
    elif not touched[there].all():  # else it would say what the count has said
        yield f"{'nearly ' * bool((bad != touched).any())}every {row} of these"


def _features(question: Question, tensor: str, heads: int) -> dict[str, Callable[[], Any]]:
    """What a rule of rows may be about, (tokens or 1, 1 or heads), the plainest first."""
    side, q, reach = side_of(tensor), question, Reach(question)
    b = np.maximum(q.sequence_of(tensor), 0)[:, None]
    lengths = {"q": np.asarray(q.lengths_q)[b], "k": np.asarray(q.lengths_k)[b]}
    at, n, size = ("i" if side == "q" else "j"), f"seqlen_{side}", lengths[side]
    i = np.arange(len(b))[:, None] - q.offsets(side)[b]
    found: dict[str, Callable[[], Any]] = {at: lambda: i, f"{n} - 1 - {at}": lambda: size - 1 - i}
    if side == "k":
        found["whether a query sees it"] = lambda: reach.seen.astype(np.int64)
    elif reach.count.shape == (len(b), heads):
        found["keys seen"] = lambda: reach.count
        found["keys not seen"] = lambda: lengths["k"] - reach.count
        found["first key seen"] = lambda: reach.first - q.offsets("k")[b]
    found |= {f"seqlen_{of}": partial(np.asarray, x) for of, x in lengths.items()}
    found["seqlen_k - seqlen_q"] = lambda: lengths["k"] - lengths["q"]
    found["the sequence"] = lambda: b
    if heads == q.num_heads_q and q.group > 1:
        h = np.arange(heads)[None]
        found[f"h % {q.group}"] = lambda: h % q.group
        other = f"whether h % {q.num_heads_kv} is not h // {q.group}"
        found[other] = lambda: (h % q.num_heads_kv != h // q.group).astype(np.int64)
    for tile in TILES:
        found[f"{at} - {n} // {tile} * {tile}"] = partial(np.subtract, i, size // tile * tile)
        found[f"{at} % {tile}"] = partial(np.remainder, i, tile)
    return found


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows (tokens, heads) in the place of pairs, for rules."""

    features: Mapping[str, Callable[[], Any]]
    j: Bools

    def feature(self, name: str) -> Any:
        return self.features[name]()
