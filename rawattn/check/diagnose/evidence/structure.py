"""Where one side differs from the other: slopes by part, the pattern of the wrong rows, pictures.

A row is a token with one head: arrays are brought to (tokens, heads, width), numbers by row too.
Longer than other modules by the facts that wrong rows are compared with.
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
    return tuple(_Pattern(question, tensor, bad).sentences())


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


def places(bad: Bools, looked: Bools, head: str) -> str:
    """Which of the sequences and heads that were ``looked`` at are ``bad``, both (batch, heads)."""
    bad = bad & looked
    if bad[looked].all():
        return "all"
    parts = []
    for what, axis in (("sequence", 1), (head, 0)):
        if (bad.any(axis=axis) != looked.any(axis=axis)).any():
            parts.append(named(what, np.flatnonzero(bad.any(axis=axis))))
    product = np.logical_and.outer(bad.any(axis=1), bad.any(axis=0)) & looked
    if (bad != product).any():
        parts.append(f"{bad.sum()} of {looked.sum()} pairs of sequence and {head}")
    return ", ".join(parts)


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


def _lengths(question: Question, side: str) -> tuple[int, ...]:
    return question.lengths_q if side == "q" else question.lengths_k


def _starts(question: Question, side: str) -> list[int]:
    offsets = question.cu_seqlens_q if side == "q" else question.cu_seqlens_k
    return [int(i) for i in np.asarray(offsets)[:-1]]


class _Pattern:
    """The wrong rows of one tensor and the facts that they may follow."""

    def __init__(self, question: Question, tensor: str, bad: Bools) -> None:
        self.question, self.side, self.row = question, side_of(tensor), ROWS[side_of(tensor)]
        self.head = _head_word(question, tensor, bad.shape[1])
        within = question.sequence_of(self.side)
        self.there = within >= 0
        self.bad = bad & self.there[:, None]
        self.within = np.where(self.there, within, 0)
        lengths = np.array([*_lengths(question, self.side), 0])
        starts = np.array([*_starts(question, self.side), 0])
        self.n = lengths[self.within]
        self.i = np.arange(len(bad)) - starts[self.within]
        others = np.array([*_lengths(question, "k" if self.side == "q" else "q"), 0])
        self.other = others[self.within]
        self.bad_heads = np.asarray(self.bad.any(axis=0))
        self.bad_sequences = np.zeros(question.batch, dtype=bool)
        self.bad_sequences[self.within[self.bad.any(axis=1)]] = True
        self.sequences = np.zeros(question.batch, dtype=bool)
        self.sequences[self.within[self.there]] = True

    def sentences(self) -> Iterator[str]:
        wrong, tokens, heads = int(self.bad.sum()), int(self.there.sum()), self.bad.shape[1]
        if not wrong:
            return
        if wrong == tokens * heads:
            counts = {"sequence": self.sequences.sum(), "head": heads}
            several = " and ".join(word for word, count in counts.items() if count > 1)
            there = f", in every {several}" if several else ""
            yield f"every {self.row} is wrong{there}"
            return
        product = f" ({tokens} tokens in {heads} {self.head}s)" if heads > 1 else ""
        yield f"{wrong} of {tokens * heads} {self.row}s are wrong{product}"
        yield from self.heads()
        yield from self.in_sequences()
        yield from self.rows()

    def heads(self) -> Iterator[str]:
        """Which heads, and what they have in common."""
        q, heads = self.question, np.arange(self.bad.shape[1])
        if self.bad_heads.all():
            return
        place, facts = heads % q.group, {}
        if self.head == "head" and q.group > 1:
            facts = {
                "those that head % num_heads_kv gives another key/value head": (
                    heads % q.num_heads_kv != heads // q.group
                ),
                "all but the first of every group": place > 0,
                "all but the last of every group": place < q.group - 1,
                "the first of every group": place == 0,
                "the last of every group": place == q.group - 1,
            }
        text = f"{named(self.head, np.flatnonzero(self.bad_heads))} of {len(heads)}"
        yield _only(text, facts, self.bad_heads, np.ones_like(self.bad_heads))

    def in_sequences(self) -> Iterator[str]:
        """Which sequences, and what they have in common."""
        bad, there = self.bad_sequences, self.sequences
        if (bad == there).all():
            return
        lengths = np.array(_lengths(self.question, self.side))
        lengths_q, lengths_k = (np.array(_lengths(self.question, side)) for side in "qk")
        number, first, last = (np.arange(len(bad)), *np.flatnonzero(there)[[0, -1]])
        begin = np.flatnonzero(bad)[0]
        shortest, longest = lengths[bad].min(), lengths[bad].max()
        facts = {
            "all but the longest": lengths_k < lengths_k.max(),
            "those with unequal numbers of queries and keys": lengths_q != lengths_k,
            "all but the first": number > first,
            "all but the last": number < last,
            f"all from number {begin} on": (number >= begin) & (begin > first + 1),
            **{f"those whose length is no multiple of {t}": lengths % t > 0 for t in TILES},
            **{f"those with more than {t} keys": lengths_k > t for t in TILES},
            f"those of length {shortest} or more": lengths >= shortest,
            f"those of length {longest} or less": lengths <= longest,
        }
        yield _only(named("sequence", np.flatnonzero(bad)), facts, bad, there)

    def rows(self) -> Iterator[str]:
        """Which rows, by a rule that holds in all sequences, or in those that are touched."""
        touched = self.there & self.bad_sequences[self.within]
        all_sequences = "of every sequence, " if self.sequences.sum() > 1 else ""
        these = f"of {_those('sequence', self.bad_sequences)}, "
        features = self.features()
        for scope, words in ((self.there, all_sequences), (touched, these)):
            domain = np.broadcast_to(scope[:, None] & self.bad_heads, self.bad.shape)
            if (domain == self.bad).all():
                break
            rule = rule_of(Shown(_Rows(features, domain), domain, self.bad))
            if rule is not None and len(rule.spans) < SPANS:
                yield f"{words}the {self.row}s with {rule}"
                return
        if self.bad.sum() >= COVERED * (touched[:, None] & self.bad_heads).sum():
            those = []
            if (touched != self.there).any():
                those.append(_those("sequence", self.bad_sequences))
            if not self.bad_heads.all():
                those.append(_those(self.head, self.bad_heads))
            if those:  # else it would say what the count has said
                yield f"nearly every {self.row} of {' in '.join(those)}"
            return
        token = int(np.flatnonzero(self.bad.any(axis=1))[0])
        first = f"{self.row} {self.i[token]} of sequence {self.within[token]}"
        yield f"no pattern of rows, tiles or lengths fits; the first wrong one is {first}"

    def features(self) -> dict[str, Callable[[], Any]]:
        """What a rule of rows may be about, (tokens, 1 or heads), the plainest first."""
        at, n = ("i", "seqlen_q") if self.side == "q" else ("j", "seqlen_k")
        i, size, reach = self.i[:, None], self.n[:, None], Reach(self.question)
        found: dict[str, Callable[[], Any]] = {at: lambda: i}
        found[f"{n} - 1 - {at}"] = lambda: size - 1 - i
        if self.side == "k":
            found["whether a query sees it"] = lambda: reach.seen.astype(np.int64)
        elif reach.count.shape == self.bad.shape:
            first = reach.first - np.array([*_starts(self.question, "k"), 0])[self.within][:, None]
            found["keys seen"] = lambda: reach.count
            found["keys not seen"] = lambda: self.other[:, None] - reach.count
            found["first key seen"] = lambda: first
        for tile in TILES:
            found[f"{at} - {n} // {tile} * {tile}"] = partial(_minus, i, size // tile * tile)
            found[f"{at} % {tile}"] = partial(np.remainder, i, tile)
        return found


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows (tokens, heads) in the place of pairs, for rules."""

    features: Mapping[str, Callable[[], Any]]
    j: Bools

    def feature(self, name: str) -> Any:
        return self.features[name]()


def _minus(a: Any, b: Any) -> Any:
    return a - b


def _those(word: str, chosen: Bools) -> str:
    return f"that {word}" if chosen.sum() == 1 else f"those {word}s"


def _only(what: str, facts: Mapping[str, Bools], bad: Bools, there: Bools) -> str:
    """Which places are bad, with the first two facts that hold for them and for no others."""
    same = [fact for fact, mask in facts.items() if ((mask & there) == bad).all()]
    return f"only {what}" + (f" ({'; '.join(same[:2])})" if same else "")


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
