"""How a bug reads or stores arrays at other places than it should, or reads others."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from rawattn.check.diagnose.catalogue.maps import STATISTICS, Map, geometry
from rawattn.check.diagnose.engine.attention import Same, Store, View, deltas
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.engine.steps import STEPS, Context, Floats, Step, changed

OPERANDS = {  # the names of contexts for those of arrays
    **{"q": "Q", "k": "K", "v": "V", "dout": "dO", "out": "O"},
    **{"lse": "L", "dlse": "dL", "delta": "other_D", "tq": "tQ", "tk": "tK", "tv": "tV"},
}
LIKE = {"Q": "q", "K": "k", "V": "v", "dO": "dout", "O": "out"}  # an array of the same columns


def reading(moved: Mapping[str, str], by: Map | None = None) -> dict[str, Step]:
    """``moved``: which array is read for which, each by a map."""

    def Y(c: Context) -> Floats:
        found = {to: _whole(c.question, c.given, to, of, by) for to, of in moved.items()}
        for to, x in found.items():
            setattr(c, OPERANDS[to], of_view(c, to, x))
        return np.asarray(STEPS["Y"](c))

    def D(c: Context) -> Floats:
        return np.asarray(c.other_D if "delta" in moved else STEPS["D"](c))

    return {"Y": Y, "D": D}


@lru_cache(maxsize=16)
def _whole(question: Question, given: Same | None, to: str, of: str, by: Map | None) -> Floats:
    """All of the array ``of`` as it is read for ``to``."""
    x = array_of(question, given, of)
    return x if by is None else by.moved(geometry(question, to), x)


def array_of(question: Question, given: Same | None, name: str) -> Floats:
    """All of an array that a stage is given."""
    if name == "delta":
        return deltas(question, given)
    found = {} if given is None else dict(zip(("out", "lse"), given, strict=True))
    return np.asarray(found[name] if name in found else getattr(question, name))


def right_delta(c: Context) -> Floats:
    return of_view(c, "delta", deltas(c.question, c.given))


def of_view(c: Context, name: str, x: Floats) -> Floats:
    """A view's part of an array that is read as ``name``."""
    view, heads = c.view, c.view.heads[:, None]
    if name in STATISTICS:
        return np.asarray(x[heads, view.rows], dtype=np.float64)
    if name not in ("k", "v", "tk", "tv"):
        return np.asarray(c.r(x[view.rows, heads].astype(np.float64)))
    found = x[view.keys, view.head_kv].astype(np.float64)
    found[~(view.weight > 0).any(axis=(0, 1)) | (view.keys < 0)] = 0.0  # may hold anything
    return np.asarray(c.r(found))


def in_product(step: str, operand: str, of: Callable[[Context], Floats]) -> dict[str, Step]:
    """One product with another operand."""
    return {step: lambda c: STEPS[step](changed(c, **{operand: of(c)}))}


def by_single_heads(
    question: Question, views: tuple[View, ...], head_kv: Callable[[int], int] | None = None
) -> Sequence[View]:
    """A view for every query head: of its own key/value head, or of another one."""

    def one(view: View, i: int) -> View:
        own, heads = slice(i, i + 1), view.heads[i : i + 1]
        weight = view.weight[own] if len(view.weight) > 1 else view.weight
        slot, selections = (None if x is None else x[own] for x in (view.slot, view.selections))
        of = view.head_kv if head_kv is None else head_kv(int(heads[0]))
        found = replace(view, heads=heads, head_kv=of, weight=weight)
        return replace(found, slot=slot, selections=selections)

    return [one(view, i) for view in views for i in range(len(view.heads))]


def of_head(name: str, head: Callable[[int], int], c: Context) -> Floats:
    """An array of another head, in a view of a single one."""
    h = head(int(c.view.heads[0]))
    of = {"head_kv": h} if name in ("k", "v") else {"heads": np.array([h])}
    return of_view(
        changed(c, view=replace(c.view, **of)), name, array_of(c.question, c.given, name)
    )


def in_sequence(c: Context, x: Floats, by: Map, operand: str = "") -> Floats:
    """Rows of a view's sequence, (..., rows, columns), by a map of rows or columns; 0 where these
    rows have nothing."""
    rows, shape = c.view.keys if operand in ("K", "V") else c.view.rows, x.shape[-2:]
    g = geometry(c.question, LIKE.get(operand, "q"))
    at = by.of(replace(g, shape=(g.shape[0], 1, shape[1])))
    t, j = (np.broadcast_to(of, (g.shape[0], 1, shape[1]))[rows, 0] for of in (at.t, at.j))
    i = t - rows[0]
    inside = (i >= 0) & (i < shape[0]) & (j >= 0) & (j < shape[1])
    return np.where(inside, x[..., np.where(inside, i, 0), np.where(inside, j, 0)], 0.0)


def stored(by: Map, names: Collection[str] = ()) -> Store:
    """Results, or some of them, by a map."""
    return lambda question, answers: {
        name: by.moved(geometry(question, name), x) if not names or name in names else x
        for name, x in answers.items()
    }
