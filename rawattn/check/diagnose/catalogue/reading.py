"""How a bug reads or stores arrays at other places than it should, or reads others."""

from collections.abc import Callable, Collection, Mapping
from functools import lru_cache

import numpy as np

from rawattn.check.diagnose.catalogue.maps import STATISTICS, Geometry, Map, geometry
from rawattn.check.diagnose.engine.attention import Same, Store, deltas, solve
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.engine.steps import STEPS, Context, Floats, Step

OPERANDS = {  # the names of contexts for those of arrays
    **{"q": "Q", "k": "K", "v": "V", "dout": "dO", "out": "O"},
    **{"lse": "L", "dlse": "dL", "delta": "other_D", "tq": "tQ", "tk": "tK", "tv": "tV"},
}
Way = Callable[[Map, Geometry, Floats, float], Floats]
ARRAYS = {operand: name for name, operand in OPERANDS.items()}
OF_KEYS = ("k", "v", "tk", "tv")


def reading(moved: Mapping[str, str], by: Map | None = None) -> dict[str, Step]:
    """``moved``: which array is read for which, each by a map. With out, dout is read so for D
    too; without it D was made before, and is right."""

    def Y(c: Context) -> Floats:
        for to, of in moved.items():
            setattr(c, OPERANDS[to], of_view(c, to, whole(c.question, c.given, to, of, by)))
        return np.asarray(STEPS["Y"](c))

    def D(c: Context) -> Floats:
        if "delta" in moved:
            return np.asarray(c.other_D)
        before = "dout" in moved and "out" not in moved
        return of_view(c, "delta", deltas(c.question, c.given)) if before else STEPS["D"](c)

    return {"Y": Y, "D": D}


@lru_cache(maxsize=16)
def whole(question: Question, given: Same | None, to: str, of: str, by: Map | None) -> Floats:
    x = array_of(question, given, of)
    return x if by is None else by.moved(geometry(question, to), x)


def array_of(question: Question, given: Same | None, name: str) -> Floats:
    if name == "delta":
        return deltas(question, given)
    if name in ("e", "w"):  # what a double backward keeps of its first pass
        first = solve(question, "second", given=given)
        inside, w = question.sequence_of("q") >= 0, np.zeros_like(first["ddlse"])
        w[:, inside] = (np.asarray(question.dout)[inside] * first["ddout"][inside]).sum(axis=-1).T
        return first["ddlse"] if name == "e" else w
    found = {} if given is None else dict(zip(("out", "lse"), given, strict=True))
    return np.asarray(found[name] if name in found else getattr(question, name))


def of_view(c: Context, name: str, x: Floats) -> Floats:
    """A view's part of an array that is read as ``name``."""
    view, heads = c.view, c.view.heads[:, None]
    if name in STATISTICS:
        return np.asarray(x[heads, view.rows], dtype=np.float64)
    if name not in OF_KEYS:
        return np.asarray(c.r(x[view.rows, heads].astype(np.float64)))
    of_key = x.shape[1] == c.question.num_heads_kv  # else of each query head
    found = x[view.keys, view.head_kv if of_key else heads].astype(np.float64)
    unseen = ~(view.weight > 0).any(axis=(0, 1)) | (view.keys < 0)  # may hold anything
    return np.asarray(c.r(np.where(unseen[:, None], 0.0, found)))


def taken(x: Floats, places: np.ndarray, axis: int, nothing: float = 0.0) -> Floats:
    """What is at these places of an axis; ``nothing`` where there are none."""
    inside = (places >= 0) & (places < x.shape[axis])
    found = np.moveaxis(x, axis, 0)[np.where(inside, places, 0)]
    found[~inside] = nothing
    return np.moveaxis(found, 0, axis)


def stored(by: Map, names: Collection[str] = (), rest: float = 0.0, way: Way = Map.moved) -> Store:
    """Results, or some of them, as a map has them in one of its ways; ``rest`` elsewhere."""
    return lambda question, answers: {
        name: way(by, geometry(question, name), x, rest) if not names or name in names else x
        for name, x in answers.items()
    }
