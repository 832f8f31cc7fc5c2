"""Rows of other sequences and of other tiles: whole sequences in another's place, the rest of a
last tile of queries, stages of a ring of buffers that hold the tile of another step of a loop. And
tiles that are left out, or count twice, in gradients and tangents too. Long by these tables."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.catalogue import inputs, maps
from rawattn.check.diagnose.catalogue.masks import Window, bounds
from rawattn.check.diagnose.catalogue.second_order import of_one_pass
from rawattn.check.diagnose.engine.attention import FIRST, TILES, Bug, View, each
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.engine.steps import STEPS, Context, Floats, changed
from rawattn.reference.dense import allowed

Ints = np.ndarray
ALL = 1 << 30  # one tile for all of the other side; a row that is not there
TAILS = {"count as its own": False, "are stored as its own, the last sequence first": True}
# of the tiles of each loop by step, their size, and how many rows there are: rows (steps, size)
Loops = Callable[[list[Ints], int, int], list[Ints]]
Which = Callable[[Ints], Ints]  # of the tiles of all steps, those that are taken
Taken = list[tuple[Ints, Ints]]  # rows of a loop, and which ones of the other side are in it


class Ring(NamedTuple):
    """Tile x is loaded into stage x % stages, ``early`` steps before it is due, and read ``ahead``
    of it, a last step that is ``drained`` apart; the ``lacking`` step of several loads nothing."""

    stages: int = 2
    ahead: int = 0
    lacking: int | None = None
    early: int = 0
    drained: bool = False


def _each(of: Which, loops: list[Ints], tile: int, _: int) -> list[Ints]:
    return [of(tiles)[:, None] * tile + np.arange(tile) for tiles in loops]


def _ring(ring: Ring, cleared: bool, loops: list[Ints], tile: int, n: int) -> list[Ints]:
    """Tiles as a ring has them, as far as they have rows. cleared: in front of every loop."""
    (stages, ahead, lacking, early, drained), found = ring, list[Ints]()
    held = np.full((stages, tile), ALL)
    for tiles in loops:
        held[:] = ALL if cleared else held
        taken = np.empty((len(tiles), tile), dtype=int)
        for step in range(-early, len(tiles)):
            loaded = step + early
            for x in tiles[loaded : loaded + 1]:
                rows = np.arange(x * tile, min((x + 1) * tile, n))
                if lacking is None or loaded != lacking % len(tiles) or len(tiles) == 1:
                    held[x % stages] = ALL if early else held[x % stages]
                    held[x % stages, : len(rows)] = rows
            away = 0 if drained and step == len(tiles) - 1 else ahead
            if step >= 0:
                taken[step] = held[(tiles[step] + away) % stages]
        found.append(taken)
    return found


LOOPS: dict[str, Which] = {
    "of the step before": lambda tiles: np.append(tiles[:1], tiles[:-1]),
    "of the next step": lambda tiles: np.append(tiles[1:], tiles[-1:]),
    "of step x + 2": lambda tiles: np.append(tiles[2:], tiles[-2:]),
    **{f"of step x % {n}": partial(lambda n, x: x[np.arange(len(x)) % n], n) for n in (1, 2, 3, 4)},
    "counted from the first row, not from the first visible tile on,": lambda tiles: (
        tiles - tiles.min(initial=tiles.max(initial=0))
    ),
    "of no tile in the last step of an odd number (3, 5, ...)": lambda tiles: (
        np.append(tiles[:-1], ALL) if len(tiles) > 1 and len(tiles) % 2 else tiles
    ),
}
RINGS = {
    "of a ring of 2 stages into which the first tile of a loop is not loaded": Ring(lacking=0),
    "of a ring of 2 stages into which the last tile of a loop is not loaded": Ring(lacking=-1),
    "of a ring of 2 stages read 1 ahead": Ring(ahead=1),
    "of a ring of 3 stages read 1 ahead": Ring(3, ahead=1),
    "of a ring of 2 stages read 1 ahead but in the last step": Ring(ahead=1, drained=True),
    "of the other of 2 stages, of the next step or, last, the one before": Ring(ahead=1, early=1),
}
EVERY: dict[str, Loops] = {text: partial(_each, of) for text, of in LOOPS.items()}
EVERY |= {f"{text}, cleared by each loop,": partial(_ring, of, True) for text, of in RINGS.items()}
GO_ON: dict[str, Loops] = {f"{text},": partial(_ring, of, False) for text, of in RINGS.items()}
READS = {  # steps, each with an operand, that take the rows of one buffer; of dq, gq where alone
    "forward": "Y K; O V; Y K, O V",
    "dq": "dQ K; Y K, dQ K; Y K; dP V; Y K, dQ K, dP V",
    "backward": "dK Q; dV dO; Y Q, dK Q; dP dO, dV dO; Y Q; dP dO; bP L; dS D; bP L, dS D; "
    "Y Q, dK Q, dP dO, dV dO; Y Q, dK Q, dP dO, dV dO, bP L, dS D",
    "jvp": "tY tK; tO tV; tY tK, tO tV",
    "gq": "gQ tK; tY tK, gQ tK; gQ K",
    "second": "tY tQ, gK tQ; tY tQ; gK tQ; gK Q; gV dO; tdP dO; tdS w; tdS D; bP L",
}
PRODUCTS = inputs.PRODUCTS | {"bP": ("exp(S - lse)", ("L",), {"dq", "dk", "dv"})}
PRODUCTS |= {"dS": ("dP - D", ("D",), {"dq", "dk"})}
OF_PAIRS = ("Y", "dP", "bP", "dS", "tY", "tdP", "tdS")  # steps that give numbers of pairs
# of queries (n, 1) and keys (1, m), by their places in a view, which pairs, for a size of tile
Part = Callable[[np.ndarray, np.ndarray, int, int, int], np.ndarray]
PARTS: tuple[tuple[str, str, Part], ...] = (
    ("tail-tile-dropped", "query rows", lambda i, j, n, m, t: i >= n // t * t),
    ("tail-tile-dropped", "keys", lambda i, j, n, m, t: j >= m // t * t),
    ("tile-skipped", "first of keys", lambda i, j, n, m, t: j // t == 0),
    ("tile-skipped", "second of keys", lambda i, j, n, m, t: j // t == 1),
    ("tile-skipped", "last of keys", lambda i, j, n, m, t: j // t == (m - 1) // t),
    ("tile-skipped", "diagonal", lambda i, j, n, m, t: j // t == (i + m - n) // t),
)
# how often a tile of a loop counts, by its place from one end, and from the other
Factor = Callable[[Context, np.ndarray, np.ndarray], Floats | np.ndarray]
# gradients that are sums over tiles, and the operands that no other terms of theirs have
GRADIENTS = {"dQ": "dY", "dK": "dY", "dV": "P", "gQ": "tdY dY", "gK": "tdY dY", "gV": "tP"}
# results that a step gives, by the first of which what is wrong is known
RESULTS = {"e": {"tlse", "ddlse"}, "tO": {"tout", "ddout"}, **{x: {x.lower()} for x in GRADIENTS}}
# terms in words, and by steps the operands of no other term; of tO P is that of P tV, tP P o E
SUMS: dict[str, dict[str, tuple[str, ...]]] = {
    "P o E of {t}lse": {"e": ("E",)},
    "(P o E) v of {t}out": {"tO": ("tP",)},
    "P {t}v of {t}out": {"tO": ("P",)},
    "P o E, (P o E) v and P {t}v": {"e": ("E",), "tO": ("tP", "P")},
    "dS' k of gq": {"gQ": ("tdY",)},
}
for some in ("dQ", "dK", "dV", "dK dV", "gQ", "gK", "gV", "gK gV"):
    of = {x: tuple(GRADIENTS[x].split()) for x in some.split()}
    SUMS[" and ".join(some.lower().split())] = of
OPERANDS = {step: {x for one in SUMS.values() for x in one.get(step, ())} for step in RESULTS}
OF_QUERIES = ("dK", "dV", "gK", "gV")  # sums over these
OVER, LACKS, TWICE, SCALE = "tile-overwrites", "tile-skipped", "tile-counted-twice", "output-scale"
EVENTS: tuple[tuple[str, str, Factor], ...] = (
    (OVER, "the {} tile alone", lambda c, at, back: at == 0),
    (LACKS, "without the {} tile", lambda c, at, back: at > 0),
    (TWICE, "the {} tile twice", lambda c, at, back: 1 + (at == 0)),
    (SCALE, "s inside of the loop from the {} tile", lambda c, at, back: c.s**back),
)
Weights = Callable[[Context, int], Floats]  # of pairs, and along their axis of queries or keys


def candidates(question: Question, stage: str, wrong: Collection[str], b: int) -> Iterator[Bug]:
    """All of a dense stage that change something ``wrong``, to be tried on sequence ``b`` first."""
    if question.sparse:
        return
    if stage in FIRST and question.batch > 1:
        keys = maps.geometry(question, "k")
        for words, other in maps.OTHERS.items():
            see = each(_keys_of, np.minimum(other(keys), question.batch - 1))
            yield Bug("offsets-shifted", f"the keys are those of {words}", FIRST, see)
        for tile, (words, stored) in product(TILES, TAILS.items()):
            text = f"behind a sequence, up to the end of its last tile of {tile}, {words}"
            # a store that moves nothing: then all sequences are asked, of which others store rows
            see = each(_owned, tile, stored)
            yield Bug("neighbour-leak", f"rows of q {text}", FIRST, see, store=lambda _, x: x)
    loops = _of_loops(question, stage, {*wrong}, b)
    if stage != "second" or not inputs.OF_FIRST_PASS & {*wrong}:
        yield from map(of_one_pass, loops) if stage == "second" else loops


def _keys_of(of: Ints, question: Question, view: View) -> View:
    """The keys of the sequences ``of`` in the place of everyone's own."""
    b = of[view.sequence]
    keys = question.cu_seqlens_k[b] + np.arange(question.lengths_k[b])
    weight = allowed(len(view.rows), len(keys), question.mask_window)[None].astype(np.float64)
    return replace(view, keys=keys, weight=weight)


def _owned(tile: int, stored: bool, question: Question, view: View) -> View:
    """A view with the rest of its last tile, which, ``stored``, overwrites the sequence behind."""
    starts, lengths = np.asarray(question.cu_seqlens_q)[:-1], np.array(question.lengths_q)
    stops, b = np.minimum(starts + -(-lengths // tile) * tile, len(question.q)), view.sequence
    before = stops[:b].max(initial=0) if stored else 0  # those of sequences before stay theirs
    rows = np.arange(max(starts[b], before), stops[b])
    return Window(*bounds(question)).of(question, replace(view, rows=rows))


def _of_loops(question: Question, stage: str, wrong: set[str], b: int) -> Iterator[Bug]:
    """Operands that a loop over tiles takes from the stage of another step."""
    of = min(wrong) if wrong in ({"dq"}, {"gq"}) else stage
    over, other, results = "keys", "queries", {"out", "lse", "dq", "gq", "tout", "tlse"}
    if of in ("backward", "second"):
        over, other, results = "queries", "keys", {"dk", "dv", "gq", "gk", "gv"}
    masked, lengths = question.mask_window != (-1, -1), (question.lengths_q, question.lengths_k)
    seen = allowed(lengths[0][b], lengths[1][b], question.mask_window)
    sets = [[tuple(one.split()) for one in reads.split(", ")] for reads in READS[of].split("; ")]
    moved = [set.union(*(PRODUCTS[step][2] for step, _ in reads)) & results for reads in sets]
    sets = [x for x, names in zip(sets, moved, strict=True) if names & wrong == wrong & results]
    sizes = [tile for tile in TILES[::-1] if tile < max(map(max, lengths))]  # large ones first
    for tile, down, (words, which) in product(sizes, (False, True), (EVERY | GO_ON).items()):
        others = (tile, 2 * tile, tile // 2, 4 * tile) if masked or words in GO_ON else ()
        for u in others[:3] if words in GO_ON else (ALL, *others):
            loop = partial(_loop, over, tile, u, down, which)
            rows_of = tuple((rows.tobytes(), at.tobytes()) for rows, at in loop(seen))
            text = f"{words} of a loop over {tile} {over} each" + ", downwards" * down
            text += f", for {u} {other}" * (u < ALL)
            for reads in sets:
                told = (f"{inputs.NAMES[x]} in {PRODUCTS[step][0]}" for step, x in reads)
                steps = {step: partial(_staged, loop, over, step, x) for step, x in reads}
                form = f"{', '.join(told)} {text}"
                yield Bug("stale-tile", form, (stage,), steps=steps, alike=(*reads, rows_of))


def _loop(over: str, tile: int, outer: int, down: bool, which: Loops, seen: Ints) -> Taken:
    """For every tile of ``outer`` on the other side which rows the loop ``over`` keys or queries
    takes, and which ones of the other side are in it; of those that take the same once."""
    seen = seen if over == "keys" else seen.T
    row, found = np.arange(seen.shape[1]), Taken()
    outers = np.split(np.arange(len(seen)), range(outer, len(seen), outer))
    loops = [np.unique(row[seen[of].any(axis=0)] // tile)[:: -1 if down else 1] for of in outers]
    for here, tiles, of_steps in zip(outers, loops, which(loops, tile, len(row)), strict=True):
        by_tile = np.full((len(row) // tile + 1, tile), -1)
        by_tile[tiles] = of_steps
        rows = by_tile.ravel()[: len(row)]
        for n, (other, of) in enumerate(found):
            if ((rows == other) | (rows < 0) | (other < 0)).all():
                found[n] = np.maximum(rows, other), np.concatenate([of, here])
                break
        else:
            found.append((rows, here))
    return [(np.where(rows < 0, row, rows), of) for rows, of in found]


def _staged(loop: Callable[[Ints], Taken], over: str, step: str, x: str, c: Context) -> Floats:
    """``step`` with the rows of an operand that a ``loop`` over keys or queries takes."""
    of_pairs = over == "queries" and step in OF_PAIRS
    found, axis = np.array(STEPS[step](c)), -1 if x in ("L", "D", "w") else -2
    for rows, here in loop((c.W > 0).any(axis=0)):
        tile = inputs.taken(getattr(c, x), rows, axis, np.inf if x == "L" else 0.0)
        if x == "L":
            tile[..., rows == ALL] = 0.0
        at = (slice(None), slice(None), here) if of_pairs else (slice(None), here)
        found[at] = STEPS[step](changed(c, **{x: tile}))[at]
    return found


def tiles(question: Question) -> Iterator[Bug]:
    longest_q, longest_k = (max(x, default=0) for x in (question.lengths_q, question.lengths_k))
    for tile in (tile for tile in TILES if tile < 2 * max(longest_q, longest_k)):
        for name, words, part in PARTS:
            text = f"{words}, tile of {tile}"
            yield Bug(name, text, FIRST, each(often, part, tile, 0.0))
            if name == "tile-skipped" and tile < longest_k:  # else everything is doubled
                yield Bug("tile-counted-twice", text, FIRST, each(often, part, tile, 2.0))
        if tile < longest_q:  # else nothing is stored
            store = inputs.stored(maps.of_rows(maps.WHOLE, tile))
            yield Bug("tail-tile-dropped", f"rows stored, tile of {tile}", store=store)


def often(part: Part, tile: int, factor: float, question: Question, view: View) -> View:
    n, m = len(view.rows), len(view.keys)
    i, j = np.ogrid[:n, :m]
    return replace(view, weight=view.weight * np.where(part(i, j, n, m, tile), factor, 1.0))


def sums(question: Question, stage: str, wrong: Collection[str]) -> Iterator[Bug]:
    """All of a stage that change something ``wrong``; of tiles that look alike large ones first."""
    longest = max((*question.lengths_q, *question.lengths_k), default=0)
    found = [x for x in SUMS.items() if RESULTS[next(iter(x[1]))] & {*wrong}]
    for (said, terms), tile in product(found, (tile for tile in TILES[::-1] if tile < longest)):
        for name, words, weights in _weights(question, tile):
            steps = {x: partial(_summed, x, operands, weights) for x, operands in terms.items()}
            text = f"{said.format(t='dd' if stage == 'second' else 't')}: {words}, tile of {tile}"
            yield Bug(name, text, (stage,), steps=steps)


def _weights(question: Question, tile: int) -> Iterator[tuple[str, str, Weights]]:
    others = (tile, 2 * tile, tile // 2) if question.mask_window != (-1, -1) else ()
    for (name, words, factor), end, other in product(EVENTS, ("first", "last"), (0, *others)):
        more = f" of those that {other} rows together see something of" * (other > 0)
        yield name, words.format(end) + more, partial(_by_tile, factor, end == "last", tile, other)
    yield "tail-tile-dropped", "no partial tile", partial(_whole, tile)


def _summed(step: str, operands: Collection[str], weights: Weights, c: Context) -> Floats:
    """A step of which these operands' term is weighed."""
    right, c = STEPS[step](c), changed(c, tP=c.P * c.E) if step == "tO" else c
    others = {name: 0.0 * getattr(c, name) for name in OPERANDS[step] - {*operands}}
    alone, by = changed(c, **others), weights(c, int(step not in OF_QUERIES))
    weighed = changed(alone, **{name: by * getattr(c, name) for name in operands})
    return np.asarray(right + STEPS[step](weighed) - STEPS[step](alone))


def _by_tile(of: Factor, last: bool, tile: int, other: int, c: Context, axis: int) -> Floats:
    """A factor (n, m) for every tile of keys of which ``other`` queries together see any, or, of 0
    queries, for every one; of axis 0 for tiles of queries that so many keys are seen by."""
    seen = ((c.W > 0).any(axis=0) | (not other)).swapaxes(axis, 1)
    tiles, weight = np.arange(seen.shape[1]) // tile, np.zeros(seen.shape)
    for here in np.split(np.arange(len(seen)), range(other or ALL, len(seen), other or ALL)):
        known = np.isin(tiles, tiles[seen[here].any(axis=0)])
        at = np.unique(tiles[known], return_inverse=True)[1]
        ends = at, at.max(initial=0) - at
        weight[np.ix_(here, known)] = of(c, *(ends[::-1] if last else ends))
    return weight.swapaxes(axis, 1)


def _whole(tile: int, c: Context, axis: int) -> Floats:
    """No pairs of a last tile that is partial."""
    at, count = np.ogrid[: c.S.shape[1], : c.S.shape[2]][axis], c.S.shape[1 + axis]
    return np.where(at < count // tile * tile, 1.0, 0.0)
