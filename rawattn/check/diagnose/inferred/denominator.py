"""What else is in the softmax denominator? Read off rows of out that are the right ones times a
factor, and off lse.

A row of out is c times the right one where the row sum is off by E = exp(L) (1 / c - 1), for the
right lse L; a wrong lse says E as well, E = exp(lse) - exp(L). What E is the same for, or a sum of,
says which line is wrong.

Long by what the mass may be.
"""

import math
from collections.abc import Callable, Iterator
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
PERIODS = (2, 4, 8, 16, 32, 64)
MOST = 256  # keys of a tile
MOST_TOLD = 3  # explanations
CARRIED = (8, 16, 32, 64, 128, 256)  # keys of a first tile, against whose maximum a sum is
CARRY = 1e-4  # that two logarithms of the same sum may be apart
MOSTLY = 0.7  # of the rows
ROWS = 4  # that do not have the same number by chance
Mass = Floats  # (num_heads_q, total_q): E divided by exp(L)


class Extra(NamedTuple):
    """An explanation of E: its class, in words, and the E of it, divided by exp(L)."""

    name: str
    text: str
    mass: Mass


def bugs(question: Question, answers: Answers, stage: str) -> Iterator[Bug]:
    """Bugs of the row sum that out and lse show."""
    if question.sparse or stage != "forward":
        return
    right = solve(question, "forward")
    seen = np.isfinite(right["lse"]) & np.isfinite(answers.get("lse", right["lse"]))
    lse, out = _of_lse(answers, right, seen), _of_out(answers, right, seen, slice(None))
    for of_out, of_lse, mass in ((True, True, out), (True, False, out), (False, True, lse)):
        if mass is None:
            continue
        exact = lse if of_out and of_lse and lse is not None and _same(lse, out) else mass
        known = _explained(question, right["lse"], np.where(seen, exact, 0.0))
        if not known and of_out and of_lse and (exact is lse or "lse" not in answers):
            known = _left_over(question, right["lse"], np.where(seen, exact, 0.0))
        for extra in known:
            yield _planted(extra, of_out, of_lse)
    if "out" in answers and out is None:
        yield from _by_columns(question, answers, right, seen)


def _of_lse(answers: Answers, right: Answers, seen: np.ndarray) -> Mass | None:
    if "lse" not in answers:
        return None
    with np.errstate(all="ignore"):
        mass = np.expm1(answers["lse"].astype(np.float64) - right["lse"])
    return _unless_nothing(np.where(seen, mass, 0.0), answers["lse"])


def _of_out(
    answers: Answers, right: Answers, seen: np.ndarray, columns: slice | np.ndarray
) -> Mass | None:
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


def _same(one: Mass, other: Mass | None) -> bool:
    return other is not None and _off(one, other) < NEAR


def _off(one: Mass, other: Mass) -> float:
    size = float(np.sqrt(np.mean(other**2)))
    return float(np.sqrt(np.mean((one - other) ** 2))) / size if size else math.inf


def _planted(extra: Extra, of_out: bool, of_lse: bool) -> Bug:
    def softmax(c: Context) -> tuple[Floats, Floats]:
        L, P = STEPS["softmax"](c)
        mass = extra.mass[c.view.heads[:, None], c.view.rows]
        with np.errstate(all="ignore"):
            c.divided = np.nan_to_num(1 / (1 + mass))
            return (L + np.log1p(mass) if of_lse else L), P

    def O(c: Context) -> Floats:  # noqa: E743
        divided: Floats = STEPS["O"](c)
        return divided * c.divided[..., None] if of_out else divided

    where = {(True, True): "", (True, False): ", lse right", (False, True): ", out right"}
    text = f"{extra.text}{where[of_out, of_lse]}"
    return Bug(extra.name, text, FORWARD, steps={"softmax": softmax, "O": O})


# ---- what it is -------------------------------------------------------------------------------


def _explained(question: Question, L: Floats, mass: Mass) -> list[Extra]:
    """Explanations that come near, the nearest first; of those that are as near the simplest."""
    wanted = np.where(np.isfinite(L), mass, 0.0)
    told = [
        (_off(np.where(np.isfinite(L), extra.mass, 0.0), wanted), number, extra)
        for number, extra in enumerate(_ideas(question, L, wanted))
    ]
    least = min((off for off, _, _ in told), default=math.inf)
    as_near = [one for one in told if one[0] < min(NEAR, 2 * least + 1e-6)]
    return [extra for _, _, extra in sorted(as_near, key=lambda one: one[1])][:MOST_TOLD]


def _ideas(question: Question, L: Floats, mass: Mass) -> Iterator[Extra]:
    with np.errstate(over="ignore"):
        unit = np.where(np.isfinite(L), np.exp(-np.where(np.isfinite(L), L, 0.0)), 0.0)
    yield from _constants(question, unit, mass)
    yield from _whole_numbers(question, unit, mass)
    yield from _of_keys(question, L, mass)
    yield from _of_top(question, L, mass)
    yield from _of_residues(question, L, mass)


def _fitted(unit: Floats, mass: Mass) -> float:
    return float((unit * mass).sum() / max(float((unit * unit).sum()), 1e-300))


def _constants(question: Question, unit: Floats, mass: Mass) -> Iterator[Extra]:
    """The same E for all rows, or for those of a head or of a sequence."""
    one = _fitted(unit, mass)
    nearest = round(one)
    if nearest and abs(one - nearest) < DIFFER:
        one = float(nearest)
    yield Extra("denominator", f"{in_words(one)} is added to the row sum", one * unit)
    heads = np.array([_fitted(u, x) for u, x in zip(unit, mass, strict=True)])
    if np.ptp(heads) > DIFFER * abs(one):
        said = ", ".join(f"exp({math.log(x):.4g})" if x > 0 else f"{x:.4g}" for x in heads)
        text = f"a number for every head is added to the row sum, as a sink has it: {said}"
        yield Extra("denominator", text, heads[:, None] * unit)
    counts = np.zeros(question.batch)
    sequence = question.sequence_of("q")
    for b in range(question.batch):
        counts[b] = round(_fitted(unit[:, sequence == b], mass[:, sequence == b]))
    lengths = np.asarray(question.lengths_k) + counts
    pads = len(set(question.lengths_k)) == 1 or len(set(counts)) > 1
    added = np.where(sequence >= 0, counts[sequence], 0.0) * unit
    if counts.any() and counts.min() >= 0:
        said = ", ".join(f"{n:.0f}" for n in counts)
        together = ", ".join(f"{n:.0f}" for n in lengths)
        text = f"{said} keys of score 0 more, by sequence; with them {together}"
        yield Extra("padded-keys" if pads else "denominator", text, added)


def _whole_numbers(question: Question, unit: Floats, mass: Mass) -> Iterator[Extra]:
    """A number of keys of score 0 for every row: all that it does not see, or those of its tile."""
    hidden = np.zeros_like(mass)
    for view in views_of(question):
        hidden[view.heads[:, None], view.rows] = (view.weight == 0).sum(axis=2)
    if hidden.any():
        text = "every key that is not seen adds 1 to the row sum"
        yield Extra("denominator", text, hidden * unit)
    with np.errstate(all="ignore"):
        counts = np.round(np.where(unit > 0, mass / np.where(unit > 0, unit, 1.0), 0.0))
    if (counts == counts[:1]).all() and counts.min() >= 0 and 0 < counts.max() <= MOST:
        text = f"a whole number, {counts.min():.0f} to {counts.max():.0f}, is added to row sums"
        yield Extra("denominator", text, counts * unit)


Of = Callable[[Question, View, Floats], Floats]


def _by_view(question: Question, L: Floats, of: Of) -> Mass:
    """Sums over the keys of a view, divided by exp(L)."""
    found = np.zeros_like(L)
    for view, S in _scores(question):
        top = L[view.heads[:, None], view.rows]
        with np.errstate(over="ignore"):
            weights = np.exp(S - np.where(np.isfinite(top), top, np.inf)[..., None])
        found[view.heads[:, None], view.rows] = of(question, view, weights)
    return found


def _scores(question: Question) -> Iterator[tuple[View, Floats]]:
    """Scores of all keys of a sequence, those too that the mask hides."""
    for view in views_of(question):
        q = question.q[view.rows][:, view.heads].astype(np.float64).swapaxes(0, 1)
        k = question.k[view.keys, view.head_kv].astype(np.float64)
        yield view, question.scale * (q @ k.T)


def _of_keys(question: Question, L: Floats, mass: Mass) -> Iterator[Extra]:
    """Masked keys with their own weights, all of them or those of a row's tiles; a key twice."""
    left, right = bounds(question)
    if min(left, right) < math.inf:

        def hidden(tile: int) -> Of:
            return lambda question, view, weights: (
                weights * ((view.weight == 0) & _of_tiles(question, view, tile))
            ).sum(axis=2)

        text = "keys that the mask hides are in the row sum: it is taken before the mask"
        yield Extra("denominator", text, _by_view(question, L, hidden(0)))
        tiles = _tiles_like(question, L, mass)
        for tile in tiles:
            of_tile = f"{text}; those up to the end of a row's tile of {tile}"
            yield Extra("denominator", of_tile, _by_view(question, L, hidden(tile)))

    def one(of: Callable[[Question, View], np.ndarray], factor: float) -> Of:
        return lambda question, view, weights: (
            factor * (weights * (view.weight > 0) * of(question, view)).sum(axis=2)
        )

    for word, factor in (("twice", 1.0), ("not", -1.0)):
        for text, of in _SOME_KEYS.items():
            name = f"{text} is counted {word} in the row sum"
            yield Extra("denominator", name, _by_view(question, L, one(of, factor)))


def _of_tiles(question: Question, view: View, tile: int) -> np.ndarray:
    """Keys of the tiles (counted from the first key) in which a row sees something."""
    if not tile:
        return np.ones(view.weight.shape[1:], dtype=bool)
    seen = view.weight[0] > 0
    m = seen.shape[1]
    first = np.where(seen.any(axis=1), seen.argmax(axis=1), m) // tile * tile
    last = (m - 1 - seen[:, ::-1].argmax(axis=1)) // tile * tile + tile
    keys = np.arange(m)[None]
    return np.asarray((keys >= first[:, None]) & (keys < last[:, None]))


def _tiles_like(question: Question, L: Floats, mass: Mass) -> list[int]:
    """The sizes of tiles whose masked keys give E best, on the rows of one head and sequence."""
    best: list[tuple[float, int]] = []
    view, S = max(_scores(question), key=lambda found: len(found[0].rows))
    head = view.heads[0]
    top = L[head, view.rows]
    with np.errstate(over="ignore"):
        weights = np.exp(S[0] - np.where(np.isfinite(top), top, np.inf)[:, None])
    weights = weights * (view.weight[0] == 0)
    for tile in range(2, min(MOST, len(view.keys)) + 1):
        of_tile = (weights * _of_tiles(question, view, tile)).sum(axis=1)
        best.append((_off(of_tile, mass[head, view.rows]), tile))
    return [tile for off, tile in sorted(best)[:2] if off < NEAR]


def _own(question: Question, view: View) -> np.ndarray:
    return np.asarray(distances(question, view) == 0)


def _first(question: Question, view: View) -> np.ndarray:
    keys = np.arange(len(view.keys))
    return np.asarray(keys == np.argmax(view.weight[0] > 0, axis=1)[:, None])


def _last(question: Question, view: View) -> np.ndarray:
    keys = np.arange(len(view.keys))
    last = len(keys) - 1 - np.argmax(view.weight[0][:, ::-1] > 0, axis=1)
    return np.asarray(keys == last[:, None])


_SOME_KEYS: dict[str, Callable[[Question, View], np.ndarray]] = {
    "the query's own key": _own,
    "the first key that a row sees": _first,
    "the last key that a row sees": _last,
}


def _of_top(question: Question, L: Floats, mass: Mass) -> Iterator[Extra]:
    """A number is added to the sum of exp(score - maximum)."""

    def largest(question: Question, view: View, weights: Floats) -> Floats:
        return np.asarray((weights * (view.weight > 0)).max(axis=2, initial=0.0))

    unit = _by_view(question, L, largest)
    x = _fitted(unit, mass)
    text = f"{in_words(x)} is added to the sum of exp(score - row maximum)"
    yield Extra("denominator", text, x * unit)


def _of_residues(question: Question, L: Floats, mass: Mass) -> Iterator[Extra]:
    """Keys with some places modulo a number are left out of the row sum, or counted twice."""
    for modulus in PERIODS:
        if modulus > 2 * min(n for n in (*question.lengths_k, MOST) if n):
            return
        sums = np.stack([_by_view(question, L, _modulo(modulus, r)) for r in range(modulus)])
        columns = sums.reshape(modulus, -1).T
        wanted = np.asarray(mass).ravel()
        there = np.isfinite(columns).all(axis=1) & np.isfinite(wanted)  # else LAPACK complains
        if there.sum() < 4 * modulus:
            return
        found = np.linalg.lstsq(columns[there], wanted[there], rcond=None)[0]
        times = np.round(found)
        if not times.any() or np.abs(times).max() > 1 or np.abs(found - times).max() > 0.2:
            continue
        text = ", ".join(
            f"those with j mod {modulus} in {_list(np.nonzero(times == x)[0])} {word}"
            for x, word in ((-1, "are left out"), (1, "count twice"))
            if (times == x).any()
        )
        yield Extra("denominator", f"of the keys j {text}", np.tensordot(times, sums, 1))
        return


def _list(numbers: np.ndarray) -> str:
    return "{" + ", ".join(map(str, numbers)) + "}"


def _modulo(modulus: int, residue: int) -> Of:
    def of(question: Question, view: View, weights: Floats) -> Floats:
        here = np.arange(len(view.keys)) % modulus == residue
        return np.asarray((weights * (view.weight > 0))[..., here].sum(axis=2))

    return of


# ---- what other rows leave --------------------------------------------------------------------


def _left_over(question: Question, L: Floats, mass: Mass) -> list[Extra]:
    """E by row where nothing of the row itself explains it: never below 0, not the same for all
    rows, and in rows whose maximum does not move too, so that it is no sum that is not rescaled."""
    wrong = mass > DIFFER
    if mass.min(initial=0.0) < -DIFFER:
        return []
    steady = np.zeros((2, *mass.shape), dtype=bool)
    with np.errstate(all="ignore"):
        found = L + np.log1p(mass)
    carried, sums = np.zeros((len(CARRIED), *mass.shape)), np.full(mass.shape, np.nan)
    for view, S in _scores(question):
        here = view.heads[:, None], view.rows
        constant = np.ptp(mass[here], axis=1) <= DIFFER * mass[here].max(axis=1)
        if len(view.rows) >= ROWS and (constant & wrong[here].any(axis=1)).any():
            return []
        S = np.where(view.weight > 0, S, -np.inf)
        top = S.max(axis=2)
        seen = view.weight > 0
        first, last = seen.argmax(axis=2), seen.shape[2] - 1 - seen[..., ::-1].argmax(axis=2)
        most = S.argmax(axis=2)
        steady[0][here], steady[1][here] = most == first, most == last
        with np.errstate(all="ignore"):
            sums[here] = found[here] - top
            extra = np.log(mass[here]) + L[here]
            for number, tile in enumerate(CARRIED):
                carried[number][here] = extra - S[..., :tile].max(axis=2)
    if not all((wrong & x).any() for x in steady):
        return []
    text = (
        "the row sum is too large, by a number of its own in every row, while the numerator is "
        "right: out * exp(lse) is"
    )
    rows = wrong & np.isfinite(L)
    known = np.sort(sums[np.isfinite(sums)])
    for number, tile in enumerate(CARRIED):
        x = carried[number][rows]
        place = np.clip(np.searchsorted(known, x), 1, max(len(known) - 1, 1))
        if len(known) > 1 and np.isfinite(x).all():
            apart = np.minimum(np.abs(known[place] - x), np.abs(known[place - 1] - x))
            if (apart < CARRY).mean() > MOSTLY:
                text += "; what is added is the sum of another row, left there by the work item "
                text += f"before (first tile of {tile} keys)"
                break
    return [Extra("denominator", text, mass)]


# ---- columns that are divided by different sums -----------------------------------------------


def _by_columns(
    question: Question, answers: Answers, right: Answers, seen: np.ndarray
) -> Iterator[Bug]:
    """Groups of columns of out, each of them divided by a row sum of its own."""
    columns = np.arange(question.v.shape[2])
    for period in dict.fromkeys((*PERIODS, len(columns))):
        for count in (2, 4):
            if period > len(columns) or period % count or period < count:
                continue
            group = columns % period // (period // count)
            if count == 4 and period < 4:
                continue
            masses = [_of_out(answers, right, seen, group == g) for g in range(count)]
            some = [m for m in masses if m is not None]
            if not some or any(
                m is None and not _right(answers, right, group == g) for g, m in enumerate(masses)
            ):
                continue
            every = [np.zeros_like(right["lse"]) if m is None else m for m in masses]
            text = f"columns d of out with d mod {period} // {period // count} = 0 to {count - 1}"
            yield from _column_bugs(question, right["lse"], every, group, text)
            return


def _right(answers: Answers, right: Answers, columns: np.ndarray) -> bool:
    a, b = (x["out"].astype(np.float64)[..., columns] for x in (answers, right))
    return bool(np.sqrt(np.mean((a - b) ** 2)) < LEFT * eps_of(answers["out"]) * np.abs(b).max())


def _column_bugs(
    question: Question, L: Floats, masses: list[Mass], group: np.ndarray, text: str
) -> Iterator[Bug]:
    """The parts, by name where they have one, with lse of each of them or of the whole."""
    extras = []
    for mass in masses:
        named = _explained(question, L, mass)[:1] if mass.any() else []
        extras += named or [Extra("denominator", "a sum of their own", mass)]
    said = f"{text} are divided by different sums: " + "; ".join(x.text for x in extras)
    shares = np.stack([1 + extra.mass for extra in extras])

    def planted(of_lse: int | None) -> Bug:
        def softmax(c: Context) -> tuple[Floats, Floats]:
            L, P = STEPS["softmax"](c)
            of_rows = shares[:, c.view.heads[:, None], c.view.rows]
            with np.errstate(all="ignore"):
                c.divided = np.nan_to_num(1 / of_rows)
                return (L if of_lse is None else L + np.log(of_rows[of_lse])), P

        def O(c: Context) -> Floats:  # noqa: E743
            return np.asarray(STEPS["O"](c) * np.moveaxis(c.divided[group], 0, 2))

        lse = "lse right" if of_lse is None else f"lse of group {of_lse}"
        return Bug("denominator", f"{said}; {lse}", FORWARD, steps={"softmax": softmax, "O": O})

    for of_lse in (None, *range(len(shares))):
        yield planted(of_lse)
