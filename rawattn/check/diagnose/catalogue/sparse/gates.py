"""Bugs of block_scale in block-sparse attention: which slot it is for, what it multiplies, and what
its gradient holds."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from rawattn.check.diagnose.catalogue import maps
from rawattn.check.diagnose.catalogue.second_order import with_values
from rawattn.check.diagnose.catalogue.sparse.lists import listed
from rawattn.check.diagnose.engine.attention import BACKWARD, FIRST, Bug, See, View, per_key
from rawattn.check.diagnose.engine.lists import Lists
from rawattn.check.diagnose.engine.question import STAGES, Question
from rawattn.check.diagnose.engine.steps import STEPS, Context, Floats, Step, times

ALL = tuple(STAGES)
SECOND, JVP = ("second",), ("jvp",)
BEYOND = BACKWARD + SECOND
MISSING, IGNORED, ON_P = (f"sparse-gate-{x}" for x in ("gradient-missing", "ignored", "on-p"))
ORDER = "sparse-gate-order"
Row = tuple[str, str, tuple[str, ...], Mapping[str, Step]]


def bugs(question: Question, different: Callable[[See], bool]) -> Iterator[Bug]:
    """Every bug of the catalogue that can matter for the question."""
    scale = np.asarray(question.block_scale)
    rows = [*GRADIENTS, *(DIRECTIONS if question.tblock_scale is not None else ())]
    rows += [*_shares(question), *(LEFT_OUT if np.any(scale != 1) else ())]
    yield from (Bug(name, words, stages, steps=steps) for name, words, stages, steps in rows)
    yield from _reordered(different)
    for by in (*[*maps.heads(question)][:3], *maps.sequences(question)):  # others are of groups
        other = by.moved(maps.geometry(question, "dblock_scale"), scale)
        gated = {name: with_values(name, G=partial(_of_slots, other)) for name in GATED}
        yield Bug("sparse-lists-misread", f"block_scale, {by.words}", ALL, steps=gated)
    if (moved := question.tblock_scale) is not None:
        text = "the gate's direction is 1, not 0, for an own block that no slot names"
        read = {text: partial(_of_slots, moved)}
        for by in [*maps.heads(question)][:3]:
            other = by.moved(maps.geometry(question, "dblock_scale"), moved)
            read[f"the gate's direction, {by.words}"] = partial(_of_slots, other, none=0.0)
        for words, tG in read.items():
            elsewhere = {name: with_values(name, tG=tG) for name in ("E", "tdY")}
            yield Bug("sparse-lists-misread", words, SECOND + JVP, steps=elsewhere)
    for words, of in SLOTS.items():
        if different(see := partial(_in_slots, of)):
            gated = {name: with_values(name, G=partial(_gate_of, of)) for name in GATED}
            yield Bug(ORDER, words, ALL, steps=gated)
            yield Bug(ORDER, f"{words}, and in the gradient", ALL, see=see)
    for words, stages, steps in OTHERWISE:
        if words != EXP or (scale.size and (scale > 0).all()):
            yield Bug(ON_P, words, stages, steps=steps)


def _of_slots(scale: np.ndarray, c: Context, none: float = 1.0) -> Floats | float:
    return per_key(c.view, scale, none)


# ---- its gradient, and where it is left out ---------------------------------------------------


def _one(c: Context) -> float:
    return 1.0


def _gated(c: Context) -> Floats:
    """The scores with the gate."""
    return np.asarray(c.G * c.Y)


def _zeros(c: Context) -> Floats:
    return np.zeros_like(c.P)


NO_GRADIENT = {"dG": _zeros, "gG": _zeros}
GATED = ("S", "dY", "E", "tdY")  # what it multiplies
S, DY, E, TDY = ({name: with_values(name, G=_one)} for name in GATED)
STILL_E, STILL_TDY = ({name: with_values(name, tG=lambda c: 0.0)} for name in ("E", "tdY"))
STILL, AS_IF_1 = STILL_E | STILL_TDY, S | DY
AS_IF_1 |= {name: with_values(name, G=_one, tG=lambda c: 0.0) for name in ("E", "tdY")}
GRADIENTS: tuple[Row, ...] = (
    (ON_P, "twice in its own gradient", BACKWARD, {"dG": lambda c: c.G * c.dS * c.Y}),
    (
        ON_P,
        "twice in gblock_scale",
        SECOND,
        {"gG": with_values("gG", Y=_gated, tY=lambda c: c.G * c.tY)},
    ),
    (
        ON_P,
        "twice in its first term, tdS o Y",
        SECOND,
        {"gG": lambda c: c.G * c.tdS * c.Y + c.dS * c.tY},
    ),
    (MISSING, "", BACKWARD, NO_GRADIENT),  # each alone, too
    (MISSING, "", SECOND, NO_GRADIENT),
)
DIRECTIONS: tuple[Row, ...] = (
    (
        ON_P,
        "as a factor of its own direction in E",
        SECOND + JVP,
        {"E": with_values("E", Y=_gated)},
    ),
    (MISSING, "its direction ignored", JVP, STILL_E),
    (MISSING, "its direction ignored", SECOND, STILL),
    (MISSING, "its direction ignored in E", SECOND, STILL_E),
    (MISSING, "its direction ignored in the tangent of dY", SECOND, STILL_TDY),
    (MISSING, "dS o tY of gblock_scale", SECOND, {"gG": lambda c: c.tdS * c.Y}),
    (MISSING, "tdS o Y of gblock_scale", SECOND, {"gG": lambda c: c.dS * c.tY}),
)
LEFT_OUT: tuple[Row, ...] = (
    (IGNORED, "everywhere", ALL, AS_IF_1),
    (IGNORED, "everywhere, and its gradient is 0", BEYOND, AS_IF_1 | NO_GRADIENT),
    (IGNORED, "in the scores alone", BEYOND + JVP, S),
    (IGNORED, "in dY alone", BEYOND, DY | TDY),
    (IGNORED, "in dS ddk and dS^T ddq alone", SECOND, DY),
    (IGNORED, "in E alone", SECOND + JVP, E),
    (IGNORED, "in the tangent of dY alone", SECOND, TDY),
)


def _shares(question: Question) -> Iterator[Row]:
    """Of the heads of a selection some shares of the gradient, or more of it."""
    heads = question.num_heads_q // np.asarray(question.block_indices).shape[1]
    number = np.arange(heads)
    shares = {"the last head": number == heads - 1, "the first head": number == 0}
    shares |= {"the mean": np.full(heads, 1 / heads)}
    for text, share in shares.items() if heads > 1 else ():
        yield "sparse-gate-not-summed", text, BEYOND, _shared(share)
    if not math.isclose(question.scale, 1.0):
        for text, factor in (("without", 1 / question.scale), ("twice", question.scale)):
            yield "output-scale", f"dblock_scale, {text}", BEYOND, _shared(np.array([factor]))


def _shared(share: np.ndarray) -> dict[str, Step]:
    def step(name: str, c: Context) -> Floats:
        of_head = share[c.view.heads % len(share)]
        return np.asarray(of_head[:, None, None] * STEPS[name](c))

    return {name: partial(step, name) for name in ("dG", "gG")}


# ---- which slot -------------------------------------------------------------------------------

# for slots (heads, n, m), -1 of the own block where none names it, of so many others
Slots = Callable[[np.ndarray, int], np.ndarray]
SLOTS: dict[str, Slots] = {
    "that of the last slot for the own block": lambda slot, count: slot % count,
    "that of the first slot for the own block": lambda slot, count: np.maximum(slot, 0),
    "the next slot's": lambda slot, count: np.where(slot < 0, slot, (slot + 1) % count),
    "that of the slot before": lambda slot, count: np.where(slot < 0, slot, (slot - 1) % count),
    "that of the first slot": lambda slot, count: np.minimum(slot, 0),
}


def _in_slots(of: Slots, question: Question, views: Sequence[View]) -> Sequence[View]:
    """The same views, with factors of other slots."""
    if not views or views[0].slot is None or not question.slots:
        return views
    slots = (of(np.asarray(view.slot), question.slots) for view in views)
    return [
        replace(v, slot=np.where(v.weight > 0, x, -1)) for v, x in zip(views, slots, strict=True)
    ]


def _gate_of(of: Slots, c: Context) -> Floats | float:
    return per_key(_in_slots(of, c.question, (c.view,))[0], c.question.block_scale, 1.0)


_LAST = np.iinfo(np.int64).max
ORDERS: dict[str, Callable[[Lists], np.ndarray]] = {  # numbers by which slots are sorted
    "blocks ascending": lambda x: x.named,
    "blocks ascending, padding last": lambda x: np.where(x.is_block, x.named, _LAST),
    "padding last": lambda x: np.where(x.is_block, 0, 1),
}


def _reordered(different: Callable[[See], bool]) -> Iterator[Bug]:
    """Named blocks in another order than their factors."""
    changes = {text: partial(_sorted, order) for text, order in ORDERS.items()} | TAKEN
    for text, change in changes.items():
        if different(see := listed(change)):
            yield Bug(ORDER, text, ALL, see=see)


def _sorted(order: Callable[[Lists], np.ndarray], x: Lists) -> Lists:
    """The blocks of the sorted list, and the factors of slots in the order that was given."""
    moved = np.argsort(order(x), axis=2, kind="stable")
    named, counted = (np.take_along_axis(of, moved, 2) for of in (x.named, x.counted))
    return replace(x, named=named, counted=counted)


def _of_the_last(x: Lists) -> Lists:
    back = replace(x, named=x.named[..., ::-1], counted=x.counted[..., ::-1])
    last = (back.exists & (back.number == 0))[..., ::-1]
    return replace(x, times=np.concatenate([last, x.walked[..., -1:]], axis=2))


def _of_none(x: Lists) -> Lists:
    walked = [x.walked[..., :-1] * ~x.names_own, x.has_own.astype(np.int64)]
    named = x.names_own.any(axis=2, keepdims=True)  # it is cut as the slot that names it
    own = np.where(named, x.cut[..., :1], x.cut[..., -1:])
    cut = np.concatenate([x.cut[..., :-1], own], axis=2)
    return replace(x, times=np.concatenate(walked, axis=2), cut=cut)


TAKEN: dict[str, Callable[[Lists], Lists]] = {
    "of a block that is named twice that of the last slot": _of_the_last,
    "1 for the own block where a slot names it": _of_none,
}


# ---- what it multiplies -----------------------------------------------------------------------


def _through_p(c: Context) -> Floats:
    return np.asarray(c.P * times(c.dO, c.V.T))


EXP = "P before the row sum"
P_V: dict[str, Step] = {
    "O": lambda c: c.r(times(c.o(c.G * c.P), c.V)),
    "dP": lambda c: c.r(c.G * c.r(times(c.dO, c.V.T))),
    "dV": lambda c: c.r(c.o(c.G * c.P).swapaxes(1, 2) @ c.dO),
}
ALONE: dict[str, Step] = S | P_V | {"dY": lambda c: c.dS, "dG": _through_p}
ON_EXP: dict[str, Step] = {
    "S": with_values("S", G=_one, cap=lambda c: (c.Y + np.log(c.G),)),
    "dY": lambda c: c.dS,
    "dG": lambda c: c.dS / c.G,
}
OTHERWISE: tuple[tuple[str, tuple[str, ...], Mapping[str, Step]], ...] = (
    ("P V alone", FIRST, ALONE),
    (EXP, FIRST, ON_EXP),
)
