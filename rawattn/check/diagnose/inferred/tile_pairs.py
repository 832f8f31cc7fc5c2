"""Which pairs of tiles do the gradients hold, and how often? Read off them, and planted.

dq of a tile of queries is the sum of what every tile of keys adds, dk and dv of a tile of keys that
of every tile of queries and head: least squares tell how often each of them is there: 0, 1 or 2
times.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.engine.attention import STEPS, Bug, Context, Floats, Step, changed
from rawattn.check.diagnose.engine.question import OF_KEYS, Answers, Question
from rawattn.check.diagnose.evidence.places import Places
from rawattn.check.diagnose.evidence.support import in_rules
from rawattn.check.diagnose.read.classes import TILES, of_pairs

EXPLAINED = {2: 0.15, 4: 0.04, 8: 0.04}  # of what is wrong may be left, at most; by bytes
MOSTLY = 0.9  # share of pairs, all those that are known well
SIZES = ((16, 16), (8, 8), (32, 32), (64, 64))
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


class Read(NamedTuple):
    """How often pairs (num_heads_q, total_q, total_k) are in a gradient, and how well each number
    is known."""

    counts: Floats
    known: Floats


def bugs(
    question: Question,
    answers: Answers,
    stage: str,
    contexts: Sequence[Context],
    wrong: frozenset[str],
) -> Iterator[Bug]:
    """Bugs in which gradients miss pairs of tiles, or have them twice."""
    left = set(wrong)
    for size in SIZES:
        reads = {}
        for name in sorted(left):
            read = _read(question, answers, contexts, name, size)
            if read is not None:
                reads[name] = read
        left -= reads.keys()
        if reads:
            yield _planted(question, answers, stage, contexts, reads, size)
        if not left:
            return


# ---- reading ----------------------------------------------------------------------------------


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


def _at(c: Context) -> tuple[np.ndarray, ...]:
    return np.ix_(c.view.heads, c.view.rows, c.view.keys)


def _by_entries(c: Context, x: Floats, size: tuple[int, int]) -> Floats:
    """Numbers of pairs of tiles (heads, query tiles, key tiles) for pairs of their rows."""
    n, m = len(c.view.rows), len(c.view.keys)
    return np.asarray(x.repeat(size[0], axis=1).repeat(size[1], axis=2)[:, :n, :m])


def _by_pairs(c: Context, name: str, x: Floats, size: tuple[int, int]) -> Floats:
    """(places, pairs) for pairs of their rows (heads, queries, keys)."""
    h, a, b = len(c.view.heads), -(-len(c.view.rows) // size[0]), -(-len(c.view.keys) // size[1])
    x = x.reshape(b, h, a).transpose(1, 2, 0) if name in OF_KEYS else x.reshape(h, a, b)
    return _by_entries(c, x, size)


def _of_all(question: Question, value: float) -> Floats:
    return np.full((question.num_heads_q, len(question.q), len(question.k)), value)


def _read(
    question: Question,
    answers: Answers,
    contexts: Sequence[Context],
    name: str,
    size: tuple[int, int],
) -> Read | None:
    """None where the counts are not 0, 1 or 2, or do not explain what is wrong."""
    read = Read(_of_all(question, 1.0), _of_all(question, 0.0))
    eps = ROUNDED[question.dtype.itemsize]
    for c in contexts:
        parts = _parts(c, name, size)
        if parts.shape[2] > parts.shape[1] // 2:
            return None
        right = _at_places(c, name, c.right[name], size)
        difference = _at_places(c, name, found_in(c, answers, name), size) - right
        gram = parts.swapaxes(1, 2) @ parts
        square = np.diagonal(gram, axis1=1, axis2=2)
        noise = (eps**2) * float(np.mean(right**2))
        ridge = 4 * noise + 1e-12 * float(square.max(initial=0.0)) + 1e-300
        target = parts.swapaxes(1, 2) @ difference[..., None]
        more = np.linalg.solve(gram + ridge * np.eye(gram.shape[1]), target)[..., 0]
        read.counts[_at(c)] = _by_pairs(c, name, np.clip(np.rint(1 + more), 0, 2), size)
        read.known[_at(c)] = _by_pairs(c, name, square / (16 * ridge), size)
    return read if _explained(question, answers, contexts, {name: read.counts}) else None


def _explained(
    question: Question,
    answers: Answers,
    contexts: Sequence[Context],
    counts: Mapping[str, Floats],
) -> bool:
    """Whether gradients with these counts leave little of what is wrong."""
    left = whole = 0.0
    for c, (name, often) in product(contexts, counts.items()):
        found = found_in(c, answers, name)
        wanted = _step(name, often)(c)
        wanted = wanted.sum(axis=0) if name in OF_KEYS else wanted
        left += float(((found - wanted) ** 2).sum())
        whole += float(((found - c.right[name]) ** 2).sum())
    return left <= EXPLAINED[question.dtype.itemsize] ** 2 * whole


# ---- planting ---------------------------------------------------------------------------------


def _planted(
    question: Question,
    answers: Answers,
    stage: str,
    contexts: Sequence[Context],
    reads: Mapping[str, Read],
    size: tuple[int, int],
) -> Bug:
    known = np.stack([read.known for read in reads.values()])
    every = np.stack([read.counts for read in reads.values()])
    one = np.take_along_axis(every, known.argmax(axis=0)[None], axis=0)[0]  # who knows it best
    shared = _explained(question, answers, contexts, dict.fromkeys(reads, one))
    steps: dict[str, Step] = {}
    bug = look_at = ""
    said: list[str] = []
    for name, read in reads.items():
        counts = one if shared else read.counts
        steps[WEIGHTS[name][0]] = _step(name, counts)
        if not shared or not said:
            bug, words, lost = _named(question, counts, read.known, size)
            if lost and len(reads) == 1:
                words, look_at = f"lost updates: {words}", LOST[name in OF_KEYS]
            said.append(words if shared else f"{name}: {words}")
    return Bug(bug, "; ".join(said), (stage,), None, steps, None, look_at)


def _step(name: str, counts: Floats) -> Step:
    step, *weights = WEIGHTS[name]

    def wrong(c: Context) -> Floats:
        often = counts[_at(c)]
        return np.asarray(STEPS[step](changed(c, **{w: getattr(c, w) * often for w in weights})))

    return wrong


# ---- words ------------------------------------------------------------------------------------


def _named(
    question: Question, counts: Floats, known: Floats, size: tuple[int, int]
) -> tuple[str, str, bool]:
    """The class, which pairs are lost or doubled, in words, and whether by no rule."""
    x = Places(question)
    told = x.right & (known > 1)
    lost, twice = (counts == 0) & told, (counts == 2) & told
    if twice.sum() > told.sum() * MOSTLY:
        return "constant-factor", "the whole sum is there twice", False
    doubled = bool(twice.any() and not lost.any())
    found = in_rules(x, counts * x.right, told)
    words = "; ".join(part.text(question.num_heads_q, "") for part in found.parts)
    if not found.named:
        share = (twice if doubled else lost).sum() / told.sum()
        what = "count twice" if doubled else "are left out"
        words = (
            f"{share:.0%} of all pairs, by tiles of {size[0]} queries and {size[1]} keys, {what}"
        )
    if doubled:
        return "tile-counted-twice", words, False
    kept = told & ~lost
    heads = kept.any(axis=(1, 2)).reshape(-1, question.group)
    if question.group > 1 and (heads.sum(axis=1) == 1).all():
        if not lost[heads.ravel()].any():
            return "gqa-group-not-summed", "one head of each group alone", False
    if _one_tile(question, x, told, kept):
        return "tile-overwrites", words, False
    bug = of_pairs(x, lost, told)
    return bug, words, bug == "pairs-dropped" and not found.named


def _one_tile(question: Question, x: Places, told: np.ndarray, kept: np.ndarray) -> bool:
    """Whether every sum has one tile alone, of some size."""
    heads, n, m = told.shape
    for tile, of_keys in product(TILES, (False, True)):
        number = np.broadcast_to((x.i if of_keys else x.j) // tile, (heads, n, m))
        there, held = told, kept
        if of_keys:  # sums of keys run over the heads of a group too
            group = np.arange(heads)[:, None, None] % question.group
            number = number + group * (n + m)
            number, there, held = (
                y.reshape(-1, question.group * n, m).swapaxes(1, 2) for y in (number, there, held)
            )
        low, high, least, most = (
            f(np.where(y, number, fill), axis=2)
            for y in (held, there)
            for f, fill in ((np.min, 1 << 30), (np.max, -1))
        )
        whole = not (there & ~held & (number == high[..., None])).any()
        if whole and (low >= high).all() and (high >= 0).any() and (most > least + 1).any():
            return True
    return False
