"""Bugs of block_scale in block-sparse attention: which slot it is for, what it multiplies, and what
its gradient holds."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from rawattn.check.diagnose.catalogue.second_order import of, with_values
from rawattn.check.diagnose.catalogue.sparse.lists import listed, readings
from rawattn.check.diagnose.engine.attention import (
    BACKWARD,
    FORWARD,
    STEPS,
    Bug,
    Context,
    Floats,
    See,
    Step,
    changed,
    times,
)
from rawattn.check.diagnose.engine.lists import Lists
from rawattn.check.diagnose.engine.question import STAGES, Question

ALL = tuple(STAGES)
SECOND, JVP = ("second",), ("jvp",)
GRADIENTS = ("dG", "gG")  # of the gate, by the names of steps


def bugs(question: Question, different: Callable[[See], bool]) -> Iterator[Bug]:
    """Every bug of the catalogue that can matter for the question."""
    yield from _gradients(question)
    if np.any(np.asarray(question.block_scale) != 1):
        yield from _ungated()
    yield from _other_factors(question, different)
    yield from _on_p(question)


# ---- its gradient, and where it is left out ---------------------------------------------------


def _gradients(question: Question) -> Iterator[Bug]:
    name, none = "sparse-gate-gradient-missing", {name: _nothing for name in GRADIENTS}
    for stages in (BACKWARD, SECOND):  # each alone, too
        yield Bug(name, "", stages, steps=none)
    if question.tblock_scale is not None:
        text = "its direction ignored"
        E, tdY = ({step: with_values(step, tG=lambda c: 0.0)} for step in ("E", "tdY"))
        yield Bug(name, text, JVP, steps=E)
        yield from of(
            name,
            SECOND,
            {
                text: E | tdY,
                f"{text}, gblock_scale = 0": E | tdY | {"gG": _nothing},
                f"{text} in E": E,
                f"{text} in the tangent of dY": tdY,
                "dS o tY of gblock_scale": {"gG": lambda c: c.tdS * c.Y},
                "tdS o Y of gblock_scale": {"gG": lambda c: c.dS * c.tY},
            },
        )
    heads = question.num_heads_q // np.asarray(question.block_indices).shape[1]
    if heads > 1:
        for text, share in {
            "the last head": np.arange(heads) == heads - 1,
            "the first head": np.arange(heads) == 0,
            "the mean": np.full(heads, 1 / heads),
        }.items():
            steps = {name: _shared(name, share) for name in GRADIENTS}
            yield Bug("sparse-gate-not-summed", text, BACKWARD + SECOND, steps=steps)
    if not math.isclose(question.scale, 1.0):
        for text, factor in (("without", 1 / question.scale), ("twice", question.scale)):
            scaled = {name: _shared(name, np.array([factor])) for name in GRADIENTS}
            yield Bug("output-scale", f"dblock_scale, {text}", BACKWARD + SECOND, steps=scaled)


def _nothing(c: Context) -> Floats:
    return np.zeros_like(c.P)


def _shared(name: str, share: np.ndarray) -> Step:
    """Of the heads of a selection these shares of the gradient."""

    def step(c: Context) -> Floats:
        of_head = share[c.view.heads % len(share)]
        return np.asarray(of_head[:, None, None] * STEPS[name](c))

    return step


def _ungated() -> Iterator[Bug]:
    S, dY, E, tdY = ({name: with_values(name, G=lambda c: 1.0)} for name in ("S", "dY", "E", "tdY"))
    fixed = {name: with_values(name, G=lambda c: 1.0, tG=lambda c: 0.0) for name in ("E", "tdY")}
    everywhere, nothing = S | dY | fixed, {name: _nothing for name in GRADIENTS}
    name, beyond = "sparse-gate-ignored", BACKWARD + SECOND + JVP
    yield Bug(name, "everywhere", ALL, steps=everywhere)
    text = "everywhere, and its gradient is 0"
    yield Bug(name, text, BACKWARD + SECOND, steps=everywhere | nothing)
    yield Bug(name, "in the scores alone", beyond, steps=S)
    yield Bug(name, "in dY alone", BACKWARD + SECOND, steps=dY | tdY)
    yield Bug(name, "in E alone", SECOND + JVP, steps=E)
    yield Bug(name, "in the tangent of dY alone", SECOND, steps=tdY)


# ---- which slot -------------------------------------------------------------------------------

_LAST = np.iinfo(np.int64).max
ORDERS: dict[str, Callable[[Lists], np.ndarray]] = {  # numbers by which slots are sorted
    "blocks ascending": lambda x: x.named,
    "blocks ascending, padding last": lambda x: np.where(x.is_block, x.named, _LAST),
    "blocks ascending, repeats and padding last": lambda x: np.where(
        x.exists & (x.number == 0), x.named, _LAST
    ),
    "blocks descending": lambda x: -x.named,
    "padding last": lambda x: np.where(x.is_block, 0, 1),
    "slots reversed": lambda x: -np.arange(x.named.shape[2]) + 0 * x.named,
}
NUMBERS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {  # slots, by the block's number
    "the last one for those behind": np.minimum,
    "modulo their number": lambda block, last: block % (last + 1),
    "1 for those behind": lambda block, last: np.where(block <= last, block, -1),
    "on in memory for those behind": lambda block, last: block,
}


def _other_factors(question: Question, different: Callable[[See], bool]) -> Iterator[Bug]:
    """Named blocks in another order than their factors, or factors read elsewhere."""
    name = "sparse-gate-order"
    for text, order in ORDERS.items():
        for when, before in (("", True), (", then counted", False)):
            if different(see := listed(partial(_reordered, order, before))):
                yield Bug(name, f"{text}{when}", ALL, see=see)
    x = np.asarray(question.block_scale)
    for text, place in NUMBERS.items() if x.shape[2] else ():
        text = f"by the block's number in place of the slot's, {text}"
        yield Bug(name, text, ALL, steps=_with_gate(x, place))
    of_axes = {text: read for text, read in readings(question).items() if "int64" not in text}
    of_axes["of the first head"] = lambda x: np.broadcast_to(x[:, :1], x.shape)
    of_axes["of the first slot"] = lambda x: np.broadcast_to(x[..., :1], x.shape)
    for text, read in of_axes.items():
        if not np.array_equal(read(x), x):
            yield Bug("input-layout", f"block_scale, {text}", ALL, steps=_with_gate(read(x)))


def _reordered(order: Callable[[Lists], np.ndarray], counted_before: bool, x: Lists) -> Lists:
    """The blocks of the sorted list, and the factors of slots in the order that was given."""
    moved = np.argsort(order(x), axis=2, kind="stable")
    named, counted = (np.take_along_axis(of, moved, 2) for of in (x.named, x.counted))
    return replace(x, named=named, counted=counted if counted_before else x.counted)


def _with_gate(
    scale: np.ndarray, place: Callable[[np.ndarray, int], np.ndarray] | None = None
) -> dict[str, Step]:
    """Another array for block_scale, or another slot by the number of the key's block, from the
    scores on."""

    def S(c: Context) -> Floats:
        view, question = c.view, c.question
        if view.slot is None:  # of the sliding branch
            return np.asarray(STEPS["S"](c))
        slot = np.asarray(view.slot)
        gated = (slot >= 0) & (view.keys >= 0)
        if place is not None:
            block = (view.keys - question.cu_seqlens_k[view.sequence]) // question.block_size
            slot = np.broadcast_to(place(np.maximum(block, 0), scale.shape[2] - 1), slot.shape)
        row = view.rows[:, None] * scale.shape[1] + np.asarray(view.selections)[:, None, None]
        at = np.clip(row * scale.shape[2] + slot, 0, max(scale.size - 1, 0))
        found = scale.reshape(-1)[at].astype(np.float64)
        c.G = np.where(gated & (slot >= 0), found, 1.0)
        return np.asarray(STEPS["S"](c))

    return {"S": S}


# ---- what it multiplies -----------------------------------------------------------------------


def _on_p(question: Question) -> Iterator[Bug]:
    """block_scale as a factor of P, and otherwise than as a factor of the scores."""
    name, both = "sparse-gate-on-p", FORWARD + BACKWARD
    ungated = {"S": with_values("S", G=lambda c: 1.0)}
    in_tangent: dict[str, Step] = {"E": lambda c: c.tY, "tO": _tangent_of_out}
    alone: dict[str, Step] = {"dY": lambda c: c.dS, "dG": _through_p}
    yield Bug(name, "P V alone", both, steps=ungated | ON_P | alone)
    yield Bug(name, "P V alone", JVP, steps=ungated | {"O": ON_P["O"]} | in_tangent)
    lse: dict[str, Step] = {"L": lambda c: STEPS["softmax"](changed(c, S=STEPS["S"](c)))[0]}
    yield Bug(name, "P V alone, lse of gated scores", FORWARD, steps=ungated | ON_P | lse)
    too: dict[str, Step] = {"dG": lambda c: STEPS["dG"](c) + _through_p(c)}
    yield Bug(name, "the scores and P V", both, steps=ON_P | too)
    scale = np.asarray(question.block_scale)
    for text, steps in SCORES.items():
        if text != "P before the row sum" or (scale.size and (scale > 0).all()):
            yield Bug(name, text, both, steps=steps)


def _through_p(c: Context) -> Floats:
    return np.asarray(c.P * times(c.dO, c.V.T))


def _tangent_of_out(c: Context) -> Floats:
    tP = c.G * c.P * (c.tY - c.e[..., None]) + c.tG * c.P
    return np.asarray(c.r(times(c.o(tP), c.V) + times(c.o(c.G * c.P), c.tV)))


ON_P: dict[str, Step] = {
    "O": lambda c: c.r(times(c.o(c.G * c.P), c.V)),
    "dP": lambda c: c.r(c.G * c.r(times(c.dO, c.V.T))),
    "dV": lambda c: c.r(c.o(c.G * c.P).swapaxes(1, 2) @ c.dO),
}


def _scores(score: Step) -> Step:
    def S(c: Context) -> Floats:
        with np.errstate(divide="ignore"):
            return np.where(c.W > 0, c.r(score(c)) + np.log(c.W), -np.inf)

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
