"""Tables of numbers of a pass, as they are and as they must be: what is wrong of them in the
shortest sequence that shows it, in words."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.evidence.structure import named

Array = np.ndarray
PIECES = 16  # of what is wrong, that are told


@dataclass(frozen=True)
class Table:
    """Numbers (heads, rows, columns) of a pass: as they are, and as they must be. side: whether
    rows are queries or keys; columns: what columns are, or what each one is. noise: of an entry,
    relative to it, or to a ``floor``, which is that part of the largest of its row."""

    name: str
    found: Array
    due: Array
    side: str
    columns: str | tuple[str, ...]
    noise: float
    floor: float = 1.0

    @property
    def row(self) -> str:
        return "ij"[self.side == "k"]

    @cached_property
    def off(self) -> Array:
        size = np.abs(np.where(np.isfinite(self.due), self.due, 0.0))
        row = size.max(axis=-1, keepdims=True, initial=0.0)
        least = max(float(row.mean()), 1e-3 * float(np.abs(self.found).max(initial=0.0)), 1e-30)
        with np.errstate(invalid="ignore"):
            allowed = self.noise * np.maximum(size, self.floor * np.maximum(row, least))
            close = np.abs(self.found - self.due) <= allowed
        return np.asarray(~(close | (self.found == self.due)))

    def column(self, places: Any) -> str:
        """What some columns are called."""
        if isinstance(self.columns, str):
            return f"{self.columns} = {named('', places)}"
        return ", ".join(self.columns[place] for place in places)


def told(of: Table, question: Question) -> str:
    """What is wrong of a table, row by row, in one sequence and head; "" if nothing is."""
    within, lengths = question.sequence_of(of.side), np.add(question.lengths_q, question.lengths_k)
    rows = np.flatnonzero(of.off.any(axis=(0, 2)) & (within >= 0))
    if not rows.size:
        return ""
    b = min(within[rows], key=lambda b: lengths[b])
    rows = np.flatnonzero(within == b)
    heads = np.flatnonzero(of.off[:, rows].any(axis=(1, 2)))
    head, off = int(heads[0]), of.off[heads[0], rows]
    first = int(question.offsets("k")[b]) if of.columns == "j" else 0
    pieces, lists = dict[str, list[int]](), question.block_indices
    for row in rows[off.any(axis=1)]:
        text = _told_of_row(of, head, int(row), first)
        if lists is not None and of.side == "q":
            listed = lists[row, head * lists.shape[1] // question.num_heads_q]
            text += f" (its blocks {', '.join(map(str, listed))})"
        pieces.setdefault(text, []).append(int(row - rows[0]))
    said = [f"{of.row} = {named('', places)}: {text}" for text, places in pieces.items()]
    more = len(said) - PIECES
    said = [*said[:PIECES], f"... ({more} more)"] if more > 0 else said
    which = f" of head {head}" * (len(of.off) > 1)
    like = len(heads) > 1 and bool((of.off[np.ix_(heads, rows)] == off).all())
    which += f" ({named('head', heads[1:])} alike)" * like
    n, m = question.lengths_q[b], question.lengths_k[b]
    which += f", sequence {b} (seqlen_q {n}, seqlen_k {m})," * (question.batch > 1)
    count = f" at {np.count_nonzero(off)} of {off.size} places" * (off.size > 1)
    few = np.flatnonzero(off.any(axis=0))
    if np.count_nonzero(off.any(axis=1)) > 2 and 2 * len(few) < off.shape[1]:
        count += f", all of {of.column(few - first)}"
    return f"{of.name}{which} is wrong{count}: {'; '.join(said)}"


def _told_of_row(of: Table, head: int, row: int, first: int) -> str:
    """What a row holds in its wrong columns: nothing, multiples of what is due, other numbers.
    first: the column that is called 0."""
    columns = np.flatnonzero(of.off[head, row])
    if of.columns == "column":
        return _other_row(of, head, row, columns)
    found, due = of.found[head, row, columns], of.due[head, row, columns]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(np.abs(due) > of.noise * np.abs(due).max(), found / due, np.nan)
    said, left = [], np.ones(len(columns), dtype=bool)
    for n in range(len(columns)):
        if not left[n]:
            continue
        same = (found == found[n]) | (np.isnan(found) & np.isnan(found[n]))
        times = np.abs(ratio - ratio[n]) <= max(1e-3, of.noise) * abs(ratio[n])
        alike = left & (same if found[n] == 0 or np.count_nonzero(left & same) > 2 else times)
        alike[n], many = True, np.count_nonzero(alike)
        if same[alike].all() and (many > 1 or not found[n]):
            said.append(f"{of.column(columns[alike] - first)} is {found[n]:.4g}")
        elif many > 2 or (many == 2 and len(columns) == 2):
            said.append(f"{of.column(columns[alike] - first)} is {ratio[n]:.4g} times what is due")
        else:
            alike = np.arange(len(columns)) == n
            said.append(_told_of_one(of, head, row, int(columns[n]), first))
        left &= ~alike
    return ", ".join(said)


def _told_of_one(of: Table, head: int, row: int, column: int, first: int) -> str:
    """One entry, and where else what it holds must stand."""
    found, due = of.found[head, row, column], of.due[head, row, column]
    near, other = np.argwhere(np.abs(of.due - found) <= 1e-2 * of.noise * abs(found)), ""
    if found and len(near) == 1:
        h, i, j = map(int, near[0])
        parts = [f"head {h}"] * (h != head) + [f"{of.row} {i - row:+d}"] * (i != row)
        parts += [of.column([j - first])] * (j != column)
        other = f" (due at {', '.join(parts)})"
    return f"{of.column([column - first])} is {found:.4g}, not {due:.4g}{other}".strip()


def _other_row(of: Table, head: int, row: int, columns: Array) -> str:
    """What a row of a result holds: another one's, or numbers that are not due anywhere."""
    found = of.found[head, row]
    size = np.abs(found).max(initial=0.0)
    near = np.abs(of.due - found)[..., columns].max(axis=-1) <= of.noise * size
    if np.count_nonzero(near) == 1:
        h, i = np.argwhere(near)[0]
        parts = [f"head {h}"] * int(h != head) + [f"{of.row} {i - row:+d}"] * int(i != row)
        return f"is that of {', '.join(parts)}"
    if not np.isfinite(found[columns]).all():
        return "is not finite"
    off = np.abs(found - of.due[head, row]).max(initial=0.0)
    return f"is other numbers, by up to {off:.3g} off of {np.abs(of.due[head, row]).max():.3g}"
