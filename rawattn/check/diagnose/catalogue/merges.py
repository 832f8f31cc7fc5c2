"""Results of parts of the keys (split-k, rings of devices) that are merged with wrong weights."""

from collections.abc import Callable, Iterator

import numpy as np

from rawattn.check.diagnose.engine.attention import (
    BACKWARD,
    FORWARD,
    Bug,
    Context,
    Floats,
    Step,
    times,
)
from rawattn.check.diagnose.engine.question import Question
from rawattn.reference.dense import dead_to_inf

LN_2 = np.log(2)
EQUAL = (2, 3, 4, 5, 6, 7, 8)  # parts of a sequence
TILES = (8, 16, 32, 64, 128)  # keys of a part
OF_TILES = (16, 32, 64, 128)  # keys of a tile, of which a part has as many as another
Size = Callable[[int], int]  # of the parts of so many keys
Merge = Callable[[Floats, Floats], tuple[Floats, Floats]]  # (parts, h, n) lse, O -> L, O
OfTops = Callable[[Floats, Floats, Floats], tuple[Floats, Floats]]  # lse, O, maximum -> L, O


def bugs(question: Question) -> Iterator[Bug]:
    """Each wrong merge, of every kind of parts."""
    for parts, size in _kinds(question).items():
        for text, merge in MERGES.items():
            steps = _merged(size, _without_tops(merge))
            yield Bug("partial-merge", f"{text}, {parts}", FORWARD, steps=steps)
        for text, of_tops in _by_sums().items():
            steps = _merged(size, of_tops)
            yield Bug("partial-merge", f"{text}, {parts}", FORWARD, steps=steps)
        for text, steps in _backward(size).items():
            yield Bug("partial-merge", f"{text}, {parts}", BACKWARD, steps=steps)


def _kinds(question: Question) -> dict[str, Size]:
    """Parts of as many keys; each once, where several are the same for all sequences."""
    longest = max(question.lengths_k, default=0)
    kinds = {f"{count} equal parts": _equal(count) for count in EQUAL}
    kinds |= {f"parts of {tile} keys": _of_keys(tile) for tile in TILES if tile < longest}
    for tile in (tile for tile in OF_TILES if tile < longest):
        kinds |= {
            f"{count} parts of as many tiles of {tile} keys": _of_tiles(count, tile)
            for count in EQUAL
        }
    found: dict[tuple[int, ...], str] = {}
    for text, size in kinds.items():
        sizes = tuple(min(size(m), m) for m in question.lengths_k)
        if sizes != question.lengths_k:
            found.setdefault(sizes, text)
    return {text: kinds[text] for text in found.values()}


def _equal(count: int) -> Size:
    return lambda m: -(-m // count)


def _of_keys(tile: int) -> Size:
    return lambda m: tile


def _of_tiles(count: int, tile: int) -> Size:
    return lambda m: -(-m // (count * tile)) * tile  # whole tiles, as many in every part


# ---- forward ----------------------------------------------------------------------------------


def _parts(c: Context, size: Size) -> Iterator[slice]:
    m = len(c.view.keys)
    step = max(size(m), 1)
    for start in range(0, m, step):
        yield slice(start, start + step)


def _of_parts(c: Context, size: Size) -> tuple[Floats, Floats, Floats]:
    """lse, out and maximum of every part: (parts, heads, n), one more axis of out."""
    lses, outs, tops = [], [], []
    for part in _parts(c, size):
        S = c.S[..., part]
        top = S.max(axis=-1)
        top = np.where(np.isneginf(top), 0.0, top)
        with np.errstate(divide="ignore"):
            L = np.log(np.exp(S - top[..., None]).sum(axis=-1)) + top
        P = c.r(np.exp(S - dead_to_inf(np, L)[..., None]))
        lses.append(L)
        outs.append(c.r(times(c.o(P), c.V[part])))
        tops.append(top)
    return np.stack(lses), np.stack(outs), np.stack(tops)


def _without_tops(merge: Merge) -> OfTops:
    return lambda lses, outs, tops: merge(lses, outs)


def _merged(size: Size, merge: OfTops) -> dict[str, Step]:
    def softmax(c: Context) -> tuple[Floats, Floats]:
        with np.errstate(all="ignore"):
            L, c.merged = merge(*_of_parts(c, size))
        return L, c.S

    return {"softmax": softmax, "O": lambda c: c.merged}


def _exp(x: Floats) -> Floats:
    return np.where(np.isneginf(x), 0.0, np.exp(np.where(np.isneginf(x), 0.0, x)))


def _weighted(weights: Floats, outs: Floats) -> Floats:
    return np.asarray((weights[..., None] * outs).sum(axis=0))


def _top(lses: Floats) -> Floats:
    top = lses.max(axis=0)
    return np.where(np.isneginf(top), 0.0, top)


def _whole(lses: Floats) -> Floats:
    return np.asarray(np.log(_exp(lses - _top(lses)).sum(axis=0)) + _top(lses))


def _shares(lses: Floats) -> Floats:
    """The right weights; 0 for a row without keys."""
    return _exp(lses - np.where(np.isneginf(_whole(lses)), 0.0, _whole(lses)))


def _by_powers(factor: float) -> Merge:
    """Weights of exp(factor lse), normalised. lse in two forms: as that sum has it, or right."""

    def merge(lses: Floats, outs: Floats) -> tuple[Floats, Floats]:
        shares = _shares(lses * factor)
        return _whole(lses * factor) / factor, _weighted(shares, outs)

    return merge


def _powers_right_lse(factor: float) -> Merge:
    return lambda lses, outs: (_whole(lses), _weighted(_shares(lses * factor), outs))


def _powers_top(factor: float) -> Merge:
    """lse is the top one plus the logarithm, in the base of the weights, of their sum."""

    def merge(lses: Floats, outs: Floats) -> tuple[Floats, Floats]:
        sums = _exp((lses - _top(lses)) * factor).sum(axis=0)
        return _top(lses) + np.log(sums), _weighted(_shares(lses * factor), outs)

    return merge


def _stale(lse_too: bool) -> Merge:
    """The running lse stays that of the first part (that has keys) when others are merged."""

    def merge(lses: Floats, outs: Floats) -> tuple[Floats, Floats]:
        running, found = lses[0], outs[0]
        last = running
        for L, out in zip(lses[1:], outs[1:], strict=True):
            first = np.isneginf(running)
            whole = np.logaddexp(running, L)
            safe = np.where(np.isneginf(whole), 0.0, whole)
            a, b = _exp(running - safe)[..., None], _exp(L - safe)[..., None]
            found = a * found + b * out
            last = np.where(np.isneginf(L), last, whole)
            running = np.where(first, L, running)
        return (last if lse_too else _whole(lses)), found

    return merge


def _stale_first(lses: Floats, outs: Floats) -> tuple[Floats, Floats]:
    return lses[0], _stale(False)(lses, outs)[1]


def _running(weights: Callable[[Floats, Floats], tuple[Floats, Floats]]) -> Merge:
    """out = a out + b (that of the part), one part after the other; lse right."""

    def merge(lses: Floats, outs: Floats) -> tuple[Floats, Floats]:
        running, found = lses[0], outs[0]
        for L, out in zip(lses[1:], outs[1:], strict=True):
            a, b = weights(running, L)
            found = np.nan_to_num(a)[..., None] * found + np.nan_to_num(b)[..., None] * out
            running = np.logaddexp(running, L)
        return _whole(lses), found

    return merge


def _exchanged(running: Floats, L: Floats) -> tuple[Floats, Floats]:
    whole = np.logaddexp(running, L)
    return np.exp(L - whole), np.exp(running - whole)


def _halves(running: Floats, L: Floats) -> tuple[Floats, Floats]:
    return np.full_like(L, 0.5), np.full_like(L, 0.5)


def _sum_only(running: Floats, L: Floats) -> tuple[Floats, Floats]:
    """The old result is not rescaled."""
    return np.ones_like(L), np.exp(L - np.logaddexp(running, L))


def _mean(empty_too: bool) -> Merge:
    def merge(lses: Floats, outs: Floats) -> tuple[Floats, Floats]:
        there = np.ones_like(lses) if empty_too else (~np.isneginf(lses)).astype(np.float64)
        return _whole(lses), _weighted(there / np.maximum(there.sum(axis=0), 1), outs)

    return merge


def _empty_as_zero(one: bool) -> Merge:
    """A part without keys has an lse of 0, so that it has weight."""

    def merge(lses: Floats, outs: Floats) -> tuple[Floats, Floats]:
        taken = np.where(np.isneginf(lses), 0.0, lses)
        return (_whole(taken) if one else _whole(lses)), _weighted(_shares(taken), outs)

    return merge


MERGES: dict[str, Merge] = {
    "lse not updated after a merge": _stale(True),
    "lse not updated after a merge, and returned so": _stale_first,
    "lse not updated after a merge, returned right": _stale(False),
    "weights of exp2 where lse is in natural units": _by_powers(LN_2),
    "weights of exp2 where lse is in natural units, lse right": _powers_right_lse(LN_2),
    "weights of exp2 where lse is in natural units, natural logarithm": _powers_top(LN_2),
    "weights of exp where lse is in base 2": _by_powers(1 / LN_2),
    "weights of exp where lse is in base 2, lse right": _powers_right_lse(1 / LN_2),
    "weights of exp where lse is in base 2, natural logarithm": _powers_top(1 / LN_2),
    "lse is the largest of the parts": lambda lses, outs: (
        lses.max(axis=0),
        _weighted(_shares(lses), outs),
    ),
    "lse is that of the last part": lambda lses, outs: (
        lses[-1],
        _weighted(_shares(lses), outs),
    ),
    "lse is that of the first part": lambda lses, outs: (
        lses[0],
        _weighted(_shares(lses), outs),
    ),
    "lse is the sum of those of the parts": lambda lses, outs: (
        lses.sum(axis=0),
        _weighted(_shares(lses), outs),
    ),
    "weights exp(lse - largest), not divided by their sum": lambda lses, outs: (
        _whole(lses),
        _weighted(_exp(lses - _top(lses)), outs),
    ),
    "weights lse / (sum of lse)": lambda lses, outs: (
        _whole(lses),
        _weighted(np.nan_to_num(lses / lses.sum(axis=0), neginf=0.0), outs),
    ),
    "parts added without weights": lambda lses, outs: (_whole(lses), outs.sum(axis=0)),
    "mean of the parts that have keys": _mean(False),
    "mean of all parts": _mean(True),
    "weights of both exchanged": _running(_exchanged),
    "mean of the running result and the part": _running(_halves),
    "the running result is not rescaled": _running(_sum_only),
    "lse of an empty part taken for 0": _empty_as_zero(True),
    "lse of an empty part taken for 0, lse right": _empty_as_zero(False),
}


def _by_sums() -> dict[str, OfTops]:
    """Merges of row sums, each taken against the maximum of its part."""
    right = "sum(part) exp(maximum(part) - largest)"
    weights: dict[str, Callable[[Floats, Floats], Floats]] = {
        "sum(part)": lambda sums, scales: sums,
        "exp(maximum(part) - largest)": lambda sums, scales: scales,
        right: lambda sums, scales: sums * scales,
    }
    lse_forms: dict[str, Callable[[Floats, Floats, Floats], Floats]] = {
        "lse right": lambda lses, top, total: _whole(lses),
        "lse = largest + log(their sum)": lambda lses, top, total: top + np.log(total),
        "lse = log(their sum)": lambda lses, top, total: np.log(total),
    }

    def of(above: str, below: str, form: str) -> OfTops:
        def merge(lses: Floats, outs: Floats, tops: Floats) -> tuple[Floats, Floats]:
            there = ~np.isneginf(lses)
            largest = np.where(there, tops, -np.inf).max(axis=0)
            largest = np.where(np.isneginf(largest), 0.0, largest)
            sums, scales = _exp(lses - tops), np.where(there, np.exp(tops - largest), 0.0)
            total = weights[below](sums, scales).sum(axis=0)
            found = _weighted(weights[above](sums, scales), outs)
            L = lse_forms[form](lses, largest, total)
            L = np.where(np.isneginf(lses).all(axis=0), -np.inf, L)
            return L, found / np.where(total == 0, 1.0, total)[..., None]

        return merge

    return {
        f"weights {above}, divided by the sum of {below}; {form}": of(above, below, form)
        for above in weights
        for below in weights
        for form in lse_forms
        if not (below == right and (above == right or form != "lse right"))
    }


# ---- backward ---------------------------------------------------------------------------------


def _backward(size: Size) -> dict[str, dict[str, Step]]:
    """Statistics of each part in the place of those of all keys."""

    def P(c: Context) -> Floats:
        lses, _, _ = _of_parts(c, size)
        found = np.zeros(np.broadcast_shapes(c.S.shape))
        for part, L in zip(_parts(c, size), lses, strict=True):
            found[..., part] = np.exp(c.S[..., part] - dead_to_inf(np, L)[..., None])
        return np.asarray(c.r(found))

    def dS(c: Context) -> Floats:
        _, outs, _ = _of_parts(c, size)
        D = np.zeros(np.broadcast_shapes(c.S.shape))
        for part, out in zip(_parts(c, size), outs, strict=True):
            D[..., part] = ((c.dO * out).sum(axis=-1) - c.dL)[..., None]
        return np.asarray(c.r(c.P * (c.dP - D)))

    return {
        "backward with lse of the part": {"bP": P},
        "backward with delta of the part": {"dS": dS},
        "backward with lse and delta of the part": {"bP": P, "dS": dS},
    }
