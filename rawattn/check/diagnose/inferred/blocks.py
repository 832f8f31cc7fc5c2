"""Which blocks did each query of block-sparse attention see? Read off out and lse, or dq.

What a query sees is a sum over blocks: with the lse that was stored, the sums of exp(S - lse) over
the blocks that it saw are 1, and those of exp(S - lse) V are out; s dS K of these blocks is dq. So
how often every block was seen solves linear equations, many more than there are blocks, and must
be a whole number. Then it is looked up among the known ways to walk lists (``sparse.walks``), or,
where none has just these blocks, told in words from what the lists hold.

Long by the words, which stand beside the numbers that they tell.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.catalogue.sparse.inverted_lists import OF_LISTS, by_walk, inverted
from rawattn.check.diagnose.catalogue.sparse.lists import (
    OWN,
    Different,
    Lists,
    Walk,
    first_of,
    lists_of,
    split,
    walking,
)
from rawattn.check.diagnose.catalogue.sparse.selection import instead
from rawattn.check.diagnose.catalogue.sparse.walks import rarer, usual
from rawattn.check.diagnose.engine.attention import (
    BACKWARD,
    FORWARD,
    PROGRAMS,
    STEPS,
    Bug,
    Context,
    Floats,
    See,
    View,
    solve,
    times,
    views_of,
)
from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.inferred.sample import Given, Sample, given_to
from rawattn.reference.dense import dead_to_inf

SURE = 0.12  # standard error of a count that is told from its neighbours
WHOLE = 0.25  # distance of a count from a whole number
LEFT = {2: 0.05, 4: 2e-3, 8: 2e-3}  # of the size of a row's answers, by the bytes of the inputs
READ = 0.95  # share of the rows that must be read
ALL_OR_NONE = 0.8  # share of wrong rows in which all blocks count alike: no matter of lists
MOST = 1e6  # times that a block may count
EXPLAINS = 0.98  # share of the differences


@dataclass(frozen=True)
class Seen:
    """How often every query saw each part of the keys, (total_q, num_heads_sel, parts).

    The parts are the blocks of a sequence, of the own block up to the query; then what lies behind
    the query in its own block, and what lies behind the sequence's end where the last block is not
    full. sure: what could be read.
    """

    counts: np.ndarray
    sure: np.ndarray


def bugs(question: Question, answers: Answers, stage: str) -> Iterator[Bug]:
    """Bugs in which queries see the blocks that they saw; none where that cannot be read."""
    if not question.sparse:
        return
    if stage == "backward":
        yield from _ended(question, answers)
    seen = read(question, answers, stage)
    if seen is None:
        yield from _tried(question, answers, stage)
        return
    lists = lists_of(question)
    right = parts_of(lists)
    wrong = seen.sure & (seen.counts != right)
    if not wrong.any():
        return
    names = set()
    for name, variant, change in rarer(question):
        if name in names:
            continue
        parts = parts_of(change(lists))
        if (seen.sure & (seen.counts != parts)).any():
            continue
        names.add(name)
        yield from _planted(name, variant, instead(walking(change)), stage)
    if names or _all_or_none(seen, right, wrong):
        return
    name, variant = _in_words(question, lists, seen, right)
    counts = np.where(seen.sure, seen.counts, right)
    yield from _planted(name, variant, _seeing(counts), stage)


def _tried(question: Question, answers: Answers, stage: str) -> Iterator[Bug]:
    """Where nothing can be read: the walks that come near on one sequence."""
    if stage not in FORWARD + BACKWARD:
        return
    different = Different(question)
    for _, _, change in usual(question):
        different(change(lists_of(question)))
    walks = [one for one in rarer(question) if different(one[2](lists_of(question)))]
    sample = Sample(question, answers, stage)
    if sample.wrong:
        planted = (Bug(name, text, (stage,), see=instead(walking(f))) for name, text, f in walks)
        for _, bug in sample.near(planted):
            yield bug


def _ended(question: Question, answers: Answers) -> Iterator[Bug]:
    """Lists of dk and dv that end after so many queries: dv for every number, by sums over the
    first queries of all lists, hidden ones among them or not."""
    if "dv" not in answers:
        return
    with np.errstate(over="ignore", invalid="ignore"):
        found, whole = _left_by_number(question, answers)
    for hidden, off in found.items():
        number = int(np.argmin(off))
        if off[-1] > 0 and off[number] <= LEFT[question.dtype.itemsize] ** 2 * whole < off[-1]:
            text = f"the lists end after {number} queries"
            yield from inverted(text, by_walk(_first_queries(number, hidden)))


def _left_by_number(question: Question, answers: Answers) -> tuple[dict[bool, Floats], float]:
    """Squares of what every number of queries leaves of dv, hidden ones among them or not; and
    those of dv."""
    size, lists = question.block_size, lists_of(question)
    named = {hidden: lists.multiplicity(hidden) > 0 for hidden in (False, True)}
    longest = max(question.lengths_q, default=0)
    found: dict[bool, Floats] = {}
    whole = 0.0
    for c in _contexts(question, "backward", given_to(question, answers, "backward"), right=True):
        dv = answers["dv"][c.view.keys, c.view.head_kv].astype(np.float64)
        for block in range(-(-len(c.view.keys) // size)):
            keys = slice(block * size, (block + 1) * size)
            of_query = c.P[..., keys, None] * c.dO[..., None, :]
            for hidden in (False, True):
                sums = np.zeros((longest + 1, *dv[keys].shape))
                for one in np.unique(c.view.selections):
                    heads = c.view.selections == one
                    there = named[hidden][c.view.rows, one, block]
                    ended = np.cumsum(of_query[heads][:, there].sum(axis=0), axis=0)
                    sums[1 : len(ended) + 1] += ended
                    sums[len(ended) + 1 :] += ended[-1] if len(ended) else 0.0
                off = ((sums - dv[keys]) ** 2).sum(axis=(1, 2))
                found[hidden] = found.get(hidden, np.zeros(longest + 1)) + off
            whole += float((dv[keys] ** 2).sum())
    return found, whole


def _first_queries(number: int, hidden: bool) -> Walk:
    """Every block has so many queries, the first ones."""

    def walk(lists: Lists) -> Lists:
        sequence = lists.question.sequence_of("q")
        there = lists.multiplicity(hidden) > 0
        before = np.cumsum(there, axis=0)
        starts = np.searchsorted(np.where(sequence < 0, len(before), sequence), sequence)
        earlier = np.concatenate([np.zeros_like(before[:1]), before])
        before = before - earlier[starts]
        kept = there & (before <= number)
        entries = np.clip(lists.block, 0, there.shape[2] - 1)
        counts = np.take_along_axis(kept, entries, axis=2) & (lists.block >= 0)
        return replace(lists, times=lists.times * counts)

    return walk


def _planted(name: str, variant: str, see: See, stage: str) -> Iterator[Bug]:
    """Everywhere in a stage, or in what queries get alone, if keys get theirs by other lists."""
    stages = FORWARD + BACKWARD if stage in FORWARD + BACKWARD else (stage,)
    yield Bug(name, variant, stages, see=see)
    if stage == "backward":

        def of_queries(question: Question, views: tuple[View, ...]) -> Sequence[View]:
            pairs = zip(views_of(question), see(question, views_of(question)), strict=True)
            return [_swapped(right, other) for right, other in pairs]

        yield Bug(name, f"{variant}, in dq alone", BACKWARD, see=of_queries, steps=OF_LISTS)


def _swapped(right: View, other: View) -> View:
    """Queries see what ``other`` has, keys sum what is right."""
    found = split(right, other)
    return replace(found, of_q=found.of_k, of_k=found.of_q)


# ---- parts of the keys ------------------------------------------------------------------------


def parts_of(lists: Lists) -> np.ndarray:
    """What lists show, as ``Seen.counts``."""
    blocks = lists.multiplicity()
    own = (lists.block == lists.own) & lists.whole
    rest = (own * lists.times).sum(axis=2, keepdims=True)
    return np.concatenate([blocks, rest, np.zeros_like(rest)], axis=2)


def _part_of_key(question: Question, view: View, most: int) -> np.ndarray:
    """(n, m), of the keys of a sequence and of those behind it."""
    b, n = view.sequence, len(view.rows)
    length = question.lengths_k[b]
    key = np.arange(len(view.keys))
    place = (np.arange(n) + length - n)[:, None]
    part = np.broadcast_to(key // question.block_size, (n, len(key)))
    part = np.where((key > place) & (part == place // question.block_size), most, part)
    return np.where(key >= length, most + 1, part)


def _open(question: Question, views: tuple[View, ...]) -> Sequence[View]:
    """All keys of a sequence, and those that its last block would have if it were full."""
    lists = lists_of(question)
    slot_of = np.full((*lists.block.shape[:2], int(lists.blocks.max(initial=0)) + 1), OWN)
    for entry in range(lists.named.shape[2] - 1, -1, -1):
        token, head = np.nonzero(lists.exists[..., entry])
        slot_of[token, head, lists.named[token, head, entry]] = entry
    found = []
    for view in views_of(question):
        stop, length = int(question.cu_seqlens_k[view.sequence + 1]), len(view.keys)
        behind = min(-length % question.block_size, len(question.k) - stop)
        block = np.arange(length + behind) // question.block_size
        slot = slot_of[view.rows][:, view.selections].swapaxes(0, 1)[..., block]
        keys = np.concatenate([view.keys, stop + np.arange(behind)])
        found.append(replace(view, keys=keys, weight=np.ones(slot.shape), slot=slot))
    return found


def _seeing(counts: np.ndarray) -> See:
    """Every query sees the parts of the keys so often."""

    def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        if not views or views[0].slot is None:
            return views
        found = []
        for view in _open(question, views):
            part = _part_of_key(question, view, counts.shape[2] - 2)
            of = counts[view.rows][:, view.selections].swapaxes(0, 1)
            weight = np.take_along_axis(of, np.broadcast_to(part, view.weight.shape), axis=2)
            found.append(replace(view, weight=weight.astype(np.float64)))
        return found

    return see


# ---- reading ----------------------------------------------------------------------------------


def read(question: Question, answers: Answers, stage: str) -> Seen | None:
    """None where there is too little to read from, or where no whole numbers come out."""
    needed = {"forward": ("out", "lse"), "jvp": ("jvp out", "jvp lse"), "backward": ("dq",)}
    names = needed.get(stage)
    if names is None or not set(names) <= answers.keys():
        return None
    first = "backward" if stage == "backward" else "forward"
    given = given_to(question, answers, first)
    lists = lists_of(question)
    right = parts_of(lists)
    counts, sure = right.copy(), np.zeros(right.shape, dtype=bool)
    rows, good = 0, 0
    for c in _contexts(question, first, given):
        arrays = [answers[name] for name in names]
        for one in np.unique(c.view.selections):
            here = c.view.selections == one
            design, wanted = _equations(question, c, here, arrays, right.shape[2])
            found = _solved(design, wanted, LEFT[question.dtype.itemsize])
            if found is None:
                return None
            rows, good = rows + len(found.read), good + int(found.read.sum())
            told = found.sure & found.read[:, None]
            blind = _see_nothing(c, here, arrays)
            of_rows = np.where(told, found.counts, right[c.view.rows, one])
            counts[c.view.rows, one] = np.where(blind, 0, of_rows)
            sure[c.view.rows, one] = told | blind
    return Seen(counts, sure) if rows and good >= READ * rows else None


def _see_nothing(c: Context, heads: np.ndarray, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Rows (n, 1) whose heads all have an lse of -inf and an out of 0."""
    rows, of_heads = c.view.rows[None], c.view.heads[heads][:, None]
    if len(arrays) != 2:
        return np.zeros((len(c.view.rows), 1), dtype=bool)
    nothing = np.isneginf(arrays[1][of_heads, rows].astype(np.float64))
    nothing &= (arrays[0][rows, of_heads] == 0).all(axis=2)
    return np.asarray(nothing.all(axis=0))[:, None]


def _contexts(question: Question, stage: str, given: Given, right: bool = False) -> list[Context]:
    """The views, of all keys unless they shall be ``right``, with the results of all steps."""
    found: list[Context] = []
    last = PROGRAMS[stage][-1]

    def kept(c: Context) -> Floats:
        found.append(c)
        return np.asarray(STEPS[last](c))

    see = None if right else _open
    solve(question, stage, Bug("", stages=(stage,), see=see, steps={last: kept}), given=given)
    return found


def _equations(
    question: Question, c: Context, heads: np.ndarray, arrays: Sequence[np.ndarray], parts: int
) -> tuple[Floats, Floats]:
    """What each part adds to the answers of a row, (n, numbers, parts), and the answers."""
    view = c.view
    part = _part_of_key(question, view, parts - 2)
    rows, of_heads = view.rows[None], view.heads[heads][:, None]
    if len(arrays) == 2:
        lse = np.asarray(arrays[1][of_heads, rows], dtype=np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            weights = np.exp(c.S[heads] - dead_to_inf(np, lse)[..., None])
        values = np.concatenate([c.V, np.ones((len(c.V), 1))], axis=1)
        whole = np.where(np.isneginf(lse), 0.0, 1.0)[..., None]
        wanted = np.concatenate([arrays[0][rows, of_heads].astype(np.float64), whole], axis=2)
    else:
        weights, values = c.s * c.dY[heads], c.K
        wanted = arrays[0][rows, of_heads].astype(np.float64)
    design = np.zeros((len(view.rows), int(heads.sum()), values.shape[1], parts))
    for number in np.unique(part):
        with np.errstate(over="ignore", invalid="ignore"):
            of_part = times(weights * (part == number), values)
        design[..., number] = of_part.swapaxes(0, 1)
    numbers = design.shape[1] * design.shape[2]
    shape = len(view.rows), numbers
    return design.reshape(*shape, parts), wanted.swapaxes(0, 1).reshape(shape)


class _Solved(NamedTuple):
    """counts and sure (n, parts); read (n,): whether a row's answers are such sums."""

    counts: np.ndarray
    sure: np.ndarray
    read: np.ndarray


def _solved(design: Floats, wanted: Floats, left: float) -> _Solved | None:
    """The whole numbers of a least-squares solution, row by row."""
    numbers, parts = design.shape[1:]
    finite = np.isfinite(wanted).all(axis=1) & np.isfinite(design).all(axis=(1, 2))
    design = np.where(finite[:, None, None], design, 0.0)
    wanted = np.where(finite[:, None], wanted, 0.0)
    size = np.sqrt((design**2).sum(axis=1))
    there = size > 1e-9 * np.maximum(size.max(axis=1, keepdims=True), 1e-300)
    if 2 * int(there.sum(axis=1).max(initial=0)) > numbers:
        return None
    scale = np.where(there, size, 1.0)
    unit = np.where(there[:, None], design / scale[:, None], 0.0)
    gram = unit.swapaxes(1, 2) @ unit
    place = np.arange(parts)
    gram[:, place, place] += np.where(there, 1e-12, 1.0)
    inverse = np.linalg.inv(gram)
    solution = (inverse @ (unit.swapaxes(1, 2) @ wanted[..., None]))[..., 0]
    rest = wanted - (unit @ solution[..., None])[..., 0]
    free = np.maximum(numbers - there.sum(axis=1), 1)
    noise = np.sqrt((rest**2).sum(axis=1) / free)
    whole_size = np.sqrt((wanted**2).mean(axis=1))
    noise = np.maximum(noise, 1e-7 * whole_size)
    error = noise[:, None] * np.sqrt(np.maximum(inverse[:, place, place], 0.0)) / scale
    count = solution / scale
    whole = np.rint(np.clip(np.nan_to_num(count, nan=-1.0), -1, MOST))
    sure = there & (error < SURE)
    near = (np.abs(count - whole) < WHOLE) & (whole >= 0)
    fits = noise <= left * np.maximum(whole_size, np.abs(design).max(axis=(1, 2), initial=0))
    read = finite & fits & (near | ~sure).all(axis=1)
    return _Solved(whole.astype(np.int64), sure, read | ~there.any(axis=1))


def _all_or_none(seen: Seen, right: np.ndarray, wrong: np.ndarray) -> bool:
    """Whether rows are wrong as a whole: then they are scaled, or not stored."""
    rows = wrong.any(axis=2)
    dead = (seen.sure & (seen.counts == 0)).all(axis=2)
    if (rows & ~dead).any():  # rows that see nothing tell little
        rows = rows & ~dead
    there = seen.sure & (right > 0)
    ratio = np.where(there, seen.counts / np.maximum(right, 1), np.nan)[rows]
    extra = (seen.sure & (right == 0) & (seen.counts > 0)).any(axis=2)[rows]
    with np.errstate(invalid="ignore"):
        first = np.where(there[rows], ratio, -1).max(axis=1, initial=-1)
        alike = ~extra & ((ratio == first[:, None]) | ~there[rows]).all(axis=1)
    return bool(alike.mean() > ALL_OR_NONE)


# ---- in words ---------------------------------------------------------------------------------

Feature = tuple[str, str, np.ndarray]  # class, words, parts


def _in_words(question: Question, lists: Lists, seen: Seen, right: np.ndarray) -> tuple[str, str]:
    """Class and words for what is seen too rarely, and too often."""
    holds = _Holds(question, lists, right.shape[2])
    fewer, more = (seen.sure & (sign * (seen.counts - right) > 0) for sign in (-1, 1))
    said = []
    for what, verb, features in (
        (fewer, "do not see", holds.missing()),
        (more, "see", holds.beyond()),
    ):
        if not what.any():
            continue
        best, words = "wrong-keys", f"{verb} {int(what.sum())} blocks that they "
        words += "should" if verb != "see" else "should not"
        most = 0.0
        for name, text, where in features:
            inside = (what & where).sum() / what.sum()
            share = (what & where).sum() / max((where & seen.sure).sum(), 1)
            exactly = name != "sparse-tile-union" or share >= EXPLAINS
            if inside >= EXPLAINS and share > most and exactly:
                best, words, most = name, f"{verb} {text}", share
        said.append((best, words))
    names = {name for name, _ in said}
    name = names.pop() if len(names) == 1 else "wrong-keys"
    return name, "rows " + ", and ".join(words for _, words in said)


class _Holds:
    """What the lists of every token hold, as masks over the parts of the keys."""

    def __init__(self, question: Question, lists: Lists, parts: int) -> None:
        self.question, self.lists, self.parts = question, lists, parts
        self.shape = (*lists.named.shape[:2], parts)
        self.exists = (lists.named >= 0) & (lists.named < lists.blocks)
        self.number = np.arange(parts - 2)

    def of(self, slots: np.ndarray) -> np.ndarray:
        """The blocks that these slots name."""
        found = np.zeros(self.shape, dtype=np.int64)
        token, head, slot = np.nonzero(slots & self.exists)
        np.add.at(found, (token, head, self.lists.named[token, head, slot]), 1)
        return found

    def blocks(self, which: np.ndarray) -> np.ndarray:
        found = np.zeros(self.shape, dtype=bool)
        found[..., : self.parts - 2] = which
        return found

    def missing(self) -> Iterator[Feature]:
        lists, counted = self.lists, self.lists.counted
        first = counted & first_of(lists.named, lists.exists) & lists.exists
        own = self.blocks(self.number == lists.own)
        yield "sparse-own-block-missing", "their own block", own & (self.of(counted) == 0)
        yield "sparse-own-block-missing", "their own block, named or not", own
        for slot in range(lists.named.shape[2]):
            here = np.arange(lists.named.shape[2]) == slot
            yield "sparse-last-slot-dropped", f"the block of slot {slot}", self.of(first & here) > 0
        negative = np.cumsum((lists.named < 0) & counted, axis=2) > 0
        yield "sparse-list-cut", "the blocks named after a -1", self.of(first & negative) > 0
        strange = np.cumsum(~lists.exists & counted, axis=2) > 0
        text = "the blocks named after one that is no block of the sequence"
        yield "sparse-list-cut", text, self.of(first & strange) > 0
        behind = np.cumsum(lists.exists & (lists.named > lists.own), axis=2) > 0
        text = "the blocks named after one behind the query"
        yield "sparse-list-cut", text, self.of(first & behind) > 0
        again = lists.exists & ~first_of(lists.named, lists.exists)
        text = "the blocks named after a repeat"
        yield "sparse-list-cut", text, self.of(first & (np.cumsum(again, axis=2) > 0)) > 0
        yield "sparse-list-cut", "blocks that are named more than once", self.of(counted) > 1
        last = self.blocks(self.number == lists.blocks - 1)
        yield "wrong-keys", "the last block of the sequence", last
        yield "wrong-keys", "the first block of the sequence", self.blocks(self.number == 0)

    def beyond(self) -> Iterator[Feature]:
        lists, parts = self.lists, self.parts
        own = self.blocks(self.number == lists.own)
        named = self.of(lists.counted)
        name = "sparse-duplicate-twice"
        yield name, "blocks that are named more than once as if they were several", named > 1
        yield name, "their own block again where it is named", own & (named > 0)
        yield name, "blocks again that are named once more", (named > 1) | (own & (named > 0))
        yield name, "their own block more than once", own
        if self.question.causal:
            rest = np.arange(parts) == parts - 2
            behind = self.blocks(self.number > lists.own)
            yield (
                "sparse-not-causal",
                "what lies behind the query in its own block",
                rest & (np.ones(self.shape, dtype=bool)),
            )
            yield "sparse-not-causal", "named blocks behind the query", behind & (named > 0)
            yield "sparse-not-causal", "keys behind the query", behind | rest
        past = np.broadcast_to(np.arange(parts) == parts - 1, self.shape)
        yield "neighbour-leak", "keys behind the end of their sequence", past
        uncounted = self.of(~lists.counted) > 0
        yield "sparse-counts-ignored", "blocks of slots that do not count", uncounted
        negative = ((lists.named < 0) & lists.counted).any(axis=2, keepdims=True)
        text = "the first block where an index is negative"
        yield "sparse-padding-read", text, self.blocks(self.number == 0) & negative
        other = np.broadcast_to(named.max(axis=1, keepdims=True), self.shape) > 0
        name = "sparse-other-heads-selection"
        yield name, "blocks that another head of the same token names", other & (named == 0)
        unnamed = self.blocks((self.number < lists.blocks) & (self.number != lists.own))
        yield "wrong-keys", "blocks that they did not name", unnamed & (named == 0)
        for size in (2, 4, 8, 16, 32, 64, 128):
            tile = np.arange(len(named)) // size
            of_tile = np.zeros_like(named)
            np.maximum.at(of_tile, tile, named)
            text = f"blocks that other queries of a tile of {size} name"
            yield "sparse-tile-union", text, (of_tile[tile] > 0) & (named == 0)
