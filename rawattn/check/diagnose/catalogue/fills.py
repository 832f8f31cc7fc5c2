"""Masks that do not hide: masked scores that are finite numbers, and inverted masks."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from rawattn.check.diagnose.catalogue.masks import bounds, distances, longer, within
from rawattn.check.diagnose.engine.attention import (
    FIRST,
    STEPS,
    Bug,
    Context,
    Floats,
    See,
    Step,
    View,
)
from rawattn.check.diagnose.engine.question import Question

VALUES = (0.0, -1.0, 1.0, *map(float, range(-10, -1)), -20.0, -50.0)
HIDDEN = -1e9  # what is added to scores, or put in their place, where nothing shall be seen
Only = Callable[[Question, View], View]  # a view of what an inverted mask leaves
Hidden = Callable[[Context], np.ndarray]


# ---- inverted ---------------------------------------------------------------------------------


def bugs(question: Question) -> Iterator[Bug]:
    """Inverted masks, and numbers in the place of masked scores, or added to them."""
    for masked in _hidden(question):
        for x in VALUES:
            yield from _filled(x, *masked)
            yield from _added(x, *masked)
    if min(bounds(question)) < math.inf:
        for diagonal, rest in ((False, ""), (True, ", and the diagonal")):
            text = f"what the mask must hide is seen{rest}"
            yield from _where_nothing_is_left(text, partial(_inverted, diagonal))
    if len(set(question.lengths_k)) > 1:
        yield from _where_nothing_is_left("the padding alone is seen", _padding)


def _where_nothing_is_left(text: str, only: Only) -> Iterator[Bug]:
    """What rows that see nothing hold: zeros, NaN, or as if all scores were one finite number."""

    def see(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        return [only(question, view) for view in views]

    def see_if_nothing(question: Question, views: tuple[View, ...]) -> Sequence[View]:
        found = see(question, views)
        return [replace(x, weight=np.maximum(x.weight, nothing(question, x))) for x in found]

    def nothing(question: Question, view: View) -> Floats:
        weight = only(question, view).weight
        return np.array(~(weight > 0).any(axis=2, keepdims=True), dtype=np.float64)

    def dead(c: Context) -> np.ndarray:
        return np.asarray(nothing(c.question, c.view) > 0)

    def there(name: str, value: Callable[[Context], Floats | float]) -> Step:
        return lambda c: np.where(dead(c), value(c), STEPS[name](c))

    def all_ones(c: Context) -> tuple[Floats, Floats]:
        L, P = STEPS["softmax"](c)
        return np.where(dead(c)[..., 0], HIDDEN, L), np.where(dead(c), 1.0, P)

    nans: dict[str, Step] = {name: there(name, lambda c: np.nan) for name in ("O", "bP")}
    alike = {"S": there("S", lambda c: HIDDEN), "bP": there("bP", lambda c: 1 / c.S.shape[2])}
    yield Bug("mask-inverted", text, FIRST, see)
    yield Bug("mask-inverted", f"{text}, NaN where it hides all", FIRST, see, nans)
    said = f"{text}, all alike where it hides all"
    yield Bug("mask-inverted", said, FIRST, see_if_nothing, alike)
    # exp(-1e9 - lse) where lse is -1e9 too, since float32 knows no -1e9 + log(n)
    ones = {"S": alike["S"], "softmax": all_ones}
    yield Bug("mask-inverted", f"{said}, with a weight of 1", FIRST, see_if_nothing, ones)


def _inverted(diagonal: bool, question: Question, view: View) -> View:
    """The keys that the mask hides; ``diagonal``: the nearest key that it does not hide too."""
    away = distances(question, view)
    seen = (within(away, *bounds(question)) > 0) & ((away != 0) | (not diagonal))
    return replace(view, weight=np.asarray(~seen, dtype=np.float64))


def _padding(question: Question, view: View) -> View:
    more = _padded(question, view)
    return replace(more, weight=np.where(more.keys < 0, more.weight, 0.0))


def _padded(question: Question, view: View) -> View:
    after = max(question.lengths_k) - question.lengths_k[view.sequence]
    present = replace(view, keys=view.keys[view.keys >= 0])
    return longer(question, present, 0, after, zeros=True)


# ---- finite numbers ---------------------------------------------------------------------------


def _filled(x: float, text: str, see: See, hidden: Hidden) -> list[Bug]:
    """A number in the place of masked scores."""
    S: Step = lambda c: np.where(hidden(c), x, STEPS["S"](c))  # noqa: E731
    stops: Step = lambda c: np.where(hidden(c), 0.0, STEPS["dY"](c))  # noqa: E731
    said = f"{text}: {x:.4g} in the place of their scores"
    return [
        Bug("mask-fill", said, FIRST, see, {"S": S, "dY": stops}),
        Bug("mask-fill", f"{said}, with their gradients", FIRST, see, {"S": S}),
    ]


def _added(x: float, text: str, see: See, hidden: Hidden) -> list[Bug]:
    """A number that is added to masked scores, or to those of all others."""
    plus: Step = lambda c: STEPS["S"](c) + np.where(hidden(c), x, 0.0)  # noqa: E731
    minus: Step = lambda c: STEPS["S"](c) - np.where(hidden(c), 0.0, x)  # noqa: E731
    others = f"{text}: 0 is added to their scores and {-x:.4g} to all others"
    return [
        Bug("mask-fill", f"{text}: {x:.4g} is added to their scores", FIRST, see, {"S": plus}),
        Bug("mask-fill", others, FIRST, see, {"S": minus}),
    ]


def _hidden(question: Question) -> Iterator[tuple[str, See, Hidden]]:
    """What may be hidden: in words, the views with those keys too, and where they are."""
    left, right = bounds(question)
    masks, pads = min(left, right) < math.inf, len(set(question.lengths_k)) > 1

    def see(more: bool, whole: bool, _: Question, views: tuple[View, ...]) -> Sequence[View]:
        found = [_padded(question, view) if more else view for view in views]
        return [replace(x, weight=np.ones_like(x.weight)) if whole else x for x in found]

    def masked(c: Context) -> np.ndarray:
        return np.asarray(within(distances(c.question, c.view), left, right) == 0)

    def padded(c: Context) -> np.ndarray:
        return np.asarray((c.view.keys < 0)[None, None, :])

    if masks:
        yield "masked keys", partial(see, False, True), masked
    if pads and right == math.inf:
        yield "padded keys", partial(see, True, False), padded
    if pads and masks:
        both: Hidden = lambda c: masked(c) | padded(c)  # noqa: E731
        yield "masked and padded keys", partial(see, True, True), both
