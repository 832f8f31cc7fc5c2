"""What was read of a pass as tables beside what is due, in the order of its steps; what is wrong of
one in words, in the shortest sequence that shows it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.evidence.structure import named
from rawattn.check.diagnose.read.fields import rows_of
from rawattn.check.diagnose.read.probe import Backward, Weights

Array = np.ndarray
Whose = Callable[[int, int, int], str]  # of a head, a row and a column
OFF = 8.0  # units of noise
SMALL = 1e-4  # of a row's largest weight: less tells nothing
SURE = 1e-3  # noise with which one number tells whose it is
PIECES, HEADS = 16, 4  # of what is wrong of a head, and heads that are not alike, that are told
ROW = ("it",)  # the columns of a table of one number a row
ROWS = {"q": "i", "k": "j"}  # what rows of a side are called


@dataclass(frozen=True)
class Table:
    """Numbers (heads, rows, columns) of a pass: as they are, and as they must be. side: whether
    rows are queries or keys; columns: what columns are, or what each one is. noise: of an entry,
    relative to it, or to a ``floor``, which is that part of the largest of its row. free: what
    stands where nothing is due but a pair is seen. whose: what an entry is, in words, or ""."""

    name: str
    found: Array
    due: Array
    side: str
    columns: str | tuple[str, ...]
    noise: float
    floor: float = 1.0
    free: Array | None = None
    whose: Whose | None = None

    @cached_property
    def off(self) -> Array:
        size = np.abs(np.where(np.isfinite(self.due), self.due, 0.0))
        row = size.max(axis=-1, keepdims=True, initial=0.0)
        least = max(float(row.mean()), 1e-3 * float(np.abs(self.found).max(initial=0.0)), 1e-6)
        with np.errstate(invalid="ignore"):
            allowed = self.noise * np.maximum(size, self.floor * np.maximum(row, least))
            close = np.abs(self.found - self.due) <= allowed
        close &= (self.found != 0) | (size < 1e-2 * allowed)  # nothing, where little is due
        return np.asarray(~(close | (self.found == self.due)))

    def called(self, places: Any) -> str:
        if isinstance(self.columns, str):
            return f"{self.columns} = {named('', places)}"
        return ", ".join(self.columns[place] for place in places)


def tables_of(read: Weights | Backward) -> Iterator[Table]:
    """Scores, weights and row sums of a forward pass; P and dS of a backward pass."""
    if isinstance(read, Backward):
        yield from _of_backward(read)
        return
    S, L, rights = read.right.S, read.right.lse[..., None], read.places.rights
    noise = OFF * read.noise
    P = Table("P", read.P, _weights(S, L, rights), "q", "j", noise, SMALL)
    if read.lse is None:
        yield P
        return
    with np.errstate(invalid="ignore", over="ignore"):
        free, sums = np.where(read.places.own, np.exp(S), np.nan), np.exp(read.lse)[..., None]
        due = _weights(S, 0 * L, rights)
        bare = Table("exp(S)", read.P * sums, due, "q", "j", noise, SMALL, free)
        summed = Table("the row sum of exp(S)", sums, np.exp(L), "q", ROW, noise)
    of_P, of_bare = (np.count_nonzero(one.off) for one in (P, bare))
    if of_P and summed.off.any():
        yield from (summed, P) if not of_bare else (bare, P) if of_bare < of_P else (P, summed)
    else:
        yield from (P, Table("lse", read.lse[..., None], L, "q", ROW, noise))


def _of_backward(read: Backward) -> Iterator[Table]:
    w, noise = read.weights, OFF * read.weights.noise
    rights, L = w.places.rights, w.right.lse[..., None]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        free = _weights(w.right.S, L, True)
        P = Table("P of dv", w.P, np.where(rights, free, 0.0), "q", "j", noise, SMALL, free)
        held = np.where(rights & (w.P > 0), w.right.S - np.log(w.P), np.nan)
        yield _by_rows("the lse that P of dv has", held, L, P)
        for name, of in read.slopes.items():
            free = _weights(of.S, of.L, True) * (of.slope * (of.dP - of.D))
            due = np.where(rights, free, 0.0)
            dS = Table(f"dS of {name}", of.dS, due, "q", "j", noise, free=free)
            weights = of.slope * _weights(of.S, of.L, rights)
            held = np.where(weights > SMALL, of.dP - of.dS / weights, np.nan)
            yield _by_rows(f"the D that dS of {name} has", held, of.D, dS)


def _by_rows(name: str, held: Array, due: Array, of: Table) -> Table:
    """What rows hold, where that is all that is wrong with the table ``of``: one number of every
    pair of a row, NaN of those that are not known."""
    known = np.isfinite(held)
    near = of.noise * float(np.abs(held[known]).max(initial=0.0))
    rows, right = (rows_of(np.where(known, x, np.nan), near) for x in (held, due))
    if rows is None or right is None or not known[of.off].all():
        return of
    held, due = (np.nan_to_num(x)[..., None] for x in (rows, right))
    return Table(name, held, due, of.side, ROW, of.noise)


def _weights(S: Array, L: Array, rights: Array | bool) -> Array:
    """P of scores and an lse, with the mask."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(np.nan_to_num(np.exp(np.where(rights, S, -np.inf) - L)))


def told(of: Table, question: Question) -> str:
    """What is wrong of a table, row by row, in one sequence and head; "" if nothing is."""
    within, lengths = question.sequence_of(of.side), np.add(question.lengths_q, question.lengths_k)
    rows = np.flatnonzero(of.off.any(axis=(0, 2)) & (within >= 0))
    if not rows.size:
        return ""
    b = min(within[rows], key=lambda b: lengths[b])
    rows = np.flatnonzero(within == b)
    of_head = partial(_of_head, of, question, rows)
    alike = dict[str | bytes, list[int]]()  # heads; rows that may be other ones are so by the text
    for head in map(int, np.flatnonzero(of.off[:, rows].any(axis=(1, 2)))):
        key = of_head(head) if of.columns == ROW else of.off[head, rows].tobytes()
        alike.setdefault(key, []).append(head)
    n, m = question.lengths_q[b], question.lengths_k[b]
    which = f", sequence {b} (seqlen_q {n}, seqlen_k {m})," * (question.batch > 1)
    said = list[str]()
    for heads in [*alike.values()][:HEADS]:
        name = f" of head {heads[0]}" * (len(of.off) > 1)
        name += f" ({named('head', heads[1:])} alike)" * (len(heads) > 1)
        said.append(name + f"{which} is wrong" * (not said) + of_head(heads[0]))
    more = f"; of {len(alike) - HEADS} more heads" * (len(alike) > HEADS)
    return f"{of.name}{';'.join(said)}{more}"


def _of_head(of: Table, question: Question, rows: Array, head: int) -> str:
    off, b = of.off[head, rows], question.sequence_of(of.side)[rows[0]]
    first = int(question.offsets("k")[b]) if of.columns == "j" else 0  # the column that is called 0
    kinds = {row: _kinds(of, head, int(row)) for row in rows[off.any(axis=1)]}
    every = {kind for of_row in kinds.values() for kind in of_row}
    alone = every.pop() if len(every) == 1 and len(kinds) > 1 else ""
    pieces, lists = dict[str, list[int]](), question.block_indices
    for row, of_row in kinds.items():
        columns = {kind: of.called(np.subtract(at, first)) for kind, at in of_row.items()}
        said = [f"{at} {kind}".removesuffix(alone) for kind, at in columns.items()]
        text = ", ".join(map(str.rstrip, said))
        if lists is not None and of.side == "q":
            listed = lists[row, head * lists.shape[1] // question.num_heads_q]
            text += f" (its blocks {', '.join(map(str, listed))})"
        pieces.setdefault(text, []).append(int(row - rows[0]))
    said = [f"{ROWS[of.side]} = {named('', places)}: {text}" for text, places in pieces.items()]
    said[PIECES:] = [f"... ({len(said) - PIECES} more)"] * (len(said) > PIECES)
    count = f" at {np.count_nonzero(off)} of {off.size} places" * (off.size > 1)
    few = np.flatnonzero(off.any(axis=0))
    if np.count_nonzero(off.any(axis=1)) > 2 and 2 * len(few) < off.shape[1]:
        count += f", all of {of.called(few - first)}"
    count += f", each {alone}" * bool(alone)
    return f"{count}: {'; '.join(said)}"


def _kinds(of: Table, head: int, row: int) -> dict[str, list[int]]:
    """What a row holds in its wrong columns, and in which."""
    columns = np.flatnonzero(of.off[head, row])
    if of.columns in ("column", ROW):
        return {_other_row(of, head, row, columns): columns.tolist()}
    found, due = of.found[head, row, columns], of.due[head, row, columns]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(np.abs(due) > of.noise * np.abs(due).max() + 1e-9, found / due, np.nan)
    kinds: dict[str, list[int]] = {}
    for n, column in enumerate(columns):
        alike = np.abs(ratio - ratio[n]) <= max(1e-3, of.noise) * abs(ratio[n])
        free = None if of.free is None else of.free[head, row, column]
        if of.whose and (kind := of.whose(head, row, int(column))):
            pass
        elif free is not None and due[n] == 0 and abs(found[n] - free) <= of.noise * abs(free):
            kind = "is seen"
        elif abs(found[n]) <= of.noise * abs(due[n]):
            kind = "is 0"
        elif np.count_nonzero(found == found[n]) > 2 or np.isnan(found[n]):
            kind = f"is {found[n]:.4g}"
        elif np.count_nonzero(alike) > 2 or abs(ratio[n] - np.round(ratio[n])) < of.noise:
            kind = f"is {ratio[alike].mean():.3g} times what is due"
        else:
            kind = _apart(found[n], due[n])
        kinds.setdefault(kind, []).append(int(column))
    return kinds


def _apart(found: float, due: float) -> str:
    """In as many digits as tell one from the other."""
    both = ((f"{found:.{n}g}", f"{due:.{n}g}") for n in (4, 6, 9))
    return next((f"is {x}, not {y}" for x, y in both if x != y), f"is {found:.4g}")


def _other_row(of: Table, head: int, row: int, columns: Array) -> str:
    """What a row of a result holds: another one's, or numbers that are not due anywhere."""
    found, due = of.found[head, row], of.due[head, row]
    size = np.abs(found).max(initial=0.0)
    near = np.abs(of.due - found)[..., columns].max(axis=-1) <= of.noise * size
    if not found[columns].any():
        return "is 0"
    if not np.isfinite(found[columns]).all():
        return "is not finite"
    if np.count_nonzero(near) == 1 and (of.columns != ROW or of.noise < SURE):
        h, i = map(int, np.argwhere(near)[0])
        at = [f"head {h}"] * (h != head) + [f"{ROWS[of.side]} {i - row:+d}"] * (i != row)
        return f"is that of {', '.join(at)}"
    if of.columns == ROW:
        return _apart(found[0], due[0])
    off = np.abs(found - due).max(initial=0.0)
    return f"is other numbers, by up to {off:.3g} off of {np.abs(due).max():.3g}"
