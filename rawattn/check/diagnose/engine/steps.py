"""The equations of attention, a step each, as in ``reference``: X = Q K^T, Y = s X, S = G Y, t
for tangents. ``cap`` is Y behind a softcap, with its derivatives, P0 the weight of a sink."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from rawattn.reference.dense import capped, dead_to_inf

Floats = np.ndarray
Context = Any  # SimpleNamespace of a view's arrays, by the names of steps
Step = Callable[[Context], Any]
LOG2_E = 1 / math.log(2)


def row_max(c: Context) -> Floats:
    """The largest score of each row; 0 for one that sees nothing."""
    top: Floats = c.S.max(axis=-1, initial=-np.inf)
    return np.where(np.isneginf(top), 0.0, top)


def _softmax(c: Context) -> tuple[Floats, Floats]:
    """L and P of the rows of S; -inf and zeros for a row that sees nothing."""
    top = row_max(c)
    with np.errstate(divide="ignore"):
        L = np.log(np.exp(c.S - top[..., None]).sum(axis=-1)) + top
    L = L if c.sink is None else np.logaddexp(L, c.sink)
    return L, c.r(np.exp(c.S - dead_to_inf(np, L)[..., None]))


def sunk(value: Step) -> Step:
    return lambda c: 0.0 if c.sink is None else value(c)


def times(a: Floats, b: Floats) -> Floats:
    """a (heads, n, x) times b (x, y) as one product, which is faster, or times b (heads, x, y)."""
    if b.ndim == 3:
        return np.asarray(a @ b)
    product: Floats = a.reshape(math.prod(a.shape[:-1]), a.shape[-1]) @ b
    return product.reshape(*a.shape[:-1], b.shape[1])


STEPS: dict[str, Step] = {
    "Y": lambda c: c.r(c.s * c.r(times(c.Q, c.K.mT))),
    "cap": lambda c: capped(np, c.Y, c.question.softcap, c.r),
    "S": np.errstate(divide="ignore")(
        lambda c: np.where(c.W > 0, c.r(c.G * c.cap[0]) + np.log(c.W), -np.inf)
    ),
    "softmax": _softmax,
    "L": lambda c: c.softmax[0],
    "P": lambda c: c.softmax[1],
    "O": lambda c: c.r(times(c.o(c.P), c.V)),
    # backward, with the L and the O that it is given
    "bP": lambda c: c.r(np.exp(c.S - dead_to_inf(np, c.L)[..., None])),
    "dP": lambda c: c.r(times(c.dO, c.V.mT)),
    "D": lambda c: (c.dO * c.O).sum(axis=-1) - c.dL,
    "dS": lambda c: c.r(c.P * (c.dP - c.D[..., None])),
    "P0": sunk(lambda c: np.exp(c.sink - dead_to_inf(np, c.L))),
    "dY": lambda c: c.r(c.G * c.cap[1] * c.dS),
    "dQ": lambda c: c.r(c.s * c.r(times(c.o(c.dY), c.K))),
    "dK": lambda c: c.s * c.r(c.o(c.dY).mT @ c.Q),
    "dV": lambda c: c.r(c.o(c.P).mT @ c.dO),
    "sum_heads": lambda c: lambda x: c.r(x.sum(axis=0)),
    "dG": lambda c: c.dS * c.Y,
    "dsink": sunk(lambda c: -(c.P0 * c.D).sum(axis=-1)),
    # tangents in the direction (tQ, tK, tV, tG)
    "tY": lambda c: c.r(c.s * c.r(c.r(times(c.tQ, c.K.mT)) + c.r(times(c.Q, c.tK.mT)))),
    "E": lambda c: c.r(c.r(c.G * c.cap[1] * c.tY) + c.r(c.tG * c.Y)),
    "e": lambda c: (c.P * np.where(c.W > 0, c.E, 0.0)).sum(axis=-1) + c.P0 * c.tsink,
    "tP": lambda c: c.r(c.P * (c.E - c.e[..., None])),
    "tO": lambda c: c.r(c.r(times(c.o(c.tP), c.V)) + c.r(times(c.o(c.P), c.tV))),
    "tL": lambda c: c.e,
    # second derivatives
    "tdP": lambda c: c.r(times(c.dO, c.tV.mT)),
    "w": lambda c: (c.dO * c.tO).sum(axis=-1),
    "tdS": lambda c: c.r(c.r(c.tP * (c.dP - c.D[..., None])) + c.r(c.P * (c.tdP - c.w[..., None]))),
    "tdY": lambda c: c.r(
        (c.r(c.G * c.cap[1] * c.tdS) + c.r(c.tG * c.dS))
        + (0.0 if c.question.softcap is None else c.r(c.cap[2] * c.tY * c.dS))
    ),
    "gQ": lambda c: c.r(c.s * c.r(c.r(times(c.o(c.tdY), c.K)) + c.r(times(c.o(c.dY), c.tK)))),
    "gK": lambda c: c.s * c.r(c.r(c.o(c.tdY).mT @ c.Q) + c.r(c.o(c.dY).mT @ c.tQ)),
    "gV": lambda c: c.r(c.o(c.tP).mT @ c.dO),
    "gG": lambda c: c.tdS * c.Y + c.dS * c.tY,
    "gsink": sunk(lambda c: -(c.P0 * ((c.tsink - c.e) * c.D + c.w)).sum(axis=-1)),
}
OWN_P: dict[str, Step] = {"bP": lambda c: STEPS["softmax"](c)[1]}  # not from lse
SCORES = ("Y", "cap", "S")


def changed(c: Context, **changes: Any) -> Context:
    return SimpleNamespace(**(vars(c) | changes))
