"""Gradients and tangents whose sums over tiles lack some, or have others too: of tiles of keys for
dq, gq, e and tout, of queries for dk, dv, gk and gv."""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import product

import numpy as np

from rawattn.check.diagnose.engine.attention import TILES, Bug
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.engine.steps import STEPS, Context, Floats, changed

# of the place of a tile in a loop over so many: how often it counts
Factor = Callable[[Context, np.ndarray, int], Floats | np.ndarray]
RESULTS = {  # that a step gives, by the first of which what is wrong is known
    **{"e": {"tlse", "ddlse"}, "tO": {"tout", "ddout"}, "dQ": {"dq"}, "dK": {"dk"}, "dV": {"dv"}},
    **{"gQ": {"gq"}, "gK": {"gk"}, "gV": {"gv"}},
}
# terms in words, and by steps the operands that no other term has; P of tO is that of P tV, tP of
# it P o E
SUMS: dict[str, dict[str, tuple[str, ...]]] = {
    "P o E of {e}": {"e": ("E",)},
    "(P o E) v of {out}": {"tO": ("tP",)},
    "P {t}v of {out}": {"tO": ("P",)},
    "P o E, (P o E) v and P {t}v": {"e": ("E",), "tO": ("tP", "P")},
    "dq": {"dQ": ("dY",)},
    "dk": {"dK": ("dY",)},
    "dv": {"dV": ("P",)},
    "dk and dv": {"dK": ("dY",), "dV": ("P",)},
    "dS' k of gq": {"gQ": ("tdY",)},
    "dS ddk of gq": {"gQ": ("dY",)},
    "gq": {"gQ": ("tdY", "dY")},
    "dS'^T q of gk": {"gK": ("tdY",)},
    "dS^T ddq of gk": {"gK": ("dY",)},
    "gk": {"gK": ("tdY", "dY")},
    "gv": {"gV": ("tP",)},
    "gk and gv": {"gK": ("tdY", "dY"), "gV": ("tP",)},
}
OPERANDS = {step: {x for one in SUMS.values() for x in one.get(step, ())} for step in RESULTS}
OF_QUERIES = ("dK", "dV", "gK", "gV")  # sums over these
WORDS: dict[str, dict[str, str]] = {
    "backward": {},
    "jvp": {"t": "t", "e": "tlse", "out": "tout"},
    "second": {"t": "dd", "e": "ddlse", "out": "ddout"},
}
OVER, LACKS, TWICE, SCALE = "tile-overwrites", "tile-skipped", "tile-counted-twice", "output-scale"
EVENTS: tuple[tuple[str, str, Factor], ...] = (
    (OVER, "the last tile alone", lambda c, at, n: at == n - 1),
    (OVER, "the first tile alone", lambda c, at, n: at == 0),
    (LACKS, "without the first tile", lambda c, at, n: at > 0),
    (LACKS, "without the last tile", lambda c, at, n: at < n - 1),
    (TWICE, "the first tile twice", lambda c, at, n: 1 + (at == 0)),
    (TWICE, "the last tile twice", lambda c, at, n: 1 + (at == n - 1)),
    (SCALE, "s inside of the loop from the first tile", lambda c, at, n: c.s ** (n - 1 - at)),
    (SCALE, "s inside of the loop from the last tile", lambda c, at, n: c.s**at),
)
Weights = Callable[[Context, int], Floats]  # of pairs, and along their axis of queries or keys


def candidates(question: Question, stage: str, wrong: Collection[str]) -> Iterator[Bug]:
    """All of a stage that change something ``wrong``; of tiles that look alike large ones first."""
    longest = max((*question.lengths_q, *question.lengths_k), default=0)
    sums = [x for x in SUMS.items() if RESULTS[next(iter(x[1]))] & {*wrong}]
    sizes = [tile for tile in TILES[::-1] if tile < longest and stage in WORDS]
    for (said, terms), tile in product(sums, sizes):
        for name, words, weights in _weights(question, tile):
            steps = {x: partial(_summed, x, operands, weights) for x, operands in terms.items()}
            text = f"{said.format(**WORDS[stage])}: {words}, tile of {tile}"
            yield Bug(name, text, (stage,), steps=steps)


def _weights(question: Question, tile: int) -> Iterator[tuple[str, str, Weights]]:
    for name, words, factor in EVENTS:
        yield name, words, partial(_by_tile, factor, tile, 0)
        for other in (tile, 2 * tile, tile // 2) if question.mask_window != (-1, -1) else ():
            more = f" of those that {other} rows together see something of"
            yield name, words + more, partial(_by_tile, factor, tile, other)
    yield "tail-tile-dropped", "no partial tile", partial(_whole, tile)


def _summed(step: str, operands: Collection[str], weights: Weights, c: Context) -> Floats:
    """A step of which these operands' term is weighed."""
    right = STEPS[step](c)
    c = changed(c, tP=c.P * c.E) if step == "tO" else c
    others = {name: 0.0 * getattr(c, name) for name in OPERANDS[step] - {*operands}}
    alone, by = changed(c, **others), weights(c, int(step not in OF_QUERIES))
    weighed = changed(alone, **{name: by * getattr(c, name) for name in operands})
    return np.asarray(right + STEPS[step](weighed) - STEPS[step](alone))


def _by_tile(of: Factor, tile: int, other: int, c: Context, axis: int) -> Floats:
    """A factor (n, m) for every tile of keys of which ``other`` queries together see any, or, of 0
    queries, for every one; of axis 0 for tiles of queries that so many keys are seen by."""
    seen = (c.W > 0).any(axis=0) | (not other)
    seen = seen if axis == 1 else seen.T
    n, m = seen.shape
    tiles = np.arange(m) // tile
    weight = np.zeros((n, m))
    for start in range(0, n, other or n):
        here = slice(start, start + (other or n))
        there = np.unique(tiles[seen[here].any(axis=0)])
        known = np.isin(tiles, there)
        weight[here, known] = of(c, np.searchsorted(there, tiles[known]), len(there))
    return weight if axis == 1 else weight.T


def _whole(tile: int, c: Context, axis: int) -> Floats:
    """No pairs of a last tile that is partial."""
    at, count = np.ogrid[: c.S.shape[1], : c.S.shape[2]][axis], c.S.shape[1 + axis]
    return np.where(at < count // tile * tile, 1.0, 0.0)
