"""Bugs of block_scale in block-sparse attention: which slot it is for, and what it multiplies."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from rawattn.check.diagnose.catalogue.second_order import with_values
from rawattn.check.diagnose.catalogue.sparse.lists import (
    OWN,
    Different,
    Lists,
    Walk,
    first_of,
    lists_of,
    walked,
    walking,
)
from rawattn.check.diagnose.catalogue.sparse.selection import instead
from rawattn.check.diagnose.engine.attention import (
    BACKWARD,
    FORWARD,
    STEPS,
    Bug,
    Context,
    Floats,
    Step,
    changed,
    times,
)
from rawattn.check.diagnose.engine.question import STAGES, Question

ALL = tuple(STAGES)


def bugs(question: Question) -> Iterator[Bug]:
    """Every bug of the catalogue that can matter for the question."""
    if question.sparse and question.block_scale is not None:
        yield from gates_in_other_order(question)
        yield from gates_elsewhere(question)


# ---- which slot -------------------------------------------------------------------------------


def gates_in_other_order(question: Question) -> Iterator[Bug]:
    """Named blocks in another order than their factors."""
    different = Different(question)
    for text, order in ORDERS.items():
        for when, before in (("", True), (", then counted", False)):
            walk = _reordered(order, before)
            if different(walk(lists_of(question))):
                yield Bug("sparse-gate-order", f"{text}{when}", ALL, see=instead(walking(walk)))
    yield from _by_number(question, different)
    x = np.asarray(question.block_scale)
    readings: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "(T, H, S) as (T, S, H)": _scale_axes((0, 2, 1), back=True),
        "(T, S, H) as (T, H, S)": _scale_axes((0, 2, 1), back=False),
        "(T, H, S) as (H, T, S)": _scale_axes((1, 0, 2), back=True),
        "(H, T, S) as (T, H, S)": _scale_axes((1, 0, 2), back=False),
        "of the first head": lambda x: np.broadcast_to(x[:, :1], x.shape),
        "of the first slot": lambda x: np.broadcast_to(x[..., :1], x.shape),
    }
    for text, read in readings.items():
        if not np.array_equal(read(x), x):
            yield Bug("input-layout", f"block_scale, {text}", ALL, steps=_with_gate(read))


Order = Callable[[Lists], np.ndarray]  # numbers by which slots are sorted
_LAST = np.iinfo(np.int64).max

ORDERS: dict[str, Order] = {
    "blocks ascending": lambda lists: lists.named,
    "blocks ascending, padding last": lambda lists: np.where(lists.is_block, lists.named, _LAST),
    "blocks ascending, slots that do not count last": lambda lists: np.where(
        lists.counted, lists.named, _LAST
    ),
    "blocks descending": lambda lists: -lists.named,
    "padding last": lambda lists: np.where(lists.is_block, 0, 1),
    "padding and what does not count last": lambda lists: np.where(lists.exists, 0, 1),
    "repeats and padding last": lambda lists: np.where(
        lists.exists & first_of(lists.named, lists.exists), 0, 1
    ),
    "blocks ascending, repeats and padding last": lambda lists: np.where(
        lists.exists & first_of(lists.named, lists.exists), lists.named, _LAST
    ),
    "slots reversed": lambda lists: (
        -np.broadcast_to(np.arange(lists.named.shape[2]), lists.named.shape)
    ),
}


def _reordered(order: Order, counted_before: bool) -> Walk:
    """The blocks of the sorted list, and the factors of slots in the order that was given."""

    def walk(lists: Lists) -> Lists:
        moved = np.argsort(order(lists), axis=2, kind="stable")
        named, counted = np.take_along_axis(lists.named, moved, 2), lists.counted
        if counted_before:
            counted = np.take_along_axis(counted, moved, 2)
        there = replace(lists, named=named, counted=counted).exists
        return walked(lists, there & first_of(named, there), named)

    return walk


def _by_number(question: Question, different: Different) -> Iterator[Bug]:
    """The block's number in place of the slot's; the gradient at that place, or at its own."""
    name, last = "sparse-gate-order", np.asarray(question.block_scale).shape[2] - 1
    if last < 0:
        return
    places: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "the last one for those behind": lambda block: np.minimum(block, last),
        "modulo their number": lambda block: block % (last + 1),
        "1 for those behind": lambda block: np.where(block <= last, block, OWN),
    }
    for text, place in places.items():
        for rest, own in (("", False), (", of the own block too", True)):
            if own and not question.own:
                continue
            form = f"by the block's number in place of the slot's, {text}{rest}"
            walk = _placed(place, own)
            if different(walk(lists_of(question))):
                yield Bug(name, form, ALL, see=instead(walking(walk)))
                steps = _gate_of_blocks(place, own)
                yield Bug(name, f"{form}; the gradient at its slot", ALL, steps=steps)
    text = "by the block's number in place of the slot's, on in memory for those behind"
    yield Bug(name, text, ALL, steps=_gate_of_blocks(lambda block: block, False))


def _placed(place: Callable[[np.ndarray], np.ndarray], own: bool) -> Walk:
    def walk(lists: Lists) -> Lists:
        there = (lists.slot != OWN) | own
        slot = np.where(there & (lists.block >= 0), place(lists.block), lists.slot)
        return replace(lists, slot=slot)

    return walk


def _gate_of_blocks(place: Callable[[np.ndarray], np.ndarray], own: bool) -> dict[str, Step]:
    """Factors by the number of the key's block, from the scores on."""

    def S(c: Context) -> Floats:
        view, question = c.view, c.question
        if view.slot is None:  # of the sliding branch
            return np.asarray(STEPS["S"](c))
        scale = np.asarray(question.block_scale)
        block = (view.keys - question.cu_seqlens_k[view.sequence]) // question.block_size
        slot = place(np.maximum(block, 0))
        start = (
            view.rows[None, :, None] * scale.shape[1] + np.asarray(view.selections)[:, None, None]
        )
        at = np.clip(start * scale.shape[2] + slot, 0, max(scale.size - 1, 0))
        found = scale.reshape(-1)[at].astype(np.float64)
        gated = ((np.asarray(view.slot) >= 0) | own) & (slot >= 0) & (view.keys >= 0)
        c.G = np.where(gated, found, 1.0)
        return np.asarray(STEPS["S"](c))

    return {"S": S}


def _scale_axes(order: tuple[int, int, int], back: bool) -> Callable[[np.ndarray], np.ndarray]:
    def read(x: np.ndarray) -> np.ndarray:
        if back:
            shape = tuple(x.shape[axis] for axis in order)
            return np.ascontiguousarray(x.reshape(shape).transpose(np.argsort(order)))
        return np.ascontiguousarray(x.transpose(order)).reshape(x.shape)

    return read


def _with_gate(read: Callable[[np.ndarray], np.ndarray]) -> dict[str, Step]:
    """Another array for block_scale, from the scores on."""

    def S(c: Context) -> Floats:
        view = c.view
        if view.slot is None:  # of the sliding branch
            return np.asarray(STEPS["S"](c))
        other = read(np.asarray(c.question.block_scale)).astype(np.float64)
        slot = np.asarray(view.slot)
        rows = view.rows[None, :, None]
        found = other[rows, np.asarray(view.selections)[:, None, None], np.where(slot < 0, 0, slot)]
        c.G = np.where(slot >= 0, found, 1.0)
        return np.asarray(STEPS["S"](c))

    return {"S": S}


def gates_elsewhere(question: Question) -> Iterator[Bug]:
    """block_scale as a factor of P, and otherwise than as a factor of the scores."""
    name, both = "sparse-gate-on-p", FORWARD + BACKWARD
    ungated = {"S": with_values("S", G=lambda c: 1.0)}
    in_tangent: dict[str, Step] = {"E": lambda c: c.tY, "tO": _tangent_of_out}
    alone: dict[str, Step] = {"dY": lambda c: c.dS, "dG": _through_p}
    yield Bug(name, "P V alone", both, steps=ungated | ON_P | alone)
    yield Bug(name, "P V alone", ("jvp",), steps=ungated | {"O": ON_P["O"]} | in_tangent)
    lse: dict[str, Step] = {"L": lambda c: _lse_of_gated(c)}
    yield Bug(name, "P V alone, lse of gated scores", FORWARD, steps=ungated | ON_P | lse)
    too: dict[str, Step] = {"dG": lambda c: STEPS["dG"](c) + _through_p(c)}
    yield Bug(name, "the scores and P V", both, steps=ON_P | too)
    for text, steps in SCORES.items():
        if text != "P before the row sum" or (np.asarray(question.block_scale) > 0).all():
            yield Bug(name, text, both, steps=steps)


def _through_p(c: Context) -> Floats:
    return np.asarray(c.P * times(c.dO, c.V.T))


def _tangent_of_out(c: Context) -> Floats:
    tP = c.G * c.P * (c.tY - c.e[..., None]) + c.tG * c.P
    return np.asarray(c.r(times(c.o(tP), c.V) + times(c.o(c.G * c.P), c.tV)))


def _lse_of_gated(c: Context) -> Floats:
    return np.asarray(STEPS["softmax"](changed(c, S=STEPS["S"](c)))[0])


ON_P: dict[str, Step] = {
    "O": lambda c: c.r(times(c.o(c.G * c.P), c.V)),
    "dP": lambda c: c.r(c.G * c.r(times(c.dO, c.V.T))),
    "dV": lambda c: c.r(c.o(c.G * c.P).swapaxes(1, 2) @ c.dO),
}


def _scores(of: Step) -> Step:
    def S(c: Context) -> Floats:
        with np.errstate(divide="ignore"):
            return np.where(c.W > 0, c.r(of(c)) + np.log(c.W), -np.inf)

    return S


def _added(c: Context) -> Floats | float:
    slot = c.view.slot
    return 0.0 if slot is None else np.where(np.asarray(slot) >= 0, c.G, 0.0)


SCORES: dict[str, dict[str, Step]] = {
    "twice": {
        "S": _scores(lambda c: c.G**2 * c.Y),
        "dY": lambda c: c.r(c.G**2 * c.dS),
        "dG": lambda c: 2 * c.G * c.dS * c.Y,
    },
    "P before the row sum": {
        "S": _scores(lambda c: c.Y + np.log(c.G)),
        "dY": lambda c: c.dS,
        "dG": lambda c: c.dS / c.G,
    },
    "added to the scores": {
        "S": _scores(lambda c: c.Y + _added(c)),
        "dY": lambda c: c.dS,
        "dG": lambda c: c.dS,
    },
}
