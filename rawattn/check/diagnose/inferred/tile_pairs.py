"""Which pairs of tiles do the gradients hold, and how often? Read off them, and planted.

dq of a tile of queries is the sum of what every tile of keys adds, dk and dv of a tile of keys that
of every tile of queries and head: least squares tell how often each of them is there. It must be 0,
1 or 2 times, or a power of softmax_scale that grows by one from tile to tile.

Long by the patterns in words.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from rawattn.check.diagnose.engine.attention import STEPS, Bug, Context, Floats, Step, changed
from rawattn.check.diagnose.engine.question import OF_KEYS, Answers, Question

EXPLAINED = {2: 0.15, 4: 0.04, 8: 0.04}  # of what is wrong may be left, at most; by bytes
MOSTLY = 0.9  # share of pairs, all those that are known well
SIZES = ((16, 16), (8, 8), (32, 32), (64, 64))
TILES = (8, 16, 32, 64, 128)
ROUNDED = {2: 2.0**-8, 4: 2.0**-18, 8: 2.0**-18}  # of their size, by the bytes of the inputs
SUMS: Mapping[str, Callable[[Context], list[tuple[Floats, Floats]]]] = {  # weights times operands
    "dq": lambda c: [(c.s * c.dY, c.K)],
    "gq": lambda c: [(c.s * c.tdY, c.K), (c.s * c.dY, c.tK)],
    "dk": lambda c: [(c.s * c.dY, c.Q)],
    "dv": lambda c: [(c.P, c.dO)],
    "gk": lambda c: [(c.s * c.tdY, c.Q), (c.s * c.dY, c.tQ)],
    "gv": lambda c: [(c.tP, c.dO)],
}
WEIGHTS = {
    "dq": ("dQ", "dY"),
    "dk": ("dK", "dY"),
    "dv": ("dV", "P"),
    "gq": ("gQ", "tdY", "dY"),
    "gk": ("gK", "tdY", "dY"),
    "gv": ("gV", "tP"),
}
LOST = tuple(
    f"the sum into {name} by {others} that run at once: an atomic add, or one after the other; "
    "a plain load, add and store loses what was added meanwhile (another call may lose others)"
    for name, others in (("dq", "key tiles"), ("dk or dv", "heads of a group, or query tiles,"))
)
SEVERAL = {  # what is said of all tiles where these are said of one or another
    "the first ones of": {"the first", "all but the last", "the first ones", "every"},
    "the last ones of": {"the last", "all but the first", "the last ones", "every"},
}
Counts = dict[tuple[int, int], Floats]  # by sequence and kv head: (heads, query tiles, key tiles)


@dataclass(frozen=True)
class Read:
    """How often pairs of tiles are in a gradient, and how well each number is known."""

    counts: Counts
    known: Counts


def bugs(
    question: Question,
    answers: Answers,
    stage: str,
    contexts: Sequence[Context],
    wrong: frozenset[str],
) -> Iterator[Bug]:
    """Bugs in which gradients miss pairs of tiles, or have them twice, or scaled by their place."""
    left = set(wrong)
    for size in SIZES:
        reads = {}
        for name in sorted(left):
            read = _read(question, answers, contexts, name, size)
            if read is not None:
                reads[name] = read
        left -= reads.keys()
        if reads:
            yield from _planted(question, answers, stage, contexts, reads, size)
        if not left:
            return
    for name in sorted(left):
        yield from _powers(question, answers, stage, contexts, name)


# ---- reading ----------------------------------------------------------------------------------


def _key(c: Context) -> tuple[int, int]:
    return c.view.sequence, c.view.head_kv


def _cut(x: Floats, axis: int, tile: int) -> Floats:
    """``axis`` as two, tiles and rows of them, with zeros behind."""
    count = -(-x.shape[axis] // tile)
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, count * tile - x.shape[axis])
    shape = (*x.shape[:axis], count, tile, *x.shape[axis + 1 :])
    return np.pad(x, padding).reshape(shape)


def _parts(c: Context, name: str, size: tuple[int, int]) -> Floats:
    """What pairs of tiles add: (places, rows of a place and columns, pairs).

    A place is a tile of queries of a head, with a pair for every tile of keys; or a tile of keys,
    with a pair for every head and tile of queries.
    """
    total: Floats | float = 0.0
    for weight, x in SUMS[name](c):
        w = _cut(_cut(weight, 2, size[1]), 1, size[0])  # heads, query tiles, i, key tiles, j
        h, a, i, b, j = w.shape
        if name in OF_KEYS:
            y = _cut(x, 1, size[0])  # heads, query tiles, i, columns
            part = w.transpose(3, 0, 1, 4, 2).reshape(b, h, a, j, i) @ y[None]
            total = total + part.reshape(b, h * a, -1)
        else:
            y = _cut(x, 0, size[1])  # key tiles, j, columns
            part = w.transpose(0, 1, 3, 2, 4) @ y  # heads, query tiles, key tiles, i, columns
            total = total + part.reshape(h * a, b, -1)
    return np.asarray(total).swapaxes(1, 2)


def _at_places(c: Context, name: str, x: Floats, size: tuple[int, int]) -> Floats:
    """Rows of a gradient by place: (places, rows of a place and columns)."""
    if name in OF_KEYS:
        found = _cut(x, 0, size[1])
        return found.reshape(found.shape[0], -1)
    found = _cut(x, 1, size[0])
    return found.reshape(found.shape[0] * found.shape[1], -1)


def found_in(c: Context, answers: Answers, name: str) -> Floats:
    """The rows of a context's gradient in the answers, in float64."""
    if name in OF_KEYS:
        return np.asarray(answers[name][c.view.keys, c.view.head_kv], dtype=np.float64)
    return np.asarray(answers[name][c.view.rows[None], c.view.heads[:, None]], dtype=np.float64)


def _by_pairs(c: Context, name: str, x: Floats, size: tuple[int, int]) -> Floats:
    """(places, pairs) as (heads, query tiles, key tiles)."""
    h, a, b = len(c.view.heads), -(-len(c.view.rows) // size[0]), -(-len(c.view.keys) // size[1])
    if name in OF_KEYS:
        return x.reshape(b, h, a).transpose(1, 2, 0)
    return x.reshape(h, a, b)


def _read(
    question: Question,
    answers: Answers,
    contexts: Sequence[Context],
    name: str,
    size: tuple[int, int],
) -> Read | None:
    """None where the counts are not 0, 1 or 2, or do not explain what is wrong."""
    counts, known = {}, {}
    left, whole = 0.0, 0.0
    eps = ROUNDED[question.dtype.itemsize]
    for c in contexts:
        parts = _parts(c, name, size)
        if parts.shape[2] > parts.shape[1] // 2:
            return None
        right = _at_places(c, name, c.right[name], size)
        difference = _at_places(c, name, found_in(c, answers, name), size) - right
        noise = (eps**2) * float(np.mean(right**2))
        gram = parts.swapaxes(1, 2) @ parts
        square = np.diagonal(gram, axis1=1, axis2=2)
        ridge = 4 * noise + 1e-12 * float(square.max(initial=0.0)) + 1e-300
        target = parts.swapaxes(1, 2) @ difference[..., None]
        more = np.linalg.solve(gram + ridge * np.eye(gram.shape[1]), target)
        count = np.clip(np.rint(1 + more), 0, 2)
        rest = difference[..., None] - parts @ (count - 1)
        left, whole = left + float((rest**2).sum()), whole + float((difference**2).sum())
        counts[_key(c)] = _by_pairs(c, name, count[..., 0], size)
        known[_key(c)] = _by_pairs(c, name, square / (16 * ridge), size)
    return Read(counts, known) if left <= EXPLAINED[question.dtype.itemsize] ** 2 * whole else None


def _left(
    c: Context,
    answers: Answers,
    name: str,
    size: tuple[int, int],
    counts: Floats,
    parts: Floats | None = None,
) -> tuple[float, float]:
    """Squares of what is left with these counts, and with 1 everywhere."""
    parts = _parts(c, name, size) if parts is None else parts
    difference = _at_places(c, name, found_in(c, answers, name) - c.right[name], size)
    order = (2, 0, 1) if name in OF_KEYS else (0, 1, 2)
    more = counts.transpose(order).reshape(len(parts), -1, 1) - 1
    rest = difference - (parts @ more)[..., 0]
    return float((rest**2).sum()), float((difference**2).sum())


# ---- planting ---------------------------------------------------------------------------------


def _planted(
    question: Question,
    answers: Answers,
    stage: str,
    contexts: Sequence[Context],
    reads: Mapping[str, Read],
    size: tuple[int, int],
) -> Iterator[Bug]:
    one = _consensus(reads)
    left, whole = np.sum(
        [_left(c, answers, n, size, one[_key(c)]) for c in contexts for n in reads], axis=0
    )
    shared = left <= EXPLAINED[question.dtype.itemsize] ** 2 * whole
    steps: dict[str, Step] = {}
    bug = look_at = ""
    said: list[str] = []
    for name in reads:
        counts = one if shared else reads[name].counts
        steps |= _steps(name, counts, size)
        if not shared or not said:
            bug, words = _named(question, contexts, counts, reads[name].known, size)
            if bug == "pairs-dropped" and "are left out" in words and len(reads) == 1:
                words, look_at = f"lost updates: {words}", LOST[name in OF_KEYS]
            said.append(words if shared else f"{name}: {words}")
    yield Bug(bug, "; ".join(said), (stage,), None, steps, None, look_at)


def _consensus(reads: Mapping[str, Read]) -> Counts:
    """The counts of all, each from the gradient that knows it best."""
    found = {}
    for key in next(iter(reads.values())).counts:
        known = np.stack([read.known[key] for read in reads.values()])
        counts = np.stack([read.counts[key] for read in reads.values()])
        best = known.argmax(axis=0)[None]
        found[key] = np.take_along_axis(counts, best, axis=0)[0]
    return found


def _steps(name: str, counts: Counts, size: tuple[int, int]) -> dict[str, Step]:
    step, *weights = WEIGHTS[name]

    def wrong(c: Context) -> Floats:
        n, m = len(c.view.rows), len(c.view.keys)
        often = counts[_key(c)].repeat(size[0], axis=1).repeat(size[1], axis=2)[:, :n, :m]
        return np.asarray(STEPS[step](changed(c, **{w: getattr(c, w) * often for w in weights})))

    return {step: wrong}


def _powers(
    question: Question, answers: Answers, stage: str, contexts: Sequence[Context], name: str
) -> Iterator[Bug]:
    """softmax_scale multiplies the sum inside of the loop over tiles."""
    s, allowed = question.scale, EXPLAINED[question.dtype.itemsize] ** 2
    errors = [((found_in(c, answers, name) - c.right[name]) ** 2).sum() for c in contexts]
    worst = contexts[int(np.argmax(errors))]
    best: tuple[float, str, float, float, tuple[int, int], bool] | None = None
    for size in product(TILES, TILES):
        parts = _parts(worst, name, size)
        for last, (text, r, first) in product((True, False), (("s", s, 1.0), ("s", s, s))):
            counts = _power(worst, name, size, r, last) * first
            left, whole = _left(worst, answers, name, size, counts, parts)
            if left <= allowed * whole and (best is None or left < 0.5 * best[0]):
                best = left, text, r, first, size, last
    if best is None:
        return
    _, text, r, first, size, last = best
    powers = {_key(c): _power(c, name, size, r, last) * first for c in contexts}
    tile, end = size[0 if name in OF_KEYS else 1], "last" if last else "first"
    words = f"{name}: times {text} for every tile of {tile} from its own to the {end}"
    yield Bug("output-scale", words, (stage,), steps=_steps(name, powers, size))


def _power(c: Context, name: str, size: tuple[int, int], r: float, last: bool) -> Floats:
    """r to the number of tiles that come after each, or before it, in the loop's direction."""
    seen = _seen(c, size)
    axis = 1 if name in OF_KEYS else 2
    after = np.flip(np.cumsum(np.flip(seen, axis), axis), axis) if last else np.cumsum(seen, axis)
    return np.where(seen, float(r) ** (after - 1), 1.0)


def _seen(c: Context, size: tuple[int, int]) -> np.ndarray:
    """Pairs of tiles in which some query sees some key, by head."""
    w = _cut(_cut(c.W > 0, 2, size[1]), 1, size[0])
    seen = w.any(axis=(2, 4))
    return np.broadcast_to(seen, (len(c.view.heads), *seen.shape[1:]))


# ---- words ------------------------------------------------------------------------------------


def _named(
    question: Question,
    contexts: Sequence[Context],
    counts: Counts,
    known: Counts,
    size: tuple[int, int],
) -> tuple[str, str]:
    """The class, and which pairs are lost or doubled, in words."""
    lost, twice, told = 0, 0, 0
    for c in contexts:
        there = _seen(c, size) & (known[_key(c)] > 1)
        lost += int((there & (counts[_key(c)] == 0)).sum())
        twice += int((there & (counts[_key(c)] == 2)).sum())
        told += int(there.sum())
    if twice > told * MOSTLY:
        return "constant-factor", "the whole sum is there twice"
    if twice and not lost:
        return "tile-counted-twice", _pattern(contexts, counts, size, 2, "twice") or _some(
            twice, told, size, "counts twice"
        )
    words = _pattern(contexts, counts, size, 0, "left out")
    heads = {c.view.head_kv: _heads_lost(c, counts[_key(c)], size) for c in contexts}
    if all(one is not None for one in heads.values()) and question.group > 1:
        return "gqa-group-not-summed", "one head of each group alone"
    if _one_tile_kept(contexts, counts, size):
        return "tile-overwrites", words or "one tile alone is kept"
    if _tail_lost(contexts, counts, size):
        return "tail-tile-dropped", words or "the last, partial tile of queries"
    return "pairs-dropped", words or _some(lost, told, size, "are left out")


def _some(count: int, told: int, size: tuple[int, int], what: str) -> str:
    return f"{count} of {told} pairs of tiles of {size[0]} queries and {size[1]} keys, {what}"


def _heads_lost(c: Context, counts: Floats, size: tuple[int, int]) -> int | None:
    """The one head of a group that is there, if all others are lost as a whole."""
    seen = _seen(c, size)
    kept = np.asarray((seen & (counts > 0)).any(axis=(1, 2)))
    whole = not (seen & (counts == 0))[kept].any()
    return int(np.argmax(kept)) if whole and kept.sum() == 1 and len(kept) > 1 else None


def _one_tile_kept(contexts: Sequence[Context], counts: Counts, size: tuple[int, int]) -> bool:
    """Whether every sum has one tile alone, of some size."""
    for factor, axis in product((1, 2, 4, 8), (1, 2)):
        several = kept = most = 0
        for c in contexts:
            seen = _seen(c, size)
            lost = _coarser(seen & (counts[_key(c)] == 0), axis, factor)
            held = _coarser(seen & (counts[_key(c)] > 0), axis, factor)
            if axis == 1:  # sums of keys run over heads too
                lost, held = (x.transpose(2, 0, 1).reshape(x.shape[2], -1) for x in (lost, held))
            else:
                lost, held = (x.reshape(-1, x.shape[2]) for x in (lost, held))
            there = (lost | held).sum(axis=1) > 1
            several += int(there.sum())
            most = max(most, int((lost | held).sum(axis=1).max(initial=0)))
            kept += int((there & (held.sum(axis=1) == 1) & ~(lost & held).any(axis=1)).sum())
        if most > 2 and kept == several > 1:
            return True
    return False


def _coarser(x: np.ndarray, axis: int, factor: int) -> np.ndarray:
    return np.asarray(_cut(x, axis, factor).any(axis=axis + 1))


def _tail_lost(contexts: Sequence[Context], counts: Counts, size: tuple[int, int]) -> bool:
    """Whether what is lost is the last, partial tile of queries, or of keys."""
    for tile, axis in product((8, 16, 32, 64, 128), (1, 2)):
        if tile % size[axis - 1]:
            continue
        if all(_is_tail(c, counts[_key(c)], size, tile, axis) for c in contexts):
            return True
    return False


def _is_tail(c: Context, counts: Floats, size: tuple[int, int], tile: int, axis: int) -> bool:
    count = len(c.view.rows) if axis == 1 else len(c.view.keys)
    tail = np.arange(counts.shape[axis]) * size[axis - 1] >= count // tile * tile
    tail = tail[:, None] if axis == 1 else tail
    return bool(((counts == 0) == tail)[_seen(c, size)].all())


def _pattern(
    contexts: Sequence[Context], counts: Counts, size: tuple[int, int], value: int, what: str
) -> str:
    """Which tile in the loop over queries, or over keys, it is, if always the same."""
    sides = {1: ("query", "key"), 2: ("key", "query")}
    for factor, axis in product((1, 2, 4, 8), (1, 2)):
        kinds: list[str] = []
        for c in contexts:
            seen = _seen(c, size)
            hit = _coarser(seen & (counts[_key(c)] == value), axis, factor)
            missed = _coarser(seen & (counts[_key(c)] != value), axis, factor)
            if (hit & missed).any():
                kinds.append("")
            hit, missed = (
                np.moveaxis(x, axis, 2).reshape(-1, x.shape[axis]) for x in (hit, missed)
            )
            kinds += [_kind(h, h | m) for h, m in zip(hit, missed, strict=True) if (h | m).any()]
        there = {kind for kind in kinds if kind != "none"}
        for ones, of in SEVERAL.items():
            if len(there) > 1 and there <= of:
                there = {ones}
        if len(there) == 1 and "" not in there:
            loop, place = sides[axis]
            tile = size[axis - 1] * factor
            count = sum(kind != "none" for kind in kinds)
            return (
                f"{there.pop()} {loop} tile of {tile} {what}, for {count} of {len(kinds)} "
                f"{place} tiles of {size[2 - axis]} and heads"
            )
    return ""


def _kind(hit: np.ndarray, seen: np.ndarray) -> str:
    """Which of the tiles that are ``seen`` are ``hit``."""
    if not hit.any():
        return "none"
    order = hit[seen]
    if order.all() and len(order) > 1:
        return "every"
    kinds = {
        "the first": order[0] and not order[1:].any(),
        "the last": order[-1] and not order[:-1].any(),
        "all but the first": order[1:].all(),
        "all but the last": order[:-1].all(),
        "the first ones": not np.any(order[1:] & ~order[:-1]),
        "the last ones": not np.any(order[:-1] & ~order[1:]),
    }
    return next((kind for kind, there in kinds.items() if there), "")
