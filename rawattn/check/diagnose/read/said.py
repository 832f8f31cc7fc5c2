"""What is said, and known, of weights that were read; of block lists by bugs of the catalogue; of
weights that meet other rows of v, or of dout, than they belong to, each known by its number: by a
rule, or an order in tiles, and as steps; and of rows with weights of others."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from rawattn.check.diagnose.catalogue.classes import CLASSES
from rawattn.check.diagnose.catalogue.second_order import of_one_pass
from rawattn.check.diagnose.catalogue.sparse import selection
from rawattn.check.diagnose.engine import attention
from rawattn.check.diagnose.engine.attention import FIRST, FORWARD, TILES, Bug, See, View
from rawattn.check.diagnose.engine.question import LISTS, Question
from rawattn.check.diagnose.engine.steps import SCORES, STEPS, Context, Floats, Step, changed
from rawattn.check.diagnose.evidence.places import Array, Places, log_sum, places_of
from rawattn.check.diagnose.evidence.structure import Shown, named, rules_of
from rawattn.check.diagnose.evidence.support import Support, pairs_of
from rawattn.check.diagnose.read.fields import Term, context_of, scores_of
from rawattn.check.diagnose.read.probe import TINY, Weights
from rawattn.reference.dense import dead_to_inf

COARSE = 3e-3  # what is left where sums run in TF32: no bug of the weights
SITES = {"S", "dY", "E", "tdY"}  # steps that have the factors of scores
NOISE = 8  # times what log-weights may be off by, with a listed bug
NEAR = {8: 1e-9, 4: 1e-5}  # of a weight to the one that it is, by the bytes of the inputs
UNKNOWN = 1 << 30
SOME = 3  # rows that are told
KNOWN = 0.8  # of the weights that are read, at least, are some of the right ones
Read = tuple[Places, Array]
To = Callable[[Places], Array]  # where weights are, by where they belong, (total_q, total_k)


@dataclass(eq=False)
class Said:
    """What was read of a ``stage``, by so many calls. right, wrong: sentences, the latter what the
    bug is; unread: what no sentence describes. names: classes of bugs; steps: as of engine.Bug.
    term: what the sentences are about. loose: it was read on other lengths than are judged. listed:
    a bug of the catalogue that is all of it. table: tells all that is wrong in one sequence."""

    weights: Weights
    support: Support
    term: Term | None = None
    loose: bool = False
    right: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    steps: dict[str, Step] = field(default_factory=dict)
    stage: str = ""
    calls: int = 0
    listed: Bug | None = None
    table: Callable[[], str] = str

    def say(self, text: str, name: str) -> None:
        self.wrong.append(text)
        self.names += [name] if name else []

    def say_term(self, term: Term) -> None:
        scale = of_scale(np.array(term.values), self.support.places)
        self.say(term.text + scale * (term.name == "score-scale"), term.name)
        self.steps |= term.steps

    @property
    def name(self) -> str:
        """The class of what was read, "" where it is of several. Row sums that are off beside a
        wrong mask are those of what else is seen."""
        names = set(self.names) - (set() if self.support.right else {"denominator"})
        names -= {"unknown"} if len(names) > 1 else set()
        return names.pop() if len(names) == 1 else ""

    @cached_property
    def bug(self) -> Bug | None:
        """What was read as a bug of the engine, None where it does not say all."""
        if self.unread or self.loose or (self.see is None and not self.steps):
            return None
        words = "; ".join(self.wrong)
        if self.listed is not None and self.wrong == [_title(self.listed)]:
            words = self.listed.variant
        stages = (self.stage,) if self.stage in ("backward", "second", "jvp") else FIRST
        bug = Bug(self.name or "unknown", words, stages, self.see, self.steps)
        return _in_branch(bug) if self.stage == "sliding" else bug

    @property
    def bugs(self) -> list[Bug]:
        """The same; of the first pass of a double backward in both passes, or there alone."""
        found = [] if self.bug is None else [self.bug]
        return found + [of_one_pass(bug, True) for bug in found if self.stage == "second"]

    def allows(self, bug: Bug) -> bool:
        """Whether with a bug of who sees whom keys are seen as they were read."""
        read = self.support
        if bug.see is None and bug.steps.keys() == {"L", "O"} and not read.right:
            dead = ((read.seen == read.places.rights).all(-1) | ~read.seen.any(-1)).all()  # some
            return self.loose or bool(self.unread or dead) or "lse" not in self.right  # are merged
        known = read.named and not (read.right or self.unread or read.places.question.sparse)
        if bug.see is None or not known or read.second is None:
            return True
        both = (read.places, read.second)
        return all(np.array_equal(read.at(x) > 0, pairs_of(x.question, bug.see)) for x in both)

    def scores(self, places: Places, S: Array) -> Array:
        """The scores (num_heads_q, total_q, total_k) with what was found, for the right ones."""
        if self.listed is not None:
            found, _ = listed_scores(self.listed, places, S)
            return np.where(np.isneginf(found), S, found)
        others = not self.steps.keys().isdisjoint(SCORES)
        return scores_of(context_of(places, S), self.steps) if others else S

    @property
    def see(self) -> See | None:
        """Who sees whom, as a change of views; None where that is right."""
        return None if self.support.right else self.support.see


@lru_cache(maxsize=8)
def branch_of(question: Question) -> Question:
    """The dense problem that the sliding branch is; ``question`` without one is no such problem."""
    without: dict[str, Any] = dict.fromkeys((*LISTS, "sliding"))
    return replace(question, **without, window=question.sliding or (-1, -1))


def _in_branch(bug: Bug) -> Bug:
    """A bug of the dense problem in the branch alone, whose views have no lists."""

    def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        there = bug.see is not None and views and views[0].lists is None
        return bug.see(branch_of(question), views) if bug.see and there else views

    def step(name: str, c: Context) -> Any:
        if c.view.lists is not None:
            return STEPS[name](c)
        return bug.steps[name](changed(c, question=branch_of(c.question)))

    steps = {name: partial(step, name) for name in bug.steps}
    return replace(bug, stages=FORWARD, steps=steps, see=bug.see and see)


def _title(bug: Bug) -> str:
    return ": ".join(filter(None, (CLASSES[bug.name].title, bug.variant)))


def of_scale(factors: Array, places: Places) -> str:
    """What the factors by head of scores or of their gradients are, in brackets."""
    q, size = places.question, places.question.q.shape[2]
    known = {"softmax_scale is missing": 1 / q.scale, "softmax_scale is there twice": q.scale}
    known |= {"the default softmax_scale is used": size**-0.5 / q.scale}
    known |= {"that of head_dim_v is used": q.v.shape[2] ** -0.5 / q.scale}
    padded = sorted({-(-size // n) * n for n in (16, 32, 64, 128)} - {size})
    known |= {f"that of head_dim {n} is used": n**-0.5 / q.scale for n in padded}
    known |= {"by 1 / sqrt(d), the default softmax_scale, on top of a given one": size**-0.5}
    known |= {"log2(e)": 1 / np.log(2), "ln 2": np.log(2), "2": 2.0, "1/2": 0.5}
    factors = factors[np.abs(factors - 1) > 1e-2]
    told = (name for name, x in known.items() if np.allclose(factors, x, rtol=5e-3))
    text = " or ".join([name for name in told if abs(known[name] - 1) > 1e-2][:3])
    return f" ({text})" if text else ""


def of_lists(read: Weights, again: Callable[[], Weights]) -> Iterator[Said]:
    """Of block lists the listed bugs that give all weights of both problems; none of right ones."""
    views = attention.views_of(read.places.question) if read.places.question.sparse else ()
    wrong = [view for view in views if not _fits(attention.NO_BUG, read, [view])]
    if not wrong:
        return
    first = min(wrong, key=lambda view: abs(len(view.rows) * len(view.keys) - 1000))
    for bug in selection.of_weights(read.places.question):
        of_scores = bug.steps.keys() <= SITES and (bug.see or "S" in bug.steps)
        if not of_scores or not _fits(bug, read, [first]):
            continue
        if all(_fits(bug, x, attention.views_of(x.places.question)) for x in (read, again())):
            seen = read.places.rights if bug.see is None else read.places.rights & read.seen
            support = Support(read.places, seen, (), listed=bug.see)
            said = Said(read, support, steps=dict(bug.steps), listed=bug)
            said.say(_title(bug), bug.name)
            yield said


def listed_scores(
    bug: Bug, places: Places, S: Array, views: Sequence[View] | None = None
) -> tuple[Array, Array]:
    """The scores (num_heads_q, total_q, total_k) with a bug, -inf of what nobody sees, and their
    factors, for the right scores ``S``. Raises ValueError where it sees what is no key."""
    q = places.question
    views = tuple(attention.views_of(q) if views is None else views)
    right, found, gates = places.gates, np.full(S.shape, -np.inf), np.ones(S.shape)
    for view in views if bug.see is None else bug.see(q, views):
        if (view.keys < 0).any():
            raise ValueError("it sees rows of zeros")
        at = np.ix_(view.heads, view.rows, view.keys)
        c = SimpleNamespace(question=q, view=view, W=view.weight, r=attention.exact, dS=1.0)
        c.cap = S[at] / np.broadcast_to(right, S.shape)[at], 1.0
        c.G = attention.per_key(view, q.block_scale, 1.0)
        step, of = (bug.steps.get(name, STEPS[name]) for name in ("S", "dY"))
        np.logaddexp.at(found, at, step(c))
        gates[at] = np.where(view.weight > 0, of(changed(c)), gates[at])
    return found, gates


def _fits(bug: Bug, read: Weights, views: Sequence[View]) -> bool:
    """Whether these are the weights of ``views``."""
    try:
        S, _ = listed_scores(bug, read.places, read.right.S, views)
    except (IndexError, ValueError):
        return False
    for view in views:
        at = np.ix_(view.heads, view.rows)
        L = read.right.lse[at] if read.passed else log_sum(S[at])
        with np.errstate(over="ignore"):
            P = np.exp(S[at] - dead_to_inf(np, L)[..., None])
        off = np.abs(P - read.P[at]) > NOISE * read.noise * P + read.least
        if np.isnan(read.P[at]).any() or off[read.telling[at]].any():
            return False
    return True


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
