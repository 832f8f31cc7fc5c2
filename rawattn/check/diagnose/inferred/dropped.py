"""Which pairs of queries and keys add nothing to gradients, told by the rows that are wrong. Where
the pairs are left out for which an integer feature is beyond a bound, just those rows are wrong
that have such a pair; the bounds with which they are the right ones are planted."""

import re
from collections.abc import Iterator
from functools import partial
from itertools import chain

import numpy as np

from rawattn.check.diagnose.catalogue.tile_sums import OPERANDS, RESULTS
from rawattn.check.diagnose.engine.attention import Bug
from rawattn.check.diagnose.engine.question import by_rows, side_of
from rawattn.check.diagnose.engine.steps import STEPS, Context, Floats, changed
from rawattn.check.diagnose.evidence.places import Places, places_of
from rawattn.check.diagnose.evidence.rules import Span
from rawattn.check.diagnose.inferred.sample import Sample
from rawattn.check.diagnose.read.contexts import of_view

GRADIENTS = ("dQ", "dK", "dV", "gQ", "gK", "gV")
PAIRS = 250_000  # of a problem, beyond which it is not looked at
Array = np.ndarray


def bugs(sample: Sample) -> Iterator[Bug]:
    """Bounds that are in no list, of the gradients that are wrong."""
    steps = [step for step in GRADIENTS if RESULTS[step] & sample.wrong.keys()]
    if sample.question.sparse or len(sample.question.q) * len(sample.question.k) > PAIRS:
        return
    places = places_of(sample.question)
    wrong = {side: _wrong(sample, side) for side in "qk"}
    if not steps or all(x is None or x.all() for x in wrong.values()):
        return
    said = set()
    for name in chain(places.features, places.loops):
        for span in _bounds(name, places, wrong):
            dropped = span.holds(places) & places.right
            if (key := dropped.tobytes()) not in said and not (dropped == places.right).all():
                said.add(key)
                planted = {step: partial(_without, span, step) for step in steps}
                yield Bug("pairs-dropped", _words(span, places), (sample.stage,), steps=planted)


def _words(span: Span, places: Places) -> str:
    """Of a bound; where lengths differ, whether it lacks the offset of the diagonal."""
    at = {*re.findall(r"\w+", span.feature)} & {"i", "j", "p"}
    lacks = at == {"i", "j"} and not places.aligned
    return f"those with {span}" + ", without seqlen_k - seqlen_q" * lacks


def _wrong(sample: Sample, side: str) -> Array | None:
    """Rows of q or of k of which a gradient is wrong, in any head; None without a wrong one."""
    found = []
    for name, noise in sample.wrong.items():
        if side_of(name) == side and any(name in RESULTS[step] for step in GRADIENTS):
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
    return np.asarray(STEPS[step](changed(c, **operands)))
