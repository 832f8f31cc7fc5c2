"""Scores of other heads of q or k: which ones."""

from dataclasses import dataclass

import numpy as np

from rawattn.check.diagnose.engine.attention import Context
from rawattn.check.diagnose.evidence.places import Places
from rawattn.check.diagnose.read.terms import Field

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Map:
    """of: "k" or "q". heads (num_heads_q,): the head of it that each query head takes."""

    of: str
    heads: Array

    @property
    def text(self) -> str:
        what = "keys" if self.of == "k" else "queries"
        return f"query head h takes the {what} of head {of_heads(self.heads)}"

    def Y(self, c: Context) -> Array:
        """The step with these heads."""
        q, k = (x.astype(np.float64) for x in (c.question.q, c.question.k))
        found = []
        for h in c.view.heads:
            of_q, of_k = (self.heads[h], c.view.head_kv) if self.of == "q" else (h, self.heads[h])
            found.append(c.s * (q[c.view.rows, of_q] @ k[c.view.keys, of_k].T))
        return np.stack(found)


def map_of(field: Field, places: Places, S: Array) -> Map | None:
    """Which other heads the scores are of; ``field`` is log-weights less S."""
    q = places.question
    if q.softcap is not None:
        return None
    Q = q.scale * q.q.astype(np.float64).swapaxes(0, 1)
    K = q.k.astype(np.float64).swapaxes(0, 1)
    logs = np.where(field.there, field.x + S, 0.0)
    of_keys = np.einsum("hnd,kmd->hknm", Q, K)
    own = np.arange(q.num_heads_q) // q.group
    of_queries = of_keys[:, own].swapaxes(0, 1)
    for of, scores in (("k", of_keys), ("q", of_queries)):
        heads = _best(field, logs, scores)
        if heads is not None:
            return Map(of, heads)
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


def _best(field: Field, logs: Array, scores: Array) -> Array | None:
    """For every head the other head whose scores (heads, others, total_q, total_k) are in it."""
    found = []
    for h in range(len(logs)):
        part = Field(logs[h : h + 1], field.there[h : h + 1], field.by_row, field.noise)
        left = [part.left(other[None]) for other in scores[h]]
        if min(left) > 1:
            return None
        found.append(int(np.argmin(left)))
    return np.array(found)
