"""Which pairs of queries and keys add nothing to gradients, told by the rows that are wrong. Where
the pairs are left out for which an integer feature is beyond a bound, just those rows are wrong
that have such a pair; the bounds with which they are the right ones are planted."""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain

import numpy as np

from rawattn.check.diagnose.catalogue.second_order import by_given_out
from rawattn.check.diagnose.catalogue.tiles import OPERANDS, RESULTS
from rawattn.check.diagnose.engine.attention import STEPS, Bug, Context, Floats, changed
from rawattn.check.diagnose.engine.question import by_rows, side_of
from rawattn.check.diagnose.evidence.places import Places, places_of
from rawattn.check.diagnose.evidence.rules import Span
from rawattn.check.diagnose.inferred.sample import Sample
from rawattn.check.diagnose.read.terms import of_view

GRADIENTS = ("dQ", "dK", "dV", "gQ", "gK", "gV")
OF_FIRST_PASS = ("e", "tO")  # of a double backward; what is wrong there is so in all gradients
WITH_FIRST_PASS = ((), ("gQ",), ("gK", "gV"), ("gQ", "gK", "gV"))
LOOP = re.compile(r"\((.*) of the (first|last) row of its tile of (\d+)(.*)\)")
PAIRS = 250_000  # of a problem, beyond which it is not looked at
Array = np.ndarray


def bugs(sample: Sample) -> Iterator[Bug]:
    """Bounds that are in no list, of the gradients that are wrong, or of loops that the first pass
    of a double backward shares with some."""
    first = any(RESULTS[step] & sample.wrong.keys() for step in OF_FIRST_PASS)
    told = OF_FIRST_PASS if first else GRADIENTS
    steps = [step for step in GRADIENTS if RESULTS[step] & sample.wrong.keys()]
    if sample.question.sparse or len(sample.question.q) * len(sample.question.k) > PAIRS:
        return
    places = places_of(sample.question)
    wrong = {side: _wrong(sample, side, told) for side in "qk"}
    if not steps or all(x is None or x.all() for x in wrong.values()):
        return
    sets = [(*told, *more) for more in WITH_FIRST_PASS] if first else [steps]
    said = set()
    for span in sorted(_spans(places, wrong), key=partial(_odd, places)):
        dropped = span.holds(places) & places.right
        if (key := dropped.tobytes()) in said or (dropped == places.right).all():
            continue
        said.add(key)
        for some in sets:
            of = [*chain(*(sorted(RESULTS[step] & sample.found.keys()) for step in some))]
            text = _words(span, places) + f", of {', '.join(of)}" * first
            planted = {step: partial(_without, span, step) for step in some}
            yield Bug("pairs-dropped", text, (sample.stage,), steps=planted)


def _odd(places: Places, span: Span) -> int:
    """Whether it is a bound of a loop that is not next to where it must be, of another side of the
    window, or of tiles that are not square."""
    if not (loop := LOOP.search(span.feature)):
        return 0
    of_right = (span.low is not None) == span.feature.startswith("j")
    due = f" {'+' if span.low is not None else '-'} window_{'right' if of_right else 'left'}"
    side = due * (places.question.mask_window[of_right] > 0)
    far, wide = 1 not in (span.low, -(span.high or 0)), f"// {loop[3]}" not in span.feature
    return 4 * far + 2 * (loop[4] != side) + wide


def _spans(places: Places, wrong: dict[str, Array | None]) -> Iterator[Span]:
    """Those of loops first; of equal lengths by words that hold on others."""
    for name in chain(places.loops, places.features):
        general = name.replace("(i of", "(p of").replace("(j of", "(j - p + i of")
        yield from _bounds(general if places.aligned else name, places, wrong)


def _words(span: Span, places: Places) -> str:
    """Of a bound; where lengths differ, whether it lacks the offset of the diagonal; of a loop
    where it ends."""
    at = {*re.findall(r"\w+", span.feature)} & {"i", "j", "p"}
    lacks = at == {"i", "j"} and not places.aligned
    text = f"those with {span}" + ", without seqlen_k - seqlen_q" * lacks
    if not (loop := LOOP.search(span.feature)) or _odd(places, span) > 3:
        return text
    own, other = ("queries", "keys") if span.feature.startswith("j") else ("keys", "queries")
    does = "starts" if span.low is None else "ends"
    where = f"where it does for the {loop[2]} one of a tile of {loop[3]} {own}"
    return f"the loop over {other} {does} {where}: {text}"


def _wrong(sample: Sample, side: str, told: Sequence[str]) -> Array | None:
    """Rows of q or of k of which a result is wrong, in any head; None without a wrong one."""
    found = []
    for name, noise in sample.wrong.items():
        if side_of(name) == side and any(name in RESULTS[step] for step in told):
            x, right = sample.found[name], by_rows(name, sample.truth[name])
            most = 4 * noise * np.sqrt(np.mean(right**2))
            found.append(~(np.abs(x - right).max(axis=(1, 2), initial=0.0) <= most))
    return np.logical_or.reduce(found) if found else None


def _bounds(name: str, places: Places, wrong: dict[str, Array | None]) -> Iterator[Span]:
    """Bounds of a feature beyond which the wrong rows, and no others, have pairs."""
    x = np.broadcast_to(places.feature(name), places.right.shape)
    for sign in (1, -1):
        beyond = np.where(places.right, sign * x.astype(float), -np.inf)
        low, high = -np.inf, np.inf
        for side, rows in wrong.items():
            if rows is not None:
                most = beyond.max(axis="qk".index(side) ^ 1, initial=-np.inf)
                low = max(low, most[~rows].max(initial=-np.inf))
                high = min(high, most[rows].min(initial=np.inf))
        for bound in {low + 1, high} if -np.inf < low < high < np.inf else ():
            yield Span(name, int(bound), None) if sign > 0 else Span(name, None, -int(bound))


def _without(span: Span, step: str, c: Context) -> Floats:
    kept = ~of_view(c, span.holds(places_of(c.question))[None])
    operands = {name: np.where(kept, getattr(c, name), 0.0) for name in OPERANDS[step]}
    right = by_given_out if step == "tO" else STEPS[step]  # e is known behind the loop
    return np.asarray(right(changed(c, **operands)))
