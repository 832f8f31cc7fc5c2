"""Where one side differs from the other: the pattern of the wrong rows."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rawattn.check.diagnose.engine.attention import views_of
from rawattn.check.diagnose.engine.question import OF_KEYS, OF_SLOTS, Question, side_of
from rawattn.check.diagnose.evidence.places import TILES, of_tiles
from rawattn.check.diagnose.evidence.rules import Shown, rules_of

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


def named(what: str, indices: Any) -> str:
    """ "sequence 1", "sequences 1, 3", "heads 2 to 7"."""
    numbers = np.array([*indices], dtype=int)
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    short = ([f"{x[0]} to {x[-1]}"] if len(x) > 2 else map(str, x) for x in runs)
    pieces = [piece for run in short for piece in run]
    if len(pieces) > 6:
        pieces = [*pieces[:6], f"... ({len(numbers)} of them)"]
    plural = "s" if what and len(numbers) > 1 else ""
    return f"{what}{plural} {', '.join(pieces)}".strip()


def where(question: Question, tensor: str, bad: Bools, among: Bools | bool = True) -> Iterator[str]:
    """Where the ``bad`` rows (tokens, heads) lie, told from all of ``among``, in sentences."""
    within = question.sequence_of(tensor)
    there, row = within >= 0, "key" if side_of(tensor) == "k" else "row"
    head = "kv head" if tensor in OF_KEYS else "selection head" if tensor in OF_SLOTS else "head"
    bad, heads = bad & there[:, None], bad.shape[1]
    if not bad.any():
        return
    if bad[there].all():
        yield f"every {row}"
        return
    of_heads, of_sequences = np.flatnonzero(bad.any(axis=0)), np.unique(within[bad.any(axis=1)])
    sequences = len(np.unique(within[there]))
    if len(of_heads) < heads:
        yield f"only {named(head, of_heads)} of {heads}"
    if len(of_sequences) < sequences:
        yield f"only {named('sequence', of_sequences)} of {sequences}"
    places = _Rows(question, tensor, heads)
    whole = np.broadcast_to(there[:, None] & among, bad.shape)
    touched = np.isin(within, of_sequences)[:, None] & np.isin(np.arange(heads), of_heads)[None]
    for domain, words in ((whole, ""), (touched & whole, "of these, ")):
        rule = next(rules_of(Shown(places, domain.T, bad.T)), None)
        if rule is not None and rule.spans:
            yield f"{words}the {row}s with {rule}"
            return
    every = bool((bad == touched).all())
    yield f"every {row} of these" if every else f"{bad.sum()} of {touched.sum()} {row}s"


class _Rows:
    """Rows of a tensor of so many heads, like ``Places``; features (1, rows) or (heads, rows)."""

    def __init__(self, question: Question, tensor: str, heads: int) -> None:
        q, side, h = question, side_of(tensor), np.arange(heads)[:, None]
        sequence, i, (count, seen) = q.sequence_of(side), q.place_of(side)[None], _reach(q)
        of_q, of_k = (np.asarray(x)[sequence][None] for x in (q.lengths_q, q.lengths_k))
        n, at, size = np.diff(q.offsets(side))[sequence], "ij"[side == "k"], f"seqlen_{side}"
        self.j = np.repeat(i, heads, axis=0)
        made = {at: i, f"{size} - 1 - {at}": n - 1 - i}
        if side == "k":
            made["whether a query sees it"] = seen.T.astype(int)
        elif heads == q.num_heads_q:
            made["keys seen"] = count.T
        made |= {"seqlen_q": of_q, "seqlen_k": of_k, "seqlen_k - seqlen_q": of_k - of_q}
        made["the sequence"] = sequence[None]
        if heads == q.num_heads_q and q.group > 1:
            made[f"h % {q.group}"] = h % q.group
        self.features: dict[str, Callable[[], Ints]]
        self.features = {name: partial(np.asarray, x) for name, x in made.items()}
        for t in TILES:
            self.features |= of_tiles(at, i, size, n, t)
        self.loops = dict[str, Callable[[], Ints]]()

    def feature(self, name: str) -> Ints:
        return self.features[name]()


def _reach(question: Question) -> tuple[Ints, Bools]:
    """How many keys queries see, (total_q, num_heads_q); which are seen (total_k, num_heads_kv)."""
    count = np.zeros(question.q.shape[:2], dtype=np.int64)
    seen = np.zeros(question.k.shape[:2], dtype=bool)
    for view in views_of(question):
        weight = np.broadcast_to(view.weight > 0, (len(view.heads), *view.weight.shape[1:]))
        count[np.ix_(view.rows, view.heads)] = weight.sum(axis=2).T
        seen[view.keys, view.head_kv] = weight.any(axis=(0, 1))
    return count, seen
