"""How a bug reads other arrays than it should: inputs and row statistics, by their names."""

from collections.abc import Callable, Mapping

import numpy as np

from rawattn.check.diagnose.engine.attention import STEPS, Context, Floats, Step

Arrays = dict[str, Floats]  # by their names
OPERANDS = {"q": "Q", "k": "K", "v": "V", "dout": "dO", "out": "O", "lse": "L", "dlse": "dL"}


def reading(of: Callable[[Context, Arrays], Mapping[str, Floats]]) -> dict[str, Step]:
    """Other arrays than there should be, by the names of ``OPERANDS`` and delta; ``of`` makes them
    of the right ones."""

    def Y(c: Context) -> Floats:
        for name, x in of(c, arrays_of(c)).items():
            setattr(c, OPERANDS.get(name, "other_D"), of_view(c, name, x))
        return np.asarray(STEPS["Y"](c))

    def D(c: Context) -> Floats:
        return np.asarray(c.other_D if hasattr(c, "other_D") else STEPS["D"](c))

    return {"Y": Y, "D": D}


class _Arrays(Arrays):
    """delta is made when it is asked for."""

    def __init__(self, c: Context) -> None:
        super().__init__()
        self.c = c

    def __missing__(self, name: str) -> Floats:
        if name != "delta":
            raise KeyError(name)
        return delta_of(self.c)


def arrays_of(c: Context) -> Arrays:
    question = c.question
    found = _Arrays(c)
    found |= {"q": question.q, "k": question.k, "v": question.v}
    if question.dout is not None:
        found["dout"] = question.dout
    if question.dlse is not None:
        found["dlse"] = question.dlse
    if c.given is not None:
        found["out"], found["lse"] = c.given
    return found


def delta_of(c: Context) -> Floats:
    """D of all rows, (num_heads_q, total_q)."""
    question = c.question
    dout, out = (np.asarray(x).astype(np.float64) for x in (question.dout, c.given[0]))
    with np.errstate(invalid="ignore"):
        found: Floats = (dout * out).sum(axis=-1).T
    return found if question.dlse is None else found - question.dlse


def of_view(c: Context, name: str, x: Floats) -> Floats:
    view = c.view
    rows, heads = view.rows[None, :], view.heads[:, None]
    if name in ("lse", "dlse", "delta"):
        return np.asarray(x[heads, rows], dtype=np.float64)
    if name not in ("k", "v"):
        return np.asarray(c.r(np.asarray(x[rows, heads], dtype=np.float64)))
    there = (view.weight > 0).any(axis=(0, 1)) & (view.keys >= 0)
    found = np.zeros((len(view.keys), x.shape[2]))
    found[there] = x[view.keys[there], view.head_kv]
    return np.asarray(c.r(found))


def right_delta(c: Context) -> Floats:
    return of_view(c, "delta", delta_of(c))


def exchanged(moved: Mapping[str, str]) -> dict[str, Step]:
    """``moved``: which array is read for which."""
    return reading(lambda c, arrays: {to: arrays[of] for to, of in moved.items()})


def rearranged(names: tuple[str, ...], change: Callable[[str, Floats], Floats]) -> dict[str, Step]:
    return reading(lambda c, arrays: {name: change(name, arrays[name]) for name in names})
