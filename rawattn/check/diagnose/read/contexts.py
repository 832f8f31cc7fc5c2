"""All pairs of a problem as one view, of which steps of the engine make what was read."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.attention import Bug, Same, View, exact, run_steps
from rawattn.check.diagnose.engine.steps import SCORES, STEPS, Context, Step, changed
from rawattn.check.diagnose.evidence.places import Array, Places, Right


def of_view(c: Context, whole: Array) -> Array:
    """Of (num_heads_q or 1, total_q, total_k) the part of a view."""
    heads = c.view.heads if len(whole) > 1 else np.zeros(1, dtype=int)
    return np.asarray(whole[np.ix_(heads, c.view.rows, np.maximum(c.view.keys, 0))])


def context_of(places: Places, S: Array) -> Context:
    """What steps take, as of one view that holds all: of all heads, also K and V, and of pairs that
    no query sees; with Y such that S (num_heads_q, total_q, total_k) are the scores."""
    q, (n, m) = places.question, places.j.shape
    rows, keys, heads = (np.arange(count) for count in (n, m, q.num_heads_q))
    view = View(0, rows, keys, heads, 0, np.ones((1, n, m)))
    c = SimpleNamespace(question=q, view=view, W=view.weight, s=q.scale, r=exact, o=exact, dL=0.0)
    c.Q = q.q.astype(np.float64).swapaxes(0, 1)
    c.K, c.V = (x.astype(np.float64).swapaxes(0, 1).repeat(q.group, axis=0) for x in (q.k, q.v))
    c.G = places.gates
    c.S, c.Y, c.cap = S, S / c.G, (S / c.G, 1.0)
    if q.softcap is not None:
        with np.errstate(divide="ignore", invalid="ignore"):
            c.Y = q.softcap * np.arctanh(c.Y / q.softcap)
        c.cap = c.cap[0], 1 - (c.cap[0] / q.softcap) ** 2
    return c


def backward_of(right: Right) -> Context:
    """The same with what a backward pass has before P."""
    c, q = context_of(right.places, right.S), right.places.question
    c.given = Same((right.out, right.lse))
    c.dO, c.O = (np.asarray(x, np.float64).swapaxes(0, 1) for x in (q.dout, right.out))
    c.L, c.dP, c.D = right.lse, c.dO @ c.V.mT, (c.dO * c.O).sum(axis=-1)
    c.sink = None if q.sinks is None else np.asarray(q.sinks, np.float64)[:, None]
    c.slope, c.dL = c.G * c.cap[1], np.zeros_like(c.D)
    return c


def scores_of(c: Context, steps: Mapping[str, Step]) -> Array:
    """The scores of a context that has Y, with these steps."""
    c = changed(c)
    with np.errstate(all="ignore"):
        run_steps(c, SCORES if "Y" in steps else SCORES[1:], Bug("", steps=steps))
    return np.asarray(c.S)


def capped(change: Callable[[Context, Array], Array]) -> dict[str, Step]:
    """Other scores, as constants for every derivative."""

    def cap(c: Context) -> Any:
        value, *derivatives = STEPS["cap"](c)
        return (change(c, value), *derivatives)

    return {"cap": cap}
