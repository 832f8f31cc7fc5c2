"""Rows of a tensor, one for each head: whom they see, and what rules of them are made of."""

from collections.abc import Callable
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rawattn.check.diagnose.engine.attention import views_of
from rawattn.check.diagnose.engine.question import Question, side_of
from rawattn.check.diagnose.evidence.places import TILES, of_tiles

Array = np.ndarray
Float64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


class Rows:
    """Of a tensor of so many heads, like ``Places``: (1, rows) or (heads, rows)."""

    def __init__(self, question: Question, tensor: str, heads: int) -> None:
        self.question, self.side, self.heads = question, side_of(tensor), heads
        self.b = question.sequence_of(self.side)
        self.j = np.repeat(question.place_of(self.side)[None], heads, axis=0)

    @cached_property
    def features(self) -> dict[str, Callable[[], Array]]:
        q, b, h, i = self.question, self.b, np.arange(self.heads)[:, None], self.j[:1]
        reach, (of_q, of_k) = Reach(q), (np.asarray(x)[b][None] for x in (q.lengths_q, q.lengths_k))
        n, at, size = (
            np.diff(q.offsets(self.side))[b],
            "ij"[self.side == "k"],
            f"seqlen_{self.side}",
        )
        found: dict[str, Callable[[], Array]] = {
            at: lambda: i,
            f"{size} - 1 - {at}": lambda: n - 1 - i,
        }
        if self.side == "k":
            found["whether a query sees it"] = lambda: reach.seen.T.astype(int)
        elif self.heads == q.num_heads_q:
            found["keys seen"] = lambda: reach.count.T
        found |= {"seqlen_q": lambda: of_q, "seqlen_k": lambda: of_k}
        found |= {"seqlen_k - seqlen_q": lambda: of_k - of_q, "the sequence": lambda: b[None]}
        if self.heads == q.num_heads_q and q.group > 1:
            found[f"h % {q.group}"] = lambda: h % q.group
            other = f"whether h % {q.num_heads_kv} is not h // {q.group}"
            found[other] = lambda: (h % q.num_heads_kv != h // q.group).astype(int)
        for t in TILES:
            found |= of_tiles(at, i, size, n, t)
        return found

    @property
    def loops(self) -> dict[str, Callable[[], Array]]:
        return {}

    def feature(self, name: str) -> Array:
        return np.asarray(self.features[name]())


class Reach:
    """count, key (total_q, num_heads_q): the number of keys that a query sees, and which one where
    it is one alone, else -1. seen (total_k, num_heads_kv): by any query."""

    def __init__(self, question: Question) -> None:
        q = self.question = question
        self.count, first = (np.zeros(q.q.shape[:2], dtype=np.int64) for _ in range(2))
        self.seen = np.zeros(q.k.shape[:2], dtype=bool)
        for view in views_of(q):
            weight = np.broadcast_to(view.weight > 0, (len(view.heads), *view.weight.shape[1:]))
            if not weight.shape[2]:
                continue
            at = np.ix_(view.rows, view.heads)
            self.count[at] = weight.sum(axis=2).T
            first[at] = view.keys[weight.argmax(axis=2)].T
            self.seen[view.keys, view.head_kv] = weight.any(axis=(0, 1))
        self.key = np.where(self.count == 1, first, -1)
