"""Who sees whom, of every row: how many keys, and which one where it is one alone."""

import numpy as np
import numpy.typing as npt

from rawattn.check.diagnose.engine.attention import views_of
from rawattn.check.diagnose.engine.question import Question

Float64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


class Reach:
    """count, first, key (total_q, num_heads_q): the number of keys that a query sees, the first of
    them, -1 for none, and the same where it is the only one, else -1. seen (total_k,
    num_heads_kv): by any query.
    """

    def __init__(self, question: Question) -> None:
        q = self.question = question
        self.count, self.first = (np.zeros(q.q.shape[:2], dtype=np.int64) for _ in range(2))
        self.first -= 1
        self.seen = np.zeros(q.k.shape[:2], dtype=bool)
        for view in views_of(q):
            weight = np.broadcast_to(view.weight > 0, (len(view.heads), *view.weight.shape[1:]))
            if not weight.shape[2]:
                continue
            at = np.ix_(view.rows, view.heads)
            self.count[at] = weight.sum(axis=2).T
            first = view.keys[weight.argmax(axis=2)]
            self.first[at] = np.where(weight.any(axis=2), first, -1).T
            self.seen[view.keys, view.head_kv] = weight.any(axis=(0, 1))
        self.key = np.where(self.count == 1, self.first, -1)
