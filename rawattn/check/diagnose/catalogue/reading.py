"""How a bug reads or stores arrays at other places than it should, or reads others."""

from collections.abc import Callable, Collection, Mapping

import numpy as np

from rawattn.check.diagnose.catalogue.maps import STATISTICS, At, Map, geometry, taken
from rawattn.check.diagnose.engine.attention import (
    STEPS,
    Context,
    Floats,
    Step,
    Store,
    changed,
    deltas,
)

OPERANDS = {  # the names of contexts for those of arrays
    **{"q": "Q", "k": "K", "v": "V", "dout": "dO", "out": "O"},
    **{"lse": "L", "dlse": "dL", "delta": "other_D", "tq": "tQ", "tk": "tK", "tv": "tV"},
}
LIKE = {"Q": "q", "K": "k", "V": "v", "dO": "dout"}  # an array of the same columns


def reading(moved: Mapping[str, str], by: Map | None = None) -> dict[str, Step]:
    """``moved``: which array is read for which, each by a map."""

    def Y(c: Context) -> Floats:
        found = [(to, of_view(c, to, array_of(c, of), by)) for to, of in moved.items()]
        for to, x in found:
            setattr(c, OPERANDS[to], x)
        return np.asarray(STEPS["Y"](c))

    def D(c: Context) -> Floats:
        return np.asarray(c.other_D if "delta" in moved else STEPS["D"](c))

    return {"Y": Y, "D": D}


def array_of(c: Context, name: str) -> Floats:
    """All of an array that a context's stage is given."""
    if name == "delta":
        return deltas(c.question, c.given)
    given = {} if c.given is None else dict(zip(("out", "lse"), c.given, strict=True))
    return np.asarray(given[name] if name in given else getattr(c.question, name))


def right_delta(c: Context) -> Floats:
    return of_view(c, "delta", deltas(c.question, c.given))


def of_view(c: Context, name: str, x: Floats, by: Map | None = None) -> Floats:
    """A view's part of an array that is read as ``name``, by a map."""
    view, of_keys, number = c.view, name in ("k", "v", "tk", "tv"), name in STATISTICS
    rows, heads = (view.keys, np.array([view.head_kv])) if of_keys else (view.rows, view.heads)
    x = x.T[..., None] if number else x
    at = At(rows[:, None, None], heads[:, None], np.arange(x.shape[2]))
    found = taken(x, at if by is None else by.of(geometry(c.question, name), at))
    if of_keys:  # others may hold anything
        found[~(view.weight > 0).any(axis=(0, 1)) | (view.keys < 0)] = 0.0
        return np.asarray(c.r(found[:, 0]))
    found = found.swapaxes(0, 1)
    return found[..., 0] if number else np.asarray(c.r(found))


def in_product(step: str, operand: str, of: Callable[[Context], Floats]) -> dict[str, Step]:
    """One product with another operand."""
    return {step: lambda c: STEPS[step](changed(c, **{operand: of(c)}))}


def in_sequence(c: Context, x: Floats, by: Map, operand: str = "") -> Floats:
    """Rows of a view's sequence, (..., rows, columns), by a map of rows or columns; 0 where these
    rows have nothing."""
    rows = (c.view.keys if operand in ("K", "V") else c.view.rows)[:, None]
    g = geometry(c.question, LIKE.get(operand, "q"))
    at = by.of(g, At(rows, np.zeros((1, 1), dtype=int), np.arange(x.shape[-1])))
    i, j = np.broadcast_arrays(at.t - g.row(rows).start, at.j)
    inside = (i >= 0) & (i < len(rows)) & (j >= 0) & (j < x.shape[-1])
    return np.where(inside, x[..., np.where(inside, i, 0), np.where(inside, j, 0)], 0.0)


def stored(by: Map, names: Collection[str] = ()) -> Store:
    """Results, or some of them, by a map."""
    return lambda question, answers: {
        name: by.moved(geometry(question, name), x) if not names or name in names else x
        for name, x in answers.items()
    }
