"""Rows of other sequences and of other tiles: whole sequences in another's place, the rest of a
last tile of queries, stages of a ring of buffers that hold the tile of another step of a loop."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np

from rawattn.check.diagnose.catalogue import maps
from rawattn.check.diagnose.catalogue.masks import Window, bounds, distances
from rawattn.check.diagnose.engine.attention import BACKWARD, FIRST, TILES, Bug, View
from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.engine.steps import STEPS, Context, Floats, changed
from rawattn.reference.dense import allowed

Ints = np.ndarray
ORDERS: dict[str, Callable[[Ints], Ints]] = {  # of lengths: which sequence comes when
    "the last sequence first": lambda n: np.arange(len(n))[::-1],
    "the longest sequence first": lambda n: np.argsort(-n, kind="stable"),
    "the shortest sequence first": lambda n: np.argsort(n, kind="stable"),
}
LOOPS: dict[str, Callable[[Ints, int], Ints]] = {  # the step whose tile step x of n has
    "of the step before": lambda x, n: np.maximum(x - 1, 0),
    "of the next step": lambda x, n: np.minimum(x + 1, n - 1),
    "of the first step": lambda x, n: 0 * x,
    "of step x % 2": lambda x, n: x % 2,
    "of step x % 3": lambda x, n: x % 3,
    "of step x % 4": lambda x, n: x % 4,
    "of step x // 2 * 2": lambda x, n: x - x % 2,
}


def _in_stage(stages: int, off: int, ahead: int, x: Ints, n: int) -> Ints:
    """What the stage behind the own one of a ring holds, so many steps being loaded ahead."""
    loaded = np.minimum(x + ahead, n - 1)
    found = loaded - (loaded - x - off) % stages
    return np.where(found < 0, x, found)


LOOPS |= {
    f"of stage (x + {off}) % {stages}, loaded {ahead} ahead,": partial(
        _in_stage, stages, off, ahead
    )
    for stages in (2, 3, 4)
    for off, ahead in product(range(1, stages), sorted({0, 1, stages - 1}))
}
Sets = dict[str, dict[str, str]]  # steps, and the operand of each
FORWARD_KEYS: Sets = {"K": {"Y": "K"}, "V": {"O": "V"}, "K and V": {"Y": "K", "O": "V"}}
DQ_KEYS: Sets = {
    "K in dS K": {"dQ": "K"},
    "K": {"Y": "K", "dQ": "K"},
    "K in Q K^T": {"Y": "K"},
    "V": {"dP": "V"},
    "K and V": {"Y": "K", "dQ": "K", "dP": "V"},
}
QUERIES: Sets = {
    "Q in dS^T Q": {"dK": "Q"},
    "dO in P^T dO": {"dV": "dO"},
    "Q": {"Y": "Q", "dK": "Q"},
    "dO": {"dP": "dO", "dV": "dO"},
    "Q in Q K^T": {"Y": "Q"},
    "dO in dO V^T": {"dP": "dO"},
    "lse": {"bP": "L"},
    "D": {"dS": "D"},
    "lse and D": {"bP": "L", "dS": "D"},
    "Q and dO": {"Y": "Q", "dK": "Q", "dP": "dO", "dV": "dO"},
    "Q, dO, lse and D": {"Y": "Q", "dK": "Q", "dP": "dO", "dV": "dO", "bP": "L", "dS": "D"},
}
CHANGED = {  # by a step
    **{"Y": {"out", "lse", "dq", "dk", "dv"}, "O": {"out"}, "dQ": {"dq"}, "dK": {"dk"}},
    **{"dV": {"dv"}, "dP": {"dq", "dk"}, "bP": {"dq", "dk", "dv"}, "dS": {"dq", "dk"}},
}
ALL = 1 << 30  # one tile for all of the other side


def candidates(question: Question, stage: str, wrong: Collection[str], b: int) -> Iterator[Bug]:
    """All of a stage of dense attention that change something ``wrong``, to be tried on sequence
    ``b`` first."""
    if stage in FIRST and not question.sparse:
        yield from _of_sequences(question, stage)
        yield from _of_tails(question)
        yield from _of_loops(question, stage, {*wrong}, b)


# ---- sequences in each other's place, rest of tiles -------------------------------------------


def _of_sequences(question: Question, stage: str) -> Iterator[Bug]:
    """Keys of another sequence, all of them, or from another row on, which gradients go to."""
    g, lengths = maps.geometry(question, "k"), np.array(question.lengths_k)
    b = np.arange(question.batch)
    for words, other in maps.OTHERS.items() if question.batch > 1 else ():
        of = np.minimum(other(b, g), len(b) - 1)
        see = partial(_keys_of, g.offsets[of], lengths[of])
        yield Bug("offsets-shifted", f"the keys are those of {words}", FIRST, see)
    see = partial(_keys_of, g.others[:-1], np.diff(g.others))
    yield Bug("offsets-shifted", "the keys are those of the other side's offsets", FIRST, see)
    for words, start in maps.origins(question).items() if stage == "backward" else ():
        text = f"keys are read, their gradients stored, from another row on: {words}"
        yield Bug(
            "offsets-shifted", text, BACKWARD, partial(_keys_of, start(g), lengths), store=_all
        )


def _keys_of(
    starts: Ints, lengths: Ints, question: Question, views: tuple[View, ...]
) -> Sequence[View]:
    """So many keys from these rows on for every sequence; what lies outside is nothing."""
    found = []
    for view in views:
        b = view.sequence
        keys = np.arange(starts[b], starts[b] + lengths[b])
        there = (keys >= 0) & (keys < len(question.k))
        weight = allowed(len(view.rows), len(keys), question.mask_window) & there
        keys = np.where(there, keys, -1)
        found.append(replace(view, keys=keys, weight=weight[None].astype(np.float64)))
    return found


def _all(question: Question, answers: Answers) -> Answers:
    """A store that moves nothing, and is asked for all sequences, whose rows others have stored."""
    return answers


def _of_tails(question: Question) -> Iterator[Bug]:
    """Rows of q behind a sequence, up to the end of its last tile."""
    for tile in TILES if question.batch > 1 else ():
        form = f"rows of q behind a sequence, up to the end of its last tile of {tile}"
        own = partial(_owned, tile, None)
        yield Bug("neighbour-leak", f"{form}, count as its own", FIRST, own, store=_all)
        for words, order in ORDERS.items():
            text = f"{form}, are stored as its own, {words}"
            yield Bug("neighbour-leak", text, FIRST, partial(_owned, tile, order), store=_all)


def _owned(
    tile: int,
    order: Callable[[Ints], Ints] | None,
    question: Question,
    views: tuple[View, ...],
) -> Sequence[View]:
    """Views with the rest of their last tile, of which the last one in an ``order`` overwrites."""
    starts, lengths = np.asarray(question.cu_seqlens_q)[:-1], np.array(question.lengths_q)
    stops = np.minimum(starts + -(-lengths // tile) * tile, len(question.q))
    owner = np.full(len(question.q), -1)
    for b in [] if order is None else order(lengths):
        owner[starts[b] : stops[b]] = b
    found = []
    for view in views:
        b = view.sequence
        rows = np.arange(starts[b], stops[b]) if order is None else np.flatnonzero(owner == b)
        longer = replace(view, rows=rows)
        distance = distances(question, longer)
        weight = Window(*bounds(question)).holds(distance, distance)[None]
        found.append(replace(longer, weight=weight.astype(np.float64)))
    return found


# ---- stages of loops --------------------------------------------------------------------------


def _of_loops(question: Question, stage: str, wrong: set[str], b: int) -> Iterator[Bug]:
    """Operands that a loop over tiles takes from the stage of another step."""
    loops = [(FORWARD_KEYS, "keys", {"out", "lse"})]
    if stage == "backward":
        alone = wrong == {"dq"}
        loops = [(DQ_KEYS, "keys", {"dq"}) if alone else (QUERIES, "queries", {"dk", "dv"})]
    longest = max((*question.lengths_q, *question.lengths_k), default=0)
    sizes = [tile for tile in TILES[::-1] if tile < longest]  # of those that look alike large ones
    masked, seen = question.mask_window != (-1, -1), _seen(question, b)
    for (sets, over, results), tile, down in product(loops, sizes, (False, True)):
        outer = (tile, 2 * tile, tile // 2, 4 * tile) if masked else ()
        for (of, which), u in product(LOOPS.items(), (ALL, *outer)):
            loop = partial(_loop, over, tile, u, down, which)
            taken = [(rows.tobytes(), at.tobytes()) for rows, at in loop(seen)]
            text = f"{of} of a loop over tiles of {tile}" + ", downwards" * down
            text += f", for {u} {'keys' if over == 'queries' else 'queries'}" * (u < ALL)
            for words, steps in sets.items():
                changed = set.union(*(CHANGED[step] for step in steps))
                if changed & results != wrong & results:
                    continue
                by_step = {
                    step: partial(_staged, loop, over, step, operand)
                    for step, operand in steps.items()
                }
                key = words, tuple(taken)
                yield Bug("stale-tile", f"{words} {text}", (stage,), steps=by_step, alike=key)


def _seen(question: Question, b: int) -> Ints:
    """(n, m): who sees whom in a sequence."""
    return allowed(question.lengths_q[b], question.lengths_k[b], question.mask_window)


def _loop(
    over: str,
    tile: int,
    outer: int,
    down: bool,
    which: Callable[[Ints, int], Ints],
    seen: Ints,
) -> list[tuple[Ints, Ints]]:
    """For every tile of ``outer`` on the other side which rows are taken for those that the loop
    ``over`` keys or queries comes to, and which ones of the other side are in it; of those that
    take the same once."""
    seen = seen if over == "keys" else seen.T
    row, found = np.arange(seen.shape[1]), list[tuple[Ints, Ints]]()
    for start in range(0, len(seen), outer):
        here = np.arange(start, min(start + outer, len(seen)))
        there = np.unique(row[seen[here].any(axis=0)] // tile)[:: -1 if down else 1]
        taken = np.full(len(row) // tile + 1, -1)
        taken[there] = there[which(np.arange(len(there)), len(there))]
        for n, (other, of) in enumerate(found):
            if ((taken == other) | (taken < 0) | (other < 0)).all():
                found[n] = np.maximum(taken, other), np.concatenate([of, here])
                break
        else:
            found.append((taken, here))
    at = row // tile
    return [(np.where(x[at] < 0, row, x[at] * tile + row % tile), of) for x, of in found]


def _staged(
    loop: Callable[[Ints], list[tuple[Ints, Ints]]], over: str, step: str, operand: str, c: Context
) -> Floats:
    """``step`` with the rows of ``operand`` that a ``loop`` over keys or queries takes."""
    of_pairs = over == "queries" and step in ("Y", "dP", "bP", "dS")
    found = None
    for rows, here in loop((c.W > 0).any(axis=0)):
        x = STEPS[step](changed(c, **{operand: _rows(getattr(c, operand), rows, operand)}))
        found = x.copy() if found is None else found
        at = (slice(None), slice(None), here) if of_pairs else (slice(None), here)
        found[at] = x[at]
    return np.asarray(found)


def _rows(x: Floats, rows: Ints, operand: str) -> Floats:
    """Rows of (..., rows, columns), or of (heads, rows) of row statistics; nothing behind them."""
    axis, inside = (-1 if operand in ("L", "D") else -2), rows < len(rows)
    found = np.take(x, np.where(inside, rows, 0), axis=axis)
    there = inside if axis == -1 else inside[:, None]
    return np.where(there, found, np.inf if operand == "L" else 0.0)
