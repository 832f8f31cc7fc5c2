"""What the weights of a pass are instead of the right ones: who sees whom, scores, row sums."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine import STEPS, Context, See, Step
from rawattn.check.diagnose.read.maps import Map, map_of, of_heads
from rawattn.check.diagnose.read.places import Places, log_sum
from rawattn.check.diagnose.read.probe import Weights
from rawattn.check.diagnose.read.rules import Rule, Shown, rule_of
from rawattn.check.diagnose.read.support import Support, support_of
from rawattn.check.diagnose.read.terms import Field, Term, by_head, term_of
from rawattn.reference.dense import capped

Array = np.ndarray
SEEN = {"float16": 1e-5}  # weights above are seen; of other dtypes those above TINY
TINY = 1e-30
COARSE = 3e-3  # what is left where sums run in TF32: no bug of the weights
NOISE = {"float64": 1e-5, "float32": 1e-3, "float16": 2e-3, "bfloat16": 1e-2}  # of log-weights
TILES = (8, 16, 32, 64, 128)


@dataclass(eq=False)
class Said:
    """What was read of weights. right, wrong: sentences; unread: what no sentence describes.

    names: classes of bugs; steps: as of engine.Bug. term, map, counted (how often, and which keys):
    what the sentences are about.
    """

    weights: Weights
    support: Support
    term: Term | None = None
    map: Map | None = None
    counted: tuple[int, Rule] | None = None
    right: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    steps: dict[str, Step] = field(default_factory=dict)

    def scores(self, places: Places, S: Array) -> Array:
        """The scores (num_heads_q, total_q, total_k) with what was found, for the right ones."""
        found = S if self.term is None else S + self.term.of(places, S)
        return np.asarray(found + np.log(self.times(places)))

    def times(self, places: Places) -> Array:
        """(total_q, total_k): how often a key counts where it is seen."""
        if self.counted is None:
            return np.ones(places.j.shape)
        return np.where(self.counted[1].holds(places), float(self.counted[0]), 1.0)

    @property
    def see(self) -> See | None:
        """Who sees whom and how often, as a change of views; None where that is right."""
        if self.support.right and self.counted is None:
            return None
        return self.support.see(self.times)


def noise_of(places: Places) -> float:
    return NOISE[places.question.dtype.name]


def said_of(read: Weights, again: Callable[[], Weights], *, passed: bool = False) -> Said:
    """``again``: the same on other lengths, where rules are checked. passed: the weights are of a
    backward pass, which makes them with the lse that it is given."""
    places, noise, S = read.places, noise_of(read.places), read.right.S
    seen, alive = _seen(read)
    second = cache(again)
    said = Said(read, Support(places, places.right[None] & seen, ()))
    if not alive.all():
        _say_dead(said, alive, second)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(np.where(seen, read.P, 1.0))
    x = Field(logs - S, seen & places.right & alive[..., None], True, noise)
    if x.zero:
        said.right.append("scores and softmax_scale")
    elif (term := term_of(x, places, S)) is not None:
        _say_term(said, term)
    elif (counted := _counted(read, x, second)) is not None:
        said.wrong.append(f"keys count {counted[0]} times: {counted[1]}")
        said.names.append("tile-counted-twice")
        said.counted = counted
    elif (found := map_of(x, places, S)) is not None:
        said.wrong.append(found.text)
        said.names.append("gqa-head-map")
        said.steps["Y"] = found.Y
        said.map = found
    elif (term := term_of(x, places, S, table=True)) is not None:
        _say_term(said, term)
    elif x.left(np.zeros_like(S)) * noise < COARSE:
        said.right.append("scores and softmax_scale, roughly")
    else:
        said.unread.append("the weights of keys that are rightly seen are wrong in another way")
    if said.map is None:
        seen = seen | _too_small(said, read, seen)
        if (seen != places.right)[alive].any():
            there = second()
            seen_there, alive_there = _seen(there)
            seen_there = seen_there | _too_small(said, there, seen_there)
            again_seen = there.places, seen_there, alive_there
            said.support = support_of(places, seen, alive, again_seen)
        if said.unread and not said.support.named:
            said.unread[:] = ["the weights are not those of these queries and keys, if of any"]
        else:
            _say_support(said)
    if not said.unread and said.map is None:
        (_say_passed if passed else _say_sums)(said, logs, _seen(read)[0], alive)
    _say_values(said)
    return said


def _seen(read: Weights) -> tuple[Array, Array]:
    """Which weights are not 0, and which rows (num_heads_q, total_q) are numbers."""
    alive = np.isfinite(read.P).all(axis=-1)
    least = SEEN.get(read.places.question.dtype.name, TINY)
    return np.asarray(np.where(alive[..., None], np.nan_to_num(read.P) > least, False)), alive


def _too_small(said: Said, read: Weights, seen: Array) -> Array:
    """Pairs that must be seen, and whose weight with the scores as they are is too small to be."""
    S = said.scores(read.places, read.right.S)
    total = log_sum(np.where(read.places.right, S, -np.inf))
    small = S - np.where(np.isfinite(total), total, 0.0)[..., None]
    least = SEEN.get(read.places.question.dtype.name, TINY)
    return np.asarray(read.places.right & ~seen & (small < np.log(least) + 1))


def _say_dead(said: Said, alive: Array, second: Callable[[], Weights]) -> None:
    """Rows that are NaN, by a rule of one head."""
    head = int(np.argmin(alive.all(axis=1)))
    shown = []
    for read in (said.weights, second()):
        rows = ~_seen(read)[1][head][:, None]
        places = read.places
        whole = np.ones(places.j.shape, dtype=bool)
        shown.append(Shown(places, whole, np.broadcast_to(rows, whole.shape)))
    rule = rule_of(*shown)
    count = int((~alive).sum())
    text = f"{count} of {alive.size} rows are NaN"
    said.wrong.append(text if rule is None else f"{text}: {rule}")


def _say_support(said: Said) -> None:
    places, rules = said.support.places, said.support
    if rules.right:
        said.right.append("who sees whom")
        return
    heads = places.question.num_heads_q
    left, right = places.question.mask_window
    of = "i" if places.aligned else "p"
    bounds = [f"-{left} <= "] * (left >= 0), [f" <= {right}"] * (right >= 0)
    due = "".join((*bounds[0], f"j - {of}", *bounds[1])) if left >= 0 or right >= 0 else "every key"
    said.wrong.extend(part.text(heads, f" (it must see {due})") for part in rules.parts)
    own = any(part.kind != "sees keys that are not its own" for part in rules.parts)
    said.names.append("wrong-keys" if own else "neighbour-leak")


def _say_term(said: Said, term: Term) -> None:
    """The scores have a term: what it is, and the steps that it is planted by."""
    said.term = term
    if term.kind == "factor":
        factors = np.array(term.values)
        said.wrong.append(term.text + _of_scale(factors, said.support.places))
        said.steps["Y"] = lambda c: STEPS["Y"](c) * factors[c.view.heads][:, None, None]
        said.names.append("score-scale")
    elif term.kind == "cap":
        said.wrong.append(term.text)
        said.steps["cap"] = lambda c: capped(np, c.Y, term.values[0], c.r)
        said.names.append("softcap")
    else:
        said.wrong.append(f"added to the scores: {in_words(term)}")
        said.steps["cap"] = biased(term)
        said.names.append("score-bias")


def in_words(term: Term) -> str:
    """The text, with some values where it is a table."""
    if term.kind != "place":
        return term.text
    told = ", ".join(f"{value - term.values[0]:.4g}" for value in term.values)
    return f"{term.text} (head 0, nearest first: {told}, ...)"


def _of_scale(factors: Array, places: Places) -> str:
    q = places.question
    known = {"softmax_scale is missing": 1 / q.scale, "softmax_scale is there twice": q.scale}
    known |= {"log2(e)": 1 / np.log(2), "ln 2": np.log(2), "2": 2.0, "1/2": 0.5}
    known |= {"the default softmax_scale is used": q.q.shape[2] ** -0.5 / q.scale}
    close = (name for name, x in known.items() if np.allclose(factors, x, rtol=5e-3))
    text = next(close, "")
    return f" ({text})" if text else ""


def biased(term: Term) -> Step:
    """The scores with the term, which is a constant for every derivative."""

    def cap(c: Context) -> Any:
        places = Places(c.question)
        whole = term.of(places, np.zeros((c.question.num_heads_q, *places.j.shape)))
        here = whole[np.ix_(c.view.heads, c.view.rows, np.maximum(c.view.keys, 0))]
        value, *derivatives = STEPS["cap"](c)
        return (value + here, *derivatives)

    return cap


def _counted(read: Weights, x: Field, second: Callable[[], Weights]) -> tuple[int, Rule] | None:
    """How often, and which, where keys count more than once."""

    def times(read: Weights) -> tuple[Array, Array]:
        """(num_heads_q, total_q, total_k) and in which rows it is known."""
        seen, alive = _seen(read)
        common = seen & read.places.right & alive[..., None]
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(np.where(common, read.P, 1.0)) - read.right.S
        lowest = np.where(common, logs, np.inf).min(axis=-1, keepdims=True)
        found = np.where(common, np.exp(logs - np.where(np.isfinite(lowest), lowest, 0.0)), 0.0)
        return found, common & (found.max(axis=-1, keepdims=True) > 1.5)

    found, there = times(read)
    values = np.unique(np.round(found[there]))
    exact = np.abs(found - np.round(found))[there] < 8 * x.noise * np.maximum(found[there], 1)
    if not exact.size or not exact.all() or len(values) != 2 or values[-1] > 16:
        return None
    elsewhere, known = times(second())
    shown = [
        Shown(of.places, domain[0], domain[0] & (count[0] > 1.5))
        for of, count, domain in ((read, found, there), (second(), elsewhere, known))
    ]
    rule = rule_of(*shown)
    return None if rule is None else (int(values[-1]), rule)


def _say_passed(said: Said, logs: Array, seen: Array, alive: Array) -> None:
    """Whether weights are exp(score - lse), with the lse that was given."""
    read = said.weights
    if read.lse is None:
        return
    noise, rows, total = _totals(said, said.scores(read.places, read.right.S), logs, seen, alive)
    off = total - read.lse
    if np.abs(off[rows]).max(initial=0.0) > 8 * noise:
        _say_mass(said, np.exp(total) - np.exp(read.lse), off, rows, noise)
        if "softmax" in said.steps:
            own = said.steps.pop("softmax")
            said.steps["bP"] = lambda c: own(c)[1]


def _totals(
    said: Said, S: Array, logs: Array, seen: Array, alive: Array
) -> tuple[float, Array, Array]:
    """The noise of a row; (num_heads_q, total_q) rows that tell the logarithm of what their weights
    are divided by, and that."""
    right = said.weights.places.right & seen
    count = np.maximum(right.sum(axis=-1), 1)
    total = np.where(right, S - logs, 0.0).sum(axis=-1) / count
    return 3 * noise_of(said.weights.places), right.any(axis=-1) & alive, total


def _say_sums(said: Said, logs: Array, seen: Array, alive: Array) -> None:
    """What the weights are divided by, and lse."""
    read = said.weights
    places, q = read.places, read.places.question
    S = said.scores(places, read.right.S)
    noise, rows, total = _totals(said, S, logs, seen, alive)
    wrongly = seen & ~places.right & alive[..., None] & rows[..., None]
    level = logs + total[..., None]  # of which weights are exp
    usual = np.abs(level - S)[wrongly].max(initial=0.0) < 8 * noise
    if not usual:
        spread = np.ptp(level[wrongly])
        said.wrong.append(
            f"masked scores are {level[wrongly].mean():.4g}, not -inf"
            if spread < 8 * noise
            else "weights of keys that must not be seen are not those of their scores"
        )
        S = np.where(wrongly, level, S)
        said.names[:] = ["mask-fill"] if spread < 8 * noise else said.names
    due = log_sum(np.where(seen, S, -np.inf))
    sinks = None if q.sinks is None else np.asarray(q.sinks, dtype=np.float64)[:, None]
    with_sinks = due if sinks is None else np.logaddexp(due, sinks)
    off = np.abs(total - with_sinks)[rows].max(initial=0.0)
    if off < noise:
        said.right.append("row sums")
    elif sinks is not None and np.abs(total - due)[rows].max() < noise:
        said.wrong.append("the sinks are not in the row sums")
        said.names.append("sinks-dropped")
    else:
        _say_mass(said, np.exp(total) - np.exp(with_sinks), total - with_sinks, rows, noise)
    if read.lse is None:
        return
    lse, wanted = read.lse[rows], total[rows]
    if said.term is not None and said.term.kind == "place" and np.ptp(lse - wanted) < 8 * noise:
        said.term = _raised(said.term, float(np.mean(lse - wanted)))
        said.steps["cap"], wanted = biased(said.term), lse
    close = partial(np.allclose, lse, rtol=0, atol=8 * noise)
    if close(wanted) or close(with_sinks[rows]):
        said.right.append("lse")
    elif close(wanted / np.log(2)):
        said.wrong.append("lse is in base 2")
        said.names.append("lse-base-2")
    else:
        said.wrong.append("lse is not the logarithm of the row sums")


def _raised(term: Term, by: float) -> Term:
    """A table is known up to a number, which lse tells."""
    return replace(term, of=lambda places, S: term.of(places, S) + by)


def _say_mass(said: Said, mass: Array, ratio: Array, rows: Array, noise: float) -> None:
    """What is in the row sums beside the keys that are seen; mass (num_heads_q, total_q)."""
    places = said.weights.places
    if np.ptp(ratio[rows]) < 8 * noise:
        said.wrong.append(f"the weights of a row sum to {np.exp(-ratio[rows].mean()):.3g}, not 1")
        return
    allowed = 8 * noise * np.maximum(np.abs(np.exp(said.weights.right.lse)), 1)
    for tile in (0, *TILES):
        if (np.abs(mass - _padding(tile, places)) < allowed)[rows].all():
            upto = f"the end of its last tile of {tile} keys" if tile else "the longest sequence"
            said.wrong.append(f"the row sums have exp(0) for every key of padding up to {upto}")
            said.names.append("padded-keys")
            said.steps["softmax"] = _with_mass(partial(_of_rows, tile))
            return
    spread = mass[rows]
    if np.ptp(spread) < 8 * float(allowed[rows].min()):
        value = float(np.median(spread))
        said.wrong.append(f"the row sums have {value:.3g} more than the keys that are seen")
        said.names.append("denominator")
        said.steps["softmax"] = _with_mass(lambda c: value)
        return
    said.wrong.append(
        f"the row sums are off, by factors of {by_head(np.exp(ratio[rows][:4]))}, ..."
    )


def _padding(tile: int, places: Places) -> Array:
    """(total_q,): keys from a sequence's end to that of a tile; 0: of the longest sequence."""
    m = places.m[:, 0]
    return np.asarray(-m % tile if tile else max(places.question.lengths_k) - m)


def _of_rows(tile: int, c: Context) -> Array:
    return np.asarray(_padding(tile, Places(c.question))[c.view.rows])


def _with_mass(mass: Callable[[Context], Any]) -> Step:
    def softmax(c: Context) -> tuple[Array, Array]:
        L, P = STEPS["softmax"](c)
        with np.errstate(divide="ignore"):
            total = np.logaddexp(L, np.log(np.maximum(mass(c), 0.0)))
        return total, P * np.exp(L - total)[..., None]

    return softmax


def _say_values(said: Said) -> None:
    """Which head of v is weighted."""
    found = said.weights.value_head
    if found is None:
        return
    q = said.weights.places.question
    own = np.arange(q.num_heads_q) // q.group
    heads = np.nanmedian(np.where(np.isfinite(found), found, np.nan), axis=1)
    there = np.abs(found - heads[:, None]) < 0.1
    if np.isnan(heads).any() or not there[np.isfinite(found)].all():
        return
    taken = np.rint(heads).astype(int)
    if not np.array_equal(taken, own) and (np.abs(taken - heads) < 0.1).all():
        said.wrong.append(f"query head h takes the values of head {of_heads(taken)}")
        said.names.append("gqa-head-map")

        def O(c: Context) -> Array:  # noqa: E743
            v = c.question.v[c.view.keys][:, taken[c.view.heads]].astype(np.float64)
            return np.asarray(c.P @ v.swapaxes(0, 1))

        said.steps["O"] = O
