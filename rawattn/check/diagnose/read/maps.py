"""Other heads of q, k or v than a query head's own: which ones."""

from dataclasses import dataclass

import numpy as np

from rawattn.check.diagnose.engine.attention import Context
from rawattn.check.diagnose.evidence.places import Places
from rawattn.check.diagnose.read.terms import Field

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Map:
    """of: "k", "q" or "v". heads (num_heads_q,): the head of it that each query head takes."""

    of: str
    heads: Array

    @property
    def text(self) -> str:
        what = {"k": "keys", "q": "queries", "v": "values"}[self.of]
        return f"query head h takes the {what} of head {of_heads(self.heads)}"

    def taken(self, c: Context, name: str) -> Array:
        """q, k or v of a view, by query head, with these heads of it, else with those it must."""
        rows, heads = (
            (c.view.rows, c.view.heads) if name == "q" else (c.view.keys, [c.view.head_kv])
        )
        heads = self.heads[c.view.heads] if name == self.of else heads
        array = np.asarray(getattr(c.question, name))[rows][:, heads]
        return np.asarray(array.astype(np.float64).swapaxes(0, 1))

    def Y(self, c: Context) -> Array:
        """The step with these heads."""
        return np.asarray(c.s * (self.taken(c, "q") @ self.taken(c, "k").swapaxes(1, 2)))

    def O(self, c: Context) -> Array:  # noqa: E743
        """The step with these heads."""
        return np.asarray(c.P @ self.taken(c, "v"))

    def dP(self, c: Context) -> Array:
        """The step with these heads."""
        return np.asarray(c.dO @ self.taken(c, "v").swapaxes(1, 2))


def map_of(field: Field, places: Places, S: Array) -> Map | None:
    """Which other heads the scores are of; ``field`` is log-weights less S."""
    q = places.question
    if q.softcap is not None:
        return None
    Q = q.scale * q.q.astype(np.float64).swapaxes(0, 1)
    K = q.k.astype(np.float64).swapaxes(0, 1)
    of_keys = np.einsum("hnd,kmd->khnm", Q, K)
    own = np.arange(q.num_heads_q) // q.group
    of_queries = of_keys[own].swapaxes(0, 1)
    for of, scores in (("k", of_keys), ("q", of_queries)):
        left = np.array([field.left_by_head(other - S) for other in scores])
        if (left.min(axis=0) <= 1).all():
            return Map(of, left.argmin(axis=0))
    return None


def of_heads(heads: Array) -> str:
    """A map from h to a head, as a formula or as a list."""
    h, top = np.arange(len(heads)), int(heads.max(initial=0)) + 1
    known = {"h": h, "0": 0 * h}
    known |= {f"h % {n}": h % n for n in range(2, top + 1)}
    known |= {f"h // {n}": h // n for n in range(2, len(heads) + 1)}
    known |= {f"(h {by:+}) % {len(heads)}": (h + by) % len(heads) for by in (1, -1)}
    known |= {f"{len(heads) - 1} - h": len(heads) - 1 - h}
    text = next((name for name, x in known.items() if np.array_equal(x, heads)), "")
    return text or ", ".join(map(str, heads))
