"""Where one side differs: the pattern of the wrong rows, and of intermediates, each (num_heads_q,
seqlen_q, seqlen_k), the first wrong step; E, tP, tdS: tangents of S, P, dS. Which pairs, or rows, a
set holds: intervals of integer features that hold on other lengths too. Long by these rules."""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from rawattn.check.diagnose.engine.attention import contexts, views_of
from rawattn.check.diagnose.engine.question import OF_KEYS, OF_SLOTS, Answers, Question, side_of
from rawattn.check.diagnose.evidence.places import TILES, Array, Features, of_tiles
from rawattn.check.diagnose.evidence.precision import finite, residual

MATRICES = {"forward": ("S", "P"), "backward": ("dP", "dS"), "second": ("E", "tP", "tdS")}
MADE = {  # by what, and where to look
    "S": "q k^T, softmax_scale, a softcap",
    "P": "the mask, the exponential, and the row sums or lse",
    "dP": "dout v^T",
    "dS": "P o (dP - D), and D",
    "E": "softmax_scale (tq k^T + q tk^T)",
    "tP": "P o (E - e), and e",
    "tdS": "tP o (dP - D) + P o (dout tv^T - W), and W",
}
SHARE, FEW = 2.0**-6, 10  # of a row's size, of what is off; rows that tell columns apart
BEFORE_THE_MASK = ("S", "dP", "E")  # of pairs that are not seen they may hold anything
NEAR = {8: 1e-9, 4: 1e-4, 2: 0.03}  # of the size, by the bytes of a number of q
LENGTHS = {"seqlen_q", "seqlen_k"}  # bounds of which tell the few sequences of a problem apart
SPLIT = re.compile(r"ceil\(")  # of what is in so many parts, which few lengths tell from tiles
CHANCE = re.compile(r"seqlen_[qk]|the (sequence|row of).*|j - the (longest )?seqlen_k.*")  # alike
NUMBERS = re.compile(r"\d+")
LENGTHS_APART = 8  # of sequences, with which chance makes no rules of lengths
RUNS = 6  # runs of a feature that may be intervals: what falls into more is told by another one
PAIRS, MOST = 400, 4000  # rules of two that are made, of so many that are looked at
Places = Any  # what has integer features: pairs of query and key, (total_q, total_k), or rows


def named(what: str, indices: Any) -> str:
    """ "sequence 1", "sequences 1, 3", "heads 2 to 7"."""
    numbers = np.array([*indices], dtype=int)
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    short = ([f"{x[0]} to {x[-1]}"] if len(x) > 2 else map(str, x) for x in runs)
    pieces = [piece for run in short for piece in run]
    pieces[6:] = [f"... ({len(numbers)} of them)"] * (len(pieces) > 6)
    return f"{what}{'s' * bool(what and len(numbers) > 1)} {', '.join(pieces)}".strip()


def where(question: Question, tensor: str, bad: Array, among: Array | bool = True) -> Iterator[str]:
    """Where the ``bad`` rows (tokens, heads) lie, told from all of ``among``, in sentences."""
    within = question.sequence_of(tensor)
    there, row = within >= 0, "key" if side_of(tensor) == "k" else "row"
    head = "kv head" if tensor in OF_KEYS else "selection head" if tensor in OF_SLOTS else "head"
    bad, heads = bad & there[:, None], bad.shape[1]
    if bad[there].all() or not bad.any():
        yield from [f"every {row}"] * bool(bad.any())
        return
    of_heads, of_sequences = np.flatnonzero(bad.any(axis=0)), np.unique(within[bad.any(axis=1)])
    if len(of_heads) < heads:
        yield f"only {named(head, of_heads)} of {heads}"
    if len(of_sequences) < (sequences := len(np.unique(within[there]))):
        yield f"only {named('sequence', of_sequences)} of {sequences}"
    places = _Rows(question, tensor, heads)
    whole = np.broadcast_to(there[:, None] & among, bad.shape)
    touched = np.isin(within, of_sequences)[:, None] & np.isin(np.arange(heads), of_heads)[None]
    for domain, words in ((whole, ""), (touched & whole, "of these, ")):
        rule = next(rules_of(Shown(places, domain.T, bad.T)), None)
        if rule is not None and rule.spans:
            yield f"{words}the {row}s with {rule}"
            return
    every = bool((bad == touched).all())
    yield f"every {row} of these" if every else f"{bad.sum()} of {touched.sum()} {row}s"


def columns(found: Array, due: Array, bad: Array) -> Iterator[str]:
    """What tells columns of ``bad`` rows (tokens, heads) apart, if anything: those that are wrong,
    or two kinds, each of which is times one number in a row."""
    x, y = found[bad], due[bad]
    size = np.abs(y).max(axis=1, initial=0.0, keepdims=True)
    wrong, width = (np.abs(x - y) > SHARE * size).any(axis=0), x.shape[1]
    if 0 < wrong.sum() < width:
        yield f"{named('column', np.flatnonzero(wrong))} of {width} alone are wrong"
    if not wrong.all() or len(x) < FEW:
        return
    with np.errstate(divide="ignore", invalid="ignore"):
        times = np.where(np.abs(y) > SHARE * size, x / y, np.nan)

    def alike(c: int) -> Array:
        off = np.abs(times - times[:, [c]]) > SHARE * np.abs(times[:, [c]])
        return np.asarray(off.mean(axis=0) < 1 / FEW)

    one = alike(0)
    two = alike(int(one.argmin()))
    if one.any() and (one ^ two).all() and min(one.sum(), two.sum()) > 1:
        first, other = (named("column", np.flatnonzero(x)) for x in (one, two))
        yield f"each row is times one number in {first}, and times another in {other}"


class _Rows:
    """Rows of a tensor of so many heads, like ``Places``; features (1, rows) or (heads, rows)."""

    def __init__(self, question: Question, tensor: str, heads: int) -> None:
        q, side, h = question, side_of(tensor), np.arange(heads)[:, None]
        sequence, i = q.sequence_of(side), q.place_of(side)[None]
        count = np.zeros(q.q.shape[:2], dtype=np.int64)  # keys that queries see
        seen = np.zeros(q.k.shape[:2], dtype=bool)  # by any query
        for view in views_of(q):
            weight = np.broadcast_to(view.weight > 0, (len(view.heads), *view.weight.shape[1:]))
            count[np.ix_(view.rows, view.heads)] = weight.sum(axis=2).T
            seen[view.keys, view.head_kv] = weight.any(axis=(0, 1))
        of_q, of_k = (np.asarray(x)[sequence][None] for x in (q.lengths_q, q.lengths_k))
        n, at, size = np.diff(q.offsets(side))[sequence], "ij"[side == "k"], f"seqlen_{side}"
        self.j, made = np.repeat(i, heads, axis=0), {at: i, f"{size} - 1 - {at}": n - 1 - i}
        if side == "k":
            made["whether a query sees it"] = seen.T.astype(int)
        elif heads == q.num_heads_q:
            made["keys seen"] = count.T
        made |= {"seqlen_q": of_q, "seqlen_k": of_k, "seqlen_k - seqlen_q": of_k - of_q}
        made["the sequence"] = sequence[None]
        if heads == q.num_heads_q and q.group > 1:
            made[f"h % {q.group}"] = h % q.group
        self.features: Features = {name: partial(np.asarray, x) for name, x in made.items()}
        for t in TILES:
            self.features |= of_tiles(at, i, size, n, t)
        self.loops = Features()

    def feature(self, name: str) -> Array:
        return self.features[name]()


def intermediates(question: Question, answers: Answers, sequence: int) -> Answers:
    """The right ones of a sequence, by the out and lse that ``answers`` say. Raises ValueError."""
    if not 0 <= sequence < question.batch:
        raise ValueError(f"sequence {sequence} of {question.batch} sequences, counted from 0 on")
    found, lengths = Answers(), (question.lengths_q[sequence], question.lengths_k[sequence])
    for stage, names in ((n, x) for n, x in MATRICES.items() if n in question.stages):
        found |= {name: np.zeros((question.num_heads_q, *lengths)) for name in names}
        given = None if stage == "forward" else question.given_to_backward(answers)
        first_q, first_k = (question.offsets(of)[sequence] for of in "qk")
        for c in contexts(question, stage, given):
            if c.view.sequence == sequence:
                at = np.ix_(c.view.heads, c.view.rows - first_q, c.view.keys - first_k)
                for name in names:
                    found[name][at] = getattr(c, name)
    return found


class Parting(NamedTuple):
    """The first ``step`` that is wrong, "" for none; those that ``agree``; how many pairs are."""

    step: str
    text: str
    agree: tuple[str, ...]
    pairs: int = 0


def parting(question: Question, answers: Answers, matrices: Answers) -> Parting | None:
    """Where a side's ``matrices`` part from those of the sequence that they fit best, if any."""
    judged = [
        _judged(question, answers, matrices, b)
        for b, lengths in enumerate(zip(question.lengths_q, question.lengths_k, strict=True))
        if any(x.shape[1:] == lengths for x in matrices.values())
    ]
    return max(judged, key=lambda one: (len(one.agree), -one.pairs), default=None)


def _judged(question: Question, answers: Answers, matrices: Answers, sequence: int) -> Parting:
    right, agree, said = intermediates(question, answers, sequence), list[str](), ""
    for name, wanted in right.items():
        if name not in matrices or matrices[name].shape != wanted.shape:
            continue
        x = np.asarray(matrices[name], np.float64)
        looked = right["P"] > (0 if name in BEFORE_THE_MASK else -1)
        off = np.where(looked, np.abs(residual(x, wanted, slice(None))), 0.0)
        size = np.abs(finite(wanted[looked])).max(initial=0.0)
        wrong = np.nonzero(off > NEAR[min(question.dtype.itemsize, 8)] * size)
        if len(wrong[0]):
            at = np.unravel_index(off.argmax(), off.shape)
            axes = zip(("heads", "queries", "keys"), wrong, at, strict=True)
            spans = (f"{what} {of.min()} to {of.max()}, most at {most}" for what, of, most in axes)
            text = f"{said}sequence {sequence}: {name} parts first, in {len(wrong[0])} of "
            text += f"{looked.sum()} pairs: {'; '.join(spans)}"
            text += f": expected {wanted[at]:.4g}, got {x[at]:.4g}"
            return Parting(name, text, tuple(agree), len(wrong[0]))
        agree.append(name)
        said = f"{', '.join(agree)} right; "
    return Parting("", said.removesuffix("; "), tuple(agree))


class Span(NamedTuple):
    """low <= feature <= high; None is open."""

    feature: str
    low: int | None
    high: int | None

    def among(self, x: Array) -> Array:
        found = np.ones(x.shape, dtype=bool) if self.low is None else x >= self.low
        return found if self.high is None else found & (x <= self.high)

    def holds(self, places: Places) -> Array:
        """(total_q, total_k)."""
        return np.broadcast_to(self.among(places.feature(self.feature)), places.j.shape)

    @property
    def numbers(self) -> frozenset[int]:
        """Those but 0, 1 that it is said with, also of its feature: chance needs more of them."""
        return frozenset(map(int, NUMBERS.findall(str(self)))) - {0, 1}

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.feature} = {self.low}"
        if self.low is None or self.high is None:
            sign, bound = ("<=", self.high) if self.low is None else (">=", self.low)
            return f"{self.feature} {sign} {bound}"
        return f"{self.low} <= {self.feature} <= {self.high}"


class Rule(NamedTuple):
    """Pairs that are in any of ``spans``, or in ``every`` one of them; without spans all pairs."""

    spans: tuple[Span, ...]
    every: bool = False

    @property
    def size(self) -> tuple[int, int, int]:
        """How many intervals, how many numbers they are said with, and how large these are."""
        numbers = {x for span in self.spans for x in span.numbers}
        return len(self.spans), len(numbers), sum(numbers)

    @property
    def plain(self) -> bool:
        """Of bounds for lengths chance makes some."""
        if len(self.spans) == 1:
            feature = self.spans[0].feature
            return feature not in LENGTHS and not SPLIT.search(feature)
        return not any(CHANCE.fullmatch(x.feature) for x in self.spans)

    def holds(self, places: Places) -> Array:
        """(total_q, total_k)."""
        if not self.spans:
            return np.ones(places.j.shape, dtype=bool)
        held = [span.holds(places) for span in self.spans]
        return np.asarray(np.logical_and.reduce(held) if self.every else np.logical_or.reduce(held))

    def __str__(self) -> str:
        return (" and " if self.every else ", or ").join(map(str, self.spans)) or "all of them"


class Shown(NamedTuple):
    """Pairs (total_q, total_k) of ``places``: those in question, and those in the set."""

    places: Places
    domain: Array
    inside: Array


def mask_rule(question: Question) -> str:
    """Which keys j a query i must see, as people write it; "" where it sees all."""
    if question.sparse:
        return ""
    left, right = question.mask_window
    last = "" if question.lengths_q == question.lengths_k else " + seqlen_k - seqlen_q"
    lower = f"i{last} - {left} <= " if left >= 0 else ""
    upper = "" if right < 0 else f" <= i{last}" + (f" + {right}" if right else "")
    return f"{lower}j{upper}" if lower or upper else ""


def rules_of(*shown: Shown, among: Iterable[str] | None = None) -> Iterator[Rule]:
    """Rules for a set, which hold wherever it is shown, the plainest first: the fewest intervals
    that have all of it and nothing else, or the fewest bounds, each of which has all of it, that
    leave nothing else. What chance makes comes last. ``among``: the features that are tried."""
    inside = np.concatenate([of.inside[of.domain] for of in shown])
    if inside.all() or not inside.any():
        yield from [Rule(())] * bool(inside.any())
        return
    places = shown[0].places
    every = _spans(shown, inside, places.features if among is None else among)
    yield from _rules(every, 1)
    if among is not None:
        yield from _rules(every, 2)
        return
    loops = _spans(shown, inside, (n for n in places.loops if not SPLIT.search(n)))
    yield from _rules(loops, 1)
    lengths = {x for of in shown for x in np.unique(of.places.feature("seqlen_q")).tolist()}
    many = len(lengths) >= LENGTHS_APART
    plain = [one for one in every if many or not CHANCE.fullmatch(one.span.feature)]
    yield from _rules(plain, 2)
    yield from _rules(_spans(shown, inside, filter(SPLIT.search, places.loops)), 1)
    alone = "j - i - "  # what begins so: with other bounds chance fits them
    for spans in ([*plain, *(x for x in loops if not x.span.feature.startswith(alone))], every):
        yield from _rules(spans, 2)


class _Left(NamedTuple):
    """An interval that may make a rule, and what it leaves: a pure one of a union, or bounds."""

    every: bool
    span: Span
    left: Array


def _spans(shown: Sequence[Shown], inside: Array, names: Iterable[str]) -> list[_Left]:
    found = []
    for name in names:
        if not all(name in of.places.features or name in of.places.loops for of in shown):
            continue
        every = (np.broadcast_to(of.places.feature(name), of.domain.shape) for of in shown)
        x = np.concatenate([x[of.domain] for x, of in zip(every, shown, strict=True)])
        found += [_Left(False, one, ~one.among(x[inside])) for one in _pure(x, inside, name)]
        found += [_Left(True, one, one.among(x[~inside])) for one in _bounds(x, inside, name)]
    few = {None, -1, 0, 1}  # bounds that hold by chance less often than others
    return [x for x in found if "longest seqlen_q" not in x.span.feature or {*x.span[1:]} <= few]


def _rules(spans: Sequence[_Left], count: int) -> Iterator[Rule]:
    """Rules of so many intervals, the plainest first, unions and bounds by turns."""
    told = ([*_exact([x for x in spans if x.every == every], count)] for every in (False, True))
    in_order = sorted(filter(None, told), key=lambda rules: rules[0].size)
    yield from (rule for rules in zip_longest(*in_order) for rule in rules if rule)


def _exact(spans: Sequence[_Left], count: int) -> Iterator[Rule]:
    """Rules of one span, or of two, that leave nothing, made of the plainest of these."""
    if not spans or count == 1:
        yield from (Rule((one.span,), one.every) for one in spans if not one.left.any())
        return
    # places that the same spans leave count once
    marks = np.packbits(np.stack([one.left for one in spans]), axis=0).T
    apart = np.array([*{mark.tobytes(): n for n, mark in enumerate(marks)}.values()])
    matrix = np.stack([one.left[apart] for one in spans]).astype(np.float32)
    pairs = np.argwhere(np.triu(matrix @ matrix.T == 0, 1))
    pairs = pairs[np.argsort(pairs.sum(axis=1), kind="stable")[:MOST]]
    numbers = [one.span.numbers for one in spans]
    chance = [bool(CHANCE.fullmatch(one.span.feature)) for one in spans]

    def size(pair: Sequence[int]) -> float:
        one, other = pair
        return len(numbers[one] | numbers[other]) + (chance[one] or chance[other]) / 2

    for one, other in sorted(pairs.tolist(), key=size)[:PAIRS]:
        yield Rule((spans[one].span, spans[other].span), spans[one].every)


def _bounds(x: Array, inside: Array, name: str) -> Iterator[Span]:
    low, high = int(x[inside].min()), int(x[inside].max())
    if name in LENGTHS and low > x.min():  # as few as can be are left out
        low = int(x[x < low].max()) + 1
    for a, b in ((low, None), (None, high), (low, high)):
        if (a is None or a > x.min()) and (b is None or b < x.max()):
            yield Span(name, a, b)


def _pure(x: Array, inside: Array, name: str) -> Iterator[Span]:
    """Runs of values of a feature whose pairs are all in the set."""
    count = np.bincount(x - x.min())
    values = np.flatnonzero(count)
    pure = np.bincount(x[inside] - x.min(), minlength=len(count))[values] == count[values]
    values += x.min()
    runs = np.flatnonzero(np.diff(np.concatenate([[0], pure, [0]]).astype(int))).reshape(-1, 2)
    for first, stop in runs if len(runs) <= RUNS else ():
        low, high = int(values[first]), int(values[stop - 1])
        outer = first == 0, stop == len(values)
        if low == high or not any(outer):
            yield Span(name, low, high)
        if any(outer):
            yield Span(name, None if outer[0] else low, None if outer[1] else high)
