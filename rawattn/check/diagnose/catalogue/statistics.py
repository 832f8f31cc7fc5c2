"""Bugs of row statistics: lse, delta and dlse, and the sums of the softmax, of other rows."""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import numpy as np

from rawattn.check.diagnose.catalogue import reading
from rawattn.check.diagnose.catalogue.operands import TILES, Index, in_tile, row_indices
from rawattn.check.diagnose.engine.attention import (
    BACKWARD,
    FORWARD,
    STEPS,
    Bug,
    Context,
    Floats,
    Step,
    View,
    changed,
)
from rawattn.check.diagnose.engine.question import Question

FRAGMENTS = (
    "the division of out at the end: which row of a fragment the row sum in a register belongs to "
    "(lse itself is stored rightly)"
)
ALONG_KEYS = (
    "the transposed tile S^T of the kernel of dk and dv: lse and delta belong to its columns, the "
    "queries, and not to its rows, the keys"
)
SIZES = (8, *TILES)
Place = Callable[[View], tuple[np.ndarray, np.ndarray]]  # heads (n, 1) and rows, -1 for none


def _rows(question: Question) -> Iterator[tuple[str, Place]]:
    """Other rows of the same head."""
    offsets = np.asarray(question.cu_seqlens_q).astype(np.int64)

    def of(index: Index, by: int | None = 0) -> Place:
        def place(view: View) -> tuple[np.ndarray, np.ndarray]:
            b = view.sequence
            start = 0 if by is None else offsets[np.clip(b + by, 0, question.batch)]
            return view.heads[:, None], start + index(view.rows - offsets[b])

        return place

    def same(i: np.ndarray) -> np.ndarray:
        return i

    yield "without the offset of the sequence", of(same, None)
    yield "the offset of the next sequence", of(same, 1)
    yield "the offset of the previous sequence", of(same, -1)
    for text, index in row_indices().items():
        yield text, of(index)
    for tile in TILES:
        yield f"row i % {tile}", of(partial(in_tile, tile))


def _heads(question: Question) -> Iterator[tuple[str, Place]]:
    """The same row of other heads."""
    heads = question.num_heads_q
    own = np.arange(heads)
    found = {
        "the next head": (own + 1) % heads,
        "the head before": (own - 1) % heads,
        "the first head": 0 * own,
        "the key/value head": own // question.group,
        "the first head of the group": own // question.group * question.group,
        "head h % num_heads_kv": own % question.num_heads_kv,
    }

    def of(to: np.ndarray) -> Place:
        return lambda view: (to[view.heads][:, None], view.rows)

    for text, to in found.items():
        yield text, of(to)


def _flat(question: Question) -> Iterator[tuple[str, Place]]:
    """What an index of another layout finds in memory of (num_heads_q, total_q)."""
    heads, total, batch = question.num_heads_q, len(question.q), question.batch
    longest = max(question.lengths_q, default=0)
    offsets = np.asarray(question.cu_seqlens_q).astype(np.int64)
    forms: dict[str, Callable[[int, int, np.ndarray, np.ndarray], np.ndarray]] = {
        "(batch, heads, longest)": lambda b, n, h, i: (b * heads + h) * longest + i,
        "(heads, batch, longest)": lambda b, n, h, i: (h * batch + b) * longest + i,
        "(heads, length) of each sequence": lambda b, n, h, i: offsets[b] * heads + h * n + i,
        "(heads, longest)": lambda b, n, h, i: h * longest + offsets[b] + i,
    }

    def of(form: Callable[[int, int, np.ndarray, np.ndarray], np.ndarray]) -> Place:
        def place(view: View) -> tuple[np.ndarray, np.ndarray]:
            b = view.sequence
            index = form(b, len(view.rows), view.heads[:, None], view.rows - offsets[b])
            inside = (index >= 0) & (index < heads * total)
            return np.where(inside, index // total, -1), np.where(inside, index % total, -1)

        return place

    for text, form in forms.items():
        yield f"{text} for (heads, total)", of(form)


def misplaced(question: Question, right: Collection[str]) -> Iterator[Bug]:
    sets: list[tuple[str, ...]] = [("delta",)]
    sets += [("dlse",)] * (question.dlse is not None)
    if "dv" not in right:
        sets += [("lse",), ("lse", "delta")]
    for text, place in (*_rows(question), *_heads(question), *_flat(question)):
        for names in sets:
            steps = _at_places(names, place)
            form = f"{' and '.join(names)}: {text}"
            yield Bug("statistics-misplaced", form, BACKWARD, steps=steps)


def _at_places(names: Sequence[str], place: Place) -> dict[str, Step]:
    def at(c: Context, x: Floats) -> Floats:
        heads, rows = np.broadcast_arrays(*place(c.view))
        inside = (heads >= 0) & (heads < x.shape[0]) & (rows >= 0) & (rows < x.shape[1])
        found = np.asarray(x[np.where(inside, heads, 0), np.where(inside, rows, 0)])
        return np.where(inside, found, 0.0).astype(np.float64)

    def bP(c: Context) -> Floats:
        return np.asarray(STEPS["bP"](changed(c, L=at(c, c.given[1]))))

    def D(c: Context) -> Floats:
        if "delta" in names:
            return at(c, reading.delta_of(c))
        return np.asarray(STEPS["D"](changed(c, dL=at(c, c.question.dlse))))

    steps: dict[str, Step] = {}
    if "lse" in names:
        steps["bP"] = bP
    if "delta" in names or "dlse" in names:
        steps["D"] = D
    return steps


def other_sums() -> Iterator[Bug]:
    """out divided by the row sum of another row, each relative to the maximum of its own."""
    for text, index in row_indices().items():
        for name in ("row sum", "lse"):
            steps = {"O": _by_another(index, name == "lse")}
            form = f"out is divided by the {name} of another row: {text}"
            yield Bug("statistics-misplaced", form, FORWARD, None, steps, None, FRAGMENTS)


def _by_another(index: Index, by_lse: bool) -> Step:
    def O(c: Context) -> Floats:  # noqa: E743
        n = c.S.shape[1]
        i = index(np.arange(n))
        there = np.where((i >= 0) & (i < n), i, np.arange(n))
        top = 0.0 if by_lse else np.nan_to_num(c.S.max(axis=-1, initial=-np.inf), neginf=0.0)
        logarithm = c.L - top
        with np.errstate(invalid="ignore"):
            factor = np.exp(logarithm - logarithm[:, there])
        return np.asarray(STEPS["O"](c) * factor[..., None])

    return O


# ---- a tile that is transposed ----------------------------------------------------------------


def along_keys(question: Question) -> Iterator[Bug]:
    """S^T in tiles: its rows are keys, and lse or delta of a tile are taken by the row."""
    longest = max((*question.lengths_q, *question.lengths_k), default=0)
    sizes = [size for size in SIZES if size < 2 * longest]
    for rows in sizes:
        for period in (size for size in sizes if size <= rows):
            text = f"tile of {rows} queries, by the key j % {period}"
            for names in (("lse",), ("lse", "delta"), ("delta",)):
                steps: dict[str, Step] = {}
                if "lse" in names:
                    steps["bP"] = partial(_P_by_key, rows, period)
                if "delta" in names:
                    steps["dS"] = partial(_dS_by_key, rows, period)
                form = f"{' and '.join(names)} of the {text}"
                yield Bug("statistics-misplaced", form, BACKWARD, None, steps, None, ALONG_KEYS)


def _by_key(rows: int, period: int, x: Floats, keys: int, past: float) -> Floats:
    """Numbers of rows (heads, n), of the row of its tile that a pair's key counts: (heads, n, m);
    ``past`` the end of the sequence."""
    n = x.shape[1]
    row = np.arange(n)[:, None] // rows * rows + np.arange(keys)[None, :] % period
    return np.where(row < n, x[:, np.minimum(row, n - 1)], past)


def _P_by_key(rows: int, period: int, c: Context) -> Floats:
    L = np.where(np.isneginf(c.L), np.inf, c.L)
    return np.asarray(c.r(np.exp(c.S - _by_key(rows, period, L, c.S.shape[2], np.inf))))


def _dS_by_key(rows: int, period: int, c: Context) -> Floats:
    return np.asarray(c.r(c.P * (c.dP - _by_key(rows, period, c.D, c.S.shape[2], 0.0))))
