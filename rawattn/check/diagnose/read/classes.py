"""What a wrong mask that was read is called: by the windows that people take for the right one, and
by which keys there are too many, or too few, of."""

import numpy as np

from rawattn.check.diagnose.catalogue.masks import Window, unmasked, windows
from rawattn.check.diagnose.engine.attention import TILES
from rawattn.check.diagnose.evidence.places import Places
from rawattn.check.diagnose.evidence.support import LESS, MORE, OTHER, Support

BACKWARD_ONLY = "mask-missing-in-backward"
TAILS = ("j - seqlen_k // ", "i - seqlen_q // ")  # places behind the last whole tile


def class_of(support: Support, alive: np.ndarray, *, backward: bool) -> str:
    """The class of a mask of out, or of dv. alive: rows (num_heads_q, total_q) that were read."""
    places, dense = support.places, not support.places.question.sparse
    lost, due = support.inside(LESS), places.rights & alive[..., None]
    if support.of_rows:
        name = "rows-not-written" if support.plain else "unknown"
        return of_pairs(places, lost, due) if backward else name
    if dense:
        known = [(BACKWARD_ONLY, window) for _, window in unmasked(places.question) if backward]
        known += [(name, window) for name, _, window in windows(places.question)]
        for name, window in known:
            if _is(support, window, alive):
                return name
    kinds = {part.kind for part in support.parts}
    if kinds == {OTHER}:
        own = places.question.sequence_of("k")[None] == places.b
        return "neighbour-leak" if (support.inside(OTHER) & ~own).any() else "seqused-ignored"
    spans = [span for part in support.parts if part.rule for span in part.rule.spans]
    if backward and kinds == {LESS} and dense:
        return of_pairs(places, lost, due)
    by_distance = support.named and {span.feature for span in spans} in ({"j - i"}, {"j - p"})
    if backward and kinds == {MORE} and dense and not by_distance:
        return BACKWARD_ONLY
    if spans and all(x.feature.startswith(TAILS) and x[1:] == (0, None) for x in spans):
        return "tail-tile-dropped"
    one = [span.feature for span in spans if span.low == span.high and "ceil" not in span.feature]
    of_tile = len(spans) == len(one) == 1 and one[0].startswith(("j //", "(seqlen_k - 1) //"))
    return "tile-skipped" if kinds == {LESS} and of_tile else "wrong-keys"


def of_pairs(x: Places, lost: np.ndarray, due: np.ndarray) -> str:
    """What ``lost`` pairs of a gradient are called, both (num_heads_q, total_q, total_k)."""
    for tile in TILES:
        for tail in (x.i >= x.n // tile * tile, x.j >= x.m // tile * tile):
            if np.array_equal(due & tail, due & lost):
                return "tail-tile-dropped"
    return "pairs-dropped"


def _is(support: Support, window: Window, alive: np.ndarray) -> bool:
    """Whether it is that window in all heads that are wrong."""
    x, seen = support.places, support.seen > 0
    rows = alive[..., None] & (x.b >= 0)
    due = window.holds(x.j - x.p, x.j - x.i) & x.own
    heads = ((seen != x.right) & rows).any(axis=(1, 2))
    return bool(((seen == due) | ~rows)[heads].all())
