"""Which listed bug gives the weights that were read of block-sparse attention."""

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import numpy as np

from rawattn.check.diagnose.catalogue.sparse import selection
from rawattn.check.diagnose.engine.attention import NO_BUG, Bug, View, exact, per_key, views_of
from rawattn.check.diagnose.engine.steps import STEPS, changed
from rawattn.check.diagnose.evidence.places import Array, Places, log_sum
from rawattn.check.diagnose.read.probe import Weights
from rawattn.reference.dense import dead_to_inf

SITES = {"S", "dY", "E", "tdY"}  # steps that have the factors of scores
NOISE = 8  # times what log-weights may be off by


def bugs_of(read: Weights, again: Callable[[], Weights]) -> Iterator[Bug]:
    """Those that give all weights on both problems; none where they are right."""
    views = views_of(read.places.question)
    wrong = [view for view in views if not _fits(NO_BUG, read, [view])]
    if not wrong:
        return
    first = min(wrong, key=lambda view: abs(len(view.rows) * len(view.keys) - 1000))
    for bug in selection.of_weights(read.places.question):
        of_scores = bug.steps.keys() <= SITES and (bug.see or "S" in bug.steps)
        if not of_scores or not _fits(bug, read, [first]):
            continue
        if all(_fits(bug, x, views_of(x.places.question)) for x in (read, again())):
            yield bug


def scores_of(
    bug: Bug, places: Places, S: Array, views: Sequence[View] | None = None
) -> tuple[Array, Array]:
    """The scores (num_heads_q, total_q, total_k) with a bug, -inf of what nobody sees, and their
    factors, for the right scores ``S``. Raises ValueError where it sees what is no key."""
    q = places.question
    views = tuple(views_of(q) if views is None else views)
    right, found, gates = places.gates, np.full(S.shape, -np.inf), np.ones(S.shape)
    for view in views if bug.see is None else bug.see(q, views):
        if (view.keys < 0).any():
            raise ValueError("it sees rows of zeros")
        at = np.ix_(view.heads, view.rows, view.keys)
        c = SimpleNamespace(question=q, view=view, W=view.weight, r=exact, dS=1.0)
        c.cap = S[at] / np.broadcast_to(right, S.shape)[at], 1.0
        c.G = per_key(view, q.block_scale, 1.0)
        step, of = (bug.steps.get(name, STEPS[name]) for name in ("S", "dY"))
        np.logaddexp.at(found, at, step(c))
        gates[at] = np.where(view.weight > 0, of(changed(c)), gates[at])
    return found, gates


def _fits(bug: Bug, read: Weights, views: Sequence[View]) -> bool:
    """Whether these are the weights of ``views``."""
    try:
        S, _ = scores_of(bug, read.places, read.right.S, views)
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
