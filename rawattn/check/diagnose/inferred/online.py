"""Which sums of the online softmax were rescaled wrongly? Tried on one view, planted where it fits.

The sums over tiles of keys are those of weights (row_sum), P V (out), and in forward mode of P o E
(e) and (P o E) V + P tV. Each must be multiplied by exp(old max - new max) of its own row.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.engine.attention import TILES, Bug, Context, Floats, Step, times
from rawattn.check.diagnose.engine.question import Answers, Question

Rows = Callable[[np.ndarray], np.ndarray]  # another row for each
# of the factors of all steps and the number of one: what old sums and new terms are multiplied by
Way = Callable[[Sequence[Floats], int], tuple[Floats, Floats]]

FITS = 0.1  # of what is wrong may be left on the view that is looked at

ROWS: dict[str, Rows] = {
    "the row 8 before, for rows i with i % 16 in 8 to 15": lambda i: i & ~8,
    "row i xor 8": lambda i: i ^ 8,
    "row i // 2 * 2": lambda i: i & ~1,
    "row i xor 1": lambda i: i ^ 1,
    "row i // 4 * 4": lambda i: i & ~3,
    "row i // 16 * 16": lambda i: i & ~15,
}


def _once(factors: Sequence[Floats], step: int) -> Floats:
    return np.ones_like(factors[step])


def _by_last(last: bool) -> Way:
    """The factor of the step before; ``last``: at the last step its own."""

    def way(factors: Sequence[Floats], step: int) -> tuple[Floats, Floats]:
        other = step if last and step == len(factors) - 1 else max(step - 1, 0)
        return factors[other], _once(factors, step)

    return way


def _power(x: float) -> Way:
    return lambda factors, step: (factors[step] ** x, _once(factors, step))


def _of_rows(rows: Rows) -> Way:
    def way(factors: Sequence[Floats], step: int) -> tuple[Floats, Floats]:
        n = factors[step].shape[1]
        return factors[step][:, np.minimum(rows(np.arange(n)), n - 1)], _once(factors, step)

    return way


def _not(factors: Sequence[Floats], step: int) -> tuple[Floats, Floats]:
    return _once(factors, step), _once(factors, step)


WAYS: dict[str, Way] = {
    "rescaled after the new tile is added": lambda factors, step: (factors[step], factors[step]),
    "rescaled after the new tile is added, by 0 at the first one": lambda factors, step: (
        factors[step],
        factors[step] * (step > 0),
    ),
    "by the factor of the tile before": _by_last(False),
    "by the factor of the tile before, at the last tile by its own": _by_last(True),
    "rescaled twice": _power(2),
    "by the reciprocal of the factor": _power(-1),
    "by exp2 of natural units": _power(np.log(2)),
    "by exp of units of base 2": _power(1 / np.log(2)),
}
WAYS |= {f"by the factor of {text}": _of_rows(rows) for text, rows in ROWS.items()}
UNSCALED = {
    "forward": (("out",), ("row_sum",), ("out", "row_sum")),
    "jvp": (("e",), ("tout",), ("e", "tout"), ("out",), ("row_sum",), ("out", "tout")),
}
SUMS = {"e": "the sum of P o E", "tout": "the sum of (P o E) V + P tV"}


class _Sums(NamedTuple):
    """The results of an online pass over the keys of a view."""

    out: Floats
    lse: Floats
    e: Floats
    tout: Floats


def bugs(
    question: Question, answers: Answers, stage: str, contexts: Sequence[Context]
) -> Iterator[Bug]:
    """Bugs of the online softmax that fit the view with the largest errors."""
    names = {
        "forward": {"out": "out", "lse": "lse"},
        "jvp": {"out": "jvp out", "lse": "jvp lse", "tout": "tout", "e": "tlse"},
    }[stage]
    there = {sum_: name for sum_, name in names.items() if name in answers}
    errors = [_error(c, answers, there, _right(c)) for c in contexts]
    worst = int(np.argmax(errors))
    if not errors[worst]:
        return
    c = contexts[worst]
    sizes = [tile for tile in TILES if tile < len(c.view.keys)]
    for tile, backwards in product(sizes, (False, True)):
        order = f"tile of {tile}" + (", from the last" if backwards else "")
        tries: list[tuple[str, tuple[str, ...], Way]] = []
        if stage == "jvp":
            tries += [
                (" and ".join(SUMS.get(s, s) for s in sums), sums, _not) for sums in UNSCALED[stage]
            ]
        tries += [
            (f"{' and '.join(sums)} {words}", sums, way)
            for words, way in WAYS.items()
            for sums in UNSCALED["forward"]
        ]
        tiles = _tiles(c, tile, backwards)
        for words, sums, way in tries:
            found = _online(c, tiles, sums, way)
            if _error(c, answers, there, found) < FITS * errors[worst]:
                steps = _steps(stage, tile, backwards, sums, way)
                yield Bug("no-rescale", f"{words}, {order}", (stage,), steps=steps)


def _right(c: Context) -> _Sums:
    jvp = hasattr(c, "tO")
    if jvp:
        return _Sums(c.O, c.L, c.tL, c.tO)
    return _Sums(c.O, c.L, np.zeros_like(c.L), np.zeros_like(c.O))


def _error(c: Context, answers: Answers, names: dict[str, str], sums: _Sums) -> float:
    """How far a view's answers are from ``sums``, each in units of its size."""
    total = 0.0
    for of, name in names.items():
        wanted = getattr(sums, of)
        by_row = answers[name].ndim == 2
        at = (
            (c.view.heads[:, None], c.view.rows) if by_row else (c.view.rows, c.view.heads[:, None])
        )
        found = np.asarray(answers[name][at], dtype=np.float64)
        both = np.isfinite(found) & np.isfinite(wanted)
        size = float((found[both] ** 2).sum())
        total += float(((found[both] - wanted[both]) ** 2).sum()) / size if size else 0.0
    return float(np.sqrt(total))


class _Tiles(NamedTuple):
    """What every tile of keys adds to the sums, and the right factors."""

    added: list[dict[str, Floats]]
    factors: list[Floats]
    top: Floats


def _tiles(c: Context, tile: int, backwards: bool) -> _Tiles:
    heads, n, m = c.S.shape
    found = _Tiles([], [], np.full((heads, n), -np.inf))
    E = np.where(c.W > 0, c.E, 0.0) if hasattr(c, "E") else None
    starts = range(0, m, tile)
    for start in reversed(starts) if backwards else starts:
        keys = slice(start, start + tile)
        new = np.maximum(found.top, c.S[..., keys].max(axis=-1))
        safe = np.where(np.isneginf(new), 0.0, new)
        found.factors.append(
            np.exp(np.where(np.isneginf(found.top), safe, found.top) - safe)[..., None]
        )
        weights = np.exp(c.S[..., keys] - safe[..., None])
        more = {"row_sum": weights.sum(axis=-1, keepdims=True), "out": times(weights, c.V[keys])}
        if E is not None:
            moving = weights * E[..., keys]
            more["e"] = moving.sum(axis=-1, keepdims=True)
            more["tout"] = times(moving, c.V[keys]) + times(weights, c.tV[keys])
        found.added.append(more)
        found = found._replace(top=new)
    return found


def _online(c: Context, tiles: _Tiles, wrong: tuple[str, ...], way: Way) -> _Sums:
    """The sums, the ``wrong`` ones rescaled in another ``way``."""
    top, moved = tiles.top, hasattr(c, "E")
    sums: dict[str, Floats] = {}
    with np.errstate(all="ignore"):
        for name, first in tiles.added[0].items():
            sums[name] = np.zeros_like(first)
            for step, factor in enumerate(tiles.factors):
                if name in wrong:
                    old, new = way(tiles.factors, step)
                    sums[name] = sums[name] * old + tiles.added[step][name] * new
                else:
                    sums[name] = sums[name] * factor + tiles.added[step][name]
    total = np.where(sums["row_sum"] == 0, 1.0, sums["row_sum"])
    with np.errstate(all="ignore"):
        lse = np.log(sums["row_sum"][..., 0]) + np.where(np.isneginf(top), 0.0, top)
        out = sums["out"] / total
    if not moved:
        return _Sums(out, lse, np.zeros_like(lse), np.zeros_like(out))
    e = sums["e"] / total
    return _Sums(out, lse, e[..., 0], sums["tout"] / total - e * out)


def _steps(
    stage: str,
    tile: int,
    backwards: bool,
    wrong: tuple[str, ...],
    way: Way,
) -> dict[str, Step]:
    def lse(c: Context) -> Floats:
        c.online = _online(c, _tiles(c, tile, backwards), wrong, way)
        return np.asarray(c.online.lse)

    def e(c: Context) -> Floats:
        c.online = _online(c, _tiles(c, tile, backwards), wrong, way)
        c.O, c.L = c.online.out, c.online.lse
        return np.asarray(c.online.e)

    if stage == "forward":
        return {"L": lse, "O": lambda c: c.online.out}
    return {"e": e, "tO": lambda c: c.online.tout}
