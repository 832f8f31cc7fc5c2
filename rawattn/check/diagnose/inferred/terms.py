"""Which terms of derivatives count otherwise than once, by least squares: results are linear in how
often each counts. And which pairs add nothing to gradients: where those beyond a bound of a feature
are left out, just the rows are wrong that have such a pair; bounds for which these are right ones
are planted. Long, since bugs of one pass are terms as well as pairs."""

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain, product

import numpy as np

from rawattn.check.diagnose.catalogue import first_order, second_order
from rawattn.check.diagnose.catalogue.inputs import of_view
from rawattn.check.diagnose.catalogue.second_order import by_given_out, of_one_pass, with_values
from rawattn.check.diagnose.catalogue.sparse import selection, walks
from rawattn.check.diagnose.catalogue.stages import OPERANDS, RESULTS
from rawattn.check.diagnose.engine.attention import FIRST, FORWARD, TILES, Bug, View, each, solve
from rawattn.check.diagnose.engine.question import Question, by_rows, side_of
from rawattn.check.diagnose.engine.steps import LOG2_E, STEPS, Context, Floats, Step, changed, times
from rawattn.check.diagnose.evidence.places import Places, places_of
from rawattn.check.diagnose.evidence.precision import finite
from rawattn.check.diagnose.evidence.structure import Span
from rawattn.check.diagnose.inferred.sample import Sample
from rawattn.check.diagnose.read import fields

NUMBERS = 20_000  # of a tensor that are looked at, about
NEAR, CLOSE = 1e-2, 1e-3  # of a factor to one that has a name; of what is off that may be left
CLEAR = 0.05  # of the square of what is off, where rounding leaves more than that nothing is read
STEP, TOLD = 1e-3, 1e-2  # of a factor of all scores; of what is off, that it may leave
MOST = 4  # bugs of one pass, for each tensor
EFFORT = 2000.0  # units, for bugs of one pass
OF_SCALE = ("constant-factor", "second-term-dropped")  # what softmax_scale may be a factor of
KNOWN: dict[str, Callable[[Question], float]] = {  # factors of terms
    "with the default softmax_scale": lambda q: q.q.shape[2] ** -0.5 / q.scale,
    **{"without s": lambda q: 1 / q.scale, "with s twice": lambda q: q.scale},
    **{"in base 2": lambda q: LOG2_E, "times ln 2": lambda q: 1 / LOG2_E},
    **{"with the wrong sign": lambda q: -1.0, "twice": lambda q: 2.0, "half of it": lambda q: 0.5},
}
OF_S = {*list(KNOWN)[:5]}
GRADIENTS = ("dQ", "dK", "dV", "gQ", "gK", "gV")
OF_FIRST_PASS = ("e", "tO")  # of a double backward; what is wrong there is so in all gradients
WITH_FIRST_PASS = ((), ("gQ",), ("gK", "gV"), ("gQ", "gK", "gV"))
LOOP = re.compile(r"\((.*) of the (first|last) row of its tile of (\d+)(.*)\)")
PAIRS = 250_000  # of a problem, beyond which it is not looked at


def single(sample: Sample) -> list[Bug]:
    """Bugs of one term; some tensors may tell other factors than others."""
    if sample.stage in FIRST and (of_scale := [*_of_scale(sample)]):
        return of_scale
    return [] if sample.stage == "forward" or not sample.wrong else _alone(sample)


def _of_scale(sample: Sample) -> Iterator[Bug]:
    """A factor of scores, or exponents, so near to 1 that results change in proportion to it."""
    made: dict[str, Callable[[float], dict[str, Step]]] = {}
    made["the scores are"] = lambda by: {"Y": lambda c: by * STEPS["Y"](c)}
    if sample.stage == "backward":
        made["S - lse is"] = lambda by: {
            "bP": with_values("bP", S=lambda c: by * c.S, L=lambda c: by * c.L)
        }
    for words, steps in made.items():
        one, due, by = sample.planted(Bug("", stages=FIRST, steps=steps(1 + STEP))), [], []
        for name in sample.wrong:
            right, there = by_rows(name, sample.truth[name]), np.isfinite(sample.found[name])
            there &= (sample.question.sequence_of(name) >= 0)[:, None, None] & np.isfinite(right)
            due.append((sample.found[name] - right)[there])
            by.append((by_rows(name, one[name]) - right)[there] / STEP)
        off, of = np.concatenate([*due, np.zeros(0)]), np.concatenate([*by, np.zeros(0)])
        factor = float(of @ off) / max(float(of @ of), 1e-30)
        left = np.linalg.norm(off - factor * of)
        if 0 < abs(factor) < STEP and left < TOLD * np.linalg.norm(off):
            text = f"{words} multiplied by {1 + factor:.10g}, as by log2(e) in too few digits"
            yield Bug("score-scale", text, FIRST, steps=steps(1 + factor))


def bugs(sample: Sample) -> Iterator[Bug]:
    """Of one pass of a double backward alone, or of the tangents of a jvp alone."""
    question, stage = sample.question, sample.stage
    if not sample.wrong:
        return
    first = bool({"ddout", "ddlse"} & sample.wrong.keys())
    if stage == "second":
        yield from _alone(sample, partial(of_one_pass, first=first))
    of_masks = _of_tangents(question) if stage == "jvp" else _of_masks(sample, first)
    yield from sample.near([of_masks], MOST, EFFORT)


def _listed(question: Question, lists: bool = False) -> Iterator[Bug]:
    """Who sees whom: listed bugs, and no mask in the tiles that are visited."""
    masked = question.mask_window != (-1, -1) and not question.sparse
    sizes = sorted(product(TILES, TILES), key=lambda two: max(two) // min(two))
    for tile, other in sizes[:13] if masked else ():  # square ones, and those twice as long
        text = f"all keys of tiles of {tile} queries and {other} keys in which some are seen"
        yield Bug("wrong-keys", text, see=each(_whole_tiles, tile, other))
    listed = selection.bugs(question) if question.sparse else first_order.bugs(question)
    of_lists = walks.cut(question, "dk dv") if question.sparse and lists else ()
    yield from (b for b in chain(listed, of_lists) if b.see is not None and b.stages != FORWARD)


def _whole_tiles(tile: int, other: int, _: Question, view: View) -> View:
    seen = view.weight > 0
    for axis, size in ((1, tile), (2, other)):
        count = seen.shape[axis]
        found = np.logical_or.reduceat(seen, np.arange(0, count, size), axis) if count else seen
        seen = found.take(np.arange(count) // size, axis)
    return replace(view, weight=seen.astype(np.float64))


def _of_masks(sample: Sample, first: bool) -> Iterator[Bug]:
    """Who sees whom in one pass alone, in the first one also in the products with E alone."""
    for bug in (b.at("second") for b in _listed(sample.question, "gk" in sample.wrong)):
        yield of_one_pass(bug, first)
        if first:
            by_out, of_E = (replace(bug, steps={**bug.steps, "tO": x}) for x in OF_E.values())
            yield from (of_one_pass(by_out, first), by_out)
            yield of_one_pass(replace(of_E, variant=bug.variant + [*OF_E][1]), first)


def _of_tangents(question: Question) -> Iterator[Bug]:
    """Who sees whom in the tangents alone, whose P is exp(S - lse) with the right lse; that of rows
    without keys may be there as it is, or a number."""
    for bug in _listed(question):
        for (more, step), none in product(OF_E.items(), (0.0, np.inf, -np.inf)):
            softmax = partial(_by_right_lse, none)
            steps: dict[str, Step] = {**bug.steps, "softmax": softmax, "tO": step}
            steps["O"] = lambda c: of_view(c, "out", _right(c.question)["out"])
            yield Bug(bug.name, bug.variant + more, ("jvp",), bug.see, steps)


def _by_right_lse(none: float, c: Context) -> tuple[Floats, Floats]:
    right = of_view(c, "lse", _right(c.question)["lse"])
    L = np.where(np.isneginf(right), none, right)[..., None]
    return right, np.where(np.isneginf(c.S), 0.0, np.exp(c.S - L))


_right = lru_cache(maxsize=4)(partial(solve, stage="forward"))


def _of_E_alone(c: Context) -> Floats:
    """The tangent of out whose P tV is of the right pairs alone."""
    right = c.P * fields.of_view(c, places_of(c.question).rights)
    return np.asarray(times(c.P * c.E, c.V) + times(right, c.tV) - c.e[..., None] * c.O)


OF_E: dict[str, Step] = {
    ", in the tangents alone": second_order.by_given_out,
    ", in the products with E alone": _of_E_alone,
}


def _alone(sample: Sample, plant: Callable[[Bug], Bug] = lambda bug: bug) -> list[Bug]:
    """What a wrong tensor is off by, at some places, as so many times what a term adds to it."""
    terms = [*second_order.terms(sample.question, sample.stage)]
    twice = (plant(Bug("", stages=(sample.stage,), steps=term.of(2.0))) for term in terms)
    added = [sample.planted(bug) for bug in twice]
    bugs: dict[str, Bug] = {}
    for tensor, noise in sample.wrong.items():
        found, right = sample.found[tensor], by_rows(tensor, sample.truth[tensor])
        there = np.isfinite(found) & np.isfinite(right)
        at = np.flatnonzero(there & (sample.question.sequence_of(tensor) >= 0)[:, None, None])
        at = at[:: max(1, len(at) // NUMBERS)]
        due, size = (found - right).ravel()[at], right.ravel()[at]
        allowed = max(float(noise**2 * (size @ size)), CLOSE**2 * float(due @ due))
        for term, one in zip(terms, added, strict=True) if allowed < CLEAR * due @ due else ():
            of = finite(by_rows(tensor, one[tensor]) - right).ravel()[at]
            by = float(of @ due) / float(of @ of) if of.any() else 0.0
            if due @ due - by * (of @ due) <= allowed:
                for bug in _told(sample, term, 1 + by):
                    bugs.setdefault(bug.name + bug.variant, plant(bug))
    return [*bugs.values()]


def _told(sample: Sample, term: second_order.Term, by: float) -> Iterator[Bug]:
    """What counts so often: a bug of each number that may be meant, as other questions have it."""
    q, stages = sample.question, (sample.stage,)
    near = {words: of for words, of in KNOWN.items() if abs(by / of(q) - 1) < NEAR}
    if abs(by) < NEAR:
        yield Bug(term.name, term.none, stages, steps=term.of(0.0))
    elif not near:
        yield Bug(term.other, f"{term.text}, times {fields.number(by)}", stages, steps=term.of(by))
    scale = "output-scale" if sample.stage == "backward" else "tangent-scale"
    name = scale if near.keys() & OF_S and term.other in OF_SCALE else term.other
    for words, of in near.items():
        yield Bug(name, f"{term.text} {words}", stages, steps=term.by(of))


def pairs_dropped(sample: Sample) -> Iterator[Bug]:
    """Bounds in no list, of gradients that are wrong, or of loops that a first pass shares."""
    first = any(RESULTS[step] & sample.wrong.keys() for step in OF_FIRST_PASS)
    told = OF_FIRST_PASS if first else GRADIENTS
    steps = [step for step in GRADIENTS if RESULTS[step] & sample.wrong.keys()]
    if sample.question.sparse or len(sample.question.q) * len(sample.question.k) > PAIRS:
        return
    places, wrong = places_of(sample.question), dict[str, np.ndarray]()  # rows of q, and of k
    for name in (n for n in sample.wrong if any(n in RESULTS[step] for step in told)):
        x, right = sample.found[name], by_rows(name, sample.truth[name])
        most, side = 4 * sample.wrong[name] * np.sqrt(np.mean(right**2)), side_of(name)
        off = ~(np.abs(x - right).max(axis=(1, 2), initial=0.0) <= most)
        wrong[side] = wrong.get(side, False) | off
    if not steps or all(rows.all() for rows in wrong.values()):
        return
    sets, sums = [(*told, *more) for more in WITH_FIRST_PASS] if first else [steps], {}
    for some in sets:
        of = chain(*(sorted(RESULTS[step] & sample.found.keys()) for step in some))
        sums[f", of {', '.join(of)}" * first] = {step: OPERANDS[step] for step in some}
    for text, (name, sites, _) in second_order.TERMS.items():
        if [second_order.SITES[site] for site in sites] == steps and not first:
            sums[f", of {text} alone"] = {steps[0]: {name}}
    said = set[bytes]()
    for span in sorted(_spans(places, wrong), key=partial(_odd, places)):
        dropped = span.holds(places) & places.right
        if (key := dropped.tobytes()) in said or (dropped == places.right).all():
            continue
        said.add(key)
        for text, by in sums.items():
            planted = {step: partial(_without, span, step, names) for step, names in by.items()}
            yield Bug("pairs-dropped", _words(span, places) + text, (sample.stage,), steps=planted)


def _odd(places: Places, span: Span) -> int:
    """Whether it is a bound of a loop that is not next to where it must be, of another side of the
    window, or of tiles that are not square; or of parts of a sequence."""
    if not (loop := LOOP.search(span.feature)):
        return 3 * ("ceil" in span.feature)
    of_right = (span.low is not None) == span.feature.startswith("j")
    due = f" {'+' if span.low is not None else '-'} window_{'right' if of_right else 'left'}"
    far, wide = 1 not in (span.low, -(span.high or 0)), f"// {loop[3]}" not in span.feature
    return 4 * far + 2 * (loop[4] != due * (places.question.mask_window[of_right] > 0)) + wide


def _words(span: Span, places: Places) -> str:
    """Of a bound; where lengths differ, whether it lacks the diagonal's offset; a loop's end."""
    lacks = {*re.findall(r"\b[ijp]\b", span.feature)} == {"i", "j"} and not places.aligned
    text = f"those with {span}" + ", without seqlen_k - seqlen_q" * lacks
    if not (loop := LOOP.search(span.feature)) or _odd(places, span) > 3:
        return text
    own, other = ("queries", "keys") if span.feature.startswith("j") else ("keys", "queries")
    does = "starts" if span.low is None else "ends"
    where = f"where it does for the {loop[2]} one of a tile of {loop[3]} {own}"
    return f"the loop over {other} {does} {where}: {text}"


def _spans(places: Places, wrong: dict[str, np.ndarray]) -> Iterator[Span]:
    """Bounds of features beyond which the wrong rows, and no others, have pairs, those of loops
    first; of equal lengths by words that hold on others."""
    for own in chain(places.loops, places.features):
        general = own.replace("(i of", "(p of").replace("(j of", "(j - p + i of")
        name = general if places.aligned else own
        x = np.broadcast_to(places.feature(name), places.right.shape)
        for sign in (1, -1):
            beyond = np.where(places.right, sign * x.astype(float), -np.inf)
            low, high = -np.inf, np.inf
            for side, rows in wrong.items():
                most = beyond.max(axis="qk".index(side) ^ 1, initial=-np.inf)
                low = max(low, most[~rows].max(initial=-np.inf))
                high = min(high, most[rows].min(initial=np.inf))
            for bound in {low + 1, high} if -np.inf < low < high < np.inf else ():
                yield Span(name, int(bound), None) if sign > 0 else Span(name, None, -int(bound))


def _without(span: Span, step: str, names: Collection[str], c: Context) -> Floats:
    """A step without these pairs in its operands; e is known behind the loop."""
    kept = ~fields.of_view(c, span.holds(places_of(c.question))[None])
    operands = {name: np.where(kept, getattr(c, name), 0.0) for name in names}
    return np.asarray((by_given_out if step == "tO" else STEPS[step])(changed(c, **operands)))
