"""Numbers of rows that are others: a row statistic (lse, D, e, W), or how often a term has a row.
Results are linear in each of them, so that they tell that number row by row; what it is in place
of the right one, is told of all rows at once. A gradient of sinks is a sum of such numbers."""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from itertools import permutations, product
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.catalogue import maps
from rawattn.check.diagnose.catalogue.inputs import array_of, of_view
from rawattn.check.diagnose.catalogue.second_order import at, with_values
from rawattn.check.diagnose.engine.attention import FORWARD, TILES, Bug, Passed, Same, contexts
from rawattn.check.diagnose.engine.question import BY_ROW, OF_KEYS, OF_SLOTS, Question, by_rows
from rawattn.check.diagnose.engine.steps import LOG2_E, STEPS, Context, Floats, Step, row_max, sunk
from rawattn.check.diagnose.evidence.places import places_of
from rawattn.check.diagnose.evidence.precision import finite
from rawattn.check.diagnose.evidence.structure import where
from rawattn.check.diagnose.evidence.support import NO_RULE
from rawattn.check.diagnose.inferred.sample import Sample
from rawattn.check.diagnose.inferred.terms import CLEAR, CLOSE
from rawattn.check.diagnose.read import fields
from rawattn.reference.dense import dead_to_inf

APART = (*OF_SLOTS, "delta")  # results that are made apart
TINY = 1e-5  # of numbers: what is less is rounding
MANY, EFFORT = 6, 3000.0  # sums that are not cleared, and what is spent on them
LEAST = 1e-3  # of what numbers are known by in most rows: where it is less they are not known
QUANTITIES: dict[str, Step] = {  # (heads, n) of a context that a number may hold
    **{"W": lambda c: c.w, "e": lambda c: c.e, "D": lambda c: c.D},
    "dlse": lambda c: c.dL + np.zeros(c.S.shape[:2]),
    "exp(sink - lse) D": lambda c: STEPS["P0"](c) * c.D,
    **{"lse": lambda c: c.L, "row_max": row_max},
    "row_sum": lambda c: np.exp(c.L - row_max(c)),
    "1 / row_sum": lambda c: np.exp(row_max(c) - c.L),
    "": lambda c: np.ones(c.S.shape[:2]),
    "log(row_sum)": lambda c: c.L - row_max(c),
    "ddsinks (1 - exp(sink - lse))": lambda c: c.tsink * (1 - c.P0) + 0 * c.L,
    "e of the keys, without sinks": sunk(lambda c: (c.e - c.P0 * c.tsink) / (1 - c.P0)),
    "row_sum e": lambda c: QUANTITIES["row_sum"](c) * c.e,
    "e of the query's own block": lambda c: _of_own(c),
}
ALL = [*QUANTITIES]
HELD = {"second": ALL, "backward": ALL[2:-4], "jvp": [ALL[1], *ALL[5:]], "forward": ALL[5:-4]}
OF = {"W": "second-w-omitted", "D": "delta-of-another-out", "e": "tangent-e-omitted"}
Found = dict[str, Floats]
UNCLEARED = "accumulator-not-reset"
LOOPS = {"b": "sequence", "g": "group of heads", "h": "head", "m": "tile of {} queries"}
ORDERS = ["bm|h", "bmg|h", "bh|m", "hm|b", *("".join(x) for x in permutations("bhm|"))]
KEPT = {"out and row_sum": (1, 1), "row_sum": (0, 1), "out": (1, 0)}  # the sums of both
UNITS = {"": "", "row_max": ", each beside its own row's maximum,"}


def carried(question: Question, loops: str, tile: int, x: Floats) -> Floats:
    """Of rows (heads, tokens, ...) the sums with all that were in the same place of a tile before,
    in nested ``loops``, since those in front of "|" went on."""
    outer, inner = loops.split("|")
    h, t = np.nonzero(np.ones(x.shape[:2]) * (question.sequence_of("q") >= 0))
    i = question.place_of("q")[t]
    of = {"b": question.sequence_of("q")[t], "g": h // question.group, "h": h, "m": i // tile}
    chains = np.stack([i % tile, *(of[loop] for loop in outer)])
    order = np.lexsort([*(of[loop] for loop in inner[::-1]), *chains[::-1]])
    starts = np.append(True, (np.diff(chains[:, order]) != 0).any(axis=0))[: len(order)]
    chain, rows = starts.cumsum() - 1, (h[order], t[order])
    at = chain, np.arange(len(order)) - np.flatnonzero(starts)[chain]
    sums = np.zeros((len(order) and max(chain) + 1, max(at[1], default=0) + 1, *x.shape[2:]))
    sums[at], found = x[rows], x.copy()
    found[rows] = sums.cumsum(axis=1)[at]
    return found


def loops_of(question: Question, inner: int) -> Iterator[tuple[str, str, int]]:
    """What carried() takes, with at most so many loops behind "|", and before it that in words."""
    tiles = [t for t in TILES if t // 2 < max(question.lengths_q, default=0)]
    for loops, tile in product(ORDERS, tiles):
        outer, of = ([LOOPS[x].format(tile) for x in y] for y in loops.split("|"))
        if 0 < len(of) <= inner and ("m" in loops.split("|")[1] or tile == tiles[0]):
            but = [x for x in outer if not x.startswith("tile")]
            text = f"but for every {' and '.join(but)}" if but else "nor for anything else"
            yield f"not cleared for every {' and '.join(of)}, {text}", loops, tile


def _of_own(c: Context) -> Floats:
    """What the block that a query stands in adds to e."""
    places, size = places_of(c.question), c.question.block_size
    own = (places.j // size == places.p // size) if c.question.sparse else 0 * places.j
    return np.asarray((c.P * fields.of_view(c, own[None]) * np.where(c.W > 0, c.E, 0.0)).sum(-1))


class Rows(NamedTuple):
    """Those of a stage of a question, (num_heads_q, total_q)."""

    question: Question
    given: Same | None
    stage: str

    @lru_cache(maxsize=32)  # noqa: B019
    def of(self, name: str) -> Floats:
        """One of QUANTITIES."""
        found = np.zeros(self.question.q.shape[1::-1])
        for c in contexts(self.question, self.stage, self.given):
            found[c.view.heads[:, None], c.view.rows] = finite(QUANTITIES[name](c))
        return found

    def summed(self, often: Mapping[str, float]) -> Floats:
        return np.asarray(sum((x * self.of(n) for n, x in often.items()), 0.0 * self.of("")))

    def moved(self, name: str, by: maps.Map, own: str) -> Floats:
        """By a map, but for what is ``own``, and lacks in it."""
        less = self.of(own) if own else 0.0
        return by.moved(maps.geometry(self.question, "lse"), self.of(name) + less) - less


class Number(NamedTuple):
    """One of each row, which is ``right`` of QUANTITIES; adding: with so much more in it."""

    text: str
    right: str
    adding: Callable[[Step], Mapping[str, Step]]


def _more_of(step: str, text: str, right: str) -> Number:
    return Number(text, right, lambda more: {step: lambda c: STEPS[step](c) + more(c)})


def _e_in(sites: str, text: str) -> Number:
    tP: Callable[[Step], Step] = lambda more: lambda c: c.P * (c.E - (c.e + more(c))[..., None])  # noqa: E731
    return Number(text, "e", lambda more: at(sites.split(", "), tP=tP(more)))


def _often(step: str, x: str, words: str) -> Number:
    """By an operand of one term; P is in the product with the direction of v alone."""
    by: Callable[[Step], Step] = lambda more: lambda c: getattr(c, x) * (1 + more(c)[..., None])  # noqa: E731
    return Number(f"how often {words}", "", lambda more: {step: with_values(step, **{x: by(more)})})


DELTA, E = _more_of("D", "D", "D"), _more_of("e", "e", "e")
NUMBERS = {
    "forward": (_often("O", "P", "out is there"), _more_of("L", "lse", "lse")),
    "backward": (DELTA, _often("dQ", "dY", "dq is there")),
    "second": (
        *(E, _e_in("dS', gv", "e of the second pass")),
        *(_e_in(x, f"e in {x}") for x in ("dS'", "ddout, W", "ddout")),
        *(_more_of("tL", "ddlse", "e"), _more_of("w", "W", "W"), DELTA),
        _often("tO", "P", "P ddv is in ddout"),
    ),
    "jvp": (
        *(E, _e_in("ddout", "e in tout"), _more_of("tL", "tlse", "e")),
        _often("tO", "P", "P tv is in tout"),
    ),
}


def bugs(sample: Sample) -> Iterator[Bug]:
    """One of each number that alone may make a wrong result what it is."""
    rows = Rows(sample.question, sample.given and Same(sample.given), sample.stage)
    for number in NUMBERS[sample.stage] if sample.wrong else ():
        read = read_of(sample, number)
        yield from _told(rows, number, *read) if read else ()


def _kept(of: str, unit: str, loops: str, tile: int, q: Question, right: Found) -> Found:
    """A forward pass whose sums are not cleared, and without a ``unit`` its maxima neither."""
    lse, out = right["lse"][..., None], right["out"].swapaxes(0, 1)
    top = Rows(q, None, "forward").of(unit)[..., None]
    with np.errstate(all="ignore"):
        own = np.exp(lse - top) * np.concatenate([np.ones_like(lse), out], axis=-1)
        sums = own, carried(q, loops, tile, own)
        PV, by = (sums[kept] for kept in KEPT[of])
        out = finite(PV[..., 1:] / by[..., :1]).swapaxes(0, 1)
        return right | {"out": out, "lse": (np.log(by[..., :1]) + top)[..., 0]}


def of_loops(sample: Sample) -> list[Bug]:
    """A forward pass whose sums are not cleared for every row."""
    asked = loops_of(sample.question, 3) if sample.stage == "forward" else ()
    bugs = list[Bug]()
    for unit, of, (text, loops, tile) in product(UNITS, KEPT, asked):
        store = partial(_kept, of, unit, loops, tile)
        bugs.append(Bug(UNCLEARED, f"{of}{UNITS[unit]} are {text}", FORWARD, store=store))
    return sample.near([bugs], MANY, EFFORT)


def read_of(sample: Sample, number: Number) -> tuple[np.ndarray, Floats, Floats] | None:
    """What a result of rows tells, if it is right but for the number of each, (num_heads_q,
    total_q): which are known, how much more they are than they must be, and what rounding leaves of
    one; nothing where it leaves too much of what is off."""
    steps = number.adding(QUANTITIES[""])
    one = sample.planted(Bug("", stages=(sample.stage,), steps=steps))  # 1 more of each number
    moved = {n for n, x in sample.truth.items() if not np.array_equal(one[n], x)} - {*APART}
    told = sorted(moved & sample.wrong.keys() - {*OF_KEYS}, key=lambda n: (n in BY_ROW, n))
    if not told or moved - {*OF_KEYS, "gq"} - sample.wrong.keys():  # these have kernels apart
        return None
    tensor = told[0]
    found, right = sample.found[tensor], by_rows(tensor, sample.truth[tensor])
    there = np.isfinite(found + right) & (sample.question.sequence_of(tensor) >= 0)[:, None, None]
    of_one = finite(by_rows(tensor, one[tensor]))
    due, by = (np.where(there, finite(x) - finite(right), 0.0) for x in (found, of_one))
    size = (by * by).sum(axis=2)
    known = np.sqrt(size) > LEAST * np.sqrt(size.mean())
    size = np.where(known, size, 1.0)
    added = np.where(known, (due * by).sum(axis=2) / size, 0.0)
    off, rounded = np.linalg.norm(due), sample.wrong[tensor] * np.linalg.norm(finite(right))
    allowed = max(rounded, CLOSE * off)
    clear = known.any() and (off <= rounded or allowed**2 <= CLEAR * off**2)
    if not clear or np.linalg.norm(due - added[..., None] * by) > allowed:
        return None
    return known.T, added.T, (allowed / np.sqrt(known.sum() * size)).T


def _told(rows: Rows, number: Number, known: Floats, added: Floats, noise: Floats) -> Iterator[Bug]:
    """What the number of each row is in place of the right one."""
    right, every = number.right, rows.of(number.right) + added
    x, unit = every[known], noise[known]
    forms = _forms(rows, right, known, x, unit)
    close = (f for f in forms if np.mean(((x - f[2](rows)[known]) / unit) ** 2) <= 1)
    name, text, of = next(close, ("", "", lambda _: every))
    inside, size = rows.question.sequence_of("q") >= 0, rows.question.dtype.itemsize
    due = np.where(inside, rows.of(right), np.nan)
    own = [0.0 * every] + [rows.of("dlse")] * (right == "D")
    others = (fields.other_rows(due + x, every + x, known, size) for x in own)
    if not name and right and (places := next(filter(None, others), "")):
        name, text = "statistics-misplaced", f"that of other rows, {NO_RULE}: {places}"
    elif not name and number.text not in BY_ROW and abs(added).max() > TINY * abs(every).max():
        off = known & (abs(added) > CLOSE * abs(added).max())
        what = f"{every[off].mean():.3g}" if np.ptp(every[off]) < 1e-3 else "other numbers"
        places = "; ".join(where(rows.question, "lse", off.T, known.T))
        name, text = OF[right] if right == "D" else "unknown", f"{what}, not {right or 1}, {places}"

    def more(c: Context) -> Floats:
        here = Rows(c.question, c.given, rows.stage)
        return of_view(c, "lse", of(here) - here.of(right))

    if name:
        yield Bug(name, f"{number.text} holds {text}", (rows.stage,), steps=number.adding(more))


def _forms(
    rows: Rows, right: str, known: np.ndarray, x: Floats, unit: Floats
) -> Iterator[tuple[str, str, Callable[[Rows], Floats]]]:
    """What numbers may be in place of the right ones, the class, and the words: sums of two others,
    those of other places, and sums that go on from one tile of queries to the next."""
    twin = "lse" if right == "lse" else "log(row_sum)"  # of which one is told
    basis = {n: rows.of(n)[known] / unit for n in HELD[rows.stage] if n != twin}
    for by in fields.sums_of({n: of for n, of in basis.items() if of.any()}, x / unit, 2):
        of_term = "second-term-dropped" if rows.stage in ("jvp", "second") else "denominator"
        kind = "not-normalised" if "row_sum" in by and not right else OF.get(right, of_term)
        if right == "lse" and np.isclose([*by.values()], LOG2_E, 1e-3).any():
            kind = "lse-base-2"
        elif right == "lse" and "row_max" not in by:
            kind = "lse-without-max"
        yield kind, fields.sum_in_words(by), partial(Rows.summed, often=by)
    with_dlse = right == "D" and rows.question.dlse is not None
    for by_map, own in product(maps.families(rows.question, True), ("", "dlse")[: 1 + with_dlse]):
        text = f"that of other rows{', but for dlse' * bool(own)}: {by_map.words}"
        if right:
            yield "statistics-misplaced", text, partial(Rows.moved, name=right, by=by_map, own=own)
    for text, loops, tile in loops_of(rows.question, 1) if right else ():
        of = lambda x, y=loops, z=tile: carried(x.question, y, z, x.of(right))  # noqa: E731
        yield UNCLEARED, f"sums {text}", of


OF_ALL, ITS = "all queries", "exp(sink - lse)"


def of_sinks(question: Question, stage: str, given: Passed, found: Floats, allowed: float) -> str:
    """Of which rows and terms a wrong gradient of the sinks is the sum, in words: two sums with the
    fewest changes; "" where none gives it up to ``allowed``."""
    factors = {"": -1.0, " with the wrong sign": 1.0, " times softmax_scale": -question.scale}
    factors |= {" divided by the number of sequences": -1 / max(question.batch, 1)}
    terms, rows = _terms(question, given, stage), _summed(question)
    like: dict[str, int] = {}
    for (sign, factor), (term, (x, changes)) in product(factors.items(), terms.items()):
        sums = {of: factor * (x * often).sum(axis=1) for of, often in rows.items()}
        of_group = sums[OF_ALL].reshape(-1, question.group).sum(axis=1)
        sums[f"{OF_ALL}, of all heads of its group,"] = of_group.repeat(question.group)
        first = np.append(of_group, np.zeros(len(found) - len(of_group)))
        sums[f"{OF_ALL}, of all heads of a group, at head h // group,"] = first
        for of, y in sums.items():
            if np.abs(y - found).max() <= allowed:
                text = f"the sum of {term} over {of}{sign}"
                like[text] = changes + (of != OF_ALL) + (sign != "")
    for by in maps.families(question, True) if stage == "backward" else ():
        weight = np.exp(np.asarray(question.sinks, dtype=np.float64))[:, None]
        for w, words in ((1.0, ""), (weight, ", with the sink of their heads")):
            x = w * by.moved(maps.geometry(question, "lse"), terms[f"{ITS} D"][0] / w)
            if np.abs(x.sum(axis=1) + found).max() <= allowed:
                text = f"the sum of {ITS} D over {OF_ALL}, summed as other rows{words}"
                like[f"{text}: {by.words}"] = 1
    best = [text for text in like if like[text] == min(like.values())]
    return f"it is {' or '.join(best[:2])}" if best else ""


def _terms(question: Question, given: Passed, stage: str) -> dict[str, tuple[Floats, int]]:
    """What a row (num_heads_q, total_q) may add, what the weight of the sink may be in it times
    another number, and how many changes it is."""
    sinks = np.asarray(question.sinks, dtype=np.float64)[:, None]
    inside, D = question.sequence_of("q") >= 0, array_of(question, Same(given), "delta")
    lse = dead_to_inf(np, np.asarray(given[1], dtype=np.float64))
    dlse = np.zeros_like(D) if question.dlse is None else np.where(inside, question.dlse, 0.0)
    factors = {"": 1.0, "log2(e) ": LOG2_E, "ln 2 ": 1 / LOG2_E, "0 ": 0.0}
    factors |= {"softmax_scale ": question.scale}
    exponents = {
        f"exp({a}sink - {b}lse)": x * sinks - y * np.where(np.isfinite(lse), lse, 0.0)
        for (a, x), (b, y) in product(factors.items(), factors.items())
    }
    exponents["exp(sink - logaddexp(lse, sink))"] = sinks - np.logaddexp(lse, sinks)
    if (cap := question.softcap) is not None:
        exponents["exp(softcap(sink) - lse)"] = cap * np.tanh(sinks / cap) - lse
    with np.errstate(over="ignore"):
        weights = {words: np.exp(x) * np.isfinite(lse) for words, x in exponents.items()}
    if stage == "backward":
        rows = {"D": D, "": 1 + 0 * D, "dout . out": D + dlse}
    else:
        e, W = (array_of(question, Same(given), name) for name in ("e", "w"))
        moved = 0 * sinks if question.tsinks is None else np.asarray(question.tsinks)[:, None]
        parts = {"ddsinks D": moved * D, "e D": -e * D, "W": W}
        whole, text = (moved - e) * D + W, "((ddsinks - e) D + W)"
        weights, rows = {ITS: weights[ITS]}, {text: whole}
        for how, often in (("without", -1), ("with the other sign of", -2), ("with twice", 1)):
            rows |= {f"{text} {how} {n}": whole + often * x for n, x in parts.items()}
        rows[f"{text} without dlse in D"] = whole + (moved - e) * dlse
    return {
        f"{by} {row}".strip(): (w * inside * x, (by != ITS) + (row != next(iter(rows))))
        for (by, w), (row, x) in product(weights.items(), rows.items())
    }


def _summed(question: Question) -> dict[str, Floats]:
    """Rows (total_q,) of which there may be a sum."""
    b, i = question.sequence_of("q"), question.place_of("q")
    n, m = (np.array([*lengths, 0])[b] for lengths in (question.lengths_q, question.lengths_k))
    final = b == b.max(initial=-1)
    found = {OF_ALL: b >= 0, "the last sequence alone": final}
    found["queries of sequences with keys"] = m > 0
    found |= {f"{OF_ALL}, once for every tile of {t} keys,": -(-m // t) for t in TILES}
    words = "the last tile of {} queries of the last sequence"
    found |= {words.format(t): final & (i // t == (n - 1) // t) for t in TILES}
    x = places_of(question)
    ends = [(by * x.j).max(axis=1, initial=-(2**40), where=x.right) for by in (1, -1)]
    for own, t in product(TILES, TILES):  # what a loop visits, from the first to the last key
        begins = i % own == 0
        last, first = (np.maximum.reduceat(end, np.flatnonzero(begins)) for end in ends)
        visits = np.where(last < 0, 0, last // t - -first // t + 1)[begins.cumsum() - 1]
        if not any(np.array_equal(visits, often) for often in found.values()):
            found[f"{OF_ALL}, once for every tile of {t} keys that {own} queries visit,"] = visits
    return {of: rows * (b >= 0) for of, rows in found.items()}
