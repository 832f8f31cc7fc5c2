"""Which blocks did each query of block-sparse attention see, and which queries has the list of each
block? Read off out and lse or dq, and off dk and dv.

What a query sees is a sum over blocks: with the lse that was stored, the sums of exp(S - lse) over
the blocks that it saw are 1, and those of exp(S - lse) V are out; s dS K of these blocks is dq.
What dk and dv have of a block is a sum over the queries of its list. So how often every block was
seen solves linear equations, many more than there are blocks, and must be a whole number. Then it
is looked up among the known ways to read lists (``sparse.walks``), or planted as it is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.catalogue.sparse.lists import (
    OWN,
    Lists,
    Walk,
    lists_of,
    shown,
    walking,
)
from rawattn.check.diagnose.catalogue.sparse.selection import OF_LISTS, by_walk, inverted, split
from rawattn.check.diagnose.catalogue.sparse.walks import of_blocks, rarer
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
from rawattn.check.diagnose.inferred.sample import Given, given_to
from rawattn.reference.dense import dead_to_inf

SURE = 0.12  # standard error of a count that is told from its neighbours
WHOLE = 0.25  # distance of a count from a whole number
LEFT = {2: 0.05, 4: 2e-3, 8: 2e-3}  # of the size of a row's answers, by the bytes of the inputs
READ = 0.95  # share of the rows, or blocks, that must be read
ALL_OR_NONE = 0.8  # share of wrong rows in which all blocks count alike: no matter of lists
MOST = 1e6  # times that a block may count


@dataclass(frozen=True)
class Seen:
    """How often every query saw each part of the keys, (total_q, num_heads_sel, parts): the blocks
    of a sequence, of the own block up to the query, then what lies behind it in its own block.
    sure: what could be read.
    """

    counts: np.ndarray
    sure: np.ndarray


def bugs(question: Question, answers: Answers, stage: str) -> Iterator[Bug]:
    """Bugs in which queries see the blocks that they saw; none where that cannot be read."""
    if not question.sparse:
        return
    seen = read(question, answers, stage)
    if seen is None:
        return
    lists = lists_of(question)
    right = parts_of(lists)
    wrong = seen.sure & (seen.counts != right)
    if not wrong.any():
        return
    names = set()
    for name, words, change in rarer(question):
        changed = change(lists)
        if name in names or changed.heads is not lists.heads:
            continue
        if not (seen.sure & (seen.counts != parts_of(changed))).any():
            names.add(name)
            yield from _planted(name, words, walking(change), stage)
    if not names and not _all_or_none(seen, right, wrong):
        counts = np.where(seen.sure, seen.counts, right)
        more = int((wrong & (counts > right)).sum())
        words = f"rows lack {int(wrong.sum()) - more} blocks, and see {more} that they should not"
        yield from _planted("wrong-keys", words, walking(_with_parts(counts)), stage)


def _planted(name: str, variant: str, see: See, stage: str) -> Iterator[Bug]:
    """Everywhere in a stage, or in what queries get alone, if keys get theirs by other lists."""
    stages = FORWARD + BACKWARD if stage in FORWARD + BACKWARD else (stage,)
    yield Bug(name, variant, stages, see=see)
    if stage == "backward":

        def of_queries(question: Question, views: tuple[View, ...]) -> Sequence[View]:
            pairs = zip(views_of(question), see(question, views_of(question)), strict=True)
            both = [split(right, other) for right, other in pairs]
            return [replace(one, of_q=one.of_k, of_k=one.of_q) for one in both]

        yield Bug(name, f"{variant}, in dq alone", BACKWARD, see=of_queries, steps=OF_LISTS)


# ---- parts of the keys ------------------------------------------------------------------------


def parts_of(lists: Lists) -> np.ndarray:
    """What lists show, as ``Seen.counts``."""
    own = (lists.block == lists.own) & lists.whole
    rest = (own * lists.times).sum(axis=2, keepdims=True)
    return np.concatenate([lists.multiplicity(), rest], axis=2)


def _with_parts(counts: np.ndarray) -> Walk:
    """Every query sees the parts of the keys so often, as far as lists can tell."""

    def walk(lists: Lists) -> Lists:
        blocks, rest = counts[..., :-1], counts[..., -1:]
        own = np.arange(blocks.shape[2]) == lists.own
        return of_blocks(lists, np.where(own, np.maximum(blocks, rest), blocks), ~own | (rest > 0))

    return walk


def _part_of_key(question: Question, view: View, most: int) -> np.ndarray:
    """(n, m), of the keys of a sequence."""
    n, m = len(view.rows), len(view.keys)
    key, place = np.arange(m), (np.arange(n) + m - n)[:, None]
    part = np.broadcast_to(key // question.block_size, (n, m))
    behind = (key > place) & (part == place // question.block_size)
    return np.where(behind, most, part)


def _every(lists: Lists) -> Lists:
    """All blocks, uncut."""
    return of_blocks(lists, np.ones_like(lists.multiplicity()), True)


# ---- reading ----------------------------------------------------------------------------------


def read(question: Question, answers: Answers, stage: str) -> Seen | None:
    """None where there is too little to read from, or where no whole numbers come out."""
    needed = {"forward": ("out", "lse"), "jvp": ("jvp out", "jvp lse"), "backward": ("dq",)}
    names = needed.get(stage)
    if names is None or not set(names) <= answers.keys():
        return None
    first = "backward" if stage == "backward" else "forward"
    right = parts_of(lists_of(question))
    counts, sure = right.copy(), np.zeros(right.shape, dtype=bool)
    rows, good = 0, 0
    for c in _contexts(question, first, given_to(question, answers, first)):
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


def _contexts(question: Question, stage: str, given: Given) -> list[Context]:
    """The views of all keys, but for the sliding branch, with the results of all steps."""
    found: list[Context] = []
    last = PROGRAMS[stage][-1]

    def kept(c: Context) -> Floats:
        found.append(c)
        return np.asarray(STEPS[last](c))

    with np.errstate(over="ignore", invalid="ignore"):
        bug = Bug("", stages=(stage,), see=walking(_every), steps={last: kept})
        solve(question, stage, bug, given=given)
    return [c for c in found if c.view.slot is not None]


def _equations(
    question: Question, c: Context, heads: np.ndarray, arrays: Sequence[np.ndarray], parts: int
) -> tuple[Floats, Floats]:
    """What each part adds to the answers of a row, (n, numbers, parts), and the answers."""
    view = c.view
    part = _part_of_key(question, view, parts - 1)
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
    shape = len(view.rows), design.shape[1] * design.shape[2]
    return design.reshape(*shape, parts), wanted.swapaxes(0, 1).reshape(shape)


class _Solved(NamedTuple):
    """counts and sure (systems, parts); read (systems,): whether the answers are such sums."""

    counts: np.ndarray
    sure: np.ndarray
    read: np.ndarray


def _solved(design: Floats, wanted: Floats, left: float) -> _Solved | None:
    """The whole numbers of a least-squares solution, system by system."""
    numbers, parts = design.shape[1:]
    finite = np.isfinite(wanted).all(axis=1) & np.isfinite(design).all(axis=(1, 2))
    design = np.where(finite[:, None, None], design, 0.0)
    wanted = np.where(finite[:, None], wanted, 0.0)
    size = np.sqrt((design**2).sum(axis=1))
    there = size > 1e-9 * np.maximum(size.max(axis=1, keepdims=True, initial=0), 1e-300)
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


# ---- lists from blocks back to queries ----------------------------------------------------------


def of_keys(question: Question, answers: Answers, wrong: frozenset[str]) -> Iterator[Bug]:
    """The bug in which the lists of dk and dv, ``wrong`` ones, are those read off."""
    if not wrong <= {"dk", "dv"}:
        return
    lists = lists_of(question)
    right = lists.multiplicity(hidden=True)
    counts, blocks, good = right.copy(), 0, 0
    pairs = _holding(np.ones_like(right))(lists)
    given = given_to(question, answers, "backward")
    for c, view in zip(_contexts(question, "backward", given), views_of(question), strict=True):
        mask = shown(question, view, pairs).weight > 0
        for block in range(-(-len(view.keys) // question.block_size)):
            design, wanted = _sums(question, c, mask, block, answers, sorted(wrong))
            found = _solved(design[None], wanted[None], LEFT[question.dtype.itemsize])
            if found is None:
                continue
            blocks, good = blocks + 1, good + bool(found.read[0])
            of = np.unique(np.asarray(view.selections))
            usual = right[view.rows[:, None], of, block].reshape(-1)
            told = np.where(found.sure[0] & found.read[0], found.counts[0], usual)
            counts[view.rows[:, None], of, block] = told.reshape(len(view.rows), len(of))
    if not blocks or good < READ * blocks or (counts == right).all():
        return
    lost, more = int((counts < right).sum()), int((counts > right).sum())
    words = f"the lists of blocks lack {lost} of their queries, and have {more} more, or again"
    yield from inverted(words, by_walk(_holding(counts)))


def _holding(counts: np.ndarray) -> Walk:
    """The lists of blocks have every query so often; an own block that is not named is cut."""

    def walk(lists: Lists) -> Lists:
        named = of_blocks(lists, counts).slot != OWN
        own = np.arange(counts.shape[2]) == lists.own
        return of_blocks(lists, counts, (named | ~own) & (not lists.question.causal))

    return walk


def _sums(
    question: Question,
    c: Context,
    mask: np.ndarray,
    block: int,
    answers: Answers,
    names: Sequence[str],
) -> tuple[Floats, Floats]:
    """What every query, of each head of selections, adds to dk and dv of a block: (numbers,
    queries); and what there is of them."""
    view, designs, wanted = c.view, [], []
    m = mask.shape[2]
    keys = np.arange(m)[block * question.block_size : (block + 1) * question.block_size]
    for name in names:
        weights, x = (c.s * c.dY, c.Q) if name == "dk" else (c.P, c.dO)
        with np.errstate(over="ignore", invalid="ignore"):
            w = np.where(mask, weights[..., :m], 0.0)[..., keys]
            parts = [
                np.einsum("hij,hid->jdi", w[here], x[here])
                for here in (view.selections == one for one in np.unique(view.selections))
            ]
        found = answers[name][view.keys[keys], view.head_kv].astype(np.float64).reshape(-1)
        size = max(float(np.sqrt(np.mean(found**2))), 1e-300)
        designs.append(np.stack(parts, axis=3).reshape(len(found), -1) / size)
        wanted.append(found / size)
    return np.concatenate(designs), np.concatenate(wanted)
