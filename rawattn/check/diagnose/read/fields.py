"""Numbers that were read, of pairs (num_heads_q, total_q, total_k) and of rows, as lse, D or sinks:
what fits them, in words, and which other rows, heads or sequences they are those of."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np

from rawattn.check.diagnose.catalogue import maps
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.evidence.places import Array

Calls = Sequence[tuple[Array, Any]]  # right numbers of rows, and where they tell something
FEW = 0.3  # of the rows that are known: a map may have nothing for so many
NEAR = {8: 1e-8, 4: 1e-5}  # numbers that are the same, by the bytes of the inputs
EXACT = {8: 1e-9, 4: 3e-6}  # the same, of a number's size
NARROW, MANY = ("bfloat16", "float16", "float32"), 20  # dtypes, and numbers that tell one
CHANCE = 0.02  # that a number is some row's by chance, at most
PEAK = 8  # the worst of many entries over their root mean square


@dataclass(frozen=True, eq=False)
class Field:
    """``x`` where ``there``, with a noise. by_row: rows are known up to a number, as logarithms."""

    x: Array
    there: Array
    by_row: bool
    noise: float

    @cached_property
    def own(self) -> Array:
        return self.centred(self.x)

    def centred(self, x: Array) -> Array:
        """Without the mean of each row, or of nothing; 0 where nothing is."""
        x = np.where(self.there, x, 0.0)
        if not self.by_row:
            return x
        count = np.maximum(self.there.sum(axis=-1, keepdims=True), 1)
        return np.where(self.there, x - x.sum(axis=-1, keepdims=True) / count, 0.0)

    def left_by_head(self, x: Array) -> Array:
        """What ``x`` leaves in units of the noise, or of the worst entry, which may be PEAK times
        as far off; inf for what is no number."""
        with np.errstate(invalid="ignore", over="ignore"):
            off = np.abs(self.own - self.centred(x))
            rms = np.sqrt((off**2).sum(axis=(1, 2)) / np.maximum(self.there.sum(axis=(1, 2)), 1))
        worst = np.maximum(rms, off.max(axis=(1, 2), initial=0.0) / PEAK) / self.noise
        return np.where(np.isfinite(worst), worst, np.inf)

    def left(self, x: Array) -> float:
        """The same of the worst head."""
        return float(self.left_by_head(x).max(initial=0.0))

    def fits(self, x: Array) -> bool:
        return self.left(x) <= 1

    @property
    def zero(self) -> bool:
        return self.fits(np.zeros_like(self.x))

    def slopes(self, x: Array) -> Array:
        """(heads, 1, 1): how often ``x`` is in the field; rounded where that leaves no more."""
        a, b = self.centred(x), self.own
        size = (a * a).sum(axis=(1, 2))
        found = ((a * b).sum(axis=(1, 2)) / np.where(size > 0, size, 1.0))[:, None, None]
        same = self.left(plain(found) * x) <= 1.2 * self.left(found * x) + 1e-6
        return plain(found) if same else np.asarray(found)

    def shares(self, basis: Sequence[Array]) -> Array:
        """How often each of ``basis`` is in the field, of all heads together."""
        a = np.stack([self.centred(np.broadcast_to(x, self.x.shape))[self.there] for x in basis])
        return np.asarray(np.linalg.lstsq(a @ a.T, a @ self.own[self.there], rcond=1e-12)[0])


def sums_of(basis: Mapping[str, Array], due: Array, most: int) -> Iterator[dict[str, float]]:
    """Sums of ``most`` of ``basis`` that are ``due``, both in units of what is allowed: how often
    each is there, the fewest first."""
    if not basis:
        return
    columns = np.stack([*basis.values()], axis=1)
    products, with_due = columns.T @ columns, columns.T @ due
    for count in range(1, most + 1):
        for some in map(list, combinations(range(len(basis)), count)):
            found = np.linalg.lstsq(products[np.ix_(some, some)], with_due[some], rcond=1e-12)[0]
            short = np.round(found, 4)
            found = np.where(np.abs(found - short) < 1e-7, short, found)
            whole = np.where(np.abs(found - np.rint(found)) < 1e-2, np.rint(found), found)
            fit = (x for x in (whole, found) if np.mean((columns[:, some] @ x - due) ** 2) <= 1)
            if (factors := next(fit, None)) is not None:
                names = (name for n, name in enumerate(basis) if n in some)
                yield {name: float(x) for name, x in zip(names, factors, strict=True) if x}


def sum_in_words(factors: Mapping[str, float]) -> str:
    told = ""
    for name, x in factors.items():
        size = "" if abs(x) == 1 and name else number(abs(x))
        told += f" {'-' if x < 0 else '+'} {size} {name}".replace("  ", " ").rstrip()
    return told.strip().removeprefix("+ ") or "0"


def by_head(values: Array) -> str:
    """Numbers of heads: one if they are alike, or all of them."""
    values = np.asarray(values, dtype=np.float64).ravel()
    if np.ptp(values) < 1e-2 * (float(np.abs(values).max(initial=0.0)) or 1.0):
        return number(float(values.mean()))
    return ", ".join(f"{number(value)} (head {h})" for h, value in enumerate(values[:8]))


def in_heads(found: Array, due: Array) -> str:
    """Which query heads each head of keys has, (num_heads_kv, num_heads_q), and must have."""
    heads = ([np.flatnonzero(of).tolist() for of in x] for x in (found, due))
    told = enumerate(zip(*heads, strict=True))
    return "; ".join(f"head {n} of query heads {of or 'none'}, not {own}" for n, (of, own) in told)


def of_heads(heads: Array) -> str:
    """A map from h to a head, as a formula or as a list."""
    h, top = np.arange(len(heads)), int(heads.max(initial=0)) + 1
    known = {"h": h, "0": 0 * h}
    known |= {f"h % {n}": h % n for n in range(2, top + 1)}
    known |= {f"h // {n}": h // n for n in range(2, len(heads) + 1)}
    told = (name for name, x in known.items() if np.array_equal(x, heads))
    return next(told, ", ".join(map(str, heads)))


def number(x: float) -> str:
    """In three digits, or as many as tell it from 1."""
    return f"{x:.3g}" if abs(x - 1) > 5e-3 or abs(x - 1) < 1e-6 else f"{x:.6g}"


def plain(values: Array) -> Array:
    """Rounded to three digits."""
    return np.array([float(f"{x:.3g}") for x in values.ravel()]).reshape(values.shape)


def map_of(
    question: Question, calls: Calls, held: Array, near: Array | float
) -> tuple[maps.Map, float] | None:
    """By which map rows (num_heads_q, total_q) hold the right numbers of others, up to ``near``,
    and what they hold where it has none; NaN is not known."""
    told, g = ~np.isnan(held), maps.geometry(question, "lse")
    right = np.full_like(held, np.nan)
    for x, at in calls:
        right[at] = x[at]
    for by in maps.families(question, True) if told.any() else ():
        due = np.full_like(held, np.nan)
        for x, at in calls:
            due[at] = by.moved(g, x, np.nan)[at]
        known = told & ~np.isnan(due)
        with np.errstate(invalid="ignore"):
            same = (due == held) | (np.abs(due - held) <= near)
            moved_ones = known & (np.abs(due - right) > near)
        if moved_ones.any() and same[known].all() and known.sum() > (1 - FEW) * told.sum():
            left = held[told & ~known]
            return by, float(np.median(left)) if left.size else 0.0
    return None


def other_rows(due: Array, held: Array, known: Array, itemsize: int) -> str:
    """Of which other rows numbers (heads, tokens) are, where those that are known and not their
    own, nor 0, are the right one of some row, but for a FEW; empty where they are not."""
    near, there = NEAR.get(itemsize, np.inf), np.isfinite(due)
    order = np.argsort(due[there])
    values, at = due[there][order], np.argwhere(there)[order]
    n = np.clip(np.searchsorted(values, held - near), 0, max(len(values) - 1, 0))
    if not len(values) or 2 * near * len(values) > CHANCE * float(np.ptp(values)):
        return ""
    same, none = np.abs(values[n] - held) <= near, np.abs(held) <= near
    moved = known & (np.abs(held - due) > near) & ~none
    few = (moved & ~same).sum() < FEW * moved.sum()
    pairs = [(h, t, *at[n[h, t]]) for h, t in np.argwhere(moved & same)[:3]] if few else []
    return ", ".join(f"token {t} of head {h} that of token {s} of head {g}" for h, t, g, s in pairs)


def few_bits(x: Array, itemsize: int) -> str:
    """Whether numbers are all such as a narrower dtype than that of the inputs has, and which."""
    near = EXACT.get(itemsize, 0.0) * np.abs(x)
    names = [name for name in NARROW if np.dtype(name).itemsize < itemsize]
    with np.errstate(over="ignore"):
        alike = (name for name in names if (np.abs(x.astype(name) - x) <= near).all())
    return next(alike, "") if x.size > MANY and near.any() else ""


def rows_of(x: Array, near: float) -> Array | None:
    """(num_heads_q, total_q): the number that all pairs of a row have, up to ``near``; NaN where
    none is known. None where they have several."""
    low, high = np.fmin.reduce(x, axis=-1), np.fmax.reduce(x, axis=-1)
    return None if (high > low + near).any() else np.asarray((low + high) / 2)
