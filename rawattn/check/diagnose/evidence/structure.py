"""Where one side differs from the other: slopes by part, the pattern of the wrong rows, pictures.

A row is a token with one head: arrays are brought to (tokens, heads, width), numbers by row too.
Longer than other modules by the features that wrong rows are told by.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rawattn.check.diagnose.engine.question import BY_ROW, OF_KEYS, OF_SLOTS, Answers, Question
from rawattn.check.diagnose.evidence.reach import Bools, Float64, Reach
from rawattn.check.diagnose.evidence.rules import Shown, rule_of
from rawattn.check.diagnose.findings import Level, Map

TILES = (16, 32, 64, 128)
FEW = 5  # rows that have levels of their own
CLOSE = 0.02  # slopes this near to 1 with residuals below it are those of rounding
SPANS = 3  # of a rule: from so many on chance makes some
COVERED = 0.9  # share of rows that are nearly all
PIXELS = 512  # of a map, at most, each way
LOWEST, HIGHEST = -4.0, 8.0  # of a map
ROWS = {"q": "row", "k": "key"}


def side_of(tensor: str) -> str:
    """Whether ``tensor`` has rows like "q" or like "k"."""
    return "k" if tensor in OF_KEYS else "q"


def by_rows(tensor: str, array: Any) -> Float64:
    """``array`` in float64 as (tokens, heads, width); not to be written to."""
    wide = np.asarray(array, dtype=np.float64)
    return wide.T[..., None] if tensor in BY_ROW else wide


def levels(
    question: Question,
    answers: Answers,
    reference: Answers,
    tensors: Sequence[str] | None = None,
) -> tuple[Level, ...]:
    """Slope, residual and error of ``answers`` over ``reference``: all, by sequence, by head, and
    of the few rows with the largest errors."""
    with np.errstate(all="ignore"):
        return tuple(
            level
            for tensor in _shared(answers, reference, tensors)
            for level in _levels_of(question, tensor, answers[tensor], reference[tensor])
        )


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


def bad_rows(question: Question, tensor: str, found: Any, wanted: Any, noise: Any) -> Bools:
    """Which rows of ``found`` are further from ``wanted`` than ``noise``: (tokens, heads).

    noise: a number, or an array that fits (tokens, heads). Rows of no sequence are never bad.
    """
    with np.errstate(all="ignore"):
        error = _error(by_rows(tensor, found), by_rows(tensor, wanted)).max(axis=2, initial=0.0)
    return np.asarray((error > noise) & (_within(question, tensor) >= 0)[:, None])


def where(question: Question, tensor: str, bad: Bools) -> tuple[str, ...]:
    """Where the ``bad`` rows (tokens, heads) lie: heads, sequences, rows, in sentences."""
    return tuple(_sentences(question, tensor, bad))


def maps(
    question: Question, answers: Answers, reference: Answers, allowances: Mapping[str, Any]
) -> tuple[Map, ...]:
    """Pictures of the errors of the worst tensors.

    allowances: by tensor, a number or an array that fits (tokens, heads). Values are between LOWEST
    and HIGHEST.
    """
    found: list[tuple[float, Map]] = []
    with np.errstate(all="ignore"):
        for tensor in _shared(answers, reference, tuple(allowances)):
            x, y = by_rows(tensor, answers[tensor]), by_rows(tensor, reference[tensor])
            picture = _decades(_error(x, y).max(axis=2, initial=0.0), allowances[tensor])
            picture[_within(question, tensor) < 0] = np.nan
            if np.isfinite(picture).any():
                found.append((float(np.nanmax(picture)), _token_map(question, tensor, picture)))
    found.sort(key=lambda pair: -pair[0])
    return tuple(picture for _, picture in found[:FEW])


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


def _shared(answers: Answers, reference: Answers, tensors: Sequence[str] | None) -> list[str]:
    """Tensors of both sides in equal shape."""
    return [
        name
        for name in (answers if tensors is None else tensors)
        if name in answers and name in reference and answers[name].shape == reference[name].shape
    ]


def _within(question: Question, tensor: str) -> npt.NDArray[np.int64]:
    return question.sequence_of(side_of(tensor))


def _error(found: Float64, wanted: Float64) -> Float64:
    """|found - wanted|; 0 where both are NaN or the same inf, infinite where one alone is."""
    same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
    error = np.where(same, 0.0, np.abs(found - wanted))
    return np.where(np.isnan(error), np.inf, error)


def _levels_of(question: Question, tensor: str, found: Any, wanted: Any) -> Iterator[Level]:
    x, y, within = by_rows(tensor, found), by_rows(tensor, wanted), _within(question, tensor)
    side, there = side_of(tensor), within >= 0
    yield Level(tensor, "all", "all", *fit(x[there], y[there]))
    for b in np.unique(within[there]):
        here = within == b
        yield Level(tensor, "sequence", f"sequence {b}", *fit(x[here], y[here]))
    head = _head_word(question, tensor, x.shape[1])
    for h in range(x.shape[1]):
        yield Level(tensor, "head", f"{head} {h}", *fit(x[there, h], y[there, h]))
    error = np.where(there[:, None], _error(x, y).max(axis=2, initial=0.0), 0.0)
    starts = _starts(question, side)
    for token, h in _worst(error):
        b = within[token]
        key = f"sequence {b}, {ROWS[side]} {token - starts[b]}, {head} {h}"
        yield Level(tensor, "row", key, *fit(x[token, h], y[token, h]))


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


def _starts(question: Question, side: str) -> list[int]:
    offsets = question.cu_seqlens_q if side == "q" else question.cu_seqlens_k
    return [int(i) for i in np.asarray(offsets)[:-1]]


def _sentences(question: Question, tensor: str, bad: Bools) -> Iterator[str]:
    side, within = side_of(tensor), _within(question, tensor)
    row, head, there = ROWS[side], _head_word(question, tensor, bad.shape[1]), within >= 0
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
        i = token - _starts(question, side)[within[token]]
        yield (
            "no pattern of rows, tiles or lengths fits; the first wrong one is "
            f"{row} {i} of sequence {within[token]}"
        )
    elif not touched[there].all():  # else it would say what the count has said
        yield f"{'nearly ' * bool((bad != touched).any())}every {row} of these"


def _features(question: Question, tensor: str, heads: int) -> dict[str, Callable[[], Any]]:
    """What a rule of rows may be about, (tokens or 1, 1 or heads), the plainest first."""
    side, q, reach = side_of(tensor), question, Reach(question)
    b = np.maximum(_within(q, tensor), 0)[:, None]
    lengths = {"q": np.asarray(q.lengths_q)[b], "k": np.asarray(q.lengths_k)[b]}
    at, n, size = ("i" if side == "q" else "j"), f"seqlen_{side}", lengths[side]
    i = np.arange(len(b))[:, None] - np.asarray(_starts(q, side))[b]
    found: dict[str, Callable[[], Any]] = {at: lambda: i, f"{n} - 1 - {at}": lambda: size - 1 - i}
    if side == "k":
        found["whether a query sees it"] = lambda: reach.seen.astype(np.int64)
    elif reach.count.shape == (len(b), heads):
        found["keys seen"] = lambda: reach.count
        found["keys not seen"] = lambda: lengths["k"] - reach.count
        found["first key seen"] = lambda: reach.first - np.asarray(_starts(q, "k"))[b]
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


def _decades(error: Float64, allowance: Any) -> Float64:
    """log10 of error over allowance, within the bounds of a map."""
    ratio = np.where(error == 0, 0.0, error / np.asarray(allowance, dtype=np.float64))
    ratio = np.nan_to_num(ratio, nan=np.inf, posinf=10.0**HIGHEST)
    return np.asarray(np.clip(np.log10(np.maximum(ratio, 10.0**LOWEST)), LOWEST, HIGHEST))


def _token_map(question: Question, tensor: str, picture: Float64) -> Map:
    side = side_of(tensor)
    step = -(-len(picture) // PIXELS)
    head = _head_word(question, tensor, picture.shape[1])
    rows = "token" if step == 1 else f"line of {step} tokens"
    starts = tuple(sorted({start // step for start in _starts(question, side)}))
    return Map(tensor, "errors by token and head", _pooled(picture, step, 1), rows, head, starts)


def _pooled(picture: Float64, *steps: int) -> Float64:
    """The largest of every ``steps`` values; NaN only where all are."""
    for axis, step in enumerate(steps):
        starts = np.arange(0, picture.shape[axis], step)
        picture = np.fmax.reduceat(picture, starts, axis=axis) if len(starts) else picture
    return picture
