"""Which blocks of keys and values did every sequence read? Read off out and lse, and planted.

Keys and values that lie in pages are found by a table. With the out and lse that came out,
sum_j exp(S_ij - lse_i) (v_j, 1) = (out_i, 1) is linear in how often each page is there: least
squares tell it where no mask tells places apart, and block after block where a causal mask does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.catalogue import reading
from rawattn.check.diagnose.engine.attention import FORWARD, Bug, Floats, heads_of, sequences
from rawattn.check.diagnose.engine.question import Answers, Question
from rawattn.check.diagnose.evidence import structure

SIZES = (16, 32, 64, 128)  # keys of a page
MOST_PAGES, MOST_UNKNOWNS = 200, 500
EQUATIONS = 12  # for each unknown, at least
LEFT = 0.03  # of out may be left by the pages that are found
OPERANDS = (("k", "v"), ("v",), ("k",))
LOOK_AT = (
    "the table of pages, or what stands for it: the page of every block of keys is looked up, also "
    "of the second one of a tile, and its number is within the sequence's own row of the table"
)


class Page(NamedTuple):
    """``keys`` of a block, -1 behind the end of its sequence."""

    sequence: int
    block: int
    keys: np.ndarray


@dataclass(frozen=True)
class _Read:
    """One sequence of the first key/value head, in pages of ``size`` keys of which ``operands``
    may be others."""

    question: Question
    answers: Answers
    pages: Sequence[Page]
    size: int
    operands: tuple[str, ...]
    rows: np.ndarray
    keys: np.ndarray

    def found(self) -> list[int] | None:
        """The number of the page at every block of keys."""
        with np.errstate(all="ignore"):
            return self._in_turn() if self.question.causal else self._together()

    def _weights(self, rows: np.ndarray, keys: np.ndarray) -> Floats:
        """exp(S - lse) of rows and keys, -1 for one of zeros: (heads, rows, keys)."""
        q = self.question
        heads = heads_of(q, 0)
        K = np.where((keys < 0)[:, None], 0.0, np.asarray(q.k[keys, 0]).astype(np.float64))
        Q = np.asarray(q.q[rows[None], heads[:, None]]).astype(np.float64)
        lse = np.asarray(self.answers["lse"])[heads[:, None], rows[None]].astype(np.float64)
        return np.asarray(np.exp(q.scale * (Q @ K.T) - lse[..., None]))

    def _terms(self, rows: np.ndarray, block: int, pages: Sequence[Page]) -> Floats:
        """What pages add at the place of a block: (pages, equations)."""
        q = self.question
        own = self.keys[block * self.size : (block + 1) * self.size]
        found = []
        for page in pages:
            there = page.keys[: len(own)]
            W = self._weights(rows, there if "k" in self.operands else own)
            if q.causal:
                row, key = rows - self.rows[0], own - self.keys[0]
                W = W * (key[None, :] <= row[:, None])
            v = there if "v" in self.operands else own
            V = np.where((v < 0)[:, None], 0.0, np.asarray(q.v[v, 0]).astype(np.float64))
            found.append((W @ np.pad(V, ((0, 0), (0, 1)), constant_values=1.0)).ravel())
        return np.stack(found)

    def _wanted(self, rows: np.ndarray) -> Floats:
        out = np.asarray(self.answers["out"])[rows[None], heads_of(self.question, 0)[:, None]]
        one = np.ones((*out.shape[:2], 1))
        return np.concatenate((out.astype(np.float64), one), axis=2).ravel()

    @property
    def _count(self) -> int:
        return -(-len(self.keys) // self.size)

    def _in_turn(self) -> list[int] | None:
        """The rows of a block see none behind it."""
        chosen: list[int] = []
        for block in range(self._count):
            rows = self.rows[block * self.size : (block + 1) * self.size]
            left = self._wanted(rows)
            size = float(np.linalg.norm(left))
            for place, number in enumerate(chosen):
                left = left - self._terms(rows, place, [self.pages[number]])[0]
            errors = np.linalg.norm(left - self._terms(rows, block, self.pages), axis=1)
            best = int(np.argmin(errors))
            if not errors[best] <= LEFT * size:
                return None
            chosen.append(best)
        return chosen

    def _together(self) -> list[int] | None:
        """All whole blocks at once, with every page for the last, partial one; where a page has
        the same terms at every place, how often it is there alone is told."""
        count, full = self._count, len(self.keys) // self.size
        both = len(self.operands) == 2
        places = [0] * (full > 0) if both else list(range(full))
        unknowns = len(places) * len(self.pages)
        if unknowns > MOST_UNKNOWNS:
            return None
        of_row = self.question.group * (self.question.v.shape[2] + 1)
        most = max(16, -(-EQUATIONS * unknowns // of_row))
        rows = self.rows[:: max(1, len(self.rows) // most)]
        wanted = self._wanted(rows)
        A = np.concatenate(
            [np.zeros((0, len(wanted)))] + [self._terms(rows, p, self.pages) for p in places]
        )
        ends = self._terms(rows, full, self.pages) if count > full else np.zeros((1, len(wanted)))
        if len(wanted) < 2 * unknowns or not all(np.isfinite(x).all() for x in (A, ends, wanted)):
            return None
        gram = A @ A.T
        ridge = 1e-10 * float(np.diagonal(gram).max(initial=0.0)) + 1e-300
        often = np.linalg.solve(gram + ridge * np.eye(unknowns), A @ (wanted - ends).T)
        counts = np.rint(np.clip(often, 0, count))
        errors = np.linalg.norm(wanted - ends - counts.T @ A, axis=1)
        end = int(np.argmin(errors))
        if not errors[end] <= LEFT * np.linalg.norm(wanted):
            return None
        of_place = counts[:, end].astype(int).reshape(len(places), len(self.pages))
        if of_place.sum(axis=1).tolist() != [full if both else 1] * len(places):
            return None
        chosen = [int(np.argmax(one)) for one in of_place]
        if both and full:
            chosen = self._assigned(of_place[0], full)
        return chosen + [end] * (count > full)

    def _assigned(self, counts: np.ndarray, full: int) -> list[int]:
        """Pages that belong to a block there, the others where nothing is yet."""
        own = self.question.sequence_of("k")[self.keys[0]]
        left = counts.copy()
        chosen = [-1] * full
        for number, page in enumerate(self.pages):
            if page.sequence == own and page.block < full and left[number]:
                chosen[page.block] = number
                left[number] -= 1
        others = iter(np.repeat(np.arange(len(left)), left).tolist())
        return [next(others) if number < 0 else number for number in chosen]


def bugs(question: Question, answers: Answers) -> Iterator[Bug]:
    """Bugs in which blocks of keys or of values are others, from wrong ``out`` and ``lse``."""
    if not {"out", "lse"} <= answers.keys() or question.mask_window not in ((-1, -1), (-1, 0)):
        return
    if question.causal and question.lengths_q != question.lengths_k:
        return
    there = list(sequences(question))
    for size in SIZES:
        pages = list(_pages(question, size))
        if not 2 < len(pages) <= MOST_PAGES:
            continue
        for operands in OPERANDS:
            bug = _read(question, answers, pages, size, operands, there)
            if bug is not None:
                yield bug
                return


def _pages(question: Question, size: int) -> Iterator[Page]:
    offsets = [int(i) for i in question.cu_seqlens_k]
    for b, length in enumerate(question.lengths_k):
        for block, start in enumerate(range(0, length, size)):
            keys = np.full(size, -1)
            count = min(size, length - start)
            keys[:count] = offsets[b] + start + np.arange(count)
            yield Page(b, block, keys)
    yield Page(-1, 0, np.full(size, -1))  # a page that nobody wrote


def _read(
    question: Question,
    answers: Answers,
    pages: Sequence[Page],
    size: int,
    operands: tuple[str, ...],
    there: Sequence[tuple[int, np.ndarray, np.ndarray]],
) -> Bug | None:
    index = np.arange(len(question.k))
    said: list[str] = []
    other: list[tuple[int, int]] = []  # blocks, and of how many
    shifts: set[int | None] = set()  # by how many blocks, None for another sequence or zeros
    for b, rows, keys in sorted(there, key=lambda one: -len(one[2])):
        chosen = _Read(question, answers, pages, size, operands, rows, keys).found()
        if chosen is None:
            return None
        for block, number in enumerate(chosen):
            own = keys[block * size : (block + 1) * size]
            page = pages[number]
            if np.array_equal(page.keys[: len(own)], own):
                continue
            index[own] = page.keys[: len(own)]
            shifts.add(page.block - block if page.sequence == b else None)
            of = f"block {page.block} of sequence {page.sequence}"
            said.append(f"{of if page.sequence >= 0 else 'zeros'} for block {block} of {b}")
            other.append((block, len(chosen)))
    if not other:
        return None
    numbers = structure.named("block", np.unique([block for block, _ in other])).strip()
    some = "; ".join(said[:3]) + ("; ..." if len(said) > 3 else "")
    form = f"{' and '.join(operands)}: {len(other)} blocks of {size} keys are others, {numbers} of "
    form += f"their sequences: {some}"

    def moved(name: str, x: Floats) -> Floats:
        found = np.asarray(x).astype(np.float64)[np.maximum(index, 0)]
        return np.where((index < 0)[:, None, None], 0.0, found)

    first = {block for block, _ in other} in ({0}, {1})
    for step in (2, 4):
        if all(block % step for block, _ in other) and len(other) > 2 and not first:
            form += f"; the first of every {step} blocks is right"
            break
    else:
        if first or (len(shifts) == 1 and None not in shifts):
            return Bug("stale-tile", form, FORWARD, None, reading.rearranged(operands, moved))

    steps = reading.rearranged(operands, moved)
    return Bug("input-layout", form, FORWARD, None, steps, None, LOOK_AT)
