"""Rows of other sequences and of other tiles: whole sequences in another's place, the rest of a
last tile of queries, stages of a ring of buffers that hold the tile of another step of a loop."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, product

import numpy as np

from rawattn.check.diagnose.catalogue import inputs, maps
from rawattn.check.diagnose.catalogue.masks import Window, bounds, distances
from rawattn.check.diagnose.catalogue.reading import taken
from rawattn.check.diagnose.catalogue.second_order import of_one_pass
from rawattn.check.diagnose.engine.attention import BACKWARD, FIRST, TILES, Bug, View, each
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.engine.steps import STEPS, Context, Floats, changed
from rawattn.reference.dense import allowed

Ints = np.ndarray
TAILS = {"count as its own": False, "are stored as its own, the last sequence first": True}
# of the tiles of all steps, of one loop after the other, of a size, among so many rows: the rows
# that every step takes, (steps, rows of a tile)
Loops = Callable[[list[Ints], int, int], list[Ints]]
Which = Callable[[Ints], Ints]  # of the tiles of all steps, those that are taken
Ring = tuple[int, int, int | None]
ALL = 1 << 30  # one tile for all of the other side; a row that is not there


def _each(of: Which, loops: list[Ints], tile: int, _: int) -> list[Ints]:
    return [of(tiles)[:, None] * tile + np.arange(tile) for tiles in loops]


def _ring(ring: Ring, cleared: bool, loops: list[Ints], tile: int, n: int) -> list[Ints]:
    """Tile x is loaded into stage x % stages, as far as it has rows, and read ``ahead`` of it; the
    ``lacking`` step of a loop of several loads nothing. cleared: in front of every loop."""
    (stages, ahead, lacking), found = ring, list[Ints]()
    held = np.full((stages, tile), ALL)
    for tiles in loops:
        held[:] = ALL if cleared else held
        taken = np.empty((len(tiles), tile), dtype=int)
        for step, x in enumerate(tiles):
            rows = np.arange(x * tile, min((x + 1) * tile, n))
            if lacking is None or step != lacking % len(tiles) or len(tiles) == 1:
                held[x % stages, : len(rows)] = rows
            taken[step] = held[(x + ahead) % stages]
        found.append(taken)
    return found


LOOPS: dict[str, Which] = {
    "of the step before": lambda tiles: np.append(tiles[:1], tiles[:-1]),
    "of the next step": lambda tiles: np.append(tiles[1:], tiles[-1:]),
    "of step x + 2": lambda tiles: np.append(tiles[2:], tiles[-2:]),
    **{f"of step x % {n}": partial(lambda n, x: x[np.arange(len(x)) % n], n) for n in (1, 2, 3, 4)},
    "of step x // 2 * 2": lambda tiles: tiles[np.arange(len(tiles)) // 2 * 2],
    "counted from the first row, not from the first visible tile on,": lambda tiles: (
        tiles - tiles.min(initial=tiles.max(initial=0))
    ),
}
RINGS: dict[str, Ring] = {  # stages, how far ahead they are read, which step is not loaded
    "of a ring of 2 stages into which the first tile of a loop is not loaded": (2, 0, 0),
    "of a ring of 2 stages into which the last tile of a loop is not loaded": (2, 0, -1),
    "of a ring of 2 stages read 1 ahead": (2, 1, None),
    "of a ring of 3 stages read 1 ahead": (3, 1, None),
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
PRODUCTS = inputs.PRODUCTS | {
    "bP": ("exp(S - lse)", ("L",), {"dq", "dk", "dv"}),
    "dS": ("dP - D", ("D",), {"dq", "dk"}),
}
OF_PAIRS = ("Y", "dP", "bP", "dS", "tY", "tdP", "tdS")  # steps that give numbers of pairs


def candidates(question: Question, stage: str, wrong: Collection[str], b: int) -> Iterator[Bug]:
    """All of a dense stage that change something ``wrong``, to be tried on sequence ``b`` first."""
    if question.sparse:
        return
    of_rows = chain(_of_sequences(question), _of_tails(question), _of_old_rows(question))
    yield from (bug for bug in of_rows if stage in bug.stages)
    loops = _of_loops(question, stage, {*wrong}, b)
    if stage != "second" or not inputs.OF_FIRST_PASS & {*wrong}:
        yield from map(of_one_pass, loops) if stage == "second" else loops


def _of_sequences(question: Question) -> Iterator[Bug]:
    """Keys of another sequence, all of them, which gradients go to, or as many."""
    for words, other in maps.OTHERS.items() if question.batch > 1 else ():
        of = np.minimum(other(maps.geometry(question, "k")), question.batch - 1)
        form = f"the keys are those of {words}"
        yield Bug("offsets-shifted", form, FIRST, each(_keys_of, of, False))
        if question.seqused_k is not None:
            form = f"seqused_k: that of {words}"
            yield Bug("input-layout", form, FIRST, each(_keys_of, of, True))


def _keys_of(of: Ints, own: bool, question: Question, view: View) -> View:
    """The keys of the sequences ``of`` in the place of everyone's own; ``own``: as many."""
    b = of[view.sequence]
    start, stop = question.cu_seqlens_k[view.sequence if own else b :][:2]
    keys = np.arange(start, min(start + question.lengths_k[b], stop))
    weight = allowed(len(view.rows), len(keys), question.mask_window)[None].astype(np.float64)
    return replace(view, keys=keys, weight=weight)


def _of_tails(question: Question) -> Iterator[Bug]:
    """Rows of q behind a sequence, up to the end of its last tile."""
    for tile, (words, stored) in product(TILES, TAILS.items()) if question.batch > 1 else ():
        text = f"behind a sequence, up to the end of its last tile of {tile}, {words}"
        # a store that moves nothing: then all sequences are asked, of which others store rows
        bug = Bug("neighbour-leak", "", FIRST, each(_owned, tile, stored), store=lambda _, x: x)
        yield replace(bug, variant=f"rows of q {text}")
        if stored:
            yield replace(bug, variant=f"zeros for q {text}", steps={"Y": _of_zeros})


def _of_old_rows(question: Question) -> Iterator[Bug]:
    """Rows behind the last one, up to the end of its tile, which hold what a stage had before."""
    for tile, behind, of in product(TILES, (1, 2, 3), "qk"):
        form = f"rows of {of} behind the last one of its tile of {tile} count, as in"
        see, stages = each(_with_old_rows, tile, behind, of), BACKWARD if of == "q" else FIRST
        yield Bug("stale-tile", f"{form} the tile {behind} before it", stages, see)


def _with_old_rows(tile: int, behind: int, of: str, question: Question, view: View) -> View:
    distance = distances(question, view)
    axis, by = (0, -behind * tile) if of == "q" else (1, behind * tile)
    at, count = np.ogrid[: distance.shape[0], : distance.shape[1]][axis], distance.shape[axis]
    old = (at + behind * tile >= count) & (at // tile == (count - 1) // tile - behind)
    seen = Window(*bounds(question)).holds(distance + by, distance + by)
    return replace(view, weight=view.weight + (old & seen))


def _of_zeros(c: Context) -> Floats:
    """Scores where there are zeros behind the sequence's own rows."""
    own = c.view.rows < c.question.cu_seqlens_q[c.view.sequence + 1]
    return np.asarray(STEPS["Y"](c) * own[:, None])


def _owned(tile: int, stored: bool, question: Question, view: View) -> View:
    """A view with the rest of its last tile, which, ``stored``, overwrites the sequence behind."""
    starts, lengths = np.asarray(question.cu_seqlens_q)[:-1], np.array(question.lengths_q)
    stops = np.minimum(starts + -(-lengths // tile) * tile, len(question.q))
    b = view.sequence
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


def _loop(
    over: str, tile: int, outer: int, down: bool, which: Loops, seen: Ints
) -> list[tuple[Ints, Ints]]:
    """For every tile of ``outer`` on the other side which rows the loop ``over`` keys or queries
    takes, and which ones of the other side are in it; of those that take the same once."""
    seen = seen if over == "keys" else seen.T
    row, found = np.arange(seen.shape[1]), list[tuple[Ints, Ints]]()
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


def _staged(
    loop: Callable[[Ints], list[tuple[Ints, Ints]]], over: str, step: str, operand: str, c: Context
) -> Floats:
    """``step`` with the rows of ``operand`` that a ``loop`` over keys or queries takes."""
    of_pairs = over == "queries" and step in OF_PAIRS
    found, axis = np.array(STEPS[step](c)), -1 if operand in ("L", "D", "w") else -2
    for rows, here in loop((c.W > 0).any(axis=0)):
        tile = taken(getattr(c, operand), rows, axis, np.inf if operand == "L" else 0.0)
        if operand == "L":
            tile[..., rows == ALL] = 0.0
        x = STEPS[step](changed(c, **{operand: tile}))
        at = (slice(None), slice(None), here) if of_pairs else (slice(None), here)
        found[at] = x[at]
    return found
