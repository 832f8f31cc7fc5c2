"""The span of packed keys that each query sees, found row by row, and whose boundaries it shows.

Sums over a span are differences of sums from the first key on, so that all spans are cheap to try.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.engine.attention import FIRST, Bug, Floats, See, View, views_of
from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.inferred.keys.pattern import Place, plus
from rawattn.check.diagnose.inferred.keys.sums import Sums, some_heads, sums_of

MOST = 600_000  # pairs of a query and a row of k
HEADS = 4
FEW = 4  # sequences that are told of
TRIED = 256  # spans of a row that fit one sum
MISSING = 0.1  # of all rows, at most, without a span


class Spans(NamedTuple):
    """By row of q the first row of k that it sees and one past the last; ``told``: whether any span
    explains the row. ``own_low``, ``own_high``: what it should see."""

    low: np.ndarray
    high: np.ndarray
    told: np.ndarray
    own_low: np.ndarray
    own_high: np.ndarray


def bugs(question: Question, answers: Answers, wrong: np.ndarray) -> Iterator[Bug]:
    """Other boundaries of sequences, and else the spans as they are."""
    if len(question.q) * len(question.k) > MOST or not question.batch:
        return
    tolerance = 0.02 if np.asarray(answers.get("out", question.q)).dtype.itemsize == 2 else 2e-3
    spans = _spans(question, answers, tolerance)
    inside = question.sequence_of("q") >= 0
    if (inside & ~spans.told).sum() > MISSING * inside.sum():
        return
    stages = (*FIRST, "second", "jvp")
    other = _boundaries(question, spans)
    if other is not None and _agree(other, spans):
        starts, ends = (", ".join(map(str, x)) for x in (other.cu_seqlens_q, other.cu_seqlens_k))
        text = f"cu_seqlens is {starts}"
        if other.lengths_k != other.lengths_q:
            text = f"cu_seqlens_q is {starts} and cu_seqlens_k {ends}"
        see = _views_of_another(other)
        yield Bug("wrong-keys", f"{text}: that of another batch", stages, see)
        return
    others = (spans.low != spans.own_low) | (spans.high != spans.own_high)
    rows = np.flatnonzero(spans.told & wrong.any(axis=1))
    if len(rows) and others[rows].all():
        low, high, own_low, own_high = (
            x[rows] for x in (spans.low, spans.high, spans.own_low, spans.own_high)
        )
        more = ((low <= own_low) & (high >= own_high)).all()
        ends = np.asarray(question.cu_seqlens_k)[question.sequence_of("q")[rows, None] + [0, 1]]
        leaks = more and ((low < ends[:, 0]) | (high > ends[:, 1])).all()
        name = "neighbour-leak" if leaks else "wrong-keys"
        yield Bug(name, _in_words(question, spans, rows), stages, _planted(spans))


def _in_words(question: Question, spans: Spans, rows: np.ndarray) -> str:
    """What the wrong ``rows`` see, by sequences where these are simple."""
    sequence = question.sequence_of("q")
    told: list[str] = []
    single = False
    for b in np.unique(sequence[rows])[:FEW]:
        here = rows[sequence[rows] == b]
        i = here - int(question.cu_seqlens_q[b])
        first = int(question.cu_seqlens_k[b])
        low, high = (_line(x[here] - first, i) for x in (spans.low, spans.high - 1))
        if low and high:
            told.append(f"row i of sequence {b} sees keys {low} .. {high}")
        elif not single:
            single = True
            some = here[np.linspace(0, len(here) - 1, min(len(here), 3)).astype(int)]
            told += [_span(question, spans, int(row)) for row in some]
    return ", ".join(told) + (", and so on" if single else "")


def _line(x: np.ndarray, i: np.ndarray) -> str:
    """A number, or i and a number, if ``x`` is that for every i."""
    if (x == x[0]).all():
        return str(x[0])
    apart = x - i
    return plus("i", int(apart[0])) if (apart == apart[0]).all() else ""


def _span(question: Question, spans: Spans, row: int) -> str:
    b = int(question.sequence_of("q")[row])
    first_q, first_k = int(question.cu_seqlens_q[b]), int(question.cu_seqlens_k[b])
    low, high = int(spans.low[row]) - first_k, int(spans.high[row]) - first_k
    seen = f"keys {low} .. {high - 1}" if high > low else "no key"
    return f"row {row - first_q} of sequence {b} sees {seen}"


def _agree(other: Question, spans: Spans) -> bool:
    """Whether the boundaries of ``other`` say nearly all spans."""
    low, high = np.zeros_like(spans.low), np.zeros_like(spans.high)
    for b, n in enumerate(other.lengths_q):
        place = Place(other, b, np.arange(n))
        rows = place.start_q + place.rows
        low[rows] = place.start_k + place.low[:, 0]
        high[rows] = place.start_k + place.high[:, 0]
    same = (low == spans.low) & (high == spans.high)
    return bool(same[spans.told].mean() > 1 - MISSING)


def _views_of_another(other: Question) -> See:
    return lambda question, views: views_of(
        replace(question, cu_seqlens_q=other.cu_seqlens_q, cu_seqlens_k=other.cu_seqlens_k)
    )


def _planted(spans: Spans) -> See:
    def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        found = []
        for view in views:
            low, high, told = (x[view.rows] for x in spans[:3])
            first = min(int(low[told].min(initial=view.keys[0])), int(view.keys[0]))
            stop = max(int(high[told].max(initial=view.keys[-1] + 1)), int(view.keys[-1]) + 1)
            keys = np.arange(first, stop)
            seen = (keys >= low[:, None]) & (keys < high[:, None]) & told[:, None]
            weight = np.repeat(seen[None].astype(np.float64), len(view.weight), axis=0)
            weight[:, ~told, view.keys[0] - first : view.keys[-1] + 1 - first] = view.weight[
                :, ~told
            ]
            found.append(replace(view, keys=keys, weight=weight))
        return found

    return see


def _boundaries(question: Question, spans: Spans) -> Question | None:
    """The question with the boundaries that the spans show, if these are others."""
    left = question.mask_window[0]
    rows = np.flatnonzero(spans.told)
    if len(rows) < 2:
        return None
    low, high = spans.low[rows], spans.high[rows]
    step = np.diff(low)
    if left < 0:
        begins = step != 0
    else:  # a window moves by one; where it begins anew, it is short
        short = (high - low)[1:] <= np.minimum((high - low)[:-1], left + 1)
        begins = (step > 1) | (step < 0) | ((step == 1) & short & ((high - low)[1:] <= left))
    starts = rows[1:][begins]
    first_keys = low[1:][begins]
    last = int(question.cu_seqlens_q[-1])
    offsets_q = np.array([int(question.cu_seqlens_q[0]), *starts, last])
    offsets_k = np.array([int(low[0]), *first_keys, int(high[-1])])
    if (np.diff(offsets_k) < 0).any():
        return None
    same = np.array_equal(offsets_q, question.cu_seqlens_q)
    if same and np.array_equal(offsets_k, question.cu_seqlens_k):
        return None
    return replace(question, cu_seqlens_q=offsets_q, cu_seqlens_k=offsets_k)


# ---- spans of rows ----------------------------------------------------------------------------


def _spans(question: Question, answers: Answers, tolerance: float) -> Spans:
    rows = len(question.q)
    low, high, own_low, own_high = (np.zeros(rows, dtype=np.int64) for _ in range(4))
    told = np.zeros(rows, dtype=bool)
    heads = some_heads(np.arange(question.num_heads_q), HEADS)
    for b, n in enumerate(question.lengths_q):
        if not n:
            continue
        place = Place(question, b, np.arange(n))
        dead = _dead(question, answers, place)
        low[dead] = high[dead] = place.start_k
        told[dead] = True
        sums = sums_of(question, answers, "forward", place, heads)
        if sums is None:
            continue
        up_to = np.zeros((*sums.terms.shape[:3], sums.terms.shape[3]))
        np.cumsum(sums.terms[..., :-1], axis=3, out=up_to[..., 1:])
        for index, row in enumerate(sums.place.rows):
            at = int(question.cu_seqlens_q[b] + row)
            wanted = {name: x[:, index] for name, x in sums.wanted.items()}
            own = _own_span(sums, index)
            own_low[at], own_high[at] = own
            found = _span_of(up_to[:, :, index], wanted, tolerance, own)
            if found is not None:
                low[at], high[at], told[at] = *found, True
    return Spans(low, high, told, own_low, own_high)


def _dead(question: Question, answers: Answers, place: Place) -> np.ndarray:
    """Rows of q whose answers are those of a row that sees no key, though it should."""
    rows = place.start_q + place.rows[place.seen.any(axis=1)]
    alive = np.zeros(len(rows), dtype=bool)
    if "out" in answers:
        alive |= (np.asarray(answers["out"])[rows] != 0).any(axis=(1, 2))
    if "lse" in answers:
        alive |= ~np.isneginf(np.asarray(answers["lse"], dtype=np.float64)[:, rows]).all(axis=0)
    return np.asarray(rows[~alive])


def _own_span(sums: Sums, place: int) -> tuple[int, int]:
    """What the row should see."""
    x = sums.place
    return x.start_k + int(x.low[place, 0]), x.start_k + int(x.high[place, 0])


def _span_of(
    up_to: Floats, wanted: dict[str, Floats], tolerance: float, own: tuple[int, int]
) -> tuple[int, int] | None:
    """up_to (kinds, heads, keys + 1): sums over the keys before. The span nearest to the row's own
    among those that fit."""
    count = up_to.shape[2]
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    if "lse" in wanted:
        mass = np.exp(wanted["lse"])
        low = np.arange(count)
        place = np.searchsorted(up_to[0, 0], up_to[0, 0] + mass[0])
        pairs += [(low, np.clip(place + by, 0, count - 1)) for by in (-2, -1, 0, 1)]
    if "out" in wanted:
        off = up_to[1, 0] - wanted["out"][0] * up_to[0, 0]
        apart = np.abs(off[None] - off[:, None])
        within = np.abs(up_to[0, 0][None] - up_to[0, 0][:, None])
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = np.where(np.triu(np.ones_like(apart), 1) > 0, apart / within, np.inf)
        flat = np.argpartition(ratio.ravel(), min(TRIED, ratio.size - 1))[:TRIED]
        pairs.append((flat // count, flat % count))
    low, high = (np.concatenate(side) for side in zip(*pairs, strict=True))
    low, high = low[high > low], high[high > low]
    if not len(low):
        return None
    mass, one, other = up_to[:, :, high] - up_to[:, :, low]  # (heads, spans)
    mass = np.maximum(mass, 1e-300)
    errors = []
    if "out" in wanted:
        errors += [np.abs(one / mass - wanted["out"][:, None])]
        errors += [np.abs(other / mass - wanted["other out"][:, None])]
    by_out = np.max(errors, axis=(0, 1)) if errors else np.zeros(len(low))
    by_lse = np.zeros(len(low))
    if "lse" in wanted:
        by_lse = np.abs(np.log(mass) - wanted["lse"][:, None]).max(axis=0)
    error = np.maximum(by_out, by_lse)
    if error.min() > tolerance and errors:
        error = by_out
    if error.min() > tolerance:
        return None
    good = np.flatnonzero(error <= max(3 * error.min(), tolerance / 300))
    apart = np.abs(low[good] - own[0]) + np.abs(high[good] - own[1])
    best = good[int(np.argmin(apart))]
    return int(low[best]), int(high[best])
