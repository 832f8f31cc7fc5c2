"""What else is in the softmax denominator? Read off rows of out that are the right ones times a
factor, and off lse.

A row of out is c times the right one where the row sum is off by E = exp(L) (1 / c - 1), for the
right lse L; a wrong lse says E as well, E = exp(lse) - exp(L). What E is a multiple of says which
line is wrong.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.catalogue.masks import bounds, distances
from rawattn.check.diagnose.engine.attention import (
    FORWARD,
    STEPS,
    Bug,
    Context,
    Floats,
    View,
    solve,
    views_of,
)
from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.inferred.sample import eps_of, in_words

LEFT = 32  # units of eps: what a factor for every row may leave of out
NEAR = 0.1  # of the size of E: how far off an explanation of it may be
DIFFER = 0.02  # numbers that are not the same
COARSE = 0.03  # of a sum, which 8 bits may be off by
PERIODS = (2, 4, 8, 16, 32, 64)
TILES = range(8, 257, 8)  # keys of a tile
MOST_TOLD = 3  # explanations
ROWS = 4  # that do not have the same number by chance
COUNTED = {1.0: "counted twice", -1.0: "left out"}
Mass = Floats  # (num_heads_q, total_q): E divided by exp(L)


class Extra(NamedTuple):
    """What E, divided by exp(L), may be a multiple of: in words with {} for the number. numbers:
    those that it may be; any number, without."""

    text: str
    mass: Mass
    numbers: tuple[float, ...] = ()
    name: str = "denominator"


def bugs(question: Question, answers: Answers, stage: str) -> Iterator[Bug]:
    """Bugs of the row sum that out and lse show."""
    if question.sparse or stage != "forward":
        return
    right = solve(question, "forward")
    L = right["lse"]
    seen = np.isfinite(L) & np.isfinite(answers.get("lse", L))
    lse = _of_lse(answers, right, seen)
    for one in explained(question, L, lse) if lse is not None else ():
        none = np.zeros(question.v.shape[2], dtype=np.int64)
        text = f"{one.text}, out right"
        yield _planted(one.name, text, 1 + one.mass[None], none, of_out=False, of_lse=0)
    for text, group in _partitions(question.v.shape[2]) if "out" in answers else ():
        numbers = range(group.max() + 1)
        masses = [_of_out(answers, right, seen, group == g) for g in numbers]
        if all(mass is None for mass in masses) or any(
            masses[g] is None and not _right(answers, right, group == g) for g in numbers
        ):
            continue
        parts = [_named(question, L, mass, lse, not text) for mass in masses]
        for named in product(*parts):
            said = text + "; ".join(one.text for one in named)
            shares = 1 + np.stack([one.mass for one in named])
            for g in (None, *numbers):
                rest = (
                    f", lse {'right' if g is None else f'of group {g}'}"
                    if text or g is None
                    else ""
                )
                yield _planted(named[0].name, f"{said}{rest}", shares, group, of_lse=g)
        return


def _partitions(width: int) -> Iterator[tuple[str, np.ndarray]]:
    """Groups of columns of out, each of them divided by a row sum of its own: one, or lanes."""
    columns = np.arange(width)
    yield "", 0 * columns
    for period, count in product(dict.fromkeys((*PERIODS, width)), (2, 4)):
        if period <= width and period % count == 0:
            text = f"columns d of out with d mod {period} // {period // count} = 0 to {count - 1}"
            yield f"{text} are divided by different sums: ", columns % period // (period // count)


def _named(
    question: Question, L: Floats, mass: Mass | None, lse: Mass | None, whole: bool
) -> list[Extra]:
    """What E of a group of columns may be; of ``whole`` rows lse may tell it better."""
    if mass is None:
        return [Extra("right", np.zeros_like(L))]
    if not whole:
        return explained(question, L, mass)[:1] or [Extra("a sum of their own", mass)]
    if lse is None or _off(lse, mass) > NEAR:
        return explained(question, L, mass)
    return explained(question, L, lse) or _left_over(question, lse)


def _of_lse(answers: Answers, right: Answers, seen: np.ndarray) -> Mass | None:
    if "lse" not in answers:
        return None
    with np.errstate(all="ignore"):
        mass = np.expm1(answers["lse"].astype(np.float64) - right["lse"])
    return _unless_nothing(np.where(seen, mass, 0.0), answers["lse"])


def _of_out(answers: Answers, right: Answers, seen: np.ndarray, columns: np.ndarray) -> Mass | None:
    """None where rows are not the right ones times a factor, or where all are right."""
    if "out" not in answers:
        return None
    a, b = (x["out"].astype(np.float64)[..., columns] for x in (answers, right))
    if not np.isfinite(a).all():
        return None
    size = np.square(b).sum(axis=2)
    factor = np.where(size > 0, (a * b).sum(axis=2) / np.where(size > 0, size, 1.0), 1.0)
    left = np.sqrt(np.mean((a - factor[..., None] * b) ** 2) / np.mean(a**2)) if a.any() else 1.0
    if left > LEFT * eps_of(answers["out"]) or left > NEAR * np.sqrt(np.mean((factor - 1) ** 2)):
        return None
    with np.errstate(all="ignore"):
        mass = np.where(seen, (1 / factor - 1).T, 0.0)
    return _unless_nothing(mass, answers["out"])


def _unless_nothing(mass: Mass, found: np.ndarray) -> Mass | None:
    if not np.isfinite(mass).all() or np.abs(mass).max(initial=0) < LEFT * eps_of(found):
        return None
    return mass


def _off(one: Mass, other: Mass | None) -> float:
    size = 0.0 if other is None else float(np.sqrt(np.mean(other**2)))
    return float(np.sqrt(np.mean((one - other) ** 2))) / size if size else math.inf


def _planted(
    name: str,
    text: str,
    shares: Floats,
    group: np.ndarray,
    of_out: bool = True,
    of_lse: int | None = None,
) -> Bug:
    """Row sums of so many times the right ones, ``shares`` (groups, num_heads_q, total_q), which
    the columns of every ``group`` are divided by; and the lse of one of them."""

    def softmax(c: Context) -> tuple[Floats, Floats]:
        L, P = STEPS["softmax"](c)
        of_rows = shares[:, c.view.heads[:, None], c.view.rows]
        with np.errstate(all="ignore"):
            c.divided = np.nan_to_num(1 / of_rows)
            return (L if of_lse is None else L + np.log(of_rows[of_lse])), P

    def O(c: Context) -> Floats:  # noqa: E743
        out: Floats = STEPS["O"](c)
        if not of_out or not hasattr(c, "divided"):  # beside a bug with a softmax of its own
            return out
        return np.asarray(out * np.moveaxis(c.divided[group], 0, 2))

    return Bug(name, text, FORWARD, steps={"softmax": softmax, "O": O})


# ---- what it may be ---------------------------------------------------------------------------


def explained(question: Question, L: Floats, mass: Mass) -> list[Extra]:
    """Explanations that come near, the nearest first; of those that are as near the simplest."""
    seen = np.isfinite(L)
    wanted = np.where(seen, mass, 0.0)
    told = []
    with np.errstate(all="ignore"):
        unit = np.where(seen, np.exp(-L), 0.0)
        for one in (*_constants(question, unit, wanted), *_of_keys(question, L)):
            x = _fitted(one.mass, wanted)
            near = round(x) if abs(x - round(x)) < DIFFER else 0
            number = min(one.numbers or (float(near or x),), key=lambda n: abs(n - x))
            text = one.text.format(COUNTED[number] if one.numbers else in_words(number))
            this = one._replace(text=text, mass=number * one.mass)
            off = _off(np.where(seen, this.mass, 0.0), wanted)
            told += [(off, this)] if off < NEAR else []
    least = min((off for off, _ in told), default=math.inf)
    return [one for off, one in told if off < 2 * least + 1e-6][:MOST_TOLD]


def _fitted(unit: Floats, mass: Mass) -> float:
    found = (unit * mass).sum() / max(float((unit * unit).sum()), 1e-300)
    return float(found) if np.isfinite(found) else 0.0


def _constants(question: Question, unit: Floats, mass: Mass) -> Iterator[Extra]:
    """The same E for all rows, or for those of a head or of a sequence."""
    yield Extra("{} is added to the row sum", unit)
    heads = np.array([_fitted(u, x) for u, x in zip(unit, mass, strict=True)])
    if np.ptp(heads) > DIFFER * np.abs(heads).max():
        said = ", ".join(f"exp({math.log(x):.4g})" if x > 0 else f"{x:.4g}" for x in heads)
        text = f"a number for every head is added to the row sum, as a sink has it: {said}"
        yield Extra(text, heads[:, None] * unit, (1.0,))
    sequence = question.sequence_of("q")
    of_sequences = [sequence == b for b in range(question.batch)]
    counts = np.array([round(_fitted(unit[:, rows], mass[:, rows])) for rows in of_sequences])
    if counts.any() and counts.min() >= 0:
        pads = len(set(question.lengths_k)) == 1 or len(set(counts)) > 1
        said = ", ".join(map(str, counts))
        together = ", ".join(map(str, question.lengths_k + counts))
        text = f"{said} keys of score 0 more, by sequence; with them {together}"
        added = np.where(sequence >= 0, counts[sequence], 0) * unit
        yield Extra(text, added, (1.0,), "padded-keys" if pads else "denominator")


def _of_keys(question: Question, L: Floats) -> Iterator[Extra]:
    """Sums over keys of every row, divided by exp(L)."""
    views, weights, largest = [], [], np.zeros_like(L)
    for view, S in _scores(question):
        top = L[view.heads[:, None], view.rows]
        weights.append(np.exp(S - np.where(np.isfinite(top), top, np.inf)[..., None]))
        views.append(view)
        most = np.where(view.weight > 0, weights[-1], 0.0).max(axis=2, initial=0.0)
        largest[view.heads[:, None], view.rows] = most
    yield Extra("{} is added to the sum of exp(score - row maximum)", largest)

    def summed(keys: Callable[[View], np.ndarray]) -> Mass:
        """Over the keys (n, m) of every view."""
        found = np.zeros_like(L)
        for view, of in zip(views, weights, strict=True):
            found[view.heads[:, None], view.rows] = np.where(keys(view), of, 0.0).sum(axis=2)
        return found

    longest = max(question.lengths_k)
    if min(bounds(question)) < math.inf:
        text = "keys that the mask hides are in the row sum: it is taken before the mask"
        yield Extra(text, summed(lambda view: view.weight == 0), (1.0,))
        for tile in (tile for tile in TILES if tile <= longest):
            of_tile = f"{text}; those up to the end of a row's tile of {tile}"
            yield Extra(of_tile, summed(partial(_hidden_in_tiles, tile)), (1.0,))
    yield Extra("the query's own key is {}", summed(partial(_own, question)), (1.0, -1.0))
    for period, count in product((p for p in PERIODS if 2 * p <= longest), (2, 4)):
        for lane in range(count) if period >= count else ():
            first, last = lane * period // count, (lane + 1) * period // count - 1
            text = f"keys j with j % {period} in {first} to {last}"
            lanes = partial(_lanes, period // count, period, lane)
            yield Extra(f"{text} are {{}}", summed(lanes), (1.0, -1.0))
            if count > 2:
                others = partial(_lanes, period // count, period, lane, others=True)
                yield Extra(f"all but the {text} are {{}}", summed(others), (-1.0,))


def _own(question: Question, view: View) -> np.ndarray:
    return np.asarray((view.weight > 0) & (distances(question, view) == 0))


def _lanes(size: int, period: int, lane: int, view: View, *, others: bool = False) -> np.ndarray:
    """Keys that a row sees, of one of the groups of so many that take turns."""
    of = np.arange(len(view.keys)) % period // size
    return np.asarray((view.weight > 0) & ((of == lane) != others))


def _hidden_in_tiles(tile: int, view: View) -> np.ndarray:
    """Keys that a row does not see, of the tiles in which it sees something."""
    first, last = (x[:, None] // tile for x in _first_and_last(view))
    of = np.arange(len(view.keys)) // tile
    there = (of >= first) & (of <= last) & (view.weight[0] > 0).any(axis=1)[:, None]
    return np.asarray((view.weight == 0) & there)


def _scores(question: Question) -> Iterator[tuple[View, Floats]]:
    """Scores of all keys of a sequence, those too that the mask hides."""
    for view in views_of(question):
        q = question.q[view.rows][:, view.heads].astype(np.float64).swapaxes(0, 1)
        k = question.k[view.keys, view.head_kv].astype(np.float64)
        yield view, question.scale * (q @ k.T)


def _first_and_last(view: View) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last key that every row sees; (0, m - 1) for none."""
    seen = view.weight[0] > 0
    return seen.argmax(axis=1), seen.shape[1] - 1 - seen[:, ::-1].argmax(axis=1)


def _left_over(question: Question, mass: Mass) -> list[Extra]:
    """E by row where nothing of the row itself explains it: not the same for all rows of a head,
    and more than a sum in few bits is off by."""
    with np.errstate(invalid="ignore"):
        if not (np.abs(mass) > COARSE * np.exp(solve(question, "forward")["lse"])).any():
            return []
    sequence = question.sequence_of("q")
    for b in range(question.batch):
        of, largest = mass[:, sequence == b], np.abs(mass[:, sequence == b]).max(axis=1, initial=0)
        constant = np.ptp(of, axis=1) <= DIFFER * largest if of.shape[1] >= ROWS else False
        if (constant & (largest > DIFFER)).any():
            return []
    text = (
        "the row sum is off by a number of its own in every row, while the numerator is right (out "
        "* exp(lse) is): as if it began with what another row left there"
    )
    return [Extra(text, mass)]


def _right(answers: Answers, right: Answers, columns: np.ndarray) -> bool:
    a, b = (x["out"].astype(np.float64)[..., columns] for x in (answers, right))
    return bool(np.sqrt(np.mean((a - b) ** 2)) < LEFT * eps_of(answers["out"]) * np.abs(b).max())
