"""The catalogue of bugs in the forward pass and its gradients, as kernels have them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from rawattn.check.diagnose.catalogue import options, tile_sums
from rawattn.check.diagnose.catalogue.masks import masks, neighbours
from rawattn.check.diagnose.catalogue.numbers import of_backward, of_scores
from rawattn.check.diagnose.catalogue.reading import OF_KEYS, OPERANDS, of_view
from rawattn.check.diagnose.catalogue.tiles import dead_rows, tiles
from rawattn.check.diagnose.engine.attention import BACKWARD, FIRST, TILES, Bug, View
from rawattn.check.diagnose.engine.question import Question
from rawattn.check.diagnose.engine.steps import STEPS, Context, Floats, changed

BY_REMAINDER = "h % num_heads_kv"
SUMS: dict[str, Callable[[Floats], Floats]] = {  # the gradients of a group's heads in one
    "the last": lambda x: x[-1],
    "the first": lambda x: x[0],
    "the mean": lambda x: x.mean(axis=0),
}


def bugs(question: Question) -> Iterator[Bug]:
    """Every bug of the catalogue that can matter for the question."""
    longest = max((*question.lengths_q, *question.lengths_k), default=0)
    yield from options.bugs(question)
    yield from masks(question)
    yield from neighbours(question)
    yield from bugs_anywhere(question)
    for size in (tile for tile in TILES if tile < 2 * longest):
        yield from tiles(question, size)
    yield from tile_sums.listed(question)
    yield from dead_rows(question)
    if 1 < question.num_heads_kv and 1 < question.group:
        yield Bug("gqa-reduction-map", BY_REMAINDER, BACKWARD, _by_remainder, {"Y": _with_right})


def bugs_anywhere(question: Question) -> Iterator[Bug]:
    """Those that have nothing to do with masks and tiles of keys."""
    yield from of_scores(question)
    yield from of_backward(question)
    if question.group > 1:
        if question.num_heads_kv > 1:
            yield Bug("gqa-head-map", BY_REMAINDER, FIRST, _by_remainder)
        for text, total in SUMS.items():
            steps = {"sum_heads": lambda c, total=total: total}
            yield Bug("gqa-group-not-summed", text, (*BACKWARD, "second"), steps=steps)


# ---- heads ------------------------------------------------------------------------------------


def _by_remainder(question: Question, views: tuple[View, ...]) -> Sequence[View]:
    """Query head h with key/value head h % num_heads_kv."""

    def one(view: View, i: int) -> View:
        own, heads = slice(i, i + 1), view.heads[i : i + 1]
        weight = view.weight[own] if len(view.weight) > 1 else view.weight
        slot, selections = (None if x is None else x[own] for x in (view.slot, view.selections))
        found = replace(view, heads=heads, head_kv=int(heads[0]) % question.num_heads_kv)
        return replace(found, weight=weight, slot=slot, selections=selections)

    return [one(view, i) for view in views for i in range(len(view.heads))]


def _with_right(c: Context) -> Floats:
    """The scores of the right heads, where dk and dv are of other ones."""
    own = changed(c, view=replace(c.view, head_kv=int(c.view.heads[0]) // c.question.group))
    for name in OF_KEYS:
        if (x := getattr(c.question, name)) is not None:
            setattr(c, OPERANDS[name], of_view(own, name, x))
    return np.asarray(STEPS["Y"](c))
