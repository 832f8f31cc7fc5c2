"""Other heads or rows of q, k or v than a query head's own, or a key's: which ones."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np

from rawattn.check.diagnose.catalogue import maps
from rawattn.check.diagnose.engine.attention import STEPS, TILES, Context, Step
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.evidence.places import Places
from rawattn.check.diagnose.evidence.rows import Rows, by_rules, in_words, moves_of
from rawattn.check.diagnose.read.probe import Weights
from rawattn.check.diagnose.read.terms import Field

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Map:
    """of: "k", "q" or "v". heads (num_heads_q,): the head of it that each query head takes; rows:
    which are taken for all of its rows, of a question. text and name: words, and the class."""

    of: str
    text: str
    heads: Array | None = None
    rows: Callable[[Question], Array] | None = None
    name: str = "gqa-head-map"

    def taken(self, c: Context, name: str) -> Array:
        """q, k or v of a view, by query head, with these heads and rows of it."""
        rows, heads = c.view.keys, np.array([c.view.head_kv])
        if name == "q":
            rows, heads = c.view.rows, c.view.heads
        if name == self.of:
            heads = heads if self.heads is None else self.heads[c.view.heads]
            rows = rows if self.rows is None else self.rows(c.question)[rows]
        array = np.asarray(getattr(c.question, name))[rows][:, heads]
        return np.asarray(array.astype(np.float64).swapaxes(0, 1))

    @property
    def steps(self) -> dict[str, Step]:
        """The product that takes them."""
        if self.of == "v":
            return {"O": lambda c: c.P @ self.taken(c, "v")}
        return {"Y": lambda c: c.s * (self.taken(c, "q") @ self.taken(c, "k").swapaxes(1, 2))}

    def dP(self, c: Context) -> Array:
        """The step with these heads."""
        return np.asarray(c.dO @ self.taken(c, "v").swapaxes(1, 2))


def of_other_heads(of: str, heads: Array) -> Map:
    """Query heads that take other heads of an array."""
    what = {"k": "keys", "q": "queries", "v": "values"}[of]
    return Map(of, f"query head h takes the {what} of head {of_heads(heads)}", heads)


def map_of(field: Field, places: Places, S: Array) -> Map | None:
    """Which other heads the scores are of; ``field`` is log-weights less S."""
    q = places.question
    if q.softcap is not None:
        return None
    Q = q.scale * q.q.astype(np.float64).swapaxes(0, 1)
    K = q.k.astype(np.float64).swapaxes(0, 1)
    of_keys = np.einsum("hnd,kmd->khnm", Q, K)
    own = np.arange(q.num_heads_q) // q.group
    of_queries = of_keys[own].swapaxes(0, 1)
    for of, scores in (("k", of_keys), ("q", of_queries)):
        left = np.array([field.left_by_head(other - S) for other in scores])
        if (left.min(axis=0) <= 1).all():
            return of_other_heads(of, left.argmin(axis=0))
    return None


# ---- rows -------------------------------------------------------------------------------------

FEW = 3  # numbers that tell a row by its scores, at least
PRODUCTS = {"k": "Q K^T", "q": "Q K^T", "v": "P V"}


def moved_of(read: Weights, second: Callable[[], Weights], noise: float) -> Map | None:
    """Which rows of k or q the scores are of, or which of v the weights multiply."""
    question = read.places.question
    for of in "kqv" if not question.sparse else "":
        found = _taken(read, of, noise)
        if found is None:
            continue
        where = PRODUCTS[of]
        if of == "k" and question.mask_window == (-1, -1) and len({*found}) == len(found):
            where = "Q K^T, or P V of v,"  # nobody can tell
        told = _by_sequence(question, of, found)
        told = told or _in_order(question, of, found) or _shifted(read, second(), of, found, noise)
        if told is None:
            at = np.flatnonzero((found >= 0) & (found != np.arange(len(found))))
            text = ", ".join(f"{found[row]} for {row}" for row in at[:6])
            told = f"{text}, ... of the pack", lambda q, found=found: np.maximum(found, 0)
        name = "offsets-shifted" if told[0] in maps.SEQUENCES else "stale-tile"
        return Map(of, f"{where} takes other rows of {of}: {told[0]}", None, told[1], name)
    return None


Told = tuple[str, Callable[[Question], Array]] | None


def _by_sequence(question: Question, of: str, found: Array) -> Told:
    """Rows of other sequences."""
    for by in maps.sequences(question):
        if _same(found, _by(by, of, question)):
            return by.words, partial(_by, by, of)
    return None


def _in_order(question: Question, of: str, found: Array) -> Told:
    """Groups of so many rows, each in one order."""
    rows = Rows(question, of)
    for size in (2, 4, *TILES):
        whole = rows.inside[0] & (rows.j[0] // size < rows.n // size) & (found >= 0)
        starts = np.flatnonzero(whole & (rows.j[0] % size == 0))
        starts = starts[(starts + size <= len(found))]
        if len(starts) < 2:
            continue
        order = found[starts[0] : starts[0] + size] - starts[0]
        for tails in (False, True):
            wanted = partial(_ordered, of, order, tails)
            if sorted(order) == [*range(size)] and _same(found, wanted(question)):
                text = f"of every {size} rows in the order {', '.join(map(str, order[:16]))}"
                return text + ", ..." * (size > 16), wanted
    return None


def _ordered(of: str, order: Array, tails: bool, question: Question) -> Array:
    """tails: of what does not fill a group those that are there, in that order too."""
    rows, taken, size = Rows(question, of), np.arange(len(getattr(question, of))), len(order)
    for start in np.flatnonzero(rows.inside[0] & (rows.j[0] % size == 0)):
        count = min(size, int(rows.n[start] - rows.j[0, start]))
        if count == size or tails:
            taken[start : start + count] = start + order[order < count]
    return taken


def _shifted(read: Weights, other: Weights, of: str, found: Array, noise: float) -> Told:
    """Rows at few distances, each by a rule that holds on other lengths too."""
    there = _taken(other, of, noise)
    if there is None:
        return None
    found_there = [(read.places.question, found), (other.places.question, there)]
    moves = moves_of(found_there, of)
    if moves is None:
        return None
    return in_words(moves, of), partial(by_rules, of, moves)


def _same(found: Array, wanted: Array) -> bool:
    known = (found >= 0) & (wanted >= 0) & (wanted < len(found))
    return bool(known.any() and (found == wanted)[known].all())


def _by(by: maps.Map, of: str, question: Question) -> Array:
    found = by.of(maps.geometry(question, of)).t
    rows = np.broadcast_to(found, maps.geometry(question, of).shape)[:, 0, 0]
    return np.where((rows >= 0) & (rows < len(rows)), rows, np.arange(len(rows)))


def _taken(read: Weights, of: str, noise: float) -> Array | None:
    """For every row of ``of`` the one that is taken, -1 where nothing tells; None where what was
    read is not that of any rows, or of all its own."""
    P, S = read.P, read.right.S
    if not np.isfinite(P).all():
        return None
    if of == "v":
        a, b = (x.reshape(-1, x.shape[2]) for x in (read.right.P, P))
        for by in maps.sequences(read.places.question):
            order = _by(by, "v", read.places.question)
            if np.abs(a @ np.eye(len(order))[order] - b).max(initial=0.0) < noise:
                return order if (order != np.arange(len(order))).any() else None
        known = (a != 0).any(axis=0)
        for fine in (1e-9, 1e-4):  # of some rounding
            order = np.linalg.lstsq(a, b, rcond=fine)[0].argmax(axis=1)
            if np.abs((a * known) @ np.eye(len(order))[order] - b).max(initial=0.0) < noise:
                break
        else:
            return None
    else:
        if read.lse is None:
            return None
        seen = (P > 0) & np.isfinite(read.lse)[..., None]
        if (seen != read.places.right)[:, np.isfinite(read.right.lse[0])].any():
            return None  # the weights themselves are elsewhere
        with np.errstate(divide="ignore", invalid="ignore"):
            T = np.where(seen, np.log(np.where(seen, P, 1.0)) + read.lse[..., None], 0.0)
        T, seen, S = ((x.swapaxes(1, 2) if of == "q" else x) for x in (T, seen, S))
        a, there, b = (x.reshape(-1, x.shape[2]).astype(np.float64) for x in (T, seen, S))
        error = (a**2).sum(axis=0)[:, None] - 2 * a.T @ b + there.T @ b**2
        count = there.sum(axis=0)
        known = count >= FEW
        own, order = np.diag(error), error.argmin(axis=1)
        allowed = (4 * noise) ** 2 * np.maximum(count, 1)
        order = np.where(own <= allowed, np.arange(len(own)), order)
        if (error[np.arange(len(own)), order] > allowed)[known].any():
            return None
    order = np.where(known, order, -1)
    return order if (order != np.arange(len(order)))[known].any() else None


def transposed_of(read: Weights, noise: float) -> tuple[str, dict[str, Step]] | None:
    """Tiles of scores that are those of the transposed pair."""
    if read.lse is None or read.places.question.sparse:
        return None
    seen = read.P > 0
    with np.errstate(divide="ignore"):
        T = np.log(np.where(seen, read.P, 1.0)) + read.lse[..., None]
    longest = max(read.places.question.lengths_k)  # what is one tile has its arguments exchanged
    for tile, full in product((tile for tile in TILES if tile < longest), (True, False)):
        rows, keys = _turned(tile, full, read.places)
        if (keys != np.arange(keys.shape[1])).any():
            if np.abs(T - read.right.S[:, rows, keys])[seen].max(initial=0.0) < 8 * noise:
                words = "full" if full else "square"
                text = f"the scores of {words} tiles of {tile} by {tile} are transposed"
                return text, {"Y": partial(_Y_turned, tile, full)}
    return None


def _turned(tile: int, full: bool, x: Places) -> tuple[Array, Array]:
    """Rows of q and of k, of the transposed place in a tile, where that is ``full``, or square."""
    sizes = (np.clip(n - i // tile * tile, 0, tile) for i, n in ((x.i, x.n), (x.j, x.m)))
    rows, keys = np.broadcast_arrays(*sizes)
    by = np.where(
        x.own & (rows == keys) & ((rows == tile) | (not full)), x.j % tile - x.i % tile, 0
    )
    return x.query + by, np.arange(x.j.shape[1])[None] - by


def _Y_turned(tile: int, full: bool, c: Context) -> Array:
    places = Places(c.question)
    at = np.ix_(c.view.rows, np.maximum(c.view.keys, 0))
    rows, keys = (x[at] for x in _turned(tile, full, places))
    there = np.minimum(np.searchsorted(c.view.keys, keys), len(c.view.keys) - 1)
    return np.asarray(STEPS["Y"](c)[:, rows - c.view.rows[0], there])


def of_heads(heads: Array) -> str:
    """A map from h to a head, as a formula or as a list."""
    h, top = np.arange(len(heads)), int(heads.max(initial=0)) + 1
    known = {"h": h, "0": 0 * h}
    known |= {f"h % {n}": h % n for n in range(2, top + 1)}
    known |= {f"h // {n}": h // n for n in range(2, len(heads) + 1)}
    known |= {f"(h {by:+}) % {len(heads)}": (h + by) % len(heads) for by in (1, -1)}
    known |= {f"{len(heads) - 1} - h": len(heads) - 1 - h}
    text = next((name for name, x in known.items() if np.array_equal(x, heads)), "")
    return text or ", ".join(map(str, heads))
