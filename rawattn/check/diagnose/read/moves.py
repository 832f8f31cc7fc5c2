"""Weights that meet other rows of v, or of dout, than they belong to: each is known by its number.
In the words of a rule, or of an order in tiles, and as steps. And rows with weights of others."""

from collections.abc import Callable
from functools import partial

import numpy as np

from rawattn.check.diagnose.engine.attention import STEPS, TILES, Context, Floats, changed
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.evidence.places import Array, Places, places_of
from rawattn.check.diagnose.evidence.rules import Shown, rules_of
from rawattn.check.diagnose.evidence.structure import named
from rawattn.check.diagnose.read.probe import TINY, Weights
from rawattn.check.diagnose.read.said import Said

NEAR = {8: 1e-9, 4: 1e-5}  # of a weight to the one that it is, by the bytes of the inputs
UNKNOWN = 1 << 30
SOME = 3  # rows that are told
KNOWN = 0.8  # of the weights that are read, at least, are some of the right ones
Read = tuple[Places, Array]
To = Callable[[Places], Array]  # where weights are, by where they belong, (total_q, total_k)


def say_moves(said: Said, second: Callable[[], Weights]) -> bool:
    """Whether weights are right ones at other places, of rows where a backward pass has them."""
    read = said.weights
    of, at, step, axis = ("dout", "i", "dV", -2) if read.passed else ("v", "j", "O", -1)
    by = _moved(read) if read.places.question.dtype.itemsize in NEAR else None
    if by is None:
        return False
    other = second()
    again = _moved(other)
    both = [(read.places, by)] if again is None else [(read.places, by), (other.places, again)]
    if again is not None and (columns := _in_columns(both, at)):
        said.say(f"columns of {of} are exchanged, {columns}", "input-layout")
        said.unread.append("by which layout")
        return True
    told = again is not None and (_by_rule(both, at) or _in_tiles(both, at))
    text, to = told or (_listed(read.places, by, read.passed), None)
    said.say(f"the weight of {at} meets {of} of another {at}: {text}", "stale-tile")
    if to is None:
        said.unread.append("by no plain rule")
    else:
        said.steps[step] = partial(_with_moved, to, axis, step)
    return True


def _moved(read: Weights) -> Array | None:
    """By how much, (num_heads_q, total_q, total_k), each weight that is due is further; UNKNOWN
    where it is not found, None where few are."""
    x, q = read.places, read.places.question
    with np.errstate(invalid="ignore", over="ignore"):
        due = np.where(x.rights, np.exp(read.right.S - read.right.lse[..., None]), 0.0)
    found, by = np.where(read.alive[..., None], read.P, 0.0), np.full(due.shape, UNKNOWN)
    if read.passed:
        due, found, by = (y.swapaxes(1, 2) for y in (due, found, by))  # views
    near, told = NEAR[q.dtype.itemsize], 0
    for h, line in np.argwhere((due > TINY).any(axis=2)):
        weights, here = due[h, line], found[h, line]
        at = np.flatnonzero(weights > TINY)
        order = at[np.argsort(weights[at])]
        for place in np.flatnonzero(here > TINY):
            own = weights[place] if place < len(weights) else 0.0
            for value in (here[place], here[place] - own):  # of another alone, or beside its own
                n = np.searchsorted(weights[order], value - near * here[place])
                of = order[min(n, len(order) - 1)]
                stays = of != place and abs(here[of] - weights[of]) <= near * weights[of]
                if value > 0 and not stays and abs(weights[of] - value) <= near * here[place]:
                    by[h, line, of] = place - of
                    told += 1
                    break
    if told < KNOWN * np.count_nonzero(found > TINY) or not ((by != 0) & (by != UNKNOWN)).any():
        return None
    return by.swapaxes(1, 2) if read.passed else by


def _in_columns(both: list[Read], at: str) -> str:
    """Which columns, by the units of which rows are told apart, stand for others, of which rows."""
    shown, by = [], set[int]()
    for x, distance in both:
        q, moved = x.question, (distance != 0) & (distance != UNKNOWN)
        width = min(q.q.shape[2], q.v.shape[2]) if at == "i" else q.v.shape[2]
        rows = np.arange(distance.shape[1 if at == "i" else 2])
        column = np.broadcast_to((rows if at == "j" else rows[:, None]) % width, distance.shape)
        by |= set(np.unique(column[moved] ^ ((column + distance)[moved] % width)).tolist())
        shown.append(Shown(x, (distance != UNKNOWN).any(axis=0), moved.any(axis=0)))
    rule = next(rules_of(*shown), None) if len(by) == 1 else None
    return f"c and c ^ {max(by)}: {rule}" if rule and max(by) else ""


def _by_rule(both: list[Read], at: str) -> tuple[str, To] | None:
    """Where all that are moved are so by one number, by a rule that holds on other lengths too."""
    distances = np.unique(both[0][1][(both[0][1] != 0) & (both[0][1] != UNKNOWN)])
    shown = [Shown(x, (y != UNKNOWN).any(axis=0), (y == distances[0]).any(axis=0)) for x, y in both]
    rule = next(rules_of(*shown), None) if len(distances) == 1 else None
    if rule is None:
        return None
    text = f"{at} {distances[0]:+d}" + f", those with {rule}" * bool(rule.spans)
    return text, lambda x: np.asarray(getattr(x, at) + int(distances[0]) * rule.holds(x))


def _in_tiles(both: list[Read], place: str) -> tuple[str, To] | None:
    """Where tiles have an order of their own, the same in all of them."""
    for tile in TILES:
        order, here = np.full(tile, -1), []
        for x, by in both:
            known = by != UNKNOWN
            at = np.broadcast_to(getattr(x, place) % tile, by.shape)[known]
            here.append((at, at + by[known]))
            order[at] = at + by[known]
        if ((order >= 0) & (order < tile)).all() and all((order[x] == y).all() for x, y in here):
            text = f"in every tile of {tile} in the order {', '.join(map(str, order))}"
            return text, partial(_reordered, order, place)
    return None


def _reordered(order: Array, place: str, x: Places) -> Array:
    at = getattr(x, place) + np.zeros(x.j.shape, dtype=int)
    return np.asarray(at - at % len(order) + order[at % len(order)])


def _listed(x: Places, by: Array, passed: bool) -> str:
    """On the line with the most of them."""
    counts = ((by != 0) & (by != UNKNOWN)).sum(axis=1 if passed else 2)
    h, at = np.unravel_index(counts.argmax(), counts.shape)
    distance = by[h, :, at] if passed else by[h, at]
    b = int(x.question.sequence_of("kq"[not passed])[at])
    first, other = (int(x.question.offsets(of)[b]) for of in ("qk" if passed else "kq"))
    apart = np.unique(distance[(distance != 0) & (distance != UNKNOWN)])[:4]
    told = [f"{named('', np.flatnonzero(distance == d) - first)} {d:+d}" for d in apart]
    return f"in sequence {b}, {'ij'[passed]} = {at - other}: {'ji'[passed]} = {'; '.join(told)}"


def say_rows(said: Said) -> bool:
    """Whether rows that are wrong, most of them, hold, alone or beside their own, weights of other
    queries, or the mean of what one sees: they were stored, or summed, by others."""
    read, q = said.weights, said.weights.places.question
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        due = np.where(read.places.rights, read.right.S, -np.inf)
        found = np.where(read.seen, read.logs, -np.inf)
        off = found - due + read.right.lse[..., None]
        same = np.isneginf(found) & (due - read.right.lse[..., None] < np.log(read.least))
        wrong = ~(same | (np.abs(off) <= 8 * read.noise)) & read.alive[..., None]
    others, told, count = due.reshape(-1, due.shape[2]), list[tuple[int, str]](), 0
    for h, i in np.argwhere(wrong.any(axis=2)):
        own = largest(np.where(np.isneginf(due[h, i]), np.nan, off[h, i]), 8 * read.noise)
        keys = np.flatnonzero(read.seen[h, i] & ~own)
        count += bool(len(keys))
        text = _other_row(others[:, keys], found[h, i, keys], read, h, i) if len(keys) > 1 else ""
        if text:
            text += " and its own" * bool(own.any())
            told.append((len(keys), f"{_called(q, h, i)} those of {text}"))
    if len(told) < max(2, count // 2):
        return False
    some = [text for _, text in sorted(told, key=lambda x: -x[0])[:SOME]]
    said.wrong[:] = [f"rows hold weights of other rows: {'; '.join(some)}"]
    said.names.clear()
    said.unread[:] = ["by which rule"]
    return True


def largest(x: Array, near: float) -> Array:
    """The most numbers that are the same, where they are several, or all that there are."""
    with np.errstate(invalid="ignore"):
        close = np.abs(x[:, None] - x[None]) <= near
    most = close[close.sum(axis=1).argmax()]
    return np.asarray(most & (most.sum() > 1 or np.isfinite(x).sum() == 1))


def _other_row(others: Array, found: Array, read: Weights, h: int, i: int) -> str:
    """Whose weights these are, up to a factor: of the other row that is the nearest."""
    q, near = read.places.question, 8 * read.noise
    with np.errstate(invalid="ignore"):
        alike = np.ptp(others - found, axis=1) <= near
    flat = not read.passed and bool(np.ptp(found) <= near)
    alike = np.isfinite(others).all(axis=1) if flat and not alike.any() else alike
    at = [tuple(map(int, divmod(row, len(q.q)))) for row in np.flatnonzero(alike)]
    if not at or (h, i) in at:
        return ""
    heads, rows = min(at, key=lambda x: (x[0] != h, abs(x[1] - i)))
    return "a query of zeros beside " * flat + _called(q, heads, rows)


def _called(q: Question, h: int, i: int) -> str:
    b = int(q.sequence_of("q")[i])
    return f"i = {i - int(q.offsets('q')[b])} of sequence {b}, head {h}"


def _with_moved(to: To, axis: int, step: str, c: Context) -> Floats:
    """A product with the weights where they are; what is nowhere in the sequence is lost."""
    places, keys = places_of(c.question), np.maximum(c.view.keys, 0)
    places_to = to(places)[np.ix_(c.view.rows, keys)]
    i, j = np.nonzero((places_to >= 0) & (places_to < c.P.shape[axis]))
    at = (i, places_to[i, j]) if axis == -1 else (places_to[i, j], j)
    P = np.zeros_like(c.P)
    np.add.at(P, (np.arange(len(P))[:, None], *at), c.P[:, i, j])
    return np.asarray(STEPS[step](changed(c, P=P)))
