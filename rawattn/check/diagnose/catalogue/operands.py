"""Bugs of what one product reads: rows of another tile, rows or columns in another order, another
array.

They are many, since every product has two operands and every tile has rows: ``inferred.inputs``
tries them on one view, and plants those that come near.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from rawattn.check.diagnose.engine.attention import (
    BACKWARD,
    FIRST,
    FORWARD,
    STEPS,
    Bug,
    Context,
    Floats,
    Step,
    changed,
)
from rawattn.check.diagnose.engine.question import STAGES, Question

Change = Callable[[Context, Floats], Floats]  # of an operand
Index = Callable[[np.ndarray], np.ndarray]  # where row i is read
TILES = (16, 32, 64, 128)
GRADIENTS = ("dq", "dk", "dv")


class Product(NamedTuple):
    """One operand of a step. ``tensors`` depend on it. ``along``: the axis of its rows."""

    step: str
    operand: str
    tensors: tuple[str, ...]
    stages: tuple[str, ...]

    @property
    def along(self) -> int:
        return axis_of(self.operand)

    @property
    def across(self) -> int:
        """The axis of the result that an outer loop cuts into tiles."""
        return 2 if self.step in ("Y", "dP") and self.along == 1 else 1


PRODUCTS = (
    Product("Y", "K", ("out", "lse", *GRADIENTS), FIRST),
    Product("Y", "Q", ("out", "lse", *GRADIENTS), FIRST),
    Product("O", "V", ("out",), FORWARD),
    Product("dP", "V", ("dq", "dk"), BACKWARD),
    Product("dP", "dO", ("dq", "dk"), BACKWARD),
    Product("dQ", "K", ("dq",), BACKWARD),
    Product("dK", "dY", ("dk",), BACKWARD),
    Product("dK", "Q", ("dk",), BACKWARD),
    Product("dV", "P", ("dv",), BACKWARD),
    Product("dV", "dO", ("dv",), BACKWARD),
)
WORDS = {"Y": "Q K^T", "O": "P V", "dP": "dO V^T", "dQ": "dS K", "dK": "dS^T Q", "dV": "P^T dO"}
NAMES = {"Q": "q", "K": "k", "V": "v", "dO": "dout", "O": "out", "P": "P", "dY": "dS"}


def axis_of(operand: str) -> int:
    """K and V are shared by the heads of a view; the first axis of all others is that of heads."""
    return 0 if operand in ("K", "V") else 1


def candidates(
    question: Question, stage: str, wrong: Collection[str], right: Collection[str]
) -> Iterator[Bug]:
    """Those of a stage that change something ``wrong``, and nothing that is ``right``."""
    longest = max((*question.lengths_q, *question.lengths_k), default=0)
    tiles = [tile for tile in TILES if tile < longest]
    masked = question.mask_window != (-1, -1)
    for product in PRODUCTS:
        if stage not in product.stages or set(product.tensors) & set(right):
            continue
        if not set(product.tensors) & set(wrong):
            continue
        text = f"{NAMES[product.operand]} in {WORDS[product.step]}"
        for form, change in _of_rows(product.along, tiles):
            steps = _with(product, change)
            yield Bug("stale-tile", f"{text}: {form}", product.stages, steps=steps)
        for tile in tiles if masked else ():
            for other in tiles:
                for by, form in ((-1, "the tile before"), (1, "the next tile")):
                    form = f"{form}, of {tile}, of those that a tile of {other} visits"
                    steps = {product.step: _visited(product, tile, by, other)}
                    yield Bug("stale-tile", f"{text}: {form}", product.stages, steps=steps)
        if product.operand in ("Q", "K", "V", "dO"):
            for form, change in _of_places(question, product.along):
                steps = _with(product, change)
                yield Bug("input-layout", f"{text}: {form}", product.stages, steps=steps)
    if not set(right) & {"dq", "dk", "dv", "out"} or stage in ("jvp", "second"):
        for operand in ("Q", "K", "V", *("dO",) * (question.dout is not None)):
            for form, change in _of_places(question, axis_of(operand)):
                steps = _everywhere(operand, change)
                yield Bug("input-layout", f"{NAMES[operand]}: {form}", tuple(STAGES), steps=steps)
    yield from _other_arrays(question, stage, wrong)


def _with(product: Product, change: Change) -> dict[str, Step]:
    def step(c: Context) -> Floats:
        here = {product.operand: change(c, getattr(c, product.operand))}
        return np.asarray(STEPS[product.step](changed(c, **here)))

    return {product.step: step}


def _everywhere(operand: str, change: Change) -> dict[str, Step]:
    def Y(c: Context) -> Floats:
        setattr(c, operand, change(c, getattr(c, operand)))
        return np.asarray(STEPS["Y"](c))

    return {"Y": Y}


# ---- rows -------------------------------------------------------------------------------------


def taken(x: Floats, index: np.ndarray, axis: int) -> Floats:
    """``x`` along ``axis`` at ``index``, zeros where there is nothing."""
    inside = (index >= 0) & (index < x.shape[axis])
    shape = [1] * x.ndim
    shape[axis] = len(index)
    found = np.take(x, np.where(inside, index, 0), axis=axis)
    return np.asarray(np.where(inside.reshape(shape), found, 0.0))


def _of_rows(axis: int, tiles: Sequence[int]) -> Iterator[tuple[str, Change]]:
    for tile in tiles:
        for by, which in ((-tile, "the tile before"), (tile, "the next tile")):
            for edge in ("its own", "zeros", "that of the other end"):
                yield f"{which}, of {tile}; at the end {edge}", _shifted(axis, by, edge)
        yield f"always the first tile, of {tile}", _at(axis, partial(in_tile, tile))
    for form, index in row_indices().items():
        yield form, _at(axis, index)


def row_indices() -> dict[str, Index]:
    """Which row is read in place of row i, within tiles of matmul instructions."""
    found: dict[str, Index] = {}
    for bit in (1, 2, 4, 8, 16, 32, 64):
        found[f"row i ^ {bit}"] = partial(np.bitwise_xor, bit)
        found[f"row i & ~{bit}"] = partial(np.bitwise_and, ~bit)
        found[f"row i | {bit}"] = partial(np.bitwise_or, bit)
    for by in (1, -1, 8, -8):
        found[f"row i {by:+}"] = partial(np.add, by)
    for tile in (8, 16, 32, 64):
        found[f"rows of {tile} interleaved"] = partial(_interleaved, tile)
        found[f"rows of {tile} taken apart"] = partial(_taken_apart, tile)
        found[f"rows of {tile} reversed"] = partial(_reversed, tile)
    return found


def in_tile(tile: int, i: np.ndarray) -> np.ndarray:
    """Row i of a tile, as if there were no other tile."""
    return np.asarray(i % tile)


def _interleaved(tile: int, i: np.ndarray) -> np.ndarray:
    return np.asarray(i // tile * tile + i % tile // 2 + i % 2 * (tile // 2))


def _taken_apart(tile: int, i: np.ndarray) -> np.ndarray:
    half = tile // 2
    return np.asarray(i // tile * tile + i % half * 2 + i % tile // half)


def _reversed(tile: int, i: np.ndarray) -> np.ndarray:
    return np.asarray(i // tile * tile + tile - 1 - i % tile)


def _at(axis: int, of: Index) -> Change:
    return lambda c, x: taken(x, of(np.arange(x.shape[axis])), axis)


def _shifted(axis: int, by: int, edge: str) -> Change:
    def change(c: Context, x: Floats) -> Floats:
        n, tile = x.shape[axis], abs(by)
        whole = -(-n // tile) * tile
        i = np.arange(n)
        outside = (i + by < 0) | (i + by >= whole)
        other = {"its own": i, "zeros": np.full(n, -1)}.get(edge, (i + by) % whole)
        return taken(x, np.where(outside, other, i + by), axis)

    return change


def _visited(product: Product, tile: int, by: int, other: int) -> Step:
    """The tile before (or next) in the loop of each tile of ``other`` of the other side, over
    those tiles alone that have a visible pair; the first (or last) one is read rightly."""

    def step(c: Context) -> Floats:
        seen = (c.W > 0).any(axis=0)
        seen = seen if product.operand in ("K", "V") else seen.T  # (other side, this side)
        x = getattr(c, product.operand)
        i = np.arange(seen.shape[1])
        found: Floats | None = None
        for start in range(0, seen.shape[0], other):
            here = slice(start, start + other)
            visited = np.nonzero(seen[here].any(axis=0))[0] // tile
            first, last = (int(visited[0]), int(visited[-1])) if len(visited) else (0, -1)
            there = [(at >= first) & (at <= last) for at in (i // tile, i // tile + by)]
            index = np.where(there[0] & there[1], i + by * tile, i)
            operand = {product.operand: taken(x, index, product.along)}
            part = np.asarray(STEPS[product.step](changed(c, **operand)))
            if found is None:
                found = np.zeros_like(part)
            place = (slice(None),) * product.across + (here,)
            found[place] = part[place]
        return np.asarray(found)

    return step


# ---- places within tiles of an input ----------------------------------------------------------


def _of_places(question: Question, axis: int) -> Iterator[tuple[str, Change]]:
    for size in (8, 16):
        yield f"blocks of {size} by {size} transposed", _blocks_transposed(size, axis)
    for form, of in column_indices(question).items():
        yield form, _columns(of, axis)


Places = Callable[[np.ndarray, np.ndarray, int], np.ndarray]  # rows, columns, their number


def column_indices(question: Question) -> dict[str, Places]:
    """Which column of row i is read in place of column j."""
    dims = max(question.q.shape[2], question.v.shape[2])
    bits = [bit for bit in (1, 2, 4, 8, 16, 32, 64) if bit < dims]
    found: dict[str, Places] = {f"columns j ^ {bit}": partial(_other_bit, bit, -1) for bit in bits}
    for bit in bits[2:]:
        for mask in (1, 2, 4, 8):
            found[f"columns j ^ {bit} in rows with bit {mask}"] = partial(_other_bit, bit, mask)
    for chunk in (4, 8, 16):
        for modulus, shift in ((8, 0), (4, 0), (4, 1), (2, 2)):
            if chunk * modulus <= dims:
                row = f"row / {1 << shift}" if shift else "row"
                form = f"chunks of {chunk} columns ^ {row} % {modulus}"
                found[form] = partial(_swizzled, chunk, modulus, shift)
    found["columns reversed"] = lambda i, j, n: n - 1 - j
    found["halves of columns interleaved"] = lambda i, j, n: j // 2 + j % 2 * (n // 2)
    found["even columns before odd ones"] = lambda i, j, n: _even_first(j, max(n // 2, 1))
    found["one column further"] = lambda i, j, n: j + 1
    return found


def _other_bit(bit: int, mask: int, i: np.ndarray, j: np.ndarray, n: int) -> np.ndarray:
    return np.where((i & mask != 0) | (mask < 0), j ^ bit, j)


def _swizzled(
    chunk: int, modulus: int, shift: int, i: np.ndarray, j: np.ndarray, n: int
) -> np.ndarray:
    return np.asarray(j ^ (((i >> shift) % modulus) * chunk))


def _even_first(j: np.ndarray, half: int) -> np.ndarray:
    return np.asarray(j % half * 2 + j // half)


def _columns(of: Places, axis: int) -> Change:
    def change(c: Context, x: Floats) -> Floats:
        n = x.shape[-1]
        source = of(np.arange(x.shape[axis])[:, None], np.arange(n), n)
        source = np.broadcast_to(source, x.shape)
        inside = (source >= 0) & (source < n)
        return np.where(inside, np.take_along_axis(x, np.where(inside, source, 0), -1), 0.0)

    return change


def _blocks_transposed(size: int, axis: int) -> Change:
    def change(c: Context, x: Floats) -> Floats:
        n, d = x.shape[-2:]
        padded = np.zeros((*x.shape[:-2], -(-n // size) * size, -(-d // size) * size))
        padded[..., :n, :d] = x
        shape = (*x.shape[:-2], -1, size, padded.shape[-1] // size, size)
        blocks = padded.reshape(shape).swapaxes(-3, -1)
        return np.asarray(blocks.reshape(padded.shape)[..., :n, :d])

    return change


# ---- other arrays -----------------------------------------------------------------------------


def _other_arrays(question: Question, stage: str, wrong: Collection[str]) -> Iterator[Bug]:
    same = question.q.shape[2] == question.v.shape[2]
    others = {
        ("Y", "K"): ("V",) * same,
        ("Y", "Q"): ("dO", "O") * same,
        ("O", "V"): ("K",) * same,
        ("dP", "V"): ("K",) * same,
        ("dP", "dO"): ("O", *("Q",) * same),
        ("dQ", "K"): ("V",) * same,
        ("dQ", "dY"): ("P", "dP"),
        ("dK", "Q"): ("dO", "O") * same,
        ("dK", "dY"): ("P", "dP"),
        ("dV", "dO"): ("O", *("Q",) * same),
        ("dV", "P"): ("dY", "dP"),
        ("D", "dO"): ("O", *("Q",) * same),
        ("D", "O"): ("dO", *("Q",) * same),
    }
    words = WORDS | {"D": "dO . O"}
    for (step, operand), instead in others.items():
        if stage not in ("forward", "backward") or (stage == "backward" and step == "O"):
            continue
        if stage == "forward" and (step not in ("Y", "O") or operand == "Q"):
            continue
        for other in instead:
            text = f"{NAMES.get(other, other)} for {NAMES[operand]} in {words[step]}"
            steps = {step: _instead(step, operand, other)}
            yield Bug("arguments-swapped", text, (stage,), steps=steps)


def _instead(step: str, operand: str, other: str) -> Step:
    return lambda c: STEPS[step](changed(c, **{operand: getattr(c, other)}))
